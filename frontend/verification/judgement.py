# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether what compiled code gives is what the traced graph gives in torch, but for rounding.

Where the two are close, they agree. Where they part, what costs least is asked first: the numbers that a comparison
hangs on, moved by rounding, and one more run of the graph, from arguments that are. What that does not explain, the
graph in float64 may, which says how far eager itself is off, and then runs with every op rounded another way
(:class:`Rounded`): what cancels in a sum, or decides a comparison, may be anything within that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from retrograd.frontend.layers.cudnn_layers import is_workspace
from retrograd.frontend.verification.distances import error_of, norm_of
from retrograd.frontend.verification.first_comparison import TOLERANCES, tolerance_of
from retrograd.frontend.verification.other_roundings import Rounded, move

# How many times eager's own distance from float64 the compiled program's may be.
SLACK = 20.0
# How often a program that seems wrong is run with other rounding.
SHAKES = 4
# How often it is run with far coarser rounding, to see which numbers that are no floats hang on it: of two that are as
# good as equal, either may be the larger.
COARSE_SHAKES = 16
# Of many numbers that are no floats so few may hang on rounding without a run that shows it: each run of a network of
# the size that people train takes seconds. Where rounding decides many, as in a deep network under autocast, each run
# has some that no other has: eager's count, and SLACK times as many are allowed.
_FEW = 1e-5
# A gradient that is zero but for rounding is measured against the others.
_OF_OTHERS = 1e-2
# Coarse rounding is off by this much of what the dtype's tolerance is, which is for many ops.
_COARSE = {dtype: max(torch.finfo(dtype).eps, 0.1 * tolerance) for dtype, tolerance in TOLERANCES.items()}

Run = Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Difference:
    """The number of the first result that differs by more than rounding explains, by how much, and how far eager itself
    is off (relative to the larger of norm and largest element)."""

    place: int
    error: float
    own: float

    def __str__(self) -> str:
        return f"it differs from eager's by {self.error:.1e} (relative; eager itself is off by {self.own:.1e})"


class FirstRuns(Protocol):
    """Runs that are asked for first where values part: they cost no more than the graph's own did."""

    def compare(self, places: Sequence[int]) -> Iterator[Sequence[Any]]:
        """The results at these places, which are no floats: as they are, then as rounding of the numbers that they hang
        on may have them; nothing where that cannot be told."""

    def move(self) -> Sequence[Any]:
        """All results, from arguments that are off by rounding."""


def find_difference(
    found: Sequence[Any],
    eager: Sequence[Any],
    allowed: Sequence[float],
    again: Callable[[], Iterator[Sequence[Any] | None]],
    *,
    gradients: bool = False,
    first: FirstRuns | None = None,
) -> Difference | None:
    """The first of ``found`` that is not ``eager``'s by more than rounding explains; what is no tensor counts as right.

    ``allowed`` is the relative error that rounding explains, by result. ``again`` runs eager in other ways, as
    :func:`reruns`, and is asked only where the two part and ``first`` does not explain it. ``gradients`` that are zero
    but for rounding are measured against the others.
    """
    # A seed that a forward saves is the CPU's where torch runs the graph, and the device's where it is compiled.
    eager = [b.to(a.device) if _are_tensors(a, b) else b for a, b in zip(found, eager, strict=True)]
    places = [i for i, (a, b) in enumerate(zip(found, eager, strict=True)) if _are_tensors(a, b)]
    other = next((i for i in places if found[i].shape != eager[i].shape or found[i].dtype != eager[i].dtype), None)
    if other is not None:
        return Difference(other, float("inf"), 0.0)
    floor = 0.0
    if gradients:
        floor = _OF_OTHERS * max((norm_of(eager[i]) for i in places if eager[i].is_floating_point()), default=0.0)
    errors = {i: _error_of(found[i], eager[i], floor) for i in places}
    suspects = [i for i in places if not errors[i] <= allowed[i]]
    if suspects and first is not None:
        suspects = _find_unexplained(found, eager, errors, suspects, floor, first)
    if not suspects:
        return None
    return _judge_again(found, eager, allowed, suspects, floor, again())


def _error_of(found: Tensor, eager: Tensor, floor: float) -> float:
    """The :func:`error_of` of a result; none for numbers that are no floats where so few differ that no run need show
    it."""
    if _hangs_on_rounding(found):
        return 0.0 if found is eager or _share_of_false(found == eager) <= _FEW else float("inf")
    return error_of(found, eager, floor)


def _find_unexplained(
    found: Sequence[Any],
    eager: Sequence[Any],
    errors: Mapping[int, float],
    suspects: Sequence[int],
    floor: float,
    first: FirstRuns,
) -> list[int]:
    """Those of the ``suspects`` that the first runs do not explain."""
    choices = [i for i in suspects if _hangs_on_rounding(found[i])]
    others = [i for i in suspects if i not in choices]
    choices = _find_undecided(found, eager, choices, first) if choices else []
    if not others:
        return choices
    moved = first.move()
    own = {i: error_of(moved[i], eager[i], floor) for i in others}
    # What is infinite says nothing.
    return sorted(choices + [i for i in others if not errors[i] <= SLACK * own[i] < float("inf")])


def _find_undecided(found: Sequence[Any], eager: Sequence[Any], choices: Sequence[int], first: FirstRuns) -> list[int]:
    """Those of the ``choices``, which are no floats, of which more elements differ than hang on rounding of the numbers
    that are compared for them."""
    runs = first.compare(choices)
    # What does not come out the same when it is computed again tells nothing.
    computed = next(runs, None) or [None] * len(choices)
    telling = [i for i, given in zip(choices, computed, strict=True) if given is not None and given.equal(eager[i])]
    alike = {i: found[i] == eager[i] for i in telling}
    undecided = telling
    while undecided and (run := next(runs, None)) is not None:
        for i in undecided:
            alike[i] |= found[i] == run[choices.index(i)]
        undecided = [i for i in undecided if _share_of_false(alike[i]) > _FEW]
    return [i for i in choices if i in undecided or i not in telling]


def _judge_again(
    found: Sequence[Any],
    eager: Sequence[Any],
    allowed: Sequence[float],
    suspects: Sequence[int],
    floor: float,
    again: Iterator[Sequence[Any] | None],
) -> Difference | None:
    """Find a difference among the ``suspects``, by what other runs of eager give, the one in float64 first."""
    precise = next(again)
    expected = eager if precise is None else precise
    # Where rounding decides whether there is a number, either is right; the rest of the result has to be all the same.
    undecided = {i: _find_parting(eager[i], expected[i]) for i in suspects}
    own = {i: _error_besides(eager[i], expected[i], floor, undecided[i]) for i in suspects}
    errors = {i: _error_besides(found[i], expected[i], floor, undecided[i]) for i in suspects}
    alike = {i: (found[i] == eager[i]) for i in suspects}
    # Where another run of eager gives what eager gave.
    again_given = {i: torch.zeros_like(alike[i]) for i in suspects}
    open_places = list(suspects)
    for count, run in enumerate(chain([precise], again)):
        if run is None:
            continue
        for i in open_places:
            if not _hangs_on_rounding(found[i]):
                # Coarse runs say nothing of numbers.
                if count > SHAKES:
                    continue
                parting = _find_parting(run[i], expected[i])
                if parting is not None:
                    before = undecided[i]
                    undecided[i] = parting if before is None else before | parting
                    errors[i] = _error_besides(found[i], expected[i], floor, undecided[i])
                own[i] = max(own[i], _error_besides(run[i], expected[i], floor, undecided[i]))
            else:
                other = run[i].to(found[i].dtype)
                alike[i] |= found[i] == other
                again_given[i] |= eager[i] == other
        few = {i: max(_FEW, SLACK * _share_of_false(again_given[i])) if count >= SHAKES else 0.0 for i in open_places}
        open_places = [
            i for i in open_places if not _is_settled(found[i], alike[i], few[i], errors[i], allowed[i], own[i])
        ]
        if not open_places:
            return None
        if count >= SHAKES and not any(map(_hangs_on_rounding, (found[i] for i in open_places))):
            # Coarse runs would change nothing.
            break
    first = open_places[0]
    return Difference(first, errors[first], own[first])


def _find_parting(run: Tensor, expected: Tensor) -> Tensor | None:
    """Where one of two runs of eager has an infinity or NaN and the other something else; ``None`` if nowhere."""
    if _hangs_on_rounding(run) or run.shape != expected.shape:
        return None
    # The precise run has a dtype of its own, in which the other's largest numbers are no infinities.
    same = (run == expected) | (run.isnan() & expected.isnan())
    parting = ~(same | (run.isfinite() & expected.isfinite()))
    return parting if parting.any() else None


def _error_besides(found: Tensor, expected: Tensor, floor: float, undecided: Tensor | None) -> float:
    if undecided is None or found.shape != expected.shape:
        return error_of(found, expected, floor)
    return error_of(found.masked_fill(undecided, 0), expected.masked_fill(undecided, 0), floor)


def _is_settled(found: Tensor, alike: Tensor, few: float, error: float, allowed: float, own: float) -> bool:
    if _hangs_on_rounding(found):
        return _share_of_false(alike) <= few
    return error <= max(allowed, SLACK * own)


def _share_of_false(truths: Tensor) -> float:
    return (truths.numel() - int(truths.sum())) / max(truths.numel(), 1)


def _hangs_on_rounding(found: Tensor) -> bool:
    """Whether its numbers are no floats: rounding may decide which they are, as in an argmax."""
    return not (found.is_floating_point() or found.is_complex())


def reruns(graph_module: GraphModule, arguments: Sequence[Any], restart: Callable[[], None]) -> Iterator[Any]:
    """Rerun the graph: yields its results in float64, ``None`` where torch has an op of it in no float64, then with
    other rounding, ``SHAKES`` times as its dtypes round and ``COARSE_SHAKES`` times coarser. ``restart`` is called
    before each run, to have random ops draw what they drew."""
    restart()
    yield run_precise(graph_module, arguments)
    for seed in range(SHAKES + COARSE_SHAKES):
        restart()
        most: Mapping[torch.dtype, float] = {} if seed < SHAKES else _COARSE
        yield _run_shaken(graph_module, arguments, seed, most)


def run_precise(graph_module: GraphModule, arguments: Sequence[Any]) -> Sequence[Any] | None:
    """The results in float64; ``None`` where torch has an op in it no float64."""
    try:
        given: Sequence[Any] = InDouble(graph_module).run(*arguments, enable_io_processing=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        # Ops of libraries for one dtype, say; other rounding tells then.
        return None
    return given


def _run_shaken(
    graph_module: GraphModule, arguments: Sequence[Any], seed: int, most: Mapping[torch.dtype, float]
) -> Sequence[Any]:
    generator = torch.Generator().manual_seed(seed)
    moved = [move(a, generator, most=most) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    with Rounded(seed, most):
        given: Sequence[Any] = graph_module(*moved)
    return given


class InDouble(Interpreter):
    """Runs a graph with all that is in floating point in float64 (complex numbers in complex128)."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _widen(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _widen(super().get_attr(target, args, kwargs))

    def run_node(self, n: Node) -> Any:
        # What ops give in a dtype of their own is widened behind them.
        return _widen(super().run_node(n))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(_wide_dtype, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wide_dtype(value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        return value
    if value.is_floating_point:
        return torch.float64
    return torch.complex128 if value.is_complex else value


def _widen(value: Any) -> Any:
    def widen(leaf: Any) -> Any:
        return leaf.to(_wide_dtype(leaf.dtype)) if isinstance(leaf, Tensor) else leaf

    return tree_map(widen, value)


def allowed_errors(nodes: Sequence[Any], tolerances: Mapping[Node, float]) -> list[float]:
    """Find the error that rounding explains of each result of a graph: what its dtype is allowed, or what it is
    computed from, and anything of what a library alone reads."""
    allowed = []
    for node in nodes:
        if isinstance(node, Node) and is_workspace(node):
            allowed.append(float("inf"))
            continue
        value = node.meta.get("val") if isinstance(node, Node) else None
        own = tolerance_of(value.dtype) if isinstance(value, Tensor) else 0.0
        allowed.append(max(own, tolerances[node]) if own else own)
    return allowed


def _are_tensors(found: Any, eager: Any) -> bool:
    return isinstance(found, Tensor) and isinstance(eager, Tensor)
