# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments that a model itself has require grad: they are traced as if they did from the start, which is right only
where nothing was done with them before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from retrograd.frontend.python.source_locations import CaptureError

_SET = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_HAS_REQUIRE = (torch.Tensor.requires_grad_, _SET)
# What gives the same for a tensor that requires grad.
_OF_ITS_FORM = ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "itemsize", "nbytes", "_version")
_HARMLESS = {
    *(getattr(torch.Tensor, name).__get__ for name in _OF_ITS_FORM),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement),
    *(torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.__len__, torch.Tensor.detach),
    *(torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.is_complex, torch.is_complex),
}
_REMEDY = (
    "call requires_grad_() on it before anything else, in the first line of forward, without asking whether it does; "
    "or before the model is called"
)


class RequiringArguments:
    """Notes in ``places`` which of the tensors that are ``given``, by identity, are made to require grad, by their
    names, with the place."""

    def __init__(self, given: Mapping[int, str]) -> None:
        self._given = given
        self._used: dict[int, str] = {}
        self.places: dict[str, str] = {}

    def meet(self, func: Any, leaves: Sequence[Any], place: Callable[[], str]) -> bool:
        """Note the call of a function with these values; whether it is to be left out, as what does nothing.

        Raises:
            CaptureError: it has one require grad that was used before, or that is to require none again.
        """
        if func in _HAS_REQUIRE and id(leaves[0]) in self._given:
            return self._note(func, leaves[0], len(leaves) < 2 or bool(leaves[1]), place())
        if func not in _HARMLESS:
            for leaf in leaves:
                if id(leaf) in self._given and id(leaf) not in self._used and not leaf.requires_grad:
                    self._used[id(leaf)] = place()
        return False

    def _note(self, func: Any, tensor: torch.Tensor, requires: bool, place: str) -> bool:
        name = self._given[id(tensor)]
        if tensor.requires_grad:
            if not requires and name in self.places:
                raise CaptureError(
                    f"the model has a tensor of shape {tuple(tensor.shape)}, which is given to it, require grad and "
                    f"then none{place}",
                    "let it require grad; or use detach() of it",
                )
            # No argument of a trace is a leaf, which alone may be told so.
            return func == _SET and requires
        if requires:
            used = self._used.get(id(tensor))
            if used is not None and name.isdecimal():
                raise CaptureError(
                    f"the model has an argument of shape {tuple(tensor.shape)} require grad{place}, after it used it, "
                    f"or asked whether it does{used}",
                    _REMEDY,
                )
            self.places[name] = place
        return False
