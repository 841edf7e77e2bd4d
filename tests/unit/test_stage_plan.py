# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Plans of stages: executed step by step by a reference executor, on numbers in the place of tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from retrograd.contract.hooks import Communicating
from retrograd.contract.plan import (
    AccumulateGrad,
    CallBackward,
    CallHook,
    FinalCallbacks,
    Free,
    RunStage,
    StagePlan,
    find_plan_problems,
    insert_frees,
)
from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.hooks.hook_schedule import POLICIES, HookSchedule
from retrograd.pipelines.infra.diagnostics import PipelineError
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.stages.stage_plan import read_plan, write_plan
from retrograd.pipelines.stages.staged import Progress, StagedBackward, stage_backward

TENSOR = "!torch.vtensor<[2],f32>"
TOKEN = "!torch.vtensor<[0],si8>"
ARITHMETIC: dict[str, Callable[..., float]] = {
    "torch.aten.mul.Tensor": lambda a, b: a * b,
    "torch.aten.neg": lambda a: -a,
    "torch.aten.exp2": lambda a: 2.0**a,
}
# Hook 4 packs nothing and gives what was saved; the others multiply by a number of their own. Hook 2 gives two values,
# of which one is used.
HOOKS: dict[int, Callable[..., list[float]]] = {
    1: lambda a: [a * 3],
    2: lambda a, b: [a * 5, b * 7],
    3: lambda *_: [],
    4: lambda: [11.0],
    5: lambda a: [a],
}


class Program:
    """Writes a backward as the import gives it: library ops on one chain of tokens."""

    def __init__(self, arguments: str) -> None:
        self.arguments = arguments.split()
        self.lines = [f'%t0 = torch.operator "torch.retrograd.create_token"() : () -> {TOKEN}']
        self.count = 0

    def compute(self, name: str, op: str, *operands: str) -> None:
        types = ", ".join([TENSOR] * len(operands))
        taken = ", ".join(f"%{o}" for o in operands)
        self.lines.append(f'%{name} = torch.aten.{op} {taken} {{bwd.values = ["{name}"]}} : {types} -> {TENSOR}')

    def call(self, op: str, values: str, results: str, *constants: str | int) -> None:
        """A call_hook or call_backward on values, with results by name."""
        taken, given = values.split(), results.split()
        n = self.count = self.count + 1
        types = ", ".join([TENSOR] * len(taken))
        listed = ", ".join(f"%{v}" for v in taken)
        self.lines.append(f"%l{n} = torch.prim.ListConstruct {listed} : ({types}) -> !torch.list<vtensor>")
        more = self._constants(*constants)
        kinds = "".join(", !torch.str" if isinstance(c, str) else ", !torch.int" for c in constants)
        self.lines.append(
            f'%r{n}, %t{n} = torch.operator "torch.retrograd.{op}"(%l{n}, %t{n - 1}{more}) : '
            f"(!torch.list<vtensor>, {TOKEN}{kinds}) -> (!torch.list<vtensor>, {TOKEN})"
        )
        if given:
            names = json.dumps(given)
            self.lines.append(
                f"{', '.join(f'%{g}' for g in given)} = torch.prim.ListUnpack %r{n} {{bwd.values = {names}}} : "
                f"!torch.list<vtensor> -> {', '.join([TENSOR] * len(given))}"
            )

    def hook(self, kind: str, number: int, values: str, results: str = "") -> None:
        self.call("call_hook", values, results, kind, number)

    def accumulate(self, param: int, gradient: str) -> None:
        n = self.count = self.count + 1
        more = self._constants(param)
        self.lines.append(
            f'%t{n} = torch.operator "torch.retrograd.accumulate_grad"(%{gradient}, %t{n - 1}{more}) : '
            f"({TENSOR}, {TOKEN}, !torch.int) -> {TOKEN}"
        )

    def finish(self) -> None:
        n = self.count = self.count + 1
        operation = f'torch.operator "torch.retrograd.final_callbacks"(%t{n - 1}) : ({TOKEN}) -> {TOKEN}'
        self.lines.append(f"%t{n} = {operation}")

    def stage(
        self, policy: HookSchedule, *results: str, communication: tuple[Communicating, ...] = ()
    ) -> StagedBackward:
        arguments = ", ".join(
            f'%{a}: {TENSOR} {{bwd.role = "saved", bwd.name = "{a}", bwd.value = "{a}"}}' for a in self.arguments
        )
        types = ", ".join(f'{TENSOR} {{bwd.role = "grad", bwd.name = "grad.{r}"}}' for r in results)
        returned = f"return {', '.join(f'%{r}' for r in results)} {':' if results else ''} " + ", ".join(
            [TENSOR] * len(results)
        )
        text = f"func.func @backward({arguments}) -> ({types}) {{\n" + "\n".join([*self.lines, returned]) + "\n}"
        with make_context(), ir.Location.unknown():
            return stage_backward(ir.Module.parse(text), policy, Progress(), communication)

    def _constants(self, *constants: str | int) -> str:
        names = ""
        for index, constant in enumerate(constants):
            name = f"c{self.count}_{index}"
            kind = f'str "{constant}"' if isinstance(constant, str) else f"int {constant}"
            self.lines.append(f"%{name} = torch.constant.{kind}")
            names += f", %{name}"
        return names


def run(staged: StagedBackward, values: Mapping[str, float]) -> tuple[list[str], dict[int, float], list[float]]:
    """Execute a plan: the log of what ran, gradients by parameter, results. What is freed is gone."""
    bodies = read_bodies(staged)
    env = {name: values[name] for name in staged.plan.arguments}
    log: list[str] = []
    gradients: dict[int, float] = {}
    for step in staged.plan.steps:
        match step:
            case RunStage(function, arguments, results):
                log.append(function)
                env |= zip(results, bodies[function]([env[a] for a in arguments]), strict=True)
            case CallHook(kind, hook, arguments, results):
                log.append(f"{kind}.{hook}")
                given = HOOKS[hook](*[env[a] for a in arguments])
                env |= {name: value for name, value in zip(results, given, strict=False) if name}
            case CallBackward(function, arguments, results):
                log.append(f"backward.{function}")
                env |= dict.fromkeys(results, sum(env[a] for a in arguments) * 13)
            case AccumulateGrad(param, gradient):
                log.append(f"accumulate.{param}")
                gradients[param] = gradients.get(param, 0.0) + env[gradient]
            case FinalCallbacks():
                log.append("final")
            case Free(freed):
                for name in freed:
                    del env[name]
    assert set(env) == set(staged.plan.results)
    return log, gradients, [env[r] for r in staged.plan.results]


def read_bodies(staged: StagedBackward) -> dict[str, Callable[[list[float]], list[float]]]:
    """The stages as functions on numbers."""
    bodies: dict[str, Callable[[list[float]], list[float]]] = {}
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(staged.module.texts["scheduled"])
        for func in functions(module.operation):
            block = func.regions[0].blocks[0]
            numbers = {a: i for i, a in enumerate(block.arguments)}
            code: list[tuple[str, list[int]]] = []
            for view in block.operations:
                operands = [numbers[o] for o in view.operation.operands]
                numbers |= {r: len(numbers) + i for i, r in enumerate(view.operation.results)}
                code.append((view.operation.name, operands))
            bodies[ir.StringAttr(func.attributes["sym_name"]).value] = partial(evaluate, code)
    return bodies


def evaluate(code: list[tuple[str, list[int]]], given: list[float]) -> list[float]:
    env = list(given)
    for name, operands in code:
        taken = [env[o] for o in operands]
        if name == "func.return":
            return taken
        env.append(ARITHMETIC[name](*taken))
    raise AssertionError("a function without a return")


def two_layers() -> Program:
    """Hooks of every kind around two layers; the weight of the first is used twice."""
    p = Program("g w0 w1 unused")
    p.hook("tensor_pre", 1, "g", "g1")
    p.hook("unpack", 4, "", "packed")
    p.hook("pre", 2, "g1 w1", "a b")
    p.compute("dw1", "mul.Tensor", "a", "packed")
    p.compute("dx", "mul.Tensor", "a", "w1")
    p.compute("dead", "neg", "dx")
    p.accumulate(1, "dw1")
    p.hook("post_acc_grad", 3, "")
    p.call("call_backward", "dx", "dy", 0)
    p.compute("dw0", "neg", "dy")
    p.accumulate(0, "dw0")
    p.hook("post", 3, "dy")
    p.accumulate(0, "dx")
    p.finish()
    return p


VALUES = {"g": 2.0, "w0": 3.0, "w1": 0.5, "unused": 9.0}
# By hand: g1 = 6, a = 30, dw1 = 330, dx = 15, dy = 195, dw0 = -195 + 15.
GRADIENTS = {1: 330.0, 0: -180.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_gradients(policy: HookSchedule) -> None:
    log, gradients, results = run(two_layers().stage(policy, "dy"), VALUES)
    assert gradients == GRADIENTS
    assert results == [195.0]
    assert log[-1] == "final"


def test_eager_order_log() -> None:
    log, _, _ = run(two_layers().stage("eager-order", "dy"), VALUES)
    called = [entry for entry in log if not entry.startswith("stage")]
    assert called == [
        *["tensor_pre.1", "pre.2", "unpack.4", "accumulate.1", "post_acc_grad.3", "backward.0"],
        *["accumulate.0", "post.3", "accumulate.0", "final"],
    ]


def test_fewest_stages_log() -> None:
    log, _, _ = run(two_layers().stage("fewest-stages", "dy"), VALUES)
    assert [entry for entry in log if entry.startswith("stage")] == ["stage_0", "stage_1"]


def test_overlap_log() -> None:
    log, gradients, _ = run(two_layers().stage("overlap", "dy", communication=(Communicating("pre", 2),)), VALUES)
    assert log[:2] == ["tensor_pre.1", "pre.2"]
    assert gradients == GRADIENTS


def test_what_hooks_give_and_nobody_uses() -> None:
    plan = two_layers().stage("eager-order", "dy").plan
    (hook,) = [s for s in plan.steps if isinstance(s, CallHook) and s.hook == 2]
    assert (hook.arguments, hook.results) == (("g1", "w1"), ("a",))
    assert plan.steps[0] == Free(("w0", "unused"))
    assert not any("dead" in text for text in map(str, plan.steps))


def test_a_backward_without_effects_is_one_stage() -> None:
    p = Program("g w")
    p.compute("d", "mul.Tensor", "g", "w")
    staged = p.stage("eager-order", "d")
    assert staged.plan == StagePlan(("g", "w"), (RunStage("backward", ("g", "w"), ("d",)), Free(("g", "w"))), ("d",))
    assert [f.name for f in staged.module.functions] == ["backward"]
    assert run(staged, {"g": 2.0, "w": 4.0})[2] == [8.0]


def test_a_backward_without_compute_has_no_stage() -> None:
    p = Program("g")
    p.hook("tensor_pre", 1, "g", "h")
    p.accumulate(0, "h")
    staged = p.stage("fewest-stages", "g", "h")
    assert staged.plan.stages == ()
    assert staged.module.functions == ()
    assert run(staged, {"g": 2.0}) == (["tensor_pre.1", "accumulate.0"], {0: 6.0}, [2.0, 6.0])


def test_roles_of_stages_make_an_interface() -> None:
    staged = two_layers().stage("eager-order", "dy")
    for function, step in zip(
        staged.module.functions, [s for s in staged.plan.steps if isinstance(s, RunStage)], strict=True
    ):
        assert function.name == step.function
        assert tuple(port.value for port in function.arguments) == step.arguments
        assert tuple(port.value for port in function.results) == step.results


def test_a_refusal_names_pass_and_replay() -> None:
    p = Program("g")
    p.hook("post_acc_grad", 3, "")
    with pytest.raises(PipelineError, match="no accumulate_grad precedes a post_acc_grad hook") as caught:
        p.stage("asap")
    assert caught.value.pass_name == "bwd-schedule-hooks"
    assert caught.value.replay


PLAN = StagePlan(
    ("g", "w"),
    (
        CallHook("pre", 1, ("g",), ("", "h")),
        RunStage("stage_0", ("h", "w"), ("d",)),
        CallBackward(2, ("d",), ("e",)),
        AccumulateGrad(3, "e"),
        FinalCallbacks(),
    ),
    ("d",),
)


def test_plans_as_json_and_as_attributes() -> None:
    plan = insert_frees(PLAN)
    assert StagePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse("module {}")
        with pytest.raises(ValueError, match="no stage plan; run bwd-outline-stages first"):
            read_plan(module.operation)
        write_plan(module.operation, plan)
        assert read_plan(ir.Module.parse(str(module)).operation) == plan


def test_values_are_freed_after_their_last_use() -> None:
    frees = [step.values for step in insert_frees(PLAN).steps if isinstance(step, Free)]
    assert frees == [("g",), ("w", "h"), ("e",)]


@pytest.mark.parametrize("data", [{}, {"arguments": [], "results": [], "steps": [{"step": "jump"}]}])
def test_what_is_no_plan(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no stage plan"):
        StagePlan.from_dict(data)


def test_plans_that_do_not_run() -> None:
    port = TensorSpec("x", "saved", (2,), "float32", "x", (2,))
    stage = FunctionSpec("stage_0", (port, port), (port,))
    assert list(find_plan_problems(insert_frees(PLAN), [stage])) == []
    assert list(find_plan_problems(PLAN, [])) == ["step 1 calls @stage_0, which does not fit or is not there"]
    early = dataclasses.replace(PLAN, steps=(Free(("w",)), *PLAN.steps), results=("d", "x"))
    assert list(find_plan_problems(early, [stage])) == [
        "step 2 takes 'w', which is not there",
        "result 'x' is not there at the end",
    ]
