# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What captures of one backward have in common, and which of their sizes are open."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from retrograd.frontend.autograd.engine.hook_calls import call_user_hook
from retrograd.frontend.autograd.engine.python_calls import accumulate_into
from retrograd.frontend.autograd.sizes.open_sizes import OpenSizes, SizeGuard, ones_of
from retrograd.frontend.autograd.sizes.skeleton import Skeleton, Slot, put, read_skeleton
from retrograd.frontend.autograd.sizes.structure import MOST_SAMPLES, Sample, Structure, translate_sample
from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.python.source_locations import CaptureError


def capture(size: int | None, *, gradient: bool = False, dim: int = 0) -> torch.fx.Graph:
    """``hook(sum(x, dim)).expand([size, 3])``, accumulated; the size is the first of ``sizes`` if it is None here."""
    graph = torch.fx.Graph()
    names = ("inputs", "sizes", "scalars", "hooks", "packed_data")
    inputs, sizes, _, hooks, _ = [graph.placeholder(name) for name in names]
    take = [graph.call_function(operator.getitem, (inputs, index)) for index in range(3 if gradient else 2)]
    x, variable, *old = take[::-1] if gradient else [*take]
    number: Any = size if size is not None else graph.call_function(operator.getitem, (sizes, 0))
    total = graph.call_function(torch.ops.aten.sum.dim_IntList, (x, [dim]))
    hook = graph.call_function(operator.getitem, (hooks, 0))
    changed = graph.call_function(call_user_hook, (hook, total), {"hook_type": "tensor_pre_hook"})
    wide = graph.call_function(torch.ops.aten.expand.default, (changed, [number, 3]))
    graph.call_function(accumulate_into, (variable, old[0] if gradient else None, wide, False))
    graph.output([])
    return graph


SKELETON = Skeleton((), (0, 1), (Slot("expand", (), 4, None), Slot("sum", (), 7, None)), ("call",))


def sample(rows: int, tokens: int = 3) -> Sample:
    return Sample(((rows, tokens), (5,)), (rows, 7), (((rows * tokens,), None),))


def learned(*samples: Sample) -> Structure:
    structure = Structure()
    for s in samples:
        structure.learn(s)
    return structure


def test_captures_of_other_sizes_and_numberings_are_one_structure() -> None:
    fixed, given, more = (read_skeleton(g) for g in (capture(4), capture(None), capture(9, gradient=True)))
    assert fixed.signature == given.signature == more.signature
    assert [s.read([6]) for s in fixed.slots] == [0, 4, 3] and [s.read([6]) for s in given.slots] == [0, 6, 3]
    # In the order of their use, without the gradient that is there already.
    assert fixed.inputs == (0, 1) and more.inputs == (2, 1)
    assert fixed.calls == given.calls == ("call_user_hook",)


def test_other_functions_are_another_structure() -> None:
    other = capture(4)
    (node,) = other.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    node.target = torch.ops.aten.mean.dim
    assert read_skeleton(other).signature != read_skeleton(capture(4)).signature


def test_a_slot_is_filled_where_it_was_read() -> None:
    graph = capture(4)
    slot = read_skeleton(graph).slots[1]
    (node,) = [n for n in graph.nodes if n.name == slot.node]
    args, kwargs = put((node.args, node.kwargs), slot.path, 8)
    assert args == (node.args[0], [8, 3]) and kwargs == {}


def test_what_differs_is_open() -> None:
    assert not learned(sample(4), sample(4)).is_open
    structure = learned(sample(4), sample(4), sample(6))
    assert structure.is_open and structure.example() == sample(6)
    # Nothing new: the same sizes differ, and are equal to each other.
    structure.learn(sample(9))
    assert structure.samples == [sample(4), sample(6)]
    structure.learn(sample(9, tokens=5))
    assert len(structure.samples) == 3
    structure.learn(Sample(((9, 5), (5,)), (8, 7), (((45,), None),)))
    assert len(structure.samples) == MOST_SAMPLES


def test_no_trace_begins_at_a_size_of_one() -> None:
    assert learned(sample(4), sample(1)).example() == sample(4)
    ones = learned(sample(1), sample(4, tokens=1))
    # Nothing to trace with yet: the next size may be it.
    assert (ones.example(), ones.is_open) == (None, False)
    with pytest.raises(CaptureError, match="begin with greater sizes"):
        OpenSizes(ones)
    # It is known to differ, and is learned all the same.
    assert ones.covers(sample(5)) and len(ones.samples) == 2
    ones.learn(sample(1, tokens=1))
    ones.learn(sample(5))
    assert (ones.example(), ones.is_open, len(ones.samples)) == (sample(5), True, 3)


def test_results_of_another_rank_close_it() -> None:
    structure = learned(sample(4), Sample(((4, 3), (5,)), (4, 7), (((12, 1), None),)))
    assert not structure.is_open and "number of axes" in str(structure.refusal)


def test_equal_sizes_are_one_symbol() -> None:
    sizes = OpenSizes(learned(sample(4), sample(6)))
    (rows, fixed), _ = sizes.shapes
    assert fixed == 3 and sizes.numbers[0] is rows and sizes.numbers[1] == 7
    # What a hook gave is none of them, so that the trace has to tell.
    assert len(sizes.integers) == 1 and sizes.results[0][0][0] is not rows
    names = sizes.names()
    guard = sizes.guard(names)
    assert guard.read(((5, 3), (5,)), (5, 7)) == {"s0": 5}
    assert guard.read(((5, 3), (5,)), (6, 7)) is None and guard.read(((5, 4), (5,)), (5, 7)) is None
    assert guard.read(((0, 3), (5,)), (0, 7)) is None
    assert sizes.describe(guard.names, ["x", "y"], SKELETON) == ["axis 0 of x (so far 4, 6)"]


def test_floats_are_open_and_are_no_sizes() -> None:
    """One that is as often 1.0 as a size is 1, and has the numbers that a size has."""
    structure = learned(*[Sample(((n, 3), (5,)), (n, 7, float(n), 0.5), ()) for n in (4, 6)])
    sizes = OpenSizes(structure)
    assert structure.has_open_floats and len(sizes.integers) == len(sizes.floats) == 1
    guard = sizes.guard(sizes.names())
    assert guard.read(((5, 3), (5,)), (5, 7, 1.0, 0.5)) == {"s0": 5, "s1": 1.0}
    assert guard.read(((5, 3), (5,)), (5, 7, -2.5, 0.25)) is None
    assert ones_of({"s0": 5, "s1": 1.0}) == frozenset() and ones_of({"s0": 1, "s1": 1.0}) == {"s0"}
    structure.refuse("an op takes the number as such")
    assert not structure.is_open and structure.refusal is None
    assert structure.notes == ("no number is left open: an op takes the number as such",)


def test_a_condition_on_a_float_is_no_matter_of_trial() -> None:
    sizes = OpenSizes(learned(*[Sample(((4, 3),), (n,), ()) for n in (0.25, 0.5)]))
    (number,) = sizes.floats
    assert number < 0.75
    guard = sizes.guard(sizes.names())
    assert guard.not_one == () and guard.read(((4, 3),), (0.7,)) is not None and guard.read(((4, 3),), (0.8,)) is None


def test_a_sample_of_another_structure_tells_what_differs() -> None:
    """Dynamo captured the forward again: a constant is now a number that PyTorch gives. The other slot was there."""
    known = Skeleton((), (0,), (Slot("expand", (0,), 4, None), Slot("mean", (1,), 12, None)), ())
    again = Skeleton((), (0,), (Slot("aot", (2,), None, 0), Slot("mean", (1,), 18, None)), ())
    earlier, now = Sample(((4, 3),), (4, 12), ()), Sample(((6, 3),), (6, 18), ())
    assert translate_sample(earlier, known, again, now) == Sample(((4, 3),), (4, 12), ())
    assert translate_sample(now, known, again, now) is None
    assert translate_sample(Sample(((4,),), (4, 12), ()), known, again, now) is None
    structure = Structure([earlier], is_borrowed=True)
    structure.learn(now)
    assert [structure.is_open, structure.samples] == [True, [earlier, now]]
    # What was guessed may be wrong: two sets of its own sizes are waited for.
    structure.refuse("it is traced as a number")
    assert [structure.is_open, structure.samples, structure.refusal] == [False, [now], None]


def test_captures_hold_what_has_no_name_of_its_own() -> None:
    """Functions that are made for a capture look alike; one capture does not run what was compiled of the other."""

    def closure() -> torch.fx.Graph:
        def prologue(x: torch.Tensor) -> torch.Tensor:
            return x

        graph = capture(4)
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
        node.target = prologue
        graphs.append(graph)
        return graph

    graphs: list[torch.fx.Graph] = []
    one, other = read_skeleton(closure()), read_skeleton(closure())
    assert one.signature == other.signature and one.held != other.held
    assert one.held == read_skeleton(graphs[0]).held


def test_a_size_that_the_trace_fixed_is_refused() -> None:
    sizes = OpenSizes(learned(sample(4), sample(6)))
    assert int(sizes.shapes[0][0]) == 6
    with pytest.raises(CaptureError, match="a size that was 4 and 6 is traced as the number 6"):
        sizes.names()


def test_conditions_on_a_size_of_one_are_for_a_trial() -> None:
    guard = SizeGuard(("n",), (0,), ("n", ("*", 2, "n")), (("==", ("%", "n", 3), 0),), (("!=", "n", 1),))
    assert guard.read(((3, 6),), ()) == {"n": 3} and guard.read(((4, 8),), ()) is None
    guard = SizeGuard(("n",), (0,), ("n",), (), (("!=", "n", 1),))
    assert guard.read(((1,),), ()) == {"n": 1}
    assert SizeGuard(("n",), (0,), ("n",), (), (("<", "n", 9),)).read(((10,),), ()) is None


def test_strides_of_stand_ins_are_in_the_order_of_the_tensor() -> None:
    sizes = OpenSizes(learned(sample(4), sample(6)))
    rows = sizes.shapes[0][0]
    with sizes.mode:
        turned = sizes.like(torch.empty(3, 6).t(), (rows, 3))
        wide = sizes.like(torch.empty(3).expand(6, 3), (rows, 3))
    assert [hint(step) for step in turned.stride()] == [1, 6]
    assert list(wide.stride()) == [0, 1]
