# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A few random programs, the same each time, compiled beside eager; ``make fuzz`` runs thousands of others.

Beside them: what the fuzzer itself must not miss, and programs that it found to be compiled wrongly once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import run as fuzz
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from judge import Run, Verdict, compare, judge, shake, shrink
from judge import run as run_program
from programs import Input, Program
from rounding import Rounded
from strategies import programs
from torch import Tensor

import retrograd

IDS = Input("ids", (3,), "int64", indices=True)


# A seed whose programs, of 26 and 22 statements, compile at the first try but for an op that torch-mlir does not lower:
# what no flags compile is in test_first_call.py, test_islands.py and test_bisect.py, on smaller programs.
@pytest.mark.long
@seed(1)
@settings(
    max_examples=2,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(programs(least=14))
def test_random_programs(program: Program) -> None:
    verdict = judge(program)
    assert verdict.kind in ("right", "refused", "no program"), f"{verdict}\n{program.describe()}"


def program(
    *statements: str, shape: tuple[int, ...] = (3, 4, 5), dtype: str = "float32", layout: str = "contiguous"
) -> Program:
    """A program of one argument that requires grad; its last value is what it returns."""
    inputs = (Input("x", shape, dtype, layout, requires_grad=True), IDS)
    return Program(inputs, statements, (statements[-1].partition(" = ")[0],), (True,), seed=0)


@pytest.mark.parametrize(
    "found",
    [
        program("v0 = torch.gather(x, -2, torch.zeros_like(x, dtype=torch.int64) + 1)"),
        program("v0 = torch.scatter_add(x, -3, torch.zeros_like(x, dtype=torch.int64) + 1, x * 0.5)"),
    ],
    ids=["gather_axis_from_the_end", "scatter_add_axis_from_the_end"],
)
def test_programs_that_were_wrong_once(found: Program) -> None:
    verdict = judge(found)
    assert verdict.kind == "right", verdict


def test_refusals_are_told_by_the_op() -> None:
    verdict = judge(program("v0 = torch.nonzero(x) * x.sum()"))
    assert verdict.kind == "refused"
    assert "CaptureError" in verdict.reason


def test_arguments_that_a_call_refuses_are_refused() -> None:
    inputs = (Input("x", (3,), "float32", requires_grad=True), Input("y", (2, 3), "float32", "expanded"))
    verdict = judge(Program(inputs, ("y[0].mul_(2)", "v0 = x * y"), ("v0",), (True,), seed=0))
    assert verdict.kind == "refused"
    assert "ArgumentError" in verdict.reason


def test_what_eager_refuses_is_no_program() -> None:
    assert judge(program("v0 = x.log()")).kind == "no program"
    assert judge(program("v0 = torch.sigmoid(x)", "v0.mul_(2)", "v0 = v0 * 1")).kind == "no program"


def test_a_difference_is_seen() -> None:
    right = {"output 0": torch.ones(4), "gradient of x": torch.full((3,), 2.0), "gradient of y": None}
    precise = {name: None if value is None else value.double() for name, value in right.items()}
    zero = {**right, "gradient of y": torch.zeros(2)}
    assert compare(Run(zero), Run(right), Run(precise)) == []
    for name, wrong in (
        ("output 0", torch.tensor([1.0, 1.0, 1.0, 1.001])),
        ("output 0", torch.ones(4, dtype=torch.float64)),
        ("gradient of x", None),
        ("gradient of x", torch.full((3,), 2.001)),
        ("gradient of x", torch.full((3,), float("nan"))),
        ("gradient of y", torch.ones(2)),
    ):
        assert [p.partition(":")[0] for p in compare(Run({**zero, name: wrong}), Run(right), Run(precise))] == [name]


def test_a_gradient_that_is_nothing_but_rounding_is_right() -> None:
    def gradient(value: float) -> Run:
        return Run({"gradient of x": torch.full((9,), value)})

    precise = Run({"gradient of x": torch.zeros(9, dtype=torch.float64)})
    assert compare(gradient(2e-8), gradient(0.0), precise) == []
    assert compare(gradient(2e-6), gradient(0.0), precise)


CANCELLING = "v0 = F.layer_norm(x, [5]) @ torch.full_like(x, 0.3).mT"
# Of an expanded argument, whose rows are one in memory, so that arguments that are off are off by the same.
ZERO = ("v0 = F.log_softmax(x, 0)", "v1 = F.layer_norm(x[0], [5]) @ v0.mT")
EQUAL_ROWS = "v0 = F.layer_norm(F.log_softmax(x, 0) * 3, [5]).sum(-1)"


@pytest.mark.parametrize(
    ("chosen", "known"),
    [
        (program(CANCELLING, "v1 = torch.argmax(v0, -2) + x[..., 0] * 0"), True),
        (program(EQUAL_ROWS, "v1 = torch.argmax(v0, 0) + x[0, :, 0] * 0", layout="expanded"), True),
        (program("v0 = torch.argmax(x, -1) + x[..., 0] * 0"), False),
        (program("v0 = torch.argmax(x.exp(), 0) + x[0] * 0", layout="expanded"), False),
    ],
    ids=["sum_of_zero", "equal_rows", "numbers", "first_of_equal_numbers"],
)
def test_what_rounding_decides_is_no_difference(chosen: Program, known: bool) -> None:
    """Which of numbers that cancel is the largest; but not how large other numbers are, nor which of equal ones is
    chosen."""
    run, reference = (run_program(chosen, chosen.function(), chosen.arguments()) for _ in range(2))
    output = run.values["output 0"]
    assert output is not None
    # Rows of the expanded argument have the same places throughout: another place than theirs.
    run.values["output 0"] = (output + 1).remainder(3) if torch.equal(output, output.roll(1)) else output.roll(1)
    shaken = [shake(chosen, times) for times in range(1, 5)]
    assert compare(run, reference, reference)
    assert (compare(run, reference, reference, shaken) == []) is known


@pytest.mark.parametrize(("factor", "named"), [(1.0, []), (1.001, ["output 1", "gradient of x"])])
def test_an_error_beside_what_rounding_decides(
    monkeypatch: pytest.MonkeyPatch, factor: float, named: list[str]
) -> None:
    """What rounding reaches is excused, and no other output or gradient of the same program."""
    inputs = (Input("x", (3, 4, 5), "float32", "expanded", requires_grad=True),)
    chosen = Program(inputs, (*ZERO, "v2 = (x * 0.5).sin()"), ("v1", "v2"), (False, True), seed=0)

    def compile_backward(function: Callable[..., tuple[Tensor, ...]], *_given: Any, **_options: Any) -> Any:
        def step(x: Tensor) -> tuple[Tensor, ...]:
            noise, sine = function(x)
            return noise + 1e-7, sine * factor

        return step

    monkeypatch.setattr(retrograd, "compile_backward", compile_backward)
    verdict = judge(chosen)
    assert verdict.kind == ("wrong" if named else "right")
    assert [p.partition(":")[0] for p in verdict.reason.split("; ") if p] == ["output 1", "gradient of x"] * (
        factor != 1
    )


def multiplied(x: Tensor, seed: int) -> Tensor:
    with Rounded(seed):
        return x * 1.1


def test_rounding_moves_what_is_computed_and_nothing_else() -> None:
    def taken(x: Tensor) -> list[Tensor]:
        return [
            x.clone(),
            x[1:],
            torch.where(x > 0.5, x, 0.25),
            x.amax(),
            x.clamp(max=0.4),
            x.sign(),
            torch.cat((x, x)),
        ]

    x = torch.tensor([0.3, 0.3, 0.7, 2.0], dtype=torch.float64)
    product, rows = x * 1.1, x.expand(8, 4).cumsum(0)
    with Rounded(0):
        exact, rounded, columns = taken(x), x * 1.1, x.expand(8, 4).cumsum(0)
    assert all(map(torch.equal, exact, taken(x)))
    assert rounded[0] == rounded[1]
    torch.testing.assert_close(rounded, product, rtol=1e-15, atol=0.0)
    # Half a unit seldom moves a number that is small for its exponent.
    assert any(not torch.equal(multiplied(x, seed), product) for seed in range(10))
    assert not torch.equal(columns[:, 0], columns[:, 1])
    # Whole numbers are what they are.
    assert torch.equal(columns[:, 3], rows[:, 3])


def test_a_sixth_is_precise() -> None:
    """PyTorch's gradient of hardsigmoid is a sixth as f32 has it, in f64 too."""
    chosen = program("v0 = F.hardsigmoid(x)", dtype="float64")
    precise, eager = (
        run_program(chosen, chosen.function(precise=precise), chosen.arguments()).values["gradient of x"]
        for precise in (True, False)
    )
    assert precise is not None and eager is not None
    assert 1e-8 < float((eager - precise).norm() / precise.norm()) < 1e-7


def test_a_program_shrinks_to_what_goes_wrong() -> None:
    whole = Program(
        (Input("x", (3,), "float32"),),
        ("v0 = x + 1", "v1 = v0.tanh()", "v2 = x.sin()", "v3 = v2 * v0", "v4 = x * 2"),
        ("v1", "v3", "v4"),
        (True, True, True),
        seed=0,
    )

    def judged(candidate: Program) -> Verdict:
        try:
            candidate.function()(torch.ones(3))
        except NameError:
            return Verdict("no program")
        return Verdict("wrong" if "sin" in candidate.source() else "right")

    small = shrink(whole, "wrong", judged)
    assert small.outputs == ("v1",) or small.outputs == ("v3",)
    assert "v2 = x.sin()" in small.statements
    assert "v4 = x * 2" not in small.statements


def test_arguments_are_of_their_layout_and_the_same_each_time() -> None:
    layouts = ("contiguous", "transposed", "strided", "expanded", "offset")
    made = Program(tuple(Input(name, (2, 3), "float64", name, True) for name in layouts), (), (), (), seed=7)
    first, second = made.arguments(), made.arguments()
    assert all(map(torch.equal, first, second))
    assert [t.stride() for t in first] == [(3, 1), (1, 2), (6, 2), (0, 1), (3, 1)]
    assert first[4].storage_offset() == 3
    assert all(t.is_leaf and t.requires_grad and t.shape == (2, 3) for t in first)


def test_a_process_that_ends_is_a_crash() -> None:
    lines = [{"program": "first"}, {"kind": "right", "reason": "", "report": ""}, {"program": "second"}]
    child = f"import os; [print(l) for l in {[json.dumps(line) for line in lines]!r}]"
    child += "; import sys; sys.stdout.flush(); os.abort()"
    tally = fuzz.Tally()
    for event in fuzz.run_batch([sys.executable, "-c", child]):
        tally.add(*event)
    assert tally.kinds == {"right": 1, "crashed": 1}
    assert tally.bad == ["# crashed: exit status -6\nsecond"]
