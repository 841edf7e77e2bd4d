# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled model does what the model does: outputs, gradients, buffers, structure of arguments and results.

Each case runs eager, compiled to what a file takes, and loaded from that file; no argument's bytes may change but
where eager changes them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retrograd

TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    """A model and its arguments.

    `loadable`: an artifact can run it without what only this process knows. `tree`: an artifact knows the type of what
    it returns; it cannot for a type of the user's own, and gives a flat tuple then.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    loadable: bool = True
    tree: bool = True
    mutates: frozenset[int] = field(default=frozenset())


def randn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape).requires_grad_(grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One module at three places, used twice; parameters and a buffer that are used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.same = self.norm
        self.layers = nn.ModuleList([self.norm, nn.Linear(4, 4)])
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("unused_buffer", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.same(torch.relu(self.norm(x))))  # type: ignore[no-any-return]


class Normalized(nn.Module):
    """Running statistics, a counter, and a buffer that it writes to itself."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x) * self.calls  # type: ignore[no-any-return]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Any], *, scale: float, extra: tuple[Tensor, ...] = ()) -> dict[str, Any]:
        y = self.linear(batch["x"]) * scale
        for more in extra:
            y = y + more
        return {"pair": Pair(y, y.sum(0)), "labels": [y.argmax(1), "text", None], "scale": scale}


class Constants(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.table = torch.arange(12.0).reshape(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.table) @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.linear(x), target)


def several_outputs(x: Tensor, y: Tensor) -> Any:
    z = torch.sin(x) * y
    return z, z.detach(), (x > 0), [z.t(), z.sum()]


def views(x: Tensor, y: Tensor) -> Any:
    base = x * y
    return base.view(-1), base[1:], x.t(), x, y.unsqueeze(0)


def in_place(x: Tensor, state: Tensor) -> Tensor:
    state.mul_(0.5).add_(x.detach().sum(0))
    z = x * 2
    z[1:] *= 3
    return z * state


def self_updates(x: Tensor, index: Tensor) -> Any:
    y = x * 2
    return x.index_put((index,), x[:3], accumulate=True), y.index_put((index,), y[:3], accumulate=True)


def scatters(x: Tensor, index: Tensor, v: Tensor) -> Any:
    wide = index[:, None].expand(3, 4)
    return (
        # Of several values for one place the last stays, as in PyTorch's serial code.
        x.index_put((index,), v),
        x.scatter_add(0, wide, v),
        torch.slice_scatter(x, v, 0, 1, 4),
        torch.slice_scatter(x, x[2:5], 0, 1, 4),
        torch.select_scatter(x, v[0], 0, 2),
        x.index_add(0, index, v),
        torch.cat([x, v]),
        x.cumsum(0),
    )


def read_then_updated(x: Tensor) -> Any:
    """A part is updated by what reads all of it, and the whole as it was is read besides: see `bwd-copy-updated`."""
    stacked = torch.stack([x, x, x * 0.5], -1)
    mean, picked = stacked.mean(1), stacked[:, [1, 0, 0, 1]]
    updated = stacked * 1.0
    updated.narrow(0, 0, 1).addcmul_(mean, mean, value=0.1)
    return picked.flatten(0, 1), updated


def updated_beside_others(x: Tensor, y: Tensor) -> Any:
    """A part is updated after the whole was read, beside a chain of other kernels: see `bwd-copy-updated`."""
    normal = F.normalize(y + 2, dim=-1)
    chain = F.celu(torch.cat([normal, y.permute(1, 0, 2, 3), normal * 0.5], 1) * 1.0) * 1.0
    x = x * 1.0
    F.relu_(x[0])
    means = F.adaptive_avg_pool1d(x, 1)
    chain.transpose(0, -1).tanh_()
    updated = x * 1.0
    updated.narrow(-1, 0, 1).fill_(0.25)
    return means, chain, updated


def handed_through(x: Tensor, y: Tensor) -> Any:
    """The gradients are the tangents themselves, an output is returned twice, one is a constant."""
    z = x + y
    return z, z, torch.ones(3, 4), torch.zeros_like(x)


def odd_strides(x: Tensor) -> Any:
    """A result with an expanded axis, one whose elements lie apart, one that is transposed."""
    return (x[:1] * 2).expand(3, 4), (x * 4)[:, ::2], (x * 3).t()


INDEX = torch.tensor([1, 1, 2])
CASES: dict[str, Case] = {
    "tied_weights": Case(lambda: (Tied(), (torch.tensor([[1, 2, 2], [0, 10, 1]]),), {})),
    "shared_module": Case(lambda: (Shared(), (randn(5, 4),), {})),
    "odd_strides": Case(lambda: (odd_strides, (randn(3, 4),), {})),
    "running_statistics": Case(lambda: (Normalized(), (randn(6, 5),), {})),
    "eval_statistics": Case(lambda: (nn.BatchNorm1d(5).eval(), (randn(6, 5),), {})),
    "containers": Case(
        lambda: (Containers(), ({"x": randn(2, 4), "unused": 3},), {"scale": 0.5, "extra": (randn(2, 3), randn(3))}),
        tree=False,
    ),
    "constants": Case(lambda: (Constants(), (randn(3, 4),), {})),
    "bound_method": Case(lambda: (Model().loss, (randn(3, 4), randn(3, 4, grad=False)), {}), loadable=False),
    "several_outputs": Case(lambda: (several_outputs, (randn(3, 4), randn(3, 4)), {})),
    "views": Case(lambda: (views, (randn(3, 4), randn(3, 4)), {})),
    "in_place": Case(lambda: (in_place, (randn(3, 4), randn(4, grad=False)), {}), mutates=frozenset({1})),
    "self_updates": Case(lambda: (self_updates, (randn(6, 4), INDEX), {})),
    "scatters": Case(lambda: (scatters, (randn(6, 4), INDEX, randn(3, 4)), {})),
    "read_then_updated": Case(lambda: (read_then_updated, (randn(2, 2),), {})),
    "updated_beside_others": Case(lambda: (updated_beside_others, (randn(3, 4, 5), randn(2, 2, 4, 2)), {})),
    "handed_through": Case(lambda: (handed_through, (randn(3, 4), randn(3, 4)), {})),
    "not_contiguous": Case(
        lambda: (lambda x, y: (x @ y).relu(), (randn(4, 3).detach().t().requires_grad_(), randn(4, 5)), {})
    ),
    "scalar_and_empty": Case(lambda: (lambda x, y: (x * 2, y.exp()), (randn(), randn(0, 4)), {})),
    "constant_results": Case(lambda: (constant_results, (randn(2, 4), randn(3, 5), randn(3, 5)), {})),
    "indices_from_the_end": Case(lambda: (from_the_end, (randn(5, 4), randn(2, 4), torch.tensor([0, -1])), {})),
    "frozen_parameter": Case(lambda: (_frozen(), (randn(2, 4, grad=False),), {})),
    "float64": Case(lambda: (nn.Linear(4, 3).double(), (torch.randn(2, 4, dtype=torch.float64),), {})),
    "transposed_output": Case(lambda: (lambda x: (x * 2).t().contiguous().t(), (randn(3, 4),), {})),
}


def constant_results(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Constants that are results, and that other results are written into; gradients of zeros likewise."""
    zeros, ones = torch.zeros(6, 4), torch.ones(6, 4) + 1
    numbers = torch.arange(24.0).reshape(6, 4)
    return (
        zeros,
        torch.slice_scatter(zeros, x, 0, 1, 3),
        ones.index_put([torch.tensor([1, 3])], x),
        ones,
        torch.slice_scatter(numbers, x, 0, 1, 3),
        numbers,
        torch.narrow_copy(y, 1, 2, 2),
        torch.narrow_copy(z, 1, 0, 0),
    )


def from_the_end(x: Tensor, v: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Indices below zero, in what is read (whose gradient is written there), in what is written, and in what is added
    up."""
    return (
        x[:, [1, -1]].exp(),
        x[i] * 2,
        x.index_put((i,), v),
        x.index_put((torch.tensor([3, -2, -1]), torch.tensor([-1, 0, 1])), v[0, :3], accumulate=True),
        x.put(torch.tensor([-1, 2]), v[0, :2]),
    )


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    return model


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def run_step(
    call: Callable[..., Any], args: Any, kwargs: Any, state: Sequence[Tensor]
) -> tuple[Any, list[Tensor | None]]:
    """Outputs and the gradients of arguments and parameters, with the same tangents each time."""
    outputs = call(*args, **kwargs)
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    wanted = [t for t in (*pytree.tree_leaves((args, kwargs)), *state) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    tangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in leaves]
    gradients = torch.autograd.grad(leaves, wanted, tangents, allow_unused=True)
    return outputs, list(gradients)


def assert_close(found: Any, expected: Any, what: str) -> None:
    if not isinstance(expected, Tensor):
        assert found == expected, what
        return
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    assert found.stride() == expected.stride() or expected.numel() <= 1, (
        f"{what}: strides {found.stride()}, {expected.stride()}"
    )
    assert found.requires_grad == expected.requires_grad, f"{what}: requires_grad"
    error = (found - expected).detach().double().norm() if expected.dtype != torch.bool else (found != expected).sum()
    scale = expected.detach().double().norm().clamp_min(1e-12)
    assert float(error) <= TOLERANCE * float(scale), f"{what}: relative error {float(error / scale):.2e}"


def owner(call: Callable[..., Any]) -> nn.Module | None:
    module = call if isinstance(call, nn.Module) else getattr(call, "__self__", None)
    return module if isinstance(module, nn.Module) else None


@pytest.mark.long_cases(
    "scatters",
    "running_statistics",
    "shared_module",
    "several_outputs",
    "float64",
    "frozen_parameter",
    "odd_strides",
    "transposed_output",
)
@pytest.mark.parametrize("name", CASES)
def test_same_as_eager(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model, args, kwargs = case.make()
    eager, eager_args, eager_kwargs = copy.deepcopy((model, args, kwargs))
    compiled = retrograd.compile_backward(model, args, kwargs, cache=False, portable=True)
    compiled.save(tmp_path / "model.vmfb")
    loaded_model = copy.deepcopy(model)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    saved_args, saved_kwargs = copy.deepcopy((args, kwargs))
    for step in range(2):
        before = [digest(t) for t in tensors]
        expected = _run(eager, eager, eager_args, eager_kwargs)
        found = _run(compiled, model, args, kwargs)
        _compare(found, expected, f"{name}, step {step}")
        for i, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
            assert i in case.mutates or digest(tensor) == old, f"argument {i} changed"
    if case.loadable:
        loaded = retrograd.load(tmp_path / "model.vmfb", owner(loaded_model))
        reference = copy.deepcopy(loaded_model)
        reference_args, reference_kwargs = copy.deepcopy((saved_args, saved_kwargs))
        for step in range(2):
            expected = _run(reference, reference, reference_args, reference_kwargs)
            found = _run(loaded, loaded_model, saved_args, saved_kwargs)
            if not case.tree:
                assert isinstance(found[0], tuple)
                expected = (tuple(pytree.tree_leaves(expected[0])), *expected[1:])
            _compare(found, expected, f"{name} loaded, step {step}")


def test_result_whose_elements_share_memory() -> None:
    """It is not a view of anything that the caller sees, and gets memory for each element."""

    def windows(x: Tensor) -> Tensor:
        return (x * 3).unfold(0, 2, 1)

    x, tangent = randn(3, 4), torch.randn(2, 4, 2)
    step = retrograd.compile_backward(windows, (x,), cache=False)
    assert torch.equal(step(x), windows(x)) and step(x).is_contiguous()
    found, expected = (torch.autograd.grad(call(x), x, tangent)[0] for call in (step, windows))
    assert_close(found, expected, "gradient")


def test_parameters_are_swapped_between_steps() -> None:
    """PyTorch refuses to swap tensors that anything refers to weakly."""
    model, x = nn.Linear(3, 2), randn(4, 3)
    step = retrograd.compile_backward(model, (x,), cache=False)
    for _ in range(2):
        found, expected = (torch.autograd.grad(call(x).square().sum(), x)[0] for call in (step, model))
        assert_close(found, expected, "gradient")
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 1.5))


@pytest.mark.long_cases("min-cut")
@pytest.mark.parametrize("partition", ["default", "min-cut"])
def test_a_single_window_of_what_is_computed(partition: Literal["default", "min-cut"]) -> None:
    """There is room for one: the rest of the tensor is not read, and nothing is written behind the result."""

    def window(x: Tensor, w: Tensor) -> Tensor:
        return torch.minimum(x, x - w).unfold(1, 2, 2) * w[0, :, None]

    arguments = (randn(4, 3, 5), randn(3, 5))
    step = retrograd.compile_backward(window, arguments, partition=partition, cache=False, fallback="error")
    result, expected = step(*arguments), window(*arguments)
    tangent = torch.randn(expected.shape)
    assert torch.equal(result, expected)
    for found, wanted in zip(*(torch.autograd.grad(r, arguments, tangent) for r in (result, expected)), strict=True):
        assert_close(found, wanted, "gradient")


def test_an_argument_whose_elements_share_memory_is_filled(tmp_path: Path) -> None:
    """As eager does, which refuses other writes to it; from a file too."""

    def fill(x: Tensor, w: Tensor) -> Tensor:
        return (x.fill_(2) * w).sum(0)

    w = randn(3, 4)
    step = retrograd.compile_backward(fill, (torch.zeros(3, 1).expand(3, 4), w), portable=True)
    step.save(tmp_path / "fill.vmfb")
    for call in (step, retrograd.load(tmp_path / "fill.vmfb")):
        base = torch.zeros(3, 1)
        result = call(base.expand(3, 4), w)
        assert torch.equal(result, 2 * w.sum(0)) and bool((base == 2).all())
        assert torch.equal(torch.autograd.grad(result.sum(), w)[0], torch.full((3, 4), 2.0))


def test_writes_to_a_part_of_an_expanded_argument_are_refused(tmp_path: Path) -> None:
    """Eager sees them in the whole of it."""

    def write(x: Tensor, w: Tensor) -> Tensor:
        x[0].fill_(1)
        result = (x.sin() * w.detach() + w).sum()
        x.fill_(2)
        return result

    w = randn(3, 4)
    step = retrograd.compile_backward(write, (torch.zeros(3, 4), w), portable=True)
    step.save(tmp_path / "write.vmfb")
    for call in (step, retrograd.load(tmp_path / "write.vmfb")):
        assert_close(call(torch.zeros(3, 4), w), write(torch.zeros(3, 4), w), "result")
        with pytest.raises(retrograd.ArgumentError, match=r"args\[0\] is expanded.* a part of it; pass a clone"):
            call(torch.zeros(1, 4).expand(3, 4), w)


@pytest.mark.short_cases("compile_backward")
@pytest.mark.parametrize("way", [retrograd.compile_backward, torch.compile])
def test_writes_to_expanded_views(way: Callable[..., Any]) -> None:
    """Of what the model computes: eager sees them once, PyTorch's functional form as often as the elements are seen.
    What depends on the order in which they are written is refused, with the line."""

    def write(x: Tensor) -> Tensor:
        scores, mask = x * 1e8, torch.full((4, 1), -torch.inf)
        scores.expand(4, 3)[:, 1].copy_(x[:, 0] * 0.3)
        mask.expand(4, 3)[:2].fill_(0.5)
        mask.expand(4, 3)[2:, 0].fill_(0.25)
        return scores * x + mask

    def order(x: Tensor) -> Tensor:
        y = x.detach() * 2
        y.expand(4, 3).masked_fill_(x > 0, 0.0)
        return x * y

    def compiled(model: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
        call: Callable[..., Tensor] = (
            way(model, backend="retrograd") if way is torch.compile else way(model, (x,), cache=False)
        )
        return call

    x = randn(4, 1)
    step = compiled(write, x)
    assert_close(step(x), write(x), "result")
    found, expected = (torch.autograd.grad(call(x).sum(), x)[0] for call in (step, write))
    assert_close(found, expected, "gradient")
    place = rf"test_semantics.py:{order.__code__.co_firstlineno + 2}"
    with pytest.raises(Exception, match=rf"aten\.masked_fill_\.Scalar writes to a view (.|\n)*{place}(.|\n)*clone\(\)"):
        compiled(order, x)(x)


def _run(call: Callable[..., Any], model: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    module = owner(model)
    parameters = list(module.parameters()) if module else []
    outputs, gradients = run_step(call, args, kwargs, parameters)
    buffers = dict(module.named_buffers()) if module else {}
    return (
        outputs,
        gradients,
        {k: v.clone() for k, v in buffers.items()},
        [t.detach().clone() for t in pytree.tree_leaves(args) if isinstance(t, Tensor)],
    )


def _compare(found: tuple[Any, ...], expected: tuple[Any, ...], where: str) -> None:
    for what, a, b in zip(("outputs", "gradients", "buffers", "arguments"), found, expected, strict=True):
        leaves_a, spec_a = pytree.tree_flatten(a)
        leaves_b, spec_b = pytree.tree_flatten(b)
        assert spec_a == spec_b, f"{where}: structure of {what}"
        for i, (x, y) in enumerate(zip(leaves_a, leaves_b, strict=True)):
            if what == "gradients" and isinstance(x, Tensor) and isinstance(y, Tensor):
                x, y = x.contiguous(), y.contiguous()
            assert_close(x, y, f"{where}: {what} {i}")
