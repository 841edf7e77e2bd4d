# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which families of kernels a target is compiled with: what was asked for, as far as it can be had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from retrograd.contract.errors import did_you_mean
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.kernels.ptx import INSTALL, find_triton
from retrograd.pipelines.kernels.tiles import ARCHITECTURES

NAMES = ("attention", "columns", "convolutions", "norms", "products", "rows", "scatters", "transposes")
"""The families: who only chooses among them imports none."""

AUTO, OFF = "auto", "off"
LIBRARY = "library"
"""Names what a library of PyTorch's computes, as if it were a family: it has no kernels in executables."""


def with_kernels(target: Target, wanted: str | Sequence[str]) -> Target:
    """``target`` with the families of kernels that are ``wanted``: ``"auto"`` for all, where Triton is installed and
    the code is for one CUDA device that there are kernels for; ``"off"`` for none; or their names.

    Raises:
        ValueError: no such family; or kernels are asked for by name that cannot be had here.
        TypeError: as for :func:`check_kernels`.
    """
    names, obstacle = [name for name in check_kernels(wanted) if name != LIBRARY], find_obstacle(target)
    if wanted == AUTO:
        return target if obstacle else replace(target, kernels=NAMES)
    if obstacle and names:
        raise ValueError(f"kernels {', '.join(names)} cannot be had: {obstacle}; use kernels='auto' or 'off'")
    return replace(target, kernels=tuple(name for name in NAMES if name in names))


def check_kernels(wanted: str | Sequence[str]) -> list[str]:
    """The names of families, and of the library, in what is wanted.

    Raises:
        ValueError: there is none of a name; lists those there are.
        TypeError: it is neither text nor several texts.
    """
    known = [AUTO, OFF, *NAMES, LIBRARY]
    if not isinstance(wanted, Iterable):
        raise TypeError(f"kernels is one of {', '.join(map(repr, known))} or a list of families, got {wanted!r}")
    if wanted in (AUTO, OFF):
        return []
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in (*NAMES, LIBRARY):
            raise ValueError(f"kernels {name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}")
    return names


def find_obstacle(target: Target) -> str | None:
    """Why a target has no kernels of ours; ``None`` where it has."""
    if target.kinds != ("cuda",):
        return f"they are for one CUDA device, and the target is {target.name}"
    architecture = target.devices[0].architecture
    if architecture not in ARCHITECTURES:
        return f"there are some for {', '.join(ARCHITECTURES)}, and the target is {target.name}"
    return None if find_triton() is not None else f"Triton is not installed ({INSTALL})"
