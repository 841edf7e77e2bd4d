# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Loops of recurrent layers, as text of functions on torch's tensors: pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Carried = tuple[str, tuple[int, ...], str]
"""What a loop carries: its name, shape and first value."""

Named = tuple[str, tuple[int, ...]]
"""A value's name and shape."""

_GATES = ("enter", "forget", "new", "leave")
# One element of a state: of the sums of its gates and of the cell before, the state, the cell and the gates.
_LSTM_CELL = """\
        %one = arith.constant 1.0 : f32
        %ei = arith.negf %i : f32
        %xi = math.exp %ei : f32
        %di = arith.addf %xi, %one : f32
        %enter = arith.divf %one, %di : f32
        %ef = arith.negf %f : f32
        %xf = math.exp %ef : f32
        %df = arith.addf %xf, %one : f32
        %forget = arith.divf %one, %df : f32
        %new = math.tanh %n : f32
        %el = arith.negf %o : f32
        %xl = math.exp %el : f32
        %dl = arith.addf %xl, %one : f32
        %leave = arith.divf %one, %dl : f32
        %kept = arith.mulf %forget, %before : f32
        %added = arith.mulf %enter, %new : f32
        %after = arith.addf %kept, %added : f32
        %squashed = math.tanh %after : f32
        %given = arith.mulf %leave, %squashed : f32
        linalg.yield %given, %after, %enter, %forget, %new, %leave : f32, f32, f32, f32, f32, f32"""
# One element of a state's gradient: of its gradient by the later step and as a result and of the cell's, that of the
# cell before by this step, and those of the sums of its gates.
_LSTM_CELL_BACKWARD = """\
        %one = arith.constant 1.0 : f32
        %g = arith.addf %later, %output : f32
        %squashed = math.tanh %after : f32
        %square = arith.mulf %squashed, %squashed : f32
        %slope = arith.subf %one, %square : f32
        %through = arith.mulf %g, %leave : f32
        %reached = arith.mulf %through, %slope : f32
        %dc = arith.addf %carried, %reached : f32
        %ri = arith.subf %one, %enter : f32
        %si = arith.mulf %enter, %ri : f32
        %ti = arith.mulf %dc, %new : f32
        %gi = arith.mulf %ti, %si : f32
        %rf = arith.subf %one, %forget : f32
        %sf = arith.mulf %forget, %rf : f32
        %tf = arith.mulf %dc, %before : f32
        %gf = arith.mulf %tf, %sf : f32
        %qn = arith.mulf %new, %new : f32
        %sn = arith.subf %one, %qn : f32
        %tn = arith.mulf %dc, %enter : f32
        %gn = arith.mulf %tn, %sn : f32
        %ro = arith.subf %one, %leave : f32
        %so = arith.mulf %leave, %ro : f32
        %to = arith.mulf %g, %squashed : f32
        %go = arith.mulf %to, %so : f32
        %left = arith.mulf %dc, %forget : f32
        linalg.yield %left, %gi, %gf, %gn, %go : f32, f32, f32, f32, f32"""


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

    @property
    def gates(self) -> tuple[int, int]:
        """The shape of the gates of a step."""
        return (self.batch, 4 * self.width)

    def all(self, step: tuple[int, int]) -> tuple[int, int, int]:
        """The shape of something of all steps."""
        return (self.steps, *step)


def lstm_form(sizes: Sizes) -> str:
    """``retrograd.lstm``: gates, hidden, cell, weight to hidden states, last cell, cells, active gates."""
    state, gates = sizes.state, sizes.gates
    every, every_gates = sizes.all(state), sizes.all(gates)
    weight = (4 * sizes.width, sizes.width)
    carried: list[Carried] = [("h", state, "%hidden"), ("c", state, "%cell")]
    carried += [("hs", every, "%hs0"), ("cs", every, "%cs0"), ("as", every_gates, "%as0")]
    inputs = ["%p0", "%p1", "%p2", "%p3", "%c_"]
    body = f"""\
    %x = tensor.extract_slice %gates_[%t, 0, 0] {_slice(gates)} : {_t(every_gates)} to {_t(gates)}
    %m = {_product("%h_", state, "%weight_", weight, "%x", gates, transposed=True)}
    {_parts("%m", sizes)}
    %u = tensor.empty() : {_t(state)}
    {_elementwise("%s", inputs, ["i", "f", "n", "o", "before"], 6, "%u", state, _LSTM_CELL)}
    {_joined("%act", [f"%s#{k}" for k in range(2, 6)], sizes)}
    %hs1 = {_insert("%s#0", "%hs_", state, every)}
    %cs1 = {_insert("%s#1", "%cs_", state, every)}
    %as1 = {_insert("%act", "%as_", gates, every_gates)}"""
    loop = _loop(carried, body, ["%s#0", "%s#1", "%hs1", "%cs1", "%as1"], sizes.steps)
    kept = "\n".join(_fresh(name, shape) for name, shape in (("hs0", every), ("cs0", every), ("as0", every_gates)))
    arguments: list[Named] = [("gates", every_gates), ("hidden", state), ("cell", state), ("weight", weight)]
    results: list[Named] = [("%r#2", every), ("%r#1", state), ("%r#3", every), ("%r#4", every_gates)]
    return _function(arguments, f"{kept}\n{loop}", results)


def lstm_backward_form(sizes: Sizes) -> str:
    """``retrograd.lstm_backward``: gradients of hidden states and last cell, first cell, weight, cells and active gates
    to gradients of gates, first hidden state, first cell."""
    state, gates = sizes.state, sizes.gates
    every, every_gates = sizes.all(state), sizes.all(gates)
    weight = (4 * sizes.width, sizes.width)
    inputs = ["%dh_", "%dc_", "%y", "%cn", "%cb", "%p0", "%p1", "%p2", "%p3"]
    names = ["later", "carried", "output", "after", "before", *_GATES]
    # The cell states before each step.
    alone = (1, *state)
    before = f"""\
    %first = tensor.expand_shape %cell_ [[0, 1], [2]] output_shape [1, {state[0]}, {state[1]}]
        : {_t(state)} into {_t(alone)}"""
    befores = "%first"
    if sizes.steps > 1:
        rest = (sizes.steps - 1, *state)
        before += f"""
    %rest = tensor.extract_slice %cells_[0, 0, 0] [{", ".join(map(str, rest))}] [1, 1, 1] : {_t(every)} to {_t(rest)}
    %befores = tensor.concat dim(0) %first, %rest : ({_t(alone)}, {_t(rest)}) -> {_t(every)}"""
        befores = "%befores"
    step = f"""\
    %y = tensor.extract_slice %outputs_[%n, 0, 0] {_slice(state)} : {_t(every)} to {_t(state)}
    %cn = tensor.extract_slice %cells_[%n, 0, 0] {_slice(state)} : {_t(every)} to {_t(state)}
    %cb = tensor.extract_slice {befores}[%n, 0, 0] {_slice(state)} : {_t(every)} to {_t(state)}
    %a = tensor.extract_slice %active_[%n, 0, 0] {_slice(gates)} : {_t(every_gates)} to {_t(gates)}
    {_parts("%a", sizes)}
    %u = tensor.empty() : {_t(state)}
    {_elementwise("%s", inputs, names, 5, "%u", state, _LSTM_CELL_BACKWARD)}
    {_joined("%d", [f"%s#{k}" for k in range(1, 5)], sizes)}
    %zero = arith.constant 0.0 : f32
    %z = linalg.fill ins(%zero : f32) outs(%u : {_t(state)}) -> {_t(state)}
    %m = {_product("%d", gates, "%weight_", weight, "%z", state, transposed=False)}
    %ds1 = {_insert("%d", "%ds_", gates, every_gates, at="%n")}"""
    body = f"""\
    %last = arith.constant {sizes.steps - 1} : index
    %n = arith.subi %last, %t : index
{step}"""
    carried: list[Carried] = [("dh", state, "%dh0"), ("dc", state, "%grad_last_"), ("ds", every_gates, "%ds0")]
    loop = _loop(carried, body, ["%m", "%s#0", "%ds1"], sizes.steps)
    start = f"""\
    %nought = arith.constant 0.0 : f32
    %e0 = tensor.empty() : {_t(state)}
    %dh0 = linalg.fill ins(%nought : f32) outs(%e0 : {_t(state)}) -> {_t(state)}
{_fresh("ds0", every_gates)}"""
    arguments: list[Named] = [("outputs", every), ("grad_last", state), ("cell", state), ("weight", weight)]
    arguments += [("cells", every), ("active", every_gates)]
    results: list[Named] = [("%r#2", every_gates), ("%r#0", state), ("%r#1", state)]
    return _function(arguments, f"{before}\n{start}\n{loop}", results)


def _t(shape: Sequence[int]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def _torch(shape: Sequence[int]) -> str:
    return f"!torch.vtensor<[{','.join(map(str, shape))}],f32>"


def _slice(step: Sequence[int]) -> str:
    """Sizes and strides of one step's part."""
    return f"[1, {step[0]}, {step[1]}] [1, 1, 1]"


def _fresh(name: str, shape: Sequence[int]) -> str:
    return f"    %{name} = tensor.empty() : {_t(shape)}"


def _insert(part: str, whole: str, step: Sequence[int], every: Sequence[int], at: str = "%t") -> str:
    return f"tensor.insert_slice {part} into {whole}[{at}, 0, 0] {_slice(step)} : {_t(step)} into {_t(every)}"


def _parts(value: str, sizes: Sizes) -> str:
    """The four gates, ``%p0`` to ``%p3``."""
    batch, width = sizes.state
    return "\n    ".join(
        f"%p{k} = tensor.extract_slice {value}[0, {k * width}] [{batch}, {width}] [1, 1]"
        f" : {_t(sizes.gates)} to {_t(sizes.state)}"
        for k in range(4)
    )


def _joined(name: str, parts: Sequence[str], sizes: Sizes) -> str:
    types = ", ".join([_t(sizes.state)] * 4)
    return f"{name} = tensor.concat dim(1) {', '.join(parts)} : ({types}) -> {_t(sizes.gates)}"


def _product(
    left: str,
    left_shape: Sequence[int],
    right: str,
    right_shape: Sequence[int],
    onto: str,
    shape: Sequence[int],
    *,
    transposed: bool,
) -> str:
    """``onto`` plus the product of ``left`` and ``right``, or its transpose."""
    of_right = "(n, k)" if transposed else "(k, n)"
    maps = f"affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> {of_right}>, affine_map<(m, n, k) -> (m, n)>"
    return (
        f"linalg.matmul indexing_maps = [{maps}] ins({left}, {right} : {_t(left_shape)}, {_t(right_shape)})"
        f" outs({onto} : {_t(shape)}) -> {_t(shape)}"
    )


def _elementwise(
    name: str, inputs: Sequence[str], names: Sequence[str], results: int, empty: str, shape: Sequence[int], body: str
) -> str:
    same = "affine_map<(m, n) -> (m, n)>"
    maps = ", ".join([same] * (len(inputs) + results))
    types, given = ", ".join([_t(shape)] * len(inputs)), ", ".join([_t(shape)] * results)
    arguments = ", ".join([f"%{n}: f32" for n in names] + [f"%out{k}: f32" for k in range(results)])
    return f"""{name}:{results} = linalg.generic {{
        indexing_maps = [{maps}], iterator_types = ["parallel", "parallel"]
      }} ins({", ".join(inputs)} : {types}) outs({", ".join([empty] * results)} : {given}) {{
      ^bb0({arguments}):
{body}
      }} -> ({given})"""


def _loop(carried: Sequence[Carried], body: str, yielded: Sequence[str], steps: int) -> str:
    types = ", ".join(_t(shape) for _, shape, _ in carried)
    given = ", ".join(f"%{name}_ = {first}{'_' if first in ('%hidden', '%cell') else ''}" for name, _, first in carried)
    return f"""\
    %begin = arith.constant 0 : index
    %by = arith.constant 1 : index
    %end = arith.constant {steps} : index
    %r:{len(carried)} = scf.for %t = %begin to %end step %by iter_args({given}) -> ({types}) {{
{body}
    scf.yield {", ".join(yielded)} : {types}
    }}"""


def _function(arguments: Sequence[Named], body: str, results: Sequence[Named]) -> str:
    taken = ", ".join(f"%{name}: {_torch(shape)}" for name, shape in arguments)
    casts = "\n".join(
        f"    %{name}_ = torch_c.to_builtin_tensor %{name} : {_torch(shape)} -> {_t(shape)}"
        for name, shape in arguments
    )
    back = "\n".join(
        f"    %o{k} = torch_c.from_builtin_tensor {value} : {_t(shape)} -> {_torch(shape)}"
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
