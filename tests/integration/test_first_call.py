# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The first call checks itself: what is wrong is never used, and what is right is not called wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from executables import compile_once
from torch import Tensor, nn

import retrograd
from retrograd import bisection, build, built
from retrograd.first_calls import Checks
from retrograd.frontend.verification import reference_graph
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.stages import staged
from retrograd.pipelines.toolchain.lowering import lower_to_linalg

Change = Callable[[Tensor], Tensor]
Call = Callable[[Sequence[Tensor]], Sequence[Tensor]]
PATIENCE = 300.0


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What these tests compile is wrong on purpose: nobody else may find it."""
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(staged, "compile_executable", compile_once)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Checks]:
    """The checks of all that a test compiles."""
    made: list[Checks] = []

    def make(*args: Any) -> Checks:
        made.append(Checks(*args))
        return made[-1]

    monkeypatch.setattr(build, "Checks", make)
    return made


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Change], None]:
    """Has functions of a name give something else, but for those that a repair compiles."""

    def change(name: str, wrong: Change) -> None:
        original = built.Build._call

        def call_of(self: built.Build, function: str) -> Call:
            call = original(self, function)
            if function != name or self.checks is None:
                return call
            return lambda tensors: [wrong(t) if t.is_floating_point() else t for t in call(tensors)]

        monkeypatch.setattr(built.Build, "_call", call_of)

    return change


@pytest.fixture
def miscompile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Lets every lowering put one op in place of another."""

    def inject(right: str, wrong: str) -> None:
        def lower(source: bytes, target: Target, **options: Any) -> str:
            return lower_to_linalg(source, target, **options).replace(right, wrong)

        monkeypatch.setattr(staged, "lower_to_linalg", lower)
        monkeypatch.setattr(bisection, "lower_to_linalg", lower)

    return inject


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), torch.randn(5, 6)


class Weights(nn.Module):
    """A weight for each column."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, columns))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def step_of(call: Callable[..., Any], model: nn.Module, *args: Tensor) -> list[Tensor]:
    """The output and the gradients of a step; ``.grad`` is empty afterwards."""
    output = call(*args)
    output.square().sum().backward()
    given = [output.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    for p in model.parameters():
        p.grad = None
    return given


def assert_steps_agree(call: Callable[..., Any], model: nn.Module, *args: Tensor) -> None:
    ours, theirs = step_of(call, model, *args), step_of(model, model, *args)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def wait(checks: Sequence[Checks]) -> None:
    """Until all repairs have come to their end."""
    for call in (call for check in checks for call in check.calls):
        if call._repair is not None:
            assert cast(Any, call._repair)._work._finished.wait(PATIENCE)


def states(step: retrograd.CompiledBackward) -> str:
    return "; ".join(step.explain().to_dict()["verification"])


# -- What is wrong ---------------------------------------------------------------------------------------------------

WRONG: dict[str, Change] = {
    "values": lambda t: t * 1.01,
    "nan": lambda t: t * float("nan"),
    "one element": lambda t: torch.cat([t.flatten()[:1] + 1, t.flatten()[1:]]).view(t.shape),
    "transposed": lambda t: t.t().contiguous() if t.dim() == 2 and t.shape[0] == t.shape[1] else t,
}


@pytest.mark.long_cases("values-forward", "one element-forward", "nan-backward", "transposed-forward")
@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_values_are_never_used(
    half: str, wrong: Change, plant: Callable[[str, Change], None], checks: list[Checks], tmp_path: Path
) -> None:
    if half == "forward" and wrong is WRONG["transposed"]:
        pytest.skip("what a forward gives here is not square")
    plant(half, wrong)
    model, x = make()
    step = retrograd.compile_backward(model, (x,), cache=False)
    with pytest.warns(retrograd.MiscompiledWarning, match=f"@{half} gives wrong values, and is not used: .*aten"):
        assert_steps_agree(step, model, x)
    assert f"@{half}: wrong, runs in torch" in states(step)
    with pytest.raises(retrograd.ArtifactError, match="gives wrong values"):
        step.save(tmp_path / "wrong.vmfb")
    wait(checks)
    with pytest.warns(retrograd.MiscompiledWarning, match="instead, which is right"):
        assert_steps_agree(step, model, x)
    assert "compiled otherwise since" in states(step)
    assert_steps_agree(step, model, x)


def test_wrong_values_under_torch_compile(plant: Callable[[str, Change], None], checks: list[Checks]) -> None:
    plant("backward", WRONG["values"])
    torch._dynamo.reset()
    model, x = make()
    step = torch.compile(model, backend="retrograd", options={"cache": False})
    with pytest.warns(retrograd.MiscompiledWarning, match="@backward gives wrong values"):
        assert_steps_agree(step, model, x)
    wait(checks)
    with pytest.warns(retrograd.MiscompiledWarning, match="instead, which is right"):
        assert_steps_agree(step, model, x)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default:the compiled .* not used")
def test_op_that_no_flags_mend_becomes_an_island(miscompile: Callable[[str, str], None], checks: list[Checks]) -> None:
    # A coefficient that bwd-expand-erf writes.
    miscompile("0.128379121", "0.228379121")
    # Each of two dozen compilations takes as long as there are kernels: no product is among them.
    model, x = nn.Sequential(Weights(6), nn.GELU()), torch.randn(5, 6)
    step = retrograd.compile_backward(model, (x,), partition="default")
    with pytest.warns(retrograd.MiscompiledWarning, match="@forward gives wrong values"):
        assert_steps_agree(step, model, x)
    wait(checks)
    with pytest.warns(retrograd.MiscompiledWarning, match=r"erf of @forward runs in torch") as said:
        assert_steps_agree(step, model, x)
    text = next(str(w.message) for w in said if "erf of @forward" in str(w.message))
    assert "torch.aten.erf, at" in text
    assert "activation.py" in text
    found = re.search(r"reproducer: (\S+)", text)
    assert found is not None
    assert Path(found[1]).exists()
    assert text in states(step)
    assert_steps_agree(step, model, x)


def test_without_fallback_it_is_an_error(plant: Callable[[str, Change], None]) -> None:
    plant("forward", WRONG["values"])
    model, x = make()
    step = retrograd.compile_backward(model, (x,), fallback="error", cache=False)
    with pytest.raises(retrograd.VerificationError, match="@forward gives wrong values"):
        step(x)


def test_backward_without_outputs(plant: Callable[[str, Change], None], checks: list[Checks]) -> None:
    """Each of the backwards of losses that leave out outputs is checked."""

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).sin(), (x * 2).exp()

    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    ours, theirs = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
    plant("backward", WRONG["values"])
    step = retrograd.compile_backward(model, ours, cache=False)
    with pytest.warns(retrograd.MiscompiledWarning, match="@backward gives wrong values"):
        step(*ours)[0].sum().backward()
    model(*theirs)[0].sum().backward()
    torch.testing.assert_close([t.grad for t in ours], [t.grad for t in theirs])
    wait(checks)


@pytest.mark.long
def test_open_sizes_stay_in_torch(plant: Callable[[str, Change], None]) -> None:
    plant("backward", WRONG["values"])
    model, x = make()
    step = retrograd.compile_backward(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), cache=False)
    with pytest.warns(retrograd.MiscompiledWarning, match="@backward gives wrong values"):
        assert_steps_agree(step, model, x)
    assert_steps_agree(step, model, torch.randn(9, 6))
    assert "@backward: wrong, runs in torch" in states(step)


def test_random_numbers_are_drawn_once(plant: Callable[[str, Change], None], checks: list[Checks]) -> None:
    """The forward that is found wrong gives what the graph gives from the same seed; the generator goes on as ever."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    x = torch.randn(5, 6)
    right = retrograd.compile_backward(model, (x,), cache=False)
    torch.manual_seed(3)
    expected = [*step_of(right, model, x), *step_of(right, model, x), torch.rand(1)]
    plant("forward", WRONG["values"])
    step = retrograd.compile_backward(model, (x,), cache=False)
    torch.manual_seed(3)
    with pytest.warns(retrograd.MiscompiledWarning, match="@forward gives wrong values"):
        first = step_of(step, model, x)
    drawn = torch.get_rng_state()
    wait(checks)
    assert torch.equal(drawn, torch.get_rng_state())
    with pytest.warns(retrograd.MiscompiledWarning, match="instead, which is right"):
        second = step_of(step, model, x)
    torch.testing.assert_close([*first, *second, torch.rand(1)], expected)


# -- What is right ---------------------------------------------------------------------------------------------------


def noise_of_a_bias(x: Tensor, w: Tensor) -> Tensor:
    """The gradient of what is taken out again is zero but for rounding."""
    h = x + w
    return (h - h.mean(0)).div(h.std(0) + 1e-5)


def cancelling(x: Tensor, w: Tensor) -> Tensor:
    return (x * w - w * x.flip(0).flip(0) + 1e-6 * w).sum(0)


def almost_zero_mean(x: Tensor, w: Tensor) -> Tensor:
    return (torch.cat([x, -x]) * torch.cat([w, w]) + 1e-8 * w.sum()).mean().view(1)


def masked(x: Tensor, w: Tensor) -> Tensor:
    """Rounding decides which elements pass."""
    return torch.relu(x * w - w * x) + torch.relu(x @ w.t()) @ w


@pytest.mark.filterwarnings("error::retrograd.MiscompiledWarning")
@pytest.mark.short_cases("0-noise_of_a_bias", "0-cancelling", "0-almost_zero_mean", "0-masked", "1-masked")
@pytest.mark.parametrize("function", [noise_of_a_bias, cancelling, almost_zero_mean, masked], ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_no_fault(function: Callable[[Tensor, Tensor], Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(64, 8), torch.randn(64, 8, requires_grad=True)
    step = retrograd.compile_backward(function, (x, w))
    step(x, w).sum().backward()
    assert states(step).count("verified by its first call") == 2


def test_what_passed_is_remembered() -> None:
    model, x = make()
    for how in ("by its first call", "by an earlier program"):
        step = retrograd.compile_backward(model, (x,))
        assert_steps_agree(step, model, x)
        assert states(step).count(how) == 2
    step = retrograd.compile_backward(model, (x,), verify=False)
    assert "not wanted" in states(step)


@pytest.mark.long
def test_only_what_is_compared_is_compiled_without_checks_between_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared: list[bool] = []

    def compile_seen(linalg: str, target: Target, **options: Any) -> Any:
        compared.append(target.is_compared)
        return compile_once(linalg, target, **options)

    monkeypatch.setattr(staged, "compile_executable", compile_seen)
    model, x = make()
    step = retrograd.compile_backward(model, (x,))
    assert compared == [True]
    step.save(tmp_path / "step.vmfb")
    retrograd.compile_backward(model, (x,), verify=False)
    retrograd.compile_backward(model, (x,), portable=True)
    assert len(compared) >= 3
    assert not any(compared[1:])


def test_loaded_files_are_not_verified(tmp_path: Path) -> None:
    model, x = make()
    retrograd.compile_backward(model, (x,)).save(tmp_path / "right.vmfb")
    loaded = retrograd.load(tmp_path / "right.vmfb", model)
    assert_steps_agree(loaded, model, x)
    assert "nothing to compare with" in states(loaded)


def test_where_memory_does_not_suffice(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reference_graph, "available_bytes", lambda _device: 100)
    model, x = make()
    step = retrograd.compile_backward(model, (x,))
    assert_steps_agree(step, model, x)
    assert "not verified: it would take" in states(step)
    assert "the first call of @forward is not verified" in caplog.text


@pytest.mark.filterwarnings("error::retrograd.MiscompiledWarning")
def test_buffers_are_updated_once_and_hooks_run_once() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(6), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            normed: Tensor = self.norm(x)
            return normed

    torch.manual_seed(0)
    ours, theirs, x = Counted(), Counted(), torch.randn(5, 6)
    step = retrograd.compile_backward(ours, (x,))
    calls, seen = ours.calls, list[Tensor]()
    assert ours.norm.weight is not None
    ours.norm.weight.register_hook(seen.append)
    mine, eager = step_of(step, ours, x), step_of(theirs, theirs, x)
    torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-5)
    assert ours.calls == calls
    assert len(seen) == 1
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))


@pytest.mark.filterwarnings("ignore::retrograd.EagerIslandWarning", "error::retrograd.MiscompiledWarning")
def test_programs_with_islands_are_checked() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.erf(torch.linalg.eigvals(torch.sinh(x @ w)).abs())

    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    step = retrograd.compile_backward(model, (x, w))
    step(x, w).sum().backward()
    assert states(step).count("verified by its first call") == 2
