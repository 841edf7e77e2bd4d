# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds the attributes that a model sets to other tensors while it is traced, and refuses what a compiled program would
not do to them.

An attribute that is replaced (``self.center = 0.9 * self.center + 0.1 * mean``), a buffer or not, is an output of the
compiled program, which sets it at each call. What is put into a list or dict that stays is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.python.plain_attributes import Stores, has_symbols, is_set_plain
from retrograd.frontend.python.python_contents import is_plain
from retrograd.frontend.python.python_tables import ABSENT, torchs_own
from retrograd.frontend.python.side_effects import KEPT_REMEDY, TABLES, WHERE_KEPT, OpTrail, restored, shown
from retrograd.frontend.python.source_locations import CaptureError


@dataclass(frozen=True)
class KeptAttribute:
    """An attribute of ``module``, which is at ``path`` in the model, that the model sets at each call; ``is_buffer``
    says whether it is a buffer."""

    module: torch.nn.Module
    path: str
    name: str
    is_buffer: bool

    @property
    def qualified(self) -> str:
        """The path of the module, and the name."""
        return join(self.path, self.name)

    @property
    def table(self) -> MutableMapping[str, Any]:
        """The dict that holds it."""
        return self.module._buffers if self.is_buffer else vars(self.module)

    @property
    def value(self) -> Any:
        """The attribute's present value."""
        return self.table.get(self.name, ABSENT)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in it."""
        return tensors_in(self.value)

    def put(self, value: Any) -> None:
        """Set it, or delete it for what is absent, around ``Module.__setattr__``."""
        if value is ABSENT:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = value


@dataclass
class Containment:
    """Says what a model did to itself: ``changed`` are its attributes that were other numbers or texts before, by the
    identity of their module, and name."""

    changed: set[tuple[int, str]]
    _before: Sequence[tuple[str, torch.nn.Module, Mapping[str, Mapping[str, Any]]]]
    _known: set[int]
    _hooks: Mapping[tuple[int, str], tuple[Any, ...]] = field(default_factory=dict)
    _taken: set[tuple[int, str]] = field(default_factory=set)

    def take(self) -> list[tuple[KeptAttribute, Any]]:
        """The attributes that hold other tensors now, or none any more, each with what it was; they are not refused."""
        found = self._take_buffers()
        for kept, value, before in self._own():
            if value is not before and _is_kept(value, before):
                found.append((kept, before))
        self._taken |= {(id(kept.module), kept.name) for kept, _ in found}
        return found

    def take_plain(self, stores: Stores) -> list[tuple[KeptAttribute, Any]]:
        """The attributes that are set to plain values without tensors, each with what it was; ``stores`` are those
        that statements set."""
        return [
            (kept, before)
            for kept, value, before in self._own()
            if (id(kept.module), kept.name) not in self._taken
            and not tensors_in(before)
            and is_set_plain(value, before, (id(kept.module), kept.name) in stores)
        ]

    def does_more(self) -> bool:
        """Whether the model registers hooks or modules, or sets attributes to objects, which no program does: a flag
        that says so would stand for what is not there."""
        modules = [module for _, module, _ in self._before]
        if _hooks_of(modules) != self._hooks:
            return True
        if any(module._modules.keys() != tables["_modules"].keys() for _, module, tables in self._before):
            return True
        return any(
            value is not before and not (is_set_plain(value, before, False) or tensors_in(value) or has_symbols(value))
            for _, value, before in self._own()
        )

    def find_open(self) -> list[str]:
        """The attributes that are set to what depends on an open size, of which no program has a value."""
        return [kept.qualified for kept, value, before in self._own() if value is not before and has_symbols(value)]

    def _own(self) -> Iterator[tuple[KeptAttribute, Any, Any]]:
        """The attributes of modules that are not PyTorch's, with what they hold now and what they held."""
        for path, module, tables in self._before:
            own = torchs_own(module)
            for name, value in vars(module).items():
                if name not in own and name not in TABLES:
                    yield KeptAttribute(module, path, name, False), value, tables[""].get(name, ABSENT)

    def _take_buffers(self) -> list[tuple[KeptAttribute, Any]]:
        found = []
        for path, module, tables in self._before:
            for name, tensor in module._buffers.items():
                before = tables["_buffers"].get(name, ABSENT)
                if tensor is not before and tensor is not None and before is not ABSENT:
                    found.append((KeptAttribute(module, path, name, True), before))
        return found

    def find_set(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Where attributes and buffers hold something else now, by name, and what it is."""
        found: list[tuple[dict[str, Any], str, Any]] = []
        for _, module, tables in self._before:
            for now, then in ((vars(module), tables[""]), (module._buffers, tables["_buffers"])):
                found += [(now, name, value) for name, value in now.items() if value is not then.get(name, ABSENT)]
        return found

    def refuse_rest(self, place_of: Callable[[torch.Tensor], str]) -> None:
        """Refuse what a compiled program would not do.

        Raises:
            CaptureError: the model set an attribute to another tensor that was not taken, or keeps one elsewhere.
        """
        for path, module, tables in self._before:
            self._refuse_new_state(path, module, tables, place_of)
            for name, tensor in _attribute_tensors(module).items():
                attribute = name.partition("[")[0]
                if id(tensor) not in self._known and (id(module), attribute) not in self._taken:
                    raise CaptureError(
                        f"the model keeps a tensor in its attribute {join(path, name)!r}, where a compiled program "
                        f"puts none{place_of(tensor)}",
                        KEPT_REMEDY,
                    )

    def _refuse_new_state(
        self,
        path: str,
        module: torch.nn.Module,
        tables: Mapping[str, Mapping[str, Any]],
        place_of: Callable[[torch.Tensor], str],
    ) -> None:
        for table in ("_parameters", "_buffers"):
            for name, tensor in vars(module)[table].items():
                if tensor is not tables[table].get(name) and (id(module), name) not in self._taken:
                    where = "" if tensor is None else place_of(tensor)
                    raise CaptureError(
                        f"the model sets its {table[1:-1]} {join(path, name)!r} to another tensor{where}",
                        f"write to it in place: self.{name}.copy_(...), or self.{name} += ...; "
                        f"or use {WHERE_KEPT} sets it",
                    )


@contextlib.contextmanager
def contained(model: torch.nn.Module | None, place_of: Callable[[torch.Tensor], str]) -> Iterator[Containment]:
    """As :func:`restored`; ``place_of`` says where a tensor was computed, as a part of a sentence.

    Raises:
        CaptureError: the block set an attribute, buffer or parameter to another tensor, which was not taken, or put one
            where it is kept; a compiled program would not.
    """
    modules = [] if model is None else list(model.named_modules())
    before: list[tuple[str, torch.nn.Module, dict[str, dict[str, Any]]]] = [
        (path, module, {"": dict(vars(module))} | {name: dict(vars(module)[name]) for name in TABLES})
        for path, module in modules
    ]
    # A recurrent layer keeps a list of its parameters, which it brings up to date.
    state = [t for _, module in modules for t in (*module._parameters.values(), *module._buffers.values())]
    known = {id(t) for t in (*state, *(t for _, m in modules for t in _attribute_tensors(m).values()))}
    with restored(model) as changed:
        containment = Containment(changed, before, known, _hooks_of([module for _, module in modules]))
        yield containment
        containment.refuse_rest(place_of)


@contextlib.contextmanager
def noting_set(model: torch.nn.Module | None, found: set[tuple[int, str]]) -> Iterator[None]:
    """Add to ``found`` the attributes and buffers that the block sets to something else, by the identity of their
    module, and name."""
    modules = [] if model is None else list(model.modules())
    before = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    yield
    for module, tables in zip(modules, before, strict=True):
        for now, then in zip((vars(module), module._buffers), tables, strict=True):
            found |= {(id(module), name) for name, value in now.items() if value is not then.get(name, ABSENT)}


def is_read_again(
    call: Callable[[], Any],
    kept: Sequence[KeptAttribute],
    given: Sequence[torch.Tensor],
    put_back: Callable[[], None] = lambda: None,
) -> bool:
    """Whether a model, run twice by ``call``, reads what the first run has put into these attributes, or asks whether
    something is in them. What it is ``given`` may be among that; ``put_back`` puts back what else it has set."""
    known = {id(tensor) for tensor in given}
    trails: list[list[Any]] = []
    watched: list[torch.Tensor] = []
    for _ in range(2):
        with OpTrail(watched) as trail:
            call()
        trails.append([*trail.steps, shown([attribute.value for attribute in kept])])
        put_back()
        watched = [t for attribute in kept for t in attribute.tensors() if id(t) not in known]
    return trail.meets_watched or trails[0] != trails[1]


def tensors_of_attributes(model: torch.nn.Module | None) -> list[torch.Tensor]:
    """The tensors in attributes of the modules that are neither parameters nor buffers."""
    return [t for module in (() if model is None else model.modules()) for t in _attribute_tensors(module).values()]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a container, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_of_type(found: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether a tensor takes the place of another for a compiled program; one of an open size does not."""
    # Modes of the trace would take it for a question of the model's.
    with torch._C.DisableTorchFunction():
        sizes = all(isinstance(n, int) for n in found.shape) and tuple(found.shape) == tuple(known.shape)
        return sizes and found.dtype == known.dtype and found.device == known.device


def join(path: str, name: str) -> str:
    """The qualified name of what a module at ``path`` has."""
    return f"{path}.{name}" if path else name


def _is_kept(value: Any, before: Any) -> bool:
    """Whether an attribute that is set to it is to be set by the compiled program: it has tensors, or had some, and
    each leaf of it can be handed on."""
    leaves = pytree.tree_leaves(value)
    return bool(tensors_in(value) or tensors_in(before)) and all(
        isinstance(leaf, torch.Tensor) or leaf is None or is_plain(leaf) for leaf in leaves
    )


def _hooks_of(modules: Sequence[torch.nn.Module]) -> dict[tuple[int, str], tuple[Any, ...]]:
    """The keys of the hooks of modules, by the identity of a module, and the name of the dict."""
    return {
        (id(module), name): tuple(value)
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_hooks") and isinstance(value, dict)
    }


def _attribute_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors in the attributes of a module that are neither parameters nor buffers, and in containers there."""
    attributes = {name: value for name, value in vars(module).items() if name not in TABLES}
    keyed, _ = pytree.tree_flatten_with_path(attributes)
    # The first key is the attribute's name: ['last'][0] becomes last[0].
    return {
        str(path[0].key) + pytree.keystr(path[1:]): leaf  # type: ignore[attr-defined]
        for path, leaf in keyed
        if isinstance(leaf, torch.Tensor)
    }
