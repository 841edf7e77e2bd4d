# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The arguments of a call, leaf by leaf: what each is called, and which kinds cannot be traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from retrograd.contract.signature import InputSpec
from retrograd.frontend.doors.signature import type_of
from retrograd.frontend.doors.unregistered_objects import held_by, objects_within
from retrograd.frontend.python.source_locations import DENSE_REMEDY, CaptureError, LeftToEagerError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_call(model: object, args: object, kwargs: object) -> None:
    """Refuse a model that is none, and arguments that are not given as those of a call.

    Raises:
        CaptureError: says what was given, and how to write it.
    """
    if isinstance(model, type) or not callable(model):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        raise CaptureError(f"the model is {what}, not a module or a function", "give an nn.Module, made, or a function")
    if hasattr(model, "_torchdynamo_orig_callable") or hasattr(model, "_orig_mod"):
        raise CaptureError(
            "the model is what torch.compile has made",
            'compile what torch.compile was given; or use torch.compile(model, backend="retrograd")',
        )
    if isinstance(args, torch.Tensor):
        raise CaptureError(
            "a tensor is given as the arguments of the model, whose rows would be taken for them",
            "write (x,) for the arguments of a call model(x)",
        )
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        remedy = "write (x,) for a call model(x); what is given by name goes into kwargs: model, (), {'x': x}"
        raise CaptureError(f"the arguments of the model are of type {type(args).__name__}, not a tuple or list", remedy)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise CaptureError("kwargs are no arguments by name", "write {'mask': mask} for a call model(x, mask=mask)")
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise CaptureError("the model is, or has, a TorchScript module", "give the module that it was scripted from")
    if isinstance(model, torch.nn.Module):
        _check_state(model)


def _check_state(model: torch.nn.Module) -> None:
    """Refuse parameters and buffers of other layouts: of some, PyTorch's own trace fails as if the model did."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_layout(name, tensor, "keep", LeftToEagerError)
        if type(tensor) not in (*_PLAIN, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
            raise CaptureError(
                f"{name} is a {type(tensor).__name__}, a subclass of Tensor",
                "keep a plain tensor, such as as_subclass(torch.Tensor) of it; or use "
                'torch.compile(model, backend="retrograd") or retrograd.enable()',
            )


def _check_layout(name: str, tensor: torch.Tensor, remedy: str, error: type[CaptureError]) -> None:
    """Refuse a tensor that is not dense; a padded one is to be ``remedy``, kept or passed."""
    if tensor.is_nested:
        raise CaptureError(f"{name} is a nested tensor", f"{remedy} a padded one, and a mask of what is padded")
    if tensor.layout is not torch.strided:
        raise error(f"{name} is a tensor of layout {tensor.layout}", DENSE_REMEDY)


def input_specs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[InputSpec, ...]:
    """Each leaf of the arguments with its path as a name: the type of a tensor, the value of a constant.

    Raises:
        CaptureError: a leaf holds tensors that a trace would not see, or is one of another kind than dense.
    """
    keyed, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    specs = []
    for path, leaf in keyed:
        head, rest = ("args" if path[0].idx == 0 else "kwargs"), path[1:]  # type: ignore[attr-defined]
        name = head + pytree.keystr(rest)
        _check_leaf(name, leaf)
        specs.append(InputSpec(name, type_of(leaf)) if isinstance(leaf, torch.Tensor) else InputSpec(name, None, leaf))
    return tuple(specs)


def _check_leaf(name: str, leaf: Any) -> None:
    """Refuse an argument whose tensors would not be seen."""
    remedy = (
        "pass its tensors; or tell torch of a class of your own with torch.utils._pytree.register_dataclass; or use "
        'torch.compile(model, backend="retrograd")'
    )
    if isinstance(leaf, torch.Tensor):
        if type(leaf) not in _PLAIN:
            raise CaptureError(f"{name} is a {type(leaf).__name__}, a subclass of Tensor", "pass a plain tensor")
        _check_layout(name, leaf, "pass", CaptureError)
    elif isinstance(leaf, np.ndarray):
        raise CaptureError(f"{name} is a NumPy array, which would be a constant", "pass torch.from_numpy(...) of it")
    elif not isinstance(leaf, type) and _holds_tensor(leaf):
        raise CaptureError(f"{name} is a {type(leaf).__name__}, whose tensors would be constants", remedy)


def _holds_tensor(value: Any) -> bool:
    """Whether an object, or one that it leads to, has a tensor in its attributes."""
    if isinstance(value, torch.nn.Module):
        return any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(vars(value)))
    held = (pytree.tree_leaves(held_by(part)) for part in objects_within(value))
    return any(isinstance(t, torch.Tensor) for leaves in held for t in leaves)
