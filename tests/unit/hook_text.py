# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards with effects from a few lines of text, and random ones, for tests of hook scheduling.

y = x            compute: takes x, gives y; names that no line gives are arguments
h = pre 3: y     an effect: kind, number, values; `!` after the number marks communication, `*` large values; of an
                 accumulation `~` half of the bytes that are sent together; `@2` that a hook fills bucket 2
s = start 8: y   a collective, which gives eight bytes
r = wait: s      what it gives, when it is there
acc 0: y         one that gives nothing, an accumulation into parameter 0
return y h
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from retrograd.pipelines.analysis.hooks.hook_graph import COLLECTIVE, WAIT, Effect, HookGraph, Task
from retrograd.pipelines.analysis.hooks.hook_schedule import JOINED_BYTES

KINDS = ("tensor_pre", "pre", "post", "post_acc_grad", "unpack", "accumulate_grad", "call_backward")
SHORT = {
    "acc": "accumulate_grad",
    "post_acc": "post_acc_grad",
    "backward": "call_backward",
    "final": "final_callbacks",
    "start": COLLECTIVE,
    "wait": WAIT,
}


class TextGraph:
    """A `HookGraph` with a name for each task: what it gives, or the line itself without spaces."""

    def __init__(self, text: str) -> None:
        values: dict[str, int] = {}

        def number(name: str) -> int:
            return values.setdefault(name, len(values))

        tasks: list[Task] = []
        self.names: list[str] = []
        results: tuple[int, ...] = ()
        for line in filter(None, map(str.strip, text.splitlines())):
            if line.startswith("return"):
                results = tuple(number(name) for name in line.split()[1:])
                continue
            given, equals, right = line.partition("=")
            head, colon, taken = (right if equals else line).partition(":")
            takes = tuple(number(name) for name in (taken if colon else head).split())
            gives = tuple(number(name) for name in given.split()) if equals else ()
            tasks.append(Task(takes, gives, _parse_effect(head) if colon else None))
            self.names.append(given.split()[0] if equals else line.partition(":")[0].replace(" ", ""))
        self.graph = HookGraph(tuple(tasks), results)

    def show(self, order: Iterable[int]) -> str:
        """Names of tasks in an order."""
        return " ".join(self.names[number] for number in order)


def _parse_effect(text: str) -> Effect:
    text, _, bucket = text.partition("@")
    kind, _, number = text.strip().partition(" ")
    size = JOINED_BYTES // 2 if "~" in number else 0
    kind = SHORT.get(kind, kind)
    if kind == COLLECTIVE:
        return Effect(kind, communication=True, bytes=int(number))
    filled = int(bucket) if bucket else None
    return Effect(kind, int(number.strip("!*~") or 0), "!" in number, large="*" in number, bytes=size, bucket=filled)


@st.composite
def hook_graphs(draw: st.DrawFn, *, max_tasks: int = 12) -> HookGraph:
    """Random graphs: each task takes any values there are, and may be an effect of any kind."""
    values = list(range(draw(st.integers(1, 3))))
    tasks: list[Task] = []
    for _ in range(draw(st.integers(1, max_tasks))):
        kind = draw(st.sampled_from((None, None, None, *KINDS, COLLECTIVE)))
        if kind == COLLECTIVE:
            start, result = values[-1] + 1, values[-1] + 2
            sent = Effect(kind, communication=True, bytes=draw(st.sampled_from((8, 16))))
            tasks.append(Task((draw(st.sampled_from(values)),), (start,), sent))
            tasks.append(Task((start,), (result,), Effect(WAIT)))
            values.append(result)
            continue
        if kind == "post_acc_grad" and not any(t.effect and t.effect.kind == "accumulate_grad" for t in tasks):
            kind = "tensor_pre"
        effect = None
        if kind is not None:
            sends = draw(st.booleans())
            bucket = draw(st.sampled_from((None, 0, 1))) if sends else None
            effect = Effect(kind, draw(st.integers(0, 2)), sends, bucket=bucket)
        count = 1 if kind == "accumulate_grad" else draw(st.integers(0, 2))
        takes = tuple(dict.fromkeys(draw(st.sampled_from(values)) for _ in range(count)))
        gives = tuple(values[-1] + 1 + i for i in range(0 if kind in ("accumulate_grad", "post_acc_grad") else 1))
        values += gives
        tasks.append(Task(takes, gives, effect))
    if draw(st.booleans()):
        tasks.append(Task(effect=Effect("final_callbacks")))
    return HookGraph(tuple(tasks), tuple(draw(st.lists(st.sampled_from(values), max_size=3))))


def find_order_problem(graph: HookGraph, order: Sequence[int]) -> str | None:
    """Say why an order is no schedule of a graph; None if it is one."""
    if sorted(order) != sorted(graph.live):
        return f"tasks {sorted(graph.live.symmetric_difference(order))} are missing, or dead, or there twice"
    places = {number: place for place, number in enumerate(order)}
    for number in order:
        late = [before for before in graph.dependencies[number] if places[before] > places[number]]
        if late:
            return f"task {number} runs before task {late[0]}, on which it depends"
    return None
