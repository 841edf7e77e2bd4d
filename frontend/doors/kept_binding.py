# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keeps as data how AOTAutograd wraps a compiled forward and backward: another process builds the same differentiable
function of it, without a trace.

PyTorch's own cache does the same (``torch._functorch._aot_autograd.aot_autograd_result``); only the compiled functions
are ours.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.aot_autograd_result import (
    GenericAOTAutogradResult,
    SerializedGraphModule,
    serialize_graph_module,
)

from retrograd.frontend.doors.call_plan import CallPlan, Tensors, boxed
from retrograd.frontend.doors.second_derivatives import SecondDerivatives
from retrograd.frontend.doors.unseen_modes import telling_modes
from retrograd.frontend.layers.random_ops import draw_seed

# What AOTAutograd hands to its own cache, by the names of its parameters there.
_FIELDS = (
    "wrappers",
    "maybe_subclass_meta",
    "fw_metadata",
    "num_fw_outs_saved_for_bw",
    "_indices_of_inps_to_detach",
    "num_symints_saved_for_bw",
)


# In place of arguments that nothing reads.
_STAND_IN = torch.empty(0, device="cpu")
# What is read of a kept backward: that it takes no symbolic sizes, and no state of PyTorch's own kind.
_NO_SYMBOLS: Any = SimpleNamespace(backward_state_indices=[], num_symints_saved_for_bw_=0)


@dataclass(frozen=True)
class KeptBinding:
    """``forward`` and ``backward`` say how the compiled functions are called in the place of the graphs, and whether
    they take a seed; ``wrapped`` is what AOTAutograd knows of arguments and results, pickled, and ``graph`` the
    backward's graph, which is read where PyTorch traces it into a larger one. ``unread`` are the places of arguments
    that nothing reads."""

    forward: tuple[CallPlan, bool]
    backward: tuple[CallPlan, bool]
    wrapped: bytes
    graph: bytes
    unread: frozenset[int]


@dataclass
class BindingRecord:
    """A binding, written down while AOTAutograd makes it: in the end a :class:`KeptBinding`, or none where
    something in it is not data."""

    forward: tuple[CallPlan, bool] | None = None
    backward: tuple[CallPlan, bool] | None = None
    unread: frozenset[int] = frozenset()
    _given: dict[str, Any] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Write down what AOTAutograd makes in the block."""
        original = getattr(graph_compile, "_cache_autograd_info", None)
        if original is None:
            # Another release of PyTorch.
            yield
            return
        names = inspect.signature(original).parameters

        def noted(*args: Any) -> Any:
            given = dict(zip(names, args, strict=True))
            result = original(*args)
            if {*_FIELDS, "aot_config", "bw_module"} <= given.keys():
                self._given = given
            return result

        with mock.patch.object(graph_compile, "_cache_autograd_info", noted):
            yield

    def read(self) -> KeptBinding | None:
        """The binding that was written down; ``None`` where it cannot be kept."""
        given = self._given
        if self.forward is None or self.backward is None or given is None or given["bw_module"] is None:
            return None
        if given["maybe_subclass_meta"] is not None or given["num_symints_saved_for_bw"]:
            return None
        fields = {name: given[name] for name in _FIELDS}
        module = given["bw_module"]
        copied = torch.fx.GraphModule(module, _without_meta(module.graph))
        try:
            wrapped = pickle.dumps((fields, given["aot_config"].to_cacheable()))
            graph = pickle.dumps(serialize_graph_module(copied))
        except (pickle.PicklingError, TypeError, AttributeError):
            return None
        return KeptBinding(self.forward, self.backward, wrapped, graph, self.unread)


def _without_meta(graph: torch.fx.Graph) -> torch.fx.Graph:
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def rebind(
    kept: KeptBinding,
    forward: Callable[[Tensors], Tensors],
    backward: Callable[[Tensors], Tensors],
    device: torch.device,
    name: str,
) -> Callable[[Tensors], Tensors]:
    """The differentiable function that ``kept`` is of, over compiled functions on ``device``; ``name`` is what was
    compiled, to its user."""
    fields, config = pickle.loads(kept.wrapped)
    result: GenericAOTAutogradResult[Any, Any] = GenericAOTAutogradResult(
        compiled_fw=None,
        compiled_bw=_NO_SYMBOLS,
        aot_joint_graph_str=None,
        aot_forward_graph_str=None,
        aot_backward_graph_str=None,
        min_cut_info_str=None,
        runtime_metadata=fields["fw_metadata"],
        dispatch_wrappers=fields["wrappers"],
        maybe_subclass_meta=None,
        num_fw_outs_saved_for_bw=fields["num_fw_outs_saved_for_bw"],
        indices_of_inps_to_detach=fields["_indices_of_inps_to_detach"],
        forward_time_taken_ns=0,
        backward_time_taken_ns=0,
        sanitized_aot_config=config,
        guards_expr=None,
        serialized_bw_module=cast(SerializedGraphModule, _LazyGraph(kept.graph)),
    )

    def caller(plan: CallPlan, has_seed: bool, run: Callable[[Tensors], Tensors]) -> Any:
        more = [lambda _: draw_seed().to(device)] if has_seed else []
        return boxed(plan.caller(run, more))

    calls = caller(*kept.forward, forward), caller(*kept.backward, telling_modes(backward))
    with SecondDerivatives(name).open():
        run = result._apply_runtime_wrappers(*calls, True, config)
    return recording_what_is_needed(run, kept.unread)


@dataclass(frozen=True)
class _LazyGraph:
    """A graph that is read when it is asked for."""

    data: bytes

    def deserialize(self) -> torch.fx.GraphModule:
        read: SerializedGraphModule = pickle.loads(self.data)
        return read.deserialize()


def recording_what_is_needed(
    run: Callable[[list[torch.Tensor]], Tensors], unread: Collection[int]
) -> Callable[[Tensors], Tensors]:
    """``run``, a function of AOTAutograd's, which records its calls in any mode, called so that autograd records
    nothing where gradients are off, and of the arguments at the places ``unread`` nothing in any case."""

    def call(tensors: Tensors) -> Tensors:
        if torch.is_grad_enabled():
            given = [*tensors]
            for place in unread:
                given[place] = _STAND_IN
            return run(given)
        detached = [t.detach() if t.requires_grad else t for t in tensors]
        known = {id(d): t for d, t in zip(detached, tensors, strict=True)}
        return [known.get(id(output), output) for output in run(detached)]

    return call
