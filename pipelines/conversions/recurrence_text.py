# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parts of loops over the steps of recurrent layers, as text: pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Carried = tuple[str, tuple[int, ...], str]
"""A value that a loop carries: its name, shape and first value."""

Named = tuple[str, tuple[int, ...]]
"""A value's name and shape."""


@dataclass(frozen=True)
class Sizes:
    """Steps, sequences at a time, and features of a state."""

    steps: int
    batch: int
    width: int

    @property
    def state(self) -> tuple[int, int]:
        """A state's shape."""
        return (self.batch, self.width)

    def gates(self, count: int) -> tuple[int, int]:
        """The shape of so many gates of a step."""
        return (self.batch, count * self.width)

    def apart(self, count: int) -> tuple[int, int, int]:
        """The shape of so many gates of a step, one behind the other."""
        return (count, self.batch, self.width)

    def all(self, step: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of something of all steps."""
        return (self.steps, *step)


def tensor_type(shape: Sequence[int]) -> str:
    """The type of f32 tensors."""
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def _torch(shape: Sequence[int]) -> str:
    return f"!torch.vtensor<[{','.join(map(str, shape))}],f32>"


def fresh(name: str, shape: Sequence[int]) -> str:
    """Storage for something of all steps."""
    return f"    %{name} = tensor.empty() : {tensor_type(shape)}"


def zeros(name: str, empty: str, shape: Sequence[int]) -> str:
    """Zeros in the place of ``empty``."""
    return f"""\
    %nought_{name} = arith.constant 0.0 : f32
    %{name} = linalg.fill ins(%nought_{name} : f32) outs({empty} : {tensor_type(shape)}) -> {tensor_type(shape)}"""


def from_last(sizes: Sizes) -> str:
    """``%n``, the step ``%t`` counted from the last."""
    return f"""\
    %last = arith.constant {sizes.steps - 1} : index
    %n = arith.subi %last, %t : index"""


def states_before(first: str, states: str, sizes: Sizes) -> tuple[str, str]:
    """The states before each step, of which one is before all and the others are after a step: lines, and a value."""
    alone, every, rest = (1, *sizes.state), sizes.all(sizes.state), (sizes.steps - 1, *sizes.state)
    lines = f"""\
    %first = tensor.expand_shape {first} [[0, 1], [2]] output_shape [1, {sizes.batch}, {sizes.width}]
        : {tensor_type(sizes.state)} into {tensor_type(alone)}"""
    if sizes.steps == 1:
        return lines, "%first"
    shape = ", ".join(map(str, rest))
    types = f"({tensor_type(alone)}, {tensor_type(rest)}) -> {tensor_type(every)}"
    return (
        f"""{lines}
    %rest = tensor.extract_slice {states}[0, 0, 0] [{shape}] [1, 1, 1] : {tensor_type(every)} to {tensor_type(rest)}
    %befores = tensor.concat dim(0) %first, %rest : {types}""",
        "%befores",
    )


def insert(part: str, whole: str, step: Sequence[int], every: Sequence[int], at: str = "%t") -> str:
    """A step's part in its place; ``at`` is the step, or the step and a gate."""
    types = f"{tensor_type(step)} into {tensor_type(every)}"
    return f"tensor.insert_slice {part} into {whole}{_slice(at, step, every)} : {types}"


def take(whole: str, step: Sequence[int], every: Sequence[int], at: str = "%t") -> str:
    """A step's part of ``whole``, at a step, or a step and a gate."""
    types = f"{tensor_type(every)} to {tensor_type(step)}"
    return f"tensor.extract_slice {whole}{_slice(at, step, every)} : {types}"


def _slice(at: str, step: Sequence[int], every: Sequence[int]) -> str:
    """Offsets, sizes and strides of a part of one step."""
    ones = ["1"] * (len(every) - len(step))
    offsets = ", ".join([at, *["0"] * len(step)])
    return f"[{offsets}] [{', '.join([*ones, *map(str, step)])}] [{', '.join(['1'] * len(every))}]"


def take_apart(names: Sequence[str], whole: str, sizes: Sizes, at: str = "") -> str:
    """The gates of ``whole``, which are one behind the other; of a step, or of all and at the step ``at``."""
    shape = sizes.apart(len(names))
    every = sizes.all(shape) if at else shape
    places = [f"{at}, {k}" if at else str(k) for k in range(len(names))]
    return "\n    ".join(
        f"{name} = {take(whole, sizes.state, every, place)}" for name, place in zip(names, places, strict=True)
    )


def insert_apart(result: str, parts: Sequence[str], whole: str, sizes: Sizes) -> str:
    """A step's gates, one behind the other, in their place; ``result`` is what holds them all."""
    every = sizes.all(sizes.apart(len(parts)))
    names = [whole, *(f"{result}_{k}" for k in range(1, len(parts))), result]
    return "\n    ".join(
        f"{after} = {insert(part, before, sizes.state, every, f'%t, {k}')}"
        for k, (part, before, after) in enumerate(zip(parts, names[:-1], names[1:], strict=True))
    )


def parts(value: str, names: Sequence[str], sizes: Sizes) -> str:
    """The gates that ``value`` consists of."""
    batch, width = sizes.state
    types = f"{tensor_type(sizes.gates(len(names)))} to {tensor_type(sizes.state)}"
    return "\n    ".join(
        f"{name} = tensor.extract_slice {value}[0, {k * width}] [{batch}, {width}] [1, 1] : {types}"
        for k, name in enumerate(names)
    )


def joined(name: str, parts: Sequence[str], sizes: Sizes) -> str:
    """Gates as one value."""
    types = ", ".join([tensor_type(sizes.state)] * len(parts))
    return f"{name} = tensor.concat dim(1) {', '.join(parts)} : ({types}) -> {tensor_type(sizes.gates(len(parts)))}"


def sigmoid(result: str, of: str) -> str:
    """The lines of a sigmoid of an element; ``%one`` is one."""
    return f"""\
        %neg_{result} = arith.negf %{of} : f32
        %exp_{result} = math.exp %neg_{result} : f32
        %sum_{result} = arith.addf %exp_{result}, %one : f32
        %{result} = arith.divf %one, %sum_{result} : f32"""


def through_sigmoid(result: str, gradient: str, value: str) -> str:
    """The lines of a gradient's way through a sigmoid, whose ``value`` is given."""
    return f"""\
        %rest_{result} = arith.subf %one, %{value} : f32
        %slope_{result} = arith.mulf %{value}, %rest_{result} : f32
        %{result} = arith.mulf %{gradient}, %slope_{result} : f32"""


def through_tanh(result: str, gradient: str, value: str) -> str:
    """The lines of a gradient's way through a tanh, whose ``value`` is given."""
    return f"""\
        %square_{result} = arith.mulf %{value}, %{value} : f32
        %slope_{result} = arith.subf %one, %square_{result} : f32
        %{result} = arith.mulf %{gradient}, %slope_{result} : f32"""


def product(left: str, left_shape: Sequence[int], onto: str, sizes: Sizes) -> str:
    """``onto``, a state, plus the product of a step's gates and the states' weight."""
    given = tensor_type(sizes.state)
    taken = f"{tensor_type(left_shape)}, {tensor_type((left_shape[1], sizes.width))}"
    return f"linalg.matmul ins({left}, %weight_ : {taken}) outs({onto} : {given}) -> {given}"


def weights_apart(count: int, sizes: Sizes) -> str:
    """``%weights``: the states' weight by gates, each turned round, so that products read it row by row."""
    width = sizes.width
    whole, apart = tensor_type((count * width, width)), tensor_type((count, width, width))
    return f"""\
    %by_gates = tensor.expand_shape %weight_ [[0, 1], [2]] output_shape [{count}, {width}, {width}]
        : {whole} into {apart}
    %turned = tensor.empty() : {apart}
    %weights = linalg.transpose ins(%by_gates : {apart}) outs(%turned : {apart}) permutation = [0, 2, 1]"""


def products_apart(onto: str, count: int, sizes: Sizes) -> str:
    """``onto`` plus the products of the state ``%h_`` with the weights of each gate."""
    loops = "(g, m, n, k)"
    maps = ", ".join(f"affine_map<{loops} -> {axes}>" for axes in ("(m, k)", "(g, k, n)", "(g, m, n)"))
    taken = f"{tensor_type(sizes.state)}, {tensor_type((count, sizes.width, sizes.width))}"
    given = tensor_type(sizes.apart(count))
    return f"""linalg.generic {{
        indexing_maps = [{maps}], iterator_types = ["parallel", "parallel", "parallel", "reduction"]
      }} ins(%h_, %weights : {taken}) outs({onto} : {given}) {{
      ^bb0(%left: f32, %right: f32, %sum: f32):
        %both = arith.mulf %left, %right : f32
        %more = arith.addf %sum, %both : f32
        linalg.yield %more : f32
      }} -> {given}"""


def elementwise(
    name: str, inputs: Sequence[str], names: Sequence[str], results: int, empty: str, shape: Sequence[int], body: str
) -> str:
    """An op over elements, which its ``body`` calls by ``names``."""
    same = "affine_map<(m, n) -> (m, n)>"
    maps = ", ".join([same] * (len(inputs) + results))
    types, given = ", ".join([tensor_type(shape)] * len(inputs)), ", ".join([tensor_type(shape)] * results)
    arguments = ", ".join([f"%{n}: f32" for n in names] + [f"%out{k}: f32" for k in range(results)])
    return f"""{name}:{results} = linalg.generic {{
        indexing_maps = [{maps}], iterator_types = ["parallel", "parallel"]
      }} ins({", ".join(inputs)} : {types}) outs({", ".join([empty] * results)} : {given}) {{
      ^bb0({arguments}):
{body}
      }} -> ({given})"""


def loop_over(carried: Sequence[Carried], body: str, yielded: Sequence[str], steps: int) -> str:
    """The loop over steps ``%t``, whose results are ``%r``; in ``body`` what is carried has an underscore behind it."""
    types = ", ".join(tensor_type(shape) for _, shape, _ in carried)
    given = ", ".join(f"%{name}_ = {first}" for name, _, first in carried)
    return f"""\
    %begin = arith.constant 0 : index
    %by = arith.constant 1 : index
    %end = arith.constant {steps} : index
    %r:{len(carried)} = scf.for %t = %begin to %end step %by iter_args({given}) -> ({types}) {{
{body}
    scf.yield {", ".join(yielded)} : {types}
    }}"""


def function_of(arguments: Sequence[Named], body: str, results: Sequence[Named]) -> str:
    """A function ``@form`` on torch's tensors; in ``body`` arguments have an underscore behind them."""
    taken = ", ".join(f"%{name}: {_torch(shape)}" for name, shape in arguments)
    casts = "\n".join(
        f"    %{name}_ = torch_c.to_builtin_tensor %{name} : {_torch(shape)} -> {tensor_type(shape)}"
        for name, shape in arguments
    )
    back = "\n".join(
        f"    %o{k} = torch_c.from_builtin_tensor {value} : {tensor_type(shape)} -> {_torch(shape)}"
        for k, (value, shape) in enumerate(results)
    )
    types = ", ".join(_torch(shape) for _, shape in results)
    names = ", ".join(f"%o{k}" for k in range(len(results)))
    return f"""\
func.func @form({taken}) -> ({types}) {{
{casts}
{body}
{back}
    return {names} : {types}
}}
"""
