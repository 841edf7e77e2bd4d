# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Has hooks called by the graph that is traced: backward hooks of each call of a module, and hooks that a model puts on
what it computes, unless these only compute. The graph is traced once, and the hooks are called at each step."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import BackwardHook

from retrograd.frontend.hooks.hook_calls import Gradients, HookCalls, ModuleHooks, TensorHook, placed
from retrograd.frontend.hooks.hook_effects import of_several, only_computes, tensors_behind
from retrograd.frontend.python.source_locations import CaptureError, place_of_caller

_REGISTER: Any = Tensor.register_hook
# What no trace makes.
_REAL = (Tensor, torch.nn.Parameter)


class _TracedHook(BackwardHook):
    """Does for a call of a module what PyTorch does, with hooks that put an op into the trace."""

    # The places of the module's tensors among its arguments; None where none of them requires grad.
    input_tensors_index: Any

    def __init__(
        self, calls: HookCalls, module: torch.nn.Module, pre_keys: tuple[int, ...], keys: tuple[int, ...]
    ) -> None:
        super().__init__(module, [self._take_inputs], [self._take_outputs])
        self._calls, self._pre_keys, self._keys = calls, pre_keys, keys
        calls.begin()

    def _take_outputs(self, module: torch.nn.Module, outputs: Gradients) -> Gradients | None:
        keys = self._keys if self.input_tensors_index is None else ()
        if not (self._pre_keys or keys):
            return None
        return self._record((self._pre_keys, keys), (None,) * self.n_inputs, outputs, in_outputs=True)

    def _take_inputs(self, module: torch.nn.Module, inputs: Gradients, outputs: Gradients) -> Gradients | None:
        if self.input_tensors_index is None or not self._keys:
            return None
        return self._record(((), self._keys), inputs, outputs, in_outputs=False)

    def _record(
        self, keys: tuple[tuple[int, ...], tuple[int, ...]], inputs: Gradients, outputs: Gradients, *, in_outputs: bool
    ) -> Gradients:
        present = [tuple(gradient is not None for gradient in gradients) for gradients in (inputs, outputs)]
        returned, seen = (outputs, ()) if in_outputs else (inputs, outputs)
        given = [gradient for gradient in returned if gradient is not None]
        if not given:
            raise CaptureError(
                f"a {type(self.module).__name__} has a backward hook, and no gradient for it to take",
                "take the hook off, or use retrograd.enable(), under which it is called as in eager",
            )
        call = ModuleHooks(weakref.ref(self.module), *keys, *present)
        changed = self._calls.record(call, given, [g for g in seen if g is not None])
        return placed(changed, present[in_outputs])


class _TensorHooks(TorchFunctionMode):
    """Has hooks that are put on tensors of a trace called by ops, unless they only compute."""

    def __init__(self, calls: HookCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch's, with another hook where it is to put one on a tensor."""
        if func is not _REGISTER:
            return func(*args, **(kwargs or {}))
        tensor, hook = args if len(args) == 2 else (*args, *(kwargs or {}).values())
        return func(tensor, self._replaced(tensor, hook))

    def _replaced(self, tensor: Tensor, hook: Callable[..., Any]) -> Callable[..., Any]:
        if of_several(hook) and not hasattr(hook, "__wrapped__"):
            raise CaptureError(
                f"a hook waits for all of several gradients, by register_multi_grad_hook, which counts nodes of a "
                f"graph that compiled code has none of{place_of_caller()}",
                "put hooks on the tensors one by one, or use retrograd.enable(), under which it is called as in eager",
            )
        if type(tensor) in _REAL or only_computes(hook):
            return hook
        if any(type(other) not in _REAL for other in tensors_behind(hook)):
            raise CaptureError(
                f"a hook of a tensor does more than to compute, and goes by other tensors of the model's"
                f"{place_of_caller()}",
                "mark it with @retrograd.inlineable if it is tensor code alone, or use "
                'torch.compile(model, backend="retrograd") or retrograd.enable(), under which it is called as in eager',
            )
        self._calls.begin()
        call = TensorHook(hook)
        return lambda gradient: self._calls.record(call, [gradient], [])[0]


@contextlib.contextmanager
def hooks_as_ops(model: torch.nn.Module | None, calls: HookCalls) -> Iterator[None]:
    """While this is open, this thread puts ops into a backward that call the backward hooks of modules, and hooks that
    are put on tensors; ``calls`` are to be kept as long as it. Hooks that only compute are part of what is traced, as
    are those that modules of ``model`` get while it is traced."""
    before = {} if model is None else {m: {*m._backward_pre_hooks, *m._backward_hooks} for m in model.modules()}
    thread = threading.get_ident()

    def make(module: torch.nn.Module, hooks: Sequence[Any], pre_hooks: Sequence[Any]) -> BackwardHook:
        pre_keys, keys = tuple(module._backward_pre_hooks), tuple(module._backward_hooks)
        is_own = module in before and not before[module].issuperset((*pre_keys, *keys))
        if threading.get_ident() != thread or is_own or (len(pre_keys), len(keys)) != (len(pre_hooks), len(hooks)):
            return BackwardHook(module, hooks, pre_hooks)
        return _TracedHook(calls, module, pre_keys, keys)

    with mock.patch.object(torch_module, "BackwardHook", make), _TensorHooks(calls):
        yield


def refuse_other_backward_hooks(model: torch.nn.Module | None) -> None:
    """Refuse the backward hooks of modules that PyTorch has deprecated: they would run while tracing only.

    Raises:
        CaptureError: a module has one; names it.
    """
    for path, module in [] if model is None else model.named_modules():
        if module._backward_hooks and not module._is_full_backward_hook:
            where = f"the module {path!r}" if path else "the model"
            raise CaptureError(
                f"{where}, a {type(module).__name__}, has a backward hook of register_backward_hook, which PyTorch has "
                "deprecated",
                "use register_full_backward_hook, which is called at each step",
            )
