# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Refuse calls from surroundings in which PyTorch would compute something else than what was compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from retrograd.runtime.arguments.calling import ArgumentError

_INSIDE = "compiled code has no ops for it to see; call the model itself there"
_PART = (
    "what such a mode makes of PyTorch's functions is part of what is compiled; compile again here, or call the model "
    "itself"
)
_EQUAL = (bool, int, float, complex, str, bytes)


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


@dataclass(frozen=True)
class Mode:
    """A mode by its class, and what its attributes were, by name."""

    kind: type
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, mode: object) -> Mode:
        return cls(type(mode), {**vars(mode)})

    def differs_in(self, other: Mode) -> list[str]:
        """The attributes that another one of the class has otherwise: objects that are no numbers or texts are compared
        by which they are."""
        names = sorted({*self.attributes, *other.attributes})
        return [name for name in names if not _is_same(*(m.attributes.get(name, Mode) for m in (self, other)))]


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _EQUAL) and a == b)


def open_modes() -> tuple[Mode, ...]:
    """The open modes that change what PyTorch's functions do, of which a trace contains what they did."""
    if not torch._C._len_torch_function_stack():
        return ()
    # The default device's says where tensors are made, and changes no function.
    return tuple(Mode.of(m) for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext))


def refuse_modes(compiled: tuple[Mode, ...]) -> None:
    """Raise :class:`ArgumentError` where other modes are open than those that a program was compiled in."""
    if torch._C._len_torch_dispatch_stack():
        modes = _get_current_dispatch_mode_stack()
        if any(mode.is_infra_mode() for mode in modes):
            raise ArgumentError("called in a trace; trace the model itself, not what was compiled from it")
        names = ", ".join(type(mode).__name__ for mode in modes)
        raise ArgumentError(f"{names} is open, which is to see each op: {_INSIDE}")
    found = open_modes()
    if not found and not compiled:
        return
    now, then = (", ".join(mode.kind.__name__ for mode in modes) or "no mode" for modes in (found, compiled))
    if [mode.kind for mode in found] != [mode.kind for mode in compiled]:
        raise ArgumentError(f"{now} is open, and {then} was when it was compiled: {_PART}")
    for mode, known in zip(found, compiled, strict=True):
        if names := ", ".join(known.differs_in(mode)):
            raise ArgumentError(f"{mode.kind.__name__} is open with another {names} than when it was compiled: {_PART}")
