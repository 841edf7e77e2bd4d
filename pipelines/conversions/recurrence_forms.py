# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The loops of layers of LSTMs, GRUs and RNNs, forward and backward, as text of functions on torch's tensors."""

from __future__ import annotations

from retrograd.pipelines.conversions.recurrence_text import (
    Carried,
    Named,
    Sizes,
    elementwise,
    fresh,
    from_last,
    function_of,
    insert,
    insert_apart,
    joined,
    loop_over,
    parts,
    product,
    products_apart,
    sigmoid,
    states_before,
    take,
    take_apart,
    tensor_type,
    through_sigmoid,
    through_tanh,
    weights_apart,
    zeros,
)

_GATES = ("enter", "forget", "new", "leave")
_OF_INPUT = ("%p0", "%p1", "%p2", "%p3")
_OF_STATE = ("%q0", "%q1", "%q2", "%q3")
_ACTIVE = ("%p0", "%p1", "%p2", "%p3")
# One element of a state: of the input's and the state's parts of its gates and of the cell before, the state, the cell
# and the gates.
_LSTM_CELL = f"""\
        %one = arith.constant 1.0 : f32
        %i = arith.addf %ii, %hi : f32
        %f = arith.addf %if, %hf : f32
        %n = arith.addf %in, %hn : f32
        %o = arith.addf %io, %ho : f32
{sigmoid("enter", "i")}
{sigmoid("forget", "f")}
        %new = math.tanh %n : f32
{sigmoid("leave", "o")}
        %kept = arith.mulf %forget, %before : f32
        %added = arith.mulf %enter, %new : f32
        %after = arith.addf %kept, %added : f32
        %squashed = math.tanh %after : f32
        %given = arith.mulf %leave, %squashed : f32
        linalg.yield %given, %after, %enter, %forget, %new, %leave : f32, f32, f32, f32, f32, f32"""
# One element of a state's gradient: of its gradient by the later step and as a result and of the cell's, that of the
# cell before by this step, and those of the sums of its gates.
_LSTM_CELL_BACKWARD = f"""\
        %one = arith.constant 1.0 : f32
        %g = arith.addf %later, %output : f32
        %squashed = math.tanh %after : f32
        %through = arith.mulf %g, %leave : f32
{through_tanh("reached", "through", "squashed")}
        %dc = arith.addf %carried, %reached : f32
        %ti = arith.mulf %dc, %new : f32
{through_sigmoid("gi", "ti", "enter")}
        %tf = arith.mulf %dc, %before : f32
{through_sigmoid("gf", "tf", "forget")}
        %tn = arith.mulf %dc, %enter : f32
{through_tanh("gn", "tn", "new")}
        %to = arith.mulf %g, %squashed : f32
{through_sigmoid("go", "to", "leave")}
        %left = arith.mulf %dc, %forget : f32
        linalg.yield %left, %gi, %gf, %gn, %go : f32, f32, f32, f32, f32"""


def lstm_form(sizes: Sizes) -> str:
    """``retrograd.lstm``: gates, hidden, cell, weight to hidden states, last cell, cells, active gates."""
    state, gates, apart = sizes.state, sizes.gates(4), sizes.apart(4)
    every, every_gates, active = sizes.all(state), sizes.all(gates), sizes.all(apart)
    carried: list[Carried] = [("h", state, "%hidden_"), ("c", state, "%cell_")]
    carried += [("hs", every, "%hs0"), ("cs", every, "%cs0"), ("as", active, "%as0")]
    inputs = [*_OF_INPUT, *_OF_STATE, "%c_"]
    names = ["ii", "if", "in", "io", "hi", "hf", "hn", "ho", "before"]
    body = f"""\
    %x = {take("%gates_", gates, every_gates)}
    {parts("%x", _OF_INPUT, sizes)}
{fresh("e", apart)}
{zeros("z", "%e", apart)}
    %m = {products_apart("%z", 4, sizes)}
    {take_apart(_OF_STATE, "%m", sizes)}
{fresh("u", state)}
    {elementwise("%s", inputs, names, 6, "%u", state, _LSTM_CELL)}
    %hs1 = {insert("%s#0", "%hs_", state, every)}
    %cs1 = {insert("%s#1", "%cs_", state, every)}
    {insert_apart("%as1", [f"%s#{k}" for k in range(2, 6)], "%as_", sizes)}"""
    loop = loop_over(carried, body, ["%s#0", "%s#1", "%hs1", "%cs1", "%as1"], sizes.steps)
    kept = "\n".join(fresh(name, shape) for name, shape in (("hs0", every), ("cs0", every), ("as0", active)))
    arguments: list[Named] = [("gates", every_gates), ("hidden", state), ("cell", state)]
    arguments += [("weight", (4 * sizes.width, sizes.width))]
    results: list[Named] = [("%r#2", every), ("%r#1", state), ("%r#3", every), ("%r#4", active)]
    return function_of(arguments, f"{weights_apart(4, sizes)}\n{kept}\n{loop}", results)


def lstm_backward_form(sizes: Sizes) -> str:
    """``retrograd.lstm_backward``: gradients of hidden states and last cell, first cell, weight, cells and active gates
    to gradients of gates, first hidden state, first cell."""
    state, gates = sizes.state, sizes.gates(4)
    every, every_gates = sizes.all(state), sizes.all(gates)
    weight = (4 * sizes.width, sizes.width)
    inputs = ["%dh_", "%dc_", "%y", "%cn", "%cb", *_ACTIVE]
    names = ["later", "carried", "output", "after", "before", *_GATES]
    before, befores = states_before("%cell_", "%cells_", sizes)
    body = f"""\
{from_last(sizes)}
    %y = {take("%outputs_", state, every, "%n")}
    %cn = {take("%cells_", state, every, "%n")}
    %cb = {take(befores, state, every, "%n")}
    {take_apart(_ACTIVE, "%active_", sizes, "%n")}
{fresh("u", state)}
    {elementwise("%s", inputs, names, 5, "%u", state, _LSTM_CELL_BACKWARD)}
    {joined("%d", [f"%s#{k}" for k in range(1, 5)], sizes)}
{zeros("z", "%u", state)}
    %m = {product("%d", gates, "%z", sizes)}
    %ds1 = {insert("%d", "%ds_", gates, every_gates, at="%n")}"""
    carried: list[Carried] = [("dh", state, "%dh0"), ("dc", state, "%grad_last_"), ("ds", every_gates, "%ds0")]
    loop = loop_over(carried, body, ["%m", "%s#0", "%ds1"], sizes.steps)
    start = f"""\
{fresh("e0", state)}
{zeros("dh0", "%e0", state)}
{fresh("ds0", every_gates)}"""
    arguments: list[Named] = [("outputs", every), ("grad_last", state), ("cell", state), ("weight", weight)]
    arguments += [("cells", every), ("active", sizes.all(sizes.apart(4)))]
    results: list[Named] = [("%r#2", every_gates), ("%r#0", state), ("%r#1", state)]
    return function_of(arguments, f"{before}\n{start}\n{loop}", results)


_GRU_INPUT, _GRU_STATE = _OF_INPUT[:3], _OF_STATE[:3]
# One element of a state: of the input's and the state's parts of its gates and of the state before, the state and the
# gates.
_GRU_CELL = f"""\
        %one = arith.constant 1.0 : f32
        %sr = arith.addf %ir, %hr : f32
{sigmoid("reset", "sr")}
        %su = arith.addf %iu, %hu : f32
{sigmoid("update", "su")}
        %let = arith.mulf %reset, %hn : f32
        %sn = arith.addf %in, %let : f32
        %new = math.tanh %sn : f32
        %apart = arith.subf %before, %new : f32
        %kept = arith.mulf %update, %apart : f32
        %given = arith.addf %new, %kept : f32
        linalg.yield %given, %reset, %update, %new : f32, f32, f32, f32"""
# One element of a state's gradient: of its gradient by the later step and as a result, that of the state before which
# does not come by the gates, and those of the gates' sums, of the new one's input's and state's parts.
_GRU_CELL_BACKWARD = f"""\
        %one = arith.constant 1.0 : f32
        %g = arith.addf %later, %output : f32
        %kept = arith.mulf %g, %update : f32
        %tn = arith.subf %g, %kept : f32
{through_tanh("gn", "tn", "new")}
        %apart = arith.subf %before, %new : f32
        %tu = arith.mulf %g, %apart : f32
{through_sigmoid("gu", "tu", "update")}
        %gh = arith.mulf %gn, %reset : f32
        %tr = arith.mulf %gn, %inner : f32
{through_sigmoid("gr", "tr", "reset")}
        linalg.yield %kept, %gr, %gu, %gn, %gh : f32, f32, f32, f32, f32"""


def gru_form(sizes: Sizes) -> str:
    """``retrograd.gru``: gates, hidden, weight, bias to hidden states, active gates."""
    state, gates, apart = sizes.state, sizes.gates(3), sizes.apart(3)
    every, every_gates, active = sizes.all(state), sizes.all(gates), sizes.all(sizes.apart(4))
    weight, bias, by_gates = (3 * sizes.width, sizes.width), (3 * sizes.width,), (3, sizes.width)
    names = ["ir", "iu", "in", "hr", "hu", "hn", "before"]
    body = f"""\
    %x = {take("%gates_", gates, every_gates)}
    {parts("%x", _GRU_INPUT, sizes)}
    %m = {products_apart("%biases", 3, sizes)}
    {take_apart(_GRU_STATE, "%m", sizes)}
{fresh("u", state)}
    {elementwise("%s", [*_GRU_INPUT, *_GRU_STATE, "%h_"], names, 4, "%u", state, _GRU_CELL)}
    %hs1 = {insert("%s#0", "%hs_", state, every)}
    {insert_apart("%as1", ["%s#1", "%s#2", "%s#3", "%q2"], "%as_", sizes)}"""
    carried: list[Carried] = [("h", state, "%hidden_"), ("hs", every, "%hs0"), ("as", active, "%as0")]
    loop = loop_over(carried, body, ["%s#0", "%hs1", "%as1"], sizes.steps)
    start = f"""\
{weights_apart(3, sizes)}
    %each = tensor.expand_shape %bias_ [[0, 1]] output_shape [3, {sizes.width}]
        : {tensor_type(bias)} into {tensor_type(by_gates)}
{fresh("eb", apart)}
    %biases = linalg.broadcast
        ins(%each : {tensor_type(by_gates)}) outs(%eb : {tensor_type(apart)}) dimensions = [1]
{fresh("hs0", every)}
{fresh("as0", active)}"""
    arguments: list[Named] = [("gates", every_gates), ("hidden", state), ("weight", weight), ("bias", bias)]
    return function_of(arguments, f"{start}\n{loop}", [("%r#1", every), ("%r#2", active)])


def gru_backward_form(sizes: Sizes) -> str:
    """``retrograd.gru_backward``: gradients of hidden states, first hidden state, weight, hidden states and active
    gates to gradients of the state's parts of the gates, of the new gates' sums, of the first hidden state."""
    state, gates = sizes.state, sizes.gates(3)
    every, every_gates, active = sizes.all(state), sizes.all(gates), sizes.all(sizes.apart(4))
    weight = (3 * sizes.width, sizes.width)
    names = ["later", "output", "before", "reset", "update", "new", "inner"]
    before, befores = states_before("%hidden_", "%states_", sizes)
    body = f"""\
{from_last(sizes)}
    %y = {take("%outputs_", state, every, "%n")}
    %hb = {take(befores, state, every, "%n")}
    {take_apart(_ACTIVE, "%active_", sizes, "%n")}
{fresh("u", state)}
    {elementwise("%s", ["%dh_", "%y", "%hb", *_ACTIVE], names, 5, "%u", state, _GRU_CELL_BACKWARD)}
    {joined("%d", ["%s#1", "%s#2", "%s#4"], sizes)}
    %m = {product("%d", gates, "%s#0", sizes)}
    %ds1 = {insert("%d", "%ds_", gates, every_gates, "%n")}
    %dn1 = {insert("%s#3", "%dn_", state, every, "%n")}"""
    carried: list[Carried] = [("dh", state, "%dh0"), ("ds", every_gates, "%ds0"), ("dn", every, "%dn0")]
    loop = loop_over(carried, body, ["%m", "%ds1", "%dn1"], sizes.steps)
    start = f"""\
{before}
{fresh("e0", state)}
{zeros("dh0", "%e0", state)}
{fresh("ds0", every_gates)}
{fresh("dn0", every)}"""
    arguments: list[Named] = [("outputs", every), ("hidden", state), ("weight", weight), ("states", every)]
    arguments += [("active", active)]
    results: list[Named] = [("%r#1", every_gates), ("%r#2", every), ("%r#0", state)]
    return function_of(arguments, f"{start}\n{loop}", results)


# One element of a state, of the input's and the state's parts of its sum.
_TANH = """\
        %sum = arith.addf %of_input, %of_state : f32
        %given = math.tanh %sum : f32
        linalg.yield %given : f32"""
_RELU = """\
        %nought = arith.constant 0.0 : f32
        %sum = arith.addf %of_input, %of_state : f32
        %given = arith.maximumf %sum, %nought : f32
        linalg.yield %given : f32"""
# One element of the gradient of a state's sum: of the state's gradient by the later step and as a result.
_TANH_BACKWARD = f"""\
        %one = arith.constant 1.0 : f32
        %g = arith.addf %later, %output : f32
{through_tanh("left", "g", "state")}
        linalg.yield %left : f32"""
_RELU_BACKWARD = """\
        %nought = arith.constant 0.0 : f32
        %g = arith.addf %later, %output : f32
        %cut = arith.cmpf ole, %state, %nought : f32
        %left = arith.select %cut, %nought, %g : f32
        linalg.yield %left : f32"""


def rnn_tanh_form(sizes: Sizes) -> str:
    """``retrograd.rnn_tanh``: sums of all steps but for the state's part, hidden, weight to hidden states."""
    return _forward(sizes, _TANH)


def rnn_relu_form(sizes: Sizes) -> str:
    """``retrograd.rnn_relu``: as ``retrograd.rnn_tanh``."""
    return _forward(sizes, _RELU)


def rnn_tanh_backward_form(sizes: Sizes) -> str:
    """``retrograd.rnn_tanh_backward``: gradients of hidden states, weight, hidden states to gradients of the sums and
    of the first hidden state."""
    return _backward(sizes, _TANH_BACKWARD)


def rnn_relu_backward_form(sizes: Sizes) -> str:
    """``retrograd.rnn_relu_backward``: as ``retrograd.rnn_tanh_backward``."""
    return _backward(sizes, _RELU_BACKWARD)


def _forward(sizes: Sizes, cell: str) -> str:
    state, apart = sizes.state, sizes.apart(1)
    every, weight = sizes.all(state), (sizes.width, sizes.width)
    body = f"""\
    %x = {take("%sums_", state, every)}
{fresh("e", apart)}
{zeros("z", "%e", apart)}
    %m = {products_apart("%z", 1, sizes)}
    {take_apart(["%p"], "%m", sizes)}
{fresh("u", state)}
    {elementwise("%s", ["%x", "%p"], ["of_input", "of_state"], 1, "%u", state, cell)}
    %hs1 = {insert("%s#0", "%hs_", state, every)}"""
    carried: list[Carried] = [("h", state, "%hidden_"), ("hs", every, "%hs0")]
    loop = loop_over(carried, body, ["%s#0", "%hs1"], sizes.steps)
    arguments: list[Named] = [("sums", every), ("hidden", state), ("weight", weight)]
    return function_of(arguments, f"{weights_apart(1, sizes)}\n{fresh('hs0', every)}\n{loop}", [("%r#1", every)])


def _backward(sizes: Sizes, cell: str) -> str:
    state, every = sizes.state, sizes.all(sizes.state)
    names = ["later", "output", "state"]
    body = f"""\
{from_last(sizes)}
    %y = {take("%outputs_", state, every, "%n")}
    %h = {take("%states_", state, every, "%n")}
{fresh("u", state)}
    {elementwise("%s", ["%dh_", "%y", "%h"], names, 1, "%u", state, cell)}
{zeros("z", "%u", state)}
    %m = {product("%s#0", state, "%z", sizes)}
    %ds1 = {insert("%s#0", "%ds_", state, every, "%n")}"""
    carried: list[Carried] = [("dh", state, "%dh0"), ("ds", every, "%ds0")]
    loop = loop_over(carried, body, ["%m", "%ds1"], sizes.steps)
    start = f"""\
{fresh("e0", state)}
{zeros("dh0", "%e0", state)}
{fresh("ds0", every)}"""
    arguments: list[Named] = [("outputs", every), ("weight", (sizes.width, sizes.width)), ("states", every)]
    return function_of(arguments, f"{start}\n{loop}", [("%r#1", every), ("%r#0", state)])
