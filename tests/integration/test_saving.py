# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Policies on what is saved, and in what type: what they save, and how far gradients are from eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd
from retrograd.contract.formats import FORMATS
from retrograd.frontend.preparation.narrowing import pack, unpack


class Model(nn.Module):
    """``hidden`` is a factor of the gradient of ``last.weight``, in which its error shows as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(retrograd.save(torch.exp(self.first(x)), "hidden"))
        return out


def argument() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(12, 20, requires_grad=True)


def gradients(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(call(x).sin().sum(), [x, *model.parameters()])


def error(found: Tensor, expected: Tensor) -> float:
    a, b = found.detach(), expected.detach()
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module", params=FORMATS)
def narrow(request: pytest.FixtureRequest) -> tuple[str, retrograd.CompiledBackward]:
    policy = retrograd.saved_dtype(request.param, name="hidden")
    return request.param, retrograd.compile_backward(
        Model(), (argument(),), save_policy=policy, verify=True, portable=True
    )


@pytest.mark.short_cases("int8-block", "float8_e4m3")
def test_gradients_within_the_bound(narrow: tuple[str, retrograd.CompiledBackward]) -> None:
    format, step = narrow
    model, x = Model(), argument()
    step = step.bind(model)
    out, expected_out = step(x), model(x)
    assert error(out, expected_out) <= 2e-5, "the forward works with the value itself"
    found, expected = gradients(step, model, x), gradients(model, model, x)
    hidden = torch.exp(model.first(x)).detach()
    tangent = torch.cos(expected_out).detach()
    # The gradient of last.weight is tangent^T hidden: its error is the tangent's times that of hidden, and so on.
    change = unpack(pack(hidden, format), format, hidden.shape, hidden.dtype) - hidden
    assert change.abs().max() > 0
    weight = tangent.t() @ (hidden + change)
    assert error(found[3], weight) <= 2e-5, "hidden is rounded once, as the types say"
    assert float((found[3] - expected[3]).abs().max()) <= float((tangent.abs().t() @ change.abs()).max()) * 1.001
    # exp(y) is its own derivative: what goes further back is off by the roundoff of one factor at most.
    unit = FORMATS[format].roundoff
    largest = float(hidden.abs().amax() / hidden.abs().mean()) if format == "int8-block" else 1.0
    for place in (0, 1, 2):
        assert 0 < error(found[place], expected[place]) <= 2 * unit * largest
    # Not narrowed: the bias in front of no saved value.
    assert error(found[4], expected[4]) <= 2e-5


def test_bytes_are_fewer_and_shown(narrow: tuple[str, retrograd.CompiledBackward]) -> None:
    format, step = narrow
    count = 12 * 24
    report = step.explain().to_dict()
    assert report["saved_bytes"] == FORMATS[format].size(count)
    assert report["narrowed_bytes"] == 4 * count - FORMATS[format].size(count)
    assert "bytes fewer than in their own types" in str(step.explain())
    saved = [a for a in step.manifest.function("backward").arguments if a.role == "saved"]
    assert [a.name for a in saved] == [f"saved.exp_{part}" for part in FORMATS[format].parts]


def test_an_artifact_packs_as_well(narrow: tuple[str, retrograd.CompiledBackward], tmp_path: Path) -> None:
    _, step = narrow
    model, x = Model(), argument()
    step.save(tmp_path / "model.vmfb")
    loaded = retrograd.load(tmp_path / "model.vmfb", model)
    for a, b in zip(gradients(loaded, model, x), gradients(step.bind(model), model, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.long_cases("default")
@pytest.mark.parametrize("partition", ["default", "budget"])
def test_the_other_policies(partition: Any) -> None:
    model, x = Model(), argument()
    budget = 1.25 if partition == "budget" else None
    policy = retrograd.saved_dtype("bf16", min_bytes=0)
    options: Any = {"partition": partition, "memory_budget": budget}
    step = retrograd.compile_backward(model, (x,), save_policy=policy, verify=True, **options)
    assert step.explain().to_dict()["saved_bytes"] == 2 * 12 * 24
    assert error(gradients(step, model, x)[1], gradients(model, model, x)[1]) <= 2 * FORMATS["bf16"].roundoff


def test_torch_compile() -> None:
    torch._dynamo.reset()
    model, x = Model(), argument()
    options: Any = {"save_policy": retrograd.saved_dtype("bf16", name="hidden")}
    step = torch.compile(model, backend="retrograd", dynamic=False, options=options)
    found, expected = gradients(step, model, x), gradients(model, model, x)
    assert 1e-4 < error(found[3], expected[3]) <= FORMATS["bf16"].roundoff


@pytest.mark.long_cases("policy2-recomputed2-0", "policy0-recomputed0-None")
@pytest.mark.parametrize(
    ("policy", "recomputed", "saved"),
    [
        (retrograd.must_recompute(op="mm") | retrograd.must_recompute(op="add*"), {"mm", "add"}, None),
        (retrograd.must_save(op="sin") | retrograd.must_save(op="exp"), set(), 2 * 4 * 12 * 20),
        (retrograd.prefer_recompute(), {"exp", "sin"}, 0),
    ],
)
def test_rules_by_op(policy: retrograd.SavePolicy, recomputed: set[str], saved: int | None) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(20, 20)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.sin(torch.exp(torch.sin(x))) * self.first(x)
            return out

    torch.manual_seed(0)
    model, x = Plain(), argument()
    step = retrograd.compile_backward(model, (x,), save_policy=policy, verify=True)
    for a, b in zip(gradients(step, model, x), gradients(model, model, x), strict=True):
        assert error(a, b) <= 2e-5
    report = step.explain().to_dict()
    assert recomputed <= set(report["recomputed"])
    assert saved is None or report["saved_bytes"] >= saved


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        (retrograd.must_save(op="mn"), retrograd.PipelineError, "the rule 'must-save op=mn' matches no value"),
        (
            retrograd.must_recompute(name="hidden"),
            retrograd.PipelineError,
            r"test_saving.py.*the model says bwd.recompute = 'never', and the policy 'must-recompute name=hidden'",
        ),
        ("bf16", ValueError, "save_policy 'bf16' is no SavePolicy"),
    ],
)
def test_policies_that_make_no_sense(policy: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        retrograd.compile_backward(Model(), (argument(),), save_policy=policy)


def test_attention_saves_nothing_quadratic_in_the_tokens() -> None:
    tokens = 24
    q, k, v = (torch.randn(1, 2, tokens, 8, requires_grad=True) for _ in range(3))
    step = retrograd.compile_backward(F.scaled_dot_product_attention, (q, k, v), {"is_causal": True}, verify=True)
    step(q, k, v, is_causal=True).sum().backward()
    saved = [a for a in step.manifest.function("backward").arguments if a.role == "saved"]
    assert saved and all(a.shape.count(tokens) < 2 for a in saved)
