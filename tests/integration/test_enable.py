# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd.enable()`` beside eager: the same gradients, and the same calls of Python in the same order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

import retrograd

STEPS = 3
Log = list[str]


class Square(torch.autograd.Function):
    log: ClassVar[Log] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        Square.log.append("Square")
        result: torch.Tensor = 2 * gradient * x
        return result


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def note(log: Log, text: str, result: torch.Tensor) -> torch.Tensor:
    log.append(text)
    return result


def compiled() -> int:
    return sum(entry.outcome == "compiled" for entry in retrograd.explain_recompiles())


@pytest.fixture(autouse=True)
def nothing_runs_eagerly() -> Iterator[None]:
    """All that these tests do is compiled."""
    before = len(retrograd.explain_recompiles())
    yield
    entries = retrograd.explain_recompiles()[before:]
    assert [str(entry) for entry in entries if entry.outcome == "runs eagerly"] == []


def check(step: Callable[[Any, torch.Tensor, Log], Any], setup: Callable[[Any, Log], None]) -> Log:
    """Run ``step`` on two equal models, one of them in eager; gradients and logs are equal at each step."""
    eager, ours = make_model(), make_model()
    logs: tuple[Log, Log] = [], []
    for model, log in zip((eager, ours), logs, strict=True):
        setup(model, log)
    for _ in range(STEPS):
        x = torch.randn(5, 4)
        Square.log = logs[0]
        expected = step(eager, x, logs[0])
        Square.log = logs[1]
        with retrograd.enable():
            found = step(ours, x, logs[1])
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
        assert logs[1] == logs[0]
    return logs[1]


def backward(model: Any, x: torch.Tensor, log: Log) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def test_hooks_of_parameters() -> None:
    def setup(model: Any, log: Log) -> None:
        weight, bias = model[0].weight, model[0].bias
        weight.register_hook(lambda g: log.append("first"))
        weight.register_hook(lambda g: note(log, "second", g * 2))
        bias.register_hook(lambda g: log.append("bias"))
        weight.register_post_accumulate_grad_hook(lambda p: log.append(f"accumulated {p.grad.norm():.4f}"))
        model[2].weight.register_post_accumulate_grad_hook(lambda p: log.append("last layer"))

    log = check(backward, setup)
    assert log.count("first") == STEPS


@pytest.mark.long
def test_a_forward_under_autocast() -> None:
    """Gradients of float32 that are computed in bfloat16 are off from eager's by its rounding, and compiled still."""
    eager, ours = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)) for _ in range(2))
    ours.load_state_dict(eager.state_dict())
    before = compiled()
    for _ in range(STEPS):
        x = torch.randn(32, 16)
        for model, scope in ((eager, contextlib.nullcontext()), (ours, retrograd.enable())):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            with scope:
                loss.backward()
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert (mine.grad - theirs.grad).norm() < 2e-2 * theirs.grad.norm()
    assert compiled() == before + 1


def test_hooks_of_modules() -> None:
    def setup(model: Any, log: Log) -> None:
        model[2].register_full_backward_hook(lambda module, before, after: log.append(f"hook {len(before)}"))
        model[2].register_full_backward_pre_hook(lambda module, after: (after[0] * 3,))
        model[0].register_full_backward_pre_hook(lambda module, after: log.append("pre-hook"))

    assert "pre-hook" in check(backward, setup)


def test_hooks_of_nodes_and_saved_tensors() -> None:
    def step(model: Any, x: torch.Tensor, log: Log) -> Any:
        def unpack(packed: tuple[str, torch.Tensor]) -> torch.Tensor:
            log.append(f"unpack {tuple(packed[1].shape)}")
            return packed[1]

        with saved_tensors_hooks(lambda t: ("packed", t), unpack):
            h: Any = Square.apply(model(x))  # type: ignore[no-untyped-call]
        h.register_hook(lambda g: log.append("tensor"))
        h.register_hook(lambda g: note(log, "tensor, again", g * 1.5))
        h.grad_fn.register_prehook(lambda gradients: log.append("before"))
        h.grad_fn.register_hook(lambda inputs, outputs: log.append("after"))
        h.retain_grad()
        model.zero_grad()
        h.sum().backward()
        return h.grad

    log = check(step, lambda model, log: None)
    assert log.index("before") < log.index("unpack (5, 3)") < log.index("Square") < log.index("after")


def test_nodes_run_in_the_engines_order() -> None:
    """Every AccumulateGrad has the highest priority: it runs when its gradient exists, not when the trace meets it."""

    def setup(model: Any, log: Log) -> None:
        model.nodes = []
        for name, parameter in model.named_parameters():
            node = get_gradient_edge(parameter).node
            model.nodes.append(node)
            node.register_prehook(lambda gradients, name=name: log.append(name))

    log = check(backward, setup)
    assert log[:4] == ["2.bias", "2.weight", "0.bias", "0.weight"]


def test_multi_grad_hooks() -> None:
    def setup(model: Any, log: Log) -> None:
        parameters, register = list(model.parameters()), torch.autograd.graph.register_multi_grad_hook
        register(parameters, lambda gradients: log.append(f"all {len(gradients)}"))
        register(parameters, lambda gradient: log.append(f"any {tuple(gradient.shape)}"), mode="any")

    assert check(backward, setup) == ["any (3,)", "all 4"] * STEPS


def test_hooks_that_come_and_go_between_steps() -> None:
    def setup(model: Any, log: Log) -> None:
        model.handles = [model[2].bias.register_hook(lambda g: log.append("first"))]

    def step(model: Any, x: torch.Tensor, log: Log) -> None:
        backward(model, x, log)
        # Once there is another at its place, once there is none.
        model.handles.pop().remove()
        if len(log) == 1:
            model.handles.append(model[2].bias.register_hook(lambda g: note(log, "second", g * 2)))
        else:
            model.handles.append(model[2].weight.register_hook(lambda g: note(log, "third", g * 3)))

    assert check(step, setup) == ["first", "second", "third"]


def test_twenty_mixed_steps_compile_twice() -> None:
    """Gradients that are there or not, zeroed both ways, graphs that are kept, gradients of gradients; and a layer that
    is frozen half way, whose backward is another."""
    eager, ours = make_model(), make_model()
    before = compiled()
    for number in range(20):
        x = torch.randn(5, 4)
        for model, context in ((eager, contextlib.nullcontext()), (ours, retrograd.enable())):
            model[0].requires_grad_(number < 10)
            if number % 3 == 0:
                model.zero_grad(set_to_none=number % 2 == 0)
            loss = model(x).square().mean()
            with context:
                if number % 7 == 6:
                    torch.autograd.grad(loss, model[2].weight, create_graph=True)
                loss.backward(retain_graph=number % 4 == 0)
                if number % 8 == 0:
                    loss.backward()
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
    assert compiled() - before <= 2


def test_grad_and_inputs_and_several_roots() -> None:
    eager, ours = make_model(), make_model()
    for _ in range(STEPS):
        x = torch.randn(5, 4)
        results = []
        for model, context in ((eager, contextlib.nullcontext()), (ours, retrograd.enable())):
            y = model(x)
            with context:
                grads = torch.autograd.grad(y.square().mean(), [model[0].weight, model[2].bias], retain_graph=True)
                torch.autograd.backward([y.sum(), y.square().sum()], inputs=[model[2].weight], retain_graph=True)
                torch.autograd.backward([y], [torch.ones_like(y)])
            results.append([*grads, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(results[1], results[0])


def test_gradients_of_gradients_run_eagerly() -> None:
    model = make_model()
    x = torch.randn(5, 4, requires_grad=True)
    results = []
    for context in (contextlib.nullcontext(), retrograd.enable()):
        with context:
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            told = [str(entry) for entry in retrograd.explain_recompiles()]
            results.append(torch.autograd.grad(slope.square().sum(), list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(results[1], results[0])
    assert told[-1].startswith("test_enable.py:") and "is left to PyTorch's engine: it makes a graph of its" in told[-1]


def test_an_exception_in_a_hook_reaches_the_caller() -> None:
    class Mine(Exception):
        pass

    model = make_model()
    raising = False

    def hook(gradient: torch.Tensor) -> None:
        if raising:
            raise Mine("from the hook")

    model[0].weight.register_hook(hook)
    reference = make_model()
    for step in range(6):
        raising = step in (2, 3)
        x = torch.randn(5, 4)
        with retrograd.enable():
            if raising:
                with pytest.raises(Mine, match="from the hook"):
                    backward(model, x, [])
                continue
            backward(model, x, [])
        backward(reference, x, [])
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_a_hook_that_changes_size_or_type_is_eagers_error() -> None:
    model = make_model()
    change: Callable[[torch.Tensor], Any] = torch.clone
    wrong: list[tuple[Callable[[torch.Tensor], Any], type[Exception]]] = [
        (lambda g: g[:2], RuntimeError),
        (torch.Tensor.double, RuntimeError),
        (torch.Tensor.tolist, TypeError),
    ]

    def hook(gradient: torch.Tensor) -> Any:
        return change(gradient)

    model[0].bias.register_hook(hook)
    x, log = torch.randn(5, 4), list[str]()
    with retrograd.enable():
        for _ in range(2):
            backward(model, x, log)
    for taken, error in wrong:
        change = taken
        with pytest.raises(error) as eager:
            backward(model, x, log)
        with retrograd.enable(), pytest.raises(error) as enabled:
            backward(model, x, log)
        assert str(enabled.value) == str(eager.value)
    change = torch.clone
    with retrograd.enable():
        backward(model, x, log)


def test_callbacks_queued_on_the_engine() -> None:
    def setup(model: Any, log: Log) -> None:
        def hook(gradient: torch.Tensor) -> None:
            log.append("hook")
            torch.autograd.Variable._execution_engine.queue_callback(lambda: log.append("callback"))

        model[2].weight.register_hook(hook)

    assert check(backward, setup)[-1] == "callback"


def test_a_backward_inside_a_hook() -> None:
    def setup(model: Any, log: Log) -> None:
        inner = torch.ones(3, requires_grad=True)

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                (inner * 2).sum().backward()
            doubled, inner.grad = inner.grad, None
            return gradient * (0 if doubled is None else doubled)

        model[2].bias.register_hook(hook)

    check(backward, setup)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    def step(model: Any, x: torch.Tensor, log: Log) -> None:
        model.zero_grad()
        x = x.requires_grad_()
        h = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        h = torch.utils.checkpoint.checkpoint(model[0], h @ torch.ones(3, 4), use_reentrant=reentrant)
        h.square().sum().backward()

    check(step, lambda model, log: None)


def test_threads() -> None:
    """Backwards in two threads, one of them captured, wait for each other."""
    models = [make_model() for _ in range(3)]
    inputs = [torch.randn(5, 4) for _ in range(8)]

    def train(model: Any, context: Callable[[], Any]) -> None:
        for x in inputs:
            with context():
                model(x).square().mean().backward()

    threads = [
        threading.Thread(target=train, args=(model, context))
        for model, context in zip(models, (retrograd.enable, contextlib.nullcontext, retrograd.enable), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models[1:]:
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in models[0].parameters()])


@pytest.mark.long
def test_one_thread_trains_while_another_compiles() -> None:
    """A trace runs a backward, and a captured backward is traced: neither waits for what the other holds."""
    x = torch.randn(5, 4)
    model = make_model()

    def train() -> None:
        for size in range(2, 8):
            with retrograd.enable():
                model(torch.randn(size, 4)).square().mean().backward()

    def compile_models() -> None:
        for size in range(2, 8):
            retrograd.compile_backward(nn.Linear(4, size), (x,))

    threads = [threading.Thread(target=target, daemon=True) for target in (train, compile_models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)


def test_as_a_decorator_and_nested_with_other_options() -> None:
    reference, model = make_model(), make_model()

    @retrograd.enable()
    def train(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        with retrograd.enable(hook_schedule="fewest-stages"):
            model(x).square().mean().backward()

    for _ in range(STEPS):
        x = torch.randn(5, 4)
        train(x)
        for _ in range(2):
            reference(x).square().mean().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_one_scope_serves_again_inside_itself_and_in_threads() -> None:
    scope, model = retrograd.enable(), make_model()
    expected = torch.autograd.grad(model(torch.ones(5, 4)).sum(), list(model.parameters()))
    found: list[tuple[torch.Tensor, ...]] = []

    def train() -> None:
        for _ in range(STEPS):
            with scope, scope:
                found.append(torch.autograd.grad(model(torch.ones(5, 4)).sum(), list(model.parameters())))

    before = len(retrograd.explain_recompiles())
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    train()
    for thread in threads:
        thread.join()
    assert len(found) == 3 * STEPS
    for gradients in found:
        torch.testing.assert_close(gradients, expected)
    compiled = len(retrograd.explain_recompiles())
    assert compiled > before
    # Out of its scope, a new structure is not compiled.
    model(torch.ones(5, 4)).sin().sum().backward()
    assert len(retrograd.explain_recompiles()) == compiled


@pytest.mark.long
def test_a_compiled_forward_with_graph_breaks() -> None:
    """AOTAutograd's backward graphs are part of one capture."""
    eager, ours = make_model(), make_model()

    def forward(model: Any, x: torch.Tensor) -> Any:
        h = torch.sin(model[0](x))
        torch._dynamo.graph_break()
        return model[2](torch.cos(h))

    compiled_forward = torch.compile(forward, backend="aot_eager")
    for _ in range(STEPS):
        x = torch.randn(5, 4)
        forward(eager, x).square().mean().backward()
        with retrograd.enable():
            compiled_forward(ours, x).square().mean().backward()
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])


@pytest.mark.long_cases("eager-order")
@pytest.mark.parametrize("schedule", ["eager-order", "asap", "overlap", "fewest-stages"])
def test_schedules(schedule: Any) -> None:
    eager, ours = make_model(), make_model()
    logs: tuple[Log, Log] = [], []
    for model, log in zip((eager, ours), logs, strict=True):
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, name=name, log=log: note(log, name, g * 2))
    for _ in range(STEPS):
        x = torch.randn(5, 4)
        backward(eager, x, [])
        with retrograd.enable(hook_schedule=schedule):
            backward(ours, x, [])
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
    assert sorted(logs[0]) == sorted(logs[1])


def test_unknown_options_are_refused() -> None:
    late: Any = "late"
    with pytest.raises(ValueError, match="'late' is not one of eager-order"), retrograd.enable(hook_schedule=late):
        pass
    with pytest.raises(retrograd.UnknownTarget), retrograd.enable(target="gpu"):
        pass


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
def test_bags_of_which_the_eager_forward_saves_no_places(mode: str, weighted: bool) -> None:
    torch.manual_seed(0)
    bags = nn.EmbeddingBag(12, 4, mode=mode)
    indices, starts = torch.randint(12, (10,)), torch.tensor([0, 4, 4, 7])
    weights = torch.rand(10, requires_grad=True) if weighted else None

    def step() -> list[torch.Tensor]:
        wanted = [bags.weight] if weights is None else [bags.weight, weights]
        return list(torch.autograd.grad(bags(indices, starts, weights).square().sum(), wanted))

    expected = step()
    with retrograd.enable(cache=False):
        found = [step() for _ in range(STEPS)]
    assert retrograd.explain_recompiles()[-1].outcome.startswith("compiled")
    for gradients in found:
        torch.testing.assert_close(gradients, expected)
