# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of a launch plan on a device, one by one and as a graph that is changed: fills, kernels and copies by hand."""

import ctypes

import pytest
import torch
from steps import require_device

from retrograd.contract.launches import Copy, Expected, Fill, Kernel, LaunchPlan, Place
from retrograd.runtime.cuda.driver import Driver
from retrograd.runtime.cuda.prepared_plan import PreparedPlan
from retrograd.runtime.cuda.replayed_plan import ReplayedPlan

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
