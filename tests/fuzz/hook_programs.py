# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random programs of a few ops on small matrices, with hooks of every kind that autograd calls, and what these are
called with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

LEAVES = 2
STEPS = 3
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda a, b: a.sin(),
    "tanh": lambda a, b: a.tanh(),
    "double": lambda a, b: a + a,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "product": lambda a, b: a @ b / 3,
    "transposed": lambda a, b: a.t() - b,
}
KINDS = ("tensor", "pre", "post", "accumulated", "multi_all", "multi_any", "retain", "pack")


class HookError(Exception):
    """What hooks raise."""


@dataclass(frozen=True)
class Hook:
    """A hook on value number ``target``: it changes what it is given or not, and raises at step ``raises``. At the
    steps of ``off`` it is not there. With ``inside`` it runs a backward of its own, and what it changes of a leaf's
    gradient it writes in place; other gradients may share their memory."""

    kind: str
    target: int
    changes: bool
    raises: int | None
    off: frozenset[int]
    inside: bool


@dataclass(frozen=True)
class Program:
    """Leaves, then one value for each op of two values before; the loss is of the last value and another. With
    ``keep`` gradients are added up, with ``twice`` each graph is run backward twice."""

    ops: tuple[tuple[str, int, int], ...]
    hooks: tuple[Hook, ...]
    other: int
    keep: bool
    twice: bool


@st.composite
def programs(draw: Any, *, steady: bool = False) -> Program:
    """Programs; of a steady one all hooks are there at each step, and none raises."""
    count = draw(st.integers(1, 6))
    ops = [
        (draw(st.sampled_from(list(OPS))), *[draw(st.integers(0, LEAVES + n - 1)) for _ in range(2)])
        for n in range(count)
    ]
    raises = st.none() if steady else st.one_of(st.none(), st.none(), st.none(), st.integers(0, STEPS - 1))
    off = st.just(frozenset()) if steady else st.frozensets(st.integers(0, STEPS - 1), max_size=1)
    target = st.integers(0, LEAVES + count - 1)
    hook = st.builds(Hook, st.sampled_from(KINDS), target, st.booleans(), raises, off, st.booleans())
    hooks = draw(st.lists(hook, min_size=1, max_size=5))
    return Program(
        tuple(ops), tuple(hooks), draw(st.integers(0, LEAVES + count - 1)), draw(st.booleans()), draw(st.booleans())
    )


@dataclass
class Outcome:
    """What a step did: the calls of hooks in order, with the tensors that they were given, the gradients of the leaves
    and of the values that retain theirs, and what was raised."""

    calls: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    raised: str | None = None


def run(program: Program, around: Callable[[], AbstractContextManager[Any]]) -> list[Outcome]:
    """Run all steps of a program; ``around`` is entered for each backward."""
    leaves = [torch.randn(3, 3, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(LEAVES)]
    return [_Step(program, number).run(leaves, around) for number in range(STEPS)]


class _Step:
    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number, self._outcome = program, number, Outcome()
        self._handles: list[Any] = []

    def run(self, leaves: Sequence[Tensor], around: Callable[[], AbstractContextManager[Any]]) -> Outcome:
        hooks = [(f"{h.kind} {n}", h) for n, h in enumerate(self._program.hooks) if self._number not in h.off]
        values = self._forward(leaves, hooks)
        for name, hook in hooks:
            self._register(name, hook, values)
        loss = values[-1].sum() + values[self._program.other].cos().sum()
        try:
            with around():
                if self._program.twice:
                    loss.backward(retain_graph=True)
                loss.backward()
        except HookError as error:
            self._outcome.raised = str(error)
        retained = [values[h.target] for _, h in hooks if h.kind == "retain"]
        found = [t.grad for t in (*leaves, *retained)]
        self._outcome.gradients = [None if g is None else g.clone() for g in found]
        for handle in self._handles:
            handle.remove()
        if not self._program.keep or self._outcome.raised:
            for leaf in leaves:
                leaf.grad = None
        return self._outcome

    def _forward(self, leaves: Sequence[Tensor], hooks: Sequence[tuple[str, Hook]]) -> list[Tensor]:
        values = list(leaves)
        for op, a, b in self._program.ops:
            number = len(values)
            packs = [(name, h) for name, h in hooks if h.kind == "pack" and h.target == number]
            with contextlib.ExitStack() as stack:
                for name, hook in packs:
                    stack.enter_context(self._packing(name, hook))
                values.append(OPS[op](values[a], values[b]))
        return values

    def _packing(self, name: str, hook: Hook) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            return tensor.detach().half() if hook.changes else tensor.detach()

        def unpack(packed: Tensor) -> Tensor:
            self._called(name, hook, [packed])
            return packed.float()

        return saved_tensors_hooks(pack, unpack)

    def _register(self, name: str, hook: Hook, values: Sequence[Tensor]) -> None:
        target = values[hook.target]
        node = target.grad_fn

        def on_tensor(gradient: Tensor) -> Tensor | None:
            self._called(name, hook, [gradient])
            return gradient * 0.5 if hook.changes else None

        def on_gradients(gradients: Any, *_: Any) -> Any:
            self._called(name, hook, [g for g in gradients if g is not None])
            return tuple(None if g is None else g * 0.5 for g in gradients) if hook.changes else None

        def on_leaf(leaf: Tensor) -> None:
            assert leaf.grad is not None
            self._called(name, hook, [leaf.grad])
            if hook.changes and hook.inside:
                leaf.grad.mul_(0.5)
            elif hook.changes:
                leaf.grad = leaf.grad * 0.5

        def on_all(gradients: Any) -> None:
            self._called(name, hook, [g for g in gradients if g is not None])

        def on_any(gradient: Tensor) -> None:
            self._called(name, hook, [gradient])

        match hook.kind:
            case "tensor":
                self._handles.append(target.register_hook(on_tensor))
            case "accumulated" if node is None:
                self._handles.append(target.register_post_accumulate_grad_hook(on_leaf))
            case "multi_all":
                self._handles.append(register_multi_grad_hook((target, values[-1]), on_all, mode="all"))
            case "multi_any":
                self._handles.append(register_multi_grad_hook((target, values[-1]), on_any, mode="any"))
            case "retain":
                target.retain_grad()
            case "pre" if node is not None:
                self._handles.append(node.register_prehook(on_gradients))
            case "post" if node is not None:
                self._handles.append(node.register_hook(on_gradients))

    def _called(self, name: str, hook: Hook, tensors: Sequence[Tensor]) -> None:
        self._outcome.calls.append((name, [t.detach().float().clone() for t in tensors]))
        if hook.inside:
            given = [t.detach().float().requires_grad_() for t in tensors]
            with torch.enable_grad():
                torch.stack([t.sin().sum() for t in given]).sum().backward()
            self._outcome.calls.append((name, [t.grad for t in given if t.grad is not None]))
        if hook.raises == self._number:
            raise HookError(name)
