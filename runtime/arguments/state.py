# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where a compiled program finds the parameters and buffers of the model it was compiled from, at each call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from retrograd.contract.signature import KeptSpec
from retrograd.runtime.arguments.calling import ArgumentError, OtherStateError

Found = tuple[Any, Any, torch.Tensor, str]
"""A tensor in a table that ``get`` looks up, by a key of it, and where that is in words."""


class ModelState:
    """Parameters and buffers by name, looked up anew at each call, so that one that was replaced is seen.

    ``training`` is the mode that each module was compiled in, by its path. ``constants`` are tensors that the program
    holds copies of, as they were when this was made. ``find_own_hooks`` gives the keys of hooks in a module's table
    that the model registers itself when it runs, and that were registered while it was traced. ``found`` is where the
    model finds tensors beside those of its modules' own attributes. ``kept`` are attributes that a call sets.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: torch.nn.Module | Mapping[str, torch.Tensor] | None,
        training: Mapping[str, bool],
        constants: Sequence[torch.Tensor] = (),
        find_own_hooks: Callable[[Mapping[int, object]], Collection[int]] = lambda _table: (),
        found: Sequence[Found] = (),
        kept: Sequence[KeptSpec] = (),
    ) -> None:
        self._names = tuple(names)
        self._kept_specs = tuple(kept)
        self._kept = _Kept(kept, model)
        own = self._names[: len(self._names) - self._kept.count_taken]
        self._training = training
        # Inference tensors count no versions.
        self._constants = [(t, t._version, _address(t)) for t in constants if not t.is_inference()]
        # What is written through an array of NumPy's, or through .data, counts no version.
        self._contents = [piece for t in constants if not t.is_inference() for piece in _pieces(t)]
        self._known_contents = b"".join(self._contents)
        known = {id(t) for t in constants}
        self._attributes: list[Found] = [place for place in found if id(place[2]) in known]
        self._hooks: list[Mapping[int, object]] = []
        self._backward_hooks: set[int] = set()
        self._modules: list[tuple[torch.nn.Module, bool]] = []
        self._children: list[tuple[Mapping[str, torch.nn.Module | None], str, torch.nn.Module | None]] = []
        self._siblings: list[Mapping[str, torch.nn.Module | None]] = []
        self._orders: list[tuple[Mapping[str, torch.nn.Module | None], tuple[str, ...]]] = []
        # Of parameters and buffers, set or not.
        self._tables: list[Mapping[str, torch.Tensor | None]] = []
        # Places of parameters and buffers that the model does without.
        self._unset: list[tuple[Mapping[str, torch.Tensor | None], str, str]] = []
        self._places: list[tuple[Mapping[str, torch.Tensor | None], str]] = []
        if isinstance(model, torch.nn.Module):
            self._modules = [(m, training.get(path, m.training)) for path, m in model.named_modules()]
            self._hooks = [table for m in model.modules() for table in _hook_tables(m)] + _global_hook_tables()
            self._backward_hooks = {id(t) for m in model.modules() for t in (m._backward_pre_hooks, m._backward_hooks)}
            self._siblings = [m._modules for m in model.modules()]
            self._children = [
                (siblings, name, child) for siblings in self._siblings for name, child in siblings.items()
            ]
            self._orders = [(siblings, tuple(siblings)) for siblings in self._siblings if len(siblings) > 1]
            self._places = [_place(model, name) for name in own]
            kept_names = {spec.qualified for spec in kept}
            self._unset = [
                (table, path, name)
                for table, path, name in _state_places(model)
                if table[name] is None and path not in kept_names
            ]
            _refuse_more_state(model, {*own, *kept_names})
            own_places = {(id(table), name) for table, name in self._kept.places}
            self._attributes += [
                found for found in _find_attributes(model, known) if (id(found[0]), found[1]) not in own_places
            ]
            self._tables = [table for m in model.modules() for table in (m._parameters, m._buffers)]
        elif model is not None:
            missing = [name for name in self._names if name not in model]
            if missing:
                raise ArgumentError(
                    f"no tensor for parameter or buffer {missing[0]!r} in the mapping given as model; add it"
                )
            self._places = [(model, name) for name in own]
        self._table_size = sum(map(len, self._tables))
        self._find_own_hooks = find_own_hooks
        self._note_hooks()

    def of(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> ModelState:
        """The same, of another model.

        Raises:
            ArgumentError: a parameter or buffer is missing.
        """
        state = ModelState(self._names, model, self._training, kept=self._kept_specs)
        state._constants = self._constants
        state._contents, state._known_contents = self._contents, self._known_contents
        return state

    def tensors(self) -> list[torch.Tensor | None]:
        """The tensors as they are now, in the program's order.

        Raises:
            OtherStateError: its mode is another one.
            ArgumentError: no model was given, or it has changed in what the program was compiled for: its modules,
                their hooks, or a tensor that is part of the program.
        """
        if len(self._places) != len(self._names) - self._kept.count_taken or not self._kept.is_bound:
            raise ArgumentError(
                f"the program has {len(self._names)} parameters and buffers: load it with model=..., or bind(model)"
            )
        for siblings, name, child in self._children:
            if siblings.get(name) is not child:
                raise ArgumentError(f"the module {name!r}, a {type(child).__name__}, was replaced; compile again")
        if sum(map(len, self._siblings)) != len(self._children):
            raise ArgumentError(f"the module {self._find_added()!r} was added to the model; compile again")
        for siblings, order in self._orders:
            if tuple(siblings) != order:
                raise ArgumentError(f"the modules {', '.join(order)} are in another order now; compile again")
        for module, training in self._modules:
            if module.training is not training:
                mode = "train" if training else "eval"
                raise OtherStateError(
                    f"compiled in {mode} mode, and {type(module).__name__} no longer is; "
                    f"call .{mode}() or compile again"
                )
        if sum(map(len, self._hooks)) != self._hook_count or any(
            tuple(table.items()) != items for table, items in self._hook_items
        ):
            self._check_hooks()
        if sum(map(len, self._tables)) != self._table_size:
            raise ArgumentError("parameters or buffers were added to the model, or removed; compile again")
        for place, path, name in self._unset:
            if place.get(name) is not None:
                raise ArgumentError(f"the model had no {path!r} when it was compiled, and has one now; compile again")
        for attributes, name, constant, path in self._attributes:
            if attributes.get(name) is not constant:
                raise ArgumentError(
                    f"the tensor {path!r}, which the model reads, was replaced; "
                    "register it as a buffer or pass it as an argument, or compile again"
                )
        for tensor, version, address in self._constants:
            if tensor.requires_grad:
                raise ArgumentError(
                    f"a tensor of shape {tuple(tensor.shape)} that the model reads requires grad now; register it as "
                    "a parameter or pass it as an argument, or compile again"
                )
            # An assignment to .data counts no version.
            if tensor._version != version or _address(tensor) != address:
                raise _written_to(f"a tensor of shape {tuple(tensor.shape)}")
        if b"".join(self._contents) != self._known_contents:
            raise _written_to("a tensor")
        return [*(place.get(name) for place, name in self._places), *self._kept.tensors()]

    def keep(self, values: Sequence[Any]) -> None:
        """Set the attributes that a call sets to these."""
        self._kept.put(values)

    def _note_hooks(self) -> None:
        self._hook_count = sum(map(len, self._hooks))
        self._hook_items = [(table, tuple(table.items())) for table in self._hooks if table]

    def _check_hooks(self) -> None:
        """Raise :class:`ArgumentError` for hooks that are other than they were, but for those of the model's own."""
        known = {id(table): items for table, items in self._hook_items}
        for table in self._hooks:
            items, own = known.get(id(table), ()), self._find_own_hooks(table)
            now = tuple((key, hook) for key, hook in table.items() if key not in own)
            if now == items or tuple(table.items()) == items:
                continue
            # Those of the backward are called by the tables that they are in, if they still are.
            if id(table) in self._backward_hooks and now == tuple(item for item in items if item[0] in table):
                continue
            if any(table is one for one in _global_hook_tables()):
                raise ArgumentError(
                    "a hook for all modules was added, which compiled code has no modules to call for; call the model "
                    "itself while it is there, or register it on the modules that it is for and compile again"
                )
            raise ArgumentError("hooks were added to the model's modules, or removed; compile again")
        self._note_hooks()

    def _find_added(self) -> str:
        known = {(id(siblings), name) for siblings, name, _ in self._children}
        return next(name for siblings in self._siblings for name in siblings if (id(siblings), name) not in known)


class _Kept:
    """The attributes that a call sets, in a model, or in a mapping of tensors by qualified name."""

    def __init__(self, specs: Sequence[KeptSpec], model: torch.nn.Module | Mapping[str, torch.Tensor] | None) -> None:
        self.is_bound = model is not None or not specs
        self.places: list[tuple[MutableMapping[str, Any], str]] = []
        self._taken: list[tuple[Mapping[str, Any], str, pytree.TreeSpec, str]] = []
        trees = [None if spec.taken is None else pytree.treespec_loads(spec.taken) for spec in specs]
        self.count_taken = sum(tree.num_leaves for tree in trees if tree is not None)
        for spec, tree in zip(specs, trees, strict=True) if model is not None else ():
            table, name = _table_of(spec, model)
            self.places.append((table, name))
            if tree is not None:
                self._taken.append((table, name, tree, spec.qualified))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in those that the program takes.

        Raises:
            OtherStateError: something else is in one.
        """
        found: list[torch.Tensor] = []
        for table, name, tree, qualified in self._taken:
            leaves, spec = pytree.tree_flatten(table.get(name))
            if spec != tree or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                raise OtherStateError(f"{qualified!r} holds other tensors than when it was compiled; compile again")
            found += leaves
        return found

    def put(self, values: Sequence[Any]) -> None:
        """Set the attributes."""
        for (table, name), value in zip(self.places, values, strict=True):
            table[name] = value


def _table_of(
    spec: KeptSpec, model: torch.nn.Module | Mapping[str, torch.Tensor] | None
) -> tuple[MutableMapping[str, Any], str]:
    """Give the dict that holds an attribute, and its name there."""
    if isinstance(model, torch.nn.Module):
        owner = model.get_submodule(spec.module)
        return (owner._buffers if spec.is_buffer else vars(owner)), spec.name
    if not isinstance(model, MutableMapping):
        raise ArgumentError(f"the program sets {spec.qualified!r} at each call; give a dict, or a module, as model")
    return model, spec.qualified


def _find_attributes(model: torch.nn.Module, known: Collection[int]) -> list[Found]:
    """Where modules hold tensors of these identities as plain attributes."""
    return [
        (vars(module), name, value, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and id(value) in known
    ]


def _written_to(what: str) -> ArgumentError:
    return ArgumentError(
        f"{what} that the model reads, but that is neither parameter, buffer nor argument, was written to; make it "
        "one of these, or compile again"
    )


# Of a tensor whose contents are part of the program, so many bytes are compared at each call: in one piece, or, where
# it has more, in so many that lie apart.
_COMPARED, _PIECES = 2**14, 32


def _pieces(tensor: torch.Tensor) -> list[memoryview]:
    """The memory of a tensor, or parts of it, as it is when it is read."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel() or not _address(tensor):
        return []
    ends = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    size = (sum(ends) + 1) * tensor.element_size()
    count, length = (1, size) if size <= _COMPARED else (_PIECES, _COMPARED // _PIECES)
    starts = [(size - length) * i // max(count - 1, 1) for i in range(count)]
    memory = (ctypes.c_char * size).from_address(_address(tensor))
    return [memoryview(memory)[start : start + length] for start in starts]


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _hook_tables(module: torch.nn.Module) -> tuple[Mapping[int, object], ...]:
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def _global_hook_tables() -> list[Mapping[int, object]]:
    """The tables of hooks that run for all modules."""
    return [
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_backward_pre_hooks,
        torch_module._global_backward_hooks,
    ]


def _state_places(model: torch.nn.Module) -> Iterator[tuple[Mapping[str, torch.Tensor | None], str, str]]:
    """List, of each parameter and buffer, set or not, the table that it is in, its qualified name, and its name
    there."""
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            yield from ((table, f"{path}.{name}" if path else name, name) for name in table)


def _refuse_more_state(model: torch.nn.Module, names: Collection[str]) -> None:
    """Raise :class:`ArgumentError` where ``model`` has a parameter or buffer that is none of ``names``: what it does
    with it, the program does not."""
    known = set(names)
    for table, qualified, name in _state_places(model):
        if table[name] is not None and qualified not in known:
            raise ArgumentError(f"the model has {qualified!r}, which the one that was compiled had not; compile it")


def _place(model: torch.nn.Module, qualified: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
    path, _, name = qualified.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError as error:
        raise _lacks(qualified) from error
    for table in (owner._parameters, owner._buffers):
        if name in table:
            return table, name
    raise _lacks(qualified)


def _lacks(qualified: str) -> ArgumentError:
    message = f"the model has no parameter or buffer {qualified!r}, which the program was compiled for"
    return ArgumentError(f"{message}; give it the model that was compiled, or compile this one")
