# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Capture of a model's joint forward and backward graph, ahead of time.

AOTAutograd's joint export does the tracing; this file gives it flat tensors, keeps the user's source lines, and turns what can go
wrong into errors that name them. After ``torch._functorch.aot_autograd.aot_export_joint_with_descriptors``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import GradAOTOutput
from torch._functorch.aot_autograd import JointWithDescriptors, aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from retrograd.frontend.decompositions import decomposition_table
from retrograd.frontend.outputs import output_specs
from retrograd.frontend.signature import InputSpec, Signature, StateSpec, TensorType
from retrograd.frontend.source import CaptureError, SourceTracker, capture_error

__all__ = ["CaptureError", "CapturedGraph", "capture_joint"]


@dataclass(frozen=True)
class CapturedGraph:
    """A joint graph: ``graph_module`` holds aten ops with ``val`` and ``desc`` metadata, ``signature`` what they mean to the user.

    ``module`` is the flat module that was traced; its parameters and buffers, in the order of ``signature``, then the tensor
    inputs, are the graph's primals. ``joint`` is AOTAutograd's own record, which its runtime wrappers are built from.
    """

    graph_module: torch.fx.GraphModule
    joint: JointWithDescriptors
    signature: Signature
    module: torch.nn.Module
    num_forward_outputs: int


class FlatModule(torch.nn.Module):
    """The user's model as a function of its tensor leaves: constants are closed over, outputs flattened to tensors."""

    def __init__(self, model: Callable[..., Any], in_spec: pytree.TreeSpec, leaves: Sequence[Any]) -> None:
        super().__init__()
        owner = getattr(model, "__self__", None)
        # A bound method (`model.loss`) differentiates the module it is bound to.
        self.model = (
            model if isinstance(model, torch.nn.Module) else owner if isinstance(owner, torch.nn.Module) else None
        )
        # Around Module.__setattr__, which would register the model a second time under this name.
        self.__dict__["_call"] = model
        self._in_spec = in_spec
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.tracing = False
        self.out_spec: pytree.TreeSpec | None = None
        self.out_leaves: list[Any] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if is_tensor else leaf for leaf, is_tensor in zip(self._leaves, self._is_tensor)]
        args, kwargs = pytree.tree_unflatten(leaves, self._in_spec)
        with SourceTracker() if self.tracing else contextlib.nullcontext():
            result = self._call(*args, **kwargs)
        out_leaves, self.out_spec = pytree.tree_flatten(result)
        # Kept for the constants among them only: a tensor of the trace must not outlive it.
        self.out_leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves]
        return tuple(leaf for leaf in out_leaves if isinstance(leaf, torch.Tensor))


_TENSOR = object()


def capture_joint(
    stack: contextlib.ExitStack,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> CapturedGraph:
    """Trace ``model(*args, **kwargs)`` and its backward to one graph of aten ops, without running either.

    ``stack`` must stay open for as long as the result is compiled further (AOTAutograd keeps its fake tensors there).

    Raises:
        CaptureError: the model cannot be traced; names the line of the user's code and the remedy.
    """
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    flat = FlatModule(model, in_spec, leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    _check_differentiable(flat, tensors)
    inputs = _input_specs(args, dict(kwargs or {}))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None)
    stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
    flat.tracing = True
    try:
        with fx_traceback.preserve_node_meta(), portable_ops():
            joint = aot_export_joint_with_descriptors(stack, flat, tensors, decompositions=decomposition_table())
    except CaptureError:
        raise
    except Exception as error:
        raise capture_error(error) from error
    finally:
        flat.tracing = False
    graph_module = joint.graph_module
    _check_gradients(graph_module)
    check_random(graph_module)
    metadata = joint._aot_state.fw_metadata
    if flat.out_spec is None:
        raise AssertionError("the tracer did not call the model")
    signature = Signature(
        params=_state_specs(joint.params_spec, dict(flat.named_parameters(remove_duplicate=False))),
        buffers=_state_specs(joint.buffers_spec, dict(flat.named_buffers(remove_duplicate=False))),
        inputs=inputs,
        outputs=output_specs(
            graph_module, metadata, [leaf is _TENSOR for leaf in flat.out_leaves], flat.out_leaves, flat.out_spec
        ),
        in_spec=in_spec,
        out_spec=flat.out_spec,
        mutated=tuple(i for i, info in enumerate(metadata.input_info) if info.mutates_data),
    )
    return CapturedGraph(graph_module, joint, signature, flat, metadata.num_forward)


@contextlib.contextmanager
def portable_ops() -> Iterator[None]:
    """While this is open, layers are traced as ops of their own mathematics and not as calls of a CPU library (oneDNN's LSTM)."""
    # torch.backends.mkldnn.flags() would set the TF32 mode as well, which warns.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def state_name(qualified: str) -> str:
    """The name the user knows a parameter by: the flat module adds one level, which this takes off."""
    return qualified.removeprefix("model.")


def _state_specs(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> tuple[StateSpec, ...]:
    return tuple(StateSpec(state_name(name), TensorType.of(tensors[name])) for name in names)


def _input_specs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[InputSpec, ...]:
    keyed, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    specs = []
    for path, leaf in keyed:
        head, rest = ("args" if path[0].idx == 0 else "kwargs"), path[1:]  # type: ignore[attr-defined]
        name = head + pytree.keystr(rest)
        specs.append(
            InputSpec(name, TensorType.of(leaf)) if isinstance(leaf, torch.Tensor) else InputSpec(name, None, leaf)
        )
    return tuple(specs)


def _check_differentiable(flat: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    if not any(t.requires_grad for t in (*flat.parameters(), *tensors)):
        raise CaptureError(
            "nothing to differentiate: no parameter and no argument requires grad",
            "call requires_grad_() on a parameter or an argument, or use the model without compile_backward",
        )


def _check_gradients(graph_module: torch.fx.GraphModule) -> None:
    (output,) = graph_module.graph.find_nodes(op="output")
    if not any(isinstance(desc, GradAOTOutput) for desc in output.meta["desc"]):
        raise CaptureError(
            "nothing to differentiate: no output depends on what requires grad, other than as a view of an argument",
            "return what is computed from a parameter or an argument that requires grad, not detached",
        )


def check_random(graph_module: torch.fx.GraphModule) -> None:
    """Raise :class:`CaptureError` where a graph holds a random op: a second run in the backward would draw other values."""
    for node in graph_module.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            where = (node.stack_trace or "unknown location").strip().splitlines()
            raise CaptureError(
                f"the random op {node.target} is not supported, at {where[0].strip()}",
                "set its probability to 0 or call model.eval() before compiling",
            )
