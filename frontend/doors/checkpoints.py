# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``torch.utils.checkpoint`` in a graph that is traced ahead of time, and what the user marks to be saved.

Checkpointing in eager saves nothing and runs the block again in the backward. A trace has the block once, with a tag on
each of its nodes: which of them are recomputed is up to the partition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from retrograd.contract.attributes import Tag
from retrograd.frontend.python.source_locations import CaptureError, place_of_caller

# The key of a mark among the annotations of a node.
MARK = "retrograd.save"
_TAGS = {
    CheckpointPolicy.MUST_SAVE: Tag.NEVER,
    CheckpointPolicy.PREFER_SAVE: Tag.AVOID,
    CheckpointPolicy.PREFER_RECOMPUTE: Tag.PREFER,
    CheckpointPolicy.MUST_RECOMPUTE: Tag.MUST,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: Tag.AVOID,
}


def save(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """``tensor`` itself, marked to be saved for the backward where that needs it, under ``name`` for policies.

    The identity in eager, and for gradients: a view of the tensor, of the same shape and strides. In a compiled model
    it is kept rather than recomputed, whatever the partition, also inside a checkpointed block.

    Raises:
        TypeError: no tensor, or a name that is no string.
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(name, str | None):
        raise TypeError(f"retrograd.save takes a tensor and a name, got {type(tensor).__name__}, {type(name).__name__}")
    with fx_traceback.annotate({MARK: name or ""}):
        return tensor.view_as(tensor)


def find_tag(node: torch.fx.Node) -> tuple[Tag | None, int | None, str]:
    """Read what the user asked of a node of a traced graph: the tag, the number of its checkpointed block, its name.

    Raises:
        CaptureError: a policy that cannot be followed; names the line.
    """
    if node.meta.get("partitioner_tag") == "is_backward":
        return None, None, ""
    mark = (node.meta.get("custom") or {}).get(MARK)
    policy = node.meta.get("recompute")
    if mark is not None:
        return Tag.NEVER, node.meta.get("ac_graph_id"), mark
    if policy is None:
        return None, None, ""
    if policy not in _TAGS:
        line = (node.stack_trace or "an unknown place").strip().splitlines()[0].strip()
        raise CaptureError(
            f"the checkpoint policy {getattr(policy, 'name', policy)} is not supported, at {line}",
            "use MUST_SAVE or PREFER_SAVE",
        )
    return _TAGS[policy], node.meta.get("ac_graph_id"), ""


def is_late_collective(node: torch.fx.Node) -> bool:
    """Whether a node is a collective that was called in the backward, by a custom function say that gathers there what
    it does not keep."""
    late = node.meta.get("partitioner_tag") == "is_backward"
    return late and getattr(node.target, "namespace", "") == "_c10d_functional"


@contextmanager
def tagged_checkpoints(around: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[None]:
    """While this is open and a graph is traced, checkpointed blocks are traced once and tagged, as Dynamo does, each
    within a context that ``around`` gives.

    Source: ``torch._higher_order_ops.wrap.tag_activation_checkpoint_impl``, which does the same to graphs of Dynamo's.
    """
    original = torch_checkpoint._checkpoint_without_reentrant_generator
    numbers = itertools.count()

    def generator(
        function: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[[], Any] = noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        number = next(numbers)
        make = _plain_contexts if context_fn is noop_context_fn else context_fn

        def numbered() -> Any:
            forward, recompute = make()
            forward.ac_graph_id = number
            return forward, recompute

        # What is recomputed is looked up rather than run, which neither state of random generators nor an early stop
        # has a part in. The tags must not stay behind on what is traced next.
        with fx_traceback.preserve_node_meta(), around():
            yield from original(function, False, numbered, determinism_check, False, False, *args, **kwargs)

    with (
        mock.patch.object(torch_checkpoint, "_checkpoint_without_reentrant_generator", generator),
        mock.patch.object(torch_checkpoint, "CheckpointFunction", _Reentrant),
    ):
        yield


class _Reentrant:
    """Takes the place of the autograd function that a reentrant checkpoint is."""

    @staticmethod
    def apply(*_args: Any) -> None:
        raise CaptureError(
            f"a reentrant checkpoint (use_reentrant=True) cannot be traced{place_of_caller()}",
            "call checkpoint(..., use_reentrant=False)",
        )


def _always(policy: CheckpointPolicy, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return policy


_plain_contexts = partial(create_selective_checkpoint_contexts, partial(_always, CheckpointPolicy.PREFER_RECOMPUTE))
