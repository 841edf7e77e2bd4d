# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Registers hooks, accumulation and custom functions, which a backward runs besides computing tensors, as ops of a
torch library.

Tracing keeps them whole. Only tensors go in and out of them. Each takes a token and gives the next one, so that their
order is carried by values; a token is an int8 tensor of shape (0,). They import as ``torch.operator
"torch.retrograd.call_hook"`` and so on, which ``convert-torch-operator-to-bwd`` raises to the bwd dialect. They never
run: their kernels raise.

What a call gives is known only from having run it once: `declared_results` tells the tracer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

import torch
from torch import Tensor

from retrograd.contract.hooks import CUSTOM_BACKWARD, HOOK_KINDS
from retrograd.frontend.layers.own_ops import define_op

# Tensors of the results' shapes, strides, dtypes and devices; or a function from the values of a call to such tensors,
# for results whose sizes depend on theirs.
Results = Sequence[Tensor] | Callable[[Sequence[Tensor]], Sequence[Tensor]]
Declarations = Mapping[tuple[str, int], Results]

_DECLARED: ContextVar[Declarations | None] = ContextVar("declared_results", default=None)
_SCHEMAS = {
    "create_token": "() -> Tensor",
    "call_hook": "(Tensor[] values, Tensor token, str kind, int hook) -> (Tensor[], Tensor)",
    "call_backward": "(Tensor[] values, Tensor token, int function) -> (Tensor[], Tensor)",
    "accumulate_grad": "(Tensor gradient, Tensor token, int param) -> Tensor",
    "final_callbacks": "(Tensor token) -> Tensor",
    "update_input": "(Tensor[] values, Tensor token, int hook) -> Tensor",
}


def create_token() -> Tensor:
    """The start of a chain."""
    token: Tensor = torch.ops.retrograd.create_token.default()
    return token


def call_hook(values: Sequence[Tensor], token: Tensor, kind: str, hook: int) -> tuple[list[Tensor], Tensor]:
    """The user's hook number ``hook``, of one of ``HOOK_KINDS``, called on ``values``.

    Returns what it gives, as declared for ``(kind, hook)``, and the next token.

    Raises:
        ValueError: no such kind.
        LookupError: nothing is declared for it.
    """
    if kind not in HOOK_KINDS:
        raise ValueError(f"no kind of hook is called '{kind}'; the kinds are {', '.join(HOOK_KINDS)}")
    results, token = torch.ops.retrograd.call_hook.default(list(values), token, kind, hook)
    return list(results), token


def call_backward(values: Sequence[Tensor], token: Tensor, function: int) -> tuple[list[Tensor], Tensor]:
    """The backward of custom function number ``function``, or another node that stays in Python, called on ``values``.

    Returns what it gives, as declared for ``(CUSTOM_BACKWARD, function)``, and the next token.

    Raises:
        LookupError: nothing is declared for it.
    """
    results, token = torch.ops.retrograd.call_backward.default(list(values), token, function)
    return list(results), token


def accumulate_grad(gradient: Tensor, token: Tensor, param: int) -> Tensor:
    """``gradient`` added to that of parameter number ``param``; returns the next token."""
    next_token: Tensor = torch.ops.retrograd.accumulate_grad.default(gradient, token, param)
    return next_token


def final_callbacks(token: Tensor) -> Tensor:
    """The callbacks that were queued on the engine, after all else; returns the last token."""
    next_token: Tensor = torch.ops.retrograd.final_callbacks.default(token)
    return next_token


def update_input(target: Tensor, value: Tensor, views: Sequence[Tensor], token: Tensor, hook: int) -> Tensor:
    """``value`` written to the input ``target`` by inlined hook number ``hook``; returns the next token. ``views`` are
    other inputs that share memory with it: what reads them does so before."""
    next_token: Tensor = torch.ops.retrograd.update_input.default([target, value, *views], token, hook)
    return next_token


@contextmanager
def declared_results(declarations: Declarations) -> Iterator[None]:
    """While it lasts, calls traced in this thread give what ``declarations`` says for their kind and number."""
    reset = _DECLARED.set(declarations)
    try:
        yield
    finally:
        _DECLARED.reset(reset)


def _fake_results(values: Sequence[Tensor], kind: str, number: int) -> list[Tensor]:
    """New tensors of what is declared for a call: where it is declared on torch's ``meta`` device, where the call's
    values are."""
    declarations = _DECLARED.get() or {}
    if (kind, number) not in declarations:
        message = f"what {kind} number {number} gives is not declared"
        raise LookupError(f"{message}; trace it within declared_results() that have an entry for it")
    declared = declarations[kind, number]
    results = declared(values) if callable(declared) else declared
    place = next((value.device for value in values), torch.device("cpu"))
    return [_like(result, place) for result in results]


def _like(tensor: Tensor, place: torch.device) -> Tensor:
    # A new tensor each: a result that were one of the values would be seen as the same value by the tracer.
    device = place if tensor.device.type == "meta" else tensor.device
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _fake_token(token: Tensor) -> Tensor:
    return token.new_empty((0,))


def _fake_call_hook(values: Sequence[Tensor], token: Tensor, kind: str, hook: int) -> tuple[list[Tensor], Tensor]:
    return _fake_results(values, kind, hook), _fake_token(token)


def _fake_call_backward(values: Sequence[Tensor], token: Tensor, function: int) -> tuple[list[Tensor], Tensor]:
    return _fake_results(values, CUSTOM_BACKWARD, function), _fake_token(token)


_FAKES: dict[str, Callable[..., object]] = {
    "create_token": lambda: torch.empty(0, dtype=torch.int8, device="cpu"),
    "call_hook": _fake_call_hook,
    "call_backward": _fake_call_backward,
    "accumulate_grad": lambda _gradient, token, _param: _fake_token(token),
    "final_callbacks": _fake_token,
    "update_input": lambda _values, token, _hook: _fake_token(token),
}


def _refuse_to_run(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: object) -> NoReturn:
        raise RuntimeError(f"retrograd::{name} stands for a call in a traced graph and does not run; trace it instead")

    return kernel


def _register() -> None:
    for name, schema in _SCHEMAS.items():
        # Functional by their schemas, and yet not to be removed where nobody uses what they give.
        torch.fx.node.has_side_effect(define_op(name + schema, _refuse_to_run(name), _FAKES[name]))


_register()
