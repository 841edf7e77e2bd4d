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
    names, with the place; in ``retained`` of which the model wants to have the gradient kept."""

    def __init__(self, given: Mapping[int, str]) -> None:
        self._given = given
        self._used: dict[int, str] = {}
        self.places: dict[str, str] = {}
        self.retained: dict[str, str] = {}

    def meet(self, func: Any, leaves: Sequence[Any], place: Callable[[], str]) -> bool:
        """Note the call of a function with these values; whether it is to be left out, as what does nothing.

        Raises:
            CaptureError: it has one require grad that was used before, or that is to require none again.
        """
        if func in _HAS_REQUIRE and id(leaves[0]) in self._given:
            return self._note(func, leaves[0], len(leaves) < 2 or bool(leaves[1]), place())
        if func == torch.Tensor.retain_grad and id(leaves[0]) in self._given:
            self.retained.setdefault(self._given[id(leaves[0])], place())
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

    def settle(
        self, tensors: Sequence[torch.Tensor], examples: Sequence[torch.Tensor] | None, asked: set[tuple[str, str]]
    ) -> set[int]:
        """The numbers of those of the arguments, ``tensors`` of the trace, that require grad by the model alone. What
        it goes by is added to ``asked``: of an argument of ``examples`` whose gradient it has kept, that it is a leaf,
        whose gradient is kept in any case.

        Raises:
            CaptureError: it had a parameter or buffer require grad, or the gradient kept of one that is no leaf.
        """
        for name, line in self.places.items():
            if not name.isdecimal():
                raise CaptureError(
                    f"the model has {name!r} require grad, which did not{line}",
                    f"do so before it is compiled: {name}.requires_grad_()",
                )
        for name, line in self.retained.items():
            if examples is None or not name.isdecimal():
                continue
            with torch._C.DisableTorchFunction():
                is_leaf = examples[int(name)].is_leaf
            if not is_leaf:
                raise CaptureError(
                    f"the model calls retain_grad() on an argument, of which a compiled program has a copy{line}",
                    "do so before the model is called",
                )
            asked.add(("is_leaf", name))
        return {int(name) for name in self.places if tensors[int(name)].requires_grad}
