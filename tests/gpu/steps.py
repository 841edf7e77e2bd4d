# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of models on a CUDA device, and how far apart their gradients are."""

from typing import Any

import pytest
import torch
from models import MODELS, Case
from models.precision import Precision, convert
from torch import Tensor

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float64: 1e-10}


def require_device() -> None:
    """Without a device these tests fail, so that nobody takes them for passed."""
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device: `make test-gpu` has nothing to run on")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def on_device(name: str, precision: Precision = "f32") -> Case:
    """A model of the registry on the GPU, in its small size."""
    return convert(MODELS[name].make("test"), "cuda", precision)


def gradients(case: Case, call: Any) -> dict[str, Tensor]:
    leaves = case.leaves()
    for leaf in leaves.values():
        leaf.grad = None
    case.loss(call(*case.args)).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-6))
