# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Marks hooks for users: as tensor code alone, or as starting communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_INLINEABLE = "_retrograd_inlineable"
_COMMUNICATION = "_retrograd_communication"
_BUCKET = "_retrograd_bucket"
# Whose hooks reduce gradients or gather parameters.
_DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.distributed")
# Whose hooks do both.
_SHARDED = "torch.distributed.fsdp."


def inlineable(hook: _Hook) -> _Hook:
    """Mark a hook as tensor code alone: `retrograd.enable` compiles it into the backward.

    For tensor hooks, pre- and post-hooks of nodes, post-accumulate hooks and the unpack hooks of saved tensors. Its
    Python code runs while a backward is recorded, and not again as long as it is the same: the code, the numbers and
    objects that it reads from its closure, from globals and from attributes, and the identity of the tensors there.
    Where one of them is another, the backward is recorded and compiled again. The tensors' values are read at each
    step. What else the code does, such as printing, is not repeated. Where the sizes of its tensors turn out to differ
    from step to step, the code runs once on stand-ins, whose sizes are symbols.

    A pair of pack and unpack hooks that is open around `retrograd.compile_backward`, around a call of what
    `torch.compile` made, or inside of the model, is compiled into forward and backward. Such hooks read no tensor but
    the one that they are given.

    `torch.fx.GraphModule`s, which is how PyTorch marks pack and unpack hooks as inlineable, need no mark.

    Returns:
        The hook, or a `functools.partial` of it where it has no room for a mark (bound methods).
    """
    return _mark(hook, _INLINEABLE)


def communication(hook: _Hook) -> _Hook:
    """Mark a hook that starts something that goes on while other work is done, such as an asynchronous all-reduce.

    ``retrograd.enable(hook_schedule="overlap")`` calls it as early as what it depends on allows. The hooks of
    `DistributedDataParallel` and of FSDP need no mark.

    Returns:
        As for `inlineable`.
    """
    return _mark(hook, _COMMUNICATION)


def is_inlineable(hook: Any) -> bool:
    """Whether a hook is marked, by us or in PyTorch's way."""
    return getattr(hook, _INLINEABLE, False) is True or isinstance(hook, torch.fx.GraphModule)


def is_communication(call: Any) -> bool:
    """Whether a hook is marked as starting communication, or is one of DDP's or FSDP's own; or a custom function, given
    as the context of its backward, is."""
    return getattr(call, _COMMUNICATION, False) is True or _module_of(call).startswith(_DISTRIBUTED)


def filling(hook: _Hook, bucket: Callable[[], int | None]) -> _Hook:
    """Mark a hook as one that says that a gradient of a bucket is there, which is sent when all are; ``bucket`` gives
    its number, once it is known."""
    marked = communication(hook)
    setattr(marked, _BUCKET, bucket)
    return marked


def bucket_of(call: Any) -> int | None:
    """The number of the bucket that a hook tells of a gradient of; None where that is not known."""
    find: Callable[[], int | None] | None = getattr(call, _BUCKET, None)
    return None if find is None else find()


def frees_memory(call: Any) -> bool:
    """Whether a hook or custom function may give back the memory of parameters, as FSDP's do."""
    return _module_of(call).startswith(_SHARDED)


def _module_of(call: Any) -> str:
    """The module of a hook's code, or of a custom function."""
    while isinstance(call, partial):
        call = call.func
    call = getattr(type(call), "_forward_cls", call)
    return getattr(getattr(call, "__func__", call), "__module__", None) or ""


def describe_hook(hook: Any) -> str:
    """A hook as its author knows it: name, file and line."""
    inner = getattr(hook, "func", hook)
    inner = getattr(inner, "__func__", inner)
    name = getattr(inner, "__qualname__", type(hook).__name__)
    code = getattr(inner, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _mark(hook: Any, mark: str) -> Any:
    try:
        setattr(hook, mark, True)
    except AttributeError:
        hook = partial(hook)
        setattr(hook, mark, True)
    return hook
