# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Peaks of small plans, counted by hand; sizes are multiples of the alignment."""

import dataclasses
import math
from typing import Any

import pytest
from graph_text import parse_graph

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.kernel_steps import Step
from retrograd.pipelines.analysis.kernels.liveness import Life, Peak, Peaks, compute_peak, find_waves, pack_buffers
from retrograd.pipelines.analysis.layout.cpu_products import (
    find_part,
    find_parts,
    repays_packing,
    repays_packing_turned,
)
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.memory_size import parse_memory_size, resolve_memory_size
from retrograd.pipelines.analysis.partition.partition_plan import plan_from_saved
from retrograd.pipelines.analysis.partition.value_numbering import find_reshaped, number_repeated


def peak(text: str, saved: str = "") -> Peak:
    graph = parse_graph(text)
    return compute_peak(graph, plan_from_saved(graph, numbers(graph, saved), "test"))


def numbers(graph: JointGraph, names: str) -> list[int]:
    return [v.id for v in graph.values if v.name in names.split()]


CHAIN = """
    input x 128
    tangent t 128
    a = compute x 640
    b = compute a 1280
    y = reduction b 128
    ga = compute t b 640
    gx = compute ga 128
    forward y
    backward gx
"""


def test_scratch_lives_from_its_op_to_its_last_use() -> None:
    # Forward: a beside b. Backward: a and b again, then ga.
    assert peak(CHAIN) == Peak(128, 640 + 1280, 256, 640 + 1280)


def test_kernels_in_order_need_no_memory_at_the_same_time() -> None:
    # a and b side by side, each read by one kernel; in order, b is written where a was.
    text = "input x 64\n a = compute x 640\n c = compute a 64\n b = compute x 640\n d = compute b 64\n"
    graph = parse_graph(text + "forward c d\n backward x")
    plan = plan_from_saved(graph, (), "test")
    assert compute_peak(graph, plan).forward_scratch == 2 * 640
    assert compute_peak(graph, plan, in_order=True).forward_scratch == 640
    assert Peaks(graph).least(plan) == 64 + 64 + 640


def test_what_is_saved_lives_through_the_backward() -> None:
    # b is in storage of its own from the start of the forward to the end of the backward.
    assert peak(CHAIN, "b") == Peak(128 + 1280, 640, 256 + 1280, 640)
    assert peak(CHAIN, "b").bytes == 256 + 1280 + 640


def test_a_pointwise_op_with_one_user_takes_no_memory() -> None:
    text = "input x 64\n a = {0} x 6400\n y = reduction a 64\n forward y\n backward x"
    assert peak(text.format("pointwise")).forward_scratch == 0
    assert peak(text.format("compute")).forward_scratch == 6400


def test_a_pointwise_op_with_two_users_does() -> None:
    text = "input x 64\n a = pointwise x 640\n y = reduction a 64\n z = reduction a 64\n forward y z\n backward x"
    assert peak(text).forward_scratch == 640


def test_views_and_lists_keep_what_they_look_at_alive() -> None:
    text = """
        input x 64
        a = compute x 640
        v = view a 640
        l = constant v -
        b = compute x 1280
        y = data-movement l b 64
        forward y
        backward x
    """
    assert peak(text).forward_scratch == 640 + 1280


def test_small_buffers_are_aligned() -> None:
    assert peak("input x 4\n a = compute x 4\n y = compute a 4\n forward y\n backward x").forward_scratch == 64


def test_fused_ops_keep_their_operands_alive() -> None:
    text = """
        input x 64
        a = compute x 640
        p = pointwise a 640
        b = compute x 1280
        c = compute b 64
        y = pointwise p c 64
        forward y
        backward x
    """
    graph = parse_graph(text)
    formed = find_steps(graph, tuple(range(5)), numbers(graph, "x"), numbers(graph, "y"))
    assert [set(s.reads) for s in formed.steps][-1] == set(numbers(graph, "a c"))
    # a is read by y only, so that it is there beside b.
    assert peak(text).forward_scratch >= 640 + 1280


PRODUCT = """
    input x 640
    input w 6400
    input m {size}
    y = mm x w 1280
    {between}
    z = pointwise y m 1280
    forward z
    backward x
"""


def test_a_product_reads_packed_copies_and_takes_in_what_alone_uses_it() -> None:
    # z is written to the caller's storage; a mask of a quarter of its bytes is packed, a row that is broadcast is not.
    assert peak(PRODUCT.format(size=320, between="")).forward_scratch == 640 + 6400 + 320
    assert peak(PRODUCT.format(size=64, between="")).forward_scratch == 640 + 6400


def test_a_product_takes_in_nothing_that_needs_a_later_value_or_another_product() -> None:
    # What z needs besides comes later (c, which is read by more than z), or is a product: y is written to memory.
    late = "c = clone m 1280\n d = reduction c 64\n z = pointwise y c 1280\n forward z d"
    text = PRODUCT.replace("z = pointwise y m 1280\n    forward z", late).format(size=1280, between="")
    assert peak(text).forward_scratch == 640 + 6400 + 1280 + 1280
    text = PRODUCT.replace("pointwise y m", "pointwise y p").format(size=64, between="p = mm x w 1280")
    # The second one's operands are copied while the first one runs.
    assert peak(text).forward_scratch == 1280 + 2 * (640 + 6400)


def test_what_is_ready_but_written_later_runs_with_the_product() -> None:
    text = PRODUCT.replace("pointwise y m", "pointwise y c").format(size=640, between="c = clone m 640")
    assert peak(text).forward_scratch == 640 + 6400 + 640
    graph = parse_graph(text)
    formed = find_steps(graph, range(3), numbers(graph, "x w m"), numbers(graph, "z"))  # type: ignore[arg-type]
    # Three copies, then one kernel.
    assert [len(s.reads) for s in formed.steps] == [1, 1, 1, 3]


def test_a_small_product_reads_its_operands_as_they_are() -> None:
    graph = parse_graph(PRODUCT.format(size=1280, between=""))
    small = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, packed=False) for op in graph.ops))
    assert compute_peak(small, plan_from_saved(small, (), "test")).forward_scratch == 0
    # What an operand is computed from is no operand: it is written to memory first.
    graph = parse_graph("input x 640\n a = pointwise x 640\n y = mm a x 128\n forward y\n backward x")
    small = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, packed=False) for op in graph.ops))
    assert compute_peak(small, plan_from_saved(small, (), "test")).forward_scratch == 640


@pytest.mark.parametrize(
    ("name", "operands", "element_type", "packed"),
    [
        ("mm", [(512, 256), (256, 512)], "f32", True),
        ("mm", [(512, 256), (256, 511)], "f32", False),
        # Each product of a batch by itself; the sum that a product is added to is no operand.
        ("bmm", [(512, 128, 64), (512, 64, 128)], "f32", False),
        ("addmm", [(512,), (512, 256), (256, 512), None, None], "f32", True),
        # By a vector, of open sizes, in a type whose plain products are slow, no product at all.
        ("matmul", [(1 << 14, 1 << 14), (1 << 14,)], "f32", False),
        ("mm", [None, None], "f32", True),
        ("mm", [(8, 8), (8, 8)], "bf16", True),
        ("mul.Tensor", [(1 << 14, 1 << 14), (1 << 14, 1 << 14)], "f32", False),
        # Split into partial sums.
        ("mm", [(64, 32768), (32768, 64)], "f32", False),
        ("mm", [(64, 32768), (32768, 64)], "bf16", False),
    ],
)
def test_large_products_repay_packing(name: str, operands: list[Any], element_type: str, packed: bool) -> None:
    assert repays_packing(f"torch.aten.{name}", operands, element_type) == packed


@pytest.mark.parametrize(
    ("operands", "packed"),
    [
        ([(128, 128), (128, 128)], True),
        ([(128, 127), (127, 128)], False),
        # Few rows; few columns; split; of open sizes.
        ([(32, 1024), (1024, 128)], False),
        ([(1024, 1024), (1024, 10)], False),
        ([(64, 32768), (32768, 64)], False),
        ([None, (128, 128)], False),
    ],
)
def test_products_with_a_turned_matrix_repay_packing_sooner(operands: list[Any], packed: bool) -> None:
    assert repays_packing_turned(operands) == packed


def test_a_split_product_reads_its_operands_as_they_are_and_writes_all_parts() -> None:
    graph = parse_graph("input x 640\n input w 6400\n y = mm x w 128\n forward y\n backward x")
    split = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, parts=16) for op in graph.ops))
    assert compute_peak(split, plan_from_saved(split, (), "test")).forward_scratch == 16 * 128


@pytest.mark.parametrize(
    ("left", "right", "parts"),
    [
        ((32, 36864), (36864, 192), 9),
        # The least factor of the inner size that has as many terms.
        ((64, 3 * 24593), (3 * 24593, 192), 3),
        ((256, 32000), (32000, 512), 5),
        # IREE would split it.
        ((16, 2048), (2048, 48), 1),
        # IREE would not: a small inner size, a large result.
        ((512, 4096), (4096, 512), None),
        ((1024, 190000), (190000, 1024), None),
        ((4096, 50000), (50000, 4096), None),
    ],
)
def test_products_of_large_inner_size_are_split(
    left: tuple[int, ...], right: tuple[int, ...], parts: int | None
) -> None:
    for name, operands in (("mm", [left, right]), ("bmm", [(1, *left), (1, *right)])):
        part = find_part(f"torch.aten.{name}", operands)
        assert part == (None if parts is None else left[1] // parts)
        assert find_parts(f"torch.aten.{name}", operands) == (parts or 1)
    assert find_parts("torch.aten.addmm", [left, right]) == find_parts("torch.aten.mm", [None, right]) == 1


def test_a_view_that_is_returned_is_written_where_its_source_is_made() -> None:
    text = "input x 64\n a = compute x 640\n v = view a 640\n b = compute a 64\n forward v b\n backward x"
    assert peak(text).forward_scratch == 0
    # Of an argument it is a copy, and of two values as well.
    text = "input x 64\n a = compute x 640\n b = compute x 1280\n l = constant a b -\n v = view l 640\n forward v"
    assert peak(text + "\n backward x").forward_scratch == 640 + 1280


def test_copies_of_views_are_written_into_what_they_are_joined_to() -> None:
    text = "input x 64\n a = {} x 640\n b = {} x 640\n y = cat a b 1280\n forward y\n backward x"
    assert peak(text.format("clone", "clone")).forward_scratch == 0
    assert peak(text.format("pointwise", "clone")).forward_scratch == 640


def test_buffers_go_where_the_smallest_gap_is() -> None:
    wide, small, long = Life(0, 1, 640), Life(0, 4, 64), Life(0, 9, 128)
    assert pack_buffers([wide, small, long]) == 640 + 64 + 128
    # In the room that the first leaves, then behind, though there would be room for both.
    assert pack_buffers([wide, small, Life(2, 4, 128), Life(2, 4, 512)]) == 640 + 64
    assert pack_buffers([wide, small, Life(2, 4, 128), Life(2, 4, 576)]) == 640 + 64 + 576
    # Of two gaps the smaller: the larger stays whole.
    lives = [Life(0, 1, 640), Life(0, 9, 64), Life(0, 1, 128), Life(0, 9, 64), Life(2, 9, 128), Life(3, 9, 640)]
    assert pack_buffers(lives) == 640 + 64 + 128 + 64
    assert pack_buffers([]) == 0


def test_neighbours_that_do_not_depend_on_one_another_run_at_once() -> None:
    steps = (Step((), (1,)), Step((), (2,)), Step((1,), (3,)), Step((3,), (4,)))
    assert find_waves(steps) == [0, 1, 1, 2]
    assert find_waves(()) == []


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, 5),
        ("7", 7),
        ("64MiB", 64 * 2**20),
        ("1.5 kib", 1536),
        ("2GB", 2 * 10**9),
        ("12B", 12),
        (0.5, 0.5),
        ("0.5", 0.5),
        ("1.0", 1.0),
    ],
)
def test_sizes(size: object, expected: float) -> None:
    found = parse_memory_size(size)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("size", [0, -1, 0.0, -0.5, "0", "-3", "0.0", "0MiB"])
def test_sizes_that_are_not_above_zero(size: object) -> None:
    with pytest.raises(ValueError, match="is not above zero; give bytes"):
        parse_memory_size(size)


@pytest.mark.parametrize("size", [True, None, math.nan, math.inf, "", "much", "64 MiB of it", "1e3", "MiB", [1]])
def test_sizes_that_are_unreadable(size: object) -> None:
    with pytest.raises(ValueError, match="unreadable memory budget"):
        parse_memory_size(size)


def test_fractions_are_of_the_whole() -> None:
    assert resolve_memory_size(0.5, 101) == 50
    assert resolve_memory_size(7, 100) == 7


def test_axes_reordered_once_for_several_parts_are_a_copy() -> None:
    # q, k and v of one product: the parts are cut from a reordered copy, beside what it is of.
    text = "input x 64\n a = compute x 6400\n p = permute a 6400\n {0}\n forward y\n backward x"
    one = "q = select.int p 640\n y = compute q 64"
    two = "q = select.int p 640\n k = select.int p 640\n y = compute q k 64"
    assert peak(text.format(one)).forward_scratch == 6400
    assert peak(text.format(two)).forward_scratch == 2 * 6400


def test_a_part_that_is_kept_is_a_copy() -> None:
    text = "input x 64\n a = compute x 640\n q = {0} a {1}\n y = compute a 64\n forward q y\n backward x"
    assert peak(text.format("select.int", 64)).forward_scratch == 640
    # The whole is written to the caller's storage right away.
    assert peak(text.format("permute", 640)).forward_scratch == 0


def test_what_is_read_in_parts_is_written_to_memory() -> None:
    # As a mask that is cut to size; all of it would be computed in the sum's kernel.
    text = "input x 64\n a = pointwise x 640\n q = select.int a {}\n y = reduction q 64\n forward y\n backward x"
    assert peak(text.format(320)).forward_scratch == 640
    assert peak(text.format(640)).forward_scratch == 0


def test_what_one_kernel_uses_twice_is_computed_in_it() -> None:
    text = "input x 64\n a = pointwise x 640\n b = pointwise a 640\n y = {} a b 64\n forward y\n backward x"
    assert peak(text.format("reduction")).forward_scratch == 0
    assert peak(text.format("compute")).forward_scratch == 2 * 640


def test_a_split_reduction_writes_all_parts_with_what_feeds_it() -> None:
    graph = parse_graph("input x 640\n a = pointwise x 640\n y = reduction a 64\n forward y\n backward x")
    split = dataclasses.replace(graph, ops=(graph.ops[0], dataclasses.replace(graph.ops[1], parts=16)))
    formed = find_steps(split, (0, 1), numbers(split, "x"), numbers(split, "y"))
    x, y = numbers(split, "x y")
    assert formed.steps == (Step((x,), (len(split.values),)), Step((len(split.values),), (y,)))
    assert formed.bytes == {len(split.values): 16 * 64}


def test_a_gather_runs_in_the_kernel_of_what_uses_it() -> None:
    text = "input x 64\n input i 64\n a = gather x i 640\n y = {} a 64\n forward y\n backward x"
    assert peak(text.format("pointwise")).forward_scratch == 0
    assert peak(text.format("compute")).forward_scratch == 640


def test_a_scatter_takes_the_coordinates_of_all_elements() -> None:
    graph = parse_graph("input x 64\n input d 64\n input i 640\n y = scatter_add x d i x 64\n forward y\n backward x")
    scatter = dataclasses.replace(graph, ops=(dataclasses.replace(graph.ops[0], parts=2),))
    # Those along each of two axes, then both side by side.
    assert compute_peak(scatter, plan_from_saved(scatter, (), "test")).forward_scratch == 4 * 640


def test_a_scatter_that_is_returned_is_copied_to_its_place() -> None:
    text = "input x 64\n input d 640\n input i 64\n y = scatter_add d x i x 640\n z = compute y 64\n"
    text += "forward {}\n backward x"
    assert peak(text.format("z")).forward_scratch == 640
    assert peak(text.format("y z")).forward_scratch == 640
    # Into one number all over, it is scattered right there, unless something reads it.
    filled = text.replace("y = scatter_add d", "f = full 640\n y = scatter_add f")
    assert peak(filled.format("y z")).forward_scratch == 640
    assert peak(filled.replace("compute y", "compute x").format("y z")).forward_scratch == 0
    text = text.replace("scatter_add d x i x", "compute x")
    assert peak(text.format("y z")).forward_scratch == 0


LATE = """
    input x 640
    input w 640
    y = mm x w 1280
    c = compute x 1280
    d = {} c 640
    e = compute c 64
    z = pointwise y d 1280
    forward z e
    backward x
"""


def test_a_product_waits_for_what_its_kernel_takes_besides() -> None:
    # c and d, then the copies of x, w and d, and the product with the sum; y is never in memory. e, which stood before
    # the sum but is not needed for it, stays behind the product.
    graph = parse_graph(LATE.format("compute"))
    formed = find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results)
    y, c, d, e, z = numbers(graph, "y c d e z")
    copies = tuple(range(len(graph.values), len(graph.values) + 3))
    assert [step.writes for step in formed.steps] == [(c,), (d,), *((copy,) for copy in copies), (z,), (e,)]
    assert formed.steps[-2].reads == copies
    assert y not in formed.bytes
    # What is another product is added by a kernel of its own.
    graph = parse_graph(LATE.format("mm"))
    formed = find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results)
    assert y in formed.bytes


def test_the_first_of_plain_products_that_are_added_up_waits_for_the_others() -> None:
    lines = ["input x 640", *(f"m{i} = mm x 128" for i in range(4)), "s = pointwise m0 m1 128"]
    lines += ["t = pointwise s m2 128", "y = pointwise t m3 128", "forward y", "backward x"]
    graph = parse_graph("\n".join(lines))
    plain = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, packed=False) for op in graph.ops))
    formed = find_steps(plain, range(7), plain.arguments, plain.forward_results)  # type: ignore[arg-type]
    x, a, b, c, y = numbers(graph, "x m1 m2 m3 y")
    assert formed.steps == (*(Step((x,), (m,)) for m in (a, b, c)), Step((x, a, b, c), (y,)))


def test_what_takes_only_a_shape_reads_nothing() -> None:
    text = "input x 64\n a = compute x 640\n b = compute a 64\n z = full_like a 640\n y = scatter z b 64\n"
    assert peak(text + " forward y\n backward x").forward_scratch == 640 + 64


TWICE = """
    input x 640
    tangent t 640
    a = pointwise x 640
    y = mm a 64
    ga = compute t a 640
    b = pointwise x 640
    g = compute ga b 64
    forward y
    backward g
"""


def test_what_the_backward_computes_twice_runs_once() -> None:
    graph = parse_graph(TWICE)
    same = number_repeated(graph, [(op.name, op.kind) for op in graph.ops])
    assert same == {0: 0, 3: 0}
    merged = dataclasses.replace(graph, same=same)
    plan = plan_from_saved(graph, (), "test")
    formed = find_steps(merged, plan.backward, (*graph.arguments,), graph.backward_results)
    a, ga, g = numbers(graph, "a ga g")
    x, t = numbers(graph, "x t")
    assert formed.steps == (Step((x,), (a,)), Step((t, a), (ga,)), Step((ga, a), (g,)))
    # With the first at hand, the second is no other's.
    formed = find_steps(merged, plan.backward[1:], (*graph.arguments, a), graph.backward_results)
    assert len(formed.steps) == 3


def test_reshapes_do_not_hide_that_two_ops_do_the_same() -> None:
    text = TWICE.replace("b = pointwise x 640", "v = unsqueeze x 640\n w = unsqueeze v 640\n b = pointwise w 640")
    graph = parse_graph(text)
    meanings = [(op.name, op.kind) for op in graph.ops]
    shapes = {"x": (160,), "v": (16, 10), "w": (160,)}
    assert number_repeated(graph, meanings) == {}
    known = dataclasses.replace(graph, reshaped=find_reshaped(graph, [shapes.get(v.name) for v in graph.values]))
    x, v, w = numbers(graph, "x v w")
    assert known.reshaped == {v: (x, (16, 10)), w: (x, None)}
    same = number_repeated(known, meanings)
    a, b = (graph.values[number].producer for number in numbers(graph, "a b"))
    assert same == {a: a, b: a}
    merged = dataclasses.replace(known, same=same)
    plan = plan_from_saved(graph, (), "test")
    formed = find_steps(merged, plan.backward, graph.arguments, graph.backward_results)
    assert len(formed.steps) == 3
    # Of another shape it is another value.
    other = dataclasses.replace(
        graph, reshaped=find_reshaped(graph, [(4, 40) if v.id else (160,) for v in graph.values])
    )
    assert number_repeated(other, meanings) == {}


def test_a_kept_value_that_is_another_s_is_written_once() -> None:
    graph = parse_graph(TWICE.replace("y = mm a 64", "y = mm a 64\n m = mm a 64"))
    merged = dataclasses.replace(graph, same=number_repeated(graph, [(op.name, op.kind) for op in graph.ops]))
    x, a, y, m = numbers(graph, "x a y m")
    formed = find_steps(merged, (0, 1, 2), graph.arguments, (m,))
    # The packed copy of a is read by the one product, whose result is the caller's.
    assert [step.writes for step in formed.steps if step.reads != (x,)] == [(len(graph.values),), (y,)]
    assert formed.bytes.keys() == {a, len(graph.values)}
