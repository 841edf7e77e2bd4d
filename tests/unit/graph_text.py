# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Joint graphs from a few lines of text, for tests of what decides on them.

    input x 64           an argument of 64 bytes; `tangent`, and `mutated` for what the step overwrites, go alike
    y = compute x x 64   an op of that kind on two operands, and its result's bytes
    a b = random y 4 8   two results; `-` in place of bytes: no tensor
    forward y            results of the forward, then of the backward
    backward t

The names in `NAMED` are the ops of these names. A `!` before the kind says that the op costs 100 floating-point
operations in place of none; `@prefer` after it what the user asked of the op, and `#1` after that the checkpointed
block that it is in.
"""

from __future__ import annotations

from collections.abc import Iterable

from retrograd.contract.attributes import Tag
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op, Value
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

# A joint function in MLIR, for tests of what compiles: with `default` both residuals, %e and %s, are saved.
JOINT = """
!wide = !torch.vtensor<[16,16],f32>
func.func @joint(%x: !wide {bwd.role = "input", bwd.name = "x"}, %t: !wide {bwd.role = "tangent", bwd.name = "t"})
    -> (!wide {bwd.role = "output", bwd.name = "out"}, !wide {bwd.role = "grad", bwd.name = "grad.x"}) {
  %e = torch.aten.mm %x, %x : !wide, !wide -> !wide
  %s = torch.aten.sin %e : !wide -> !wide
  %out = torch.aten.neg %s : !wide -> !wide
  %a = torch.aten.mul.Tensor %t, %s : !wide, !wide -> !wide
  %grad = torch.aten.mul.Tensor %a, %e : !wide, !wide -> !wide
  return %out, %grad : !wide, !wide
}
"""
# Ops that kernels are formed around, by their names in the text.
NAMED = {
    "mm": OpKind.COMPUTE,
    "bmm": OpKind.COMPUTE,
    "add.Tensor": OpKind.POINTWISE,
    "constant_pad_nd": OpKind.DATA_MOVEMENT,
    "clone": OpKind.POINTWISE,
    "full": OpKind.POINTWISE,
    "full_like": OpKind.POINTWISE,
    "cat": OpKind.DATA_MOVEMENT,
    "permute": OpKind.VIEW,
    "split.Tensor": OpKind.VIEW,
    "_scaled_dot_product_flash_attention_for_cpu_backward": OpKind.COMPUTE,
    "select.int": OpKind.VIEW,
    "unsqueeze": OpKind.VIEW,
    "gather": OpKind.DATA_MOVEMENT,
    "scatter_add": OpKind.SCATTER,
    "amax": OpKind.REDUCTION,
    "eq.Tensor": OpKind.POINTWISE,
    "sub.Tensor": OpKind.POINTWISE,
    "abs": OpKind.POINTWISE,
    "gt.Scalar": OpKind.POINTWISE,
    "threshold_backward": OpKind.POINTWISE,
}
ARGUMENTS = ("input", "tangent", "mutated")


def parse_graph(text: str) -> JointGraph:
    """The graph that `text` describes."""
    numbers: dict[str, int] = {}
    values: list[Value] = []
    ops: list[Op] = []
    marked: dict[str, list[int]] = {word: [] for word in (*ARGUMENTS, "forward", "backward")}

    def add(name: str, size: str, producer: int | None) -> int:
        numbers[name] = len(values)
        values.append(Value(len(values), name, 0 if size == "-" else int(size), producer, size != "-"))
        return numbers[name]

    for line in filter(str.strip, text.splitlines()):
        left, equals, right = line.strip().partition("=")
        words = left.split()
        if not equals and words[0] in ARGUMENTS:
            marked[words[0]].append(add(words[1], words[2], None))
        elif not equals:
            marked[words[0]] += [numbers[name] for name in words[1:]]
        else:
            kind, *rest = right.split()
            operands = tuple(numbers[name] for name in rest[: len(rest) - len(words)])
            results = tuple(add(name, size, len(ops)) for name, size in zip(words, rest[-len(words) :], strict=True))
            flops = 100 if kind.startswith("!") else 0
            kind, _, block = kind.removeprefix("!").partition("#")
            kind, _, tag = kind.partition("@")
            marks = (Tag(tag) if tag else None, int(block) if block else None)
            name = f"torch.aten.{kind}" if kind in NAMED else f"test.{kind}"
            ops.append(Op(len(ops), name, NAMED.get(kind) or OpKind(kind), operands, results, flops, *marks))
    return JointGraph(
        values=tuple(values),
        ops=tuple(ops),
        arguments=tuple(v.id for v in values if v.producer is None),
        tangents=frozenset(marked["tangent"]),
        forward_results=tuple(marked["forward"]),
        backward_results=tuple(marked["backward"]),
        mutated=frozenset(marked["mutated"]),
    )


def value_names(graph: JointGraph, values: Iterable[int]) -> list[str]:
    """Names of values given by number, in the order given."""
    return [graph.values[value].name for value in values]


def op_names(graph: JointGraph, ops: Iterable[int]) -> list[str]:
    """Ops by the name of their first result, in program order."""
    return [graph.values[graph.ops[op].results[0]].name for op in sorted(ops)]
