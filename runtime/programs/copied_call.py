# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The shortest way to a function of small tensors: they are copied to memory that IREE knows already."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from iree.runtime import VmVariantList
from torch.utils.dlpack import to_dlpack

from retrograd.runtime.programs.known_forms import guard_forms
from retrograd.runtime.programs.placed import Placed, place_results
from retrograd.runtime.programs.plain_call import PlainCall
from retrograd.runtime.programs.tensors import BINDING_ERRORS

MOST_BYTES = 16384
"""Of each tensor. To import one, and to end that, takes as long as to copy some 10 KiB; of a GPT-2 with 70 tensors of
up to so many bytes the backward was faster copied, 0.97 of eager's time for 1.08."""

# Half of what torch's dispatcher takes, for a tensor of a few elements. The thread keeps Python's lock.
_move = ctypes.PyDLL(None)["memmove"]
_move.argtypes, _move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
_address_of = torch.Tensor.data_ptr


class CopiedCall(PlainCall):
    """A plain call whose arguments are copied, always to the same memory, so that IREE's list of them stays the same;
    and its results from there.

    Arguments are compared with those of the first call in all but address and values (type, dtype, sizes, strides, lazy
    conjugates and negatives), by the C++ code of Dynamo's guards, and addresses are read at each call: it does not
    matter where tensors lie, nor what became of earlier ones. Others go the plain way; not where the function writes
    over its arguments, ``is_careless``, which here are its own, and there the caller's.
    """

    __slots__ = ("_from", "_guard", "_packed", "_returned", "_storage", "_to", "is_careless")

    def __init__(
        self,
        plain: PlainCall,
        arguments: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        placed: Sequence[Placed] = (),
        is_careless: bool = False,
    ) -> None:
        """``arguments`` and ``results`` of a call that ``plain`` made; see :func:`is_worth_copying`. The results that
        are ``placed`` lie in arguments."""
        super().__init__(*plain.parts)
        self.is_careless = is_careless
        with torch.no_grad():
            self._guard = guard_forms(arguments)
        given = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in arguments]
        written = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in results]
        place_results(placed, given, written)
        self._storage = [*given, *written]
        self._packed = VmVariantList(len(self._storage))
        for number, tensor in enumerate(self._storage, -len(arguments)):
            own = self._copied.get(number) if number >= 0 else self._filled.get(number + len(arguments))
            self._packed.push_ref(self._take(to_dlpack(tensor)) if own is None else own(tensor))
        places = [(ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(t.nbytes)) for t in self._storage]
        self._to, self._from = places[: len(arguments)], places[len(arguments) :]
        # IREE fills it anew at each call.
        self._returned = VmVariantList(0)

    def __call__(self, arguments: Sequence[Any], results: Sequence[torch.Tensor]) -> bool:
        """Call it: see `PlainCall`."""
        if self._device.is_inherited or not self._guard.check(*arguments):
            return not self.is_careless and super().__call__(arguments, results)
        try:
            self._call(map(_address_of, arguments), results)
        except BINDING_ERRORS as error:
            return self._after(error)
        return True

    def takes(self, arguments: Sequence[Any]) -> bool:
        """Whether these are of the form of those of the first call."""
        return len(arguments) == len(self._to) and self._guard.check(*arguments)

    def call_at(self, addresses: Sequence[int], results: Sequence[torch.Tensor]) -> bool:
        """Call it on arguments that it takes, of which it is told no more than where they begin. Says whether it
        could; if not, nothing has run, and what to do is for who calls it as any function."""
        # What has no memory, any more, begins at 0.
        if self._device.is_inherited or not all(addresses):
            return False
        try:
            self._call(addresses, results)
        except BINDING_ERRORS:
            return False
        return True

    def _call(self, addresses: Iterable[int], results: Sequence[torch.Tensor]) -> None:
        with self._lock:
            for (place, size), address in zip(self._to, addresses):  # noqa: B905 (as many, by the guard)
                _move(place, address, size)
            self._invoke(self._handle, self._packed, self._returned)
            for (place, size), tensor in zip(self._from, results):  # noqa: B905 (as the function declares them)
                _move(_address_of(tensor), place, size)


def is_worth_copying(arguments: Sequence[Any], results: Sequence[torch.Tensor]) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether a function's tensors are all small, and in one piece, wherever they begin. Sizes among the arguments say
    that other shapes come as well."""
    return all(_is_small(value) for value in (*arguments, *results))


def _is_small(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    if not (is_tensor and 0 < value.nbytes <= MOST_BYTES and _is_exchanged(value.dtype)):
        return False
    return bool(value.data_ptr()) and value.is_contiguous() and not (value.is_conj() or value.is_neg())


def _is_exchanged(dtype: torch.dtype) -> bool:
    """Whether tensors of a type go to IREE by dlpack, which has no floats of eight bits."""
    return dtype.itemsize > 1 or not dtype.is_floating_point
