# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One run of a hook as the aten ops that it called, and these again as a graph.

A hook reads tensors from anywhere: its gradient, its closure, the state of an optimizer. Which ones, and which of them
it writes to, is seen by watching it run on real tensors, as it does anyway while a backward is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.contract.roles import SAVED
from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.doors.port_roles import RuntimeInput, describe_results
from retrograd.frontend.python.source_locations import READS, CaptureError
from retrograd.frontend.python.trace_errors import capture_error
from retrograd.frontend.traceable.portable_ops import portable_ops

COLLECTIVE = "_c10d_functional"
"""Where PyTorch has the collectives that are functions of tensors."""

_WAIT = "wait_tensor"
_READS_NUMBERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _TapeTensor:
    """Stands for a tensor of the tape in the arguments of an op."""

    number: int


@dataclass
class HookTape:
    """A record of what a hook did. Tensors are known by their numbers in ``tensors``.

    ``externals`` are those that it found, in the order of first use; ``before`` has copies, as they were, of those that
    it wrote to, ``last_writes`` the numbers of the ops that wrote to these last; ``results`` what it returned, ``kept``
    how many of the tensors that it made are still alive afterwards and are no results: the state of an optimizer at its
    first step. ``collected`` are copies of what collectives gave, in the order of the waits. ``problem`` says why it
    cannot be a graph.
    """

    tensors: list[Any] = field(default_factory=list)
    externals: list[int] = field(default_factory=list)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    last_writes: dict[int, int] = field(default_factory=dict)
    ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    kept: int = 0
    collected: list[torch.Tensor] = field(default_factory=list)
    problem: str | None = None

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor; None for one that the hook has not seen."""
        return next((n for n, known in enumerate(self.tensors) if known is tensor), None)


class _Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = HookTape()
        self._numbers: dict[int, int] = {}
        # What a thread of a process group may hold for a while after it was waited for: none of it is the hook's state.
        self.sent: set[int] = set()
        # What was waited for, of PyTorch's tensors that wait when they are looked at, which are kept with it.
        self._awaited: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.when_there((args, kwargs or {}))
        taken = pytree.tree_map_only(torch.Tensor, self.stand_in, (args, kwargs))
        if any(tag in func.tags for tag in _READS_NUMBERS):
            self.refuse(f"it reads a number from a tensor ({func})")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(f"it draws random numbers ({func})")
        written = _written_tensors(func, args, kwargs)
        self._copy_before_write(written)
        result = func(*args, **kwargs)
        if "::_foreach_" in func._schema.name:
            # In a dispatch mode ops on lists leave this out, which those on one tensor do.
            torch.autograd.graph.increment_version(written)
        if func.namespace == "profiler":
            return result
        if func.namespace == COLLECTIVE and func._schema.name.endswith(f"::{_WAIT}"):
            self.tape.collected.append(result.detach().clone())
        given = pytree.tree_map_only(torch.Tensor, lambda t: self.stand_in(t, made=True), result)
        if func.namespace == COLLECTIVE:
            leaves = pytree.tree_leaves((taken, given))
            self.sent.update(leaf.number for leaf in leaves if isinstance(leaf, _TapeTensor))
        self.tape.ops.append((func, *taken, given))
        return result

    def when_there(self, values: Any) -> Any:
        """The values, with what collectives give in the place of tensors that would wait for it when they are used."""
        if not torch.distributed.is_available():
            return values
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return pytree.tree_map_only(AsyncCollectiveTensor, self._wait, values)

    def finish(self, result: Any) -> Any:
        """Waits for the hook's result and returns it; lets go of what only this has."""
        result = self.when_there(result)
        self._awaited.clear()
        return result

    def _wait(self, tensor: Any) -> torch.Tensor:
        if id(tensor) not in self._awaited:
            wait = torch.ops._c10d_functional.wait_tensor.default
            self._awaited[id(tensor)] = tensor, self.__torch_dispatch__(wait, (), (tensor.elem,))
        return self._awaited[id(tensor)][1]

    def stand_in(self, tensor: torch.Tensor, *, made: bool = False) -> _TapeTensor:
        """The place of a tensor; a new one, of an external unless the hook made it."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tape.tensors)
            # Kept, so that no other tensor gets its address while the hook runs.
            self.tape.tensors.append(tensor)
            if not made:
                self.tape.externals.append(number)
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                    self.refuse(f"it reads a {type(tensor).__name__} of layout {tensor.layout}")
        return _TapeTensor(number)

    def _copy_before_write(self, written: Sequence[torch.Tensor]) -> None:
        for tensor in written:
            storage = tensor.untyped_storage().data_ptr()
            for number in self.tape.externals:
                known = self.tape.tensors[number]
                if known.untyped_storage().data_ptr() == storage:
                    self.tape.last_writes[number] = len(self.tape.ops)
                    if number not in self.tape.before:
                        self.tape.before[number] = known.detach().clone()

    def refuse(self, problem: str) -> None:
        """Take note of why it cannot be a graph."""
        self.tape.problem = self.tape.problem or problem


class _NumberReads(TorchFunctionMode):
    """Sees tensors that become numbers of Python's or NumPy's, of which a dispatch mode sees nothing."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS or func == _VERSION:
            self._refuse(f"it reads a number from a tensor ({func.__name__})")
        return func(*args, **(kwargs or {}))


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an op writes to."""
    named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | dict(kwargs)
    written = [named.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def watch(function: Callable[..., Any], *args: Any) -> tuple[Any, HookTape]:
    """Call a function of tensors; returns what it gives, and the tape of it."""
    watcher = _Watcher()
    with watcher, _NumberReads(watcher.refuse):
        result = function(*args)
    result = watcher.finish(result)
    tape = watcher.tape
    tape.results = [
        watcher.stand_in(leaf).number for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
    ]
    others = {*tape.externals, *tape.results, *watcher.sent}
    made = [ref(t) for n, t in enumerate(tape.tensors) if n not in others]
    for number in range(len(tape.tensors)):
        if number not in tape.externals and number not in tape.results:
            tape.tensors[number] = None
    tape.kept = sum(dead() is not None for dead in made)
    return result, tape


def trace_tape(tape: HookTape, results: Sequence[int]) -> torch.fx.GraphModule:
    """The graph of a tape: from its externals to the tensors of these numbers, as they are when the hook is done.

    Raises:
        CaptureError: it did what no graph of tensors can; says what.
    """
    if tape.problem is not None:
        raise CaptureError(f"the hook cannot be inlined: {tape.problem}", "leave it in Python")

    def replay(*externals: torch.Tensor) -> list[torch.Tensor]:
        values: dict[int, torch.Tensor] = dict(zip(tape.externals, externals, strict=True))
        for func, args, kwargs, given in tape.ops:
            args, kwargs = pytree.tree_map_only(_TapeTensor, lambda it: values[it.number], (args, kwargs))
            for place, value in _pairs(given, _call(func, args, kwargs)):
                values[place.number] = value
        return [values[number] for number in results]

    mode = FakeTensorMode()
    like = [tape.tensors[n] for n in tape.externals]
    try:
        with torch.no_grad(), portable_ops(), mode:
            fake = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in like]
            traced = make_fx(dispatch_functionalize(replay), decomposition_table(), tracing_mode="fake")(*fake)
    except CaptureError:
        raise
    except Exception as error:
        raise capture_error(error) from error
    _check_waits(tape, traced.graph)
    _describe(traced)
    return traced


def waits_of(count: int) -> list[str]:
    """The names that the first so many waits of a traced tape have."""
    return [f"{_WAIT}_{number}" if number else _WAIT for number in range(count)]


def _check_waits(tape: HookTape, graph: torch.fx.Graph) -> None:
    """Refuse a graph in which waits are called otherwise than in the order of the tape."""
    found = {n.name for n in graph.nodes if n.op == "call_function" and _WAIT in str(n.target)}
    if not found.issubset(waits_of(len(tape.collected))):
        raise CaptureError("the hook cannot be inlined: it waits otherwise when it is traced", "leave it in Python")


def _pairs(places: Any, values: Any) -> list[tuple[_TapeTensor, torch.Tensor]]:
    flat = zip(pytree.tree_leaves(places), pytree.tree_leaves(values), strict=True)
    return [(place, value) for place, value in flat if isinstance(place, _TapeTensor)]


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an op; one on lists of tensors (``_foreach_add_``) as that on each of them, which the importer knows."""
    namespace, _, name = func._schema.name.partition("::_foreach_")
    if not name:
        return _call_one(func, args, kwargs)
    op = getattr(getattr(torch.ops, namespace), name)
    if name.startswith("addc") and len(args) == 4:
        # A factor that lists take by place and tensors by name.
        args, kwargs = args[:3], {"value": args[3]}
    count = next(len(a) for a in args if isinstance(a, (list, tuple)))
    parts = [
        _call_one(op, [_part(a, i) for a in args], {key: _part(a, i) for key, a in kwargs.items()})
        for i in range(count)
    ]
    return None if name.endswith("_") else parts


def _call_one(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if op in (torch.ops.aten.pow, torch.ops.aten.pow.Scalar) and not isinstance(args[0], torch.Tensor):
        # Adam's beta**step, a Python number in eager: rounded to f32, 1 - 0.999**1 has four digits left.
        return op(args[0], args[1].to(torch.float64) if args[1].dim() == 0 else args[1])
    return op(*args, **kwargs)


def _part(argument: Any, index: int) -> Any:
    return argument[index] if isinstance(argument, (list, tuple)) else argument


def _describe(traced: torch.fx.GraphModule) -> None:
    graph = traced.graph
    graph.eliminate_dead_code()
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta["desc"] = RuntimeInput(SAVED, f"taken_{number}")
    describe_results(traced, "given_")
