# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs the backward pass of a saved artifact with IREE's own `iree-run-module`, without Python and PyTorch."""

from __future__ import annotations

import copy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrograd.contract.roles import BACKWARD, FORWARD, GRAD, MUTATION, TANGENT, name_in_role
from retrograd.runtime.artifact import read_artifact
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.steps.bridge import run_function

TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Replay:
    """The command, to be run in ``folder``, how it ended and what it printed."""

    folder: Path
    command: str
    succeeded: bool
    output: str


def replay(path: Path, model: nn.Module, images: Tensor, labels: Tensor) -> Replay:
    """Give `iree-run-module` the backward's arguments for one batch, and eager's gradients as the outputs to expect.

    The folder stays, so that the command can be run again.

    Raises:
        FileNotFoundError: `iree-run-module` is not installed.
    """
    tool = shutil.which("iree-run-module", path=sysconfig.get_path("scripts")) or shutil.which("iree-run-module")
    if tool is None:
        raise FileNotFoundError("iree-run-module not found: pip install iree-base-runtime")
    arguments, expected = _backward_tensors(path, model, images, labels)
    folder = Path(tempfile.mkdtemp(prefix="retrograd-digits-"))
    flags = [f"--module={path.resolve()}", "--device=local-task", "--function=backward"]
    for i, tensor in enumerate(arguments):
        np.save(folder / f"argument_{i}.npy", tensor.detach().contiguous().numpy())
        flags.append(f"--input=@argument_{i}.npy")
    for i, tensor in enumerate(expected):
        np.save(folder / f"gradient_{i}.npy", tensor.contiguous().numpy())
        flags.append(f"--expected_output=@gradient_{i}.npy")
    result = subprocess.run(
        [tool, *flags], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    command = shlex.join(["iree-run-module", *flags])
    return Replay(folder, command, result.returncode == 0, (result.stdout + result.stderr).strip())


def _backward_tensors(
    path: Path, model: nn.Module, images: Tensor, labels: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The backward's arguments, in its order, and the gradients that eager gives, in the order of its results."""
    # Eager's step updates buffers, and the caller's model must stay as it is.
    model = copy.deepcopy(model)
    artifact = read_artifact(path)
    forward, backward = (artifact.manifest.function(name) for name in (FORWARD, BACKWARD))
    values = {name: t.detach().clone() for name, t in model.state_dict(keep_vars=True).items()} | {"args[0]": images}
    results = run_function(Program.load(artifact.vmfb), forward, [values[a.name] for a in forward.arguments])
    values |= {r.name: t for r, t in zip(forward.results, results, strict=True) if r.role != MUTATION}
    logits = model(images)
    # The sum, not the mean: iree-run-module compares with an absolute threshold, which must be small beside gradients.
    loss = F.cross_entropy(logits, labels, reduction="sum")
    parameters = dict(model.named_parameters())
    tangent, *found = torch.autograd.grad(loss, [logits, *parameters.values()])
    gradients = {name_in_role(GRAD, name): gradient for name, gradient in zip(parameters, found, strict=True)}
    arguments = [tangent if a.role == TANGENT else values[a.name] for a in backward.arguments]
    return arguments, [gradients[r.name] for r in backward.results]
