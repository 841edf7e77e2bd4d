# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models on a CUDA device, compiled, beside eager on the same device."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MODELS, Case
from suite import SUITE
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retrograd

STEPS = 20
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def setup_module() -> None:
    """Without a device these tests fail, so that nobody takes them for passed."""
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device: `make test-gpu` has nothing to run on")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def on_device(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """A model of the registry with its arguments on the GPU, as leaves, floats in ``dtype``."""
    case = MODELS[name].make("test")

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to("cuda", dtype if leaf.is_floating_point() else leaf.dtype)
        return moved.requires_grad_(leaf.requires_grad)

    model = case.model.to("cuda", dtype) if isinstance(case.model, nn.Module) else case.model
    return dataclasses.replace(case, model=model, args=pytree.tree_map(move, case.args))


def loss_of(outputs: Any) -> Tensor:
    """Some number that depends on every floating output; the cases' own losses hold targets on the CPU."""
    floats = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.float().pow(2).mean() for t in floats]).sum()


def gradients(case: Case, call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = case.leaves()
    for leaf in leaves.values():
        leaf.grad = None
    loss = loss_of(call(*case.args))
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-6))


@pytest.mark.parametrize("name", SUITE)
def test_trains_as_eager_in_float32(name: str) -> None:
    ours, theirs = on_device(name), on_device(name)
    step = retrograd.compile_backward(ours.model, ours.args)
    assert step.manifest.targets[0].startswith("cuda:sm_")
    optimizer = torch.optim.SGD(list(ours.leaves().values()), lr=0.01)
    for i in range(STEPS):
        _, found = gradients(ours, step)
        _, expected = gradients(theirs, theirs.model)
        errors = {n: relative_error(found[n], expected[n]) for n in expected if expected[n].norm() > 1e-6}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= TOLERANCES[torch.float32], f"step {i}, {worst}: {errors[worst]:.2e}"
        optimizer.step()
        with torch.no_grad():
            for n, leaf in theirs.leaves().items():
                leaf.copy_(ours.leaves()[n])


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_gradients_in_bfloat16(name: str) -> None:
    """As close to float32 as eager's own bfloat16, which batch norms over few elements take far from it."""
    ours, theirs = on_device(name, torch.bfloat16), on_device(name, torch.bfloat16)
    exact = on_device(name)
    with torch.no_grad():
        for n, leaf in exact.leaves().items():
            leaf.copy_(ours.leaves()[n])
    _, found = gradients(ours, retrograd.compile_backward(ours.model, ours.args))
    _, eager = gradients(theirs, theirs.model)
    _, expected = gradients(exact, exact.model)
    for n, gradient in expected.items():
        if gradient.norm() > 1e-3:
            allowed = max(TOLERANCES[torch.bfloat16], 1.5 * relative_error(eager[n], gradient))
            assert relative_error(found[n], gradient) <= allowed, n


def test_a_step_copies_nothing_to_the_host_or_from_it() -> None:
    case = on_device("mlp")
    step = retrograd.compile_backward(case.model, case.args)
    gradients(case, step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        gradients(case, step)
        torch.cuda.synchronize()
    copies = [e.name for e in trace.events() if "Memcpy" in e.name and ("DtoH" in e.name or "HtoD" in e.name)]
    assert not copies


def test_one_file_for_cpu_and_cuda(tmp_path: Path) -> None:
    case = MODELS["mlp"].make("test")
    path = tmp_path / "mlp.vmfb"
    retrograd.compile_backward(case.model, case.args, target=("cpu", "cuda")).save(path)
    assert isinstance(case.model, nn.Module)
    _, expected = gradients(case, retrograd.load(path, case.model, device="cpu"))
    moved = on_device("mlp")
    assert isinstance(moved.model, nn.Module)
    _, found = gradients(moved, retrograd.load(path, moved.model))
    for name, gradient in expected.items():
        assert relative_error(found[name].cpu(), gradient) <= 1e-5, name


def test_iree_run_module_runs_the_file(tmp_path: Path) -> None:
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    model = nn.Linear(8, 3).cuda()
    step = retrograd.compile_backward(model, (x,))
    step.save(tmp_path / "linear.vmfb")
    y = step(x)
    values = {"weight": model.weight, "bias": model.bias, "args[0]": x}
    inputs = []
    for i, spec in enumerate(step.manifest.function("forward").arguments):
        np.save(tmp_path / f"{i}.npy", values[spec.name].detach().cpu().numpy())
        inputs.append(f"--input=@{tmp_path / f'{i}.npy'}")
    tool = "from iree._runtime.scripts.iree_run_module.__main__ import main; import sys; sys.exit(main())"
    command = [sys.executable, "-c", tool, f"--module={tmp_path / 'linear.vmfb'}", "--device=cuda"]
    command += ["--function=forward", *inputs, f"--output=@{tmp_path / 'y.npy'}"]
    count = len(step.manifest.function("forward").results) - 1
    done = subprocess.run([*command, *["--output="] * count], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.allclose(torch.from_numpy(np.load(tmp_path / "y.npy")), y.detach().cpu(), atol=1e-5)


def test_attention_saves_nothing_quadratic_in_the_tokens() -> None:
    tokens = 96
    q, k, v = (torch.randn(2, 2, tokens, 16, device="cuda", requires_grad=True) for _ in range(3))
    step = retrograd.compile_backward(F.scaled_dot_product_attention, (q, k, v), {"is_causal": True}, verify=True)
    step(q, k, v, is_causal=True).sum().backward()
    saved = [a for a in step.manifest.function("backward").arguments if a.role == "saved"]
    assert saved and all(a.shape.count(tokens) < 2 for a in saved)


def test_work_on_the_current_stream_is_waited_for() -> None:
    model = nn.Linear(2048, 2048).cuda()
    x = torch.randn(512, 2048, device="cuda")
    step = retrograd.compile_backward(model, (x,))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        big = torch.randn(4096, 4096, device="cuda")
        factor = torch.randn(4096, 4096, device="cuda") / 64
        for _ in range(20):
            big = big @ factor
        late = x * 2 + big[:512, :2048] * 1e-3
        found = step(late)
        doubled = found * 2
    side.synchronize()
    assert relative_error(doubled.detach() / 2, model(late).detach()) < 1e-4


def test_errors_leave_the_process_usable() -> None:
    model = nn.Linear(8, 3).cuda()
    x = torch.randn(4, 8, device="cuda")
    step = retrograd.compile_backward(model, (x,))
    with pytest.raises(retrograd.ArgumentError, match="on cpu"):
        step(x.cpu())
    with pytest.raises(retrograd.ArgumentError, match="expected"):
        step(torch.randn(5, 8, device="cuda"))
    assert relative_error(step(x), model(x)) < 1e-5


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    model = nn.Linear(8, 3).cuda()
    step = retrograd.compile_backward(model, (torch.randn(4, 8, device="cuda"),))
    step.save(tmp_path / "linear.vmfb")
    with pytest.raises(retrograd.DeviceError):
        retrograd.load(tmp_path / "linear.vmfb", device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(retrograd.PlacementError, match="no code for device 'vulkan': compiled for cuda:sm_"):
        retrograd.load(tmp_path / "linear.vmfb", device="vulkan")
    assert torch.ones(3, device="cuda").sum() == 3
