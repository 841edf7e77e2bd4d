# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks of saved tensors (``torch.autograd.graph.saved_tensors_hooks``) as part of programs that are compiled with
their forward: which are open, around what is compiled or inside of it, and what becomes of them when it is called.

Where both hooks of a pair are marked as inlineable, ``pack_tracing.py`` makes graphs of them. Which values are packed
the partition decides: those that it saves. As in AOTAutograd, where ``GraphModule``s are hooks, these are values of the
forward's own, not its arguments, parameters and outputs, which somebody else holds anyway.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.source import GlobalStateSource
from torch._functorch._aot_autograd.runtime_wrappers import _disable_saved_tensors_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from retrograd.frontend.autograd.hooks.hook_identity import HookIdentity
from retrograd.frontend.hooks.hook_marks import describe_hook, is_inlineable

# On an FX node. The pair that its results are packed by, if they are saved.
PACKED_BY = "packed_by"
# For each of its tensors, the name of the function that packs it, or an empty one.
PACKED_AS = "packed_as"
Call = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class HookPair:
    """A pack and an unpack hook as they are open; ``identity`` is that of their code and of the numbers it reads."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    identity: Any = field(init=False)

    def __post_init__(self) -> None:
        reader = HookIdentity()
        object.__setattr__(self, "identity", (reader.read(self.pack), reader.read(self.unpack)))

    def __str__(self) -> str:
        return f"{describe_hook(self.pack)} and {describe_hook(self.unpack)}"


def find_open_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost pack and unpack hooks that are open in this thread, to be called or not."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def find_open_pair() -> HookPair | None:
    """The same, if both are marked as inlineable."""
    hooks = find_open_hooks()
    return HookPair(*hooks) if hooks is not None and all(map(is_inlineable, hooks)) else None


@contextlib.contextmanager
def hidden_hooks() -> Iterator[None]:
    """While this is open and a graph is compiled, AOTAutograd does not inline hooks itself, into graphs that it finds
    compiled already."""
    if find_open_hooks() is None:
        yield
        return
    with saved_tensors_hooks(_same, _same):
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class HookTracker(TorchFunctionMode):
    """Notes on every op traced the pair of hooks that the model itself has open there. Hooks are not called while
    AOTAutograd traces: what they would be called on is saved in no trace."""

    def __init__(self) -> None:
        super().__init__()
        self._around = find_open_hooks()
        self._pairs: dict[Any, HookPair | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = find_open_hooks()
        if hooks is None or hooks == self._around:
            return func(*args, **(kwargs or {}))
        if hooks not in self._pairs:
            self._pairs[hooks] = self._read(*hooks)
        pair = self._pairs[hooks]
        with fx_traceback.annotate({PACKED_BY: pair}) if pair is not None else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))

    def _read(self, pack: Any, unpack: Any) -> HookPair | None:
        if is_inlineable(pack) and is_inlineable(unpack):
            return HookPair(pack, unpack)
        # Those of a checkpoint stand for a tag, which is traced.
        if pack.__module__ != checkpoint.__name__:
            warnings.warn(
                f"{describe_hook(pack)} and {describe_hook(unpack)} are open in the model and are not called: what is "
                "saved is decided after the trace. Mark both with retrograd.inlineable to have them compiled in, or "
                "open them around the call of what is compiled",
                stacklevel=2,
            )
        return None


def mark_values(graph_module: torch.fx.GraphModule, around: HookPair | None) -> None:
    """Have the values that the forward of a joint graph computes packed: by the hooks that the model has open where it
    computes them, else by those ``around`` it."""
    for node in graph_module.graph.nodes:
        pair = (node.meta.get("custom") or {}).get(PACKED_BY, around)
        if pair is not None and node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward":
            node.meta[PACKED_BY] = pair


def under_hooks(call: Call, inlined: HookPair | None) -> Call:
    """``call``, the call of a program with the hooks ``inlined`` that were open where it was compiled.

    These are not called on top. Others are called by PyTorch on what the program saves, as long as it has none itself.

    Raises:
        ValueError: hooks are open other than those that the program has inlined.
    """
    told: list[bool] = []
    # By now the hooks have run, which may have changed what they read.
    identity = None if inlined is None else HookPair(inlined.pack, inlined.unpack).identity

    def checked(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        hooks = find_open_hooks()
        if hooks is None:
            return call(tensors)
        pair = find_open_pair()
        if inlined is None:
            if pair is not None and not told:
                told.append(True)
                warnings.warn(
                    f"{pair} are called in Python, on what the program saves: to have them compiled in, open them "
                    "around compile_backward",
                    stacklevel=3,
                )
            return call(tensors)
        if pair is None or pair.identity != identity:
            names = " and ".join(map(describe_hook, hooks))
            raise ValueError(f"compiled with the hooks {inlined}, called under {names}; compile again under these")
        with _disable_saved_tensors_hooks():
            return call(tensors)

    return checked


def guard_hooks(pair: HookPair | None) -> None:
    """Have Dynamo, whose backend runs, compile again where other hooks are open that are marked, or none are. It guards
    the identity of ``GraphModule``s by itself."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return

    def open_hooks(builder: Any, guard: Any) -> None:
        # By now the hooks have run, which may have changed what they read.
        identity = _open_identity()

        def same_hooks(_: Any) -> bool:
            return identity == _open_identity()

        text = "no hooks of saved tensors that are marked" if pair is None else f"the hooks {pair}"
        builder.guard_manager.root.add_lambda_guard(same_hooks, [f"{text} are open"], guard.user_stack)

    context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(open_hooks))


def _open_identity() -> Any:
    pair = find_open_pair()
    return None if pair is None else pair.identity


def inlined_in(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, during which the hooks that are open are not called on top."""

    def without_hooks(*args: Any) -> Any:
        with _disable_saved_tensors_hooks():
            return call(*args)

    return without_hooks
