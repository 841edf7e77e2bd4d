# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The loops of an LSTM's layer, forward and backward, as text of functions on torch's tensors: pure data."""

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
    joined,
    loop_over,
    parts,
    product,
    sigmoid,
    states_before,
    take,
    tensor_type,
    through_sigmoid,
    through_tanh,
    zeros,
)

_GATES = ("enter", "forget", "new", "leave")
_SUMS = ("%p0", "%p1", "%p2", "%p3")
# One element of a state: of the sums of its gates and of the cell before, the state, the cell and the gates.
_LSTM_CELL = f"""\
        %one = arith.constant 1.0 : f32
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
    state, gates = sizes.state, sizes.gates(4)
    every, every_gates = sizes.all(state), sizes.all(gates)
    weight = (4 * sizes.width, sizes.width)
    carried: list[Carried] = [("h", state, "%hidden_"), ("c", state, "%cell_")]
    carried += [("hs", every, "%hs0"), ("cs", every, "%cs0"), ("as", every_gates, "%as0")]
    inputs = [*_SUMS, "%c_"]
    body = f"""\
    %x = {take("%gates_", gates, every_gates)}
    %m = {product("%h_", state, "%weight_", weight, "%x", gates, transposed=True)}
    {parts("%m", _SUMS, sizes)}
    %u = tensor.empty() : {tensor_type(state)}
    {elementwise("%s", inputs, ["i", "f", "n", "o", "before"], 6, "%u", state, _LSTM_CELL)}
    {joined("%act", [f"%s#{k}" for k in range(2, 6)], sizes)}
    %hs1 = {insert("%s#0", "%hs_", state, every)}
    %cs1 = {insert("%s#1", "%cs_", state, every)}
    %as1 = {insert("%act", "%as_", gates, every_gates)}"""
    loop = loop_over(carried, body, ["%s#0", "%s#1", "%hs1", "%cs1", "%as1"], sizes.steps)
    kept = "\n".join(fresh(name, shape) for name, shape in (("hs0", every), ("cs0", every), ("as0", every_gates)))
    arguments: list[Named] = [("gates", every_gates), ("hidden", state), ("cell", state), ("weight", weight)]
    results: list[Named] = [("%r#2", every), ("%r#1", state), ("%r#3", every), ("%r#4", every_gates)]
    return function_of(arguments, f"{kept}\n{loop}", results)


def lstm_backward_form(sizes: Sizes) -> str:
    """``retrograd.lstm_backward``: gradients of hidden states and last cell, first cell, weight, cells and active gates
    to gradients of gates, first hidden state, first cell."""
    state, gates = sizes.state, sizes.gates(4)
    every, every_gates = sizes.all(state), sizes.all(gates)
    weight = (4 * sizes.width, sizes.width)
    inputs = ["%dh_", "%dc_", "%y", "%cn", "%cb", *_SUMS]
    names = ["later", "carried", "output", "after", "before", *_GATES]
    before, befores = states_before("%cell_", "%cells_", sizes)
    body = f"""\
{from_last(sizes)}
    %y = {take("%outputs_", state, every, "%n")}
    %cn = {take("%cells_", state, every, "%n")}
    %cb = {take(befores, state, every, "%n")}
    %a = {take("%active_", gates, every_gates, "%n")}
    {parts("%a", _SUMS, sizes)}
    %u = tensor.empty() : {tensor_type(state)}
    {elementwise("%s", inputs, names, 5, "%u", state, _LSTM_CELL_BACKWARD)}
    {joined("%d", [f"%s#{k}" for k in range(1, 5)], sizes)}
{zeros("z", "%u", state)}
    %m = {product("%d", gates, "%weight_", weight, "%z", state, transposed=False)}
    %ds1 = {insert("%d", "%ds_", gates, every_gates, at="%n")}"""
    carried: list[Carried] = [("dh", state, "%dh0"), ("dc", state, "%grad_last_"), ("ds", every_gates, "%ds0")]
    loop = loop_over(carried, body, ["%m", "%s#0", "%ds1"], sizes.steps)
    start = f"""\
{fresh("e0", state)}
{zeros("dh0", "%e0", state)}
{fresh("ds0", every_gates)}"""
    arguments: list[Named] = [("outputs", every), ("grad_last", state), ("cell", state), ("weight", weight)]
    arguments += [("cells", every), ("active", every_gates)]
    results: list[Named] = [("%r#2", every_gates), ("%r#0", state), ("%r#1", state)]
    return function_of(arguments, f"{before}\n{start}\n{loop}", results)
