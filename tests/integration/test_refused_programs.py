# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs that are no one graph: the refusal names the line and what to use instead, and that has eager's gradients.
And programs that look as if they were none."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging.handlers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd
from retrograd.frontend.doors.capture import capture_joint

Forward = Callable[[nn.Linear, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A function of a layer, numbers and labels."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layer, x, y)


def labelled_only(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    scores: Tensor = layer(x)
    labelled = ((y >= 0) & (scores.amax(1) > -9)).nonzero()
    if labelled.size(0) > 0:
        return F.cross_entropy(scores[labelled.view(-1)], y[labelled.view(-1)])
    return torch.zeros_like(scores).sum()


def looked_at(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    scores = layer(x)
    if (scores < 0).any().item():
        scores = scores * (y >= 0)[:, None]
    return F.mse_loss(scores, torch.zeros_like(scores))


def of_sizes(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    sizes = layer(x).argmax(1).sum().reshape(1)
    parts = [F.pad(layer(x)[:, :size], (0, 8 - size)) for size in [int(s) % 4 + 1 for s in sizes]]
    return torch.cat(parts).square().mean()


def matched(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    scores: Tensor = layer(x)
    best = torch.from_numpy(scores.detach().numpy().argmax(0).copy())
    return scores[best].square().sum()


NO_GRAPHS: dict[str, Forward] = {f.__name__: f for f in (labelled_only, looked_at, of_sizes, matched)}


def sample() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 4), torch.tensor([1, -100, 3, 0, -100, 2])


def gradients(model: nn.Module, call: Callable[..., Tensor], *args: Any) -> list[Tensor]:
    loss = call(*args)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.short_cases("looked_at")
@pytest.mark.parametrize("name", NO_GRAPHS)
def test_the_remedy_of_a_refusal_works(name: str) -> None:
    model = Model(NO_GRAPHS[name])
    line = r'test_refused_programs.py", line \d+, in '
    with pytest.raises(retrograd.CaptureError, match=line) as refused:
        retrograd.compile_backward(model, sample(), cache=False)
    assert 'torch.compile(model, backend="retrograd")' in refused.value.remedy
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="retrograd", options={"cache": False})
    torch.testing.assert_close(gradients(model, compiled, *sample()), gradients(model, model, *sample()))


def test_the_other_remedy_where_contents_are_handed_to_numpy() -> None:
    model = Model(matched)
    with pytest.raises(retrograd.CaptureError, match="contents are handed to NumPy") as refused:
        retrograd.compile_backward(model, sample(), cache=False)
    assert "retrograd.enable()" in refused.value.remedy
    expected = gradients(model, model, *sample())
    with retrograd.enable(cache=False):
        torch.testing.assert_close(gradients(model, model, *sample()), expected)


@dataclass
class Kept:
    """What one layer keeps."""

    keys: Tensor | None = None


@dataclass
class Cache:
    """What a model keeps from call to call, in objects in a list."""

    layers: list[Kept] = field(default_factory=list)

    def update(self, keys: Tensor) -> Tensor:
        """All keys so far."""
        if not self.layers:
            self.layers.append(Kept())
        before = self.layers[0].keys
        self.layers[0].keys = keys if before is None else torch.cat([before, keys])
        return self.layers[0].keys


class Cached(nn.Module):
    """Looks at what is in its cache, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return (x @ cache.update(self.layer(x)).T).softmax(-1).square().sum()


@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_that_is_given(filled: bool) -> None:
    model, (x, _) = Cached(), sample()
    cache = Cache([Kept(torch.ones(2, 4))] if filled else [])
    before = copy.deepcopy(cache)
    message = r"args\[1\] is a Cache, whose tensors" if filled else r"changes its argument args\[1\], a Cache"
    with pytest.raises(retrograd.CaptureError, match=message) as refused:
        retrograd.compile_backward(model, (x, cache), cache=False)
    assert 'torch.compile(model, backend="retrograd")' in refused.value.remedy
    torch.testing.assert_close([kept.keys for kept in cache.layers], [kept.keys for kept in before.layers])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="retrograd", options={"cache": False})
    torch.testing.assert_close(gradients(model, compiled, x, cache), gradients(model, model, x, before))
    torch.testing.assert_close(cache.layers[0].keys, before.layers[0].keys)


@dataclass
class Settings:
    """What is no cache, but works something out when it is first asked."""

    scale: float = 2.0

    def twice(self) -> float:
        """Twice the scale."""
        if "_twice" not in vars(self):
            vars(self)["_twice"] = 2 * self.scale
        result: float = vars(self)["_twice"]
        return result


def test_an_argument_that_works_out_what_it_keeps() -> None:
    x, _ = sample()

    def scaled(x: Tensor, settings: Settings) -> Tensor:
        return (x * settings.twice()).square().mean()

    x.requires_grad_()
    settings = Settings()
    step = retrograd.compile_backward(scaled, (x, settings), cache=False)
    (found,) = torch.autograd.grad(step(x, settings), x)
    torch.testing.assert_close(found, 32 * x.detach() / x.numel())


class Experts(nn.Module):
    """The two best of four experts, each on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.gate(x), -1), 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            given = weights[rows, slots, None] * expert(x[rows])
            if number % 2:
                out.index_add_(0, rows, given)
            else:
                out[rows] += given
        return out.square().mean()


@pytest.mark.long
def test_experts_by_rows_are_one_graph() -> None:
    model = Experts()
    step = retrograd.compile_backward(model, (sample()[0],), cache=False)
    for seed in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(gradients(model, step, x), gradients(model, model, x))


def flow(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4) * 2)
    log_density: Tensor = noise.log_prob(layer(x))
    return -log_density.mean()


def test_a_distribution_that_checks_its_matrix() -> None:
    model = Model(flow)
    step = retrograd.compile_backward(model, sample(), cache=False)
    torch.testing.assert_close(gradients(model, step, *sample()), gradients(model, model, *sample()))


class Looked(nn.Module):
    """Looks rows up whose gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True)

    def forward(self, y: Tensor) -> Tensor:
        return self.words(y.clamp(0)).square().sum()  # type: ignore[no-any-return]


def test_the_remedy_of_a_sparse_gradient_works() -> None:
    model, (_, y) = Looked(), sample()
    with pytest.raises(retrograd.CaptureError, match=r"layout torch\.sparse_coo") as refused:
        retrograd.compile_backward(model, (y,), cache=False)
    assert "retrograd.enable()" in refused.value.remedy and "torch.compile" in refused.value.remedy
    expected = gradients(model, model, y)[1]
    assert expected.is_sparse
    compiled = gradients(model, torch.compile(model, backend="retrograd"), y)[1]
    assert compiled.is_sparse and torch.equal(compiled.to_dense(), expected.to_dense())
    with retrograd.enable(cache=False):
        model(y).backward()
    assert model.words.weight.grad is not None and model.words.weight.grad.is_sparse
    torch.testing.assert_close(model.words.weight.grad.to_dense(), expected.to_dense())


class Adjacent(nn.Module):
    """Multiplies by a sparse matrix that it has."""

    neighbours: Tensor

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(4).to_sparse(layout=layout))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.neighbours @ self.linear(x)).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_buffer_is_named(layout: torch.layout) -> None:
    with pytest.raises(retrograd.CaptureError, match=f"^capture: neighbours is a tensor of layout {layout}") as refused:
        retrograd.compile_backward(Adjacent(layout), (torch.randn(4, 4),), cache=False)
    assert "to_dense()" in refused.value.remedy


class Named(Tensor):
    """A tensor of a class of the user's."""


def test_a_parameter_of_a_subclass_is_named() -> None:
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.ones(3, 4).as_subclass(Named))
    with pytest.raises(retrograd.CaptureError, match="weight is a Named, a subclass of Tensor") as refused:
        retrograd.compile_backward(layer, (torch.randn(2, 4),), cache=False)
    assert "as_subclass(torch.Tensor)" in refused.value.remedy


class Held(nn.Module):
    """Multiplies by a sparse matrix that it has in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.held = (torch.eye(4).to_sparse_csr(),)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.held[0] @ self.linear(x)).square().sum()  # type: ignore[no-any-return]


def test_a_sparse_tensor_that_is_no_buffer_is_said() -> None:
    with pytest.raises(retrograd.CaptureError, match="computes with a tensor of a sparse layout at File") as refused:
        retrograd.compile_backward(Held(), (torch.randn(4, 4),), cache=False)
    assert "to_dense()" in refused.value.remedy


def linearized(x: Tensor) -> Tensor:
    _, derivative = torch.func.linearize(torch.tanh, x)
    return derivative(x).square().mean()  # type: ignore[no-any-return]


def test_the_remedy_of_what_only_the_trace_fails_for_works() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(retrograd.CaptureError, match=r"in linearized") as refused:
        retrograd.compile_backward(linearized, (x,), cache=False)
    assert "where it does, use torch.compile" in refused.value.remedy
    (expected,) = torch.autograd.grad(linearized(x), x)
    with retrograd.enable(cache=False):
        linearized(x).backward()
    torch.testing.assert_close(x.grad, expected)


class Ensemble(nn.Module):
    """Several models as one, as PyTorch's tutorial on ensembles has them: the module that is called has no values."""

    def __init__(self, keeps: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        members = [nn.Linear(4, 2) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(members)
        self.weight, self.bias = (nn.Parameter(stacked[name].detach()) for name in ("weight", "bias"))
        self.base = keeps(members[0].to("meta"))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base[0]
        values = {"weight": self.weight, "bias": self.bias}
        call = lambda values, x: torch.func.functional_call(base, values, (x,))  # noqa: E731
        result: Tensor = torch.func.vmap(call, in_dims=(0, None))(values, x).var(0).sum()
        return result


def test_the_remedy_of_a_module_without_values_works() -> None:
    x, _ = sample()
    with pytest.raises(retrograd.CaptureError, match=r"base\.0\.weight is on the meta device") as refused:
        retrograd.compile_backward(Ensemble(lambda base: nn.ModuleList([base])), (x,), cache=False)
    assert "keep it in a tuple, (module,)" in refused.value.remedy
    model = Ensemble(lambda base: (base,))
    step = retrograd.compile_backward(model, (x,), cache=False)
    torch.testing.assert_close(gradients(model, step, x), gradients(model, model, x))


def energy_of(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    slopes = torch.func.vmap(torch.func.grad(lambda row: layer(row).sin().sum()))(x)
    return (slopes + x).square().mean()  # type: ignore[no-any-return]


def volume_of(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    turned = torch.func.vmap(torch.func.jacrev(lambda row: row + 0.1 * layer(row).tanh()))(x)
    return -torch.linalg.slogdet(turned)[1].mean()  # type: ignore[no-any-return]


@pytest.mark.short_cases("energy_of")
@pytest.mark.parametrize("function", [energy_of, volume_of])
def test_transforms_inside_of_the_model(function: Forward) -> None:
    model = Model(function)
    step = retrograd.compile_backward(model, sample(), cache=False)
    x, y = sample()
    torch.testing.assert_close(gradients(model, step, 2 * x, y), gradients(model, model, 2 * x, y))


def test_a_transform_does_not_hide_a_tensor_that_would_get_no_gradient() -> None:
    outside = torch.ones(4, requires_grad=True)

    def scaled(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: (layer(row) * outside).sin().sum()))(x)
        return slopes.square().sum()  # type: ignore[no-any-return]

    with pytest.raises(retrograd.CaptureError, match="neither an argument nor a parameter"):
        retrograd.compile_backward(Model(scaled), sample(), cache=False)


def column_by_column(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    hidden = layer(x).t()
    states, state = torch.zeros_like(hidden), hidden[0]
    for place in range(hidden.shape[0]):
        state = 0.5 * state + hidden[place]
        states[place] = state
    return states.square().sum()


def converted(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    # What there is nothing to convert of is assigned to its own .data.
    return layer.to(x.dtype)(x).square().sum()  # type: ignore[no-any-return]


def clamped(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    hidden: Tensor = layer(x)
    if not torch.isfinite(hidden).all():
        largest = torch.finfo(hidden.dtype).max - 1000
        hidden = torch.clamp(hidden, min=-largest, max=largest)
    if torch.isinf(hidden).any():
        hidden = hidden.clamp(max=torch.finfo(hidden.dtype).max - 1000)
    return hidden.square().sum()


def mended(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    hidden: Tensor = layer(x).log()
    if torch.isnan(hidden).any():
        hidden = torch.nan_to_num(hidden)
    return hidden.square().sum()


def kept_small(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    hidden: Tensor = layer(x)
    if not torch.isfinite(hidden).all():
        hidden = torch.clamp(hidden, -1, 1)
    return hidden.square().sum()


@pytest.mark.parametrize("function", [mended, kept_small])
def test_what_handles_numbers_that_are_not_finite_is_no_clamp(function: Forward) -> None:
    with pytest.raises(retrograd.CaptureError, match="data-dependent control flow"):
        retrograd.compile_backward(Model(function), sample(), cache=False)


@pytest.mark.parametrize("function", [column_by_column, converted, clamped])
def test_compiled_whole(function: Forward) -> None:
    model = Model(function)
    step = retrograd.compile_backward(model, sample(), cache=False, fallback="error")
    torch.testing.assert_close(gradients(model, step, *sample()), gradients(model, model, *sample()))


def best_row(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    scores: Tensor = layer(x)
    best = scores.sum(1).argmax()
    parts = (
        scores[best] * 2,
        scores[:, best % 4][:4],
        scores[best, best % 4] + scores[best, 1:].sum(),
        scores[-1 - best],
    )
    return torch.stack([part.sin().sum() for part in (*parts, scores[None, best, ..., None])]).sum()


def test_a_row_whose_number_is_computed() -> None:
    model = Model(best_row)
    step = retrograd.compile_backward(model, sample(), cache=False)
    x, y = sample()
    for rows in (x, x.flip(0), -x):
        torch.testing.assert_close(gradients(model, step, rows, y), gradients(model, model, rows, y))


def written_row(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    scores: Tensor = layer(x) * 1
    row = scores[scores.sum(1).argmax()]
    row += 1
    return scores.square().sum()


def written_rows(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    scores: Tensor = layer(x) * 1
    row = scores[scores.sum(1).argmax()]
    scores *= 2
    return row.square().sum()


@pytest.mark.short_cases("written_rows")
@pytest.mark.parametrize("function", [written_row, written_rows])
def test_a_row_that_is_written_to_as_a_part(function: Forward) -> None:
    model = Model(function)
    with pytest.raises(retrograd.CaptureError, match="is a view of x, and one of both is written to"):
        retrograd.compile_backward(model, sample(), cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="retrograd", options={"cache": False})
    torch.testing.assert_close(gradients(model, compiled, *sample()), gradients(model, model, *sample()))


class Store:
    """What is no module, and keeps a tensor."""

    last: Tensor | None = None


class Keeping(nn.Module):
    """Keeps tensors where no compiled program would put them."""

    def __init__(self, places: tuple[str, ...]) -> None:
        super().__init__()
        hidden: dict[str, Tensor] = {}
        losses: list[Tensor] = []
        self.layer, self.store = nn.Linear(4, 4), Store()
        if "hook" in places:
            self.layer.register_forward_hook(lambda _module, _args, output: hidden.update(layer=output))

        @functools.lru_cache
        def positions(count: int) -> Tensor:
            return torch.arange(float(count))

        def keep(x: Tensor) -> Tensor:
            if "list" in places:
                losses.append(x.square().mean())
            if "object" in places:
                self.store.last = x.sin()
            return x * positions(4) if "cache" in places else x

        def kept() -> tuple[dict[str, Tensor], list[Tensor]]:
            return hidden, losses

        self.keep, self.kept = keep, kept

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self.layer(x)).cos()


@pytest.mark.whole_heap
@pytest.mark.long_cases("hook-'layer' in a dict", "object-'last' in attributes")
@pytest.mark.parametrize(
    ("place", "holder"),
    [
        ("hook", "'layer' in a dict"),
        ("list", "a list"),
        ("object", "'last' in attributes"),
        ("cache", "positions()"),
    ],
)
def test_a_tensor_that_is_kept_elsewhere(place: str, holder: str) -> None:
    """It would be the trace's for ever, or none, and a loss of it would have no gradient without a word."""
    model, (x, _) = Keeping((place,)), sample()
    with pytest.raises(retrograd.CaptureError, match=r'(?s)computed at File ".*test_refused_programs.py"') as refused:
        retrograd.compile_backward(model, (x,), cache=False)
    assert holder in refused.value.message
    assert (*model.kept(), model.store.last) == ({}, [], None)
    # The model runs in eager, and what its cache then holds may be compiled in.
    model(x).sum().backward()
    if place == "cache":
        with contextlib.ExitStack() as stack:
            capture_joint(stack, model, (x,))


def test_an_argument_that_is_kept() -> None:
    """Nobody computed it."""
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append({"x": (x, 1)})
        return x.sin()

    with (
        contextlib.ExitStack() as stack,
        pytest.raises(retrograd.CaptureError, match="keeps a tensor as 'x' in a dict"),
    ):
        capture_joint(stack, function, (torch.randn(3, requires_grad=True),))
    assert seen and not any(seen)


POSITIONS: dict[int, Tensor] = {}


@pytest.mark.whole_heap
def test_a_cache_that_the_next_trace_reads() -> None:
    """That trace fails where it meets the tensor; not so of what eager has put there."""

    def function(x: Tensor) -> Tensor:
        if 4 not in POSITIONS:
            POSITIONS[4] = torch.arange(4.0)
        return x * POSITIONS[4]

    x = torch.randn(4, requires_grad=True)
    with contextlib.ExitStack() as stack, pytest.raises(retrograd.CaptureError, match="keeps a tensor as 4 in a dict"):
        capture_joint(stack, function, (x,))
    assert not POSITIONS
    function(x)
    with contextlib.ExitStack() as stack:
        capture_joint(stack, function, (x,))
    assert type(POSITIONS.pop(4)) is Tensor


@pytest.mark.whole_heap
@pytest.mark.long
def test_what_does_not_keep_a_tensor() -> None:
    """A ring, an exception that is kept, a generator, a log, a context of a function, a hook of a tensor."""
    kept: list[Any] = []
    log = logging.Logger("kept")
    log.addHandler(logging.handlers.MemoryHandler(capacity=100))

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x, ctx.ring = x, [ctx]
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            x: Tensor = ctx.x
            return gradients[0] * 2 + 0 * x

    def count(x: Tensor) -> Iterator[Tensor]:
        yield x
        yield x * 2

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        ring = [y]
        ring.append(ring)  # type: ignore[arg-type]
        numbers = count(y)
        next(numbers)
        log.warning("of shape %s", y)
        y.register_hook(lambda gradient: gradient + 0 * y)
        try:
            raise ValueError(str(tuple(y.shape)))
        except ValueError as error:
            kept.append((error, numbers))
        doubled: Tensor = Double.apply(y)  # type: ignore[no-untyped-call]
        return doubled.sum()

    with contextlib.ExitStack() as stack:
        capture_joint(stack, function, (torch.randn(4, requires_grad=True),))
    assert kept


def test_the_remedy_for_tensors_that_are_kept_elsewhere() -> None:
    model, (x, _) = Keeping(("hook", "list", "object")), sample()

    def loss_of(call: Callable[..., Tensor]) -> Tensor:
        hidden, losses = model.kept()
        losses.clear()
        loss = call(x).sum()
        assert model.store.last is not None
        return loss + losses[-1] + model.store.last.square().sum() + hidden["layer"].exp().sum()

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="retrograd", options={"cache": False})
    found, expected = (torch.autograd.grad(loss_of(call), list(model.parameters())) for call in (compiled, model))
    torch.testing.assert_close(found, expected)
