# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``torch.compile(backend="retrograd")``: sizes, breaks, modes and options, counted as Dynamo counts."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch._higher_order_ops.scan import scan

import retrograd
from retrograd import build as builder

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every graph that is compiled from here on."""
    options: list[Any] = []

    def build(graph: Any, chosen: Any, *rest: Any, **named: Any) -> Any:
        options.append(chosen)
        return original(graph, chosen, *rest, **named)

    original = builder.build
    monkeypatch.setattr(builder, "build", build)
    return options


def captured() -> int:
    return counters["stats"]["unique_graphs"]


def matrix(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows), requires_grad=True)


def scaled(x: Tensor) -> Tensor:
    return x.sin().sum(0) * x.shape[0]


def assert_eager(compiled: Callable[..., Tensor], function: Callable[..., Tensor], *args: Any) -> None:
    """Value and gradients of all leaves among the arguments."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    found, expected = compiled(*args), function(*args)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert (gradient - reference).norm() <= TOLERANCE * reference.norm()


@pytest.mark.short_cases("None-2", "True-1")
@pytest.mark.parametrize(("dynamic", "programs"), [(None, 2), (True, 1), (False, 4)])
def test_programs_for_many_sizes(dynamic: bool | None, programs: int, built: list[Any]) -> None:
    """A size that changed is left open from then on; each is compiled for by itself only where that is asked for."""
    compiled = torch.compile(scaled, backend="retrograd", dynamic=dynamic, fullgraph=True)
    for rows in (3, 5, 7, 31, 5, 3):
        assert_eager(compiled, scaled, matrix(rows))
    assert captured() == len(built) == programs


def test_recompilations_are_limited_as_dynamo_limits_them() -> None:
    compiled = torch.compile(scaled, backend="retrograd", dynamic=False, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (3, 5):
            compiled(matrix(rows))
        with pytest.raises(FailOnRecompileLimitHit):
            compiled(matrix(7))


def test_a_size_that_is_marked_stays_dynamic(built: list[Any]) -> None:
    compiled = torch.compile(scaled, backend="retrograd")
    x = matrix(3)
    torch._dynamo.mark_dynamic(x, 0)
    assert_eager(compiled, scaled, x)
    assert_eager(compiled, scaled, matrix(11))
    assert captured() == len(built) == 1


def test_a_loss_that_is_divided_by_an_open_size(built: list[Any]) -> None:
    """AOTAutograd makes tensors of what is divided by the number of elements."""

    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(x.sin(), x.detach(), reduction="mean")

    compiled = torch.compile(loss, backend="retrograd", dynamic=True, options={"fallback": "error"})
    for rows in (3, 5):
        assert_eager(compiled, loss, matrix(rows))
    assert captured() == len(built) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitoin": "default"}, "option 'partitoin' is not one of target, partition, .*; did you mean 'partition'"),
        ({"device": "cuda"}, "option 'device' is not one of target, partition, cache"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(scaled, backend="retrograd", options=options)(matrix(3))


def test_what_cannot_be_compiled_for_many_sizes_is_for_each(caplog: pytest.LogCaptureFixture) -> None:
    """A budget is a number of bytes, for one size."""
    options: dict[str, Any] = {"partition": "budget", "memory_budget": "1MiB"}
    compiled = torch.compile(scaled, backend="retrograd", dynamic=True, options=options)
    with caplog.at_level(logging.WARNING, "retrograd"):
        for rows in (3, 5):
            assert_eager(compiled, scaled, matrix(rows))
    assert captured() == 2
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("retrograd")]
    reasons, sizes = messages[::2], messages[1::2]
    assert len(reasons) == len(sizes) == 2
    assert all("not compiled for more than one size: partition='budget' keeps a peak" in m for m in reasons)
    assert all("another size compiles again" in m for m in sizes)


def test_a_gradient_that_pytorch_traces_for_one_size_only(caplog: pytest.LogCaptureFixture) -> None:
    """That of an affine grid takes numbers, whatever the backend."""

    def model(theta: Tensor) -> Tensor:
        return torch.nn.functional.affine_grid(theta, [theta.shape[0], 1, 4, 5], align_corners=False).sin().sum()

    compiled = torch.compile(model, backend="retrograd", dynamic=True)
    with caplog.at_level(logging.WARNING, "retrograd"):
        for count in (2, 3):
            assert_eager(compiled, model, torch.randn(count, 2, 3, requires_grad=True))
    assert captured() == 2
    assert "not compiled for more than one size" in caplog.text


def test_sizes_and_numbers_cross_a_graph_break(built: list[Any]) -> None:
    def model(x: Tensor, scale: float) -> Tensor:
        y = x.tanh().sum(0) * x.shape[0] * scale
        count = 2 * x.shape[0] + 1
        torch._dynamo.graph_break()
        return y * count + x.new_ones(count).sum()

    compiled = torch.compile(model, backend="retrograd")
    for rows in (2, 4, 6):
        assert_eager(compiled, model, matrix(rows), rows + 0.5)
    assert captured() == len(built) == 4


def test_fullgraph_refuses_a_break() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y * 2

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="retrograd", fullgraph=True)(matrix(2))


def test_module_with_buffers() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    compiled = torch.compile(ours, backend="retrograd")
    for rows in (4, 6):
        for call in (compiled, theirs):
            call(matrix(rows)).square().sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).norm() <= TOLERANCE * max(float(b.grad.norm()), 1.0), name
    for buffer, expected in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_inference_graphs(built: list[Any]) -> None:
    layer = nn.Linear(4, 2)
    compiled = torch.compile(layer, backend="retrograd")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for rows in (3, 5):
                x = matrix(rows).detach()
                found = compiled(x)
                assert not found.requires_grad
                torch.testing.assert_close(found, layer(x), rtol=TOLERANCE, atol=TOLERANCE)
    assert len(built) == captured()


def test_autocast() -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ weight).float().relu()

    x, weight = matrix(3), matrix(4)
    found, expected = torch.compile(model, backend="retrograd")(x, weight), model(x, weight)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (x, weight)), torch.autograd.grad(expected.sum(), (x, weight)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    assert_eager(torch.compile(scaled, backend="retrograd", mode=mode), scaled, matrix(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fastest"}, "mode 'fastest' is not one of default"),
        ({"mode": "max-autotuned"}, "did you mean 'max-autotune'"),
        ({"options": {"cache": "no"}}, r"cache is True or False, got 'no'; did you mean cache=False\?"),
        ({"options": {"fallback": 1}}, "fallback 1 is not one of island, error"),
        ({"options": {"partition": "some"}}, "partition 'some' is not one of default"),
        ({"options": {"target": "cpi"}}, "did you mean 'cpu'"),
        ({"options": {"epilogue_fusion": True}}, "epilogue_fusion"),
    ],
)
def test_unknown_modes_and_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(scaled, backend="retrograd", **arguments)(matrix(3))


def test_backends_and_options_share_nothing(built: list[Any]) -> None:
    def compiled_with(backend: str, **options: Any) -> Callable[..., Tensor]:
        return torch.compile(scaled, backend=backend, options=options or None)

    assert_eager(compiled_with("aot_eager"), scaled, matrix(3))
    assert (captured(), built) == (1, [])
    assert_eager(compiled_with("retrograd"), scaled, matrix(3))
    assert_eager(compiled_with("retrograd", partition="default"), scaled, matrix(3))
    assert_eager(compiled_with("aot_eager"), scaled, matrix(3))
    assert [options.partition for options in built] == ["min-cut", "default"]
    assert captured() == 3
    # Equal options are one backend to Dynamo, which takes what it has.
    assert_eager(compiled_with("retrograd", partition="default"), scaled, matrix(3))
    assert (captured(), len(built)) == (3, 2)


def test_the_cache_of_aotautograd_is_off_while_we_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []

    def build(*arguments: Any, **named: Any) -> Any:
        enabled.append(torch._functorch.config.enable_autograd_cache)
        return original(*arguments, **named)

    original = builder.build
    monkeypatch.setattr(builder, "build", build)
    with torch._functorch.config.patch(enable_autograd_cache=True):
        assert_eager(torch.compile(scaled, backend="retrograd"), scaled, matrix(3))
        assert enabled == [False]
        assert torch._functorch.config.enable_autograd_cache


def test_a_move_between_devices_is_a_copy() -> None:
    """All of a compiled graph is on one device; moves to it are left over of tensors that were made elsewhere."""

    def move(x: Tensor) -> Tensor:
        moved: Tensor = torch.ops.prims.device_put.default(x.tanh(), torch.device("cpu"), False)
        return moved * 2

    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.allclose(torch.compile(move, backend="retrograd")(x), 2 * x.tanh(), rtol=TOLERANCE)


def test_what_a_scatter_overwrites_is_read_beside_it() -> None:
    """One kernel that did both read numbers that the scatter had written already."""

    def overwrite(x: Tensor, scale: Tensor) -> Tensor:
        flat = (torch.tanh(x) * 2).view(-1)
        places = torch.arange(6) * 3
        old = flat[places]
        new = torch.ops.aten.index_put(flat, [places], torch.zeros(6)).view(4, 4)
        joined: Tensor = torch.ops.aten.slice_scatter(torch.zeros(16), old * scale, 0, 0, 6).view(4, 4) + new
        return joined

    x, scale = torch.randn(4, 4), torch.randn(6)
    with torch.no_grad():
        found = torch.compile(overwrite, backend="retrograd", dynamic=False)(x, scale)
    torch.testing.assert_close(found, overwrite(x, scale))


def test_the_backward_of_a_compiled_model_is_part_of_an_enabled_one() -> None:
    """The model's own compiled backward is a node of the whole, which is compiled around it; hooks run in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    compiled = torch.compile(model, backend="retrograd")
    seen: list[Tensor] = []
    recompiled = len(retrograd.explain_recompiles())
    for _ in range(3):
        x = torch.randn(4, 6)
        expected = torch.autograd.grad(model(x).cos().sum(), [*model.parameters()])
        with retrograd.enable():
            output = compiled(x)
            output.register_hook(seen.append)
            output.cos().sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, gradient, rtol=2e-5, atol=2e-6)
        assert torch.allclose(seen[-1], -model(x).sin(), atol=1e-6)
        model.zero_grad()
    assert len(seen) == 3
    (first,) = retrograd.explain_recompiles()[recompiled:]
    assert first.outcome == "compiled"
    assert "CompiledFunctionBackward" in first.nodes


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last step."""

    def __init__(self, kind: str, **named: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = getattr(nn, kind)(3, 4, **named)
        self.head = nn.Linear(self.layer.hidden_size * (2 if self.layer.bidirectional else 1), 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x)[0])
        return y.square().sum()


def assert_same_gradients(model: nn.Module, compiled: Callable[..., Any], x: Tensor) -> None:
    """Loss and gradients of all parameters."""
    parameters = list(model.parameters())
    found, expected = compiled(x), model(x)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(
        torch.autograd.grad(found, parameters),
        torch.autograd.grad(expected, parameters),
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "named"),
    [("LSTM", {"batch_first": True}), ("GRU", {"bidirectional": True}), ("RNN", {"num_layers": 2})],
)
def test_recurrent_layers_are_captured(kind: str, named: dict[str, Any], built: list[Any]) -> None:
    """Dynamo's option of all backends stays as it was, also where the backend is reset in between."""
    model = Recurrent(kind, **named)
    compiled = torch.compile(model, backend="retrograd", fullgraph=True)
    torch._dynamo.reset()
    assert_same_gradients(model, compiled, torch.randn(2, 4, 3))
    assert captured() == len(built) == 1 and not torch._dynamo.config.allow_rnn


def test_recurrent_layers_of_other_backends_are_left_alone() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def other(graph_module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph_module)
        return graph_module.forward

    torch.compile(Recurrent("LSTM"), backend=other)(torch.randn(2, 4, 3))
    assert graphs == []


def test_long_recurrences_run_in_eager_with_a_word(caplog: pytest.LogCaptureFixture, built: list[Any]) -> None:
    model, x = Recurrent("GRU", num_layers=2).double(), torch.randn(60, 4, 3, dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        assert_same_gradients(model, torch.compile(model, backend="retrograd"), x)
    assert f"run in eager: gru at {__file__}" in caplog.text and "120 steps, written out, take long" in caplog.text
    assert built == []


def test_recurrence_of_open_length_runs_in_eager(caplog: pytest.LogCaptureFixture, built: list[Any]) -> None:
    model = Recurrent("RNN")
    compiled = torch.compile(model, backend="retrograd", dynamic=True)
    with caplog.at_level(logging.WARNING):
        for length in (5, 7):
            assert_same_gradients(model, compiled, torch.randn(length, 6, 3))
    assert "open length" in caplog.text and built == []


class Averaged(nn.Module):
    """A layer beside a moving average of it, which an assignment to ``.data`` or a copy keeps."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.trained, self.mean = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, trained in zip(self.mean.parameters(), self.trained.parameters(), strict=True):
                moved = 0.9 * mean + 0.1 * trained
                if self.assigns:
                    mean.data = moved
                else:
                    mean.copy_(moved)
        difference: Tensor = self.trained(x) - self.mean(x)
        return difference.square()


@pytest.mark.parametrize("assigns", [True, False])
def test_data_that_is_assigned_is_so_in_eager_and_copies_are_compiled(
    assigns: bool, caplog: pytest.LogCaptureFixture, built: list[Any]
) -> None:
    model = Averaged(assigns)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="retrograd")
    with caplog.at_level(logging.WARNING):
        for rows in (5, 5, 5):
            assert_same_results(compiled, reference, torch.randn(rows, 4), model)
    assert ("run in eager: .data of an argument or parameter is assigned at" in caplog.text) == assigns
    assert bool(built) != assigns


def writes_beside_a_view(x: Tensor) -> Tensor:
    y = x * 2
    z = y[1:]
    torch._dynamo.graph_break()
    z.add_(1)
    return y.sin().sum() * z


def test_what_no_sizes_make_a_graph_of_is_traced_once(caplog: pytest.LogCaptureFixture) -> None:
    """A second trace, for the sizes of the call alone, would be refused too, and compile again for each size."""
    model = Averaged(assigns=True)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="retrograd", dynamic=True)
    parts = torch.compile(writes_beside_a_view, backend="retrograd", dynamic=True)
    with caplog.at_level(logging.WARNING, "retrograd"):
        for rows in (5, 6):
            assert_same_results(compiled, reference, torch.randn(rows, 4), model)
            assert_eager(parts, writes_beside_a_view, matrix(rows))
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("retrograd")]
    assert len(messages) == 2 and all(m.startswith("run in eager: ") for m in messages)
    assert "copy to it by copy_() under torch.no_grad()" in messages[0]
    assert "shares its memory with another; to compile it, give each of them memory of its own" in messages[1]


class Moved(nn.Module):
    """A layer that is moved to the type that it has, which assigns to ``.data`` what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(torch.float32)
        result: Tensor = self.layer(x)
        return result.sin().sum()


def test_a_layer_that_is_moved_to_its_own_type_is_compiled(built: list[Any]) -> None:
    model = Moved()
    assert_same_gradients(model, torch.compile(model, backend="retrograd"), torch.randn(5, 4))
    assert len(built) == 1


def assert_same_results(compiled: Any, reference: nn.Module, x: Tensor, model: nn.Module) -> None:
    """A step of both: losses, and the parameters after it, which gradients moved."""
    losses = [function(x).sum() for function in (compiled, reference)]
    for loss, of in zip(losses, (model, reference), strict=True):
        loss.backward()
        torch.optim.SGD(of.parameters(), lr=0.1).step()
        of.zero_grad()
    torch.testing.assert_close(*losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)


def test_hooks_that_come_and_go_are_seen() -> None:
    """By default Dynamo looks for none, whatever the backend."""
    model, x = nn.Linear(4, 3), matrix(2)
    compiled = torch.compile(model, backend="retrograd")
    assert_eager(compiled, model, x)
    hook = model.register_forward_hook(lambda module, given, result: result * 3)
    assert_eager(compiled, model, x)
    hook.remove()
    assert_eager(compiled, model, x)

    def tripled(module: nn.Module, given: Any, result: Any) -> Any:
        return (given[0] * 3,)

    model.register_full_backward_hook(tripled)
    assert_eager(compiled, model, x)


@pytest.mark.parametrize("draw", [lambda: random.uniform(1, 3), lambda: random.randint(2, 9)])
def test_numbers_that_python_draws_are_drawn_at_each_call(draw: Callable[[], float]) -> None:
    """Dynamo captures them as tensors of float32, and hands over ones of float64."""
    compiled, x = torch.compile(lambda x: (x.sin() * draw()).sum(), backend="retrograd"), matrix(2)
    for seed in range(3):
        random.seed(seed)
        found = compiled(x)
        random.seed(seed)
        expected = (x.sin() * draw()).sum()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))
    assert captured() == 1


class Teacher(nn.Module):
    """Follows a student, as in self-distillation; its parameters require grad all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.shift = nn.Linear(4, 3), nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x @ self.student.weight.T + self.shift).square().sum()
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.mul_(0.9).add_(other * 0.1)
            # Of what has a gradient, by what ran before.
            self.shift.mul_(0.5)
        result: Tensor = (self.student(x) - self.teacher(x).detach()).square().sum() + scaled
        return result


def test_what_is_only_updated_has_no_gradient() -> None:
    """None, as in eager: of zeros an optimizer with weight decay would move it."""
    torch.manual_seed(0)
    model, x = Teacher(), matrix(2)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="retrograd")
    for call, of in ((compiled, model), (reference, reference)):
        optimizer = torch.optim.AdamW(of.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            call(x).backward()
            optimizer.step()
        assert [p.grad is None for p in of.parameters()] == [False, False, False, True, True]
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)


def scanned(weight: Tensor, x: Tensor) -> Tensor:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(state @ weight + row)
        return state, state.clone()

    last, rows = scan(step, torch.zeros(2, 4), x)
    result: Tensor = rows.square().sum() + last.sum()
    return result


def test_a_scan_is_run_in_torch() -> None:
    """What PyTorch keeps of a step for the gradient is not the copy that the step returns."""
    weight, x = (torch.rand(n, 4, requires_grad=True) for n in (4, 6))
    compiled = torch.compile(scanned, backend="retrograd")
    assert_eager(compiled, scanned, weight, x.view(3, 2, 4).detach())
