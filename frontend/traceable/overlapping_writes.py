# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes in place to views in which several elements are one in memory, as those of ``y.expand(3, 4)`` are.

AOTAutograd's functional form of a write goes back from view to view. From an expanded view to what was expanded it adds
up the differences that the write made: one number for each element that was written, where memory holds one for all.
``y.expand(3, 4)[:2].fill_(0)`` of a row ``y`` then takes ``y`` away twice, and even a write to one element of each,
``base + (new - base)``, rounds, and gives NaN for infinities. So does each compiler that starts from that form. Here
such a write goes to the memory itself: the view is taken anew, by sizes and strides, of the tensor whose memory it is.
What depends on the order in which elements are written is refused, as most of it is by eager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import unfold_backward
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.frontend.decompositions.views.strided import is_overlapping
from retrograd.frontend.python.source_locations import CaptureError, source_place

aten = torch.ops.aten

# They write one number everywhere, so that it is all the same how often an element is written; eager carries them out.
_FILLS = (aten.fill_.Scalar, aten.zero_.default)
_REMEDY = "write to the tensor that it is a view of, or to a clone() of it"


class OverlappingWrites(TorchDispatchMode):
    """While it is active, writes to views in which elements are one in memory are traced as eager carries them out."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Tensors that views see elements of several times, and those of which there are views by sizes and strides,
        # whose own strides are not known.
        self._repeated: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._strided: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if func is aten.unfold_backward.default:
            # As ``istft`` adds up windows. What functionalization makes of a write to one does not come by here, and
            # is refused where it is decomposed (``refusing_written_windows``).
            return unfold_backward(*args, **kwargs)
        if _written_arguments(func):
            return self._write(func, args, kwargs)
        result = func(*args, **kwargs)
        if _gives_views(func) and isinstance(args[0], FunctionalTensor):
            base = _base_of(args[0])
            if func is aten.as_strided.default:
                # As it is decomposed to a copy, its result has other strides.
                self._strided[base] = True
                self._look_at(base, args[1], args[2])
            else:
                for view in pytree.tree_leaves(result):
                    self._look_at(base, view.shape, view.stride())
        return result

    def _look_at(self, base: Tensor, size: Sequence[Any], stride: Sequence[Any]) -> None:
        if _has_shared(size, stride) and not _has_shared(base.shape, base.stride()):
            self._repeated[base] = True

    def _write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with the tensors that it writes to as views of another kind, where they have to be."""
        given: dict[int, Tensor] = {}

        def replace(tensor: Any) -> Any:
            if not isinstance(tensor, FunctionalTensor):
                return tensor
            base = _base_of(tensor)
            if base is tensor or base not in self._repeated:
                return tensor
            if base in self._strided:
                raise _refusal(func, tensor, "of a tensor that as_strided() sees some elements of several times")
            view = _view_of_memory(func, tensor, base)
            given[id(view)] = tensor
            return view

        written = _written_arguments(func)
        places = [pytree.tree_map(replace, v) if at in written else v for at, v in _by_schema(func, args, kwargs)]
        if not given:
            return func(*args, **kwargs)
        result = func(*places[: len(args)], **dict(zip(kwargs, places[len(args) :], strict=True)))
        return pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), result)


def _view_of_memory(func: OpOverload, tensor: Tensor, base: Tensor) -> Tensor:
    """``tensor`` as a view by sizes and strides of ``base``, each element once where all get the same number.

    Raises:
        CaptureError: elements would be written several times; sizes are open.
    """
    size, stride = list(tensor.shape), list(tensor.stride())
    numbers = (*size, *stride, tensor.storage_offset(), *base.shape, *base.stride(), base.storage_offset())
    if not all(isinstance(number, int) for number in numbers):
        raise _refusal(func, tensor, "and its sizes are open")
    if func in _FILLS:
        size = [1 if step == 0 else count for count, step in zip(size, stride, strict=True)]
    if is_overlapping(size, stride):
        raise _refusal(func, tensor, "of which several elements are one in memory")
    view: Tensor = aten.as_strided.default(base, size, stride, tensor.storage_offset())
    return view


def _refusal(func: OpOverload, tensor: Tensor, why: str) -> CaptureError:
    place = source_place(fx_traceback.get_current_meta().get("stack_trace"))
    at = f", at {place}" if place else ""
    shape = f"shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}"
    return CaptureError(f"{func} writes to a view of {shape}, {why}{at}", _REMEDY)


def _base_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory this one is a view of; itself if it is none."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def _has_shared(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether elements of a view may be one in memory. Of open sizes, whether an axis is an expanded one."""
    if all(isinstance(number, int) for number in (*size, *stride)):
        return is_overlapping(size, stride)
    axes = [(count, step) for count, step in zip(size, stride, strict=True) if isinstance(step, int)]
    return any(step == 0 and not (isinstance(count, int) and count <= 1) for count, step in axes)


def _by_schema(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call, those given by name last, each with its name."""
    yield from zip([argument.name for argument in func._schema.arguments], args, strict=False)
    yield from kwargs.items()


@functools.cache
def _written_arguments(func: OpOverload) -> frozenset[str]:
    """The names of those arguments into whose memory an op writes."""
    if torch.Tag.inplace_view in func.tags:
        return frozenset()
    arguments = func._schema.arguments
    return frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def _gives_views(func: Callable[..., Any]) -> bool:
    returns = func._schema.returns  # type: ignore[attr-defined]
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
