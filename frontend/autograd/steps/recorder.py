# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The first run of a captured backward: eagerly, while what opaque calls give is recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch._dynamo.compiled_autograd import Op, copy_slices_epilogue, copy_slices_prologue
from torch._dynamo.external_utils import (
    FakeCompiledAutogradEngine,
    call_accumulate_grad,
    call_backward,
    call_hook,
)

from retrograd.contract.hooks import CPP_TENSOR_PRE, CUSTOM_BACKWARD, POST, POST_ACCUMULATE, PRE, TENSOR_PRE, UNPACK
from retrograd.frontend.autograd.engine.custom_functions import (
    call_custom_backward,
    finish_slices,
    keep_absent,
    mark_writes,
    prepare_slices,
    sum_gradients,
    unpack_when_asked,
)
from retrograd.frontend.autograd.engine.engine_order import name_of
from retrograd.frontend.autograd.engine.hook_calls import CPP_HOOKS, call_cpp_hooks, call_user_hook
from retrograd.frontend.autograd.engine.python_calls import (
    Frame,
    accumulate_into,
    final_callbacks,
    find_source,
)
from retrograd.frontend.autograd.hooks.hook_identity import HookIdentity
from retrograd.frontend.autograd.hooks.hook_inlining import (
    SETTING_UP,
    InlinedCall,
    find_accumulations,
    watch_hook,
)
from retrograd.frontend.autograd.steps.absent_gradients import describe_presence
from retrograd.frontend.autograd.tracing.compiler import NODE_NUMBER
from retrograd.frontend.hooks.hook_marks import describe_hook, frees_memory, is_communication, is_inlineable

# The kind of each hook in the graph, by what compiled autograd calls it.
HOOK_KINDS = {
    "tensor_pre_hook": TENSOR_PRE,
    "pre_hook": PRE,
    "post_hook": POST,
    "post_acc_grad_hook": POST_ACCUMULATE,
    "unpack_hook": UNPACK,
}
_REPLACED = {
    call_backward: call_custom_backward,
    torch.add: sum_gradients,
    copy_slices_prologue: prepare_slices,
    copy_slices_epilogue: finish_slices,
    call_hook: call_user_hook,
    call_accumulate_grad: accumulate_into,
    CPP_HOOKS: call_cpp_hooks,
    FakeCompiledAutogradEngine._exec_final_callbacks_stub: final_callbacks,
}


def make_runnable(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Put eager's own behaviour in the place of compiled autograd's helpers; the graph then runs as eager does."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in _REPLACED:
            node.target = _REPLACED[node.target]
        if node.target is accumulate_into and len(node.args) == 3:
            # Before torch 2.13, what the gradient was at capture is no argument.
            variable, gradient, has_post_hooks = node.args
            node.args = (variable, None, gradient, has_post_hooks)
    unpack_when_asked(graph_module.graph, _is_unpacking)
    keep_absent(graph_module.graph)
    mark_writes(graph_module.graph)
    give_before_hooks(graph_module.graph)
    graph_module.recompile()
    return graph_module


def give_before_hooks(graph: torch.fx.Graph) -> None:
    """Have a backward give the gradient of a tensor whose node runs as it is before the hooks of the tensor, as the
    engine gives it; PyTorch's capture gives what the hooks make of it. Where the node does not run, both do."""
    output = graph.output_node()
    (results,) = output.args
    assert isinstance(results, (list, tuple))
    found = []
    for result in results:
        if isinstance(result, torch.fx.Node) and set(result.users) != {output}:
            while isinstance(result, torch.fx.Node) and _is_tensor_hook(result):
                result = result.args[1]
        found.append(result)
    output.args = (found,)


def _is_tensor_hook(node: torch.fx.Node) -> bool:
    is_hook = node.target is call_user_hook and node.kwargs["hook_type"] == "tensor_pre_hook"
    return is_hook or node.target is call_cpp_hooks


def _is_unpacking(node: torch.fx.Node) -> bool:
    return node.target is call_user_hook and node.kwargs["hook_type"] == "unpack_hook"


def opaque_kind(node: torch.fx.Node) -> str | None:
    """The kind of Python call that a node is; None where it can be traced."""
    if node.op != "call_function":
        return None
    if node.target is call_user_hook:
        return HOOK_KINDS[str(node.kwargs["hook_type"])]
    if node.target is call_cpp_hooks:
        return CPP_TENSOR_PRE
    return CUSTOM_BACKWARD if node.target is call_custom_backward or is_cpp_function(node) else None


def is_cpp_function(node: torch.fx.Node) -> bool:
    """Whether a node calls the backward of a custom function in C++. PyTorch wraps those that it is not told to be
    traceable; the last argument names the function."""
    if isinstance(node.target, Op):
        return node.target.is_custom_function
    return getattr(node.target, "__name__", "") == "run_non_traceable_cpp_in_eager"


class Recorder(torch.fx.Interpreter):
    """Runs a captured backward on real tensors, as it would have run in eager mode.

    ``results`` has, for each opaque call by its node, what it gave: tensors as meta tensors of their strides. ``given``
    has copies of the tensors themselves, ``gradients`` those that were accumulated, by the number of the input, and
    ``outputs`` what the backward gave, ``present`` which values each node gave at all. ``written`` are the inputs that
    the run wrote to, by number, ``freed`` copies of those whose memory hooks gave back, ``may_free`` those whose memory
    they may give back at another step. ``inlined``
    are the hooks that are to be part of the graph, by node, ``watched`` those that may be, ``notes`` why others that
    should be are not (``setting_up``: one that may be next time); ``communication`` are the hooks and custom functions
    that start communication, by node, ``freeing`` those of the ones that may give back the memory of parameters.

    What fails here and not in PyTorch's own node, which ``find_node`` gives by its number, that node computes, so that
    the step is done, and no hook is called twice; ``failure`` then says what failed.
    """

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        identity: HookIdentity,
        find_node: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(graph_module)
        self.capture = graph_module
        self._find_node = find_node
        self.failure: str | None = None
        self._identity = identity
        self.inlined: dict[str, InlinedCall] = {}
        self.watched: dict[str, InlinedCall] = {}
        self.notes: list[str] = []
        self.setting_up = False
        self.communication: dict[str, Any] = {}
        self.freeing: set[str] = set()
        self.results: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.gradients: dict[int, list[torch.Tensor]] = {}
        # The calls, by node, for whose gradients zeros cannot stand where they are None: see ``unsafe_zeros.py``.
        self.unsafe: frozenset[str] = frozenset()
        # As they were accumulated, before hooks that are part of the graph took them.
        self._accumulated: dict[int, list[torch.Tensor]] = {}
        # The hooks that were watched, by node.
        self.hooks: dict[str, Any] = {}
        self.outputs: list[Any] = []
        self.present: dict[str, Any] = {}
        self.written: set[int] = set()
        # The inputs whose gradients were added to what was there.
        self._sums: set[int | None] = set()
        # Copies of inputs as they were computed with, by number, while hooks may give their memory back, as FSDP's do.
        self.freed: dict[int, torch.Tensor] = {}
        self.may_free: frozenset[int] = frozenset()
        # Errors of the user's hooks are theirs as they are.
        self.extra_traceback = False

    def record(self, frame: Frame, sizes: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """Run on the arguments that compiled autograd gave; returns the results."""
        inputs, self._frame = frame.inputs, frame
        before = [t._version for t in inputs]
        self.may_free = find_borrowed(inputs) if any(is_communication(hook) for hook in frame.hooks) else frozenset()
        results: list[Any] = list(self.run(list(inputs), list(sizes), list(scalars), frame.hooks, frame.packed))
        self.written = {i for i, (t, version) in enumerate(zip(inputs, before, strict=True)) if t._version != version}
        self.freed = {number: copied for number, copied in self.freed.items() if is_freed(inputs[number])}
        self.watched, self._accumulated = dict(self.inlined), self.gradients
        self._settle_accumulations()
        self.outputs = [self._keep(result) for result in results]
        return results

    def with_calls(self, called: Mapping[str, str]) -> Recorder:
        """The same run, with the hooks of these nodes called in Python, for reasons that are told."""
        if called.keys().isdisjoint(self.inlined):
            return self
        other = copy.copy(self)
        other.inlined = {name: call for name, call in self.inlined.items() if name not in called}
        other._settle_accumulations()
        lost = [name for name in self.inlined if name not in other.inlined]
        why = [called.get(name, "one that is called with it is") for name in lost]
        told = [f"hook {describe_hook(self.hooks[n])} is called in Python: {w}" for n, w in zip(lost, why, strict=True)]
        other.notes = [*self.notes, *told]
        return other

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is accumulate_into:
            return self._accumulate(n)
        if self.may_free and opaque_kind(n) is None and n.op == "call_function":
            self._keep_inputs(n)
        result = self._call_hook(n) if n.target is call_user_hook else self._compute(n)
        if n.op == "call_function":
            self.present[n.name] = describe_presence(result)
        if opaque_kind(n) is not None:
            self.results[n.name] = torch.utils._pytree.tree_map(_describe, result)
            self.given[n.name] = torch.utils._pytree.tree_map(_copy, result)
        return result

    def _look_at(self, node: torch.fx.Node, call: Any) -> None:
        """Note what is known of a hook, or of a custom function's context."""
        if is_communication(call):
            self.communication[node.name] = call
        if frees_memory(call):
            self.freeing.add(node.name)

    def _compute(self, node: torch.fx.Node) -> Any:
        if node.target is call_custom_backward:
            self._look_at(node, self.env[node.args[0]] if isinstance(node.args[0], torch.fx.Node) else None)
        try:
            return super().run_node(node)
        except Exception as error:
            if not isinstance(node.target, Op) or node.target.is_custom_function or self._find_node is None:
                raise
            original = self._find_node(node.meta[NODE_NUMBER]) if NODE_NUMBER in node.meta else None
            if original is None or name_of(original).rpartition("::")[2] != node.target.__name__:
                raise
            (gradients, *_), _ = self.fetch_args_kwargs_from_env(node)
            given = original(*gradients)
            self.failure = f"{node.target.__name__}, as PyTorch captured it, raised {type(error).__name__}: {error}"
            return list(given) if isinstance(given, tuple) else [given]

    def _keep_inputs(self, node: torch.fx.Node) -> None:
        """Copy the inputs that a node computes with, when the first one does: a rehearsal needs them."""
        for argument in node.all_input_nodes:
            place, number = find_source(argument)
            if place == "inputs" and number in self.may_free and number not in self.freed:
                self.freed[number] = _copy(self._frame.inputs[number])

    def _accumulate(self, node: torch.fx.Node) -> Any:
        (variable, before, gradient, *has_post_hooks), _ = self.fetch_args_kwargs_from_env(node)
        place = node.args[0]
        if variable.grad is not None:
            self._sums.add(find_source(place)[1])
        if gradient is None:
            return variable.grad
        if isinstance(place, torch.fx.Node) and isinstance(place.args[-1], int):
            self.gradients.setdefault(place.args[-1], []).append(self._keep(gradient))
        # Here, in the graph's environment, and as the argument of the question.
        owned = getrefcount(gradient) <= 3 and gradient._use_count() == 1 and not self._is_needed(node)
        return accumulate_into(variable, before, gradient, *has_post_hooks, owned=owned)

    def _keep(self, value: Any) -> Any:
        """Keeps a gradient as it is now; no copy where no Python runs that could write to it before the rehearsal is
        over."""
        return _copy(value) if self._frame.hooks or not isinstance(value, torch.Tensor) else value.detach()

    @staticmethod
    def _is_needed(node: torch.fx.Node) -> bool:
        """Whether what a node accumulates has other uses than post hooks of its own, which give nothing."""
        gradient = node.args[2]
        assert isinstance(gradient, torch.fx.Node)
        return any(user is not node and user > node and not _is_last_look(user) for user in gradient.users)

    def _settle_accumulations(self) -> None:
        """Inline all post-accumulate hooks of an accumulation or none: the gradient is theirs alone, or everyone's."""
        self.gradients = {number: [*given] for number, given in self._accumulated.items()}
        for hooks in find_accumulations(self.capture).values():
            calls = [self.inlined.get(hook) for hook in hooks]
            if None in calls:
                for hook in hooks:
                    self.inlined.pop(hook, None)
                continue
            for call in calls:
                if call is not None and call.param is not None:
                    left = [call.tape.tensors[number] for number in call.tape.results]
                    self.gradients[call.param][-1:] = [_copy(gradient) for gradient in left]

    def _call_hook(self, node: torch.fx.Node) -> Any:
        (hook, *args), kwargs = self.fetch_args_kwargs_from_env(node)
        self._look_at(node, hook)
        call = partial(call_user_hook, hook, *args, **kwargs)
        if not is_inlineable(hook):
            return call()
        result, watched = watch_hook(node, self.env, self._frame, call, self._identity)
        if isinstance(watched, InlinedCall) and watched.param in self._sums:
            watched = "its parameter has a gradient already"
        if isinstance(watched, InlinedCall):
            self.inlined[node.name] = watched
            self.hooks[node.name] = hook
        else:
            self.setting_up = self.setting_up or watched is SETTING_UP
            self.notes.append(f"hook {describe_hook(hook)} is called in Python: {watched}")
        return result


def _is_last_look(node: torch.fx.Node) -> bool:
    is_post_hook = node.target is call_user_hook and node.kwargs["hook_type"] == "post_hook"
    return is_post_hook and not node.args[1]


def find_borrowed(inputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """The inputs whose memory may be there for a while only: parameters, and what has none yet."""
    bases = [t if t._base is None else t._base for t in inputs]
    is_parameter = [base.is_leaf and base.requires_grad for base in bases]
    return frozenset([n for n, t in enumerate(inputs) if is_freed(t) or is_parameter[n]])


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory for its elements any more."""
    return tensor.numel() > 0 and not tensor.untyped_storage().size()


@dataclass(frozen=True)
class OtherLayout:
    """Stands for a tensor that no graph takes."""

    layout: torch.layout

    def __str__(self) -> str:
        return f"tensor of layout {self.layout}"


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided:
        # Not the tensor itself, which a gradient's accumulation then could not hand over.
        return OtherLayout(leaf.layout)
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
