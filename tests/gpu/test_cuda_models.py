# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models on a CUDA device, compiled, beside eager on the same device."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from models.precision import Precision
from narrow_gradients import train
from steps import TOLERANCES, gradients, on_device, relative_error, require_device
from torch.torch_version import TorchVersion

import retrograd

STEPS = 20
# Before torch 2.13 AOTAutograd makes zeros of the gradients that there are none of.
KNOWS_ABSENT = TorchVersion(torch.__version__) >= "2.13"


def setup_module() -> None:
    require_device()


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_eager_in_float32(name: str) -> None:
    ours, theirs = on_device(name), on_device(name)
    step = retrograd.compile_backward(ours.model, ours.args)
    assert step.manifest.targets[0].startswith("cuda:sm_")
    optimizer = torch.optim.SGD(list(ours.leaves().values()), lr=0.01)
    for i in range(STEPS):
        found = gradients(ours, step)
        expected = gradients(theirs, theirs.model)
        errors = {n: relative_error(found[n], expected[n]) for n in expected if expected[n].norm() > 1e-6}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= TOLERANCES[torch.float32], f"step {i}, {worst}: {errors[worst]:.2e}"
        optimizer.step()
        with torch.no_grad():
            for n, leaf in theirs.leaves().items():
                leaf.copy_(ours.leaves()[n])


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_bfloat16(name: str, precision: Precision) -> None:
    """By the rule of narrow_gradients."""
    train(name, precision, steps=5, device="cuda").check()


@pytest.mark.parametrize("name", ["cnn", "gpt2", "resnet18"])
def test_half_of_the_memory(name: str) -> None:
    """Within a budget, where kernels run in the order that takes the least memory: gradients, and the peak."""
    case = on_device(name)
    whole = retrograd.compile_backward(case.model, case.args, partition="default").explain().to_dict()
    try:
        step = retrograd.compile_backward(case.model, case.args, partition="budget", memory_budget=0.5)
    except retrograd.InfeasibleBudget as error:
        step = retrograd.compile_backward(case.model, case.args, partition="budget", memory_budget=error.least)
    expected = gradients(case, case.model)
    for _ in range(3):
        found = gradients(case, step)
        errors = {n: relative_error(found[n], expected[n]) for n in expected if expected[n].norm() > 1e-6}
        assert max(errors.values()) <= TOLERANCES[torch.float32], errors
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] <= report["peak_bytes_predicted"] < whole["peak_bytes_predicted"]


@pytest.mark.parametrize(("partition", "budget"), [("min-cut", None), ("budget", "2KiB")])
def test_a_loss_that_leaves_outputs_out(partition: Literal["min-cut", "budget"], budget: str | None) -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), torch.nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(self.trunk(x))
            return self.left(h * h), self.right(h)

    torch.manual_seed(0)
    model, x = Heads().cuda(), torch.randn(3, 4, device="cuda")
    step = retrograd.compile_backward(model, (x,), partition=partition, memory_budget=budget)
    for place in (0, 1, 0):
        both = []
        for call in (model, step):
            model.zero_grad(set_to_none=True)
            call(x)[place].sum().backward()
            both.append({name: p.grad for name, p in model.named_parameters()})
        expected, found = both
        if not KNOWS_ABSENT:
            made = [found[name] for name, gradient in expected.items() if gradient is None]
            assert not any(gradient.any() for gradient in made if gradient is not None)
            found = {name: gradient if expected[name] is not None else None for name, gradient in found.items()}
        torch.testing.assert_close(found, expected)


def test_attention_saves_nothing_quadratic_in_the_tokens() -> None:
    tokens = 96
    q, k, v = (torch.randn(2, 2, tokens, 16, device="cuda", requires_grad=True) for _ in range(3))
    step = retrograd.compile_backward(F.scaled_dot_product_attention, (q, k, v), {"is_causal": True}, verify=True)
    step(q, k, v, is_causal=True).sum().backward()
    saved = [a for a in step.manifest.function("backward").arguments if a.role == "saved"]
    assert saved and all(a.shape.count(tokens) < 2 for a in saved)
