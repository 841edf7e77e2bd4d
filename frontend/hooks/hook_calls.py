# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of hooks as ops of a backward, which runs them in torch: of the backward hooks of a call of a module, and of a
hook of a tensor.

They are called at each step, in the order in which eager calls them: each op takes a token from the one before. Hooks
get tensors of their own, which they may keep.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor

from retrograd.frontend.layers.own_ops import define_op
from retrograd.frontend.python.python_functions import plain_function

# A gradient in each place of a module's arguments or results that has one, and else None.
Gradients = tuple[Any, ...]
_Given = dict[int, Gradients | None]

# What hooks gave in a step that is run several times to be compared, by the number of their call.
_GIVEN: ContextVar[_Given | None] = ContextVar("given by hooks", default=None)
_ARE_LEFT_OUT: ContextVar[bool] = ContextVar("whether hooks are left out", default=False)
_NUMBERS = itertools.count()
HOOK_CALLS = "retrograd_hook_calls"
"""Among the metadata of a graph: the calls of hooks that it makes."""


@dataclass(frozen=True)
class ModuleHooks:
    """The hooks of one call of a module: those of its tables ``_backward_pre_hooks`` and ``_backward_hooks`` with these
    keys. ``inputs`` and ``outputs`` say which of its arguments and results have gradients."""

    module: weakref.ref[torch.nn.Module]
    pre_keys: tuple[int, ...]
    keys: tuple[int, ...]
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]

    def run(self, returned: Sequence[Tensor], seen: Sequence[Tensor]) -> Gradients | None:
        """Call the hooks; gives what they make of ``returned``, or ``None`` where they leave it as it is.

        Hooks of a module of which an argument requires grad take the gradients of its arguments, ``returned``, and of
        its results, ``seen``. Pre-hooks, and hooks of other modules, take those of its results, ``returned``.

        Raises:
            RuntimeError: a hook gives another number of gradients than it is to, as in eager.
        """
        module = self.module()
        if module is None:
            return None
        if seen:
            inputs, outputs = placed(returned, self.inputs), placed(seen, self.outputs)
            changed = _call(module, module._backward_hooks, self.keys, inputs, (outputs,))
            return None if changed is None else _taken(changed, self.inputs)
        outputs = placed(returned, self.outputs)
        changed = _call(module, module._backward_pre_hooks, self.pre_keys, outputs, ())
        absent = (None,) * len(self.inputs)
        found = _call(module, module._backward_hooks, self.keys, absent, (changed or outputs,))
        if found is not None and any(gradient is not None for gradient in found):
            raise RuntimeError(
                "Backward hook for Modules where no input requires gradient should always return None or None for all "
                "gradients."
            )
        return None if changed is None else _taken(changed, self.outputs)


@dataclass(frozen=True)
class TensorHook:
    """A hook of a tensor that a model computes."""

    hook: Callable[..., Any]

    def run(self, returned: Sequence[Tensor], seen: Sequence[Tensor]) -> Gradients | None:
        """Call the hook; gives what it makes of the gradient, or ``None`` where it leaves it as it is."""
        found = self.hook(*returned)
        return None if found is None else (found,)


HookCall = ModuleHooks | TensorHook
# Who has a graph has its calls too: a hook may hold the model.
_CALLS: weakref.WeakValueDictionary[int, HookCall] = weakref.WeakValueDictionary()


def _call(
    module: torch.nn.Module,
    table: Mapping[int, Callable[..., Any]],
    keys: Sequence[int],
    gradients: Gradients,
    others: tuple[Gradients, ...],
) -> Gradients | None:
    """Call hooks of a module one after the other, each with what the one before gave."""
    changed: Gradients | None = None
    for key in keys:
        hook = table.get(key)
        # One that another hook took off is not called, as in eager.
        found = None if hook is None else hook(module, gradients, *others)
        if found is None:
            continue
        if len(found) != len(gradients):
            kind, which = ("hook", "grad_input") if others else ("pre hook", "grad_output")
            raise RuntimeError(
                f"Backward {kind} returned an invalid number of {which}, got {len(found)}, but expected "
                f"{len(gradients)}"
            )
        gradients = changed = tuple(found)
    return changed


def placed(tensors: Sequence[Tensor], present: Sequence[bool]) -> Gradients:
    """Put tensors into the places that are ``present``, and ``None`` into the others."""
    remaining = iter(tensors)
    return tuple(next(remaining) if is_there else None for is_there in present)


def _taken(gradients: Gradients, present: Sequence[bool]) -> Gradients:
    return tuple(itertools.compress(gradients, present))


# -- As an op ---------------------------------------------------------------------------------------------------------


def _run(returned: Sequence[Tensor], seen: Sequence[Tensor], token: Tensor | None, number: int) -> list[Tensor]:
    known = _GIVEN.get()
    if _ARE_LEFT_OUT.get():
        found = None
    elif known is not None and number in known:
        found = known[number]
    else:
        # Arguments lie in memory that what runs later may be given.
        own, others = ([t.clone() for t in tensors] for tensors in (returned, seen))
        call = _CALLS.get(number)
        found = None if call is None else call.run(own, others)
        if found is None and any(t._version for t in own):
            found = tuple(own)
        if known is not None:
            known[number] = found if found is None else tuple(g if g is None else g.detach().clone() for g in found)
    end = torch.empty(0, dtype=torch.int8, device=returned[0].device)
    if found is None:
        return [end, *(t.clone() for t in returned)]
    return [end, *map(_fitting, found, returned)]


def _fitting(gradient: Tensor | None, given: Tensor) -> Tensor:
    """Lay out what a hook gives in the place of a gradient, in memory of its own.

    Raises:
        RuntimeError: it is of another shape.
    """
    if gradient is None:
        return torch.zeros_like(given)
    if gradient.shape != given.shape:
        raise RuntimeError(
            f"a hook returned a gradient of shape {tuple(gradient.shape)} in the place of one of "
            f"shape {tuple(given.shape)}"
        )
    return torch.empty_like(given).copy_(gradient.detach())


def _fake(returned: Sequence[Tensor], seen: Sequence[Tensor], token: Tensor | None, number: int) -> list[Tensor]:
    return [
        torch.empty(0, dtype=torch.int8, device=returned[0].device),
        *(torch.empty_like(t, memory_format=torch.contiguous_format) for t in returned),
    ]


CALL_HOOKS = define_op(
    "call_hooks(Tensor[] returned, Tensor[] seen, Tensor? token, int number) -> Tensor[]",
    _run,
    _fake,
    # It is not run twice, nor worked out while compiling.
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""Makes call ``number`` of hooks; gives a token, and what they make of ``returned``. ``token`` is the last call's."""


@contextlib.contextmanager
def hooks_called_once() -> Iterator[None]:
    """While this is open in this thread, each call of hooks is made the first time that it is come to; from then on it
    gives what it gave."""
    reset = _GIVEN.set({})
    try:
        yield
    finally:
        _GIVEN.reset(reset)


@contextlib.contextmanager
def hooks_left_out() -> Iterator[None]:
    """While this is open, no hooks are called in this thread, and gradients stay as they are."""
    reset = _ARE_LEFT_OUT.set(True)
    try:
        yield
    finally:
        _ARE_LEFT_OUT.reset(reset)


def calls_hooks(graph: torch.fx.Graph) -> bool:
    """Whether a graph calls hooks."""
    return bool(graph.find_nodes(op="call_function", target=CALL_HOOKS))


def refusing_writes(
    call: Callable[[list[Any]], list[Any]], graph: torch.fx.Graph, inputs: Collection[str]
) -> Callable[[list[Any]], list[Any]]:
    """``call``, of a backward's graph, that tells hooks that write to what the backward reads of the program's
    ``inputs``, by name: parameters, buffers and arguments. Eager refuses those too.

    Raises:
        RuntimeError: a hook does.
    """
    places = [i for i, n in enumerate(graph.find_nodes(op="placeholder")) if n.name in inputs and n.users]

    def run(tensors: list[Any]) -> list[Any]:
        read = [t for place in places if isinstance(t := tensors[place], Tensor) and not t.is_inference()]
        before = [t._version for t in read]
        results = call(tensors)
        if written := [t for t, version in zip(read, before, strict=True) if t._version != version]:
            raise RuntimeError(
                f"a hook wrote to a tensor of shape {tuple(written[0].shape)} that the backward reads, a parameter, a "
                "buffer or an argument, while it ran: no gradients are given. Write to it after the backward"
            )
        return results

    return run


def hook_calls(nodes: Iterable[torch.fx.Node]) -> list[HookCall]:
    """The calls of hooks that ops make, for who keeps the ops to keep them."""
    numbers = [node.args[3] for node in nodes if node.target is CALL_HOOKS]
    return [call for number in numbers if (call := _CALLS.get(cast(int, number))) is not None]


class HookCalls:
    """The calls of hooks that a trace has, and the token of the last one in the backward that is being traced."""

    def __init__(self) -> None:
        self.token: Tensor | None = None
        self._calls: list[HookCall] = []

    def begin(self) -> None:
        """A forward begins, or goes on: no backward has been traced."""
        self.token = None

    def has_any(self) -> bool:
        """Whether a call was put into the trace."""
        return bool(self._calls)

    def codes(self) -> set[CodeType]:
        """The code of the hooks that tensors have."""
        functions = [plain_function(call.hook) for call in self._calls if isinstance(call, TensorHook)]
        return {function.__code__ for function in functions if function is not None}

    def record(self, call: HookCall, returned: Sequence[Tensor], seen: Sequence[Tensor]) -> list[Tensor]:
        """Put a call into the trace; what it makes of ``returned``."""
        number = next(_NUMBERS)
        _CALLS[number] = call
        self._calls.append(call)
        self.token, *changed = CALL_HOOKS(returned, seen, self.token, number)
        return changed
