# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes of 1: whether a graph that was traced for many sizes is right for them too.

A size of 1 is special to PyTorch: it broadcasts, it can be squeezed, its stride is of no account. A trace for several
sizes treats it as any other, or notes as a condition that it is not 1 where a kernel merely looked at a layout. Which
of these matter no expression tells, so the graph is run: where its results at 1 are those of a graph traced at 1,
outputs and gradients alike, such conditions fall; where they are not, 1 is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from retrograd.contract.sizes import evaluate_size, holds
from retrograd.frontend.doors.capture import CapturedGraph, capture_joint
from retrograd.frontend.islands.eager_values import find_primals
from retrograd.frontend.libraries.run_as import LibraryInterpreter
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.dynamic_shapes import OpenSizes
from retrograd.frontend.verification.first_comparison import relative_error, tolerance_of

# A condition that holds for these and not for 1 says of a size that it is not 1, and no more.
_OTHERS = range(2, 66)
# Of more sizes than this, not all sets are tried: each alone, and all together.
_FEW = 2


def admit_ones(
    captured: CapturedGraph, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> CapturedGraph:
    """``captured`` with conditions that are true of sizes of 1.

    Each set of sizes that may be 1 is made 1 in ``args``, traced so, and both graphs are run on copies. The model's
    parameters and buffers are only read, and torch's default generator is as before afterwards.
    """
    sizes = captured.sizes
    small = [s.name for s in sizes.sizes if s.least <= 1]
    counts = range(1, len(small) + 1) if len(small) <= _FEW else (1, len(small))
    sets = [frozenset(names) for count in counts for names in combinations(small, count)]
    right = {names: _is_right(captured, model, args, kwargs, names) for names in sets}
    conditions = [c for c in sizes.conditions if not _only_excludes_ones(c, sizes, right)]
    for names, admitted in right.items():
        if not admitted and not any(names > other for other, fine in right.items() if not fine):
            conditions.append(_not_all_one(sorted(names)))
    return replace(
        captured,
        sizes=replace(sizes, conditions=tuple(dict.fromkeys(conditions))),
        signature=replace(captured.signature, conditions=tuple(dict.fromkeys(conditions))),
    )


def _not_all_one(names: Sequence[str]) -> Any:
    terms = [("!=", name, 1) for name in names]
    return terms[0] if len(terms) == 1 else ("or", *terms)


def _only_excludes_ones(condition: Any, sizes: OpenSizes, right: Mapping[frozenset[str], bool]) -> bool:
    """Whether a condition is about sizes of 1 alone, and the graph is right where it does not hold."""
    hints = {s.name: s.hint for s in sizes.sizes}
    failing = [names for names in right if not holds(condition, hints | dict.fromkeys(names, 1))]
    others = (holds(condition, hints | dict.fromkeys(names, n)) for names in failing for n in _OTHERS)
    return bool(failing) and all(right[names] for names in failing) and all(others)


def _is_right(
    captured: CapturedGraph,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    names: frozenset[str],
) -> bool:
    """Whether the graph gives at sizes of 1 what a graph traced at 1 gives, by a run of both."""
    given = _shrink(captured, args, kwargs or {}, names)
    if given is None:
        return False
    try:
        with ExitStack() as stack:
            fixed = capture_joint(stack, model, *given, as_in_eager=not captured.module.says_compiling)
        primals = find_primals(fixed, *given)
        expected = _run(fixed.graph_module, fixed.graph_module, primals)
        found = _run(captured.graph_module, fixed.graph_module, primals)
    except (CaptureError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        # The model itself refuses such a size, or the graph does.
        return False
    if len(found) != len(expected):
        return False
    floor = 1e-2 * max((float(e.double().norm()) for e in expected if e is not None), default=0.0)
    return all(_agree(a, b, floor) for a, b in zip(found, expected, strict=True))


def _shrink(
    captured: CapturedGraph, args: Sequence[Any], kwargs: Mapping[str, Any], names: frozenset[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with these sizes at 1; ``None`` where one would have to grow for that."""
    sizes = {s.name: 1 if s.name in names else s.hint for s in captured.sizes.sizes}
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    shrunk = []
    for leaf, expected in zip(leaves, captured.signature.inputs, strict=True):
        if not isinstance(leaf, torch.Tensor) or expected.type is None:
            shrunk.append(leaf)
            continue
        cut = leaf.detach()
        for axis, size in enumerate(expected.type.shape):
            wanted = evaluate_size(size, sizes)
            if wanted > cut.shape[axis]:
                return None
            cut = cut.narrow(axis, 0, wanted)
        shrunk.append(cut.clone().requires_grad_(leaf.requires_grad))
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(shrunk, spec)
    return arguments


def _run(graph_module: GraphModule, like: GraphModule, primals: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Run a joint graph on the primals, with the seed and the tangents that ``like`` has."""
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        nodes = like.graph.find_nodes(op="placeholder")
        values = [n.meta["val"] for n in nodes if isinstance(n.meta["desc"], TangentAOTInput)]
        tangents = [torch.randn(tuple(v.shape), dtype=v.dtype, device=v.device) for v in values]
        result = LibraryInterpreter(graph_module).run(
            *[p.detach().clone() for p in primals], *tangents, enable_io_processing=False
        )
    return pytree.tree_leaves(result, is_leaf=lambda leaf: leaf is None)


def _agree(found: torch.Tensor | None, expected: torch.Tensor | None, floor: float) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return relative_error(found, expected, floor) <= tolerance_of(expected.dtype)
