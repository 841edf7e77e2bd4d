# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``x[mask]``, whose size only the mask's contents say, traced as all of ``x`` beside the mask.

What is computed from it element by element is computed for all elements, and what is not chosen is left out where
elements are added up or written back: ``F.cross_entropy(scores[mask], labels[mask])``, ``x[mask] *= 2``. In the place
of an element that is not chosen stands the first one that is: a function that is defined on what is chosen, a logarithm
of what is positive, say, is defined there too, and so is its derivative. A gradient of zero stays zero.

What needs the elements in a row, or how many they are, as a number, cannot be traced and is refused, unless the mask is
computed from arguments alone: then there are as many as for the arguments that are compiled for.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.nn.modules import module
from torch.utils import _pytree as pytree
from torch.utils import hooks

from retrograd.frontend.python.argument_answers import ask, count
from retrograd.frontend.python.source_locations import IN_PARTS, CaptureError, is_user_file, place_of_caller

# Functions whose result at an element depends on their arguments there alone, as methods or functions of torch.
_ELEMENTWISE_NAMES = """
    abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bool ceil clamp clamp_max clamp_min clip
    clone contiguous copysign cos cosh deg2rad detach div divide double eq erf erfc erfinv exp exp2 expm1 float floor
    floor_divide fmax fmin fmod ge gt half hypot int isfinite isinf isnan le lerp lgamma log log10 log1p log2
    logaddexp logical_and logical_not logical_or logit long lt maximum minimum mul multiply nan_to_num ne neg negative
    pow rad2deg reciprocal remainder round rsqrt rsub sgn sigmoid sign sin sinc sinh sqrt square sub subtract tan tanh
    to true_divide trunc where xlogy
    alpha_dropout dropout
    bfloat16 bitwise_and bitwise_not bitwise_or celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid
    mish relu relu6 selu silu softplus softsign tanhshrink
    __abs__ __add__ __and__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ __ne__ __neg__
    __or__ __pos__ __pow__ __radd__ __rdiv__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
# Functions of the last axis of each element, where an element is a row or more; their results are rows, too.
_ROWWISE = frozenset(("linear", "layer_norm", "rms_norm"))
_ALONG = frozenset(("softmax", "log_softmax", "softmin", "normalize", "glu"))
# Those that may give their argument itself.
_ALIAS_NAMES = "bfloat16 bool contiguous detach double float half int long to __pos__"
_ALIASES = frozenset(_ALIAS_NAMES.split())
_IN_PLACE = {f"__i{name}__": f"__{name}__" for name in ("add", "sub", "mul", "truediv", "pow")}
_LOSS_NAMES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    poisson_nll_loss soft_margin_loss cross_entropy nll_loss
"""
_LOSSES = frozenset(_LOSS_NAMES.split())
_BY_CLASS = frozenset(("cross_entropy", "nll_loss"))
_REMEDY = (
    "compute element by element and add up with sum(), mean() or a loss of torch.nn.functional; else use torch.where "
    f"on whole tensors; {IN_PARTS}"
)

# Where PyTorch looks for tensors among what a custom function, or a module with hooks, takes and gives.
_LOOKING = {
    unwrap_dead_wrappers.__code__.co_filename: "a torch.autograd.Function of it",
    str(hooks.__file__): "backward hooks of a module that takes or gives it",
    str(module.__file__): "backward hooks of a module that takes or gives it",
}


class Selection:
    """The elements ``x[mask]`` of ``x [*mask, *element]``: ``rows`` has the same shape, and any chosen element where
    ``mask`` (bool) is not set.

    ``memory`` is one list for all that share memory in eager. An op in place gives another selection, and empties the
    list: by their other names the old elements would have changed, and are refused.
    """

    __slots__ = ("dense", "mask", "memory", "rows", "version")

    def __init__(self, rows: Tensor, mask: Tensor, version: int, memory: list[bool] | None = None) -> None:
        self.rows, self.mask, self.version = rows, mask, version
        # The elements in a row, once they have been asked for; they stand in its place from then on.
        self.dense: Tensor | None = None
        self.memory = [True] if memory is None else memory

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A tensor's, to the model: it goes by ``isinstance``, and by ``torch.is_tensor``. What is written in C would
        take it for one, and crash."""
        frame = sys._getframe(1)
        if frame.f_code.co_filename in _LOOKING and not frame.f_code.co_name.startswith("__"):
            # They would see no tensor to have a gradient for.
            raise refusal(_LOOKING[frame.f_code.co_filename])
        is_models = frame.f_code is torch.is_tensor.__code__ or is_user_file(frame.f_code.co_filename)
        return Tensor if is_models and _calls_isinstance(frame.f_code, frame.f_lasti) else Selection

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Selection:
        """The elements of ``x`` where ``mask``, of its first axes, is set."""
        flat = mask.flatten()
        elements = x.detach().reshape(flat.shape[0], *x.shape[mask.dim() :])
        first = elements.index_select(0, flat.to(torch.int32).argmax().reshape(1))[0]
        version = mask._version
        return cls(torch.where(Selection(x, mask, version).wide_mask(), x, first), mask, version)

    def having(self, rows: Tensor, *, shared: bool = False) -> Selection:
        """Other numbers for the same places, in memory of their own unless ``shared``."""
        return Selection(rows, self.mask, self.version, self.memory if shared else None)

    @property
    def behind(self) -> int:
        """The number of axes of an element."""
        return self.rows.dim() - self.mask.dim()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.rows.device

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor requires grad."""
        return self.rows.requires_grad

    @property
    def ndim(self) -> int:
        """The number of axes: one for all that are chosen."""
        return self.behind + 1

    def dim(self) -> int:
        """The number of axes: one for all that are chosen."""
        return self.behind + 1

    @property
    def shape(self) -> torch.Size:
        """The shape, which the program may not go by."""
        return self._asked_shape("shape")

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of an axis."""
        shape = self._asked_shape("size")
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """The number of elements."""
        return self._asked_shape("numel").numel()

    def _asked_shape(self, name: str) -> torch.Size:
        if self.dense is not None:
            return self.dense.shape
        size = ask(self.mask, count)
        if size is None:
            raise refusal(name)
        return torch.Size([size, *self.rows.shape[self.mask.dim() :]])

    def settle(self) -> Tensor | None:
        """The elements in a row; ``None`` where nobody knows how many they are."""
        if self.dense is None and self.memory:
            size = ask(self.mask, count)
            if size is not None:
                flat, numbers = self.mask.flatten(), torch.arange(self.mask.numel(), device=self.mask.device)
                # What is not chosen goes to one place behind the last.
                target = torch.where(flat, flat.long().cumsum(0) - 1, size)
                places = numbers.new_zeros(size + 1).scatter(0, target, numbers)[:size]
                self.dense = self.flat().index_select(0, places)
                self.memory.clear()
        return self.dense

    def wide_mask(self) -> Tensor:
        """The mask, for ``rows`` to be broadcast against."""
        return self.mask.reshape(*self.mask.shape, *[1] * self.behind)

    def flat(self) -> Tensor:
        """``[mask.numel(), *element]``."""
        return self.rows.reshape(self.mask.numel(), *self.rows.shape[self.mask.dim() :])

    def total(self) -> Tensor:
        """The sum over all that are chosen, ``[*element]``."""
        axes = list(range(self.mask.dim()))
        rows = self.rows.long() if self.rows.dtype is torch.bool else self.rows
        return torch.where(self.wide_mask(), rows, 0).sum(axes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(Tensor, name)
        if not callable(method):
            raise refusal(name)
        return lambda *args, **kwargs: apply(method, (self, *args), kwargs)

    def __getitem__(self, key: Any) -> Any:
        """A part of each element: ``[:, i]``, ``[..., i]``."""
        return or_settled(_select_part, Tensor.__getitem__, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        """Only where the elements are known to be in a row."""
        dense = self.settle()
        if dense is None:
            raise refusal("[...] = y")
        dense[key] = value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return apply(func, args, kwargs or {})

    # Python asks the class for how to test and count, and for whether two are equal.
    def __bool__(self) -> bool:
        raise refusal("bool()")

    def __len__(self) -> int:
        return self._asked_shape("len()")[0]

    def __iter__(self) -> Any:
        dense = self.settle()
        if dense is None:
            raise refusal("a loop over it")
        return iter(dense)

    __hash__ = object.__hash__
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise refusal("numpy()")


@lru_cache(maxsize=256)
def _calls_isinstance(code: CodeType, place: int) -> bool:
    """Whether the instruction at a place calls ``isinstance``: the name stands where the call begins."""
    starts = [(line, column) for line, _, column, _ in code.co_positions()]
    start = starts[place // 2]
    return None not in start and any(
        i.argval == "isinstance" and i.opname.startswith("LOAD_") and starts[i.offset // 2] == start
        for i in dis.get_instructions(code)
    )


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: apply(getattr(Tensor, name), (self, *args), {})


def _in_place(name: str) -> Callable[..., Selection]:
    def write(self: Selection, other: Any) -> Selection:
        result = apply(getattr(Tensor, name), (self, other), {})
        if not isinstance(result, Selection):
            if self.dense is None:
                raise refusal(name)
            self.dense.copy_(result)
            return self
        self.memory.clear()
        return result.having(result.rows.to(self.rows.dtype))

    return write


for _name in _ELEMENTWISE:
    if _name.startswith("__"):
        setattr(Selection, _name, _operator(_name))
for _name, _plain in _IN_PLACE.items():
    setattr(Selection, _name, _in_place(_plain))


def _select_part(chosen: Selection, key: Any) -> Selection:
    keys = key if isinstance(key, tuple) else (key,)
    first, plain = keys[0], all(part is not Ellipsis and isinstance(part, int | slice) for part in keys[1:])
    if not plain or not is_whole(first):
        raise refusal("[...]")
    if len(keys) - 1 > chosen.behind:
        raise IndexError(f"too many indices for a tensor of {chosen.ndim} axes")
    whole = [] if first is Ellipsis else [slice(None)] * chosen.mask.dim()
    return chosen.having(chosen.rows[(*whole, *([Ellipsis] * (not whole)), *keys[1:])], shared=True)


def settled(result: Any) -> Any:
    """Put a model's selections in a row where it is known how many elements they have; returns its result so."""

    def settle(leaf: Any) -> Any:
        dense = leaf.settle() if isinstance(leaf, Selection) else None
        return leaf if dense is None else dense

    chosen = any(isinstance(leaf, Selection) for leaf in pytree.tree_leaves(result))
    return pytree.tree_map(settle, result) if chosen else result


def or_settled(call: Callable[..., Any], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``call`` of arguments of which some are selections; where that needs their elements in a row, and it is known
    how many they are, ``func`` of tensors in their place."""
    settle = lambda leaf: leaf.dense if isinstance(leaf, Selection) and leaf.dense is not None else leaf  # noqa: E731
    args, kwargs = pytree.tree_map(settle, (tuple(args), kwargs))
    chosen = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Selection)]
    if not chosen:
        return func(*args, **kwargs)
    try:
        return call(*args, **kwargs)
    except NotInARowError:
        if any(selection.settle() is None for selection in chosen):
            raise
    return func(*pytree.tree_map(settle, args), **pytree.tree_map(settle, kwargs))


def apply(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func`` of arguments of which some are selections.

    Raises:
        CaptureError: it is no function of single elements, nor a sum or mean of them, and nobody knows how many they
            are.
    """
    return or_settled(lambda *args, **kwargs: _apply(func, args, kwargs), func, args, kwargs)


def _apply(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Selection)]
    chosen = given[0]
    if not all(selection.memory for selection in given):
        raise refusal(name, "of elements that were written to in place by another name")
    if any(not is_same_choice(selection, chosen.mask, chosen.version) for selection in given):
        raise refusal(name, "of elements that two masks choose")
    if name in _LOSSES:
        return _loss(func, args, kwargs, chosen)
    if name in ("sum", "mean") and len(given) == 1 and args and args[0] is chosen:
        return _add_up(chosen, name, args[1:], kwargs)
    if name in ("any", "all", "max", "min") and len(args) == 1 and not kwargs:
        return _extreme(chosen, name)
    behind = min(selection.behind for selection in given)
    along = name in _ALONG and (args[1:2] or [kwargs.get("dim")])[0] == -1
    rowwise = name in _ROWWISE and all(selection is args[0] for selection in given)
    if name not in _ELEMENTWISE and not (behind and (along or rowwise)):
        raise refusal(name)
    if not rowwise and len({selection.behind for selection in given}) > 1:
        raise refusal(name, "of elements of several shapes")
    others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not rowwise and any(tensor.dim() > behind for tensor in others):
        raise refusal(name, "with a tensor that is not chosen from")
    return chosen.having(func(*_dense(args), **_dense(kwargs)), shared=name in _ALIASES)


def _dense(value: Any, of: Callable[[Selection], Tensor] = lambda selection: selection.rows) -> Any:
    return pytree.tree_map(lambda leaf: of(leaf) if isinstance(leaf, Selection) else leaf, value)


def _add_up(chosen: Selection, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``sum`` or ``mean`` of all, along the axis of what is chosen, or along the last one of each element."""
    axes = args[0] if args else kwargs.get("dim")
    if len(args) > 1 or kwargs.keys() - {"dim"} or isinstance(axes, torch.dtype):
        raise refusal(name, "with more options than an axis")
    if axes == -1 and chosen.behind:
        return chosen.having(getattr(chosen.rows, name)(-1))
    if axes not in (None, 0, (0,), [0]) and axes != -1:
        raise refusal(name, f"along {axes}")
    total, count = chosen.total(), chosen.mask.sum()
    if axes is None:
        count = count * (total.numel() if name == "mean" else 1)
        total = total.sum()
    return total / count if name == "mean" else total


def _extreme(chosen: Selection, name: str) -> Tensor:
    """The largest or smallest of all numbers that are chosen, or whether any or all are true."""
    if name in ("any", "all"):
        wide, rows = chosen.wide_mask(), chosen.rows.bool()
        return (rows & wide).any() if name == "any" else (rows | ~wide).all()
    if not chosen.dtype.is_floating_point:
        raise refusal(name, "of integers")
    extreme: Tensor = getattr(torch.where(chosen.wide_mask(), chosen.rows, -inf if name == "max" else inf), name)()
    return extreme


def _loss(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], chosen: Selection) -> Any:
    """A loss of chosen elements, each by itself, and then their sum or mean."""
    name, mask = func.__name__, chosen.mask
    reduction, old = kwargs.get("reduction", "mean"), {"size_average", "reduce"}
    if (
        len(args) > 2
        or any(kwargs.get(option) is not None for option in old)
        or reduction not in ("mean", "sum", "none")
    ):
        raise refusal(name, "with options given by place, or reduced otherwise")
    if any(isinstance(value, Tensor) for value in (*args, kwargs.get("input"), kwargs.get("target"))):
        raise refusal(name, "with a tensor that is not chosen from")
    each = func(*_dense(args, Selection.flat), **_dense(kwargs, Selection.flat) | {"reduction": "none"})
    losses = chosen.having(each.reshape(*mask.shape, *each.shape[1:]))
    if reduction == "none":
        return losses
    total = losses.total().sum()
    if reduction == "sum":
        return total
    count = mask.sum() * (each.numel() // max(mask.numel(), 1))
    if name in _BY_CLASS:
        labels = args[1] if len(args) > 1 else kwargs.get("target")
        if kwargs.get("weight") is not None or not isinstance(labels, Selection) or labels.dtype.is_floating_point:
            raise refusal(name, "with weights, or of labels that are not chosen")
        count = torch.where(labels.wide_mask(), labels.rows != kwargs.get("ignore_index", -100), False).sum()
    return total / count


def is_whole(key: Any) -> bool:
    """Whether a part of an index takes all of an axis, or of all that are left."""
    return key is Ellipsis or (isinstance(key, slice) and key == slice(None))


def is_same_choice(chosen: Selection, mask: Tensor, version: int) -> bool:
    """Whether a selection was made by ``mask`` when it was in its ``version``."""
    return chosen.mask is mask and chosen.version == version


class NotInARowError(CaptureError):
    """Elements that a mask chooses are needed in a row."""


def refusal(name: str, what: str = "") -> NotInARowError:
    """Make the error for a selection that would need its elements in a row."""
    of = f"{name} {what}".strip()
    where = f"the size of x[mask], or of where(mask), depends on the mask's contents{place_of_caller()}"
    return NotInARowError(f"data-dependent shape: {of}, where {where}", _REMEDY)
