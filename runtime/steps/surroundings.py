# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Refuse calls from surroundings in which PyTorch would compute something else than what was compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from retrograd.runtime.arguments.calling import ArgumentError

_INSIDE = "compiled code has no ops for it to see; call the model itself there"


def refuse_transforms() -> None:
    """Raise :class:`ArgumentError` in a transform: its tensors would look like others that are to be compiled for."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ArgumentError(
            "called in a transform of torch.func (grad, vmap, jvp, ...), for which compiled code has no rules; "
            "transform the model itself, inside of what is compiled"
        )


def refuse_tangents(primals: Sequence[torch.Tensor]) -> None:
    """Raise :class:`ArgumentError` where more is asked for than a forward and its backward."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in primals):
        raise ArgumentError(
            "an argument or parameter has a tangent of forward-mode differentiation, for which compiled code has no "
            "rules; call the model itself"
        )


def open_modes() -> tuple[type, ...]:
    """The open modes that change what PyTorch's functions do, of which a trace contains what they did."""
    if not torch._C._len_torch_function_stack():
        return ()
    # The default device's says where tensors are made, and changes no function.
    return tuple(type(m) for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext))


def refuse_modes(compiled: tuple[type, ...]) -> None:
    """Raise :class:`ArgumentError` where other modes are open than those that a program was compiled in."""
    if torch._C._len_torch_dispatch_stack():
        # Those that traces are made by see none of what is compiled either, and expect so.
        modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
        if modes:
            raise ArgumentError(f"{', '.join(modes)} is open, which is to see each op: {_INSIDE}")
    if (found := open_modes()) != compiled:
        now, then = (", ".join(mode.__name__ for mode in modes) or "no mode" for modes in (found, compiled))
        raise ArgumentError(
            f"{now} is open, and {then} was when it was compiled: what such a mode makes of PyTorch's functions is "
            "part of what is compiled; compile again here, or call the model itself"
        )
