# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which parts of iree-compile a module has use for. What it compiles to is the same with all of them.

Each canonicalization, of which a compilation has hundreds, first sorts its patterns by every operation of every dialect
that is loaded: those of other devices and other frontends took a fifth of the CPU time of a small module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from retrograd.pipelines.devices.device_targets import PACKING_MARK
from retrograd.pipelines.devices.targets import Target

# Plugins of iree-compile that bring code generators, and the kinds of devices that they are for.
_GENERATORS = {
    "hal_target_cuda": "cuda",
    "hal_target_metal_spirv": "metal",
    "hal_target_rocm": "hip",
    "hal_target_vmvx": "vmvx",
    "hal_target_vulkan_spirv": "vulkan",
}
# That of torch is for the few ops of torch-mlir's own dialect, in which it leaves a sort or a scatter.
_FRONTENDS = ("input_stablehlo", "input_tosa")
_TORCH_FRONTEND, _TORCH_OP = "input_torch", "tm_tensor."
_THREADS_VARIABLE = "OMP_NUM_THREADS"
UNVERIFIED = "--verify=false"
"""The flag that has iree-compile leave out its check of the IR after each pass; ours, after each that has kernels."""
# An analysis of the whole program numbers its values as if to print them, and before that checks it: 55 times in the
# compilation of two layers, 4% of its instructions.
_PRINTED_UNCHECKED = "--mlir-print-assume-verified"
# A library of kernels for packed products and for packing is read and linked to each module: a twentieth of the time of
# a small one.
_NO_PACKED_KERNELS = "--iree-llvmcpu-enable-ukernels=none"
# To each module IREE links a mathematical library, and LLVM optimizes and compiles all of it before the linker drops
# what no kernel calls, which is all of it in code of float32: a tenth of the time of a small module. Where none of
# these functions can be called LLVM is told to leave them as they are. It was looked up for which ops of which types
# kernels call one: those of float64, remainders, and conversions of float16 on a CPU without.
_LIBRARY = (
    *("exp", "expf", "specialcase", "log", "powf", "fmodf", "frexpf", "ldexpf", "scalbnf"),
    *(f"__math_{name}" for name in ("divzero", "invalid", "invalidf", "oflow", "oflowf", "uflow", "uflowf")),
    *("__math_xflow", "__math_xflowf", "feclearexcept", "feraiseexcept", "fetestexcept", "fegetround", "__fesetround"),
    *("fegetenv", "fesetenv"),
)
_HALF_LIBRARY = (
    *("iree_h2f_ieee", "iree_f2h_ieee", "__gnu_h2f_ieee", "__gnu_f2h_ieee"),
    *("__extendhfsf2", "__truncsfhf2", "__extendhfdf2", "__truncdfhf2"),
)
_CALLS_LIBRARY = re.compile(r"f64>|\bmath\.\w+ [^\n]*f64|\barith\.remf\b")
_HALF = re.compile(r"(?<!b)f16\b")


def has_one_thread(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether there are as many processes as cores, as torchrun starts them."""
    return environment.get(_THREADS_VARIABLE) == "1"


def select_parts(linalg: str, target: Target, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The flags that leave out what iree-compile does not need for this module and these devices.

    Where ``OMP_NUM_THREADS`` is 1 it gets one thread: there are as many processes as cores, and a thread pool of each
    costs them time.

    For a CPU, what is compared with eager when it first runs is compiled without a check of the IR after each pass once
    kernels are formed: of MobileNetV2's that took a quarter of iree-compile's CPU time. It would find a fault of
    IREE's, which makes such a program wrong or iree-compile crash; both are noticed. (Until kernels are formed, each
    pass is checked all the same: of what contradicts itself there comes code that writes behind its results.)
    """
    needless = [plugin for plugin, kind in _GENERATORS.items() if kind not in target.kinds]
    needless += _FRONTENDS
    flags = [_PRINTED_UNCHECKED]
    if "cpu" in target.kinds and PACKING_MARK not in linalg:
        flags.append(_NO_PACKED_KERNELS)
    if target.kinds == ("cpu",):
        flags += _leave_library(linalg)
    if _TORCH_OP in linalg:
        flags.append("--iree-input-type=tm_tensor")
    else:
        needless.append(_TORCH_FRONTEND)
        flags.append("--iree-input-type=none")
    flags += [f"--iree-plugin=-{plugin}" for plugin in needless]
    if has_one_thread(environment):
        flags.append("--mlir-disable-threading")
    if target.is_compared and target.kinds == ("cpu",):
        flags.append(UNVERIFIED)
    return tuple(flags)


def _leave_library(linalg: str) -> list[str]:
    """The flags by which LLVM optimizes none of those functions of IREE's library that this module cannot call. One
    that is called all the same gives the same numbers, later."""
    if _CALLS_LIBRARY.search(linalg):
        return []
    names = _LIBRARY if _HALF.search(linalg) else _LIBRARY + _HALF_LIBRARY
    return [f"--force-attribute={name}:{attribute}" for name in names for attribute in ("optnone", "noinline")]
