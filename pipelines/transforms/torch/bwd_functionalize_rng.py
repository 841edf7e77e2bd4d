# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-functionalize-rng``: random numbers become arithmetic on a seed and on the place of each element.

The generator is Philox4x32-7 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011), in 32-bit
integers, so that every target gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import tensor_shape
from retrograd.pipelines.analysis.partition.read_graph import operator_name
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.generics import GENERIC, ITERATORS, MAPS, SEGMENTS, iterators_of
from retrograd.pipelines.transforms.helpers.maker import Maker

UNIFORM = "torch.retrograd.uniform"
_ROUNDS = 7
GENERATOR = f"Philox4x32-{_ROUNDS}, four numbers of a draw"
"""What an executable of random numbers has in common with those that draw the same ones."""

# What makes the body of the op: at the place that is current then.
_HERE = Maker()
_create = _HERE.value
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


class BwdFunctionalizeRng(ModulePass):
    """``retrograd.uniform(seed, stream, sizes)`` becomes one elementwise op, which fuses with what takes the numbers.

    Element ``i`` of stream ``s`` is word ``i % 4`` of Philox at counter ``(i // 4, s, seed[1])`` and key ``seed[0]``,
    low words first; its upper 24 bits over 2**24 are the number, exact in f32. A pure function of the seed: a backward
    that runs the op again has the forward's numbers, and a mask is never saved. Each element works out all four words:
    to share them, the numbers would have to be written to memory and read again, which takes longer than the
    arithmetic. Kernels of our own, which hold a tile of elements, share them.
    """

    description = "Turn random numbers into arithmetic on a seed, the same wherever it is done"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for block in func.regions[0].blocks:
                for op in [view.operation for view in block.operations]:
                    if operator_name(op) == UNIFORM:
                        expand_uniform(op)


def expand_uniform(op: ir.Operation) -> None:
    """Replace one ``retrograd.uniform`` by a ``linalg.generic``.

    Raises:
        PassFailure: the stream is no constant, the result is no tensor of f32, or has more than 2**32 elements (as far
            as its sizes are known), or an open size is no operand of the op.
    """
    stream, shape = _stream(op), _shape(op)
    make, location = Maker.before(op), op.location
    seed = make.value("torch_c.to_builtin_tensor", [op.operands[0]], ir.Type.parse("tensor<2xi64>"))
    dynamic = ir.ShapedType.get_dynamic_size()
    type_ = ir.RankedTensorType.get([dynamic if n is None else n for n in shape], ir.F32Type.get(), loc=location)
    with ir.InsertionPoint(op), location:
        sizes = {axis: _open_size(op, axis) for axis, size in enumerate(shape) if size is None}
        extents = [_index_of(sizes[axis]) for axis in sizes]
    attributes = {
        MAPS: ir.ArrayAttr.get([ir.AffineMapAttr.get(ir.AffineMap.get_identity(len(shape)))]),
        ITERATORS: iterators_of(len(shape)),
        SEGMENTS: ir.DenseI32ArrayAttr.get([0, 1]),
    }
    generic = make.op(GENERIC, [make.empty(type_, extents)], [type_], attributes, regions=1)
    body = generic.regions[0].blocks.append(ir.F32Type.get(), arg_locs=[location])
    with ir.InsertionPoint(body), location:
        _fill([sizes[axis] if n is None else n for axis, n in enumerate(shape)], stream, seed)
    result = make.value("torch_c.from_builtin_tensor", [generic.results[0]], op.results[0].type)
    op.results[0].replace_all_uses_with(result)
    op.erase()


def _fill(shape: Sequence[int | ir.Value], stream: int, seed: ir.Value) -> None:
    """The body of the elementwise op: the element's number from its place and the seed."""
    key, tail = _seed_word(seed, 0), _seed_word(seed, 1)
    place = _flat_index(shape)
    words = philox((_binary("arith.shrui", place, _constant(2)), _constant(stream), *tail), key)
    word = _choose(_binary("arith.andi", place, _constant(3)), words)
    upper = _binary("arith.shrui", word, _constant(8))
    f32 = ir.F32Type.get()
    number = _create("arith.sitofp", [upper], f32)
    unit = _HERE.constant(ir.FloatAttr.get(f32, 2.0**-24))
    _HERE.op("linalg.yield", [_binary("arith.mulf", number, unit)])


def _choose(number: ir.Value, words: Sequence[ir.Value]) -> ir.Value:
    """The word of this number among four: by its two bits."""
    bits = [_binary("arith.andi", number, _constant(1)), _binary("arith.shrui", number, _constant(1))]
    odd, upper = (_create("arith.trunci", [bit], ir.IntegerType.get_signless(1)) for bit in bits)
    low, high = (_create("arith.select", [odd, *reversed(words[at : at + 2])], _i32()) for at in (0, 2))
    return _create("arith.select", [upper, high, low], _i32())


def philox(counter: tuple[ir.Value, ...], key: tuple[ir.Value, ir.Value]) -> list[ir.Value]:
    """Philox4x32-7: four words from a counter of four and a key of two, all i32, lowest word first."""
    words = list(counter)
    keys = list(key)
    for number in range(_ROUNDS):
        if number:
            keys = [_binary("arith.addi", k, _constant(w)) for k, w in zip(keys, _INCREMENTS, strict=True)]
        (low0, high0), (low1, high1) = (
            _product(_constant(m), w) for m, w in zip(_MULTIPLIERS, (words[0], words[2]), strict=True)
        )
        words = [_xor(high1, words[1], keys[0]), low1, _xor(high0, words[3], keys[1]), low0]
    return words


def _flat_index(shape: Sequence[int | ir.Value]) -> ir.Value:
    """Number of the element in row-major order, modulo 2**32."""
    flat = _constant(0)
    for dim, size in enumerate(shape):
        number = ir.IntegerAttr.get(_i64(), dim)
        index = _create("linalg.index", [], ir.IndexType.get(), {"dim": number})
        place = _create("arith.index_cast", [index], _i32())
        if dim:
            width = _constant(size) if isinstance(size, int) else _create("arith.trunci", [size], _i32())
            flat = _binary("arith.addi", _binary("arith.muli", flat, width), place)
        else:
            flat = place
    return flat


def _seed_word(seed: ir.Value, place: int) -> tuple[ir.Value, ir.Value]:
    """Low and high half of one number of the seed. Read inside of the body: outside of it, it would be a read by the
    host, which waits for the device."""
    return _halves(_create("tensor.extract", [seed, _HERE.index(place)], _i64()))


def _shape(op: ir.Operation) -> tuple[int | None, ...]:
    text = str(op.results[0].type)
    shape = tensor_shape(op.results[0].type)
    if shape is None or not text.endswith(",f32>") or prod(n for n in shape if n is not None) > 2**32:
        message = "bwd-functionalize-rng: expected a result of f32, of at most 2**32 elements"
        raise PassFailure(op, f"{message}, found {text}", "draw f32, and fewer numbers at a time")
    return shape


def _open_size(op: ir.Operation, axis: int) -> ir.Value:
    """A size that differs from call to call, as i64: it is in the op's list of sizes."""
    made = op.operands[2].owner if len(op.operands) > 2 else None
    if not isinstance(made, ir.Operation | ir.OpView) or made.operation.name != "torch.prim.ListConstruct":
        message = f"bwd-functionalize-rng: size {axis} of {op.results[0].type} is in no list of sizes"
        raise PassFailure(op, message, "give the op its sizes as its third operand, a torch.prim.ListConstruct")
    return _create("torch_c.to_i64", [made.operation.operands[axis]], _i64())


def _index_of(size: ir.Value) -> ir.Value:
    return _create("arith.index_cast", [size], ir.IndexType.get())


def _stream(op: ir.Operation) -> int:
    operand = op.operands[1]
    if not (isinstance(operand, ir.OpResult) and operand.owner.name == "torch.constant.int"):
        message = "bwd-functionalize-rng: the number of the stream is no constant"
        raise PassFailure(op, message, "give each random op a constant number of its own")
    return int(ir.IntegerAttr(operand.owner.attributes["value"]).value)


def _xor(first: ir.Value, *others: ir.Value) -> ir.Value:
    for other in others:
        first = _binary("arith.xori", first, other)
    return first


def _product(a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Low and high word of the product; in i64, since IREE does not lower ``arith.mului_extended`` on all vectors."""
    wide = _binary("arith.muli", *(_create("arith.extui", [word], _i64()) for word in (a, b)))
    return _halves(wide)


def _halves(wide: ir.Value) -> tuple[ir.Value, ir.Value]:
    by = _HERE.constant(ir.IntegerAttr.get(_i64(), 32))
    return _create("arith.trunci", [wide], _i32()), _create("arith.trunci", [_binary("arith.shrui", wide, by)], _i32())


def _binary(name: str, a: ir.Value, b: ir.Value) -> ir.Value:
    return _create(name, [a, b], a.type)


def _constant(value: int) -> ir.Value:
    wrapped = (value + 2**31) % 2**32 - 2**31
    return _HERE.constant(ir.IntegerAttr.get(_i32(), wrapped))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)
