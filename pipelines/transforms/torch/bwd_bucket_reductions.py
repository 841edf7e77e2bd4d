# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-bucket-reductions``: small reductions are joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from retrograd.contract.attributes import BWD_SHAPES, BWD_VALUES
from retrograd.contract.collectives import BUCKET_BYTES, FIRST_BUCKET_BYTES, REDUCTIONS
from retrograd.dialects import builders, ir
from retrograd.pipelines.analysis.hooks.collectives import (
    Bucket,
    find_buckets,
    given_bytes,
    order_joined,
    without_chain,
)
from retrograd.pipelines.analysis.hooks.hook_graph import find_following
from retrograd.pipelines.analysis.layout.tensor_types import parse_tensor_type
from retrograd.pipelines.analysis.partition.read_graph import ShapeReader, value_names
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.collective_notes import add_collective_notes
from retrograd.pipelines.transforms.helpers.hook_reader import ReadHooks, has_collectives, read_hooks
from retrograd.pipelines.transforms.torch.bwd_schedule_hooks import apply_order

_Kind = tuple[str, ...]


class BwdBucketReductions(ModulePass):
    """Joins ``bwd.start_collective`` ops that reduce in the same way, in one group, tensors of one type of element:
    one start takes them as a tuple, at the place of the last. Waits stay one by one.

    Buckets are filled in the order of the function, as ``DistributedDataParallel`` fills its own: the first of a kind
    is small, so that communication begins early. What depends on a reduction that now starts later comes behind it. No
    two that depend on each other are joined, and none across a hook or custom function that communicates by itself.
    """

    description = "Join small reductions across processes into buckets"

    bucket_bytes: int = field(default=BUCKET_BYTES, metadata={"help": "bytes of a bucket at the most; 0 joins none"})
    first_bucket_bytes: int = field(default=FIRST_BUCKET_BYTES, metadata={"help": "the same of the first of a kind"})

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            if has_collectives(func):
                add_collective_notes(module, self._join(func))

    def _join(self, func: ir.Operation) -> list[str]:
        read = read_hooks(func, self.name)
        kinds = {n: kind for n in read.graph.effects if (kind := _kind_of(read, n)) is not None}
        buckets = find_buckets(read.graph, kinds, self.bucket_bytes, self.first_bucket_bytes)
        # By the ops, which keep what they are while others are joined.
        planned = [
            ([start for n in bucket.tasks if (start := read.start_of(n)) is not None], kinds[bucket.tasks[0]])
            for bucket in buckets
        ]
        notes = []
        for starts, kind in planned:
            read = read_hooks(func, self.name)
            bucket = _bucket_of(read, starts)
            # Joined with others, one may have come to depend on another.
            if find_following(without_chain(read.graph), bucket.tasks).isdisjoint(bucket.tasks):
                apply_order(func, read, order_joined(read.graph, bucket))
                _join_starts(func, starts)
                notes.append(f"joined: {len(starts)} times {kind[0]} ({kind[1]}), {bucket.bytes} bytes in one bucket")
        return notes


def _bucket_of(read: ReadHooks, starts: Sequence[ir.Operation]) -> Bucket:
    tasks = tuple(n for n in read.graph.effects if (start := read.start_of(n)) is not None and start in starts)
    return Bucket(tasks, given_bytes(read.graph, tasks))


def _kind_of(read: ReadHooks, task: int) -> _Kind | None:
    """The properties that two starts must share to be joined; None where it is no reduction of one tensor."""
    op = read.start_of(task)
    if op is None or len(read.graph.tasks[task].takes) != 1:
        return None
    what, type_ = builders.read_collective(op), parse_tensor_type(str(op.operands[0].type))
    if what.collective not in REDUCTIONS or type_ is None:
        return None
    return what.collective, what.reduction, what.group, str(what.size), type_.element


def _join_starts(func: ir.Operation, starts: Sequence[ir.Operation]) -> None:
    """Make one of starts that stand beside each other."""
    ordered = [v.operation for v in func.regions[0].blocks[0].operations if v.operation in starts]
    first, last, shapes = ordered[0], ordered[-1], ShapeReader(func)
    names, texts = [value_names(op)[0] for op in ordered], [shapes.text(op.results[0]) for op in ordered]
    with last.location, ir.InsertionPoint(last):
        value = builders.bundle([op.operands[0] for op in ordered])
        type_ = builders.bundle_type([op.results[0].type for op in ordered])
        started, token = builders.start_collective(value, first.operands[1], builders.read_collective(first), type_)
        parts = builders.unbundle(started)
        unpack = parts[0].owner
        unpack.attributes[BWD_VALUES] = ir.ArrayAttr.get([ir.StringAttr.get(name) for name in names])
        if any(texts):
            unpack.attributes[BWD_SHAPES] = ir.ArrayAttr.get([ir.StringAttr.get(text) for text in texts])
    last.results[1].replace_all_uses_with(token)
    for op, part in zip(ordered, parts, strict=True):
        op.results[0].replace_all_uses_with(part)
    for op in reversed(ordered):
        op.erase()
