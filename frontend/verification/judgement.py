# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether what compiled code gives is what the traced graph gives in torch, but for rounding.

Where the two are close, they agree. Where they part, the graph is run in float64, which says how far eager itself is
off, and then with every op rounded another way (:class:`Rounded`): what cancels in a sum, or decides a comparison, may
be anything within that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from retrograd.frontend.verification.first_comparison import TOLERANCES, to_double, tolerance_of
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
# The largest error of one element, over the largest element, counts as this much less than that of the norm.
_OF_LARGEST = 0.1
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


def find_difference(
    found: Sequence[Any],
    eager: Sequence[Any],
    allowed: Sequence[float],
    again: Callable[[], Iterator[Sequence[Any] | None]],
    *,
    gradients: bool = False,
) -> Difference | None:
    """The first of ``found`` that is not ``eager``'s by more than rounding explains; what is no tensor counts as right.

    ``allowed`` is the relative error that rounding explains, by result. ``again`` runs eager in other ways, as
    :func:`reruns`, and is asked only where the two part. ``gradients`` that are zero but for rounding are measured
    against the others.
    """
    places = [i for i, (a, b) in enumerate(zip(found, eager, strict=True)) if _are_tensors(a, b)]
    other = next((i for i in places if found[i].shape != eager[i].shape or found[i].dtype != eager[i].dtype), None)
    if other is not None:
        return Difference(other, float("inf"), 0.0)
    floor = 0.0
    if gradients:
        floor = _OF_OTHERS * max((_norm(eager[i]) for i in places if eager[i].is_floating_point()), default=0.0)
    suspects = [i for i in places if not error_of(found[i], eager[i], floor) <= allowed[i]]
    if not suspects:
        return None
    return _judge_again(found, eager, allowed, suspects, floor, again())


def _judge_again(
    found: Sequence[Any],
    eager: Sequence[Any],
    allowed: Sequence[float],
    suspects: Sequence[int],
    floor: float,
    again: Iterator[Sequence[Any] | None],
) -> Difference | None:
    """As :func:`find_difference`, of the ``suspects``, with what other runs of eager give, the one in float64 first."""
    precise = next(again)
    expected = eager if precise is None else precise
    own = {i: error_of(eager[i], expected[i], floor) for i in suspects}
    errors = {i: error_of(found[i], expected[i], floor) for i in suspects}
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
                own[i] = max(own[i], error_of(run[i], expected[i], floor)) if count <= SHAKES else own[i]
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
    yield _run_precise(graph_module, arguments)
    for seed in range(SHAKES + COARSE_SHAKES):
        restart()
        most: Mapping[torch.dtype, float] = {} if seed < SHAKES else _COARSE
        yield _run_shaken(graph_module, arguments, seed, most)


def _run_precise(graph_module: GraphModule, arguments: Sequence[Any]) -> Sequence[Any] | None:
    try:
        given: Sequence[Any] = _InDouble(graph_module).run(*arguments, enable_io_processing=False)
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


class _InDouble(Interpreter):
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


def error_of(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The relative error: norm of the difference over the norm of ``expected``, or ``floor`` if that is larger, or the
    same of the largest elements, which count less; infinite if shapes differ, or if infinities or NaNs are in other
    places."""
    if found.shape != expected.shape:
        return float("inf")
    a, b = (to_double(tensor) for tensor in (found, expected))
    difference = a - b
    if not bool(difference.isfinite().all()):
        same = (a == b) | (a.isnan() & b.isnan())
        finite = a.isfinite() & b.isfinite()
        if not bool((finite | same).all()):
            return float("inf")
        difference, b = difference[finite], b[finite]
    off = float(difference.norm())
    if off == 0.0:
        return 0.0
    least = max(floor, 1e-300)
    largest = float(difference.abs().max()) / max(float(b.abs().max()), least)
    return max(off / max(float(b.norm()), least), _OF_LARGEST * largest)


def allowed_errors(nodes: Sequence[Any], tolerances: Mapping[Node, float]) -> list[float]:
    """Find the error that rounding explains of each result of a graph: what its dtype is allowed, or what it is
    computed from."""
    allowed = []
    for node in nodes:
        value = node.meta.get("val") if isinstance(node, Node) else None
        own = tolerance_of(value.dtype) if isinstance(value, Tensor) else 0.0
        allowed.append(max(own, tolerances[node]) if own else own)
    return allowed


def _are_tensors(found: Any, eager: Any) -> bool:
    return isinstance(found, Tensor) and isinstance(eager, Tensor)


def _norm(tensor: Tensor) -> float:
    return float(to_double(tensor).norm())
