# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The plan of a function that is cut into stages: which compiled function, hook or accumulation comes when. `to_dict`
gives what an attribute in MLIR can hold. Plans are made anew at each build: no file has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retrograd.contract.collectives import Collective
from retrograd.contract.reading import to_json
from retrograd.contract.tensors import FunctionSpec


@dataclass(frozen=True)
class RunStage:
    """Call compiled function ``function`` with the values ``arguments``; what it returns are the values ``results``."""

    function: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class CallHook:
    """Call hook number ``hook``. What it gives are the values ``results``, one by one; those that nobody uses are
    ``""``, or left out at the end.
    """

    kind: str
    hook: int
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class CallBackward:
    """Call the backward of custom function number ``function``; ``results`` as for `CallHook`."""

    function: int
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class RunIsland:
    """Run island number ``island``, ops that are not compiled, in torch; ``results`` as for `CallHook`, of ``bytes``
    bytes each, with the sizes that were traced."""

    island: int
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class StartCollective:
    """Start a collective on the values ``arguments``; ``results`` as for `CallHook`, of ``bytes`` bytes each. They are
    in the making: a `WaitCollective` alone takes them."""

    collective: str
    reduction: str
    size: int
    group: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    bytes: tuple[int, ...]

    @property
    def what(self) -> Collective:
        """The exchange between the processes."""
        return Collective(self.collective, self.reduction, self.size, self.group)


@dataclass(frozen=True)
class WaitCollective:
    """Wait for the one value ``arguments`` that was started; the value ``results`` is it."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class AccumulateGrad:
    """Add value ``gradient`` to the gradient of parameter number ``param``."""

    param: int
    gradient: str


@dataclass(frozen=True)
class UpdateInput:
    """Write ``value`` to the argument ``target``."""

    target: str
    value: str


@dataclass(frozen=True)
class FinalCallbacks:
    """Run the callbacks that were queued on the engine."""


@dataclass(frozen=True)
class StartOffload:
    """Begin to copy the values ``arguments`` to memory of the host; the values ``results`` are there then."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class FinishOffload:
    """Have the device wait until these values are copied, and forget them: their memory is free for what follows."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class StartFetch:
    """Begin to copy the values ``arguments`` back from the host; ``results``, of ``bytes`` bytes each, take memory from
    here on. They are in the making: a `FinishFetch` alone takes them."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class FinishFetch:
    """Have the device wait until these values are back."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Free:
    """Forget these values: nothing below uses them."""

    values: tuple[str, ...]


_Call = RunStage | RunIsland | CallHook | CallBackward | StartCollective | WaitCollective
Move = StartOffload | FinishOffload | StartFetch | FinishFetch
"""Steps of plans that keep residuals on the host."""
Step = _Call | AccumulateGrad | UpdateInput | FinalCallbacks | Free | Move
_STEPS: dict[str, type[Step]] = {
    "run_stage": RunStage,
    "run_island": RunIsland,
    "call_hook": CallHook,
    "call_backward": CallBackward,
    "start_collective": StartCollective,
    "wait_collective": WaitCollective,
    "accumulate_grad": AccumulateGrad,
    "update_input": UpdateInput,
    "final_callbacks": FinalCallbacks,
    "start_offload": StartOffload,
    "finish_offload": FinishOffload,
    "start_fetch": StartFetch,
    "finish_fetch": FinishFetch,
    "free": Free,
}
_NAMES = {step: name for name, step in _STEPS.items()}


@dataclass(frozen=True)
class StagePlan:
    """The steps of a backward: from the values ``arguments`` to the values ``results``, by name."""

    arguments: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan in lists, dicts, strings and integers."""
        steps = [{"step": _NAMES[type(step)], **asdict(step)} for step in self.steps]
        return {
            "arguments": list(self.arguments),
            "steps": [{key: to_json(value) for key, value in step.items()} for step in steps],
            "results": list(self.results),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StagePlan:
        """The plan that `to_dict` gave ``data`` for.

        Raises:
            ValueError: no plan; says what was not understood.
        """
        try:
            steps = tuple(_read_step(dict(step)) for step in data["steps"])
            return cls(tuple(data["arguments"]), steps, tuple(data["results"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no stage plan: {error}") from error

    @property
    def has_collectives(self) -> bool:
        """Whether other processes take part."""
        return any(isinstance(step, StartCollective) for step in self.steps)

    @property
    def stages(self) -> tuple[str, ...]:
        """The functions that the plan calls, in order."""
        return tuple(step.function for step in self.steps if isinstance(step, RunStage))


def whole_plan(function: FunctionSpec) -> StagePlan:
    """The plan of a function that is not cut: to call it."""
    arguments = tuple(f"argument.{i}" for i, _ in enumerate(function.arguments))
    results = tuple(f"result.{i}" for i, _ in enumerate(function.results))
    return StagePlan(arguments, (RunStage(function.name, arguments, results),), results)


def uses(step: Step) -> tuple[str, ...]:
    """The values that a step takes; to free a value is no use."""
    match step:
        case RunStage() | RunIsland() | CallHook() | CallBackward() | StartCollective() | WaitCollective():
            return step.arguments
        case StartOffload() | StartFetch():
            return step.arguments
        case FinishOffload() | FinishFetch():
            return step.values
        case AccumulateGrad():
            return (step.gradient,)
        case UpdateInput():
            return (step.target, step.value)
        case _:
            return ()


def gives(step: Step) -> tuple[str, ...]:
    """The values that a step gives and that are used."""
    match step:
        case RunStage() | RunIsland() | CallHook() | CallBackward() | StartCollective() | WaitCollective():
            return tuple(result for result in step.results if result)
        case StartOffload() | StartFetch():
            return step.results
        case _:
            return ()


def join_frees(steps: Sequence[Step]) -> list[tuple[Step, list[str]]]:
    """The steps, each with the values that are freed after it."""
    joined: list[tuple[Step, list[str]]] = []
    for step in steps:
        if joined and isinstance(step, Free):
            joined[-1][1].extend(step.values)
        else:
            joined.append((step, []))
    return joined


def find_given_up(plan: StagePlan, *, from_stages: bool = False) -> dict[str, frozenset[int]]:
    """The arguments of each function that a plan runs, by number, that are freed after it and that it takes once; of
    these, those alone that another of its functions gave, ``from_stages``."""
    found: dict[str, frozenset[int]] = {}
    given: set[str] = set()
    for step, freed in join_frees(plan.steps):
        if isinstance(step, RunStage):
            known = freed if not from_stages else given.intersection(freed)
            own = {i for i, v in enumerate(step.arguments) if v in known and step.arguments.count(v) == 1}
            found[step.function] = frozenset(own) & found.get(step.function, frozenset(own))
            given.update(step.results)
    return found


def insert_frees(plan: StagePlan) -> StagePlan:
    """The plan with each value freed right after its last use; arguments that nothing uses at the very start."""
    last = dict.fromkeys(plan.arguments, -1)
    for place, step in enumerate(plan.steps):
        last |= dict.fromkeys((*uses(step), *gives(step)), place)
    freed: dict[int, list[str]] = {}
    for value, place in last.items():
        if value not in plan.results:
            freed.setdefault(place, []).append(value)
    steps: list[Step] = [Free(tuple(freed[-1]))] if -1 in freed else []
    for place, step in enumerate(plan.steps):
        steps.append(step)
        if place in freed:
            steps.append(Free(tuple(freed[place])))
    return StagePlan(plan.arguments, tuple(steps), plan.results)


def find_plan_problems(plan: StagePlan, functions: Sequence[FunctionSpec]) -> Iterator[str]:
    """Lists what keeps a plan from running on these functions: values that are not there, calls that do not fit."""
    by_name = {function.name: function for function in functions}
    there = set(plan.arguments)
    for place, step in enumerate(plan.steps):
        taken = step.values if isinstance(step, Free) else uses(step)
        for value in taken:
            if value not in there:
                yield f"step {place} takes '{value}', which is not there"
        if isinstance(step, Free | FinishOffload):
            there.difference_update(step.values)
        if isinstance(step, RunStage):
            function = by_name.get(step.function)
            found = None if function is None else (len(function.arguments), len(function.results))
            if found != (len(step.arguments), len(step.results)):
                yield f"step {place} calls @{step.function}, which does not fit or is not there"
        there.update(gives(step))
    yield from (f"result '{value}' is not there at the end" for value in plan.results if value not in there)


def _read_step(data: dict[str, Any]) -> Step:
    kind = _STEPS[data.pop("step")]
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return kind(**fields)
