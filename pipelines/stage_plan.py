# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The plan of a backward that is cut into stages: which compiled function, hook or accumulation comes when.

`to_dict` gives what JSON can hold; an artifact's manifest carries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retrograd.contract.tensors import FunctionSpec
from retrograd.dialects import ir

PLAN_ATTRIBUTE = "bwd.plan"
# Of functions that were cut at their islands: a plan under the name of each.
ISLAND_PLANS_ATTRIBUTE = "bwd.island_plans"


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
class Free:
    """Forget these values: nothing below uses them."""

    values: tuple[str, ...]


Step = RunStage | RunIsland | CallHook | CallBackward | AccumulateGrad | UpdateInput | FinalCallbacks | Free
_STEPS: dict[str, type[Step]] = {
    "run_stage": RunStage,
    "run_island": RunIsland,
    "call_hook": CallHook,
    "call_backward": CallBackward,
    "accumulate_grad": AccumulateGrad,
    "update_input": UpdateInput,
    "final_callbacks": FinalCallbacks,
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
            "steps": [{key: _thaw(value) for key, value in step.items()} for step in steps],
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
        case RunStage() | RunIsland() | CallHook() | CallBackward():
            return step.arguments
        case AccumulateGrad():
            return (step.gradient,)
        case UpdateInput():
            return (step.target, step.value)
        case _:
            return ()


def gives(step: Step) -> tuple[str, ...]:
    """The values that a step gives and that are used."""
    match step:
        case RunStage() | RunIsland() | CallHook() | CallBackward():
            return tuple(result for result in step.results if result)
        case _:
            return ()


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
    """What keeps a plan from running on these functions: values that are not there, calls that do not fit."""
    by_name = {function.name: function for function in functions}
    there = set(plan.arguments)
    for place, step in enumerate(plan.steps):
        taken = step.values if isinstance(step, Free) else uses(step)
        for value in taken:
            if value not in there:
                yield f"step {place} takes '{value}', which is not there"
        if isinstance(step, Free):
            there.difference_update(step.values)
        if isinstance(step, RunStage):
            function = by_name.get(step.function)
            found = None if function is None else (len(function.arguments), len(function.results))
            if found != (len(step.arguments), len(step.results)):
                yield f"step {place} calls @{step.function}, which does not fit or is not there"
        there.update(gives(step))
    yield from (f"result '{value}' is not there at the end" for value in plan.results if value not in there)


def write_plan(module: ir.Operation, plan: StagePlan) -> None:
    """Leave the plan on a module."""
    module.attributes[PLAN_ATTRIBUTE] = _attribute(plan.to_dict())


def read_plan(module: ir.Operation) -> StagePlan:
    """The plan that ``bwd-outline-stages`` left on a module.

    Raises:
        ValueError: there is none.
    """
    if PLAN_ATTRIBUTE not in module.attributes:
        raise ValueError("the module has no stage plan; run bwd-outline-stages first")
    return StagePlan.from_dict(_plain(module.attributes[PLAN_ATTRIBUTE]))


def write_island_plans(module: ir.Operation, plans: Mapping[str, StagePlan]) -> None:
    """Leave on a module the plans of functions that were cut at their islands, by name."""
    module.attributes[ISLAND_PLANS_ATTRIBUTE] = _attribute({name: plan.to_dict() for name, plan in plans.items()})


def read_island_plans(module: ir.Operation) -> dict[str, StagePlan]:
    """The plans that ``bwd-outline-islands`` left on a module, by the name of the function; none where it cut none.

    Raises:
        ValueError: one of them is no plan.
    """
    if ISLAND_PLANS_ATTRIBUTE not in module.attributes:
        return {}
    plans = _plain(module.attributes[ISLAND_PLANS_ATTRIBUTE])
    return {name: StagePlan.from_dict(plan) for name, plan in plans.items()}


def _read_step(data: dict[str, Any]) -> Step:
    kind = _STEPS[data.pop("step")]
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return kind(**fields)


def _thaw(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _attribute(value: Any) -> ir.Attribute:
    match value:
        case dict():
            return ir.DictAttr.get({key: _attribute(item) for key, item in value.items()})
        case list():
            return ir.ArrayAttr.get([_attribute(item) for item in value])
        case int():
            return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
        case _:
            return ir.StringAttr.get(value)


def _plain(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.DictAttr):
        return {entry.name: _plain(entry.attr) for entry in attribute}
    if isinstance(attribute, ir.ArrayAttr):
        return [_plain(item) for item in attribute]
    return attribute.value
