# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads a joint function of the torch dialect into the plain data that analyses work on."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from retrograd.contract.attributes import (
    BWD_BLOCK,
    BWD_FLOPS,
    BWD_INLINE,
    BWD_LABEL,
    BWD_NAME,
    BWD_PACKED_AS,
    BWD_RECOMPUTE,
    BWD_ROLE,
    BWD_SHAPE,
    BWD_SHAPES,
    BWD_SIZES,
    BWD_VALUE,
    BWD_VALUES,
    Tag,
)
from retrograd.contract.roles import GRAD, MUTATION, SEED, TANGENT
from retrograd.contract.sizes import evaluate_size, parse_shape
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.cpu_products import repays_packing
from retrograd.pipelines.analysis.layout.op_parts import count_parts
from retrograd.pipelines.analysis.layout.tensor_types import (
    TensorType,
    element_bytes,
    fixed_shape,
    parse_tensor_type,
    tensor_shape,
)
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op, Value
from retrograd.pipelines.analysis.partition.op_kinds import OpKind, op_kind
from retrograd.pipelines.analysis.partition.value_numbering import (
    KEPT_ON_HOST,
    STORED,
    find_reshaped,
    find_transposed,
    number_repeated,
    stored_bytes,
)
from retrograd.pipelines.infra.functions import functions

# What was asked of an op is no part of what it computes.
MARKS = (BWD_RECOMPUTE, BWD_BLOCK, BWD_LABEL)
_IGNORED = (BWD_VALUES, BWD_SHAPES, STORED, KEPT_ON_HOST, BWD_PACKED_AS, *MARKS)
_OPERATOR = "torch.operator"
# Types of tensors that ops write to.
_MUTABLE = "!torch.tensor"
_CLONE = "torch.aten.clone"
_COLLECTIVE = "bwd.collective"
_LIST_UNPACK = "torch.prim.ListUnpack"
# What a chain of ops may be made of that is worked out again rather than saved, if it starts at the seed.
_REPEATED = (OpKind.CONSTANT, OpKind.VIEW, OpKind.POINTWISE)


@dataclass(frozen=True)
class ReadGraph:
    """A graph with the MLIR ops and values it was read from, and what each op does with its operands (see
    ``op_meaning``), each at the place that its number says."""

    graph: JointGraph
    ops: tuple[ir.Operation, ...]
    values: tuple[ir.Value, ...]
    meanings: tuple[Hashable | None, ...]


def read_joint(func: ir.Operation) -> ReadGraph:
    """Read a ``func.func`` of one block whose arguments and results carry ``bwd.role``."""
    block = func.regions[0].blocks[0]
    reader = _BlockReader(ShapeReader(func))
    roles, result_roles = attribute_dicts(func, "arg_attrs"), attribute_dicts(func, "res_attrs")
    for number, argument in enumerate(block.arguments):
        reader.add_value(argument, roles[number].get(BWD_VALUE, f"arg{number}"), None)
    returned: list[int] = []
    for view in block.operations:
        if view.operation.name == "func.return":
            returned = [reader.numbers[o] for o in view.operation.operands]
        else:
            reader.add_op(view.operation)
    arguments = range(len(roles))
    written = {r.get(BWD_NAME) for r in result_roles if r.get(BWD_ROLE) == MUTATION}
    is_backward = [r.get(BWD_ROLE) == GRAD for r in result_roles]
    stored = reader.stored(packed_sizes(func), returned)
    graph = JointGraph(
        values=tuple(replace(v, stored=stored[v.id]) if v.id in stored else v for v in reader.values),
        ops=mark_seeded(reader.ops, reader.values, [a for a in arguments if _is_seed(roles[a])]),
        arguments=tuple(arguments),
        tangents=frozenset(a for a in arguments if roles[a].get(BWD_ROLE) == TANGENT),
        forward_results=tuple(v for v, backward in zip(returned, is_backward, strict=True) if not backward),
        mutated=frozenset(a for a in arguments if roles[a].get(BWD_NAME) in written),
        backward_results=tuple(v for v, backward in zip(returned, is_backward, strict=True) if backward),
    )
    graph = _number(graph, reader.types, reader.meanings)
    return ReadGraph(graph, tuple(reader.ir_ops), tuple(reader.ir_values), tuple(reader.meanings))


class _BlockReader:
    """Numbers the values and the ops of a block in their order, and says what each is."""

    def __init__(self, shapes: ShapeReader) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.ir_values: list[ir.Value] = []
        self.ir_ops: list[ir.Operation] = []
        # Types of values, for what is a tensor; of ops what they do, see :func:`op_meaning`.
        self.types: list[TensorType | None] = []
        self.meanings: list[Hashable | None] = []
        self.numbers: dict[ir.Value, int] = {}
        self._shapes = shapes
        self._sizes: list[tuple[int, ...] | None] = []
        self._mutable: set[int] = set()
        # What is to be saved in a narrower type, or packed.
        self._narrow: list[int] = []

    def add_value(self, value: ir.Value, name: str, producer: int | None) -> int:
        """The number of the next value, an argument or a result of op ``producer``."""
        text = str(value.type)
        known = parse_tensor_type(text)
        shape = None if known is None else self._shapes.resolve(value, known.shape)
        number = self.numbers[value] = len(self.values)
        if text.startswith(_MUTABLE):
            self._mutable.add(number)
        size = 0 if shape is None or known is None else prod(shape) * known.element_bytes
        self.values.append(Value(number, name, size, producer, shape is not None))
        self.types.append(known)
        self._sizes.append(shape)
        self.ir_values.append(value)
        return number

    def _is_idle_copy(self, name: str, operands: Sequence[int]) -> bool:
        """Whether an op copies what another one computes, as that lies: the lowering drops such a copy, of a tensor of
        values; that of a transposed view is where axes change places in memory."""
        producer = self.values[operands[0]].producer if name == _CLONE else None
        return producer is not None and self.ops[producer].kind not in (OpKind.VIEW, OpKind.CONSTANT, OpKind.OPAQUE)

    def add_op(self, op: ir.Operation) -> None:
        """The next op, and its results."""
        number, names = len(self.ops), value_names(op)
        operands = tuple(self.numbers[o] for o in op.operands)
        results = tuple(self.add_value(r, names[i] or f"op{number}.{i}", number) for i, r in enumerate(op.results))
        name = operator_name(op)
        kind = op_kind(name, has_tensor_result=any(self.values[r].is_tensor for r in results))
        if (name == _LIST_UNPACK and _are_views(operands, self.values, self.ops)) or self._is_idle_copy(name, operands):
            kind = OpKind.VIEW
        taken = [self._sizes[o] for o in operands]
        flops = count_flops(name, taken, [self._sizes[r] for r in results])
        if kind is OpKind.OPAQUE and BWD_FLOPS in op.attributes:
            kind, flops = OpKind.COMPUTE, ir.IntegerAttr(op.attributes[BWD_FLOPS]).value
        if name == _COLLECTIVE and read_tag(op) is Tag.MUST:
            # That it is done once more was its caller's choice, in every process.
            kind = OpKind.COMPUTE
        made = self.types[results[0]] if results else None
        packing = (count_parts(op, name, taken), repays_packing(name, taken, "" if made is None else made.element))
        self.ops.append(Op(number, name, kind, operands, results, flops, read_tag(op), _block_of(op), *packing))
        self.ir_ops.append(op)
        # What takes or gives a tensor that is written to is merged with nothing.
        self.meanings.append(op_meaning(op) if self._mutable.isdisjoint((*operands, *results)) else None)
        if STORED in op.attributes or BWD_PACKED_AS in op.attributes:
            self._narrow.extend(results)

    def stored(self, packed: Mapping[str, int], returned: Sequence[int]) -> dict[int, int]:
        """Bytes of the values that are saved in another form than their own, by number."""
        narrow = [number for number in self._narrow if number not in returned]
        sizes = {number: stored_bytes(self.ir_values[number], self._sizes[number], packed) for number in narrow}
        return {number: size for number, size in sizes.items() if size is not None}


def _number(graph: JointGraph, types: Sequence[TensorType | None], meanings: Sequence[Hashable | None]) -> JointGraph:
    """``graph`` with what is known of values that are the same."""
    reshaped = find_reshaped(graph, [None if t is None else t.fixed_shape for t in types])
    transposed = find_transposed(graph, [None if t is None else len(t.shape) for t in types])
    graph = replace(graph, reshaped=reshaped, transposed=transposed)
    return replace(graph, same=number_repeated(graph, meanings))


def _are_views(operands: Sequence[int], values: Sequence[Value], ops: Sequence[Op]) -> bool:
    """Whether a list of tensors is one of views, as a split gives."""
    (producer,) = (values[v].producer for v in operands)
    return producer is not None and ops[producer].kind is OpKind.VIEW


def read_tag(op: ir.Operation) -> Tag | None:
    """Read the user's demand on an op from its ``bwd.recompute``; a text that is no tag asks for nothing."""
    if BWD_RECOMPUTE not in op.attributes:
        return None
    return next((tag for tag in Tag if ir.StringAttr(op.attributes[BWD_RECOMPUTE]).value == tag.value), None)


def _block_of(op: ir.Operation) -> int | None:
    return ir.IntegerAttr(op.attributes[BWD_BLOCK]).value if BWD_BLOCK in op.attributes else None


def mark_seeded(ops: Sequence[Op], values: Sequence[Value], seeds: Iterable[int]) -> tuple[Op, ...]:
    """The ops; those that give functions of a seed and of constants alone, element by element, are CONSTANT.

    The seed is one value for the whole step: the backward works such a value out again, be it a mask or noise, rather
    than keep it alive.
    """
    seeded = set(seeds)
    fixed = set(seeded)
    marked = []
    for op in ops:
        if op.kind in _REPEATED and fixed.issuperset(op.operands):
            fixed.update(op.results)
            if not seeded.isdisjoint(op.operands):
                seeded.update(r for r in op.results if values[r].is_tensor)
                op = replace(op, kind=OpKind.CONSTANT if op.kind is OpKind.POINTWISE else op.kind)
        marked.append(op)
    return tuple(marked)


def _is_seed(attributes: Mapping[str, str]) -> bool:
    return attributes.get(BWD_ROLE) == SEED


def operator_name(op: ir.Operation) -> str:
    """The op's name; of an op of a torch library that the dialect has no op for, the name it is called by."""
    if op.name == _OPERATOR and "name" in op.attributes:
        return str(ir.StringAttr(op.attributes["name"]).value)
    return str(op.name)


def find_operators(module: ir.Operation, names: Container[str]) -> list[ir.Operation]:
    """The ops of these names, as :func:`operator_name` has them, in all functions of a module."""
    return [
        view.operation
        for func in functions(module)
        for block in func.regions[0].blocks
        for view in block.operations
        if operator_name(view.operation) in names
    ]


def attribute_dicts(func: ir.Operation, name: str) -> list[dict[str, str]]:
    """The string attributes of each argument (``arg_attrs``) or result (``res_attrs``) of a function."""
    count = len(func.regions[0].blocks[0].arguments) if name == "arg_attrs" else len(function_type(func).results)
    if name not in func.attributes:
        return [{} for _ in range(count)]
    dicts = [ir.DictAttr(d) for d in ir.ArrayAttr(func.attributes[name])]
    return [{a.name: ir.StringAttr(a.attr).value for a in d if isinstance(a.attr, ir.StringAttr)} for d in dicts]


def text_attributes(entries: Iterable[Mapping[str, str]]) -> ir.Attribute:
    """``arg_attrs`` or ``res_attrs`` of these string attributes: what :func:`attribute_dicts` reads."""
    texts = ({key: ir.StringAttr.get(value) for key, value in entry.items()} for entry in entries)
    return ir.ArrayAttr.get([ir.DictAttr.get(text) for text in texts])


def set_function_type(func: ir.Operation, inputs: Iterable[ir.Type], results: Iterable[ir.Type]) -> None:
    """Give a ``func.func`` another type."""
    func.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([*inputs], [*results]))


def function_type(func: ir.Operation) -> ir.FunctionType:
    """The type of a ``func.func``."""
    return ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value)


def value_names(op: ir.Operation) -> list[str]:
    """Names that the import gave the results of an op; empty where it gave none."""
    if BWD_VALUES not in op.attributes:
        return [""] * len(op.results)
    return [ir.StringAttr(a).value for a in ir.ArrayAttr(op.attributes[BWD_VALUES])]


def op_meaning(op: ir.Operation) -> Hashable | None:
    """Identify an op by what it does, whatever its results are called; ``None`` for one with regions."""
    if len(op.regions):
        return None
    # Attributes are unique in their context and compared by address, so that a large constant is not written out.
    attributes = frozenset((name, op.attributes[name]) for name in op.attributes if name not in _IGNORED)
    return (operator_name(op), attributes, tuple(r.type for r in op.results))


class ShapeReader:
    """Shapes of the values of a function, with the sizes that the trace was made with in place of open ones.

    Open sizes are ``?`` in types. What they are is in ``bwd.shape`` of an argument and ``bwd.shapes`` of an op, as
    expressions over symbols, whose numbers are in ``bwd.sizes`` of the module. A size that is written nowhere counts
    as 1.
    """

    def __init__(self, func: ir.Operation) -> None:
        self._hints = read_hints(func.parent.operation) if func.parent is not None else {}
        self._arguments = [a.get(BWD_SHAPE, "") for a in attribute_dicts(func, "arg_attrs")]

    def text(self, value: ir.Value) -> str:
        """The expressions for an open shape; empty for a fixed one."""
        if not isinstance(value, ir.OpResult):
            return self._arguments[int(ir.BlockArgument(value).arg_number)]
        attributes = value.owner.attributes
        if BWD_SHAPES not in attributes:
            return ""
        return str(ir.StringAttr(ir.ArrayAttr(attributes[BWD_SHAPES])[value.result_number]).value)

    def read(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape of a ``!torch.vtensor``; ``None`` for a value of any other type."""
        declared = tensor_shape(value.type)
        return None if declared is None else self.resolve(value, declared)

    def resolve(self, value: ir.Value, declared: tuple[int | None, ...]) -> tuple[int, ...]:
        """The shape of a tensor of which the type says so much."""
        text = self.text(value) if None in declared else ""
        return evaluate_shape(text, self._hints) if text else tuple(1 if n is None else n for n in declared)


def read_hints(module: ir.Operation) -> dict[str, int]:
    """The sizes that a module was traced with, by their symbols."""
    if BWD_SIZES not in module.attributes:
        return {}
    return {a.name: int(ir.IntegerAttr(a.attr).value) for a in ir.DictAttr(module.attributes[BWD_SIZES])}


def evaluate_shape(text: str, hints: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of a shape of expressions."""
    return tuple(evaluate_size(size, hints) for size in parse_shape(text))


def packed_sizes(func: ir.Operation) -> dict[str, int]:
    """Bytes of what the functions beside ``func`` give that pack saved values, by name."""
    if func.parent is None or func.parent.operation.name != "builtin.module":
        return {}
    beside = [view.operation for view in func.parent.operation.regions[0].blocks[0].operations]
    bodies = [op for op in beside if op.name == "func.func" and BWD_INLINE in op.attributes]
    return {ir.StringAttr(op.attributes["sym_name"]).value: _bytes_of(function_type(op).results) for op in bodies}


def _bytes_of(types: Iterable[ir.Type]) -> int:
    return sum(prod(fixed_shape(type_) or ()) * element_bytes(type_) for type_ in types)


# -- FLOPs ------------------------------------------------------------------------------------------------------------

# Floating-point operations of an op, from its shapes: two per multiply-add, one per element of pointwise work.


Shape = tuple[int, ...] | None


def count_flops(name: str, operands: Sequence[Shape], results: Sequence[Shape]) -> int:
    """FLOPs of the op ``name`` (``torch.aten.mm``) on operands and results of these shapes (``None``: no tensor)."""
    tensors = [s for s in operands if s is not None]
    produced = [s for s in results if s is not None]
    if not produced:
        return 0
    match name.removeprefix("torch.").removeprefix("aten."):
        case "retrograd.lstm" | "retrograd.lstm_backward":
            return 2 * prod(tensors[0][:2]) * prod(tensors[3])
        case "retrograd.rnn_tanh_backward" | "retrograd.rnn_relu_backward":
            return 2 * prod(tensors[0][:2]) * prod(tensors[1])
        case "retrograd.gru" | "retrograd.gru_backward" | "retrograd.rnn_tanh" | "retrograd.rnn_relu":
            return 2 * prod(tensors[0][:2]) * prod(tensors[2])
        case "_scaled_dot_product_flash_attention_for_cpu" | "retrograd.attention":
            return 4 * prod(tensors[0]) * tensors[1][2]
        case "_scaled_dot_product_flash_attention_for_cpu_backward" | "retrograd.attention_backward":
            return 10 * prod(tensors[1]) * tensors[2][2]
        case "mm" | "bmm" | "matmul" | "mv" | "dot" | "linear":
            return 2 * prod(produced[0]) * tensors[0][-1]
        case "addmm" | "baddbmm":
            return 2 * prod(produced[0]) * tensors[1][-1] + prod(produced[0])
        case "addbmm":
            return 2 * prod(produced[0]) * tensors[1][0] * tensors[1][-1] + prod(produced[0])
        case "outer":
            return prod(produced[0])
        case "retrograd.convolution_last_filters":
            return 2 * prod(tensors[0]) * prod(produced[0][1:])
        case "retrograd.convolution_last_images":
            return 2 * prod(tensors[0]) * prod(tensors[1][1:])
        case "convolution" | "retrograd.convolution_last":
            return 2 * prod(produced[0]) * prod(tensors[1][1:])
        case "convolution_backward":
            return 4 * prod(tensors[0]) * prod(tensors[2][1:])
    kind = op_kind(name, has_tensor_result=True)
    if kind is OpKind.POINTWISE:
        return prod(produced[0])
    return prod(tensors[0]) if kind in (OpKind.REDUCTION, OpKind.SCATTER) and tensors else 0
