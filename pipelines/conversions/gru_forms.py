# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The loops of a GRU's layer, forward and backward, as text of functions on torch's tensors: pure data."""

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

_OF_INPUT = ("%p0", "%p1", "%p2")
_OF_STATE = ("%q0", "%q1", "%q2")
_ACTIVE = ("%p0", "%p1", "%p2", "%p3")
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
    {parts("%x", _OF_INPUT, sizes)}
    %m = {products_apart("%biases", 3, sizes)}
    {take_apart(_OF_STATE, "%m", sizes)}
{fresh("u", state)}
    {elementwise("%s", [*_OF_INPUT, *_OF_STATE, "%h_"], names, 4, "%u", state, _GRU_CELL)}
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
