# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of PyTorch's that look at what is in a tensor, traced as functions that do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrograd.frontend.decompositions.places.masked_writes import is_mask, put_masked
from retrograd.frontend.layers.ctc_loss import REDUCTIONS, ctc_loss
from retrograd.frontend.traceable.experts import find_product
from retrograd.frontend.traceable.known_masks import forget, note_contents, places_of, read_arguments
from retrograd.frontend.traceable.masked_selections import Selection, is_same_choice, is_whole, or_settled, refusal
from retrograd.frontend.traceable.nonzero_places import index_add, index_add_, nonzero, select_places, set_places, where
from retrograd.frontend.traceable.scalar_indices import SinglePlaces


class TraceableFunctions(TorchFunctionMode):
    """While it is active, the functions below can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self._single = SinglePlaces()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            self._single.check()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = _FUNCTIONS.get(func) or find_product(func)
        if formula is not None and any(isinstance(leaf, Selection) for leaf in pytree.tree_leaves((args, kwargs))):
            return or_settled(_or_itself(formula, func), func, args, kwargs)
        result = formula(*args, **kwargs) if formula is not None else NotImplemented
        if result is NotImplemented and func is Tensor.__getitem__:
            result = self._single.select(*args)
        if result is not NotImplemented:
            return result
        given = read_arguments(func, args, kwargs)
        # From here: who asks which layer asks looks at the frames in between.
        result = func(*args, **kwargs)
        if given is not None:
            note_contents(func, (args, kwargs), given, result)
        return result


def _or_itself(formula: Callable[..., Any], func: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = formula(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    return call


def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """``x.index_fill`` with a tensor of no axes. ``NotImplemented`` for numbers, and for names of axes."""
    if not isinstance(value, Tensor) or value.dim() or not isinstance(dim, int):
        return NotImplemented
    if not x.dim():
        return index_fill(x.reshape(1), dim, index, value).reshape(())
    filled = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device).index_fill(0, index, True)
    return torch.where(filled.reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim())), value.to(x.dtype), x)


def index_fill_(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """`index_fill`, in place."""
    filled = index_fill(x, dim, index, value)
    return filled if filled is NotImplemented else x.copy_(filled)


def select(x: Any, key: Any) -> Any:
    """``x[key]`` by a mask of the first axes, with numbers and slices of the others, by what ``torch.where`` of one
    gives, by a list of truth values, or by a mask of later axes of which it is known how many it chooses;
    ``NotImplemented`` for other keys."""
    places = select_places(x, key)
    if places is not NotImplemented:
        return places
    if isinstance(key, list) and x.dim() and len(key) == x.shape[0] and all(isinstance(part, bool) for part in key):
        return x[[i for i, part in enumerate(key) if part]]
    mask, *rest = key if isinstance(key, tuple) and key else (key,)
    if is_whole(mask):
        return _select_behind(x, key)
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor) or mask.dtype is not torch.bool or not mask.dim():
        return NotImplemented
    if mask.shape != x.shape[: mask.dim()] or not x.numel():
        return NotImplemented
    if rest:
        # Of the other axes first.
        plain = all(part is Ellipsis or type(part) in (int, slice) for part in rest)
        return select(x[(*[slice(None)] * mask.dim(), *rest)], mask) if plain else NotImplemented
    places = places_of(mask)
    return Selection.of(x, mask) if places is None else x[places]


def _select_behind(x: Any, key: Any) -> Any:
    """``x[:, mask]``, ``x[..., mask, 0]``: by numbers in place of the mask."""
    keys = list(key) if isinstance(key, tuple) else [key]
    masks = [place for place, part in enumerate(keys) if isinstance(part, Tensor)]
    if (
        len(masks) != 1
        or not isinstance(x, Tensor)
        or not all(type(part) in (int, slice) for part in keys[1:][masks[0] :])
    ):
        return NotImplemented
    (place,), mask = masks, keys[masks[0]]
    if mask.dtype is not torch.bool or not mask.dim() or not all(is_whole(part) for part in keys[:place]):
        return NotImplemented
    if Ellipsis in keys[:place]:
        lead = x.dim() - mask.dim() - len(keys[place + 1 :])
        keys[:place], place = [slice(None)] * lead, lead
    if place < 0 or mask.shape != x.shape[place : place + mask.dim()]:
        return NotImplemented
    indices = nonzero(mask, as_tuple=True)
    if indices is NotImplemented:
        return NotImplemented
    numbers = [index.settle() for index in indices]
    return NotImplemented if None in numbers else x[(*keys[:place], *numbers, *keys[place + 1 :])]


def masked_select(x: Any, mask: Any) -> Any:
    """``torch.masked_select`` by a mask of the tensor's own shape; ``NotImplemented`` for others."""
    return select(x, mask) if isinstance(mask, Tensor) and mask.shape == x.shape else NotImplemented


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """``x.index_put`` by one mask, differentiably: PyTorch's gradient of ``values`` has as many elements as are chosen.
    ``NotImplemented`` for other indices."""
    given = [index for index in indices if index is not None]
    if len(given) != 1 or not is_mask(given[0]) or not isinstance(values, Tensor):
        return NotImplemented
    return put_masked(x, indices, values, accumulate)


def index_put_(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """`index_put`, in place."""
    written = index_put(x, indices, values, accumulate)
    return written if written is NotImplemented else x.copy_(written)


def set_item(x: Tensor, key: Any, value: Any) -> Any:
    """``x[key] = value`` by a mask among whole axes, `index_put` then; ``NotImplemented`` for other keys, and for
    numbers, which have no gradient."""
    keys = key if isinstance(key, tuple) else (key,)
    chosen = [part for part in keys if isinstance(part, Selection)]
    if chosen:
        if not all(part is chosen[place] if place < len(chosen) else is_whole(part) for place, part in enumerate(keys)):
            raise refusal("x[...] = y", "beside other indices")
        set_places(x, chosen, value)
        return None
    if isinstance(value, Selection):
        if len(keys) > 1 or not value.memory or not is_same_choice(value, keys[0], keys[0]._version):
            raise refusal("x[mask] = y[mask]", "by another mask")
        x.copy_(torch.where(value.wide_mask(), value.rows.to(x.dtype), x))
        return None
    masks = [place for place, part in enumerate(keys) if isinstance(part, Tensor) and is_mask(part)]
    whole = [part for part in keys if is_whole(part)]
    if len(masks) != 1 or len(whole) != len(keys) - 1 or not isinstance(value, Tensor):
        return NotImplemented
    axes = keys[masks[0]].dim()
    if axes == 0 or axes + len(whole) - (Ellipsis in whole) > x.dim():
        return NotImplemented
    first = masks[0]
    if Ellipsis in keys[: masks[0]]:
        first = x.dim() - axes - (len(keys) - 1 - masks[0])
    if keys[masks[0]].shape != x.shape[first : first + axes]:
        return NotImplemented
    while value.dim() > x.dim() - axes + 1 and value.shape[0] == 1:
        value = value.squeeze(0)
    indices = [*[None] * first, keys[masks[0]]]
    index_put_(x, indices, value.to(x.dtype))
    return None


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """``F.gaussian_nll_loss`` without its check: a variance below zero, which eager refuses, gives NaN. Returns
    ``NotImplemented`` for what eager refuses by types and shapes, and for a variance that is a number."""
    if not isinstance(var, Tensor) or reduction not in REDUCTIONS:
        return NotImplemented
    if var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.dim() != input.dim() or sum(a != b for a, b in zip(input.shape, var.shape, strict=True)) != 1:
            return NotImplemented
    var = torch.where(var < 0, math.nan, var)
    # As in eager: a variance that is raised to eps still gets a gradient.
    with torch.no_grad():
        raised = var.clamp(min=eps)
    var = torch.where(var < eps, var - var.detach() + raised, var)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return REDUCTIONS[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)


def multilabel_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``F.multilabel_margin_loss`` of a single row, whose loss is a scalar; of PyTorch's formula it has an axis."""
    loss = F.multilabel_margin_loss(input, target, *args, **kwargs)
    return loss.reshape(()) if input.dim() == 1 else loss


def multilabel_margin_loss_forward(input: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss of scores ``[rows, classes]`` or ``[classes]``, and 1 at the classes that each row names: those that
    stand in ``target`` before its first -1. PyTorch's own formula counts what stands behind it as class 0."""
    scores, named = torch.atleast_2d(input), torch.atleast_2d(target)
    classes = torch.arange(scores.shape[1], device=target.device)
    counts = (named == -1).cumsum(-1) == 0
    is_target = ((named.unsqueeze(-1) == classes) & counts.unsqueeze(-1)).any(1)
    own = torch.gather(scores, -1, torch.where(counts, named, 0))
    margins = (1 - own.unsqueeze(-1) + scores.unsqueeze(1)).relu() / scores.shape[1]
    loss = torch.where(counts.unsqueeze(-1) & ~is_target.unsqueeze(1), margins, 0).sum((1, 2))
    reduced: Tensor = [*REDUCTIONS.values()][reduction](loss)
    return reduced, is_target.to(input.dtype).reshape(target.shape)


OWN_LOSSES = (
    (
        torch.ops.aten.multilabel_margin_loss_forward.default,
        {DispatchKey.Autograd: multilabel_margin_loss_forward},
    ),
)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.ctc_loss: ctc_loss,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
    torch.index_add: index_add,
    Tensor.index_add: index_add,
    Tensor.index_add_: index_add_,
    torch.index_fill: index_fill,
    Tensor.index_fill: index_fill,
    Tensor.index_fill_: index_fill_,
    torch.index_put: index_put,
    torch.index_put_: index_put_,
    Tensor.index_put: index_put,
    Tensor.index_put_: index_put_,
    Tensor.__setitem__: set_item,
    Tensor.__getitem__: select,
    Tensor.data.__get__: forget,  # type: ignore[attr-defined]
    Tensor.masked_select: masked_select,
    torch.masked_select: masked_select,
    torch.nonzero: nonzero,
    Tensor.nonzero: nonzero,
    torch.where: where,
}
