# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compares what a compiled half gave with its graph, and with the graphs that lead to it from the step's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd.frontend.verification.as_traced import AsTraced, arguments_of, has_effects
from retrograd.frontend.verification.from_inputs import ForwardRun, join, join_traced
from retrograd.frontend.verification.judgement import Difference
from retrograd.frontend.verification.random_states import RandomStates, random_states, set_random_states
from retrograd.frontend.verification.reference_graph import Graph, find_shortage

# A graph of the gradients from the forward's arguments, with its arguments; or why there is none.
_Joined = tuple[Graph, Sequence[Any]] | str


def compare_results(
    graph: Graph, results: list[Any], tensors: Sequence[Any], before: RandomStates
) -> tuple[list[Any], Difference | None]:
    """Run the graph from these states of the random number generators; returns its results, and how ``results`` differ
    from them. As can be seen afterwards, numbers were drawn once."""
    set_random_states(before)
    eager = graph.run(tensors)
    after = random_states(tensors)
    set_random_states(before)
    difference = graph.find_difference(results, tensors, eager)
    set_random_states(after)
    return eager, difference


def compare_from_inputs(
    graph: Graph, device: torch.device, run: ForwardRun | None, tensors: Sequence[Any], found: Sequence[list[Any]]
) -> tuple[list[Any], list[str | None]] | str:
    """The gradients computed from the forward's arguments, by the graph that was traced if there is one, and how each
    of ``found`` differs from them, in words, where the first one does; or, as one text, why they cannot be computed.
    Random number generators are left as they were."""
    if run is None:
        return "the forward that saved it was not the one checked"
    given = graph.fill_in(tensors)
    joined = join_as_traced(graph, run, given)
    compared = None if joined is None else _compare_joined(joined, device, run, found)
    if compared is None or isinstance(compared, str):
        compared = _compare_joined(_join_halves(graph, run, given), device, run, found)
    return compared


def halves_give(graph: Graph, device: torch.device, run: ForwardRun, tensors: Sequence[Any], right: list[Any]) -> bool:
    """Whether the graphs of both halves give these gradients, from the forward's arguments; not where they cannot be
    run."""
    compared = _compare_joined(_join_halves(graph, run, graph.fill_in(tensors)), device, run, [right])
    return not isinstance(compared, str) and compared[1][0] is None


def _join_halves(graph: Graph, run: ForwardRun, given: Sequence[Any]) -> _Joined:
    joined = join(run, graph.module, given)
    return joined if isinstance(joined, str) else (Graph(joined[0], True), joined[1])


def join_as_traced(graph: Graph, run: ForwardRun, given: Sequence[Any]) -> _Joined | None:
    """The gradients from the forward's arguments, by the graph that was traced; ``None`` where it is not known."""
    if graph.traced is None:
        return None
    joined = join_traced(run, graph.traced, graph.module, given)
    return joined if isinstance(joined, str) else (Graph(joined[0], True), joined[1])


def _compare_joined(
    joined: _Joined, device: torch.device, run: ForwardRun, found: Sequence[list[Any]]
) -> tuple[list[Any], list[str | None]] | str:
    if isinstance(joined, str):
        return joined
    joint, arguments = joined
    if (reason := find_shortage(joint, device, arguments)) is not None:
        return f"from the inputs, {reason}"
    after = random_states(arguments)
    messages: list[str | None] = []
    try:
        set_random_states(run.states)
        right = joint.run(arguments)
        for gradients in found:
            if messages == [None]:
                messages.append(None)
                break
            set_random_states(run.states)
            difference = joint.find_difference(gradients, arguments, right)
            messages.append(None if difference is None else f"{joint.describe(difference.place)}: {difference}")
    except (RuntimeError, NotImplementedError) as error:
        return f"torch does not run both halves at once: {str(error).partition(chr(10))[0]}"
    finally:
        set_random_states(after)
    return right, messages


def compare_as_traced(
    graph: Graph,
    traced: AsTraced,
    device: torch.device,
    tensors: Sequence[Any],
    before: RandomStates,
    found: Sequence[Any],
) -> list[str] | str:
    """How the outputs among what a forward's graph gave differ from those of the traced graph, in words, in a list that
    is empty where they do not; or, as one text, why that cannot be told. Random number generators are left as they
    were."""
    reference = Graph(traced.forward(), False)
    if (effect := next(filter(has_effects, reference.module.graph.nodes), None)) is not None:
        return f"{effect.target} has effects"
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    named = dict(zip((node.name for node in placeholders), graph.fill_in(tensors), strict=False))
    arguments = arguments_of(reference.module, named)
    if isinstance(arguments, str):
        return f"{arguments} is no argument"
    if (reason := find_shortage(reference, device, arguments)) is not None:
        return reason
    after = random_states(tensors)
    try:
        set_random_states(before)
        right = reference.run(arguments)
        set_random_states(before)
        difference = reference.find_difference(found[: len(right)], arguments, right)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch does not run it: {str(error).partition(chr(10))[0]}"
    finally:
        set_random_states(after)
    return [] if difference is None else [f"{reference.describe(difference.place)}: {difference}"]
