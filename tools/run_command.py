# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd run``: call a function of a compiled file on tensors from files."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from retrograd.contract.manifest import Manifest
from retrograd.contract.tensors import FunctionSpec
from retrograd.frontend.verification.first_comparison import relative_error, tolerance_of
from retrograd.runtime.artifact import read_artifact
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.programs.placement import choose_uri
from retrograd.runtime.steps.bridge import run_function
from retrograd.tools import tensor_files
from retrograd.tools.compile_command import check_writable
from retrograd.tools.console import CommandError, UsageError, print_table
from retrograd.tools.tensor_files import Side


def execute(arguments: argparse.Namespace) -> int:
    """Check everything, run the function, write and print its results, compare them with what is expected."""
    output, folder = arguments.output, arguments.output_dir
    if output is not None and output.suffix != tensor_files.SAFETENSORS:
        raise UsageError(
            f"--output takes a {tensor_files.SAFETENSORS} file, found '{output}'; --output-dir writes .npy files"
        )
    artifact = read_artifact(arguments.file)
    function = find_function(artifact.manifest, arguments.function, arguments.file)
    results = Side(function.name, "result", function.results)
    tensors = read_inputs(function, arguments)
    expected = tensor_files.read_expected(results, arguments.expected) if arguments.expected else {}
    if output is not None:
        check_writable(output)
    elif folder is not None:
        tensor_files.check_npy_can_hold(results)
    program = Program.load(artifact.vmfb, driver=choose_uri(artifact.manifest.targets, arguments.device))
    given = [t.cpu() for t in run_function(program, function, [t.to(program.torch_device) for t in tensors])]
    if output is not None:
        tensor_files.write_safetensors(output, function.results, given)
    elif folder is not None:
        tensor_files.write_npy(folder, function.results, given)
    errors = {
        spec.name: relative_error(tensor, expected[spec.name])
        for spec, tensor in zip(function.results, given, strict=True)
        if spec.name in expected
    }
    print_results(function, given, errors, folder)
    check_errors(errors, expected, arguments.tolerance)
    return 0


def find_function(manifest: Manifest, name: str, file: Path) -> FunctionSpec:
    """The function called ``name``.

    Raises:
        CommandError: there is none; the message lists those there are.
    """
    for function in manifest.functions:
        if function.name == name:
            return function
    raise CommandError(f"{file}: no function '{name}'; it has {', '.join(f.name for f in manifest.functions)}")


def read_inputs(function: FunctionSpec, arguments: argparse.Namespace) -> list[torch.Tensor]:
    """The arguments of ``function`` from the files given, in its order."""
    side = Side(function.name, "argument", function.arguments)
    if arguments.inputs:
        return tensor_files.read_safetensors(side, arguments.inputs)
    return tensor_files.read_npy(side, arguments.input)


def print_results(
    function: FunctionSpec, tensors: list[torch.Tensor], errors: dict[str, float], folder: Path | None
) -> None:
    """Print a row for each result: what it is, its Euclidean norm, how far it is from what was expected, its file."""
    columns = ["result", "role", "shape", "dtype", "norm"]
    columns += ["difference"] if errors else []
    columns += ["file"] if folder is not None else []
    files = tensor_files.npy_names(function.results)
    rows = []
    for spec, tensor, file in zip(function.results, tensors, files, strict=True):
        row = [spec.name, spec.role, str(list(spec.shape)), spec.dtype, f"{float(tensor.double().norm()):.6g}"]
        if errors:
            row.append(f"{errors[spec.name]:.2e}" if spec.name in errors else "")
        if folder is not None:
            row.append(str(folder / file))
        rows.append(row)
    print_table(columns, rows, f"{function.name}: {len(rows)} results", right=("norm", "difference"))


def check_errors(errors: dict[str, float], expected: dict[str, torch.Tensor], tolerance: float | None) -> None:
    """Raise CommandError where a result differs by more than ``tolerance``, or, if None, than rounding explains."""
    allowed = {n: tolerance_of(t.dtype) if tolerance is None else tolerance for n, t in expected.items()}
    wrong = [name for name, error in errors.items() if not error <= allowed[name]]
    if wrong:
        first = f"{wrong[0]} by {errors[wrong[0]]:.2e} (relative norm; {allowed[wrong[0]]:.0e} is allowed)"
        raise CommandError(f"{len(wrong)} of {len(errors)} results differ from what was expected, first {first}")
