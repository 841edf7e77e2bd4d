# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A share of the corpus of programs that others wrote, and what its harness makes of good and of bad ones."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from corpus_case import Program, Sample, mean_square, on_device
from corpus_configured import CLASSES
from corpus_doors import Opened
from corpus_examine import Verdict, check_reference, compare_steps, examine
from corpus_page import geometric_mean, write
from corpus_programs import PROGRAMS, QUICK
from corpus_run import Limits, read_verdicts, share_processors, try_apart
from corpus_shrunk import NoProgramError, check_small, shrink
from corpus_steps import Steps
from corpus_unlisted import as_program, find_unlisted
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]


def test_a_program_of_others_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported what it is made of; those of a tenth are each in one of their own."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    name, door = "GPT2LMHeadModel", "compile_backward"
    assert door in QUICK[name]
    verdict = examine(PROGRAMS[name], door, 0)
    assert (verdict.outcome, verdict.islands) == ("right", []), verdict.reason


@pytest.mark.long
def test_a_share_is_right(tmp_path: Path) -> None:
    """A tenth of the corpus; `make models` tries all of it, and times it."""
    results = tmp_path / "verdicts.jsonl"
    run_alone("tests/corpus/corpus_run.py", "--quick", "--repeats", 0, "--results", results)
    verdicts = read_verdicts(results)
    assert set(verdicts) == {(name, door) for name, doors in QUICK.items() for door in doors}
    assert [(v.program, v.door, v.reason) for v in verdicts.values() if v.outcome != "right" or v.islands] == []


def run_alone(*command: object) -> None:
    """In a Python of its own: what forks must have no threads, and other tests have left some here."""
    result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_corpus_is_large_and_named() -> None:
    assert len(PROGRAMS) >= 60
    assert {program.family for program in PROGRAMS.values()} == {"transformers", "timm", "torch.nn"}
    assert set(QUICK) <= set(PROGRAMS)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("CTRLConfig", ("n_embd", 32)),
        ("Gemma3Config", ("text_config.num_hidden_layers", 2)),
        ("ConvNextConfig", ("depths", [1, 1, 1, 1])),
    ],
)
def test_any_configuration_is_shrunk(name: str, size: tuple[str, Any]) -> None:
    config = shrink(getattr(transformers, name))
    assert operator.attrgetter(size[0])(config) == size[1]
    assert config.num_labels == CLASSES
    assert not [v for n, v in vars(config).items() if "drop" in n and isinstance(v, float) and v]


def test_what_nobody_chose_is_on_no_list() -> None:
    programs = find_unlisted()
    assert len(programs) > 600
    assert not {name.partition(" ")[0] for name in PROGRAMS if not name.startswith("timm")} & set(programs)
    sample = programs["CTRLLMHeadModel"].make()
    assert (sum(p.numel() for p in sample.model.parameters()) < 2e6, sample.random) == (True, False)
    with pytest.raises(NoProgramError, match="parameters are too many"):
        check_small(nn.Linear(11_000, 10_000, device="meta"))
    with pytest.raises(NoProgramError, match="mat1 and mat2"):
        as_program(Layers(), lambda turn: {"x": torch.ones(2, 3)})


def test_a_program_that_draws_numbers_is_known() -> None:
    drawing = nn.Sequential(nn.Linear(4, 4), nn.RReLU())
    inputs = lambda turn: {"input": torch.full((2, 4), -1.0)}  # noqa: E731
    assert as_program(drawing, inputs).random
    assert not as_program(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), inputs).random


def test_a_program_goes_to_a_device_whole() -> None:
    build = lambda: Sample(nn.BatchNorm1d(3), lambda turn: {"input": torch.ones(2, 3) + turn}, mean_square)  # noqa: E731
    program = Program("norm", "torch.nn", build)
    here, there = program.make(), on_device(program, "meta").make()
    assert all(t.is_meta for t in [*there.model.parameters(), *there.model.buffers(), *there.inputs(0).values()])
    output = {"a": torch.ones(2, 3, requires_grad=True)}
    assert torch.equal(there.loss(output), here.loss(output))


def test_jobs_share_no_processor() -> None:
    assert share_processors([0, 1, 2, 5, 6, 7, 8], 3) == [[0, 1], [2, 5], [6, 7]]
    with pytest.raises(ValueError, match="2 jobs have no processor each: there are 1"):
        share_processors([4], 2)


class Layers(nn.Module):
    """Two layers and a batch norm, whose buffers a step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def sample() -> Sample:
    return Sample(Layers(), lambda turn: {"x": torch.full((5, 4), 0.1 * turn) + torch.eye(5, 4)}, mean_square)


def test_a_step_is_the_same_each_time_and_other_at_another_turn() -> None:
    steps = Steps(sample())
    first, again, other = (steps.eager(turn).values for turn in (0, 0, 1))
    assert all(torch.equal(value, again[name]) for name, value in first.items() if value is not None)  # type: ignore[arg-type]
    assert not torch.equal(first["gradient of first.weight"], other["gradient of first.weight"])  # type: ignore[arg-type]


def test_float64_is_a_reference_for_eager() -> None:
    steps = Steps(sample())
    eager, precise = steps.eager(1), steps.precise(1)
    check_reference(eager, precise)
    assert {v.dtype for v in precise.values.values() if v is not None and v.is_floating_point()} == {torch.float64}
    with pytest.raises(ValueError, match="eager is off from float64"):
        check_reference(steps.eager(2), precise)


class Asked(nn.Module):
    """Asks for float32 whatever it is given, as norms of language models do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x.float() + torch.ones(4, dtype=torch.float32), -1, dtype=torch.float32)


def test_float64_is_kept_where_a_model_asks_for_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Asked())
    steps = Steps(Sample(model, lambda turn: {"input": torch.eye(4)}, mean_square))
    loss = steps.precise(0).values["loss"]
    assert loss is not None
    assert loss.dtype == torch.float64
    assert float(loss) != float(loss.float())


@pytest.mark.parametrize("broken", [None, "gradient", "buffer", "frozen"])
def test_what_is_wrong_is_found(broken: str | None) -> None:
    """A gradient that is a little off, a buffer that is not written, and a value that is frozen at the first turn."""
    given = sample()
    steps = Steps(given)
    frozen = given.model.second.weight.detach().clone()  # type: ignore[union-attr, operator]

    def call(x: Tensor) -> Tensor:
        model: Any = given.model
        if broken == "buffer":
            normed = nn.functional.batch_norm(model.first(x), None, None, model.norm.weight, model.norm.bias, True)
            return model.second(torch.tanh(normed))  # type: ignore[no-any-return]
        if broken == "frozen":
            return model(x) + (x @ torch.ones(4, 8)) @ (frozen - model.second.weight.detach()).t()  # type: ignore[no-any-return]
        out = model(x)
        if broken == "gradient":
            out.register_hook(lambda grad: grad * (1 + 1e-3))
        return out  # type: ignore[no-any-return]

    problems = compare_steps(steps, Opened(call, 0.0, 0.0))
    assert bool(problems) == (broken is not None), problems
    if broken == "frozen":
        assert problems[0].startswith("turn 1: ")


@pytest.mark.long
def test_crashes_and_hangs_are_verdicts(tmp_path: Path) -> None:
    run_alone(
        "-c",
        f"import sys, pathlib; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        f"import test_corpus; test_corpus.check_verdicts(pathlib.Path({str(tmp_path)!r}))",
    )


def check_verdicts(folder: Path) -> None:
    """The body of the test above."""

    def killed() -> Sample:
        os.kill(os.getpid(), signal.SIGKILL)
        return sample()

    def hanging() -> Sample:
        time.sleep(100)
        return sample()

    def greedy() -> Sample:
        bytearray(60 << 30)
        return sample()

    found = []
    for build, seconds in ((killed, 60.0), (hanging, 0.5), (greedy, 60.0)):
        program = Program(build.__name__, "tests", build)
        found.append(try_apart(program, "compile_backward", 0, Limits(seconds, 16 << 30), folder / "log.txt"))
    assert [v.outcome for v in found] == ["crashed"] * 3
    assert ["SIGKILL" in found[0].reason, "within 0 seconds" in found[1].reason] == [True, True]
    assert "MemoryError" in found[2].reason


def test_the_page(tmp_path: Path) -> None:
    good = {
        "compile_seconds": 8.0,
        "compile_cpu": 6.0,
        "step_ms": 1.0,
        "eager_ms": 2.0,
        "ratio": 0.5,
        "backward_ratio": 0.6,
    }
    verdicts = [
        Verdict("a", "timm", "compile_backward", "right", **good),  # type: ignore[arg-type]
        Verdict("a", "timm", "inductor", "right", **{**good, "compile_seconds": 16.0, "ratio": 0.7}),  # type: ignore[arg-type]
        Verdict("b", "torch.nn", "compile_backward", "refused", "CaptureError: at /x/site-packages/b.py, for a | b"),
    ]
    write({(v.program, v.door): v for v in verdicts}, tmp_path / "page.md", {"date": "today"}, "make models", 3)
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| `compile_backward` | 1 | 0 | 0 | 1 | 0 | 0.50 (0.50) | 0.60 (0.60) | 0.50 | 1.00 | 8 |" in text
    assert "| a | 2.0 | right, 0.50, 8 s | - | - | right, 0.70, 16 s | - |" in text
    assert "| b | - | **refused** [1] | - | - | - | - |" in text
    assert "1. b, `compile_backward`: CaptureError: at b.py, for a \\| b" in text
    assert "A part of the corpus: 2 of 3 programs." in text
    write({(v.program, v.door): v for v in verdicts}, tmp_path / "page.md", {}, "make models", 2, timed=False)
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| a | - | right, 6 s | - | - | right, 6 s | - |" in text
    assert "The machine had other work" in text
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
