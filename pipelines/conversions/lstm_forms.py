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
