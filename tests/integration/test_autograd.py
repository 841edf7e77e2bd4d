# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What autograd may ask of a compiled model: once or twice, with any tangents, in any grad mode, or not at all."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import retrograd

Step = Callable[..., Tensor]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture(scope="module")
def compiled(model: nn.Module) -> retrograd.CompiledBackward:
    return retrograd.compile_backward(model, (argument(),), portable=True)


@pytest.fixture(scope="module", params=["compiled", "loaded"])
def step(
    request: pytest.FixtureRequest,
    model: nn.Module,
    compiled: retrograd.CompiledBackward,
    tmp_path_factory: pytest.TempPathFactory,
) -> retrograd.CompiledBackward:
    if request.param == "compiled":
        return compiled
    path = tmp_path_factory.mktemp("autograd") / "model.vmfb"
    compiled.save(path)
    return retrograd.load(path, model)


def argument(rows: int = 2) -> Tensor:
    return torch.randn(rows, 4, requires_grad=True)


def gradients(call: Step, x: Tensor, wanted: Sequence[Tensor], tangent: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(x), wanted, tangent)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "tangent",
    [
        torch.randn(3, 2).t(),
        torch.randn(1, 1).expand(2, 3),
        torch.randn(4, 6)[::2, ::2],
        torch.randn(7)[1:].view(2, 3),
        torch.zeros(2, 3),
    ],
    ids=["transposed", "expanded", "strided", "misaligned", "zero"],
)
def test_tangents_of_any_layout(step: Step, model: nn.Module, tangent: Tensor) -> None:
    x = argument()
    wanted = [x, *model.parameters()]
    assert_same(gradients(step, x, wanted, tangent), gradients(model, x, wanted, tangent))


def test_arguments_of_any_layout(step: Step, model: nn.Module) -> None:
    base, tangent = torch.randn(1, 4, requires_grad=True), torch.randn(2, 3)
    columns = torch.randn(4, 2, requires_grad=True)
    weight = next(model.parameters())
    for x, wanted in ((base.expand(2, 4), base), (columns.t(), columns), (weight[:2], weight)):
        assert_same(gradients(step, x, [wanted], tangent), gradients(model, x, [wanted], tangent))


def test_backward_twice(step: Step) -> None:
    x = argument()
    out = step(x).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


def test_two_steps_then_their_backwards(step: Step, model: nn.Module) -> None:
    x, y = argument(), argument()
    found = torch.autograd.grad(step(x).sin().sum() + step(y).cos().sum(), [x, y, *model.parameters()])
    expected = torch.autograd.grad(model(x).sin().sum() + model(y).cos().sum(), [x, y, *model.parameters()])
    assert_same(found, expected)


class Bank(nn.Module):
    """Computes with what it makes of a buffer."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("bank", torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) * self.bank.sigmoid()
        return made


def test_a_buffer_that_is_written_to_before_the_backward() -> None:
    bank = Bank()
    (expected,) = torch.autograd.grad(bank(argument()).sum(), bank.layer.bias)
    for partition in ("min-cut", "default"):
        step = retrograd.compile_backward(bank, (argument(),), partition=partition)
        loss = step(argument()).sum()
        bank.bank.mul_(1)
        if partition == "default":
            torch.testing.assert_close(torch.autograd.grad(loss, bank.layer.bias), (expected,))
        else:
            with pytest.raises(RuntimeError, match=r"Bank: .* modified by an inplace .*\n.*partition='default'"):
                loss.backward()


def test_gradients_of_gradients_are_refused(step: Step) -> None:
    x = argument()
    (gradient,) = torch.autograd.grad(step(x).pow(2).sum(), x, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match=r"gradients of gradients"):
        torch.autograd.grad(gradient.sum(), x, allow_unused=True)


class _Doubling(TorchFunctionMode):
    """Has linear functions give twice what they give, or another multiple."""

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.factor * found if func is nn.functional.linear else found


def test_a_file_is_for_no_mode(compiled: retrograd.CompiledBackward, model: nn.Module, tmp_path: Path) -> None:
    compiled.save(tmp_path / "model.vmfb")
    with _Doubling():
        loaded = retrograd.load(tmp_path / "model.vmfb", model)
        with pytest.raises(retrograd.ArgumentError, match=r"_Doubling is open, and no mode was"):
            loaded(argument())
        again = retrograd.compile_backward(model, (argument(),))
    with pytest.raises(retrograd.ArtifactError, match="compiled where _Doubling was open"):
        again.save(tmp_path / "doubling.vmfb")


def test_modes_are_those_of_the_compilation(step: Step, model: nn.Module) -> None:
    x = argument()
    with torch.device("cpu"):
        torch.testing.assert_close(step(x), model(x))
    with _Doubling():
        with pytest.raises(retrograd.ArgumentError, match=r"_Doubling is open, and no mode was.*compile again here"):
            step(x)
        again = retrograd.compile_backward(model, (argument(),))
        torch.testing.assert_close(again(x), model(x))
    with pytest.raises(retrograd.ArgumentError, match=r"no mode is open, and _Doubling was"):
        again(x)
    with _Doubling(3), pytest.raises(retrograd.ArgumentError, match="_Doubling is open with another factor"):
        again(x)
    with _Doubling():
        torch.testing.assert_close(again(x), model(x))
    with FlopCounterMode(display=False):
        with pytest.raises(retrograd.ArgumentError, match=r"FlopCounterMode is open.*call the model itself"):
            step(x)
        with pytest.raises(retrograd.CaptureError, match=r"FlopCounterMode is open(.|\n)*compile outside"):
            retrograd.compile_backward(model, (x,))


def test_a_mode_that_is_open_at_the_backward_alone_is_told() -> None:
    x = torch.rand(3, requires_grad=True)
    output = retrograd.compile_backward(torch.sin, (x,))(x)
    with FlopCounterMode(display=False), pytest.warns(UserWarning, match=r"FlopCounterMode is open at backward\(\)"):
        output.sum().backward()


def test_transforms_are_refused(step: Step) -> None:
    x = argument()
    for transform, given in ((torch.func.grad(lambda t: step(t).sum()), x), (torch.vmap(step), x.expand(2, 2, 4))):
        with pytest.raises(retrograd.ArgumentError, match=r"transform of torch.func.*transform the model itself"):
            transform(given.detach())
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(retrograd.ArgumentError, match="forward-mode"):
            step(dual)
        torch.testing.assert_close(step(x), step(x.detach()))
    # Its argument requires grad there, which is no reason to compile for that.
    with pytest.raises(retrograd.ArgumentError, match=r"transform of torch.func"):
        torch.func.jacrev(step)(x.detach())


def test_a_batch_of_gradients_at_once(step: Step, model: nn.Module) -> None:
    x, tangents = argument(), torch.randn(4, 2, 3)
    if step.specializations is None:  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="leave out is_grads_batched"):
            torch.autograd.grad(step(x), x, tangents, is_grads_batched=True)
        return
    wanted = [x, *model.parameters()]
    for _ in range(2):
        found = torch.autograd.grad(step(x), wanted, tangents, is_grads_batched=True)
        assert_same(found, torch.autograd.grad(model(x), wanted, tangents, is_grads_batched=True))
    found = torch.autograd.grad(step(x), wanted, tangents[:1], is_grads_batched=True)
    assert_same(found, torch.autograd.grad(model(x), wanted, tangents[:1], is_grads_batched=True))
    jacobian: Any = torch.autograd.functional.jacobian
    assert_same([jacobian(step, x, vectorize=True)], [jacobian(model, x)])
    assert_same(gradients(step, x, wanted, tangents[0]), gradients(model, x, wanted, tangents[0]))


def test_zeros_without_memory(step: Step, model: nn.Module) -> None:
    """PyTorch has tensors of zeros that lie nowhere."""
    zeros = torch._efficientzerotensor(2, 3)
    for _ in range(3):
        x = argument()
        assert_same(gradients(step, x, [x], zeros), [torch.zeros(2, 4)])
        assert_same([step(torch._efficientzerotensor(2, 4))], [model(torch.zeros(2, 4))])
    freed = torch.randn(2, 4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"the memory of argument \d was freed"):
        step(freed)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_grad_mode(
    step: Step, model: nn.Module, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    x = argument()
    with mode():
        out, expected = step(x), model(x)
    assert not out.requires_grad and out.is_inference() == expected.is_inference()
    assert_same([out], [expected])


def test_buffers_without_grad_mode() -> None:
    model = nn.BatchNorm1d(4)
    eager = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (argument(5),))
    for mode in (torch.no_grad, torch.inference_mode):
        x = argument(5)
        with mode():
            assert_same([step(x)], [eager(x)])
    assert_same(list(model.buffers()), list(eager.buffers()))


def test_what_was_saved_is_not_to_be_written_to(step: Step, model: nn.Module) -> None:
    x = argument()
    out = step(x).sum()
    with torch.no_grad():
        list(model.parameters())[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_gradients_have_memory_of_their_own() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    x, y, tangent = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), torch.ones(3)
    retrograd.compile_backward(add, (x, y))(x, y).backward(tangent)
    assert x.grad is not None and y.grad is not None
    x.grad.add_(1)
    assert torch.equal(y.grad, torch.ones(3)) and torch.equal(tangent, torch.ones(3))


def test_one_tensor_for_two_arguments() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sin()

    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    step = retrograd.compile_backward(product, (x, other))
    assert_same(torch.autograd.grad(step(x, x).sum(), x), torch.autograd.grad(product(x, x).sum(), x))


def test_threads_share_a_step(compiled: retrograd.CompiledBackward, model: nn.Module) -> None:
    wrong: list[Tensor] = []

    def work() -> None:
        for _ in range(50):
            x = argument()
            ours, theirs = (torch.autograd.grad(call(x).sum(), x)[0] for call in (compiled, model))
            if not torch.allclose(ours, theirs, atol=1e-5):
                wrong.append(x)

    run_in_threads([work] * 3)
    assert not wrong


def test_threads_compile_at_once() -> None:
    found: dict[int, Tensor] = {}

    def work(factor: int) -> None:
        x = torch.ones(3, requires_grad=True)
        found[factor] = torch.autograd.grad(retrograd.compile_backward(lambda t: t * factor, (x,))(x).sum(), x)[0]

    run_in_threads([partial(work, factor) for factor in (2, 3, 4)])
    assert {factor: gradient.tolist() for factor, gradient in found.items()} == {k: [k] * 3 for k in (2, 3, 4)}


def run_in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_copies_are_refused(compiled: retrograd.CompiledBackward, duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"neither copied nor pickled.*save\(\)"):
        duplicate(compiled)


def test_model_is_not_kept_by_anything_else() -> None:
    model = nn.Linear(3, 3)
    step = retrograd.compile_backward(model, (torch.randn(2, 3),))
    watched: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(step)]
    del model, step
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


class TwoTowers(nn.Module):
    """Of a pair it looks at the left, and gives the right back where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, left: Tensor, right: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(left).tanh(), extra


def test_what_a_step_does_not_read_is_no_part_of_its_backward() -> None:
    """Parameters and arguments that it leaves out have no gradient, and autograd does not visit them; what is handed
    through has one."""
    torch.manual_seed(3)
    model = TwoTowers()
    left, right, extra = argument(), argument(), argument()
    step = retrograd.compile_backward(model, (left, right, extra), cache=False)
    for call in (model, step, step, step):
        for tensor in (*model.parameters(), left, right, extra):
            tensor.grad = None
        found, given = call(left, right, extra)
        visited = [node.variable for node in _nodes(found.sum() + given.sum()) if hasattr(node, "variable")]
        (found.sum() + given.square().sum()).backward()
        names = {id(tensor) for tensor in visited}
        assert id(model.left.weight) in names and id(left) in names and id(extra) in names
        assert not names & {id(model.right.weight), id(model.right.bias), id(right)}
        assert model.right.weight.grad is None and right.grad is None
        gradient = [model.left.weight.grad, model.left.bias.grad, left.grad, extra.grad]
        if call is model:
            expected = gradient
        torch.testing.assert_close(gradient, expected)


class Remembers(nn.Module):
    """Writes to a buffer and to an argument whose values before it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.last: Tensor
        self.register_buffer("last", torch.zeros(2, 3))

    def forward(self, x: Tensor, log: Tensor) -> Tensor:
        y: Tensor = self.inner(x).tanh()
        with torch.no_grad():
            torch.add(y, 0, out=self.last)
            torch.mul(y, 2, out=log)
        return y


def test_what_is_written_and_not_read_is_written() -> None:
    torch.manual_seed(4)
    model, x, log = Remembers(), argument(), torch.zeros(2, 3)
    step = retrograd.compile_backward(model, (x, log), cache=False)
    for _ in range(3):
        with torch.no_grad():
            x.add_(1)
        expected = model.inner(x).tanh()
        step(x, log).sum().backward()
        torch.testing.assert_close(model.last, expected.detach())
        torch.testing.assert_close(log, 2 * expected.detach())


def _nodes(tensor: Tensor) -> list[Any]:
    """The nodes of a tensor's graph."""
    found: list[Any] = []
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found
