# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors in files: .npy, one array each and in order, or .safetensors, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file

from retrograd.contract.tensors import TensorSpec
from retrograd.tools.console import CommandError, UsageError

NPY, SAFETENSORS = ".npy", ".safetensors"


@dataclass(frozen=True)
class Side:
    """The arguments or the results of a function, as messages name them: ``kind`` is ``argument`` or ``result``."""

    function: str
    kind: str
    specs: tuple[TensorSpec, ...]

    def check(self, spec: TensorSpec, tensor: torch.Tensor, file: str) -> None:
        """Raise CommandError where ``tensor`` is not of the shape and dtype of ``spec``."""
        dtype = dtype_name(tensor)
        if dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            hint = f"; {NPY} files cannot hold it, give it in a {SAFETENSORS} file" if _is_foreign(spec, file) else ""
            raise CommandError(
                f"{self.kind} {spec.name} of {self.function}: expected {describe(spec)}, "
                f"found {dtype} {list(tensor.shape)} in {file}{hint}"
            )


def describe(spec: TensorSpec) -> str:
    """``float32 [5, 4]``."""
    return f"{spec.dtype} {list(spec.shape)}"


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32`` for ``torch.float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def read_npy(side: Side, files: Sequence[str]) -> list[torch.Tensor]:
    """One tensor for each spec of ``side``, from as many .npy files in the same order.

    Raises:
        CommandError: a file too many or too few, one that is no .npy, or another shape or dtype; names the argument.
        OSError: a file cannot be read.
    """
    if len(files) != len(side.specs):
        at = (
            f"nothing is given for {_ordinal(side, len(files))}"
            if len(files) < len(side.specs)
            else _extra(side, files)
        )
        raise CommandError(
            f"{side.function} has {len(side.specs)} {side.kind}s, but {len(files)} {NPY} files are given: {at}; "
            "`retrograd explain` lists them in order"
        )
    tensors = []
    for spec, file in zip(side.specs, files, strict=True):
        tensors.append(_read_array(side, spec, file))
        side.check(spec, tensors[-1], file)
    return tensors


def read_safetensors(side: Side, files: Sequence[str]) -> list[torch.Tensor]:
    """One tensor for each spec of ``side``, by name, from wherever among ``files`` it is; other names are left alone.

    Raises:
        CommandError: a name is in no file or in several, a file is no .safetensors, or another shape or dtype.
        OSError: a file cannot be read.
    """
    tables = {file: _open_table(file) for file in files}
    found = []
    for spec in side.specs:
        holders = [file for file, table in tables.items() if spec.name in table]
        if len(holders) > 1:
            raise CommandError(f"{side.kind} {spec.name} of {side.function} is in both {holders[0]} and {holders[1]}")
        if not holders:
            what = f"{side.kind} {spec.name} ({spec.role}, {describe(spec)}) of {side.function}"
            raise CommandError(f"{what} is not in {', '.join(files)}")
        found.append(tables[holders[0]][spec.name])
        side.check(spec, found[-1], holders[0])
    return found


def read_expected(side: Side, files: Sequence[str]) -> dict[str, torch.Tensor]:
    """Expected results by name: all of them from .npy files in order, or those that .safetensors files hold.

    Raises:
        CommandError: as for ``read_npy`` and ``read_safetensors``, and for a name that is no result.
        UsageError: files of both kinds.
        OSError: a file cannot be read.
    """
    if all(not file.endswith(SAFETENSORS) for file in files):
        return {spec.name: tensor for spec, tensor in zip(side.specs, read_npy(side, files), strict=True)}
    if not all(file.endswith(SAFETENSORS) for file in files):
        raise UsageError(f"expected results are given in {NPY} and in {SAFETENSORS} files: give one kind")
    given = {name: file for file in files for name in _open_table(file)}
    unknown = sorted(given.keys() - {spec.name for spec in side.specs})
    if unknown:
        names = ", ".join(spec.name for spec in side.specs)
        raise CommandError(f"{given[unknown[0]]}: {unknown[0]} is no result of {side.function}; it gives {names}")
    wanted = Side(side.function, side.kind, tuple(spec for spec in side.specs if spec.name in given))
    return {spec.name: tensor for spec, tensor in zip(wanted.specs, read_safetensors(wanted, files), strict=True)}


def check_npy_can_hold(side: Side) -> None:
    """Raise CommandError where a tensor of ``side`` cannot be written as .npy."""
    for spec in side.specs:
        if _is_foreign(spec, NPY):
            raise CommandError(
                f"{side.kind} {spec.name} of {side.function} is {spec.dtype}, which {NPY} files cannot hold: "
                f"write to a {SAFETENSORS} file with --output"
            )


def npy_names(specs: Sequence[TensorSpec]) -> list[str]:
    """A file name for each spec: its name with what is awkward in one replaced, numbered where two are the same."""
    names: list[str] = []
    for index, spec in enumerate(specs):
        stem = re.sub(r"[^\w.-]+", "_", spec.name).strip("_") or "_"
        name = f"{stem}{NPY}"
        # Compared as a file system that ignores case would.
        names.append(f"{stem}.{index}{NPY}" if name.lower() in (n.lower() for n in names) else name)
    return names


def write_npy(folder: Path, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
    """Write a .npy file for each tensor to ``folder``, which is made if it is not there.

    Raises:
        OSError: the file system refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in zip(npy_names(specs), tensors, strict=True):
        np.save(folder / name, tensor.numpy(), allow_pickle=False)


def write_safetensors(file: Path, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
    """Write all tensors to one file, by name.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        save_file({spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}, file)
    except safetensors.SafetensorError as error:
        raise CommandError(f"{file}: cannot be written: {error}") from error


def _read_array(side: Side, spec: TensorSpec, file: str) -> torch.Tensor:
    where = f"{side.kind} {spec.name} of {side.function}: {file}"
    with open(file, "rb") as stream:
        try:
            array = np.lib.format.read_array(stream, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise CommandError(f"{where}: not a whole {NPY} file: {error}; expected {describe(spec)}") from error
        if stream.read(1):
            raise CommandError(f"{where}: holds more than one array; give each in a file of its own")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise CommandError(
            f"{where}: numpy dtype {array.dtype.str} is none of torch's; expected {describe(spec)}"
        ) from error


def _open_table(file: str) -> dict[str, torch.Tensor]:
    try:
        with safetensors.safe_open(file, framework="pt") as table:
            return {name: table.get_tensor(name) for name in table.keys()}  # noqa: SIM118  (no mapping)
    except safetensors.SafetensorError as error:
        raise CommandError(f"{file}: not a whole {SAFETENSORS} file: {error}") from error


def _ordinal(side: Side, index: int) -> str:
    spec = side.specs[index]
    return f"{side.kind} {index}, {spec.name} ({spec.role}, {describe(spec)})"


def _extra(side: Side, files: Sequence[str]) -> str:
    return f"{files[len(side.specs)]} is one too many"


def _is_foreign(spec: TensorSpec, file: str) -> bool:
    return not file.endswith(SAFETENSORS) and (spec.dtype == "bfloat16" or spec.dtype.startswith("float8"))
