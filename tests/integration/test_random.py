# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models with random ops: the bits of the generator, masks that are worked out again, repeatable runs, artifacts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from iree_tools import RUN_MODULE
from torch import Tensor, nn
from torch.nn import functional as F

import retrograd
from retrograd.frontend.layers.random_ops import draw_seed, uniform
from retrograd.frontend.preparation.fx_partition import bind_traced
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.steps.bridge import run_function


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)
        self.dropouts = nn.ModuleList([nn.Dropout(0.2), nn.Dropout(0.5)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropouts[1](torch.tanh(self.first(self.dropouts[0](x))))
        return self.last(y)  # type: ignore[no-any-return]


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True)


def loss(output: Tensor) -> Tensor:
    """Weighted, since the sum of squares of what a layer norm gives is the same whatever it was given."""
    return (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum()


def step_of(step: retrograd.CompiledBackward, args: tuple[Tensor, ...], leaves: Sequence[Tensor]) -> list[Tensor]:
    output = step(*args)
    return [output.detach(), *torch.autograd.grad(loss(output), leaves)]


@pytest.mark.short_cases("Mlp-min-cut")
@pytest.mark.parametrize(("make", "partition"), [(Mlp, "min-cut"), (Mlp, "default"), (block, "min-cut")])
def test_random_model(make: Callable[[], nn.Module], partition: str) -> None:
    model = make()
    x = torch.randn(6, 16) if isinstance(model, Mlp) else torch.randn(2, 5, 16)
    # The first call is compared with the trace, run in eager from the same seed: outputs and every gradient.
    step = retrograd.compile_backward(model, (x,), partition=partition, verify=True)  # type: ignore[arg-type]
    leaves = list(model.parameters())
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(step_of(step, (x,), leaves))
    first, again, other = runs
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    # The trace, op by op from the same seed, cut as PyTorch cuts it.
    torch.manual_seed(1)
    (output,) = bind_traced(model, (x,), None)([*leaves, x])
    for a, b in zip(first, [output, *torch.autograd.grad(loss(output), leaves)], strict=True):
        assert float((a - b).detach().norm() / b.detach().norm()) <= 2e-5
    torch.manual_seed(1)
    a, b = step(x), step(x)
    assert torch.equal(a, first[0])
    assert not torch.equal(a, b)
    for function in ("forward", "backward"):
        assert [x.shape for x in step.manifest.function(function).arguments if x.role == "seed"] == [(2,)]
    saved = [r for r in step.manifest.function("forward").results if r.role == "saved"]
    assert saved
    # Neither numbers nor masks; other comparisons (of a ReLU) are not called so.
    assert not [r.name for r in saved if r.name.startswith(("saved.uniform", "saved.ge"))]
    assert "torch.retrograd.uniform" in step.mlir("scheduled").split("@backward")[1]


def test_gradients_against_the_same_masks() -> None:
    torch.manual_seed(3)
    model, x = Mlp(), torch.randn(6, 16)
    step = retrograd.compile_backward(model, (x,))
    torch.manual_seed(4)
    found = step_of(step, (x,), list(model.parameters()))
    torch.manual_seed(4)
    seed = draw_seed()
    # The two dropouts by hand, from the generator's numbers.
    masks = [uniform(seed, i, shape) >= p for i, (shape, p) in enumerate([((6, 16), 0.2), ((6, 64), 0.5)])]
    hidden = torch.tanh(model.first(x * masks[0] / 0.8)) * masks[1] / 0.5
    output = model.last(hidden)
    expected = [output.detach(), *torch.autograd.grad(loss(output), list(model.parameters()))]
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) <= 2e-5


@pytest.mark.short_cases("shape0")
@pytest.mark.parametrize("shape", [(3, 5, 7), (1031,)])
def test_bits_of_the_compiled_generator(shape: tuple[int, ...]) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, torch.rand(shape), torch.rand(shape)

    step = retrograd.compile_backward(model, (torch.ones(2, requires_grad=True),))
    spec = step.manifest.function("forward")
    program = Program.load(step_bytes(step))
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.zeros(2, dtype=torch.int64), -torch.ones(2, dtype=torch.int64)]
    seeds += [torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator) for _ in range(4)]
    for seed in seeds:
        given = run_function(program, spec, [seed if a.role == "seed" else torch.ones(2) for a in spec.arguments])
        by_name = {r.name: t for r, t in zip(spec.results, given, strict=True)}
        for stream, name in enumerate(("output[1]", "output[2]")):
            assert torch.equal(by_name[name], uniform(seed, stream, shape))


def step_bytes(step: retrograd.CompiledBackward) -> bytes:
    return step._parts.portable().vmfb


@pytest.mark.long_cases("default")
@pytest.mark.parametrize("partition", ["min-cut", "default"])
def test_backward_has_the_mask_of_the_forward(partition: str) -> None:
    x = torch.rand(40, 50).add_(1).requires_grad_()
    step = retrograd.compile_backward(lambda x: F.dropout(x, 0.3), (x,), partition=partition)  # type: ignore[arg-type]
    assert not [r for r in step.manifest.function("forward").results if r.role == "saved"]
    assert step.explain().to_dict()["saved_bytes"] == 0
    outputs = [step(x) for _ in range(3)]
    # Backwards in another order than forwards: each has the seed of its own forward.
    for output in reversed(outputs):
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(gradient != 0, output != 0)
        kept = output != 0
        torch.testing.assert_close(output[kept], x[kept].detach() / 0.7)
        torch.testing.assert_close(gradient[kept], torch.full_like(gradient[kept], 1 / 0.7))
        # Five standard errors.
        assert abs(float(kept.double().mean()) - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5


def noise(x: Tensor) -> tuple[Tensor, ...]:
    like = torch.zeros(100, 200)
    return (
        x * 2,
        torch.randn(100, 200),
        torch.rand_like(like),
        like.uniform_(-1, 3),
        torch.empty(100, 200).exponential_(2.0),
        torch.randint(-3, 5, (100, 200)).float(),
        torch.bernoulli(torch.full((100, 200), 0.2)),
        torch.normal(4.0, torch.full((100, 200), 0.5)),
        torch.rand(100, 200, dtype=torch.bfloat16).float(),
    )


MOMENTS = [(0, 1), (0.5, 1 / 12), (1, 16 / 12), (0.5, 0.25), (0.5, 63 / 12), (0.2, 0.16), (4, 0.25), (0.5, 1 / 12)]


def test_distributions() -> None:
    torch.manual_seed(8)
    step = retrograd.compile_backward(noise, (torch.ones(2, requires_grad=True),))
    _, *samples = step(torch.ones(2, requires_grad=True))
    for sample, (mean, variance) in zip(samples, MOMENTS, strict=True):
        error = (variance / sample.numel()) ** 0.5
        # bfloat16 rounds down, by half of a 256th in the mean.
        assert abs(float(sample.double().mean()) - mean) < 5 * error + (1 / 512 if sample is samples[-1] else 0)
        assert abs(float(sample.double().var()) / variance - 1) < 0.1
    assert float(samples[0].abs().max()) > 3
    assert float(samples[3].min()) > 0
    assert sorted({int(v) for v in samples[4].flatten()}) == list(range(-3, 5))
    assert float(samples[-1].max()) < 1


@pytest.mark.short_cases("dropouts", "gumbel")
@pytest.mark.parametrize(
    ("model", "args"),
    [
        (attention, (torch.randn(1, 2, 5, 8, requires_grad=True),)),
        (lambda x: F.gumbel_softmax(x) * F.rrelu(x, training=True), (torch.randn(4, 6, requires_grad=True),)),
        (lambda x: F.alpha_dropout(F.dropout1d(x, 0.4), 0.2, True), (torch.randn(4, 6, requires_grad=True),)),
        (nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), (torch.randn(2, 2, 4),)),
    ],
    ids=["attention", "gumbel", "dropouts", "lstm"],
)
def test_verified(model: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    step = retrograd.compile_backward(model, args, verify=True)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = (t[0] if isinstance(t, tuple) else t for t in (step(*args), step(*args)))
    assert not torch.equal(first, second)
    torch.set_rng_state(before)
    again = step(*args)
    # The comparison of the first call took nothing from the default generator.
    assert torch.equal(first, again[0] if isinstance(again, tuple) else again)


@pytest.mark.long
def test_dropout_between_recurrent_layers() -> None:
    model = nn.GRU(5, 5, 2, dropout=1.0, batch_first=True)
    x = torch.randn(2, 2, 5)
    step = retrograd.compile_backward(model, (x,))
    # With all of it dropped, nothing is random: the second layer sees zeros, in eager as well.
    torch.testing.assert_close(step(x)[0], model(x)[0])


def test_artifact(tmp_path: Path) -> None:
    model, x = Mlp(), torch.randn(6, 16)
    step = retrograd.compile_backward(model, (x,))
    path = tmp_path / "model.vmfb"
    step.save(path)
    loaded = retrograd.load(path, model)
    torch.manual_seed(6)
    expected = step_of(step, (x,), list(model.parameters()))
    torch.manual_seed(6)
    for a, b in zip(step_of(loaded, (x,), list(model.parameters())), expected, strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(6)
    known = {**dict(model.named_parameters()), "args[0]": x, "seed": draw_seed()}
    command = [*RUN_MODULE, f"--module={path}", "--function=forward", "--device=local-task"]
    for i, argument in enumerate(step.manifest.function("forward").arguments):
        np.save(tmp_path / f"argument{i}.npy", known[argument.name].detach().numpy())
        command.append(f"--input=@{tmp_path}/argument{i}.npy")
    np.save(tmp_path / "output.npy", expected[0].numpy())
    (position,) = [i for i, r in enumerate(step.manifest.function("forward").results) if r.role == "output"]
    command += ["--expected_output=(ignored)"] * position + [f"--expected_output=@{tmp_path}/output.npy"]
    command += ["--expected_output=(ignored)"] * (len(step.manifest.function("forward").results) - position - 1)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seed = next(i for i, a in enumerate(step.manifest.function("forward").arguments) if a.role == "seed")
    np.save(tmp_path / f"argument{seed}.npy", np.array([1, 2]))
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0, "the seed changed nothing"


@pytest.mark.long
def test_budget() -> None:
    model, x = Mlp(), torch.randn(1024, 16)
    step = retrograd.compile_backward(model, (x,), partition="budget", memory_budget="0.92", verify=True)
    step(x)
    saved = [r.name for r in step.manifest.function("forward").results if r.role == "saved"]
    assert not [name for name in saved if name.startswith(("saved.uniform", "saved.ge"))]


def test_dynamo() -> None:
    model, x = Mlp(), torch.randn(6, 16)
    compiled = torch.compile(model, backend="retrograd", dynamic=False)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        output = compiled(x)
        results.append([output.detach(), *torch.autograd.grad(loss(output), list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x), results[0][0])


def test_random_numbers_of_which_none_is_used() -> None:
    """As where a share of a batch that rounds to no row is chosen by them: the program takes no seed."""

    def model(x: Tensor) -> Tensor:
        level = torch.ones(3)
        level[: int(3 * 0.2)] = torch.randint(5, 9, (3,))[: int(3 * 0.2)].float()
        return x.square() * level

    x = torch.arange(3.0, requires_grad=True)
    step = retrograd.compile_backward(model, (x,))
    (gradient,) = torch.autograd.grad(step(x).sum(), x)
    assert gradient.tolist() == [0.0, 2.0, 4.0]
    assert "draw_seed" not in step.mlir("imported")


class RandomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)  # drawn in the backward


def test_what_stays_refused() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(retrograd.CaptureError, match=r"the backward draws random numbers, at File .*test_random.py"):
        retrograd.compile_backward(RandomBackward.apply, (x,))
    generator = torch.Generator()
    with pytest.raises(retrograd.CaptureError, match=r"aten.rand.generator at .*test_random.py:\d+ is not compiled"):
        retrograd.compile_backward(lambda x: x * torch.rand(3, 4, generator=generator), (x,), fallback="error")
    with pytest.raises(retrograd.CaptureError, match="between 0 and 1"):
        retrograd.compile_backward(lambda x: torch.native_dropout(x, 1.5, True)[0], (x,))
