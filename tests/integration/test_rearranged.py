# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values that meet themselves rearranged: their transpose, a row beside a column, flipped, rolled, shifted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from faulty_programs import OUTER
from iree.runtime import Config, SystemContext, VmModule
from torch import Tensor

import retrograd
from retrograd.pipelines.toolchain.executable import iree_tool

SIZE = 6
LABELS = torch.arange(SIZE)


def contrastive(x: Tensor) -> Tensor:
    """CLIP's loss."""
    return (F.cross_entropy(x, LABELS) + F.cross_entropy(x.t(), LABELS)) / 2


def outer(x: Tensor) -> Tensor:
    """The difference of each two along the last axis."""
    return (x[..., :, None] - x[..., None, :]).sin()


def meets(rearrange: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Values of several kinds of reduction, beside themselves as ``rearrange`` gives them."""

    def model(x: Tensor) -> Tensor:
        values = [x.softmax(1), x / x.std(0, keepdim=True), x @ x, x.sum(1, keepdim=True) + x.sin(), x.exp()]
        return torch.stack([(value - rearrange(value)).tanh() * value for value in values])

    return model


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "contrastive loss": contrastive,
    "contrastive loss of a product": lambda x: contrastive(x @ x.t()),
    "a row's sum beside a column's": lambda x: outer(x.sum(1)),
    "a row's greatest beside a column's place of it": lambda x: x.max(1)[0][:, None] * x.max(1)[1][None].float(),
    "a sum that keeps its axis": lambda x: (x.sum(1, keepdim=True) - (x + 0).sum(1)[None]).sin(),
    "rows' sums of a batch of one": lambda x: (x[None] @ x).sum(-1, keepdim=True) - (x[None] @ x).sum(-1)[:, None],
    "rows' sums of a batch": lambda x: (
        x.view(2, 3, SIZE).sum(2)[:, :, None] - x.view(2, 3, SIZE).sum(2)[:, None]
    ).sin(),
    "differences of all pairs": lambda x: (F.layer_norm(x, (SIZE,))[:, None] - F.layer_norm(x, (SIZE,))[None]).sin(),
    "differences of all pairs of a product": lambda x: ((x @ x)[:, None] - (x @ x)[None]).sin(),
    "transpose": meets(Tensor.t),
    "flip": meets(lambda x: x.flip(0)),
    "flip and transpose": meets(lambda x: x.flip(1).t()),
    "roll": meets(lambda x: x.roll((1, 2), (0, 1))),
    "shift": meets(lambda x: F.pad(x[1:], (0, 0, 0, 1))),
    "permuted rows": meets(lambda x: x[torch.tensor([1, 0, 3, 2, 5, 4])]),
    "permuted blocks": meets(lambda x: x.view(3, 2, 2, 3).permute(0, 2, 1, 3).reshape(SIZE, SIZE)),
    "its first row and column": meets(lambda x: x[:, 0][None] + x[:, 1:2]),
}


# With another partition other values meet in a kernel: all but the last ways to rearrange.
BY_DEFAULT = [*PROGRAMS][:10]
# Of each way in which a value meets itself one: as a row and a column, as its transpose, as another order of its rows.
FEW = [
    "contrastive loss",
    "a row's greatest beside a column's place of it",
    "differences of all pairs of a product",
    "flip",
]


@pytest.mark.short_cases("few")
@pytest.mark.parametrize(
    ("partition", "names"),
    [("min-cut", FEW), ("min-cut", [*PROGRAMS]), ("default", BY_DEFAULT)],
    ids=["few", "min-cut", "default"],
)
def test_gradients_beside_eager(partition: Literal["default", "min-cut"], names: Sequence[str]) -> None:
    """All programs as one model, each with an argument of its own: to compile them one by one takes minutes."""
    torch.manual_seed(0)
    programs = [PROGRAMS[name] for name in names]
    arguments = tuple(torch.randn(SIZE, SIZE, requires_grad=True) for _ in programs)

    def model(*arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(program(x) for program, x in zip(programs, arguments, strict=True))

    step = retrograd.compile_backward(model, arguments, partition=partition, fallback="error")
    found, expected = step(*arguments), model(*arguments)
    weights = [torch.randn_like(y) for y in expected]
    ours, theirs = (torch.autograd.grad(y, arguments, weights) for y in (found, expected))
    for name, *pairs in zip(names, found, expected, ours, theirs, strict=True):
        result, wanted, gradient, wanted_gradient = pairs
        assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-5), name
        assert torch.allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-5), f"gradient of {name}"


def run(linalg: str, folder: Path) -> bool:
    """Whether @main of ``linalg``, compiled by plain iree-compile, computes the products of all rows' sums."""
    source, vmfb = folder / "outer.mlir", folder / "outer.vmfb"
    source.write_text(linalg)
    options = ["--iree-hal-target-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host"]
    subprocess.run([iree_tool("iree-compile"), source, "-o", vmfb, *options], check=True, capture_output=True)
    context = SystemContext(config=Config("local-sync"))
    context.add_vm_module(VmModule.copy_buffer(context.instance, vmfb.read_bytes()))
    values = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    sums = values.sum(1)
    return bool(np.allclose(context.modules.module["main"](values).to_host(), np.outer(sums, sums), rtol=1e-4))


def test_the_pass_mends_the_fault(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "retrograd.tools.opt",
        "-p",
        "bwd-isolate-reductions",
        "--allow-unregistered-dialect",
        "-",
    ]
    mended = subprocess.run(command, input=OUTER, text=True, check=True, capture_output=True).stdout
    assert run(mended, tmp_path)
