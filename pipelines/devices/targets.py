# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes what one executable is compiled for: a device, or several whose code lies side by side in one file."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from retrograd.pipelines.devices.device_targets import (
    DATA_TILING,
    IN_ORDER,
    KINDS,
    PACKING_MARK,
    DeviceTarget,
    Ladder,
    UnknownTarget,
    cuda_architecture,
    find_device,
)

__all__ = ["CPU", "Target", "UnknownTarget", "cuda_architecture", "find_target", "host_cpu"]


@dataclass(frozen=True)
class Target:
    """The devices that an executable has code for, each of another kind.

    ``ladder`` holds sets of optimization flags, the fastest code first; the next one is tried where a set fails to
    compile, and the last compiles the most. ``kernels`` are the families of kernels of our own that take what IREE's
    code generator is slow at, and ``tiles`` those that some of these take in place of their own, by question, both as
    text. ``is_compared`` says that what is compiled is compared with eager when it first runs.
    """

    devices: tuple[DeviceTarget, ...]
    ladder: Ladder
    kernels: tuple[str, ...] = ()
    tiles: tuple[tuple[str, str], ...] = ()
    is_compared: bool = False

    def only(self, flags: tuple[str, ...]) -> Target:
        """The target with one set of optimization flags; less data tiling, for modules that it is of no use to."""
        return replace(self, ladder=(flags, _without_tiling(flags)))

    def in_order(self) -> Target:
        """The target with memory laid out for kernels one at a time: those that run together need theirs together."""
        return replace(self, ladder=tuple((*flags, IN_ORDER) for flags in self.ladder))

    @property
    def is_in_order(self) -> bool:
        """Whether memory is laid out for kernels one at a time, whichever flags it takes."""
        return all(IN_ORDER in flags for flags in self.ladder)

    @property
    def is_packed(self) -> bool:
        """Whether our own pass places the buffers of scratch memory, and not IREE's."""
        return self.is_in_order or self.kinds in (("cpu",), ("cuda",))

    @property
    def name(self) -> str:
        """The devices' names, joined by commas."""
        return ",".join(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The devices' names."""
        return tuple(device.name for device in self.devices)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The devices' kinds: ``cuda`` for ``cuda:sm_90``."""
        return tuple(device.kind for device in self.devices)

    @property
    def driver(self) -> str:
        """The IREE driver of the first device."""
        return self.devices[0].driver

    @property
    def has_f64(self) -> bool:
        """Whether all devices compute in float64; a module has one form for all of them."""
        return all(device.has_f64 for device in self.devices)

    @property
    def frees_late(self) -> bool:
        """Whether a driver runs ahead of its device, so that scratch memory is free when the host has waited for it."""
        return self.kinds != ("cpu",)

    @property
    def has_avx512(self) -> bool:
        """Whether it is for one CPU with vectors of 512 bits: this machine's, or one that is named to have them."""
        if len(self.devices) != 1 or self.kinds != ("cpu",):
            return False
        return "avx512f" in host_cpu().split() if self.name == "cpu" else self.name == "cpu:x86-64-v4"

    @property
    def max_bindings(self) -> int | None:
        """How many buffers a kernel may take: the devices share the kernels' signatures; None where any number."""
        return min((d.max_bindings for d in self.devices if d.max_bindings is not None), default=None)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that iree-compile always gets."""
        specs = ",".join(device.spec for device in self.devices)
        # Where it links the executables of several devices, iree-compile keeps those of one.
        link = ("--iree-hal-link-executables=false",) if len(self.devices) > 1 else ()
        # f64 stays f64 where it can: torch-mlir writes scalars in it, and signatures may have it.
        demote = f"--iree-input-demote-f64-to-f32={'false' if self.has_f64 else 'true'}"
        own = (flag for device in self.devices for flag in device.flags)
        return (f"--iree-hal-target-device={specs}", *link, demote, *own)

    def find_rungs(self, linalg: str) -> Ladder:
        """The sets of flags to try on a module: of the ladder, those that are of use to it.

        Data tiling is for modules with a matrix product that bwd-mark-products marked. IREE would pack the operands of
        all products of a module without marks, and the matrix of a product with a vector: a copy of the matrix, eight
        times the time of the product itself. Of a ladder whose sets all have it, the sets are taken without it.
        """
        if PACKING_MARK in linalg:
            return self.ladder
        plain = [flags for flags in self.ladder if DATA_TILING not in flags]
        return tuple(dict.fromkeys(plain or map(_without_tiling, self.ladder)))


def _without_tiling(flags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(flag for flag in flags if flag != DATA_TILING)


def find_target(names: str | Sequence[str], *, cuda_architecture: str | None = None) -> Target:
    """The target of one name, of several separated by commas, or of a sequence of names.

    Several devices share the sets of optimization flags that all of them have, and last the last ones of all together.
    ``cuda_architecture`` is that of ``cuda`` without one.

    Raises:
        UnknownTarget: there is none of that name; the message lists those there are. Or two are of one kind, of which a
            file could not tell which code is whose.
    """
    if isinstance(names, str):
        given = [name.strip() for name in names.split(",")]
    elif isinstance(names, Sequence) and all(isinstance(name, str) for name in names):
        given = list(names)
    else:
        raise UnknownTarget(f"target {names!r} is no name, nor several; write 'cpu', or one of {', '.join(KINDS)}")
    if not given:
        raise UnknownTarget("no target is given; the CPU of this machine is 'cpu'")
    own = {"cuda": f"cuda:{cuda_architecture}"} if cuda_architecture is not None else {}
    return _join_devices(tuple(own.get(name, name) for name in given))


# Each scope of `retrograd.enable` asks, at each step of some trainings.
@functools.cache
def _join_devices(given: tuple[str, ...]) -> Target:
    devices = tuple(map(find_device, given))
    kinds = [device.kind for device in devices]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise UnknownTarget(f"target '{','.join(given)}' names {twice} twice; compile a file for each of them")
    shared = [flags for flags in devices[-1].ladder if all(flags in device.ladder for device in devices)]
    last = tuple(dict.fromkeys(flag for device in devices for flag in device.ladder[-1]))
    return Target(devices, tuple(dict.fromkeys((*shared, last))))


CPU = find_target("cpu")


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


def is_intel() -> bool:
    """Whether the host's CPU is Intel's, for which MKL has its fastest code: with AVX-512, and AMX for bfloat16."""
    return "Intel" in host_cpu()


def is_amd() -> bool:
    """Whether the host's CPU is AMD's."""
    return "AMD" in host_cpu()
