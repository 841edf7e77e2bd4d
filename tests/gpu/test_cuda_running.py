# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Running beside torch on a CUDA device: its streams, its memory, its contexts, and files for several devices."""

import dataclasses
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from between_islands import Between, find_donated
from iree import runtime as iree_runtime
from iree_tools import RUN_MODULE
from models import MODELS
from steps import gradients, on_device, relative_error, require_device
from torch import Tensor, nn

import retrograd
from retrograd.runtime.programs.devices import get_device, list_devices

HAS_VULKAN = any(info.driver == "vulkan" and info.error is None for info in list_devices())


def setup_module() -> None:
    require_device()


def linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(8, 3).cuda(), torch.randn(4, 8, device="cuda")


def test_a_step_copies_nothing_to_the_host_or_from_it() -> None:
    case = on_device("mlp")
    step = retrograd.compile_backward(case.model, case.args)
    gradients(case, step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        gradients(case, step)
        torch.cuda.synchronize()
    names = [e.name for e in trace.events()]
    assert any("dispatch" in name for name in names), "the trace shows none of the compiled kernels"
    assert not [name for name in names if "Memcpy" in name and ("DtoH" in name or "HtoD" in name)]


def test_one_file_for_several_devices(tmp_path: Path) -> None:
    case = MODELS["mlp"].make("test")
    path = tmp_path / "mlp.vmfb"
    retrograd.compile_backward(case.model, case.args, target=("cpu", "cuda", "vulkan")).save(path)
    moved = on_device("mlp")
    assert isinstance(moved.model, nn.Module)
    on_cpu = MODELS["mlp"].make("test")
    assert isinstance(on_cpu.model, nn.Module)
    plain = dataclasses.replace(on_cpu, loss=moved.loss)
    expected = gradients(plain, retrograd.load(path, on_cpu.model, device="cpu"))
    found = [gradients(moved, retrograd.load(path, moved.model))]
    if HAS_VULKAN:
        found.append(gradients(plain, retrograd.load(path, on_cpu.model, device="vulkan").to_device()))
    for gradients_found in found:
        for name, gradient in expected.items():
            assert relative_error(gradients_found[name].cpu(), gradient) <= 1e-5, name


@pytest.mark.parametrize("device", ["cuda", *["vulkan"] * HAS_VULKAN])
def test_iree_run_module_runs_the_file(tmp_path: Path, device: str) -> None:
    model, x = linear()
    step = retrograd.compile_backward(model, (x,), target=("cuda", "vulkan"))
    step.save(tmp_path / "linear.vmfb")
    y = step(x)
    y.backward(torch.ones_like(y))
    values = {"weight": model.weight, "bias": model.bias, "args[0]": x, "tangent.output": torch.ones_like(y)}
    command = [*RUN_MODULE, f"--module={tmp_path / 'linear.vmfb'}", f"--device={device}"]
    for function, result, expected in (("forward", "output", y), ("backward", "grad.weight", model.weight.grad)):
        spec = step.manifest.function(function)
        inputs = []
        for i, argument in enumerate(spec.arguments):
            tensor = values[argument.name]
            assert isinstance(tensor, Tensor)
            np.save(tmp_path / f"{i}.npy", tensor.detach().cpu().numpy())
            inputs.append(f"--input=@{tmp_path / f'{i}.npy'}")
        outputs = [f"--output=@{tmp_path / 'y.npy'}" if r.name == result else "--output=" for r in spec.results]
        done = subprocess.run(
            [*command, f"--function={function}", *inputs, *outputs], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert isinstance(expected, Tensor)
        assert torch.allclose(torch.from_numpy(np.load(tmp_path / "y.npy")), expected.detach().cpu(), atol=1e-5)


def test_work_on_the_current_stream_is_waited_for() -> None:
    model = nn.Linear(2048, 2048).cuda()
    x = torch.randn(512, 2048, device="cuda")
    step = retrograd.compile_backward(model, (x,))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
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


def test_threads_with_streams_of_their_own() -> None:
    model, x = linear()
    step = retrograd.compile_backward(model, (x,))
    errors: list[float] = []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = torch.randn(4, 8, device="cuda", generator=generator)
                errors.append(relative_error(step(y).detach(), model(y).detach()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 200 and max(errors) < 1e-5


def test_the_bindings_share_no_events_with_torch() -> None:
    """Why the host waits. Once this fails, `_after_torch` can let the device wait instead."""
    semaphore = get_device("cuda").hal.create_semaphore(0)
    timepoint = iree_runtime._binding.HalExternalTimepoint()
    kind = iree_runtime._binding.ExternalTimepointType
    with pytest.raises((RuntimeError, ValueError), match="UNIMPLEMENTED"):
        semaphore.export_timepoint(1, kind.CUDA_EVENT, 0, timepoint)


def test_scratch_memory_is_reported_and_does_not_grow() -> None:
    case = on_device("transformer")
    step = retrograd.compile_backward(case.model, case.args)
    gradients(case, step)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        gradients(case, step)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free - (4 << 20)
    report = step.explain().to_dict()
    assert report["backward_transient_bytes"] > 0
    assert report["peak_bytes_measured"] is not None


def test_errors_leave_the_process_usable() -> None:
    model, x = linear()
    step = retrograd.compile_backward(model, (x,))
    with pytest.raises(retrograd.ArgumentError, match="on cpu"):
        step(x.cpu())
    with pytest.raises(retrograd.ArgumentError, match="expected"):
        step(torch.randn(5, 8, device="cuda"))
    assert relative_error(step(x), model(x)) < 1e-5


def test_out_of_memory_is_one_exception_and_passes() -> None:
    size, chunk, spare = 8192, 1 << 30, 96 << 20

    def chain(x: Tensor) -> Tensor:
        return ((x @ x).tanh() @ x).softmax(-1) @ x

    x = torch.randn(size, size, device="cuda", requires_grad=True)
    step = retrograd.compile_backward(chain, (x,))
    forward = step.manifest.function("forward")
    assert forward.transient_bytes > spare
    results = sum(4 * size * size for _ in forward.results)
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info()[0] - results - spare
    hoard = [torch.empty(min(chunk, room - at), dtype=torch.uint8, device="cuda") for at in range(0, room, chunk)]
    # Torch has room for the results, IREE none for its scratch memory.
    with pytest.raises(retrograd.OutOfDeviceMemory, match="has no memory left") as error:
        step(x)
    assert isinstance(error.value, torch.OutOfMemoryError)
    # What is freed here torch keeps: a call takes it back.
    hoard.clear()
    try:
        assert relative_error(step(x).detach(), chain(x).detach()) < 1e-4
    finally:
        # Other processes that test on this device have none otherwise.
        torch.cuda.empty_cache()


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    model, x = linear()
    retrograd.compile_backward(model, (x,)).save(tmp_path / "linear.vmfb")
    with pytest.raises(retrograd.DeviceError):
        retrograd.load(tmp_path / "linear.vmfb", device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(retrograd.PlacementError, match="no code for device 'vulkan': compiled for cuda:sm_"):
        retrograd.load(tmp_path / "linear.vmfb", device="vulkan")
    assert torch.ones(3, device="cuda").sum() == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_device_other_than_the_first(tmp_path: Path) -> None:
    first, x = linear()
    step = retrograd.compile_backward(first, (x.requires_grad_(),))
    step.save(tmp_path / "linear.vmfb")
    second, y = nn.Linear(8, 3).to("cuda:1"), torch.randn(4, 8, device="cuda:1", requires_grad=True)
    for there in (retrograd.load(tmp_path / "linear.vmfb", second), retrograd.compile_backward(second, (y,))):
        (found,) = torch.autograd.grad(there(y).pow(2).sum(), y)
        (expected,) = torch.autograd.grad(second(y).pow(2).sum(), y)
        assert found.device == y.device and relative_error(found, expected) < 1e-5
        assert torch.cuda.current_device() == 0
        with pytest.raises(retrograd.ArgumentError, match="cuda:0"):
            there(x)
    assert relative_error(step(x), first(x)) < 1e-5


@pytest.mark.filterwarnings("ignore::retrograd.EagerIslandWarning")
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_what_one_stage_gives_another_is_worked_in(cuda_graphs: bool) -> None:
    """The same gradients with it, call after call, and as graphs; residuals stay as they are for a second backward."""
    torch.manual_seed(0)
    model, data = Between().cuda(), torch.randn(512, 64, device="cuda")
    step = retrograd.compile_backward(model, (data,), partition="default", cuda_graphs=cuda_graphs)
    donated = find_donated(step)
    assert donated["backward_1"] == {"sub"}
    assert not any(name.startswith("saved.") for names in donated.values() for name in names)
    model(data).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for _ in range(8):
        loss = step(data).square().sum()
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            found = {name: p.grad for name, p in model.named_parameters()}
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
