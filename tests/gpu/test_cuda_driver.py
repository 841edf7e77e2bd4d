# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of a launch plan on a device, one by one and as a graph that is changed: fills, kernels and copies by hand."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from steps import require_device

from retrograd.contract.launches import Copy, Expected, Fill, Kernel, LaunchPlan, Place
from retrograd.runtime.cuda.driver import Driver
from retrograd.runtime.cuda.prepared_plan import PreparedPlan
from retrograd.runtime.cuda.replayed_plan import ReplayedPlan
from retrograd.runtime.programs.errors import ExecutionError

# target[i] = source[i] + filled[i] + number, for one block.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 source, .param .u64 filled, .param .u64 target, .param .u32 number)
{
    .reg .u64 %a, %b, %c, %at;
    .reg .u32 %i, %n, %x, %y;
    mov.u32 %i, %tid.x;
    mul.wide.u32 %at, %i, 4;
    ld.param.u64 %a, [source];
    ld.param.u64 %b, [filled];
    ld.param.u64 %c, [target];
    ld.param.u32 %n, [number];
    add.u64 %a, %a, %at;
    add.u64 %b, %b, %at;
    add.u64 %c, %c, %at;
    ld.global.u32 %x, [%a];
    ld.global.u32 %y, [%b];
    add.u32 %x, %x, %y;
    add.u32 %x, %x, %n;
    st.global.u32 [%c], %x;
    ret;
}
\0"""
COUNT = 64
BYTES = 4 * COUNT
SCRATCH = Place("scratch", "", 0)
SUM = Place("scratch", "", BYTES)
PLAN = LaunchPlan(
    (Expected(), Expected()),
    2 * BYTES,
    (
        Fill(SCRATCH, BYTES, 3, 4),
        Kernel("m", "add", (1, 1, 1), (Place("argument", 0, 0), SCRATCH, SUM), (4,)),
        Copy(SUM, Place("argument", 1, 0), BYTES),
        Kernel("m", "add", (1, 1, 1), (SUM, SCRATCH, SUM), (5,)),
        Copy(SUM, Place("argument", 1, BYTES), BYTES),
    ),
)


@pytest.fixture(scope="module")
def driver() -> Driver:
    require_device()
    torch.zeros(1, device="cuda")
    return Driver(ctypes.CDLL("libcuda.so.1"))


def test_a_graph_does_what_its_steps_do_wherever_they_read(driver: Driver) -> None:
    function = driver.find_function(driver.load_module(PTX), "add", 0)
    prepared = PreparedPlan("f", PLAN, driver, lambda step: (function, (COUNT, 1, 1), 0), {})
    plan = ReplayedPlan(prepared, driver)
    stream = torch.cuda.current_stream().cuda_stream
    held = []
    for call in range(12):
        source = torch.randint(0, 1000, (COUNT,), dtype=torch.int32, device="cuda")
        target = torch.zeros(2 * COUNT, dtype=torch.int32, device="cuda")
        scratch = torch.zeros(2 * COUNT, dtype=torch.int32, device="cuda")
        plan.run([source.data_ptr(), target.data_ptr(), scratch.data_ptr()], stream)
        assert torch.equal(target, torch.cat([source + 7, source + 15])), (call, plan.reason)
        if call % 3:
            # The next call's lie elsewhere; after a call that holds nothing they lie where they lay.
            held.append((source, target, scratch))
    assert plan.reason is None
    assert plan.replays == 10
    # Every change is of all five steps or of those that read one of the three.
    assert 0 < plan.changes < 5 * 10


def in_a_new_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_a_thread_in_which_nothing_ran_has_no_context(driver: Driver) -> None:
    """Which :meth:`Driver.enter` is for."""

    def load() -> None:
        with pytest.raises(ExecutionError, match="CUDA_ERROR_INVALID_CONTEXT"):
            driver.load_module(PTX)
        driver.enter(0)
        driver.unload_module(driver.load_module(PTX))

    in_a_new_thread(load)


def test_a_graph_is_recorded_changed_and_queued_in_new_threads(driver: Driver) -> None:
    function = driver.find_function(driver.load_module(PTX), "add", 0)
    prepared = PreparedPlan("f", PLAN, driver, lambda step: (function, (COUNT, 1, 1), 0), {})
    plan = ReplayedPlan(prepared, driver)
    kept = []
    for call in range(5):
        source = torch.randint(0, 1000, (COUNT,), dtype=torch.int32, device="cuda")
        target, scratch = (torch.zeros(2 * COUNT, dtype=torch.int32, device="cuda") for _ in range(2))
        addresses = [tensor.data_ptr() for tensor in (source, target, scratch)]

        def run(addresses: list[int] = addresses) -> None:
            driver.enter(0)
            plan.run(addresses, 0)

        in_a_new_thread(run)
        assert torch.equal(target, torch.cat([source + 7, source + 15])), (call, plan.reason)
        kept.append((source, target, scratch))
    assert plan.reason is None and plan.replays == 3 and plan.changes > 0


FIRST_BACKWARD = """
import torch
from torch import nn
import retrograd

torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
x = torch.randn(16, 64, device="cuda")
step = retrograd.compile_backward(model, (x,), verify=False)
# What torch keeps unused: autograd's thread then allocates without a call of CUDA's runtime.
del [torch.empty(1 << 16, device="cuda") for _ in range(64)][:]
out = step(x)
out.backward(torch.ones_like(out))
found = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
model(x).sum().backward()
for gradient, parameter in zip(found, model.parameters()):
    torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
print("equal")
"""


def test_a_compiled_backward_is_the_first_work_of_autograds_thread() -> None:
    """Nothing that torch does in that thread has made a context current."""
    require_device()
    ran = subprocess.run([sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["equal"]
