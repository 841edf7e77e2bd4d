# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The registry, the four spellings of a pass's name, and options from text."""

import sys
import types
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import pytest

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.infra import registry
from retrograd.pipelines.infra.passes import ModulePass, PassFailure, PassOptionError
from retrograd.pipelines.infra.registry import PASSES, load_pass, registered_passes

LIT = Path(__file__).parents[1] / "lit"


class BwdSample(ModulePass):
    description = "Has an option of each type"

    policy: Literal["default", "min-cut"] = field(default="default", metadata={"help": "how to choose"})
    memory_budget: float | None = None
    rounds: int = 3
    keep: bool = False
    label: str = ""


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> str:
    module: Any = types.ModuleType("sample_passes")
    module.BwdSample = BwdSample
    module.NoPass = str
    monkeypatch.setitem(sys.modules, "sample_passes", module)
    monkeypatch.setitem(PASSES, "bwd-sample", "sample_passes:BwdSample")
    return "bwd-sample"


@pytest.mark.parametrize("name", registered_passes())
def test_four_spellings(name: str) -> None:
    module, _, attribute = PASSES[name].partition(":")
    folder = "conversions" if name.startswith("convert-") else "transforms"
    room, _, file = module.rpartition(".")
    rooms = [folder] if folder == "conversions" else [f"{folder}.{level}" for level in ("torch", "linalg", "device")]
    assert room in [f"retrograd.pipelines.{known}" for known in rooms]
    assert file == name.replace("-", "_")
    assert attribute == "".join(word.capitalize() for word in name.split("-"))
    assert load_pass(name).name == name
    assert load_pass(name).description
    assert (LIT / folder / f"{name}.mlir").is_file()
    assert (LIT / folder / f"{name}-invalid.mlir").is_file()


@pytest.mark.parametrize("name", registered_passes())
def test_every_option_has_a_default_and_a_help_text(name: str) -> None:
    pass_ = load_pass(name)
    assert pass_.from_options({}) == pass_()
    assert all(option.help for option in pass_.options())


def test_no_pass_is_left_out() -> None:
    pipelines = Path(registry.__file__).parents[1]
    files = [*pipelines.glob("transforms/*/bwd_*.py"), *pipelines.glob("conversions/convert_*.py")]
    assert {file.stem.replace("_", "-") for file in files} == set(registered_passes())


def test_load_pass(sample: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_pass(sample) is BwdSample
    assert sample in registered_passes()
    with pytest.raises(KeyError):
        load_pass("bwd-nothing")
    monkeypatch.setitem(PASSES, "bwd-lost", "sample_passes:Lost")
    with pytest.raises(ImportError, match=r"sample_passes:Lost, which does not exist"):
        load_pass("bwd-lost")
    monkeypatch.setitem(PASSES, "bwd-other", "sample_passes:BwdSample")
    monkeypatch.setitem(PASSES, "bwd-no-pass", "sample_passes:NoPass")
    for wrong in ("bwd-other", "bwd-no-pass"):
        with pytest.raises(TypeError, match="not a ModulePass of that name"):
            load_pass(wrong)


def test_options_become_values_of_their_types() -> None:
    assert BwdSample.from_options({}) == BwdSample()
    given = {"policy": "min-cut", "memory-budget": "0.5", "rounds": "7", "keep": "true", "label": "a b"}
    assert BwdSample.from_options(given) == BwdSample("min-cut", 0.5, 7, True, "a b")
    assert BwdSample.from_options({"memory-budget": "none"}).memory_budget is None
    assert BwdSample.from_options({"keep": "0"}).keep is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "default"}, "bwd-sample has no option 'polcy'"),
        ({"memory_budget": "1"}, "bwd-sample has no option 'memory_budget'"),
        ({"policy": "best"}, "expected one of default, min-cut, found 'best'"),
        ({"rounds": "3.5"}, "option 'rounds' of bwd-sample: expected int, found '3.5'"),
        ({"memory-budget": "half"}, "expected float, found 'half'"),
        ({"keep": "maybe"}, "expected true or false, found 'maybe'"),
    ],
)
def test_bad_options_list_the_good_ones(options: dict[str, str], message: str) -> None:
    with pytest.raises(PassOptionError) as caught:
        BwdSample.from_options(options)
    assert message in str(caught.value)
    listed = "policy=<default|min-cut>, memory-budget=<float|none>, rounds=<int>, keep=<bool>, label=<str>"
    assert f"its options are {listed}" in str(caught.value)


def test_options_describe_themselves() -> None:
    policy, budget, rounds, keep, _ = BwdSample.options()
    assert (policy.default, policy.help) == ("default", "how to choose")
    assert (budget.default, rounds.default, keep.default) == ("none", "3", "false")


def test_pass_failure_keeps_no_op() -> None:
    context = make_context()
    module = ir.Module.parse("func.func private @f()", context)
    failure = PassFailure(module.body.operations[0], "it is private", "make it public")
    assert str(failure) == "it is private; make it public"
    assert failure.op_name == "func.func"
    assert not any(isinstance(value, ir.Operation | ir.OpView) for value in vars(failure).values())
