# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Each model of the suite, trained by eager and by its compiled twin from the same seed: gradients, parameters,
artifact."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from iree_tools import RUN_MODULE
from models import Case
from suite import SUITE
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retrograd
from retrograd.contract.sizes import numbers_of
from retrograd.pipelines.stages import staged
from retrograd.pipelines.toolchain import module_parts
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.steps.bridge import run_function

# Gradients of each step, and the last parameters.
Trained = tuple[list[dict[str, Tensor]], dict[str, Tensor]]

STEPS = 20
# Those that are trained with eager's partition too: layers, norms and attention, and losses of several outputs.
BY_DEFAULT = ("transformer", "several_outputs")
GRADIENT_TOLERANCE = 2e-5
PARAMETER_TOLERANCE = 1e-4


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def digests(tensors: list[Tensor]) -> list[str]:
    return [
        hashlib.sha256(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for t in tensors
    ]


def train(case: Case, step: object) -> Trained:
    """Gradients of each step, with respect to the parameters as they were, and the last parameters."""
    assert callable(step)
    leaves = case.leaves()
    optimizer = torch.optim.SGD(list(leaves.values()), lr=0.02, momentum=0.9)
    gradients = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        case.loss(step(*case.args)).backward()
        gradients.append({name: t.grad.clone() for name, t in leaves.items() if t.grad is not None})
        optimizer.step()
    return gradients, {name: t.detach().clone() for name, t in leaves.items()}


def assert_trains_alike(found: Trained, expected: Trained) -> None:
    """Gradients of each step and the last parameters.

    The first step has the same parameters on both sides; after it, what differs is the course of training as well.
    """
    assert found[0][0].keys() == expected[0][0].keys()
    for i, (ours, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        for leaf, gradient in theirs.items():
            error = relative_error(ours[leaf], gradient)
            assert error <= GRADIENT_TOLERANCE, f"step {i}, gradient of {leaf}: {error:.2e}"
    for leaf, parameter in expected[1].items():
        assert relative_error(found[1][leaf], parameter) <= PARAMETER_TOLERANCE, leaf


@pytest.mark.short_cases("mlp-min-cut", "several_outputs-default")
@pytest.mark.parametrize(
    ("name", "partition"), [*((name, "min-cut") for name in SUITE), *((name, "default") for name in BY_DEFAULT)]
)
def test_trains_as_eager(name: str, partition: str) -> None:
    """`make test-budgets` tries all models with all partitions."""
    ours, theirs = SUITE[name].make("test"), SUITE[name].make("test")
    options: dict[str, Any] = {"partition": partition, "portable": partition == "min-cut"}
    step = retrograd.compile_backward(ours.model, ours.args, **options)
    gradients, parameters = train(ours, step)
    expected_gradients, expected_parameters = train(theirs, theirs.model)
    assert_trains_alike((gradients, parameters), (expected_gradients, expected_parameters))
    if isinstance(ours.model, nn.Module) and isinstance(theirs.model, nn.Module):
        buffers = dict(theirs.model.named_buffers())
        for key, buffer in ours.model.named_buffers():
            assert torch.allclose(buffer, buffers[key], rtol=1e-4, atol=1e-6), key
    report = step.explain().to_dict()
    assert report["saved_bytes"] >= 0
    assert abs(report["peak_bytes_predicted"] - report["peak_bytes_measured"]) <= 0.05 * report["peak_bytes_measured"]
    # What is in use while it runs, as IREE laid it out: never more than it reserves, and as much as that has to hold.
    timeline = step.explain().timeline()
    assert timeline.peak == report["peak_bytes_predicted"]
    assert all(m.bytes["scratch reserved"] >= 0 for m in timeline.moments)
    fullest = timeline.fullest().bytes
    # What a loop carries is not seen to be in use.
    assert fullest["scratch in use"] >= fullest["scratch reserved"] or "scf.for" in step.mlir("linalg")


def test_functions_that_were_compiled_side_by_side_train_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_parts, "_LEAST_LINES", 1)
    monkeypatch.setattr(staged, "count_processors", lambda: 2)
    ours, theirs = SUITE["mlp"].make("test"), SUITE["mlp"].make("test")
    step = retrograd.compile_backward(ours.model, ours.args, cache=False)
    assert_trains_alike(train(ours, step), train(theirs, theirs.model))
    assert {"verified by its first call"} == {
        line.partition(": ")[2] for line in step.explain().to_dict()["verification"]
    }


@pytest.mark.short_cases("mlp")
@pytest.mark.parametrize("name", SUITE)
def test_artifact_runs_without_python(name: str, tmp_path: Path) -> None:
    case = SUITE[name].make("test")
    # As the test above compiled it, if that came first.
    step = retrograd.compile_backward(case.model, case.args, portable=True)
    path = tmp_path / "model.vmfb"
    step.save(path)
    program = Program.load(path.read_bytes())
    generator = torch.Generator().manual_seed(3)
    known: dict[str, Tensor] = primals(case)
    for function in ("forward", "backward"):
        spec = step.manifest.function(function)
        arguments = []
        for argument in spec.arguments:
            if argument.name not in known:
                known[argument.name] = torch.randn(numbers_of(argument.shape), generator=generator)
            arguments.append(known[argument.name].detach())
        before = digests(arguments)
        results = run_function(program, spec, arguments)
        assert digests(arguments) == before, "an argument changed"
        known |= {r.name: t for r, t in zip(spec.results, results, strict=True) if r.role != "mutation"}
        command = [*RUN_MODULE, f"--module={path}", f"--function={function}", "--device=local-task"]
        for i, tensor in enumerate(arguments):
            np.save(tmp_path / f"{function}_argument{i}.npy", tensor.contiguous().numpy())
            command.append(f"--input=@{tmp_path}/{function}_argument{i}.npy")
        for i, tensor in enumerate(results):
            np.save(tmp_path / f"{function}_result{i}.npy", tensor.numpy())
            command.append(f"--expected_output=@{tmp_path}/{function}_result{i}.npy")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[SUCCESS]" in done.stdout
        np.save(tmp_path / f"{function}_result0.npy", results[0].numpy() + np.ones((), results[0].numpy().dtype))
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0, "a wrong result was accepted"


def primals(case: Case) -> dict[str, Tensor]:
    """Parameters, buffers and tensor arguments by their names in the manifest."""
    known: dict[str, Tensor] = {}
    if isinstance(case.model, nn.Module):
        known |= dict(case.model.named_parameters(remove_duplicate=False))
        known |= dict(case.model.named_buffers(remove_duplicate=False))
    keyed, _ = pytree.tree_flatten_with_path(case.args)
    return known | {f"args{pytree.keystr(path)}": leaf for path, leaf in keyed if isinstance(leaf, Tensor)}
