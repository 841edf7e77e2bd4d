# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One function for each kind of statement, which draws its operands among the values so far."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from builder import LARGEST, Builder
from hypothesis import strategies as st
from op_tables import BINARY, ELEMENTWISE, IN_PLACE, PER_AXIS, REARRANGED, REDUCTIONS, WHOLE
from torch import Tensor


def elementwise(b: Builder) -> str:
    return b.choose(ELEMENTWISE).format(x=b.pick())


def binary(b: Builder) -> str:
    a = b.pick()
    other = b.pick(lambda v: _broadcasts(v, b.values[a]) and v.dtype == b.values[a].dtype)
    return b.choose(BINARY).format(a=a, b=other)


def mixed(b: Builder) -> str:
    a = b.pick()
    return f"{a} * {b.pick(lambda v: _broadcasts(v, b.values[a]))}"


def reduction(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 0)
    return b.choose(REDUCTIONS).format(x=x, d=b.axis(x), k=b.draw(st.booleans()))


def whole(b: Builder) -> str:
    return b.choose(WHOLE).format(x=b.pick())


def per_axis(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 0)
    return b.choose(PER_AXIS).format(x=x, d=b.axis(x))


def cast(b: Builder) -> str:
    return f"{b.pick()}.to(torch.{b.choose(('float32', 'float64', 'bfloat16'))})"


def reshape(b: Builder) -> str:
    x = b.pick()
    count = b.values[x].numel()
    first = b.choose([n for n in range(1, count + 1) if count % n == 0])
    second = b.choose([n for n in range(1, count // first + 1) if count // first % n == 0])
    shape = b.choose(([-1], [first, -1], [first, second, -1], [1, first, second, -1]))
    return f"{x}.reshape({shape})"


def transpose(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 1)
    if b.draw(st.booleans()):
        return f"{x}.permute({b.draw(st.permutations(range(b.values[x].dim())))})"
    return f"{x}.transpose({b.axis(x)}, {b.axis(x)}){b.choose(('', '.contiguous()'))}"


def cut(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 0 and max(v.shape) > 1)
    d = b.axis(x, least=2)
    size = b.values[x].shape[d]
    start = b.number(0, size - 1)
    leading = ":, " * (d % b.values[x].dim())
    return b.choose(
        (
            f"{x}.select({d}, {start})",
            f"{x}.narrow({d}, {start}, {b.number(1, size - start)})",
            f"{x}[{leading}{start}::{b.number(1, 3)}]",
            f"{x}.chunk(2, {d})[{b.number(0, 1)}]",
            f"{x}.unfold({d}, 2, {b.number(1, 2)})",
            f"torch.flip({x}, [{d}])",
            f"torch.roll({x}, {b.number(1, 3)}, {d})",
            f"{x}.unbind({d})[{start}]",
            f"{x}.split({b.number(1, size)}, {d})[-1]",
        )
    )


def rank(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() < 4)
    d = b.number(0, b.values[x].dim())
    return b.choose(
        (f"{x}.unsqueeze({d})", f"{x}.unsqueeze({d}).expand({_repeated(b.values[x], d)})", f"{x}.squeeze()")
    )


def square(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() >= 2)
    k = b.number(-1, 1)
    return b.choose(
        (f"torch.tril({x}, {k})", f"torch.triu({x}, {k})", f"{x}.diagonal(0, -2, -1)", f"{x}.flatten(0, 1)")
    )


def index(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 0 and max(v.shape) > 1)
    d = b.axis(x, least=2)
    size = b.values[x].shape[d]
    places = b.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    constant, leading = f"torch.tensor({places}, device={x}.device)", ":, " * (d % b.values[x].dim())
    ids = b.choose([i.name for i in b.inputs if i.indices])
    return b.choose(
        (
            f"torch.index_select({x}, {d}, {constant})",
            f"torch.index_select({x}, {d}, {ids})",
            f"{x}[{leading}{ids}]",
            f"{x}[{leading}{places}]",
            f"{x}.index_add({d}, {ids}, torch.index_select({x}, {d}, {ids}) * 0.5)",
            f"{x}.index_copy({d}, torch.tensor([{places[0]}], device={x}.device), {x}.narrow({d}, 0, 1) * 2)",
            f"torch.gather({x}, {d}, torch.zeros_like({x}, dtype=torch.int64) + {places[0]})",
            f"torch.scatter_add({x}, {d}, torch.zeros_like({x}, dtype=torch.int64) + {places[0]}, {x} * 0.5)",
            f"{x}.repeat_interleave(2, {d})",
            f"torch.index_fill({x}, {d}, {ids}, 0.5)",
        )
    )


def scatter(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 0 and v.shape[0] > 1)
    ids = b.choose([i for i in b.inputs if i.indices])
    source = f"torch.index_select({x}, 0, {ids.name}).tanh()"
    return b.choose(
        (
            f"{x}.index_put(({ids.name},), {source}, accumulate=True)",
            f"F.embedding({ids.name}, {x}.reshape({b.values[x].shape[0]}, -1))",
            f"torch.zeros_like({x}).index_add(0, {ids.name}, {source})",
        )
    )


def join(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 0)
    y = b.pick(lambda v: v.shape == b.values[x].shape and v.dtype == b.values[x].dtype)
    op = b.choose(("cat", "stack"))
    return f"torch.{op}([{x}, {y}, {x} * 0.5], {b.axis(x)})"


def product(b: Builder) -> str:
    a = b.pick(lambda v: v.dim() >= 2)
    inner = b.values[a].shape[-1]
    columns = b.number(1, 5)
    dtype = b.values[a].dtype
    other = b.weight(inner, columns) + f".to({dtype})"
    return b.choose(
        (
            f"({a} @ {other})",
            f"F.linear({a}, {other}.transpose(0, 1))",
            f"({a} @ {a}.transpose(-1, -2)) * {round(1 / inner, 3)}",
            f"torch.einsum('...ij,jk->...ki', {a}, {other})",
            f"({a} @ {other}[:, 0])",
            f"torch.tensordot({a}, {other}, dims=1)",
        )
    )


def normalization(b: Builder) -> str:
    # Rows of one number, as of an expanded tensor, are divided by a deviation that is rounding alone.
    x = b.pick(lambda v: v.dim() >= 2 and v.shape[-1] > 2 and bool((v.double().std(-1, correction=0) > 1e-3).all()))
    channels = b.values[x].shape[1]
    options = [f"F.layer_norm({x}, {list(b.values[x].shape[-1:])})", f"F.rms_norm({x}, {list(b.values[x].shape[-1:])})"]
    if b.values[x].dim() == 3:
        options += [f"F.group_norm({x}, {channels})", f"F.instance_norm({x})"]
    if b.values[x].numel() // channels > 2:
        options.append(f"F.batch_norm({x}, None, None, training=True)")
    return b.choose(options)


def convolution(b: Builder) -> str:
    spatial = b.number(1, 2)
    x = b.pick(lambda v: v.dim() == spatial + 2 and min(v.shape[2:]) > 2)
    value = b.values[x]
    groups = b.choose([g for g in (1, 2, value.shape[1]) if value.shape[1] % g == 0])
    weight = b.weight(groups * b.number(1, 2), value.shape[1] // groups, *[2] * spatial)
    options = f"stride={b.number(1, 2)}, padding={b.number(0, 1)}, dilation={b.number(1, 2)}, groups={groups}"
    return f"F.conv{spatial}d({x}, {weight}.to({value.dtype}), {options})"


def pooling(b: Builder) -> str:
    spatial = b.number(1, 2)
    x = b.pick(lambda v: v.dim() == spatial + 2 and min(v.shape[2:]) > 2)
    size, stride, padding = b.number(2, 3), b.number(1, 2), b.number(0, 1)
    return b.choose(
        (
            f"F.max_pool{spatial}d({x}, {size}, {stride}, {padding})",
            f"F.avg_pool{spatial}d({x}, {size}, {stride}, {padding})",
            f"F.adaptive_avg_pool{spatial}d({x}, 1)",
            f"F.interpolate({x}, scale_factor=2, mode='nearest')",
        )
    )


def padding(b: Builder) -> str:
    x = b.pick(lambda v: v.dim() > 0 and v.shape[-1] > 2)
    amounts = f"({b.number(-1, 2)}, {b.number(-1, 2)})"
    options = [f"F.pad({x}, {amounts})", f"F.pad({x}, {amounts}, value=0.5)"]
    if b.values[x].dim() in (2, 3):
        options += [f"F.pad({x}, (1, 2), mode='{mode}')" for mode in ("reflect", "circular")]
    return b.choose(options)


def rearranged(b: Builder) -> str:
    """A value that meets itself rearranged, after something that sums along an axis, or not."""
    x = _square(b)
    if b.draw(st.booleans()):
        x = b.assign(b.choose(PER_AXIS).format(x=x, d=b.choose((-1, -2))))
    other = b.assign(b.choose(REARRANGED).format(x=x, n=b.values[x].shape[-1]))
    return b.choose(BINARY).format(a=x, b=other)


def contrast(b: Builder) -> str:
    """Two losses of one value, along its rows and along its columns."""
    x = _square(b)
    if b.values[x].dim() > 2:
        x = b.assign(f"{x}.reshape(-1, *{x}.shape[-2:])[0]")
    labels = f"torch.arange({b.values[x].shape[0]}, device={x}.device)"
    loss = b.choose(
        ("F.cross_entropy({0}, {1})", "F.nll_loss(F.log_softmax({0}, 1), {1})", "F.mse_loss({0}, {0} * 0.5)")
    )
    return f"{loss.format(x, labels)} + {loss.format(f'{x}.transpose(0, 1)', labels)}"


def _square(b: Builder) -> str:
    """A value whose last two axes are as long."""
    x = b.pick(lambda v: v.dim() >= 2 and min(v.shape[-2:]) > 1)
    rows, columns = b.values[x].shape[-2:]
    if rows == columns and b.draw(st.booleans()):
        return x
    size = min(rows, columns)
    return b.assign(
        b.choose((f"({x} @ {x}.transpose(-1, -2)) * {round(1 / columns, 3)}", f"{x}[..., :{size}, :{size}]"))
    )


def in_place(b: Builder) -> None:
    """A statement that writes to a value, or to a view of one."""
    fresh = b.draw(st.booleans())
    x = b.pick(lambda v: v.dim() > 0)
    target = b.assign(f"{x} * 1.0") if fresh else x
    d = b.axis(target)
    view = b.choose(
        (
            target,
            f"{target}.select({d}, 0)",
            f"{target}.transpose(0, -1)",
            f"{target}.narrow({d}, 0, 1)",
            f"{target}[0]",
        )
    )
    shape = eval(view, b.scope).shape
    other = b.pick(lambda v: v.dtype == b.values[target].dtype and _fits_into(v, shape))
    b.run(b.choose(IN_PLACE).format(x=view, y=other))


EXPRESSIONS: tuple[Callable[[Builder], str], ...] = (
    *(elementwise, binary, reduction, per_axis, reshape, transpose, cut, product) * 3,
    *(whole, mixed, rank, square, index, scatter, join, normalization, pooling, padding, rearranged) * 2,
    *(cast, convolution, contrast),
)


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    try:
        return bool(math.prod(torch.broadcast_shapes(a.shape, b.shape)) <= LARGEST)
    except RuntimeError:
        return False


def _fits_into(value: Tensor, shape: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(value.shape, shape) == shape)
    except RuntimeError:
        return False


def _repeated(value: Tensor, axis: int) -> list[int]:
    return [*value.shape[:axis], 2, *value.shape[axis:]]
