# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls hooks as PyTorch's engine does, by their kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import _C

from retrograd.frontend.autograd.engine.late_hooks import LATE

CPP_HOOKS = _C._dynamo.compiled_autograd.call_cpp_tensor_pre_hooks
"""What calls hooks in C++ in a capture of compiled autograd's."""


def call_user_hook(hook: Callable[..., Any], *args: Any, hook_type: str) -> Any:
    """Call a hook as eager does: gradients in tuples, ``None`` for no change, a result of the same type and size.

    After torch/csrc/autograd/python_hook.cpp, whose errors these are. A hook that was taken off since the backward
    began is not called.

    Raises:
        RuntimeError, TypeError: a result of another type, size, or number.
    """
    return HOOK_CALLS[hook_type](hook, *args)


def call_cpp_hooks(number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Call hooks in C++ on a gradient, such as that of ``retain_grad()``; not on one that is None, which PyTorch reads
    as a tensor, and crashes: ``.grad`` is then left as it is, as in eager."""
    return None if gradient is None else CPP_HOOKS(number, gradient)


def _call_unpack_hook(hook: Callable[..., Any], packed: Any) -> Any:
    return hook(packed)


def _call_post_accumulate_hook(hook: Callable[..., Any], parameter: Any) -> Any:
    if not LATE.calls(hook):
        return parameter
    if hook(parameter) is not None:
        raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    return parameter


def _call_tensor_hook(hook: Callable[..., Any], gradient: Any) -> Any:
    if not LATE.calls(hook):
        return gradient
    result = hook(gradient)
    return gradient if result is None else _checked(gradient, result, hook)


def _call_node_hook(hook: Callable[..., Any], *args: Any) -> Any:
    values = tuple(args[0])
    if not LATE.calls(hook):
        return values
    result = hook(*[tuple(a) for a in args])
    if result is None:
        return values
    if not isinstance(result, tuple):
        result = (result,)
    if len(result) != len(values):
        raise RuntimeError(
            f"hook '{_name(hook)}' has returned an incorrect number of values (got {len(result)}, but expected "
            f"{len(values)})"
        )
    return tuple(None if r is None else _checked(v, r, hook) for v, r in zip(values, result, strict=True))


# By what compiled autograd calls the kinds.
HOOK_CALLS: Mapping[str, Callable[..., Any]] = {
    "tensor_pre_hook": _call_tensor_hook,
    "pre_hook": _call_node_hook,
    "post_hook": _call_node_hook,
    "post_acc_grad_hook": _call_post_accumulate_hook,
    "unpack_hook": _call_unpack_hook,
}


def _checked(original: Any, result: Any, hook: Callable[..., Any]) -> Any:
    if original is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(result).__name__}'")
    if (result.dtype, result.device.type, result.layout) != (original.dtype, original.device.type, original.layout):
        raise RuntimeError(
            f"hook '{_name(hook)}' has changed the type of value (was {original.type()} got {result.type()})"
        )
    if result.size() != original.size():
        raise RuntimeError(f"hook '{_name(hook)}' has changed the size of value")
    return result


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", "<unknown>")
