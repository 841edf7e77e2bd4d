# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a compiled function is called in the place of a graph of AOTAutograd's, as plain data: what of the graph's
arguments it takes, and what its results are to the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from retrograd.contract.sizes import evaluate_size
from retrograd.frontend.doors.batched_calls import call_by_rows, is_batching
from retrograd.frontend.doors.outputs import AxisOrder

# Strides in elements, or, of a tensor whose sizes differ from call to call, the order of its axes in memory.
Layout: TypeAlias = "tuple[int, ...] | AxisOrder"
Tensors = Sequence[torch.Tensor]
# What calls a function on a graph's arguments, in one list that it may empty, so that each is freed after its last use.
Caller: TypeAlias = "Callable[[list[Any]], list[Any]]"


@dataclass(frozen=True)
class CallPlan:
    """``taken`` are the places of the function's arguments among the graph's. Of each result of the graph one is not
    ``None``: the place of the argument that it is (``through``), of the function's result (``computed``), an expression
    over sizes (``numbers``), whose places are in ``heads``, or else it is in ``constants``; ``strides`` are those to
    restore. ``on_host`` are the results that eager has on the CPU, and the function on its device."""

    taken: Sequence[int]
    through: Sequence[int | None]
    computed: Sequence[int | None]
    numbers: Sequence[Any]
    constants: Sequence[Any]
    strides: Sequence[Layout | None]
    heads: Mapping[str, int]
    on_host: Sequence[int] = ()

    def caller(self, run: Callable[[Tensors], Tensors], more: Sequence[Callable[[Sequence[Any]], Any]]) -> Caller:
        """Makes the function that calls ``run`` so; ``more`` reads or draws what stands behind the graph's
        arguments."""
        call = self._caller(run, more)
        return _bringing_to_host(call, self.on_host) if self.on_host else call

    def _caller(self, run: Callable[[Tensors], Tensors], more: Sequence[Callable[[Sequence[Any]], Any]]) -> Caller:
        taken, heads = self.taken, self.heads
        kept = sorted({place for place in self.through if place is not None})
        if not (kept or heads) and all(place is not None for place in self.computed):
            # What the function gives, and nothing else.
            pairs = zip(self.computed, self.strides, strict=True)
            return _results_caller(run, taken, more, [(place, stride) for place, stride in pairs if place is not None])
        wanted = [*zip(self.through, self.computed, self.strides, self.constants, self.numbers, strict=True)]

        def call(tensors: list[Any]) -> list[Any]:
            tensors.extend([read(tensors) for read in more])
            given, known = [tensors[i] for i in taken], {name: tensors[place] for name, place in heads.items()}
            passed = {place: tensors[place] for place in kept}
            tensors.clear()
            results = run(given)
            out: list[Any] = []
            for argument, result, stride, constant, number in wanted:
                if argument is not None:
                    out.append(passed[argument])
                elif number is not None:
                    out.append(evaluate_size(number, known))
                else:
                    out.append(constant if result is None else _with_strides(results[result], stride))
            return out

        return call


def _bringing_to_host(call: Caller, places: Sequence[int]) -> Caller:
    def bring(tensors: list[Any]) -> list[Any]:
        results = call(tensors)
        for place in places:
            if isinstance(results[place], torch.Tensor):
                results[place] = results[place].cpu()
        return results

    return bring


def _results_caller(
    run: Callable[[Tensors], Tensors],
    taken: Sequence[int],
    more: Sequence[Callable[[Sequence[Any]], Any]],
    given: Sequence[tuple[int, Layout | None]],
) -> Caller:
    """That of a plan where each result of the graph is one of the function's."""

    def call(tensors: list[Any]) -> list[Any]:
        tensors.extend([read(tensors) for read in more])
        arguments = [tensors[i] for i in taken]
        tensors.clear()
        results = run(arguments)
        return [results[i] if stride is None else _with_strides(results[i], stride) for i, stride in given]

    return call


def _with_strides(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    if layout is None:
        return tensor
    if isinstance(layout, AxisOrder):
        return layout.apply(tensor)
    once = tensor[tuple(slice(None) if step else slice(1) for step in layout)]
    copy = torch.empty_strided(once.shape, layout, dtype=tensor.dtype, device=tensor.device).copy_(once)
    return copy.expand(tensor.shape)


def boxed(call: Caller) -> Caller:
    """``call`` as AOTAutograd's runtime knows it to take its arguments in one list; for batches of gradients, row by
    row."""

    def run(tensors: list[Any]) -> list[Any]:
        return call_by_rows(run, tensors) if is_batching() else call(tensors)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
