# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of memory that a step takes in eager, found without memory: the step runs on tensors without contents.

PyTorch's own autograd runs the model forward and backward on fake tensors, so that what it saves, what Python holds and
when each is freed are eager's own. Only what a kernel works in by itself is not seen.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from retrograd.frontend.doors.flat_module import FlatModule
from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.hooks.hook_calls import HookCalls
from retrograd.frontend.hooks.traced_hooks import hooks_as_ops
from retrograd.frontend.python.side_effects import restored

_LOG = logging.getLogger(__name__)

# What a library keeps for its backward, in a form of its own: fake tensors have no bytes of that.
_OPAQUE = ("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops give while this is open, each until nothing refers to it: ``now``, and
    ``peak``, the most that were alive at a time. Storages of ``known`` tensors do not count."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.leave_out(known)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors`` no more."""
        for storage in (t.untyped_storage() for t in tensors):
            self._seen[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op, and count what it gave."""
        results = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        is_opaque = getattr(func, "_schema", None) is not None and func._schema.name in _OPAQUE
        sizes = (
            _real_sizes(func, args, kwargs or {}) if is_opaque else [hint(t.untyped_storage().nbytes()) for t in leaves]
        )
        for leaf, size in zip(leaves, sizes, strict=True):
            self._count(leaf.untyped_storage(), size)
        self.peak = max(self.peak, self.now)
        return results

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        known, key = self._seen.get(id(storage)), id(storage)
        if known is not None and known() is storage:
            return

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if self._seen.get(key) is reference:
                self.now -= size
                del self._seen[key]

        self._seen[key] = weakref.ref(storage, forget)
        self.now += size


def _real_sizes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Bytes of each tensor that an op gives, from a run of it on zeros."""
    # A recurrent layer keeps what its backward needs where gradients are on.
    with _disable_current_modes(), torch.enable_grad():
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: torch.zeros([*t.shape], dtype=t.dtype, device=t.device), (args, kwargs)
        )
        return [t.untyped_storage().nbytes() for t in tree_leaves(func(*args, **kwargs))]


def eager_peak_of_model(flat: FlatModule) -> int | None:
    """The most bytes that one step of a traced model takes in eager beyond parameters, buffers, arguments and tangents:
    forward and backward of all outputs, with results, what autograd saves, and gradients. None where the model looks
    at contents of tensors, which there are none of."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        restored(flat.model),
        hooks_as_ops(flat.model, HookCalls()),
    ):
        fakes = _Fakes(mode)
        state = {name: fakes.like(t) for name, t in (*flat.named_parameters(), *flat.named_buffers())}

        def call(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            outputs: Sequence[torch.Tensor] = torch.func.functional_call(flat, state, tuple(given), tie_weights=False)
            return outputs

        return _peak_of_step(call, [fakes.like(t) for t in flat.examples or ()], [*state.values()])


def eager_peak_of_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> int | None:
    """The peak of :func:`eager_peak_of_model` for a graph of Dynamo's, at the sizes of the trace."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, restored(graph_module):
        fakes = _Fakes(mode)
        given = [fakes.like(i) if isinstance(i, torch.Tensor) else hint(i) for i in inputs]
        state = {n: fakes.like(t) for n, t in (*graph_module.named_parameters(), *graph_module.named_buffers())}

        def call(values: Sequence[Any]) -> Sequence[Any]:
            return tree_leaves(torch.func.functional_call(graph_module, state, tuple(values), tie_weights=False))

        return _peak_of_step(call, given, [*state.values()])


def _peak_of_step(
    call: Callable[[Sequence[Any]], Sequence[Any]], given: Sequence[Any], state: Sequence[torch.Tensor]
) -> int | None:
    live = LiveBytes(t for t in (*given, *state) if isinstance(t, torch.Tensor))
    try:
        with torch.enable_grad():
            with live:
                outputs = [o for o in call(given) if isinstance(o, torch.Tensor) and o.requires_grad]
            # Tangents are the caller's.
            tangents = [torch.empty_like(o) for o in outputs]
            live.leave_out(tangents)
            with live:
                if outputs:
                    torch.autograd.backward(outputs, tangents)
    except Exception as error:  # noqa: BLE001  (of a model that was traced: by answers that nobody gives it here)
        _LOG.info("how much memory eager takes is not known: %s", error)
        return None
    return live.peak


class _Fakes:
    """Makes leaves without contents and hooks, one for each tensor."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one that stands for ``tensor``, at the sizes of the trace."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._make(tensor).requires_grad_(tensor.requires_grad)
        return self._made[id(tensor)]

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return self._mode.from_tensor(tensor.detach())
        sizes, strides = ([hint(n) for n in numbers] for numbers in (tensor.shape, tensor.stride()))
        return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
