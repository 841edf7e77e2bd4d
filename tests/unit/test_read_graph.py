# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Joint functions and interfaces as read off MLIR."""

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest

from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.layout.tensor_types import element_bytes, tensor_shape
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.read_graph import read_joint
from retrograd.pipelines.stages.interface import read_interface

JOINT = """
!rows = !torch.vtensor<[4,64],f32>
!values = !torch.vtensor<[4,1],f32>
!places = !torch.vtensor<[4,1],si64>
func.func @joint(%x: !rows {bwd.role = "input", bwd.name = "x", bwd.value = "primals_1"},
                 %count: !values {bwd.role = "buffer", bwd.name = "count"},
                 %t: !rows {bwd.role = "tangent", bwd.name = "t"})
    -> (!values {bwd.role = "output", bwd.name = "out"}, !values {bwd.role = "mutation", bwd.name = "count"},
        !values {bwd.role = "grad", bwd.name = "grad.x"}) {
  %one = torch.constant.int 1
  %true = torch.constant.bool true
  %max, %at = torch.aten.max.dim %x, %one, %true {bwd.values = ["max", "at"]}
      : !rows, !torch.int, !torch.bool -> !values, !places
  %next = torch.aten.neg %count : !values -> !values
  %grad = torch.aten.gather %t, %one, %at, %true : !rows, !torch.int, !places, !torch.bool -> !values
  return %max, %next, %grad : !values, !values, !values
}
"""


@pytest.fixture
def context() -> Iterator[Any]:
    with make_context() as context, ir.Location.unknown():
        yield context


def first_function(module: Any) -> Any:
    return module.body.operations[0].operation


def test_read_joint(context: Any) -> None:
    module = ir.Module.parse(JOINT)
    read = read_joint(first_function(module))
    graph = read.graph
    assert [(v.name, v.bytes, v.producer, v.is_tensor) for v in graph.values] == [
        ("primals_1", 1024, None, True),
        ("arg1", 16, None, True),
        ("arg2", 1024, None, True),
        ("op0.0", 0, 0, False),
        ("op1.0", 0, 1, False),
        ("max", 16, 2, True),
        ("at", 32, 2, True),
        ("op3.0", 16, 3, True),
        ("op4.0", 16, 4, True),
    ]
    assert [(op.name, op.kind, op.operands, op.results, op.flops) for op in graph.ops] == [
        ("torch.constant.int", OpKind.CONSTANT, (), (3,), 0),
        ("torch.constant.bool", OpKind.CONSTANT, (), (4,), 0),
        ("torch.aten.max.dim", OpKind.REDUCTION, (0, 3, 4), (5, 6), 256),
        ("torch.aten.neg", OpKind.POINTWISE, (1,), (7,), 4),
        ("torch.aten.gather", OpKind.DATA_MOVEMENT, (2, 3, 6, 4), (8,), 0),
    ]
    assert (graph.arguments, graph.tangents, graph.mutated) == ((0, 1, 2), frozenset({2}), frozenset({1}))
    assert (graph.forward_results, graph.backward_results) == ((5, 7), (8,))
    assert [op.name for op in read.ops] == [op.name for op in graph.ops]
    assert [str(v.type) for v in read.values[:2]] == ["!torch.vtensor<[4,64],f32>", "!torch.vtensor<[4,1],f32>"]


def test_without_roles_all_belongs_to_the_forward(context: Any) -> None:
    module = ir.Module.parse("func.func @joint(%x: i32) -> i32 { return %x : i32 }")
    graph = read_joint(first_function(module)).graph
    assert (graph.forward_results, graph.backward_results) == ((0,), ())
    assert not graph.tangents | graph.mutated


@pytest.mark.parametrize(
    ("type_", "shape", "size"),
    [
        ("!torch.vtensor<[2,3],f32>", (2, 3), 24),
        ("!torch.vtensor<[2,3],bf16>", (2, 3), 12),
        ("!torch.vtensor<[3],f64>", (3,), 24),
        ("!torch.vtensor<[3],si64>", (3,), 24),
        ("!torch.vtensor<[3],ui8>", (3,), 3),
        ("!torch.vtensor<[3],i1>", (3,), 3),
        ("!torch.vtensor<[3],f8E4M3FN>", (3,), 3),
        ("!torch.vtensor<[3],complex<f32>>", (3,), 24),
        ("!torch.vtensor<[],f32>", (), 4),
        ("!torch.vtensor<[0,3],f32>", (0, 3), 0),
        ("!torch.int", None, 0),
        ("!torch.list<vtensor<[2,3],f32>>", None, 0),
        ("!torch.vtensor", None, 0),
        ("tensor<2x3xf32>", None, 0),
        ("!bwd.token", None, 0),
    ],
)
def test_shapes_and_bytes(context: Any, type_: str, shape: tuple[int, ...] | None, size: int) -> None:
    parsed = ir.Type.parse(type_)
    assert tensor_shape(parsed) == shape
    if shape is not None:
        assert prod(shape) * element_bytes(parsed) == size


def test_open_sizes_are_those_of_the_trace(context: Any) -> None:
    module = ir.Module.parse("""
      module attributes {bwd.sizes = {batch = 6 : i64}} {
        func.func @joint(%x: !torch.vtensor<[?,3],f32> {bwd.shape = "batch, 3"},
                         %n: !torch.int {bwd.role = "size", bwd.name = "batch"}) -> !torch.vtensor<[?,3],f32> {
          %y = torch.aten.exp %x {bwd.shapes = ["batch, 3"]} : !torch.vtensor<[?,3],f32> -> !torch.vtensor<[?,3],f32>
          %z = torch.aten.exp %y : !torch.vtensor<[?,3],f32> -> !torch.vtensor<[?,3],f32>
          return %z : !torch.vtensor<[?,3],f32>
        }
      }
    """)
    graph = read_joint(first_function(module)).graph
    # What is written nowhere counts as 1.
    assert [value.bytes for value in graph.values] == [72, 0, 72, 12]
    assert [op.flops for op in graph.ops] == [18, 3]
    assert tensor_shape(ir.Type.parse("!torch.vtensor<[?,3],f32>")) == (None, 3)


def test_read_interface(context: Any) -> None:
    module = ir.Module.parse("""
        func.func @forward(%x: !torch.vtensor<[2,3],f32> {bwd.role = "input", bwd.name = "x", bwd.value = "primals_1"},
                           %n: !torch.vtensor<[],i1>)
            -> (!torch.vtensor<[2,3],f32> {bwd.role = "output", bwd.name = "out"}) {
          return %x : !torch.vtensor<[2,3],f32>
        }
    """)
    assert read_interface(first_function(module)) == FunctionSpec(
        "forward",
        (TensorSpec("x", "input", (2, 3), "float32", "primals_1", (2, 3)), TensorSpec("", "", (), "bool")),
        (TensorSpec("out", "output", (2, 3), "float32", "", (2, 3)),),
    )


@pytest.mark.parametrize(
    ("element", "dtype"),
    [
        *[("f64", "float64"), ("f16", "float16"), ("bf16", "bfloat16"), ("f8E5M2", "float8_e5m2")],
        *[("si64", "int64"), ("si32", "int32"), ("si16", "int16"), ("si8", "int8"), ("ui8", "uint8")],
        *[("complex<f32>", "complex64"), ("complex<f64>", "complex128")],
    ],
)
def test_dtypes(context: Any, element: str, dtype: str) -> None:
    module = ir.Module.parse(f"func.func @f(%x: !torch.vtensor<[2],{element}>) {{ return }}")
    assert read_interface(first_function(module)).arguments[0].dtype == dtype


@pytest.mark.parametrize("type_", ["!torch.int", "tensor<2xf32>", "!torch.vtensor<[2],si4>"])
def test_an_interface_is_made_of_tensors_that_torch_has(context: Any, type_: str) -> None:
    module = ir.Module.parse(f'func.func @f(%x: {type_} {{bwd.name = "x"}}) {{ return }}')
    with pytest.raises(ValueError, match=r"x has type .*, which no torch tensor has"):
        read_interface(first_function(module))


SEEDED = """
!seed = !torch.vtensor<[2],si64>
!rows = !torch.vtensor<[4,8],f32>
!mask = !torch.vtensor<[4,8],i1>
!long = !torch.vtensor<[1,4,8],f32>
func.func @joint(%x: !rows {bwd.role = "input", bwd.name = "x"},
                 %seed: !seed {bwd.role = "ROLE", bwd.name = "seed"})
    -> (!rows {bwd.role = "output", bwd.name = "out"}) {
  %zero = torch.constant.int 0
  %p = torch.constant.float 0.5
  %u = torch.operator "torch.retrograd.uniform"(%seed, %zero) : (!seed, !torch.int) -> !rows
  %keep = torch.aten.ge.Scalar %u, %p : !rows, !torch.float -> !mask
  %view = torch.aten.unsqueeze %u, %zero : !rows, !torch.int -> !long
  %log = torch.aten.log %view : !long -> !long
  %y = torch.aten.mul.Tensor %x, %keep : !rows, !mask -> !rows
  %sum = torch.aten.cumsum %u, %zero, %zero : !rows, !torch.int, !torch.int -> !rows
  %z = torch.aten.neg %sum : !rows -> !rows
  return %y : !rows
}
"""


@pytest.mark.parametrize("role", ["seed", "input"])
def test_functions_of_the_seed_alone_are_constants(context: Any, role: str) -> None:
    module = ir.Module.parse(SEEDED.replace("ROLE", role))
    kinds = {op.name: op.kind for op in read_joint(first_function(module)).graph.ops}
    free = OpKind.CONSTANT if role == "seed" else OpKind.POINTWISE
    assert [kinds[name] for name in ("torch.retrograd.uniform", "torch.aten.ge.Scalar", "torch.aten.log")] == [free] * 3
    assert kinds["torch.aten.unsqueeze"] is OpKind.VIEW
    # What depends on something else, or is no elementwise op, is what it was, and so is what follows it.
    assert kinds["torch.aten.mul.Tensor"] is OpKind.POINTWISE
    assert kinds["torch.aten.cumsum"] is OpKind.REDUCTION
    assert kinds["torch.aten.neg"] is OpKind.POINTWISE


@pytest.mark.parametrize(
    ("attributes", "kind", "flops"), [("", OpKind.OPAQUE, 0), ("{bwd.flops = 512 : i64}", OpKind.COMPUTE, 512)]
)
def test_an_op_that_runs_in_torch_may_say_what_it_costs(
    context: Any, attributes: str, kind: OpKind, flops: int
) -> None:
    """It then gives the same each time, and may be computed again."""
    call = f'%y = torch.operator "torch.retrograd.island"(%x) {attributes} : (!rows) -> !rows'
    text = SEEDED.replace("%y = torch.aten.mul.Tensor %x, %keep : !rows, !mask -> !rows", call).replace("ROLE", "seed")
    module = ir.Module.parse(text)
    (op,) = [op for op in read_joint(first_function(module)).graph.ops if "island" in op.name]
    assert (op.kind, op.flops) == (kind, flops)


def test_a_number_is_reduced_along_no_axis(context: Any) -> None:
    """PyTorch takes it for a row of one element, which has an axis 0."""
    module = ir.Module.parse(
        """
        !number = !torch.vtensor<[],f32>
        func.func @joint(%x: !number {bwd.role = "input", bwd.name = "x"})
            -> (!number {bwd.role = "output", bwd.name = "out"}) {
          %zero = torch.constant.int 0
          %true = torch.constant.bool true
          %none = torch.constant.none
          %axes = torch.prim.ListConstruct %zero : (!torch.int) -> !torch.list<int>
          %sum = torch.aten.sum.dim_IntList %x, %axes, %true, %none
              : !number, !torch.list<int>, !torch.bool, !torch.none -> !number
          return %sum : !number
        }
        """
    )
    assert read_joint(first_function(module)).graph.ops[-1].kind is OpKind.REDUCTION


COPIES = """
!rows = !torch.vtensor<[4,64],f32>
!columns = !torch.vtensor<[64,4],f32>
func.func @joint(%x: !rows {bwd.role = "input", bwd.name = "x"}, %t: !rows {bwd.role = "tangent", bwd.name = "t"})
    -> (!rows {bwd.role = "output", bwd.name = "out"}, !rows {bwd.role = "output", bwd.name = "other"},
        !columns {bwd.role = "output", bwd.name = "turned"}, !rows {bwd.role = "grad", bwd.name = "grad.x"}) {
  %none = torch.constant.none
  %y = torch.aten.exp %x {bwd.values = ["y"]} : !rows -> !rows
  %idle = torch.aten.clone %y, %none {bwd.values = ["idle"]} : !rows, !torch.none -> !rows
  %kept = torch.aten.clone %x, %none {bwd.values = ["kept"]} : !rows, !torch.none -> !rows
  %view = torch.aten.t %y {bwd.values = ["view"]} : !rows -> !columns
  %turned = torch.aten.clone %view, %none {bwd.values = ["turned"]} : !columns, !torch.none -> !columns
  return %idle, %kept, %turned, %t : !rows, !rows, !columns, !rows
}
"""


def test_a_copy_of_what_an_op_computes_is_none_but_that_of_an_argument_or_a_transposed_view_is(context: Any) -> None:
    module = ir.Module.parse(COPIES)
    graph = read_joint(first_function(module)).graph
    kinds = [op.kind for op in graph.ops if op.name == "torch.aten.clone"]
    assert kinds == [OpKind.VIEW, OpKind.POINTWISE, OpKind.POINTWISE]


def test_transposes_of_matrices(context: Any) -> None:
    """Of matrices alone: other orders of axes are no matter of how a product reads its operands."""
    module = ir.Module.parse("""
func.func @joint(%x: !torch.vtensor<[4,64],f32> {bwd.role = "input", bwd.name = "x"},
                 %y: !torch.vtensor<[2,4,64],f32> {bwd.role = "input", bwd.name = "y"})
    -> (!torch.vtensor<[64,4],f32> {bwd.role = "output", bwd.name = "a"},
        !torch.vtensor<[64,4],f32> {bwd.role = "output", bwd.name = "b"},
        !torch.vtensor<[4,2,64],f32> {bwd.role = "output", bwd.name = "c"}) {
  %zero = torch.constant.int 0
  %one = torch.constant.int 1
  %order = torch.prim.ListConstruct %one, %zero : (!torch.int, !torch.int) -> !torch.list<int>
  %a = torch.aten.permute %x, %order : !torch.vtensor<[4,64],f32>, !torch.list<int> -> !torch.vtensor<[64,4],f32>
  %b = torch.aten.t %x : !torch.vtensor<[4,64],f32> -> !torch.vtensor<[64,4],f32>
  %c = torch.aten.transpose.int %y, %zero, %one
      : !torch.vtensor<[2,4,64],f32>, !torch.int, !torch.int -> !torch.vtensor<[4,2,64],f32>
  return %a, %b, %c : !torch.vtensor<[64,4],f32>, !torch.vtensor<[64,4],f32>, !torch.vtensor<[4,2,64],f32>
}
""")
    graph = read_joint(first_function(module)).graph
    names = {value: graph.ops[graph.values[value].producer or 0].name for value in graph.transposed}
    assert sorted(names.values()) == ["torch.aten.permute", "torch.aten.t"]
    assert set(graph.transposed.values()) == {0}
