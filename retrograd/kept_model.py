# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An entry that keeps a compiled model for other processes: all that comes after it is known what the model does.

An entry is pickled. Whoever can write to the cache's folder can have this process run what he likes in any case: it
holds machine code.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from retrograd.contract.manifest import Manifest
from retrograd.contract.plan import StagePlan
from retrograd.contract.tensors import FunctionSpec
from retrograd.frontend.doors.kept_binding import KeptBinding
from retrograd.runtime.steps.islands import EagerIsland, Layout

_GETITEM, _OURS = "getitem", "retrograd.frontend."
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class _Place:
    """The number of a value: the arguments come first, then what each op gives."""

    number: int


@dataclass(frozen=True)
class KeptIsland:
    """``steps`` are ops by name with their arguments, ``results`` the numbers of what it gives; the rest is as for
    :class:`EagerIsland`."""

    steps: tuple[tuple[str, Any, Any], ...]
    results: tuple[int, ...]
    layouts: tuple[Layout, ...]
    text: str
    by_values: bool

    def open(self) -> EagerIsland:
        """The island, to be run."""
        steps = [(_find(name), args, kwargs) for name, args, kwargs in self.steps]
        function = _KeptFunction(steps, self.results, len(self.layouts))
        return EagerIsland(function, self.layouts, self.text, is_library=True, by_values=self.by_values)


def keep_islands(islands: Sequence[EagerIsland]) -> tuple[KeptIsland, ...] | None:
    """Each of the islands as data; ``None`` where one is more than ops of aten's that a library computes."""
    kept = [_keep(island) for island in islands]
    found = tuple(island for island in kept if island is not None)
    return found if len(found) == len(kept) else None


def _keep(island: EagerIsland) -> KeptIsland | None:
    module = island.function
    if not island.is_library or island.sizes or not isinstance(module, torch.fx.GraphModule):
        return None
    places: dict[torch.fx.Node, _Place] = {}
    steps: list[tuple[str, Any, Any]] = []
    results: tuple[int, ...] = ()

    def replaced(value: Any) -> Any:
        return places[value] if isinstance(value, torch.fx.Node) else value

    for node in module.graph.nodes:
        if node.op == "output":
            results = tuple(places[value].number for value in node.args[0])
            continue
        if node.op == "call_function":
            name = _name(node.target)
            args, kwargs = map_aggregate((node.args, dict(node.kwargs)), replaced)
            if name is None or not _is_plain((args, kwargs)):
                return None
            steps.append((name, args, kwargs))
        elif node.op != "placeholder":
            return None
        places[node] = _Place(len(places))
    layouts = tuple(island.layouts)
    return KeptIsland(tuple(steps), results, layouts, island.text, island.by_values)


def _name(target: Any) -> str | None:
    if target is operator.getitem:
        return _GETITEM
    if isinstance(target, OpOverload) and target.namespace == "aten":
        return f"{target._schema.name.removeprefix('aten::')}.{target._overloadname}"
    # What stands for a library's op at run time.
    name = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    return name if name.startswith(_OURS) and "<" not in name and _find(name) is target else None


def _find(name: str) -> Callable[..., Any]:
    if name == _GETITEM:
        return operator.getitem
    module, _, function = name.rpartition(":")
    packet, _, overload = name.partition(".")
    owner = import_module(module) if module else getattr(torch.ops.aten, packet)
    found: Callable[..., Any] = getattr(owner, function if module else overload)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (_Place, *_PLAIN))


class _KeptFunction:
    """Ops that were kept, as a function of tensors."""

    def __init__(
        self, steps: Sequence[tuple[Callable[..., Any], Any, Any]], results: Sequence[int], arguments: int
    ) -> None:
        self._steps, self._results, self._arguments = steps, results, arguments

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run them."""
        values: list[Any] = [*tensors]
        for call, args, kwargs in self._steps:
            given = [_fill(value, values) for value in args]
            values.append(call(*given, **{name: _fill(value, values) for name, value in kwargs.items()}))
        return tuple(values[number] for number in self._results)

    @property
    def graph(self) -> torch.fx.Graph:
        """The same as a graph."""
        graph = torch.fx.Graph()
        nodes: list[Any] = [graph.placeholder(f"value_{number}") for number in range(self._arguments)]
        for call, args, kwargs in self._steps:
            given = tuple(_fill(value, nodes) for value in args)
            nodes.append(graph.call_function(call, given, {name: _fill(v, nodes) for name, v in kwargs.items()}))
        graph.output(tuple(nodes[number] for number in self._results))
        return graph


def _fill(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, _Place):
        return values[value.number]
    if isinstance(value, tuple | list):
        return [_fill(item, values) for item in value]
    return value


@dataclass(frozen=True)
class KeptModel:
    """A compiled model as data, less its weights and its machine code.

    ``code`` is the key of the executable's own entry, ``functions`` what it has by name. ``plans`` and ``stages`` say
    how they are cut, with ``islands``; ``binding`` is what is around them. ``manifest`` describes it, and ``notes`` are
    what its user is told.

    ``checks`` are the keys under which the cache knows each function to be right, by name; ``ops`` are the names of
    the ops that it was compiled from, and ``kernels`` describes the kernels that PyTorch had for them.
    """

    code: str
    functions: Mapping[str, FunctionSpec]
    plans: Mapping[str, StagePlan]
    stages: Sequence[FunctionSpec]
    islands: Sequence[KeptIsland]
    binding: KeptBinding
    manifest: Manifest
    notes: Sequence[str]
    checks: Mapping[str, str]
    ops: Sequence[str]
    kernels: str

    def dump(self) -> bytes:
        """The kept model as bytes."""
        return pickle.dumps(self)

    @classmethod
    def read(cls, data: bytes) -> KeptModel:
        """Read what :meth:`dump` wrote."""
        found = pickle.loads(data)
        if not isinstance(found, cls):
            raise pickle.UnpicklingError("no kept model")
        return found
