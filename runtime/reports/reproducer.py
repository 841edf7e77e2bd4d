# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A fault as a folder: the IR, tensors as files, and a script that shows it with stock tools."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SCRIPT = "reproduce.sh"

# What .npy files have no code for, by IREE's names: written as raw bytes, with the type on the command line.
_RAW = {
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e4m3fnuz: "f8E4M3FNUZ",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e5m2fnuz: "f8E5M2FNUZ",
}


@dataclass(frozen=True)
class Reproducer:
    """``texts`` are files of IR by name, ``commands`` lead from them to an executable; ``run`` is the command that runs
    it, to which the tensors are added. Without ``expected`` results, the commands are what fails.

    ``tolerance`` is relative to the root mean square of an expected result.
    """

    texts: Mapping[str, str]
    commands: Sequence[str]
    run: str
    arguments: Mapping[str, torch.Tensor]
    expected: Mapping[str, torch.Tensor]
    tolerance: float

    def write(self, folder: Path) -> Path:
        """Write the files and the script, which exits with a status other than 0 where the fault shows; its path.

        Raises:
            OSError: the folder or a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        lines = ["#!/bin/sh", "set -eu", 'cd "$(dirname "$0")"', *self.commands]
        if self.expected:
            options = [f"--input={_write(folder, f'{n}.npy', t)}" for n, t in self.arguments.items()]
            options += [f"--expected_output={_write(folder, f'expected.{n}.npy', t)}" for n, t in self.expected.items()]
            options += [
                f"--expected_{kind}_threshold={self._threshold():.3e}" for kind in ("f16", "bf16", "f32", "f64")
            ]
            lines.append(" \\\n  ".join([self.run, *map(shlex.quote, options), "--expected_rtol=0"]))
        script = folder / SCRIPT
        script.write_text("\n".join([*lines, ""]), encoding="utf-8")
        script.chmod(0o755)
        return script

    def _threshold(self) -> float:
        floats = [t.double().cpu() for t in self.expected.values() if t.is_floating_point() and t.numel()]
        sizes = [float(t.norm()) / math.sqrt(t.numel()) for t in floats]
        return self.tolerance * min((s for s in sizes if s > 0), default=1.0)


def _write(folder: Path, name: str, tensor: torch.Tensor) -> str:
    """Write a tensor; what ``iree-run-module`` calls it."""
    values = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    kind = _RAW.get(values.dtype)
    if kind is None:
        np.save(folder / name, values.numpy(), allow_pickle=False)
        return f"@{name}"
    raw = f"{name.removesuffix('.npy')}.bin"
    (folder / raw).write_bytes(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{''.join(f'{n}x' for n in values.shape)}{kind}=@{raw}"
