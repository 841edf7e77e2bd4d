# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The loops of an RNN's layer, forward and backward, as text of functions on torch's tensors: pure data."""

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
    loop_over,
    product,
    products_apart,
    take,
    take_apart,
    through_tanh,
    weights_apart,
    zeros,
)

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
