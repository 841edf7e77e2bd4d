# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks that are put on tensors, or taken off, by Python that a backward calls: in eager they take effect at once,
while a capture has the hooks that were there when it began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from retrograd.contract.errors import RetrogradError
from retrograd.frontend.autograd.engine.engine_order import read_node_graph

TENSOR_HOOK = "tensor_pre_hook"
POST_ACCUMULATE_HOOK = "post_acc_grad_hook"
_LEAF = "AccumulateGrad"


class LateHook(RetrogradError, RuntimeError):
    """A hook was put on, or taken off, a tensor whose gradient a captured backward computes without asking."""


@dataclass(frozen=True)
class _TakenOff:
    """A hook that was taken off, and the hooks among which it was; ``is_unclear``: maybe those that are called now."""

    hook: Any
    hooks: Mapping[int, Any]
    is_unclear: bool


class LateHooks:
    """Tells, while a captured backward runs, which hooks were put on leaves and which were taken off since it began.

    There is one, ``LATE``, as there is one captured backward at a time. ``is_changed``: there are any.

    A capture calls functions, and does not say for which tensor: of one that was taken off, the leaves that still have
    it tell which of its calls is meant. The hooks of one tensor are called as they were when the first was.
    """

    __slots__ = (
        "_beside",
        "_call",
        "_hooks",
        "_inlines",
        "_known",
        "_put",
        "_running",
        "_taken_off",
        "_thread",
        "calls_late",
        "is_changed",
    )

    def __init__(self) -> None:
        # The thread that the backward runs in; none where none does, or no Python has a part in it.
        self._thread: int | None = None
        self._call: Any = None
        self._hooks: Sequence[Any] = ()
        self._inlines = self.is_changed = False
        # Of leaves, by id: the kinds and numbers of hooks, and the leaf itself.
        self._put: dict[int, list[tuple[str, int, torch.Tensor]]] = {}
        self._known: frozenset[Any] | None = None
        self._taken_off: list[_TakenOff] = []
        # The hook that is called, and tensors' hooks among which it was found: those are called as they were.
        self._running: Any = None
        self._beside: list[Mapping[int, Any]] = []
        # Whether hooks are called that were put on late.
        self.calls_late = False

    def begin(self, call: Any, hooks: Sequence[Any]) -> None:
        """Begin with a backward, a ``BackwardCall``, whose capture has these hooks."""
        self._thread, self._call, self._hooks = get_ident(), call, hooks

    def end(self) -> None:
        """End with it."""
        self._thread = self._call = self._running = self._known = None
        self._hooks, self._beside, self._inlines = (), [], False
        if self.is_changed:
            self._put, self._taken_off, self.is_changed = {}, [], False

    def inline(self) -> None:
        """Note hooks that are part of what is compiled."""
        self._inlines = True

    def put_on(self, handle: RemovableHandle, tensor: torch.Tensor, hook: Any, kind: str) -> None:
        """Note a hook of a leaf, which is called when its gradient is accumulated.

        Raises:
            LateHook: the tensor's gradient is computed without asking; the hook is taken off again.
        """
        if self._thread != get_ident():
            return
        is_beside = self._is_beside(_hooks_of(tensor, kind))
        if is_beside and self._count(self._running) == 1:
            return
        is_last = kind == TENSOR_HOOK or len(_hooks_of(tensor, kind)) == 1
        is_kept = tensor.grad_fn is None and is_last and not self._call.inputs and not self._inlines
        if is_kept and not is_beside:
            self._put.setdefault(id(tensor), []).append((kind, handle.id, tensor))
            self.is_changed = True
        elif torch.autograd.graph.get_gradient_edge(tensor).node in self._nodes():
            handle.remove()
            self._stop()
            raise _too_late(hook, "put on a tensor")

    def take_off(self, handle: RemovableHandle) -> None:
        """Note a hook that is not to be called any more.

        Raises:
            LateHook: there is no telling which calls are those of it, or it is part of what is compiled.
        """
        if self._thread != get_ident() or (hooks := handle.hooks_dict_ref()) is None:
            return
        hook = hooks.get(handle.id)
        is_beside = self._is_beside(hooks)
        if hook is None or not self._count(hook) or handle.id in self._late_numbers():
            return
        if is_beside and self._count(self._running) == 1:
            return
        if self._inlines:
            self._stop()
            raise _too_late(hook, "taken off a tensor")
        self._taken_off.append(_TakenOff(hook, hooks, is_beside and hook is not self._running))
        self.is_changed = True

    def calls(self, hook: Any) -> bool:
        """Whether a hook whose turn it is is to be called: not if it was taken off since the backward began.

        Raises:
            LateHook: there is no telling.
        """
        if self.is_changed and not self.calls_late:
            taken_off = [taken for taken in self._taken_off if taken.hook is hook]
            if taken_off and not self._is_there(hook, taken_off):
                return False
        self._running = hook
        if self._beside:
            self._beside = []
        return True

    def _is_there(self, hook: Any, taken_off: Sequence[_TakenOff]) -> bool:
        """Whether a hook that was taken off some tensor is still on the one whose turn it is."""
        late, there, gone = self._late_numbers(), 0, 0
        for leaf in [node.variable for node in self._nodes() if type(node).__name__ == _LEAF]:
            for hooks in (_hooks_of(leaf, TENSOR_HOOK), _hooks_of(leaf, POST_ACCUMULATE_HOOK)):
                there += sum(other is hook for number, other in hooks.items() if number not in late)
                gone += sum(taken.hooks is hooks for taken in taken_off)
        count = self._count(hook)
        if there == count:
            return True
        is_clear = not any(taken.is_unclear for taken in taken_off)
        # Off all leaves that had it, and of each once; or off the one computed tensor.
        is_gone = len({id(taken.hooks) for taken in taken_off}) == gone == count or (count == 1 and not there)
        if is_gone and is_clear:
            return False
        self._stop()
        raise _too_late(hook, "taken off a tensor")

    def _is_beside(self, hooks: Mapping[int, Any]) -> bool:
        """Whether the hook that is called is, or was, among these; it may be called for another tensor, if there are
        several of it."""
        if any(other is hooks for other in self._beside):
            return True
        if not any(other is self._running for other in hooks.values()):
            return False
        self._beside.append(hooks)
        return True

    def _count(self, hook: Any) -> int:
        """How often the capture calls a hook."""
        return sum(other is hook for other in self._hooks)

    def _late_numbers(self) -> frozenset[int]:
        return frozenset(number for put in self._put.values() for _, number, _ in put)

    def of_leaf(self, leaf: torch.Tensor) -> list[tuple[str, Any]]:
        """The hooks, with their kinds, that were put on a leaf since the backward began and are still there."""
        # A subclass of tensors has one told twice.
        put = dict.fromkeys([(kind, number) for kind, number, _ in self._put.get(id(leaf), ())])
        there = [(kind, _hooks_of(leaf, kind).get(number)) for kind, number in put]
        return [(kind, hook) for kind, hook in there if hook is not None]

    def _stop(self) -> None:
        """Note no more."""
        self._thread, self.is_changed = None, True

    def _nodes(self) -> frozenset[Any]:
        if self._known is None:
            self._known = frozenset(read_node_graph(self._call.roots, self._call.inputs).nodes)
        return self._known


LATE = LateHooks()
LATE_HOOKS = "Python that it calls puts hooks on tensors or takes them off, which is to take effect at once"
"""Why a backward is left to PyTorch's engine."""


def _too_late(hook: Any, what: str) -> LateHook:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return LateHook(
        f"hook {name} was {what} while a captured backward runs that computes its gradient without asking; set the "
        "gradients to None (optimizer.zero_grad()) and repeat the step, which PyTorch's engine runs from now on"
    )


def _hooks_of(leaf: torch.Tensor, kind: str) -> Mapping[int, Any]:
    hooks = leaf._backward_hooks if kind == TENSOR_HOOK else leaf._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


@contextmanager
def hooks_watched() -> Iterator[None]:
    """Tell ``LATE`` of hooks that are put on and taken off while this is open."""
    kind: Any = torch.Tensor
    put_on, put_behind, remove = kind.register_hook, kind.register_post_accumulate_grad_hook, RemovableHandle.remove

    @wraps(put_on)
    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        handle = put_on(self, hook)
        LATE.put_on(handle, self, hook, TENSOR_HOOK)
        return handle

    @wraps(put_behind)
    def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Any) -> Any:
        handle = put_behind(self, hook)
        LATE.put_on(handle, self, hook, POST_ACCUMULATE_HOOK)
        return handle

    @wraps(remove)
    def remove_told(self: RemovableHandle) -> None:
        LATE.take_off(self)
        remove(self)

    kind.register_hook, kind.register_post_accumulate_grad_hook = register_hook, register_post_accumulate_grad_hook
    RemovableHandle.remove = remove_told  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.register_hook, kind.register_post_accumulate_grad_hook = put_on, put_behind
        RemovableHandle.remove = remove  # type: ignore[method-assign]
