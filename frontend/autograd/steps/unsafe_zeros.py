# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where zeros cannot stand for a gradient of None: 0 times infinity is no number, where eager computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.compiled_autograd import Op

from retrograd.contract.hooks import CPP_TENSOR_PRE, CUSTOM_BACKWARD, POST, PRE, TENSOR_PRE, UNPACK
from retrograd.frontend.autograd.engine.python_calls import Frame, accumulate_into
from retrograd.frontend.autograd.steps.recorder import Recorder, opaque_kind

# The calls that may give None where they are given a gradient.
_GIVES_NONE = (CUSTOM_BACKWARD, PRE, POST)
# Those that give None for None, and no other.
_PASSES_ON = (TENSOR_PRE, CPP_TENSOR_PRE)


def find_unsafe_calls(recorder: Recorder, frame: Frame, sizes: Sequence[int]) -> frozenset[str]:
    """The calls of Python, by node, for whose gradients zeros cannot stand: behind them is a node of autograd that
    makes something else of zeros, by what it saved at the step that was recorded."""
    calls = [node for node in recorder.capture.graph.nodes if opaque_kind(node) in _GIVES_NONE]
    if not calls:
        return frozenset()
    interpreter = _OnZeros(recorder)
    inputs = [recorder.freed.get(number, tensor) for number, tensor in enumerate(frame.inputs)]
    try:
        with torch.no_grad():
            interpreter.run(inputs, list(sizes), list(frame.scalars), frame.hooks, frame.packed)
    except Exception:  # noqa: BLE001 (then nothing is known of any)
        return frozenset([call.name for call in calls])
    if not interpreter.unsafe:
        return frozenset()
    return frozenset([call.name for call in calls if _leads_to(call, interpreter.unsafe)])


class _OnZeros(torch.fx.Interpreter):
    """Runs a capture with zeros for all gradients; no Python is called. ``unsafe`` are the nodes that make something
    else of them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.capture)
        self._results: Mapping[str, Any] = recorder.results
        self._given: Mapping[str, Any] = recorder.given
        self.unsafe: set[torch.fx.Node] = set()
        self.extra_traceback = False

    def run_node(self, n: torch.fx.Node) -> Any:
        kind = opaque_kind(n)
        if kind == UNPACK:
            return self._given[n.name]
        if kind is not None:
            return torch.utils._pytree.tree_map(_zeros_like, self._given[n.name])
        if n.target is accumulate_into:
            return None
        if not isinstance(n.target, Op):
            return super().run_node(n)
        (gradients, *rest), kwargs = self.fetch_args_kwargs_from_env(n)
        zeros = torch.utils._pytree.tree_map(_zeros_like, gradients)
        results = n.target(zeros, *rest, **kwargs)
        if any(isinstance(t, torch.Tensor) and bool(t.to_dense().count_nonzero()) for t in results):
            self.unsafe.add(n)
        return torch.utils._pytree.tree_map(_zeros_like, results)


def _zeros_like(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _leads_to(call: torch.fx.Node, unsafe: set[torch.fx.Node]) -> bool:
    """Whether what a call gives comes to one of these nodes, with no other call between that may give it up."""
    pending, seen = list(call.users), set()
    while pending:
        node = pending.pop()
        if node in unsafe:
            return True
        kind = opaque_kind(node)
        if node not in seen and (kind is None or kind in _PASSES_ON):
            seen.add(node)
            pending.extend(node.users)
    return False
