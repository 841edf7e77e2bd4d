# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models written as those of public libraries are: what they return, ask and keep, in small."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd


class Layer:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.dtype, self.filled = keys.dtype, True


class Cache:
    """As DynamicCache is: no container that PyTorch knows, with layers in a list."""

    __slots__ = ("__made", "__weakref__", "layers")

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.__made = Layer

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.layers.append(self.__made(keys, values))


@dataclass
class Result:
    loss: Tensor | None
    logits: Tensor
    cache: Cache | None = None
    extra: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FrozenResult:
    loss: Tensor
    logits: Tensor


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


class Record(OrderedDict[str, Any]):
    """As ModelOutput is, but told to nobody."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self[name] = value


class Decoder(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor, Cache], Any]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.make = make

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x, cache = self.embedding(tokens), Cache()
        key, value = self.key(x), self.value(x)
        cache.append(key, value)
        logits = self.head(F.scaled_dot_product_attention(self.query(x), key, value, is_causal=True))
        return self.make(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits, cache)


def _record(loss: Tensor, logits: Tensor, cache: Cache) -> Record:
    record = Record()
    record.loss, record.logits, record.cache = loss, logits, cache
    return record


def _tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(11, (2, 5)), torch.randint(11, (2, 5))


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [torch.zeros(()) if g is None else g for g in torch.autograd.grad(loss, wanted, allow_unused=True)]


@pytest.mark.long_cases("cache in a dataclass", "frozen dataclass", "named tuple")
@pytest.mark.parametrize(
    "make",
    [
        lambda loss, logits, cache: Result(loss, logits, cache, {"tokens": 5}),
        lambda loss, logits, cache: FrozenResult(loss, logits),
        lambda loss, logits, cache: Named(loss, logits),
        _record,
    ],
    ids=["cache in a dataclass", "frozen dataclass", "named tuple", "dict class of its own"],
)
def test_outputs_as_they_come(make: Callable[[Tensor, Tensor, Cache], Any]) -> None:
    args = _tokens()
    model = Decoder(make)
    step = retrograd.compile_backward(model, args)
    expected, found = model(*args), step(*args)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(_gradients(model, found.loss), _gradients(model, expected.loss))
    again = step(*args)
    if isinstance(found, Result):
        assert found.cache is not None and found.extra == {"tokens": 5}
        assert type(found.cache) is Cache and found.cache._Cache__made is Layer  # type: ignore[attr-defined]
        assert (found.cache.layers[0].filled, found.cache.layers[0].dtype) == (True, torch.float32)
        torch.testing.assert_close(found.cache.layers[0].values, expected.cache.layers[0].values)
        assert again.cache is not found.cache and again.extra is not found.extra
    if isinstance(found, Record):
        assert list(found) == list(expected) == ["loss", "logits", "cache"]
        assert found["loss"].grad_fn is not None
        torch.testing.assert_close(found["cache"].layers[0].keys, expected["cache"].layers[0].keys)


@pytest.mark.long
def test_gradient_through_a_cache() -> None:
    args = _tokens()
    model = Decoder(lambda loss, logits, cache: Result(None, logits, cache))
    step = retrograd.compile_backward(model, args)
    losses = [run(*args).cache.layers[0].values.square().sum() for run in (step, model)]
    torch.testing.assert_close(*[_gradients(model, loss) for loss in losses])


class Hides:
    def __init__(self, x: Tensor) -> None:
        self.later = lambda: x


class Ring:
    def __init__(self, x: Tensor) -> None:
        self.x, self.ring = x, self


@pytest.mark.parametrize("hide", [Hides, Ring, lambda x: lambda: x, lambda x: {x}, lambda x: iter([x])])
def test_outputs_whose_tensors_cannot_be_seen(hide: Callable[[Tensor], Any]) -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(retrograd.CaptureError, match=r"what the model returns is a .*whose tensors would not be seen"):
        retrograd.compile_backward(lambda x: (x * 2, hide(x * 3)), (x,))


class Masked(nn.Module):
    """Asks whether its mask can be left out, but not where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.linear(x)
        if not torch.compiler.is_compiling() and mask.all():
            return F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, :])


@pytest.mark.parametrize("padded", [False, True])
def test_branch_on_data_unless_compiling(padded: bool) -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, 3, 4)
    mask = torch.ones(2, 3, dtype=torch.bool)
    step = retrograd.compile_backward(model, (x, mask))
    assert not torch.compiler.is_compiling()
    if padded:
        mask[0, 2] = False
    found, expected = step(x, mask), model(x, mask)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_gradients(model, found.sum()), _gradients(model, expected.sum()))


class Maskless(nn.Module):
    """Makes the mask that it goes on to use where it is not compiled alone; ``fails`` in both cases if told to."""

    def __init__(self, asks: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.asks, self.fails = asks, fails

    def forward(self, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else x.sum(-1).gt(0)
        if mask is not None and self.asks and (self.linear(x) > 0).all():
            return x
        bias: Tensor = mask[:, :, None].float()  # type: ignore[index]
        if self.fails:
            raise ValueError("neither way")
        result: Tensor = self.linear(x) * bias
        return result


def test_a_model_that_fails_while_it_compiles_is_traced_as_it_runs() -> None:
    model, x = Maskless(), torch.randn(2, 3, 4)
    step = retrograd.compile_backward(model, (x,))
    found, expected = step(x), model(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_gradients(model, found.sum()), _gradients(model, expected.sum()))
    assert not torch.compiler.is_compiling()


@pytest.mark.short_cases("error")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fails": True}, r"TypeError: 'NoneType' .*must run on these arguments in eager mode first"),
        ({"asks": True}, r"data-dependent control flow .*retrograd.enable\(\)"),
    ],
    ids=["error", "control flow"],
)
def test_a_model_that_fails_both_ways(options: dict[str, bool], message: str) -> None:
    """By what it asks of its tensors, which other doors let it ask; else by its error while it compiles."""
    with pytest.raises(retrograd.CaptureError, match=f"(?s){message}") as caught:
        retrograd.compile_backward(Maskless(**options), (torch.randn(2, 3, 4),))
    assert caught.value.__suppress_context__


class Recording(nn.Module):
    """Captures what its layers give by hooks that are there for one call, and refuses to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.seen: dict[str, list[str]] = {"kinds": []}

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda layer, _, y: self.seen["kinds"].append(type(y).__name__))
            layer.register_forward_pre_hook(lambda layer, args: None, with_kwargs=False)
            layer.register_full_backward_hook(lambda layer, before, after: None)
            x = layer(x) * (number + 1)
        return x * float(x.sum())


def test_refused_model_keeps_no_hooks() -> None:
    model, x = Recording(), torch.randn(2, 3)
    with pytest.raises(retrograd.CaptureError, match="data-dependent"):
        retrograd.compile_backward(model, (x,))
    for layer in model.layers:
        tables = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
        assert [len(table) for table in tables] == [0, 0, 0]
    assert model.seen == {"kinds": []}
    model(x)
    assert model.seen == {"kinds": ["Tensor", "Tensor"]}


class Checked(nn.Module):
    """Looks at its labels, at its input, and at what it computes, before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.classes = nn.Linear(3, 5), 5

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None and labels.max() >= self.classes:
            raise ValueError(f"labels up to {labels.max()} of {self.classes} classes")
        if not torch.isfinite(x).all().item():
            raise AssertionError("the input is not finite")
        y = self.linear(x)
        if not y.isfinite().all() or (y.abs() > 1e6).any():
            raise FloatingPointError("overflow")
        return (y * y).sum() if labels is None else F.one_hot(labels, 5).mul(y).sum()


def test_checks_that_raise() -> None:
    model, x, labels = Checked(), torch.randn(2, 3), torch.randint(5, (2,))
    step = retrograd.compile_backward(model, (x, labels))
    found, expected = step(x, labels), model(x, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_gradients(model, found), _gradients(model, expected))
    checks = step.explain().to_dict()["checks"]
    assert ["before each call" in check for check in checks] == [True, True, False]
    assert "if labels is not None and labels.max() >= self.classes" in checks[0]
    assert "y.isfinite()" in checks[2] and "taken for granted" in checks[2]
    with pytest.raises(ValueError, match=r"labels up to \d of 5 classes"):
        step(x, labels * 0 + 5)
    with pytest.raises(AssertionError, match="the input is not finite"):
        step(x / 0.0, labels)


# What is computed by a product is too much work to be asked before each call.
WEIGHTS = torch.eye(3)


def by_except(x: Tensor) -> Tensor:
    try:
        if (WEIGHTS @ x).max() > 0:
            raise ValueError
    except ValueError:
        return x * 2
    return x * 3


def by_branch(x: Tensor) -> Tensor:
    if (WEIGHTS @ x).max() > 0:
        x = x * 2
    return x * 3


@pytest.mark.parametrize("branch", [by_except, by_branch])
def test_branch_is_no_check(branch: Callable[[Tensor], Tensor]) -> None:
    """Where there cannot be one graph, the line is named and what compiles in parts."""
    x = torch.randn(3, requires_grad=True)
    line = r"if \(WEIGHTS @ x\)\.max\(\) > 0:\n"
    remedy = line + r"  remedy: .*torch\.compile\(model, backend=\"retrograd\"\), which compiles what is"
    with pytest.raises(retrograd.CaptureError, match=remedy):
        retrograd.compile_backward(branch, (x,))
    compiled = torch.compile(branch, backend="retrograd")
    for given in (x, -x.detach().abs().requires_grad_()):
        torch.testing.assert_close(compiled(given), branch(given))


def test_torchs_own_lines_stay_away(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(retrograd.CaptureError):
        retrograd.compile_backward(lambda x: x @ torch.ones(7, 2), (torch.randn(3, 4, requires_grad=True),))
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(3, 3), torch.compile(torch.tanh, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.linear(x))
        return y.sum()


def test_compiled_function_inside_of_a_model() -> None:
    model, x = Nested(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    found, expected = step(x), torch.tanh(model.linear(x)).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_gradients(model, found), _gradients(model, expected))


class Policy(nn.Module):
    """Distributions with PyTorch's own checks of their parameters and samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 8)

    def forward(self, x: Tensor, action: Tensor, move: Tensor) -> Tensor:
        logits, mean, scale = self.linear(x).split([4, 2, 2], -1)
        # As by default; the first torch.compile of a process turns that off.
        choice = torch.distributions.Categorical(logits=logits, validate_args=True)
        normal = torch.distributions.Independent(torch.distributions.Normal(mean, F.softplus(scale)), 1)
        tailed = torch.distributions.StudentT(F.softplus(scale) + 2, mean, F.softplus(scale))
        gain = choice.log_prob(action) + normal.log_prob(move) + tailed.log_prob(move).sum(-1)
        loss: Tensor = gain.mean() + choice.entropy().mean()
        return loss


@pytest.mark.long
def test_distributions_that_validate() -> None:
    model = Policy()
    x, action, move = torch.randn(5, 3), torch.randint(4, (5,)), torch.randn(5, 2)
    step = retrograd.compile_backward(model, (x, action, move))
    found, expected = step(x, action, move), model(x, action, move)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(_gradients(model, found), _gradients(model, expected), rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="to be within the support"):
        step(x, action + 4, move)
