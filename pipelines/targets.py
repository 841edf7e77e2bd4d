# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a device kind needs of iree-compile: its flags, and sets of optimization flags to try in turn."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, replace


class UnknownTarget(ValueError):
    """A target that this release does not compile for."""


@dataclass(frozen=True)
class Target:
    """A kind of device.

    ``flags`` are always given to iree-compile. ``ladder`` holds sets of optimization flags, the fastest code first; the
    next one is tried where a set fails to compile, and the last is plain.
    """

    name: str
    driver: str
    flags: tuple[str, ...]
    ladder: tuple[tuple[str, ...], ...]

    def only(self, flags: tuple[str, ...]) -> Target:
        """The target with one set of optimization flags; less data tiling, for modules that it is of no use to."""
        return replace(self, ladder=(flags, tuple(flag for flag in flags if flag != _DATA_TILING)))

    def find_rungs(self, linalg: str) -> tuple[tuple[str, ...], ...]:
        """The sets of flags to try on a module: of the ladder, those that are of use to it.

        Data tiling packs operands. Without a matrix product that repays it, what it packs is the matrix of a product
        with a vector: a copy of the matrix, eight times the time of the product itself.
        """
        if _PRODUCT.search(linalg):
            return self.ladder
        return tuple(dict.fromkeys(flags for flags in self.ladder if _DATA_TILING not in flags))


_DATA_TILING = "--iree-opt-data-tiling"
_FEWER_FUSIONS = "--iree-dispatch-creation-fuse-multi-use=false"
_SPLIT_REDUCTION = "--iree-dispatch-creation-enable-split-reduction"
_PRODUCT = re.compile(r"linalg\.(?:quantized_)?(?:batch_)?(?:matmul|mmt4d|conv_)")

CPU = Target(
    name="cpu",
    driver="local-task",
    flags=(
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        # Without this the code is for a generic x86-64, several times slower.
        "--iree-llvmcpu-target-cpu=host",
        # f64 stays f64: torch-mlir accumulates variances in it, and signatures may have it.
        "--iree-input-demote-f64-to-f32=false",
    ),
    # Data tiling makes matrix products fast; where producers with several users are fused into it, vectors of 32 KiB
    # come out and the compilation fails. Split reductions add up in two levels: as fast, and ten times closer to f64
    # over a batch norm's thousands of elements.
    ladder=(
        (_DATA_TILING, _FEWER_FUSIONS, _SPLIT_REDUCTION),
        (_DATA_TILING, _FEWER_FUSIONS),
        (_FEWER_FUSIONS, _SPLIT_REDUCTION),
        ("--iree-opt-level=O1",),
        (),
    ),
)

TARGETS: dict[str, Target] = {CPU.name: CPU}


def find_target(name: str) -> Target:
    """The target called ``name``.

    Raises:
        UnknownTarget: there is none; the message lists those there are.
    """
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UnknownTarget(f"target '{name}' is not one of {', '.join(TARGETS)}{hint}")
    return TARGETS[name]


@functools.cache
def host_cpu() -> str:
    """The CPU's model and feature flags: code compiled for the host must not be taken from a cache on another."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = file.read().split("\n\n", 1)[0].splitlines()
    except OSError:
        import platform

        return platform.processor() or platform.machine()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
