# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What iree-compile is told to leave out."""

from dataclasses import replace

import pytest

from retrograd.pipelines.devices.device_targets import PACKING_MARK
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.toolchain.compiler_parts import UNVERIFIED, select_parts

PLAIN = "func.func @f(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"
SORTED = f"{PLAIN}\n%0 = tm_tensor.sort dimension(0) outs(%x : tensor<2xf32>)"


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ("cpu", set()),
        ("cuda:sm_80", {"cuda"}),
        ("vulkan", {"vulkan_spirv"}),
        ("hip:gfx942", {"rocm"}),
        ("cpu,cuda:sm_80,vulkan", {"cuda", "vulkan_spirv"}),
    ],
)
def test_code_generators_of_the_devices_stay(names: str, kept: set[str]) -> None:
    flags = select_parts(PLAIN, find_target(names), {})
    out = {flag.removeprefix("--iree-plugin=-hal_target_") for flag in flags if "hal_target" in flag}
    assert out == {"cuda", "metal_spirv", "rocm", "vmvx", "vulkan_spirv"} - kept


def test_the_frontend_of_torch_stays_for_its_ops() -> None:
    assert "--iree-input-type=none" in select_parts(PLAIN, find_target("cpu"), {})
    assert "--iree-plugin=-input_torch" in select_parts(PLAIN, find_target("cpu"), {})
    flags = select_parts(SORTED, find_target("cpu"), {})
    assert "--iree-input-type=tm_tensor" in flags
    assert "--iree-plugin=-input_torch" not in flags


def test_kernels_for_packed_products_stay_where_products_are_packed() -> None:
    packed = f"{PLAIN} // {{{PACKING_MARK}}}"
    assert "--iree-llvmcpu-enable-ukernels=none" in select_parts(PLAIN, find_target("cpu"), {})
    assert "--iree-llvmcpu-enable-ukernels=none" not in select_parts(packed, find_target("cpu"), {})
    assert "--iree-llvmcpu-enable-ukernels=none" not in select_parts(PLAIN, find_target("vulkan"), {})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("%1 = math.exp %0 : f32", {"powf", "__truncsfhf2"}),
        ("%1 = arith.extf %0 : bf16 to f32", {"powf", "__truncsfhf2"}),
        ("%1 = arith.extf %0 : f16 to f32", {"powf"}),
        ("%1 = linalg.matmul ins(%0, %0 : tensor<2x2xf16>, tensor<2x2xf16>)", {"powf"}),
        ("%1 = linalg.matmul ins(%0, %0 : tensor<2x2xbf16>, tensor<2x2xbf16>)", {"powf", "__truncsfhf2"}),
        ("%1 = linalg.softmax outs(%0 : tensor<2xf64>)", set()),
        ("%1 = math.log %0 : f64", set()),
        ("%1 = arith.remf %0, %2 : f32", set()),
    ],
)
def test_a_library_is_left_as_it_is_where_no_kernel_can_call_it(text: str, left: set[str]) -> None:
    flags = select_parts(f"{PLAIN}\n{text}", find_target("cpu"), {})
    found = {flag.removeprefix("--force-attribute=").partition(":")[0] for flag in flags if "force-attribute" in flag}
    assert found & {"powf", "__truncsfhf2"} == left
    assert not any("force-attribute" in flag for flag in select_parts(PLAIN, find_target("vulkan"), {}))


@pytest.mark.parametrize(("threads", "expected"), [(None, False), ("1", True), ("4", False)])
def test_one_thread_where_the_process_has_one(threads: str | None, expected: bool) -> None:
    environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
    assert ("--mlir-disable-threading" in select_parts(PLAIN, find_target("cpu"), environment)) == expected


def test_only_what_is_compared_when_it_runs_is_compiled_unverified() -> None:
    cpu, vulkan = find_target("cpu"), find_target("vulkan")
    assert UNVERIFIED not in select_parts(PLAIN, cpu, {})
    assert UNVERIFIED in select_parts(PLAIN, replace(cpu, is_compared=True), {})
    assert UNVERIFIED not in select_parts(PLAIN, replace(vulkan, is_compared=True), {})
