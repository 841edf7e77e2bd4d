# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Plans as they run: what is called with what, what is freed when, what is refused. No stage here is compiled."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from retrograd.contract.plan import StagePlan
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.steps import collectives, stage_executor
from retrograd.runtime.steps.stage_executor import Island, StageExecutor

NO_PROGRAM: Any = None


def double(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor * 2 for tensor in tensors]


def island(number: int, arguments: Sequence[str], results: Sequence[str]) -> dict[str, Any]:
    return {"step": "run_island", "island": number, "arguments": list(arguments), "results": list(results), "bytes": []}


def executor(
    arguments: str, steps: Sequence[dict[str, Any]], results: str, islands: Sequence[Island] = (double,)
) -> StageExecutor:
    plan = {"arguments": list(arguments), "steps": list(steps), "results": list(results)}
    return StageExecutor(StagePlan.from_dict(plan), NO_PROGRAM, [], islands)


class Calls:
    """Keeps what it is called with. ``collected`` is what collectives give, where they do not run."""

    def __init__(self, collected: Mapping[str, torch.Tensor] | None = None) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._collected = collected

    @property
    def collected(self) -> Mapping[str, torch.Tensor] | None:
        return self._collected

    def call_hook(self, kind: str, hook: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.log.append((kind, hook, *[v.item() for v in values]))
        return [value + 1 for value in values]

    def call_backward(self, function: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.log.append(("backward", function, *[v.item() for v in values]))
        return values

    def accumulate_grad(self, param: int, gradient: torch.Tensor, owned: bool) -> None:
        self.log.append(("accumulate", param, gradient.item(), owned))

    def final_callbacks(self) -> None:
        self.log.append(("callbacks",))


def test_steps_run_in_order_on_their_values() -> None:
    steps = [
        island(0, "ab", ["c", "", "d"]),
        {"step": "call_hook", "kind": "pre", "hook": 3, "arguments": ["c"], "results": ["e"]},
        {"step": "call_backward", "function": 1, "arguments": ["e", "d"], "results": ["", "f"]},
        {"step": "accumulate_grad", "param": 2, "gradient": "e"},
        {"step": "update_input", "target": "a", "value": "f"},
        {"step": "final_callbacks"},
    ]
    run = executor("ab", steps, "eb", [lambda given: [given[0] * 2, given[0], given[1] * 3]])
    a, b, calls = torch.tensor(5.0), torch.tensor(7.0), Calls()
    e, same = run.run([a, b], calls)
    assert calls.log == [("pre", 3, 10.0), ("backward", 1, 11.0, 21.0), ("accumulate", 2, 11.0, False), ("callbacks",)]
    assert (e.item(), a.item()) == (11.0, 21.0)
    assert same is b


def test_inputs_that_are_updated_one_after_the_other_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so an input that has another's value of before, nor one that is written twice."""
    calls = []
    together = torch._foreach_copy_

    def counted(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        calls.append(len(targets))
        together(targets, values)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    pairs = [("a", "e"), ("b", "f"), ("c", "g"), ("d", "a"), ("a", "e"), ("b", "g")]
    updates = [{"step": "update_input", "target": target, "value": value} for target, value in pairs]
    steps = [island(0, "ab", "efg"), *updates, {"step": "free", "values": ["e"]}]
    run = executor("abcd", steps, "g", [lambda given: [given[0] + 10, given[1] + 20, given[1] * 0 + 30]])
    for _ in range(2):
        arguments = [torch.tensor([float(n)]) for n in range(3)] + [torch.tensor([7])]
        a, b, c, d = arguments
        run.run(arguments, Calls())
        # The last two of the first three are of values that are given before.
        assert [t.item() for t in (a, b, c, d)] == [10.0, 30.0, 30.0, 10]
    assert calls == [3, 2] * 2


def test_values_live_until_they_are_freed() -> None:
    alive: list[list[bool]] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def look(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        alive.append([ref() is not None for ref in made])
        made.append(weakref.ref(result := given[0] * 2))
        return [result]

    steps = [
        island(0, "a", "b"),
        {"step": "free", "values": ["a"]},
        island(0, "b", "c"),
        {"step": "free", "values": ["b"]},
        island(0, "c", "d"),
        {"step": "free", "values": ["c"]},
    ]
    arguments = [torch.ones(2)]
    made.append(weakref.ref(arguments[0]))
    (result,) = executor("a", steps, "d", [look]).run(arguments)
    assert arguments == [] and result.tolist() == [8.0, 8.0]
    assert alive == [[True], [False, True], [False, False, True]]


@pytest.mark.parametrize(
    ("steps", "results"),
    [
        ([island(0, "x", "b")], "b"),
        ([island(0, "a", "b"), {"step": "free", "values": ["b"]}, island(0, "b", "c")], "c"),
        ([{"step": "free", "values": ["a"]}], "a"),
        ([{"step": "accumulate_grad", "param": 0, "gradient": "x"}], ""),
        ([{"step": "update_input", "target": "a", "value": "x"}], ""),
    ],
)
def test_a_plan_that_takes_what_is_not_there_is_refused(steps: list[dict[str, Any]], results: str) -> None:
    with pytest.raises(ExecutionError, match=r"takes value '.', which is not there"):
        executor("a", steps, results)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ExecutionError, match="runs island 1, and there are 1"):
        executor("a", [island(1, "a", "b")], "b")
    with pytest.raises(ExecutionError, match="calls @stage_0, which the program does not have"):
        executor("a", [{"step": "run_stage", "function": "stage_0", "arguments": ["a"], "results": ["b"]}], "b")
    with pytest.raises(ValueError, match="no stage plan: 'jump'"):
        executor("a", [{"step": "jump"}], "a")


def test_a_gradient_is_handed_over_where_nobody_else_has_it() -> None:
    hook = {"step": "call_hook", "kind": "tensor_pre", "hook": 0, "arguments": ["b"], "results": ["c"]}
    post = {"step": "call_hook", "kind": "post", "hook": 1, "arguments": ["c"], "results": []}
    add = {"step": "accumulate_grad", "param": 0, "gradient": "c"}

    def owned(*steps: dict[str, Any], kept: list[torch.Tensor] | None = None) -> list[Any]:
        class Keeping(Calls):
            def call_hook(self, kind: str, hook: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                results = super().call_hook(kind, hook, values)
                if kept is not None:
                    kept.extend(results)
                return results

        calls = Keeping()
        executor("a", [island(0, "a", "b"), *steps], "").run([torch.ones(())], calls)
        return [entry[3] for entry in calls.log if entry[0] == "accumulate"]

    assert owned(hook, add) == [True]
    assert owned(hook, add, kept=[]) == [False]
    assert owned(hook, add, post) == [True]
    # Another parameter takes the same gradient: the last one has it.
    assert owned(hook, add, {**add, "param": 1}) == [False, True]
    assert owned(hook, add, island(0, "c", "d")) == [False]


START: dict[str, Any] = {
    "step": "start_collective",
    "collective": "all_reduce",
    "reduction": "sum",
    "size": 0,
    "group": "0",
}


def test_collectives_start_as_one_and_are_waited_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Ops:
        def all_reduce_coalesced(self, tensors: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
            log.append(("start", [t.tolist() for t in tensors], rest))
            return [t * 2 for t in tensors]

        def wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
            log.append(("wait", tensor.tolist()))
            return tensor

    monkeypatch.setattr(torch.ops, "_c10d_functional", Ops())
    steps = [
        {**START, "arguments": ["a", "b"], "results": ["c", "d"], "bytes": [8, 8]},
        island(0, "a", "e"),
        {"step": "wait_collective", "arguments": ["d"], "results": ["f"]},
        {"step": "wait_collective", "arguments": ["c"], "results": ["g"]},
    ]
    a, b = torch.arange(4.0)[::2], torch.ones(2)
    f, g = executor("ab", steps, "fg").run([a, b])
    assert log == [
        ("start", [[0.0, 2.0], [1.0, 1.0]], ("sum", "0")),
        ("wait", [2.0, 2.0]),
        ("wait", [0.0, 4.0]),
    ]
    assert (f.tolist(), g.tolist()) == ([2.0, 2.0], [0.0, 4.0])


def test_what_collectives_gave_is_given_again_where_they_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_c10d_functional", None)
    steps = [
        {**START, "arguments": ["a"], "results": ["c"], "bytes": [4]},
        {"step": "wait_collective", "arguments": ["c"], "results": ["d"]},
    ]
    known = torch.tensor(7.0)
    (d,) = executor("a", steps, "d").run([torch.ones(())], Calls({"d": known}))
    assert d.item() == 7.0 and d is not known
    with pytest.raises(ExecutionError, match="what the collective gave that 'd' is was not recorded"):
        executor("a", steps, "d").run([torch.ones(())], Calls({"e": known}))


def test_a_torch_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_c10d_functional", object())
    steps = [{**START, "arguments": ["a"], "results": ["c"], "bytes": [4]}]
    with pytest.raises(ExecutionError, match=r"no all_reduce of torch\.distributed"):
        executor("a", steps, "").run([torch.ones(())])


def test_processes_agree_on_what_they_start_otherwise_than_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(c10d, "_resolve_process_group", lambda name: name)
    monkeypatch.setattr(c10d, "get_process_group_ranks", lambda group: [0, 1] if group == "0" else [0])
    monkeypatch.setattr(stage_executor, "SECONDS_TO_AGREE", 0.1)
    steps = [{**START, "arguments": ["a"], "results": ["c"], "bytes": [4]}]

    def ask(rank: int, problem: str | None = None, group: str = "0") -> str | None:
        # Each process counts for itself.
        monkeypatch.setattr(collectives, "counts", counts[rank])
        monkeypatch.setattr(c10d, "get_rank", lambda: rank)
        run = executor("a", [*steps, {**steps[0], "group": group, "results": ["d"]}], "")
        run.is_rearranged = True
        return run.find_disagreement(problem)

    counts = [Counter[str](), Counter[str]()]
    # The first asks alone; the second comes late, and finds what was said then.
    alone = "process 1 compiled nothing alike within 0 seconds"
    assert [ask(0), ask(1)] == [alone, alone]
    assert ask(0, "it is wrong") == "it is wrong"
    assert ask(1) == "process 0 does not run it compiled"
    assert "groups of other processes" in (ask(0, group="1") or "")
    # What starts as captured is nobody else's business.
    assert executor("a", steps, "").find_disagreement("it is wrong") == "it is wrong"
    assert executor("a", steps, "").find_disagreement(None) is None
