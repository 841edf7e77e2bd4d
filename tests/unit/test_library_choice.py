# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops libraries compute: by what was asked for, by device and by size."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from retrograd import options
from retrograd.frontend.decompositions.attention import score_scale
from retrograd.frontend.decompositions.table import tracing_table
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.libraries import attention, cpu_units, ops
from retrograd.frontend.libraries.joined_layers import WITH
from retrograd.frontend.libraries.ops import (
    LIBRARY,
    LIBRARY_OPS,
    NO_LIBRARIES,
    WORTH,
    WORTH_ON_CPU,
    Libraries,
    computes,
    library_ops,
    product_excess,
)
from retrograd.frontend.libraries.written_out import uses_libraries, write_out
from retrograd.options import BackwardRequest, Request, find_libraries
from retrograd.pipelines.conversions.convert_linalg_to_kernels import FAMILIES
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.kernels.choice import NAMES

aten = torch.ops.aten
BACKWARD = aten.convolution_backward.default


@pytest.mark.parametrize(
    ("target", "kernels", "expected"),
    [
        ("cuda:sm_90", "auto", Libraries(cuda=WORTH)),
        ("cuda:sm_90", "off", NO_LIBRARIES),
        ("cuda:sm_90", "library", Libraries(cuda=0)),
        ("cuda:sm_90", ["products"], NO_LIBRARIES),
        ("cuda:sm_90", ["products", "library"], Libraries(cuda=0)),
        ("cpu", "auto", Libraries(cpu=WORTH_ON_CPU, products=False)),
        ("cpu", "off", NO_LIBRARIES),
        ("cpu", ["products"], NO_LIBRARIES),
        ("cpu", "library", Libraries(cpu=0)),
        (("cpu", "cuda"), "library", NO_LIBRARIES),
        ("vulkan", "library", NO_LIBRARIES),
    ],
)
def test_what_they_are_asked_for(
    target: Any, kernels: Any, expected: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "is_intel", lambda: False)
    assert find_libraries(find_target(target), kernels) == expected


def test_products_are_for_mkl_on_intels_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "is_intel", lambda: True)
    has_mkl = torch.backends.mkl.is_available()
    assert find_libraries(find_target("cpu"), "auto") == Libraries(cpu=WORTH_ON_CPU, products=has_mkl)


def test_the_work_of_a_product() -> None:
    """On a CPU; on CUDA products are kernels of our own."""
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    count = LIBRARY_OPS[aten.mm.default].count
    with library_ops(Libraries(cpu=0)):
        assert count(a, b) == 60
        assert count(a.to("meta"), b.to("meta")) is None
    with library_ops(Libraries(cpu=0, products=False)):
        assert count(a, b) is None


def test_products_of_open_sizes_on_cuda_are_for_its_library() -> None:
    """No kernel of our own takes them, and IREE's code for such sizes has no tiles."""
    sizes, source = ShapeEnv(), ConstantSource("rows")
    with FakeTensorMode(shape_env=sizes), library_ops(Libraries(cuda=WORTH)):
        symbol = sizes.create_symbol(512, source, dynamic_dim=DimDynamic.DYNAMIC)
        rows = sizes.create_symintnode(symbol, hint=512, source=source)

        def tensor(*shape: Any) -> Tensor:
            return torch.empty(*shape, device="cuda")

        known = tensor(256, 256)
        assert computes(aten.mm.default, tensor(rows, 256), known)
        assert computes(aten.bmm.default, tensor(4, rows, 256), tensor(4, 256, 256))
        # A gradient of weights, whose own sizes are known.
        assert computes(aten.mm.default, tensor(256, rows), tensor(rows, 256))
        # Of sizes that are known it is compiled, and so is one that is small at the sizes of the trace.
        assert not computes(aten.mm.default, known, known)
        assert not computes(aten.bmm.default, tensor(4, 256, 256), tensor(4, 256, 256))
        assert not computes(aten.mm.default, tensor(rows, 256), tensor(256, 4))
        # What IREE adds up place by place.
        places = torch.empty(rows, device="cuda", dtype=torch.int64)
        assert computes(aten.embedding_dense_backward.default, tensor(rows, 8), places, 100, -1, False)
        places = torch.empty(4, device="cuda", dtype=torch.int64)
        assert not computes(aten.embedding_dense_backward.default, tensor(4, 8), places, 100, -1, False)
    assert not sizes.guards


def test_permutations_that_undo_each_other_are_left_out() -> None:
    """A weight is turned for its product, and its gradient turned back: no compiled function is to copy either."""
    graph = capture(Libraries(cpu=0), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), 3, 4).graph
    outside = [node for node in graph.nodes if node.target is aten.permute.default and WITH not in node.meta]
    assert not outside


def test_a_budget_does_without_unless_they_are_named() -> None:
    x = [torch.randn(3)]
    budget: dict[str, Any] = {"target": "cuda:sm_90", "partition": "budget", "memory_budget": 0.5}
    found = Request(**budget).on(x).libraries
    assert (found.cpu, found.cuda) == (None, None)
    assert Request(**budget, kernels=["library"]).on(x).libraries == Libraries(cuda=0)
    assert Request(target="cuda:sm_90").on(x).libraries.cuda == WORTH


def test_of_a_backward_on_any_device() -> None:
    products = find_libraries(find_target("cpu"), "auto").products
    ours = Libraries(WORTH_ON_CPU, WORTH, products, eager_forward=True)
    assert BackwardRequest(None, "eager-order", True).libraries == ours
    all_of_them = BackwardRequest(None, "eager-order", True, kernels="library").libraries
    assert all_of_them == Libraries(0, 0, eager_forward=True)
    assert BackwardRequest("cpu", "eager-order", True, kernels="library").libraries == replace(all_of_them, cuda=None)
    assert BackwardRequest(None, "eager-order", True, kernels="off").libraries == NO_LIBRARIES


@pytest.mark.parametrize(
    ("rows", "is_eager", "is_library"), [(128, True, True), (128, False, False), (16, True, False)]
)
def test_attention_behind_a_forward_of_pytorchs_is_worth_a_call_sooner(
    rows: int, is_eager: bool, is_library: bool
) -> None:
    q, k, v, grad = (torch.randn(2, 4, rows, 32) for _ in range(4))
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    with library_ops(Libraries(cpu=WORTH_ON_CPU, eager_forward=is_eager)):
        assert computes(backward, grad, q, k, v, out, sums, 0.0, False) == is_library


def test_the_work_of_a_convolution() -> None:
    x, how = torch.randn(2, 4, 9, 8), ([2, 1], [1, 1], [1, 2], False, [0, 0], 2)
    weight = torch.randn(6, 2, 3, 3)
    y = aten.convolution.default(x, weight, None, *how)
    count = LIBRARY_OPS[aten.convolution.default].count
    assert count(x, weight, None, *how) == y.numel() * 2 * 9
    backward = LIBRARY_OPS[aten.convolution_backward.default].count
    assert backward(y, x, weight, [0], *how, [True] * 3) == y.numel() * 2 * 9 * 2
    assert backward(y, x, weight, [0], *how, [False, True, True]) == y.numel() * 2 * 9
    turned = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert count(x, torch.randn(4, 6, 3, 3), None, *turned) == x.numel() * 6 * 9


@pytest.mark.parametrize(("taps", "groups", "is_split"), [(5, 4, True), (3, 4, False), (5, 2, False)])
def test_filters_of_many_taps_get_their_gradient_by_a_convolution(taps: int, groups: int, is_split: bool) -> None:
    """Where each channel has one: of planes with gradients, beside the gradient of images by itself."""
    model = nn.Sequential(nn.Conv2d(4, 4, taps, 2, taps // 2, groups=groups, bias=False), nn.Flatten())
    with contextlib.ExitStack() as stack, library_ops(Libraries(cpu=0)):
        joint = capture_joint(stack, model, (torch.randn(2, 4, 8, 8, requires_grad=True),)).graph_module
    masks = [node.args[-1] for node in joint.graph.find_nodes(op="call_function", target=BACKWARD)]
    assert masks == [[True, False, False] if is_split else [True, True, False]]
    convolutions = joint.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert [node.args[-1] for node in convolutions] == [groups, 8][: 1 + is_split]
    assert all(LIBRARY in node.meta for node in convolutions)


@pytest.mark.parametrize(
    ("variables", "matrices", "halves"),
    [
        ({}, True, True),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True, True),
        ({"ONEDNN_MAX_CPU_ISA": "default"}, True, True),
        ({"ONEDNN_MAX_CPU_ISA": "no such name"}, True, True),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}, False, True),
        ({"ONEDNN_MAX_CPU_ISA": "avx512_core_bf16"}, False, False),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, False, False),
        ({"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, True, True),
    ],
)
def test_units_that_onednn_may_not_use(
    variables: dict[str, str], matrices: bool, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (cpu_units.has_matrix_units.__wrapped__(), cpu_units.has_half_units.__wrapped__()) == (matrices, halves)


@pytest.mark.parametrize("has_units", [True, False])
def test_products_of_float16_are_for_cpus_that_multiply_it(has_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ops, cpu_units):
        monkeypatch.setattr(module, "has_half_units", lambda: has_units)
    a, b, bias = (torch.randn(*size, dtype=torch.float16) for size in ((3, 4), (4, 5), (5,)))
    with library_ops(Libraries(cpu=0)):
        assert LIBRARY_OPS[aten.mm.default].count(a, b) == (60 if has_units else None)
        assert LIBRARY_OPS[aten.addmm.default].count(bias, a, b) == (60 if has_units else None)


def test_convolutions_of_float16_are_computed_in_float32() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten()).half()
    with contextlib.ExitStack() as stack, library_ops(Libraries(cpu=0)):
        joint = capture_joint(stack, model, (torch.randn(2, 4, 8, 8, dtype=torch.float16),)).graph_module
    marked = [node for node in joint.graph.nodes if node.target in (aten.convolution.default, BACKWARD)]
    assert len(marked) == 2
    for node in marked:
        assert LIBRARY in node.meta
        assert all(x.meta["val"].dtype is torch.float32 for x in node.all_input_nodes)


def test_one_filter_a_channel_is_worth_its_step_sooner() -> None:
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    forward, backward = LIBRARY_OPS[aten.convolution.default], LIBRARY_OPS[BACKWARD]
    x, own, dense = torch.randn(2, 8, 6, 6), torch.randn(8, 1, 3, 3), torch.randn(8, 8, 3, 3)
    assert forward.excess(x, own, None, *how, 8) > forward.excess(x, dense, None, *how, 1)
    assert backward.excess(x, x, own, None, *how, 8, [True] * 3) == forward.excess(x, own, None, *how, 8)
    turned = (*how[:3], True, [0, 0], 8)
    assert forward.excess(x, own, None, *turned) == forward.excess(x, dense, None, *how, 1)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x).flatten(2).unsqueeze(1).transpose(2, 3)
        return F.scaled_dot_product_attention(y, y, y).square().mean()


class Projected(nn.Module):
    """Attention of three parts of one projection, as they are written: unpacked, by ``unbind``, by ``chunk``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        if self.way == "chunk":
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in y.chunk(3, -1))
        else:
            parts = y.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            q, k, v = parts if self.way == "unpacked" else parts.unbind(0)
        return F.scaled_dot_product_attention(q, k, v).square().mean()


def capture(libraries: Libraries, model: nn.Module | None = None, *size: int) -> torch.fx.GraphModule:
    with contextlib.ExitStack() as stack, library_ops(libraries):
        return capture_joint(stack, model or Small(), (torch.randn(size or (2, 3, 4, 4)),)).graph_module


def test_smaller_ones_are_written_out_in_the_trace() -> None:
    # 2 x 8 x 16 x 27 of the convolution, which count as 8 of a product each, 2 x 16 x 8 x 16 of attention.
    marked = {node.target for node in capture(Libraries(cpu=50_000)).graph.nodes if LIBRARY in node.meta}
    assert marked >= {aten.convolution.default, aten.convolution_backward.default}
    assert aten._scaled_dot_product_flash_attention_for_cpu.default not in marked
    assert not uses_libraries(capture(NO_LIBRARIES))
    assert not uses_libraries(capture(Libraries(cuda=0)))


def test_attention_with_dropout_is_not_for_a_library() -> None:
    """The op has no dropout on any device, and says so where it is written out."""
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    q, out, lse = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6)
    assert LIBRARY_OPS[attend].count(q, q, q, 0.0, True) == q.numel() * 6
    assert LIBRARY_OPS[attend].count(q, q, q, 0.5) is None
    backward = LIBRARY_OPS[aten._scaled_dot_product_flash_attention_for_cpu_backward.default]
    assert backward.count(out, q, q, q, out, lse, 0.0, True) == q.numel() * 6
    assert backward.count(out, q, q, q, out, lse, 0.5, True) is None
    with library_ops(Libraries(cpu=0)), pytest.raises(NotImplementedError, match="dropout"):
        tracing_table()[attend](q, q, q, 0.5)


def test_views_belong_to_ops_that_there_are() -> None:
    graph = capture(Libraries(cpu=0)).graph
    views = [node for node in graph.nodes if WITH in node.meta]
    assert views
    assert {node.meta[WITH] for node in views} <= {node.name for node in graph.nodes if node.target in LIBRARY_OPS}


@pytest.mark.parametrize("way", ["unpacked", "unbind", "chunk"])
def test_parts_of_a_projection_are_taken_inside_of_the_island(way: str) -> None:
    """So that nothing is copied on the way."""
    graph = capture(Libraries(cpu=0, products=False), Projected(way), 2, 5, 8).graph
    for op in (node for node in graph.nodes if node.target in LIBRARY_OPS and LIBRARY in node.meta):
        reached, todo = set(), [*op.all_input_nodes]
        while todo:
            node = todo.pop()
            if node.meta.get(WITH) == op.name:
                todo += node.all_input_nodes
            else:
                reached.add(node)
        assert not [node.format_node() for node in reached if not node.meta["val"].is_contiguous()]
        # The projection; of the backward the tangent, the output and the log-sum-exp too.
        backward = op.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        assert len(reached) == (4 if backward else 1)


@pytest.mark.parametrize("way", ["unpacked", "unbind", "chunk"])
def test_what_attention_gives_passes_once_in_the_order_of_its_memory(way: str) -> None:
    """The output to the backward and to what follows; the gradients of a projection's parts put together, where they
    are stacked: turned around by compiled code they would be copied, and then copied back."""
    graph = capture(Libraries(cpu=0, products=False), Projected(way), 2, 5, 8).graph
    for op in (node for node in graph.nodes if node.target in LIBRARY_OPS and LIBRARY in node.meta):
        island = {op, *(n for n in graph.nodes if n.meta.get(WITH) == op.name), *op.users}
        given = [n for n in island if any(user not in island for user in n.users)]
        backward = op.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        outputs = [n for n in given if n.meta["val"].dim() > 3]
        assert all(n.meta["val"].is_contiguous() for n in outputs)
        assert len(outputs) == (3 if backward and way == "chunk" else 1)
        assert (aten.stack.default in {n.target for n in outputs}) == (backward and way != "chunk")


def test_gradients_side_by_side_in_memory_are_stacked_as_they_are() -> None:
    memory = torch.randn(2, 5, 3, 2, 4)
    parts = [memory.select(2, number) for number in range(3)]
    whole = attention.stacked(parts, 2)
    assert whole.data_ptr() == memory.data_ptr()
    assert torch.equal(whole, memory)
    for others in (parts[::-1], parts[:2], [parts[0], parts[2], parts[1]], [p.clone() for p in parts], parts[:1]):
        found = attention.stacked(others, 2)
        assert torch.equal(found, torch.stack(others, 2)) and found.is_contiguous()


def test_written_out_no_op_is_a_librarys() -> None:
    captured = capture(Libraries(cpu=0))
    written = write_out(captured, Libraries(cpu=0))
    assert uses_libraries(captured)
    assert not uses_libraries(written)
    names = [[n.name for n in g.graph.find_nodes(op="placeholder")] for g in (captured, written)]
    assert names[0] == names[1]
    assert not [node for node in written.graph.nodes if node.target is aten.convolution_backward.default]


def test_written_out_attention_is_left_to_kernels_of_our_own() -> None:
    libraries = Libraries(cpu=0, kernels=("attention",))
    captured = capture(libraries, Projected("chunk"), 2, 5, 8)
    written = write_out(captured, libraries)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert not uses_libraries(written)
    assert {forward, backward} < {node.target for node in written.graph.nodes}
    assert not [n for n in write_out(captured, Libraries()).graph.nodes if n.target in (forward, backward)]


def test_attention_on_a_cpu_is_the_cpus_op() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    out, lse = attention.attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert lse.shape == (1, 2, 6)
    grads = attention.attention_backward(torch.ones_like(out), q, k, v, out, lse, 0.0, True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True).sum().backward()
    torch.testing.assert_close(list(grads), [t.grad for t in leaves])


def test_heads_are_widened_for_flash_kernels_with_zeros() -> None:
    """What is computed of widened heads is what it was, with the scale of the narrow ones."""
    q, k, v = (torch.randn(1, 2, 6, 5) for _ in range(3))
    wide = [attention._widened(t) for t in (q, k, v)]
    assert {t.shape[-1] for t in wide} == {8}
    out = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], scale=score_scale(q, None))
    torch.testing.assert_close(out[..., :5], F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("columns", [32, 41])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (0, 1, 3, 2)])
def test_masks_lie_as_kernels_take_them(columns: int, order: tuple[int, ...]) -> None:
    """Row by row, however they came: learned relative positions are looked up with their heads innermost."""
    sizes = (1, 4, 8, columns)
    mask = torch.randn([sizes[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])
    query, key = torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, columns, 16)
    aligned = attention._aligned(mask, query, key)
    assert aligned is not None
    torch.testing.assert_close(aligned, mask.expand(2, 4, 8, columns))
    assert aligned.stride()[-1] == 1
    assert aligned.stride()[-2] % 16 == 0


@pytest.mark.parametrize(
    ("width", "uneven"),
    [
        *((width, False) for width in (16, 56, 64, 112, 192, 224, 384)),
        *((width, True) for width in (17, 50, 100, 176, 196, 200, 208, 250, 1009)),
    ],
)
def test_products_of_uneven_rows_are_sooner_a_librarys(width: int, uneven: bool) -> None:
    """By the widest part of a row, of 64 numbers at most, that a workgroup of IREE's can have."""
    assert (product_excess(width) > 1) == uneven
    known = LIBRARY_OPS[aten.mm.default]
    a, b = torch.randn(4, 8), torch.randn(8, width)
    least = Libraries(cpu=WORTH_ON_CPU).least(a.device, known.excess(a, b))
    assert least is not None and (least < WORTH_ON_CPU) == uneven


def test_a_row_times_a_matrix_is_sooner_a_librarys() -> None:
    """The gradient of a linear layer with one result; two rows are compiled code's as long as others."""
    known = LIBRARY_OPS[aten.mm.default]
    matrix = torch.empty(4096, 2048, device="meta")
    one, two = (known.excess(torch.empty(rows, 4096, device="meta"), matrix) for rows in (1, 2))
    assert one > two == 1
    # On whichever CPU, if torch has MKL.
    with library_ops(Libraries(cpu=WORTH_ON_CPU, products=False)):
        taken = [known.count(torch.empty(rows, 64), torch.empty(64, 8)) for rows in (1, 2)]
    assert taken == [64 * 8 if torch.backends.mkl.is_available() else None, None]


def test_a_product_is_marked_by_its_width() -> None:
    """Two of one size, but for how far vectors divide their rows."""
    marked = []
    for width in (192, 196):
        x, w = torch.randn(1024, 192), torch.randn(192, width, requires_grad=True)
        with contextlib.ExitStack() as stack, library_ops(Libraries(cpu=WORTH_ON_CPU)):
            graph = capture_joint(stack, torch.mm, (x, w)).graph_module.graph
            marked.append([LIBRARY in n.meta for n in graph.nodes if n.target is aten.mm.default])
    assert marked == [[False, False], [True, True]]


def test_names_of_families_are_those_there_are() -> None:
    assert tuple(FAMILIES) == NAMES


@pytest.mark.parametrize(("rows", "is_large"), [(1 << 9, True), (1 << 7, False)])
def test_large_softmaxes_are_a_librarys(rows: int, is_large: bool) -> None:
    """Forward and backward: eager's exponential takes a third of the time of compiled code's."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).softmax(-1).square().mean()

    nodes = capture(Libraries(cpu=WORTH_ON_CPU, products=False), Shares(), rows, 1 << 9).graph.nodes
    both = {aten._softmax.default, aten._softmax_backward_data.default}
    assert {n.target for n in nodes if LIBRARY in n.meta} == (both if is_large else set())


class Standardized(nn.Module):
    """A convolution whose weight is standardized."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(8, inputs, 1, 1)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, 8, -1)
        weight = F.batch_norm(rows, None, None, weight=self.gain, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight))


NORMS = {aten._native_batch_norm_legit.no_stats, aten.native_batch_norm_backward.default}


@pytest.mark.parametrize(("inputs", "is_large"), [(1 << 13, True), (1 << 12, False)])
def test_large_weights_are_standardized_by_pytorch(inputs: int, is_large: bool) -> None:
    libraries = Libraries(cpu=WORTH_ON_CPU, products=False)
    nodes = capture(libraries, Standardized(inputs), 1, inputs, 1, 1).graph.nodes
    marked = {n.target for n in nodes if LIBRARY in n.meta and WITH not in n.meta}
    assert marked == (NORMS if is_large else set())


def test_norms_of_planes_are_compiled() -> None:
    """An instance norm is a batch norm of one image, and goes with the kernels around it; so is one that is not of
    the batch, and one of several images."""
    for model in (nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4)):
        assert not uses_libraries(capture(Libraries(cpu=0), model, 2, 4, 8, 8))
    assert uses_libraries(capture(Libraries(cpu=0), Standardized(4), 2, 4, 8, 8))


def test_a_result_leaves_its_island_in_the_shape_in_which_it_is_read() -> None:
    """Compiled code would copy the gradient, to return it in another shape."""
    graph = capture(Libraries(cpu=0), Standardized(4), 2, 4, 8, 8).graph
    (norm,) = graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    views = [user for part in norm.users for user in part.users if user.meta.get(WITH) == norm.name]
    assert [tuple(view.meta["val"].shape) for view in views] == [(8, 4, 1, 1)]


@pytest.mark.parametrize("has_units", [True, False])
def test_narrow_products_with_a_bias_are_whole_where_units_are_for_them(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out, they are products in float32, which are faster elsewhere."""
    monkeypatch.setattr(cpu_units, "has_matrix_units", lambda: has_units)
    for module in (cpu_units, ops):
        monkeypatch.setattr(module, "has_half_units", lambda: has_units)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with contextlib.ExitStack() as stack, library_ops(Libraries(cpu=0)):
            model, x = nn.Linear(4, 6, dtype=dtype), torch.randn(3, 4, dtype=dtype, requires_grad=True)
            nodes = capture_joint(stack, model, (x,)).graph_module.graph.nodes
        forward = next(n for n in nodes if LIBRARY in n.meta and n.target in (aten.mm.default, aten.addmm.default))
        is_whole = has_units and dtype is not torch.float32
        assert forward.target is (aten.addmm.default if is_whole else aten.mm.default)
        assert forward.args[is_whole].meta["val"].dtype is (dtype if is_whole else torch.float32)


@pytest.mark.parametrize(
    ("dtype", "has_units", "is_whole"),
    [(torch.bfloat16, True, True), (torch.bfloat16, False, False), (torch.float32, True, False)],
)
def test_narrow_products_are_sooner_a_librarys(
    dtype: torch.dtype, has_units: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_units, "has_matrix_units", lambda: has_units)
    with contextlib.ExitStack() as stack, library_ops(Libraries(cpu=WORTH_ON_CPU)):
        model, x = nn.Linear(128, 128, bias=False, dtype=dtype), torch.randn(256, 128, dtype=dtype)
        nodes = capture_joint(stack, model, (x,)).graph_module.graph.nodes
    assert any(LIBRARY in n.meta for n in nodes) == is_whole


def test_a_matrix_that_no_cache_holds_is_not_packed() -> None:
    """On whichever CPU: the gradients of a layer with a vocabulary; not its forward, nor those of smaller ones."""

    def count(rows: int, inner: int, columns: int, *, is_turned: bool = False) -> int | None:
        with library_ops(Libraries(cpu=WORTH_ON_CPU, products=False)):
            right = torch.empty(columns, inner).t() if is_turned else torch.empty(inner, columns)
            return LIBRARY_OPS[aten.mm.default].count(torch.empty(rows, inner), right)

    large = 1 << 26 if torch.backends.mkl.is_available() else None
    assert count(64, 1 << 17, 8) == count(8, 64, 1 << 17) == large
    assert count(8, 64, 1 << 17, is_turned=True) is None
    assert count(64, 1 << 16, 8) is None
