# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Vulkan, on whatever driver is installed; `make vulkan-driver` brings lavapipe, which needs no GPU."""

import gc
import subprocess
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from iree_tools import RUN_MODULE
from torch import nn

import retrograd
from retrograd.frontend.layers.random_ops import draw_seed, uniform
from retrograd.runtime.programs.devices import get_device, list_devices
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.programs.staging import Staging

DEVICES = [info.name for info in list_devices() if info.driver == "vulkan" and info.error is None]
pytestmark = pytest.mark.skipif(not DEVICES, reason="no Vulkan driver: `make vulkan-driver` installs one")

BATCH, FEATURES, CLASSES = 4, 6, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, CLASSES))


def make_input() -> torch.Tensor:
    return torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with code for the CPU, for CUDA and for Vulkan."""
    path = tmp_path_factory.mktemp("vulkan") / "model.vmfb"
    step = retrograd.compile_backward(make_model(), (make_input(),), target=("cpu", "cuda", "vulkan"), portable=True)
    step.save(path)
    return path


def gradients(model: nn.Module, step: retrograd.CompiledBackward) -> list[torch.Tensor]:
    model.zero_grad()
    step(make_input()).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def staging_of(program: Program) -> Staging:
    return program._current().staging


def test_one_file_gives_eagers_gradients_on_cpu_and_vulkan(artifact: Path) -> None:
    model = make_model()
    model(make_input()).pow(2).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for device in ("cpu", "vulkan"):
        for found, wanted in zip(
            gradients(model, retrograd.load(artifact, model, device=device)), expected, strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-6)


def test_only_what_changed_is_copied(artifact: Path) -> None:
    model = make_model()
    parameters = len(list(model.parameters()))
    step = retrograd.load(artifact, model, device="vulkan")
    staging = staging_of(step._parts.program)
    gradients(model, step)
    # Parameters and the input for the forward, the tangent for the backward; the output and the gradients come back.
    assert (staging.uploads, staging.downloads) == (parameters + 2, parameters + 1)
    step.to_device()
    before = staging.uploads
    gradients(model, step)
    assert staging.uploads - before == 2
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    before = staging.uploads
    found = gradients(model, step)
    assert staging.uploads - before == 3
    expected = gradients(model, retrograd.load(artifact, model, device="cpu"))
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=1e-6)


def test_a_device_closes_with_the_last_program_on_it(artifact: Path) -> None:
    steps = [retrograd.load(artifact, make_model(), device="vulkan") for _ in range(2)]
    device = weakref.ref(get_device("vulkan"))
    gradients(make_model(), steps.pop())
    gc.collect()
    assert device() is not None
    steps.clear()
    gc.collect()
    assert device() is None


def test_copies_through_the_hosts_own_buffers(artifact: Path) -> None:
    model = make_model()
    step = retrograd.load(artifact, model, device="vulkan")
    loaded = step._parts.program._current()
    loaded.staging = Staging(loaded.device.hal, mapped=False)
    expected = gradients(model, retrograd.load(artifact, model, device="cpu"))
    for found, wanted in zip(gradients(model, step), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-6)


def test_a_residual_that_a_hook_replaced_is_refused(artifact: Path) -> None:
    model = make_model()
    step = retrograd.load(artifact, model, device="vulkan")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        output = step(make_input())
    with pytest.raises(retrograd.ExecutionError, match="saved tensor hooks"):
        output.sum().backward()


def test_a_layer_norm_in_bfloat16() -> None:
    """Sums of columns, of so few rows that each of a workgroup's threads has one of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20, bias=False)).bfloat16()
    x, weights = torch.randn(2, 6, 12).bfloat16().requires_grad_(), torch.randn(2, 6, 20).bfloat16()
    step, leaves = retrograd.compile_backward(model, (x,), target="vulkan"), [x, *model.parameters()]
    for _ in range(2):
        found = torch.autograd.grad(step(x), leaves, weights)
        for ours, eager in zip(found, torch.autograd.grad(model(x), leaves, weights), strict=True):
            assert (ours - eager).norm() <= 2e-2 * eager.norm()


def test_a_convolution_with_batch_norm_and_pooling() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)]
    step = retrograd.compile_backward(nn.Sequential(*layers), (torch.randn(2, 3, 8, 8),), target="vulkan", verify=True)
    step(torch.randn(2, 3, 8, 8)).sum().backward()


@pytest.mark.long
def test_what_islands_take_and_give_is_copied() -> None:
    """The backward's island takes what the forward left on the device, and the other way round."""

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = (x @ weight).tanh()
        squares: torch.Tensor = torch.linalg.eigvalsh(hidden.T @ hidden / 4)
        return torch.sin(hidden * squares).sum(1)

    x, weight = (torch.randn(n, 4, requires_grad=True) for n in (6, 4))
    with pytest.warns(retrograd.EagerIslandWarning, match="linalg_eigh"):
        step = retrograd.compile_backward(model, (x, weight), target="vulkan")
    for _ in range(2):
        results = [(y := call(x, weight), *torch.autograd.grad(y.sum(), (x, weight))) for call in (step, model)]
        for found, expected in zip(*results, strict=True):
            assert (found - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.long
def test_outputs_that_are_left_out_count_with_zeros() -> None:
    """Residuals are in memory of the program that computed them, which a backward of its own would not find."""
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    step = retrograd.compile_backward(lambda x, w: (x.sin(), w.exp()), (x, w), target="vulkan")
    found = torch.autograd.grad(step(x, w)[0].sum(), (x, w))
    torch.testing.assert_close(found, (x.cos(), torch.zeros(3)))
    assert "backward_variants" not in step.explain().to_dict()


def test_random_numbers_and_recomputed_masks_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.dropout(x, 0.3), torch.rand(1031)

    path = tmp_path / "random.vmfb"
    x = torch.rand(40, 50).add_(1).requires_grad_()
    retrograd.compile_backward(model, (x,), target=("cpu", "vulkan"), portable=True).save(path)
    torch.manual_seed(7)
    seed, runs = draw_seed(), []
    for device in ("cpu", "vulkan"):
        torch.manual_seed(7)
        output, numbers = retrograd.load(path, device=device)(x)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        # The backward has worked the mask out again.
        assert torch.equal(gradient != 0, output != 0)
        assert 0.6 < float((output != 0).float().mean()) < 0.8
        runs.append((numbers, output.detach(), gradient))
    for on_cpu, on_vulkan in zip(*runs, strict=True):
        assert torch.equal(on_cpu, on_vulkan)
    assert torch.equal(runs[1][0], uniform(seed, 1, (1031,)))


def test_float64_is_refused_in_a_signature_and_told_of_inside() -> None:
    layer = nn.Linear(4, 2)
    with pytest.raises(retrograd.CompileError, match="float64, which code for vulkan does not have"):
        retrograd.compile_backward(layer.double(), (torch.ones(3, 4, dtype=torch.float64),), target="vulkan")
    weight = torch.ones(4, requires_grad=True)
    with pytest.warns(UserWarning, match="vulkan has no float64"):
        retrograd.compile_backward(lambda w: (w.double().exp() * 3).float(), (weight,), target="vulkan")


def test_iree_run_module_runs_the_file(artifact: Path, tmp_path: Path) -> None:
    model, x = make_model(), make_input()
    function = retrograd.load(artifact, device="cpu").manifest.function("forward")
    values = {**dict(model.named_parameters()), "args[0]": x}
    command = [*RUN_MODULE, f"--module={artifact}", "--device=vulkan"]
    for i, spec in enumerate(function.arguments):
        np.save(tmp_path / f"{i}.npy", values[spec.name].detach().numpy())
        command.append(f"--input=@{tmp_path / f'{i}.npy'}")
    files = [tmp_path / f"r{i}.npy" for i, _ in enumerate(function.results)]
    subprocess.run([*command, "--function=forward", *(f"--output=@{f}" for f in files)], check=True)
    output = next(f for f, r in zip(files, function.results, strict=True) if r.role == "output")
    np.testing.assert_allclose(np.load(output), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_device_that_the_file_has_no_code_for(artifact: Path) -> None:
    with pytest.raises(retrograd.PlacementError, match="compiled for cpu, cuda:sm_80, vulkan; choose one of cpu, cuda"):
        retrograd.load(artifact, device="hip")
    if not torch.cuda.is_available():
        with pytest.raises(retrograd.DeviceError, match="cuda"):
            retrograd.load(artifact, device="cuda")
