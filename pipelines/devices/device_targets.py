# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The devices that code can be generated for, as data: what iree-compile is told of each. A device is called ``kind``
or ``kind:model``: ``cpu``, ``cpu:x86-64-v3``, ``cuda:sm_90``, ``vulkan:rdna3``, ``hip:gfx942``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from retrograd.contract.errors import RetrogradError, did_you_mean

DATA_TILING = "--iree-opt-data-tiling"
# On the products that it is for; see bwd-mark-products.
PACKING_MARK = "iree.opt.data_tiling"
FEWER_FUSIONS = "--iree-dispatch-creation-fuse-multi-use=false"
SPLIT_REDUCTION = "--iree-dispatch-creation-enable-split-reduction"
# Sums of floats along a vector in any order, lane by lane, and not one number after the other.
ANY_ORDER = "--iree-llvmcpu-reassociate-fp-reductions"
PLAIN_REDUCTIONS = "--iree-codegen-llvmgpu-use-reduction-vector-distribution=false"
# What a kernel writes into one allocation is one buffer to it, at several offsets.
SHARED_BINDINGS = "--iree-stream-resource-alias-mutable-bindings"
# Memory for one kernel at a time, in the order of the IR: what one reads for the last time is free for the next.
IN_ORDER = "--iree-stream-partitioning-favor=debug"

Ladder = tuple[tuple[str, ...], ...]


class UnknownTarget(RetrogradError, ValueError):
    """A target that this release does not compile for."""


@dataclass(frozen=True)
class DeviceTarget:
    """One kind of device, and which model of it.

    ``driver`` is the IREE driver that runs its code. ``spec`` describes it to ``--iree-hal-target-device``, by IREE's
    name for it or as a ``#hal.device.target`` attribute. ``executable_format`` is how an executable for it is marked in
    a vmfb. ``flags`` always go to iree-compile, sets of ``ladder`` are tried in turn: the fastest code first, last what
    compiles the most.
    ``has_f64`` says whether it computes in float64, ``max_bindings`` how many buffers its driver lets a kernel take,
    if that is bounded.
    """

    name: str
    driver: str
    spec: str
    executable_format: str
    flags: tuple[str, ...]
    ladder: Ladder
    has_f64: bool
    max_bindings: int | None = None

    @property
    def kind(self) -> str:
        """``cuda`` of ``cuda:sm_90``."""
        return self.name.partition(":")[0]

    @property
    def architecture(self) -> str:
        """``sm_90`` of ``cuda:sm_90``; empty for the one that is here."""
        return self.name.partition(":")[2]


# Data tiling makes large matrix products fast; where producers with several users are fused into it, vectors of 32 KiB
# come out and the compilation fails. Split reductions add up in two levels: as fast, and ten times closer to f64 over a
# batch norm's thousands of elements. In any order a sum along rows takes a sixth of the time, and is as near to f64.
_CPU_LADDER = (
    (DATA_TILING, FEWER_FUSIONS, SPLIT_REDUCTION, ANY_ORDER),
    (DATA_TILING, FEWER_FUSIONS, ANY_ORDER),
    (FEWER_FUSIONS, SPLIT_REDUCTION, ANY_ORDER),
    ("--iree-opt-level=O1",),
    (),
)
# Without split reductions one workgroup adds up a whole column.
_VULKAN_LADDER = ((SPLIT_REDUCTION,), (FEWER_FUSIONS, SPLIT_REDUCTION), ("--iree-opt-level=O1",), ())
# The code generator that spreads a reduction's vectors over a warp gives up on some: an argmax of long rows, a
# log-sum-exp fused with the product that it is of. Without it they compile, to slower code.
_LLVM_GPU_LADDER = (
    (SPLIT_REDUCTION,),
    (FEWER_FUSIONS, SPLIT_REDUCTION),
    (SPLIT_REDUCTION, PLAIN_REDUCTIONS),
    ("--iree-opt-level=O1",),
    (PLAIN_REDUCTIONS,),
)

# IREE_HAL_CUDA_MAX_DISPATCH_BINDING_COUNT, and the same for HIP, in IREE's runtime: it loads no file with more.
_MAX_BINDINGS = 16


@dataclass(frozen=True)
class _CudaArchitecture:
    """A compute capability: the PTX version that its code is written in, shared memory of a block, in bytes, and
    whether its tensor cores take bf16 and f8."""

    ptx: int
    shared_memory: int
    bf16: bool = True
    f8: bool = False

    def attribute(self, name: str) -> str:
        """``#hal.device.target`` for it. iree-compile has no such description of sm_90 of its own."""
        return f'#hal.device.target<"cuda", [{self.executable(name)}]>'

    def executable(self, name: str) -> str:
        """``#hal.executable.target`` for it, which its code is marked with."""
        mma = ["NV_MMA_SYNC_F32_16x8x16_F16", "NV_MMA_SYNC_F16_16x8x16_F16"]
        mma += ["NV_MMA_SYNC_F32_16x8x16_BF16"] * self.bf16
        mma += ["NV_MMA_SYNC_F32_16x8x32_F8E4M3FN", "NV_MMA_SYNC_F32_16x8x32_F8E5M2"] * self.f8
        mma += ["NV_WMMA_F32_16x16x16_F16", "NV_WMMA_F16_16x16x16_F16"]
        workgroup = ", ".join(
            [
                "compute = fp64|fp32|fp16|int64|int32|int16|int8",
                "storage = b64|b32|b16|b8",
                "subgroup = shuffle|arithmetic",
                "dot = dp4xi8toi32",
                f"mma = [{', '.join(f'<{shape}>' for shape in mma)}]",
                "subgroup_size_choices = [32]",
                "max_workgroup_sizes = [1024, 1024, 64]",
                "max_thread_count_per_workgroup = 1024",
                f"max_workgroup_memory_bytes = {self.shared_memory}",
                "max_workgroup_counts = [2147483647, 65535, 65535]",
            ]
        )
        info = f'#iree_gpu.target<arch = "{name}", features = "+ptx{self.ptx}", wgp = <{workgroup}>>'
        return f'#hal.executable.target<"cuda", "cuda-nvptx-fb", {{iree_codegen.target_info = {info}}}>'


# Shared memory as the CUDA C++ Programming Guide has it, "Technical Specifications per Compute Capability".
CUDA_ARCHITECTURES = {
    "sm_75": _CudaArchitecture(76, 64 << 10, bf16=False),
    "sm_80": _CudaArchitecture(76, 163 << 10),
    "sm_86": _CudaArchitecture(76, 99 << 10),
    "sm_89": _CudaArchitecture(84, 99 << 10, f8=True),
    "sm_90": _CudaArchitecture(80, 227 << 10),
    "sm_120": _CudaArchitecture(87, 99 << 10, f8=True),
}
# The oldest with bf16; its PTX runs on every card since.
_CUDA_BASELINE = "sm_80"


def cuda_architecture(major: int, minor: int) -> str:
    """The newest architecture whose code a card of this compute capability runs.

    Raises:
        UnknownTarget: the card is older than all of them.
    """
    known = {tuple(divmod(int(name[3:]), 10)): name for name in CUDA_ARCHITECTURES}
    below = [capability for capability in known if capability <= (major, minor)]
    if not below:
        raise UnknownTarget(
            f"a card of compute capability {major}.{minor} is older than {next(iter(CUDA_ARCHITECTURES))}, "
            "the oldest that code is generated for; compile for the CPU"
        )
    return known[max(below)]


def _cpu(model: str) -> DeviceTarget:
    return DeviceTarget(
        name="cpu" if model == "host" else f"cpu:{model}",
        driver="local-task",
        spec="local",
        executable_format="embedded-elf",
        flags=(
            "--iree-hal-local-target-device-backends=llvm-cpu",
            # Without a CPU the code is for a generic x86-64, several times slower.
            f"--iree-llvmcpu-target-cpu={model}",
            # Of packed products a workgroup's part: of 256 KiB, as it is without, large operands are read again and
            # again from behind the second level of cache; a step of a GPT took 1.1 times as long on one core.
            "--iree-llvmcpu-matmul-tile-bytes=1048576",
        ),
        ladder=_CPU_LADDER,
        has_f64=True,
    )


def _cuda(model: str) -> DeviceTarget:
    if model not in CUDA_ARCHITECTURES:
        raise UnknownTarget(f"cuda architecture '{model}' is not one of {', '.join(CUDA_ARCHITECTURES)}")
    spec = CUDA_ARCHITECTURES[model].attribute(model)
    return DeviceTarget(
        f"cuda:{model}",
        driver="cuda",
        spec=spec,
        executable_format="cuda-nvptx-fb",
        flags=(),
        ladder=_LLVM_GPU_LADDER,
        has_f64=True,
        max_bindings=_MAX_BINDINGS,
    )


# What iree-compile takes for portable, the Android baseline of 2022, has no integers but those of 32 bits: max pooling,
# whose indices are 64 bits wide, does not compile for it. Drivers for AMD, Intel and NVIDIA, newer ones for Arm, and
# lavapipe have all that is listed here (https://vulkan.gpuinfo.org, shaderInt64, shaderInt8, storageBuffer8BitAccess).
_VULKAN_WORKGROUP = (
    "compute = fp32|int64|int32|int16|int8, storage = b64|b32|b16|b8, subgroup = none, "
    "subgroup_size_choices = [32], max_workgroup_sizes = [128, 128, 64], max_thread_count_per_workgroup = 128, "
    "max_workgroup_memory_bytes = 16384, max_workgroup_counts = [65535, 65535, 65535]"
)
_VULKAN_PORTABLE = (
    '#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
    '{iree_codegen.target_info = #iree_gpu.target<arch = "portable", features = "spirv:v1.3,cap:Shader", '
    f"wgp = <{_VULKAN_WORKGROUP}>>}}>]>"
)


def _vulkan(model: str) -> DeviceTarget:
    portable = model == "portable"
    name, spec = ("vulkan", _VULKAN_PORTABLE) if portable else (f"vulkan:{model}", "vulkan")
    flags = () if portable else (f"--iree-vulkan-target={model}",)
    return DeviceTarget(name, "vulkan", spec, "vulkan-spirv-fb", flags, _VULKAN_LADDER, has_f64=False)


def _hip(model: str) -> DeviceTarget:
    flags = (f"--iree-rocm-target={model}",)
    return DeviceTarget(
        f"hip:{model}",
        driver="hip",
        spec="hip",
        executable_format="rocm-hsaco-fb",
        flags=flags,
        ladder=_LLVM_GPU_LADDER,
        has_f64=True,
        max_bindings=_MAX_BINDINGS,
    )


# What makes each kind, and the model where none is named.
_KINDS: dict[str, tuple[Callable[[str], DeviceTarget], str]] = {
    "cpu": (_cpu, "host"),
    "cuda": (_cuda, _CUDA_BASELINE),
    "vulkan": (_vulkan, "portable"),
    "hip": (_hip, "gfx942"),
}
KINDS = tuple(_KINDS)


def find_device(name: str) -> DeviceTarget:
    """The device called ``kind`` or ``kind:model``.

    Names of CPUs, and of GPUs for vulkan and hip, are iree-compile's: it refuses those that it does not know.

    Raises:
        UnknownTarget: there is no such kind, or no such CUDA architecture; the message lists those there are.
    """
    kind, _, model = name.partition(":")
    if kind not in _KINDS:
        raise UnknownTarget(f"target '{name}' is not one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    make, default = _KINDS[kind]
    if not re.fullmatch(r"[\w.-]*", model) or name.endswith(":"):
        raise UnknownTarget(f"target '{name}' names no model of {kind}; write '{kind}' or '{kind}:{default}'")
    return make(model or default)
