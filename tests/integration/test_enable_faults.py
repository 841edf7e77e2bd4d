# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Faults that ``retrograd.enable()`` had, each under its name, beside eager: four steps, what they log and leave."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.compiled_autograd import AutogradCompilerInstance, Op
from torch._guards import CompileContext
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

import retrograd

Log = list[Any]
Step = Callable[[], Any]
# Cases of which a step raises, or logs text.
RAISES = {"too_few_gradients", "second_backward_through_a_graph"}
CASES: dict[str, Callable[[Log], Step]] = {}


def case(function: Callable[[Log], Step]) -> Callable[[Log], Step]:
    """A case makes a step, which logs what is to be as in eager."""
    CASES[function.__name__] = function
    return function


def leaf(*sizes: int) -> Any:
    return torch.randn(*sizes, requires_grad=True)


def values(tensors: Any) -> list[Any]:
    return [None if t is None else t.detach().to_dense().clone() for t in tensors]


def scale_by(factor: float) -> Callable[[torch.Tensor], None]:
    """A post-accumulate hook that writes to the gradient."""

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(factor)

    return hook


@case
def post_hook_sees_what_a_post_accumulate_hook_wrote(log: Log) -> Step:
    w, v = leaf(3), leaf(3)
    w.register_post_accumulate_grad_hook(scale_by(-0.5))
    node = get_gradient_edge(w).node
    node.register_hook(lambda inputs, outputs: log.append(values(outputs)))

    def step(node: Any = node) -> None:
        w.grad = v.grad = None
        # Where another node takes the same gradient, eager copies it, and the hook does not see what is written.
        (w * v).sum().backward()
        (w + v).sin().sum().backward()
        (w + v).sin().sum().backward()
        log.append(values([w.grad, v.grad]))

    return step


@case
def post_hook_of_a_gradient_that_has_another_use(log: Log) -> Step:
    w = leaf(3)
    kept: list[torch.Tensor] = []
    w.register_hook(kept.append)
    w.register_post_accumulate_grad_hook(scale_by(3))
    node = get_gradient_edge(w).node
    node.register_hook(lambda inputs, outputs: log.append(values(outputs)))

    def step(node: Any = node) -> None:
        w.grad = None
        w.exp().sum().backward()
        log.append(values([w.grad, kept.pop()]))

    return step


@case
def gradient_is_handed_over(log: Log) -> Step:
    w, v = leaf(3), leaf(3, 3)
    w.register_hook(lambda g: g * 2)
    addresses: list[int] = []
    v.register_hook(lambda g: addresses.append(g.data_ptr()))

    def step() -> None:
        w.grad = v.grad = None
        (w @ v).cos().sum().backward()
        assert v.grad is not None
        log.append((values([w.grad, v.grad]), v.grad.data_ptr() == addresses.pop()))

    return step


@case
def two_parameters_of_one_gradient(log: Log) -> Step:
    a, b = leaf(3), leaf(3)
    for tensor in (a, b):
        tensor.register_hook(lambda g: None)

    def step() -> None:
        a.grad = b.grad = None
        (a + b).sin().sum().backward()
        assert a.grad is not None and b.grad is not None
        log.append((values([a.grad, b.grad]), a.grad.data_ptr() == b.grad.data_ptr()))
        a.grad.zero_()
        log.append(values([b.grad]))

    return step


class Gate(torch.autograd.Function):
    """Gives no gradient to its first argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


class Pair(torch.autograd.Function):
    """Gives two results; absent gradients are zeros to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + 2 * second


class PairOrNone(torch.autograd.Function):
    """Gives two results; absent gradients are None to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        return second if first is None else first


class OnlyVjp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def vjp(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class KeepsContext(torch.autograd.Function):
    """Leaves its context, which keeps nothing of what it saved alive."""

    left: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        KeepsContext.left.append(ctx)
        result: torch.Tensor = gradient * ctx.saved_tensors[0]
        return result


class Both(OnlyVjp):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Boxed(torch.autograd.Function):
    """Takes its gradients in one list, to let each go when it has used it."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 3, x * 5

    @staticmethod
    def backward(ctx: Any, gradients: list[torch.Tensor]) -> torch.Tensor:
        return gradients.pop() * 5 + gradients.pop() * 3


class TooFew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def step_of(log: Log, *losses: Callable[[Any, Any], torch.Tensor]) -> Step:
    """Logs the gradients of each loss of two matrices."""
    w, v = leaf(2, 3), leaf(2, 3)

    def step() -> None:
        for loss in losses:
            w.grad = v.grad = None
            loss(w, v).backward()
            log.append(values([w.grad, v.grad]))

    return step


def embedded(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor([0, 1]), weight, sparse=True).sum()


@case
def no_gradient_where_another_use_gives_one(log: Log) -> Step:
    gate: Any = Gate.apply
    return step_of(
        log,
        lambda w, v: (gate(w.sin(), v) + w.sin()).sum(),
        lambda w, v: (gate(s := w.sin(), v) + s * 2).sum(),
        lambda w, v: ((s := w.sin()) * 2 + gate(s, v)).sum(),
        lambda w, v: gate(w.sin() * v, v).sum(),
    )


@case
def gradients_that_eager_materializes(log: Log) -> Step:
    gate: Any = Gate.apply
    pair: Any = Pair.apply
    pair_or_none: Any = PairOrNone.apply

    def loss(function: Any, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first, second = function(w.sin())
        result: torch.Tensor = (gate(first.cos(), v) + second).sum()
        return result

    return step_of(log, lambda w, v: loss(pair, w, v), lambda w, v: loss(pair_or_none, w, v))


@case
def no_gradient_into_a_view_that_was_written(log: Log) -> Step:
    gate: Any = Gate.apply

    def loss(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        base = w * 1
        base[0] = v[1]
        result: torch.Tensor = gate(base, v).sum()
        return result

    return step_of(log, loss)


@case
def vjp_in_place_of_backward(log: Log) -> Step:
    function: Any = OnlyVjp.apply
    return step_of(log, lambda w, v: (function(w.sin()) * v).sum())


def test_backward_and_vjp_are_refused_in_eagers_words() -> None:
    function: Any = Both.apply
    for scope in (contextlib.nullcontext(), retrograd.enable()):
        with scope, pytest.raises(RuntimeError, match="Implementing both 'backward' and 'vjp' for a custom Function"):
            function(leaf(3)).sum().backward()


@case
def gradients_in_one_list(log: Log) -> Step:
    if not hasattr(torch.autograd.Function, "boxed_grads_call"):
        pytest.skip("this PyTorch hands gradients over one by one")

    def loss(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first, second = Boxed.apply(w.sin())  # type: ignore[no-untyped-call]
        total: torch.Tensor = (first * v + second * 2).sum()
        return total

    return step_of(log, loss)


@case
def too_few_gradients(log: Log) -> Step:
    function: Any = TooFew.apply
    return step_of(log, lambda w, v: function(w.sin(), v).sum())


@case
def weight_that_is_embedded_sparsely_too(log: Log) -> Step:
    return step_of(
        log,
        lambda w, v: embedded(w) + (w * v).sum(),
        lambda w, v: (w * v).sum() + embedded(w),
        lambda w, v: embedded(u := w * 1) + (u * v).sum(),
        lambda w, v: ((u := w * 1) * v).sum() + embedded(u),
    )


class Reentrant(torch.autograd.Function):
    """A backward inside of which are as many more as ``depth`` says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            result: Any = Reentrant.apply(inner, ctx.depth - 1) if ctx.depth else inner.sin()  # type: ignore[no-untyped-call]
        result.backward(gradient)
        assert inner.grad is not None
        return inner.grad, None


@case
def seventy_backwards_inside_of_one(log: Log) -> Step:
    function: Any = Reentrant.apply
    return step_of(log, lambda w, v: (function(w * v, 70) * v).sum())


class SaysWhatItIs(torch.autograd.Function):
    """Asks what its context is, and leaves a number on it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.is_node = isinstance(ctx, Node)
        return gradient * 2


@case
def context_is_a_node_and_keeps_what_it_is_given(log: Log) -> Step:
    w = leaf(3)
    function: Any = SaysWhatItIs.apply

    def step() -> None:
        w.grad = None
        result = function(w.exp())
        result.sum().backward()
        log.append((values([w.grad]), result.grad_fn.is_node))

    return step


@case
def kept_context_of_a_graph_that_was_freed(log: Log) -> Step:
    w = leaf(3)
    function: Any = KeepsContext.apply

    def step() -> None:
        w.grad = None
        (function(w * 2) * w).sum().backward()
        log.append(values([w.grad]))
        with pytest.raises(RuntimeError) as error:
            KeepsContext.left.pop().saved_tensors  # noqa: B018 (asked for, to raise)
        log.append(type(error.value).__name__ == "RuntimeError")

    return step


@case
def gradients_in_a_batch(log: Log) -> Step:
    w = leaf(3)

    def step() -> None:
        loss = w.sin() * w
        for batch in (torch.eye(3), None, torch.ones(2, 3)):
            if batch is None:
                log.append(values(torch.autograd.grad(loss, w, torch.ones(3), retain_graph=True)))
            else:
                log.append(values(torch.autograd.grad(loss, w, batch, retain_graph=True, is_grads_batched=True)))

    return step


@case
def graph_goes_with_its_last_reference(log: Log) -> Step:
    """A hook refers to a node that has it; there is no collection between the backward and the last reference."""
    w = leaf(3)

    def step() -> None:
        def make() -> tuple[torch.Tensor, Any]:
            middle = w.exp()
            node, kept = middle.grad_fn, torch.nn.Module()
            held = [node, kept]
            middle.register_hook(lambda g: g * len(held))
            return (middle * 2).sum(), weakref.ref(kept)

        gc.collect()
        gc.disable()
        try:
            loss, kept = make()
            loss.backward()
            del loss
            gc.collect()
            log.append(kept() is None)
        finally:
            gc.enable()

    return step


@case
def second_backward_through_a_graph(log: Log) -> Step:
    w = leaf(3)

    def step() -> None:
        w.grad = None
        loss = w.sin().sum()
        loss.backward()
        log.append(values([w.grad]))
        loss.backward()

    return step


@case
def optimizer_in_the_backward_writes_to_what_was_saved(log: Log) -> Step:
    m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    for p in m.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def update(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)

    def step() -> None:
        m(torch.ones(2, 3)).square().sum().backward()
        log.append(values(m.parameters()))

    return step


class AsksTwice(torch.autograd.Function):
    """Asks for what it saved twice, and not at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Log) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.log = log
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.log.append(1)
        (x,) = ctx.saved_tensors
        ctx.log.append(2)
        (again,) = ctx.saved_tensors
        return gradient * x.cos() * (again / x), None


@case
def saved_tensors_are_unpacked_when_asked_for(log: Log) -> Step:
    w = leaf(3)
    function: Any = AsksTwice.apply

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        log.append(3)
        return packed * 0.5

    def step() -> None:
        w.grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, unpack):
            loss = (function(w.exp(), log) * w).sum()
        loss.backward()
        log.append(values([w.grad]))

    return step


@case
def unpack_hook_that_asks_for_its_node(log: Log) -> Step:
    """As those do that bring activations back from another device: what they register runs after the node."""
    w = leaf(3)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        node = torch._C._current_autograd_node()
        node.register_hook(lambda inputs, outputs: log.append(("after", node.name())))
        return packed

    def step() -> None:
        # Between them one of like roots, which is compiled: the graph of neither may be freed too early.
        for hooks in ((lambda x: x, unpack), None, (lambda x: x, unpack)):
            w.grad = None
            with torch.autograd.graph.saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
                loss = (w.exp() * w).sin().sum()
            loss.backward()
            log.append(values([w.grad]))

    return step


@case
def sparse_matrix_that_gets_a_dense_gradient(log: Log) -> Step:
    w: Any = torch.eye(3).to_sparse().requires_grad_()
    v = leaf(3, 3)

    def step() -> None:
        w.grad = v.grad = None
        for left in (w, v, w):
            torch.mm(left, v).sin().sum().backward()
            log.append(values([w.grad, v.grad]))
        log.append(w.grad.layout)

    return step


@case
def leaves_that_have_no_views_are_asked_for(log: Log) -> Step:
    """Sparse and jagged ones: PyTorch's own way to their nodes is by a view."""
    v = leaf(3, 3)
    matrices: list[Any] = [torch.eye(3).to_sparse().requires_grad_(), torch.eye(3).to_sparse_csr().requires_grad_()]
    rows: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).requires_grad_()

    def step() -> None:
        for matrix in matrices:
            found = torch.autograd.grad(torch.mm(matrix, v).sin().sum(), [matrix, v])
            log.append((values(found), found[0].layout))
        (found_rows,) = torch.autograd.grad(rows.sin().values().sum(), [rows])
        log.append(values([found_rows.values()]))

    return step


class Mixed(torch.autograd.Function):
    """Results that are tensors and others, and what gradients it gets of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Log) -> Any:
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        ctx.log = log
        return x * 2, "text", order, None, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        ctx.log.append(values(gradients))
        return gradients[0] * 2 + gradients[4] * 3, None


@case
def results_that_are_no_tensors_get_none(log: Log) -> Step:
    """And one that is not differentiable, or has no gradient, zeros of its own size and type."""
    function: Any = Mixed.apply
    gate: Any = Gate.apply

    def loss(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first, _, _, _, last = function(w * v, log)
        # The last gets None from another function.
        total: torch.Tensor = (first * v).sum() + gate(last, v).sum()
        return total

    return step_of(log, lambda w, v: (function(w * v, log)[0] * v).sum(), loss)


@case
def hooks_find_the_engines_threads_as_they_were(log: Log) -> Step:
    w = leaf(3)
    w.register_hook(lambda g: log.append(torch._C._is_multithreading_enabled()))

    def step() -> None:
        for enabled in (True, False):
            with torch.autograd.set_multithreading_enabled(enabled):
                w.sin().sum().backward()

    return step


@case
def root_without_a_shape(log: Log) -> Step:
    w = leaf(2, 3)

    def step() -> None:
        rows: Any = torch.nested.as_nested_tensor([w[0], w[1, :2]])
        rows.backward(torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]))
        log.append(values([w.grad]))

    return step


class Queues(torch.autograd.Function):
    """Queues a callback on the engine in its backward, and gives no gradient where it is asked to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Log, gives: bool) -> torch.Tensor:
        ctx.log, ctx.gives = log, gives
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        queue(ctx.log)
        return gradient * 2 if ctx.gives else None, None, None


def queue(log: Log) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: log.append(0))


@case
def callbacks_from_wherever_they_are_queued(log: Log) -> Step:
    """Also where nothing is accumulated, nothing is computed, and no gradient is left."""
    w = leaf(3)
    function: Any = Queues.apply

    def step() -> None:
        w.grad = None
        function(w, log, True).sum().backward()
        function(w * 3, log, False).sum().backward()
        log.append(values(torch.autograd.grad(function(w.sin(), log, True).sum(), w)))
        handles = [
            w.register_hook(lambda gradient: queue(log)),
            w.register_post_accumulate_grad_hook(lambda parameter: queue(log)),
        ]
        w.backward(torch.ones(3))
        (w * w).sum().backward(inputs=[w])
        for handle in handles:
            handle.remove()
        empty = leaf(0, 3)
        function(empty, log, True).sum().backward()
        log.append(values([w.grad, empty.grad]))

    return step


class GivesSparse(torch.autograd.Function):
    """Gives a sparse gradient, and says where its values are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, left: list[int]) -> torch.Tensor:
        ctx.left = left
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows, parts = torch.tensor([[0, 2]]), gradient.expand(2, 3).clone()
        ctx.left.append(parts.data_ptr())
        return torch.sparse_coo_tensor(rows, parts, (4, 3)), None


@case
def sparse_gradient_is_handed_over(log: Log) -> Step:
    w, addresses = leaf(4, 3), list[int]()
    function: Any = GivesSparse.apply

    def step() -> None:
        w.grad = None
        function(w, addresses).sin().backward()
        assert w.grad is not None
        log.append((values([w.grad]), w.grad._values().data_ptr() == addresses.pop()))

    return step


class MarksOutputs(torch.autograd.Function):
    """Has a result that is not differentiable, and asks for None as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: Log) -> tuple[torch.Tensor, torch.Tensor]:
        ctx._materialize_non_diff_grads = False
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        ctx.log = log
        return x * 2, order

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_order: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        ctx.log.append(of_order is None)
        return gradient * 2, None


@case
def no_gradient_of_a_result_that_is_not_differentiable(log: Log) -> Step:
    function: Any = MarksOutputs.apply

    def loss(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        doubled, _ = function(w * v, log)
        total: torch.Tensor = (doubled * v).sum()
        return total

    return step_of(log, loss)


@case
def products_of_groups_in_bf16(log: Log) -> Step:
    """A mixture of experts' rows: the product takes bfloat16 alone, which float64 is not to reach."""
    w: Any = torch.randn(2, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    v, ends = torch.randn(6, 8), torch.tensor([2, 6], dtype=torch.int32)

    def step() -> None:
        w.grad = None
        rows: Any = v.clone().requires_grad_()
        torch._grouped_mm(rows.to(torch.bfloat16), w, offs=ends).float().square().sum().backward()
        # To the precision of the type.
        log.append(values([(rows.grad / 64).round(), (w.grad.float() / 64).round()]))

    return step


@case
def unused_random_op_under_a_compiled_forward(log: Log) -> Step:
    w = leaf(3)

    def block(x: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.dropout(x, 0.5)
        torch.rand(3)
        return x.sin() * torch.rand_like(x)

    torch._dynamo.reset()
    forward = torch.compile(
        lambda x: torch.utils.checkpoint.checkpoint(block, x * x, use_reentrant=False), backend="aot_eager"
    )

    def step() -> None:
        w.grad = None
        torch.manual_seed(1)
        forward(w).sum().backward()
        log.append(values([w.grad, torch.rand(1)]))

    return step


@case
def parameters_are_swapped_between_steps(log: Log) -> Step:
    """PyTorch refuses to swap tensors that anything refers to weakly."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def step() -> None:
        model.zero_grad()
        model(torch.linspace(-1, 1, 6).view(2, 3)).square().sum().backward()
        log.append(values([parameter.grad for parameter in model.parameters()]))
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 1.5))

    return step


def record(make: Callable[[Log], Step], enabled: bool, **options: Any) -> Log:
    """What four steps log, errors among it."""
    torch.manual_seed(0)
    log: Log = []
    step = make(log)
    for _ in range(4):
        try:
            if enabled:
                with retrograd.enable(**options):
                    step()
            else:
                step()
        except Exception as error:  # noqa: BLE001 (to be the same in eager)
            log.append(f"{type(error).__name__}: {error}")
    return log


def assert_alike(found: Any, expected: Any) -> None:
    """Tensors but for rounding, all else as it is."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), (found, expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_alike(mine, theirs)
    else:
        assert found == expected


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    expected = record(CASES[name], enabled=False)
    assert expected and (name in RAISES or not any(isinstance(entry, str) for entry in expected)), expected
    found = record(CASES[name], enabled=True)
    assert_alike(found, expected)


@pytest.mark.parametrize("schedule", ["asap", "overlap", "fewest-stages"])
def test_callbacks_are_called_under_any_schedule(schedule: Any) -> None:
    make = CASES["callbacks_from_wherever_they_are_queued"]
    found = record(make, enabled=True, hook_schedule=schedule)
    assert_alike(found, record(make, enabled=False))


def test_two_backwards_are_alike_to_the_last_bit() -> None:
    """From the first on, as ``gradcheck`` asks of them, where Python has no part in them."""
    torch.manual_seed(0)
    a, b = (torch.rand(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a.exp() @ b.t()).softmax(-1).log() * (a @ a.t()).tanh()).cumsum(0)

    before = len(retrograd.explain_recompiles())
    with retrograd.enable():
        assert torch.autograd.gradcheck(compute, (a, b), nondet_tol=0.0, check_batched_grad=False)
    assert any(entry.outcome == "compiled" for entry in retrograd.explain_recompiles()[before:])


def test_what_fails_while_recording_the_engine_finishes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("no such kernel")

    w, calls = leaf(3), list[str]()
    w.register_hook(lambda g: calls.append("hook"))
    x = w.exp()
    x.register_hook(lambda g: calls.append("hook of x"))
    monkeypatch.setattr(fail, "__name__", "AsinhBackward0")
    before = len(retrograd.explain_recompiles())
    for _ in range(3):
        loss = (x.asinh() * x).sum()
        monkeypatch.setattr(Op, "__call__", lambda op, *args: (fail if "Asinh" in op.__name__ else op.fn)(*args))
        w.grad = None
        calls.clear()
        with retrograd.enable():
            loss.backward(retain_graph=True)
        exact = (x.asinh() + x / (x * x + 1).sqrt()) * x
        torch.testing.assert_close(w.grad, exact.detach())
        assert calls == ["hook of x", "hook"]
    (entry,) = retrograd.explain_recompiles()[before:]
    assert "AsinhBackward0, as PyTorch captured it, raised NotImplementedError: no such kernel" in str(entry)


def test_what_fails_after_like_roots_ran_compiled_the_engine_finishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is known of a sum's backward does not hold for that of another sum."""

    def fail(*_: Any) -> None:
        raise NotImplementedError("no such kernel")

    w = leaf(3)
    for _ in range(3):
        w.grad = None
        with retrograd.enable():
            (w.exp() * w).sum().backward()
    monkeypatch.setattr(fail, "__name__", "AsinhBackward0")
    monkeypatch.setattr(Op, "__call__", lambda op, *args: (fail if "Asinh" in op.__name__ else op.fn)(*args))
    for _ in range(2):
        w.grad = None
        with retrograd.enable():
            (w.asinh() * 2).sum().backward()
        torch.testing.assert_close(w.grad, 2 / (w.detach() ** 2 + 1).sqrt())


def test_a_cause_that_is_there_whatever_the_sizes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """And what torch itself has to say of a trace that fails, not at all."""
    w = leaf(7, 3)
    before = len(retrograd.explain_recompiles())
    for rows in (2, 3, 5):
        w.grad = None
        with retrograd.enable():
            h = torch.nn.functional.embedding(torch.arange(rows), w, sparse=True).sin()
            (h @ w.t()).square().sum().backward()
    (entry,) = retrograd.explain_recompiles()[before:]
    assert entry.outcome == "runs eagerly" and "sparse" in str(entry)
    layer = nn.Linear(3, 3)
    for power in (2, 3):
        with retrograd.enable():
            torch.nn.functional.leaky_relu(layer(torch.ones(2, 3)), power / 10).pow(power).sum().backward()
    assert not [record for record in caplog.records if record.name == "torch._subclasses.fake_tensor"]


def test_flops_are_counted_under_enable() -> None:
    m = torch.nn.Linear(8, 4)

    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            m(torch.randn(2, 8)).sin().sum().backward()
        return int(counter.get_total_flops())

    expected = count()
    with retrograd.enable():
        for _ in range(2):
            m(torch.randn(2, 8)).sin().sum().backward()
        assert count() == expected
    assert any("FlopCounterMode is open" in str(entry) for entry in retrograd.explain_recompiles())


def test_gradients_that_are_rounding_noise_are_no_alarm() -> None:
    """The bias in front of a batch norm has no gradient but for rounding."""
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Hardswish(), torch.nn.Linear(8, 2))
    x = torch.randn(64, 6) * 100
    before = len(retrograd.explain_recompiles())
    for _ in range(2):
        m.zero_grad()
        with retrograd.enable():
            (m(x).square().sum() * 1e5).backward()
    (entry,) = retrograd.explain_recompiles()[before:]
    assert entry.outcome == "compiled", str(entry)
    layer: Any = m[0]
    noise = layer.bias.grad
    assert noise is not None and noise.norm() > 1e-5


def test_noise_from_means_over_pixels_is_no_alarm() -> None:
    """A gradient that is one for all pixels, which pooling gives, is added up by a batch norm: rounded the same way
    each time, it leaves the bias before it 65 times eager's noise if terms are added one by one."""
    torch.manual_seed(0)
    m = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.SiLU(),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.BatchNorm2d(8),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 4),
    )
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    before = len(retrograd.explain_recompiles())
    eager = []
    for enabled in (False, True, True):
        m.zero_grad()
        with retrograd.enable() if enabled else contextlib.nullcontext():
            m(x).square().sum().backward()
        found = [p.grad.clone() for p in m.parameters() if p.grad is not None]
        if not enabled:
            eager = found
    for mine, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    (entry,) = retrograd.explain_recompiles()[before:]
    assert entry.outcome == "compiled", str(entry)


@pytest.mark.parametrize(
    ("layer", "sizes", "times"),
    [
        (nn.Conv2d(3, 8, 3), (16, 3, 32, 32), 3),
        # 1024 terms are added up in two levels, fewer one after the other.
        (nn.Linear(16, 32), (1024, 16), 20),
        (nn.Linear(16, 32), (1000, 16), 20),
    ],
)
def test_sums_of_many_terms_are_near_those_of_float64(layer: nn.Module, sizes: tuple[int, ...], times: float) -> None:
    """By so many times eager's own distance from it, of the filters or weights and of the bias."""
    torch.manual_seed(0)
    x, exact = torch.randn(sizes) + 1, copy.deepcopy(layer).double()

    def step(model: nn.Module, given: torch.Tensor) -> list[torch.Tensor]:
        return [*torch.autograd.grad(model(given).square().sum(), list(model.parameters()))]

    wanted, eager = step(exact, x.double()), step(layer, x)
    with retrograd.enable():
        step(layer, x)
        found = step(layer, x)
    for mine, theirs, right in zip(found, eager, wanted, strict=True):
        off, own = ((given.double() - right).norm() / right.norm() for given in (mine, theirs))
        assert off <= max(times * own, 2e-7)


@pytest.mark.long
def test_tensors_that_are_not_contiguous_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed weights, and the parts of a projection that attention is given."""
    torch.manual_seed(0)
    project, back = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
    parameters = [*project.parameters(), *back.parameters()]

    def step(x: torch.Tensor) -> list[torch.Tensor | None]:
        for parameter in parameters:
            parameter.grad = None
        q, k, v = project(x).view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        back((weights @ v).transpose(1, 2).reshape(2, 8, 16)).sin().sum().backward()
        return values([parameter.grad for parameter in parameters])

    inputs = [torch.randn(2, 8, 16), torch.randn(2, 8, 16), torch.randn(2, 16, 8).transpose(1, 2)]
    expected = [step(x) for x in inputs]
    copied: list[tuple[int, ...]] = []
    clone = torch.Tensor.clone

    def count(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        copied.append(tuple(tensor.shape))
        return clone(tensor, **options)

    with retrograd.enable():
        assert_alike([step(x) for x in inputs], expected)
        monkeypatch.setattr(torch.Tensor, "clone", count)
        step(inputs[0])
        monkeypatch.undo()
    # Those of `values` alone.
    assert len(copied) == len(parameters)


def test_a_capture_that_pytorch_gives_up_leaves_no_context_of_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left when the garbage collector finds it, the context that a later compilation is in would be gone."""

    def refuse(*_arguments: Any) -> Any:
        raise AssertionError("this tensor cannot be faked")

    monkeypatch.setattr(AutogradCompilerInstance, "wrap_fake", refuse)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with retrograd.enable():
        model(x).sum().backward()
    assert CompileContext.try_get() is None
    assert "PyTorch cannot capture it" in retrograd.explain_recompiles()[-1].reasons[0]
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(2, 3))


def test_a_step_whose_gradients_overflow_is_not_what_a_backward_is_compared_with() -> None:
    """As those of the first steps under a ``GradScaler`` do; whether a sum in float16 just does hangs on rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).half()
    before = len(retrograd.explain_recompiles())
    for number, scale in enumerate((65504.0, 65504.0, 1.0, 1.0)):
        x = (torch.randn(8, 16) * (100 if number < 2 else 1)).half()
        with retrograd.enable():
            (model(x).square().mean() * torch.tensor(scale).half()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        (model(x).square().mean() * torch.tensor(scale).half()).backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        assert all(bool(e.isfinite().all()) for e in expected) == (number >= 2)
        for gradient, e in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, e, rtol=2e-2, atol=1e-3, equal_nan=True)
    waits, compiled = retrograd.explain_recompiles()[before:]
    assert (waits.outcome, compiled.outcome) == ("is compared at its next step", "compiled")
    assert "infinite" in waits.reasons[0]
