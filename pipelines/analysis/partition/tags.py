# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Brings the user's demands to save or recompute to the ops that they are about.

The tags are those of ``torch.utils.checkpoint.CheckpointPolicy``; how they are resolved follows
``torch._functorch.partitioners.cleanup_recompute_tags``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from retrograd.contract.attributes import Tag
from retrograd.contract.errors import RetrogradError
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

# What no plan runs twice.
_ONCE = (OpKind.RANDOM, OpKind.OPAQUE)


class TagError(RetrogradError, ValueError):
    """Tags that contradict each other, or what their op is. ``op`` is its number."""

    def __init__(self, op: int, message: str, remedy: str) -> None:
        super().__init__(f"{message}; {remedy}")
        self.op, self.message, self.remedy = op, message, remedy


def resolve_tags(graph: JointGraph) -> JointGraph:
    """``graph`` with each tag on the op that it is about.

    - A value that crosses from one checkpointed block to a later one is saved: each block starts from its input.
    - To save a view of all of a value is to save the value.
    - A preference for recomputation gives way where the op can run only once.

    Raises:
        TagError: an op must be recomputed that can run only once, or whose result must be saved; or an op of the
            backward is tagged.
    """
    tags = {op.id: op.tag for op in graph.ops if op.tag is not None}
    for number, tag in list(tags.items()):
        op = graph.ops[number]
        if number in graph.tangent_ops:
            message = f"an op of the backward is marked bwd.recompute = {tag.value!r}"
            raise TagError(number, message, "mark ops of the forward: the backward's own are neither kept nor repeated")
        if op.kind in _ONCE and tag is Tag.MUST:
            message = "it must be recomputed, but a second run may give something else"
            raise TagError(number, message, "save its result, or draw random numbers with torch's default generator")
        if op.kind in _ONCE and tag is Tag.PREFER:
            del tags[number]
    for number in [n for n, tag in tags.items() if tag.recomputes and _leaves_block(graph, graph.ops[n], tags)]:
        tags[number] = Tag.NEVER
    for number in [n for n, tag in tags.items() if tag is Tag.NEVER and graph.ops[n].kind is OpKind.VIEW]:
        (result,) = graph.ops[number].results
        root = graph.view_root(result)
        if graph.values[root].bytes != graph.values[result].bytes:
            continue
        del tags[number]
        producer = graph.values[root].producer
        if producer is None:
            continue
        if tags.get(producer) is Tag.MUST:
            message = "it must be recomputed, and its result must be saved"
            raise TagError(producer, message, "take one of the two marks away")
        tags[producer] = Tag.NEVER
    return replace(graph, ops=tuple(replace(op, tag=tags.get(op.id)) for op in graph.ops))


def _leaves_block(graph: JointGraph, op: Op, tags: dict[int, Tag]) -> bool:
    if op.block is None or op.kind is OpKind.CONSTANT:
        return False
    users = (graph.ops[user] for result in op.results for user in _users(graph, result))
    return any(
        (tag := tags.get(user.id)) is not None and tag.recomputes and user.block is not None and user.block > op.block
        for user in users
    )


def _users(graph: JointGraph, value: int) -> Iterator[int]:
    """Ops that take a value, directly, in a list, or as a view taken outside of all blocks."""
    for user in graph.users[value]:
        op = graph.ops[user]
        if op.kind is OpKind.CONSTANT or (op.kind is OpKind.VIEW and op.tag is None):
            for result in op.results:
                yield from _users(graph, result)
        else:
            yield user
