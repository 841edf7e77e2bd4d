# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs a backward that is cut into stages: compiled functions and Python calls in turn, as the plan says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from operator import itemgetter
from sys import getrefcount
from typing import Any

import torch

from retrograd.contract.moves import Mover, Transfer
from retrograd.contract.plan import (
    AccumulateGrad,
    CallBackward,
    CallHook,
    FinalCallbacks,
    FinishFetch,
    FinishOffload,
    Free,
    RunIsland,
    RunStage,
    StagePlan,
    StartCollective,
    StartFetch,
    StartOffload,
    Step,
    UpdateInput,
    WaitCollective,
    gives,
    join_frees,
)
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.executor import Argument, Program
from retrograd.runtime.steps import collectives
from retrograd.runtime.steps.bound_function import BoundFunction
from retrograd.runtime.steps.gradient_owners import Owner, find_owners
from retrograd.runtime.steps.python_side import PythonSide, known_results, wait_for
from retrograd.runtime.steps.short_plan import ShortPlan, find_short_plan, is_one_function
from retrograd.runtime.steps.updated_inputs import Updates

SECONDS_TO_AGREE = 300.0
"""How long other processes may take to compile the same."""

# What an island runs: its arguments in, its results out.
Island = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_Action = Callable[[list[Any], Any], None]
_Gather = Callable[[list[Any]], Sequence[torch.Tensor]]


class StageExecutor:
    """A plan over the functions of a program, and the islands that run in torch.

    Values live in numbered places; all that a step needs to know is looked up and checked once, here, and not at each
    run. ``mover`` makes the moves of a plan that has some. ``notes`` say what its user is told of besides;
    ``is_rearranged`` that it starts collectives otherwise than was captured, so that all processes have to run it, or
    none; ``is_in_order`` that it calls Python in the order in which that was captured.

    Raises:
        ExecutionError: the plan calls a function that ``functions`` does not have, or an island of another number, or
            takes a value that is not there, or it has moves and there is no ``mover``.
    """

    def __init__(
        self,
        plan: StagePlan,
        program: Program,
        functions: Sequence[FunctionSpec],
        islands: Sequence[Island] = (),
        mover: Mover[torch.Tensor] | None = None,
    ) -> None:
        self._mover = mover
        # The place of the copy that is under way of a value.
        self._transfers: dict[str, int] = {}
        self._program = program
        self._islands = islands
        self.notes: tuple[str, ...] = ()
        self.is_rearranged = False
        self.is_in_order = False
        self._plan = plan
        self._functions = {f.name: f for f in functions}
        self._places: dict[str, int] = {}
        # The values that are there after the steps so far.
        self._there: set[str] = set()
        self._give(plan.arguments)
        self._arguments = len(self._places)
        owners = find_owners(plan)
        self._owners = iter(owners)
        self._owned = [None if owner is Owner.RUN_TELLS else owner is Owner.ACCUMULATION for owner in owners]
        self._bound: list[BoundFunction] = []
        self._actions = self._make_actions(join_frees(plan.steps))
        self._results = _gather(self._take(plan.results))
        self._rest: list[None] = [None] * (len(self._places) - self._arguments)

    def run(self, arguments: Sequence[Argument], python: PythonSide | None = None) -> list[torch.Tensor]:
        """Run all steps; returns the results of the plan. What Python raises passes through. A list of arguments is
        emptied; where a step fails, it has those that are left, and None for others. A plan of stages and islands alone
        needs no ``python``.

        Raises:
            ExecutionError: a stage failed, or a hook gave a tensor that the next stage does not take.
        """
        values: list[Any] = [*arguments, *self._rest]
        if isinstance(arguments, list):
            # Each is freed after its last use, if nobody else has it.
            arguments.clear()
        try:
            for action in self._actions:
                action(values, python)
        except Exception:
            if isinstance(arguments, list):
                arguments.extend(values[: self._arguments])
            raise
        finally:
            # Where a step failed, copies are under way of what is freed now.
            for place in self._transfers.values():
                if (transfer := values[place]) is not None:
                    transfer.finish()
        return list(self._results(values))

    def find_short_plan(self) -> ShortPlan | None:
        """The short way to run it, of which it is to be asked again while it ``may_be_short``."""
        return find_short_plan(self._plan, self._bound[0], self._owned) if is_one_function(self._plan) else None

    @property
    def may_be_short(self) -> bool:
        """Whether there may come to be a short way to run it."""
        return is_one_function(self._plan) and self._bound[0].may_be_short

    def find_disagreement(self, problem: str | None) -> str | None:
        """The problem for which this process does not run it, or another one's, which is waited for: none where all
        run it."""
        if not self.is_rearranged:
            return problem
        key = hashlib.sha256(json.dumps(self._plan.to_dict()).encode()).hexdigest()[:16]
        groups = [step.group for step in self._plan.steps if isinstance(step, StartCollective)]
        others = collectives.find_disagreement(key, groups, SECONDS_TO_AGREE, is_right=problem is None)
        return problem or others

    def _give(self, names: Sequence[str]) -> list[int]:
        """Places for values that a step gives."""
        self._there.update(names)
        return [self._places.setdefault(name, len(self._places)) for name in names]

    def _take(self, names: Sequence[str]) -> list[int]:
        """The places of values that a step takes."""
        for name in names:
            if name not in self._there:
                raise ExecutionError(f"a plan takes value '{name}', which is not there: it is damaged, compile again")
        return [self._places[name] for name in names]

    def _free(self, names: Sequence[str]) -> list[int]:
        """The places of values that are of no use from here on."""
        places = self._take(names)
        self._there.difference_update(names)
        return places

    def _make_actions(self, steps: Sequence[tuple[Step, list[str]]]) -> list[_Action]:
        """Makes a function for each step, and one for inputs that are updated one after the other."""
        actions: list[_Action] = []
        updates = Updates()
        for step, freed in steps:
            if isinstance(step, UpdateInput):
                target, value = self._take([step.target, step.value])
                if not updates.takes(target, value, self._arguments):
                    actions += [updates.action()] * bool(updates.targets)
                    updates = Updates()
                updates.add(target, value, self._free(freed))
                continue
            actions += [updates.action()] * bool(updates.targets)
            updates = Updates()
            actions.append(self._action(step, freed))
        return [*actions, *[updates.action()] * bool(updates.targets)]

    def _action(self, step: Step, freed: Sequence[str]) -> _Action:
        """Makes a function that runs a step and frees values after it."""
        match step:
            case RunStage():
                return self._run_stage(step, freed)
            case RunIsland():
                return self._run_island(step, freed)
            case CallHook(kind, hook):
                return self._python_call(step, freed, lambda python, taken: python.call_hook(kind, hook, taken))
            case CallBackward(function):
                return self._python_call(step, freed, lambda python, taken: python.call_backward(function, taken))
            case StartCollective():
                start = collectives.make_start(step.what)
                return self._python_call(
                    step, freed, lambda python, taken: taken if known_results(python) is not None else start(taken)
                )
            case WaitCollective(_, results):
                return self._python_call(step, freed, lambda python, taken: wait_for(python, results, taken))
            case AccumulateGrad():
                return self._accumulate(step, freed)
            case UpdateInput():
                raise AssertionError("updates are written together")
            case StartOffload() | StartFetch():
                return self._start_move(step, freed)
            case FinishOffload() | FinishFetch():
                return self._finish(step, freed)
            case FinalCallbacks():
                return _then_free(lambda _values, python: python.final_callbacks(), self._free(freed))
            case Free():
                return _then_free(None, self._free([*step.values, *freed]))

    def _accumulate(self, step: AccumulateGrad, freed: Sequence[str]) -> _Action:
        param, (gradient,) = step.param, self._take([step.gradient])
        owner = next(self._owners)
        if owner is Owner.RUN_TELLS:
            return self._accumulate_lent(param, gradient, freed)
        owned, unused = owner is Owner.ACCUMULATION, self._free(freed)

        def run(values: list[Any], python: Any) -> None:
            python.accumulate_grad(param, values[gradient], owned)
            for place in unused:
                values[place] = None

        return run

    def _accumulate_lent(self, param: int, gradient: int, freed: Sequence[str]) -> _Action:
        """Accumulate what Python gave, or what a post hook is to see: it is handed over where eager would, if nobody
        but the plan has it."""
        is_seen, unused = gradient not in self._take(freed), self._free(freed)

        def run(values: list[Any], python: Any) -> None:
            # Here, in the list, and as the argument of the question.
            value = values[gradient]
            owned = getrefcount(value) <= 3 and value._use_count() == 1
            python.accumulate_grad(param, value.detach() if owned and is_seen else value, owned)
            for place in unused:
                values[place] = None

        return run

    def _run_stage(self, step: RunStage, freed: Sequence[str]) -> _Action:
        if step.function not in self._functions:
            raise ExecutionError(
                f"the plan calls @{step.function}, which the program does not have; it is damaged, compile again"
            )
        call = BoundFunction(self._program, self._functions[step.function])
        self._bound.append(call)
        taking = self._take(step.arguments)
        take, given = _gather(taking), self._give(step.results)
        unused = self._free(freed)

        def run(values: list[Any], _python: Any) -> None:
            # The stage may work in what nobody has after it.
            taken = [*take(values)]
            for place in unused:
                values[place] = None
            try:
                results = call(taken)
            except Exception:
                # What is left is as it was: a function that works in its arguments leaves none of them.
                for place, value in zip(taking, taken, strict=False):
                    values[place] = value
                raise
            for place, result in zip(given, results):  # noqa: B905 (the manifest says how many)
                values[place] = result

        return run

    def _start_move(self, step: StartOffload | StartFetch, freed: Sequence[str]) -> _Action:
        if self._mover is None:
            raise ExecutionError("the plan keeps residuals on the host, and there is nothing that moves them")
        is_offload = isinstance(step, StartOffload)
        move = self._mover.offload if is_offload else self._mover.fetch
        taken, given = self._take(step.arguments), self._give(step.results)
        transfers = self._give_transfers(step.arguments if is_offload else step.results)
        unused = self._free(freed)

        def run(values: list[Any], _python: Any) -> None:
            moved, transfer = move([values[place] for place in taken])
            for place, under_way, tensor in zip(given, transfers, moved, strict=True):
                values[place], values[under_way] = tensor, transfer
            for place in unused:
                values[place] = None

        return run

    def _finish(self, step: FinishOffload | FinishFetch, freed: Sequence[str]) -> _Action:
        self._take(step.values)
        transfers = [self._transfers[value] for value in step.values]
        unused = [*self._free(step.values if isinstance(step, FinishOffload) else ()), *self._free(freed)]

        def run(values: list[Any], _python: Any) -> None:
            # Those that were started together are one.
            under_way: set[Transfer] = {values[place] for place in transfers}
            for place in transfers:
                values[place] = None
            for transfer in under_way:
                transfer.finish()
            for place in unused:
                values[place] = None

        return run

    def _give_transfers(self, values: Sequence[str]) -> list[int]:
        """Places for copies that are under way, by the values that they are of."""
        for value in values:
            self._transfers[value] = self._places.setdefault(f"{value} (under way)", len(self._places))
        return [self._transfers[value] for value in values]

    def _run_island(self, step: RunIsland, freed: Sequence[str]) -> _Action:
        if not 0 <= step.island < len(self._islands):
            raise ExecutionError(f"the plan runs island {step.island}, and there are {len(self._islands)}")
        island = self._islands[step.island]
        return self._python_call(step, freed, lambda _python, taken: island(taken))

    def _python_call(
        self,
        step: RunIsland | CallHook | CallBackward | StartCollective | WaitCollective,
        freed: Sequence[str],
        call: Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> _Action:
        take = _gather(self._take(step.arguments))
        # Results that nobody uses have no name, or are left out at the end.
        used = [index for index, name in enumerate(step.results) if name]
        given = list(zip(used, self._give(gives(step)), strict=True))
        unused = self._free(freed)

        def run(values: list[Any], python: Any) -> None:
            results = call(python, take(values))
            for index, place in given:
                values[place] = results[index]
            for place in unused:
                values[place] = None

        return run


def _gather(places: Sequence[int]) -> _Gather:
    """Makes a function that takes values from their places."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    (place,) = places
    return lambda values: (values[place],)


def _then_free(action: Callable[[list[Any], Any], Any] | None, places: Sequence[int]) -> _Action:
    def run(values: list[Any], python: Any) -> None:
        if action is not None:
            action(values, python)
        for place in places:
            values[place] = None

    return run
