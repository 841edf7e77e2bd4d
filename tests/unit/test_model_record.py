# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What makes a model another one than was kept: each part of its key, and what no key describes."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd import situation
from retrograd.frontend.doors.recorded_graph import Doubt, describe_graph
from retrograd.frontend.traceable.portable_ops import portable_ops
from retrograd.frontend.verification.unwritten_memory import filled_memory
from retrograd.known_models import ModelInQuestion
from retrograd.options import Request

SCALE = 2.0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path))


class Model(nn.Module):
    """Two layers with what a model may read from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.25)
        self.factor = 1.5
        self.activation: Callable[[Tensor], Tensor] = torch.tanh
        self.part: Callable[[Tensor], Tensor] = lambda hidden: hidden

    def forward(self, x: Tensor, power: int = 2) -> Tensor:
        hidden = self.part(self.dropout(self.activation(self.first(x))) * self.factor * SCALE)
        loss: Tensor = self.second(hidden).pow(power).mean()
        return loss


def key_of(model: Callable[..., Any], *args: Any, **given: Any) -> str | None:
    """The key of a model called with these arguments, with options of its request; ``None`` where it has none."""
    question = ModelInQuestion.of(model, Request(**given), args, {})
    recorded = None if question is None else question._record()
    return None if question is None or recorded is None else question.store.key_of(question._place(recorded))


def _name_of(part: Any) -> str:
    """The same in each process that runs tests."""
    return str(getattr(part, "__name__", type(part).__name__))


def argument(**given: Any) -> Tensor:
    return torch.ones(5, 4, **given)


def test_same_model_has_the_same_key() -> None:
    first, second = key_of(Model(), argument()), key_of(Model(), argument())
    assert first is not None
    assert first == second


def freeze(model: Model) -> None:
    model.first.bias.requires_grad_(False)


def tie(model: Model) -> None:
    model.second.bias = nn.Parameter(torch.zeros(6))
    model.second.weight = nn.Parameter(torch.zeros(6, 6))
    model.first.bias = model.second.bias


def untie(model: Model) -> None:
    tie(model)
    model.first.bias = nn.Parameter(torch.zeros(6))


def set_factor(model: Model) -> None:
    model.factor = 1.25


def relu(model: Model) -> None:
    model.activation = torch.relu


def less_dropout(model: Model) -> None:
    model.dropout.p = 0.125


def transpose_weight(model: Model) -> None:
    model.first.weight = nn.Parameter(torch.zeros(4, 6).t())


def patch_forward(model: Model) -> None:
    model.second.forward = torch.sin  # type: ignore[method-assign]


def detach(model: Model) -> None:
    model.part = Tensor.detach


def turn_off_gradients(model: Model) -> None:
    def part(hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return hidden.clone()

    model.part = part


def mark(model: Model) -> None:
    model.part = lambda hidden: retrograd.save(hidden, "hidden")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: model.double().float().first.bfloat16(),
        lambda model: model.register_buffer("more", torch.zeros(1)),
        freeze,
        tie,
        set_factor,
        relu,
        less_dropout,
        transpose_weight,
        patch_forward,
        detach,
        turn_off_gradients,
        mark,
    ],
    ids=_name_of,
)
def test_changed_model_has_another_key(change: Callable[[Model], Any]) -> None:
    changed = Model()
    change(changed)
    assert key_of(changed, argument()) != key_of(Model(), argument())


def test_tied_parameters_are_told_from_equal_ones() -> None:
    tied, untied = Model(), Model()
    tie(tied)
    untie(untied)
    assert key_of(tied, argument()) != key_of(untied, argument())


def test_other_mark_has_another_key() -> None:
    marked, other = Model(), Model()
    mark(marked)
    other.part = lambda hidden: retrograd.save(hidden, "other")
    assert key_of(marked, argument()) != key_of(other, argument())


@pytest.mark.parametrize(
    "args",
    [
        (argument(requires_grad=True),),
        (torch.ones(6, 4),),
        (torch.ones(4, 5).t(),),
        (torch.ones(6, 4)[1:],),
        (argument() * argument(requires_grad=True),),
        (argument(), 3),
        (argument(), 2.0),
        (argument(), True),
    ],
    ids=_name_of,
)
def test_other_arguments_have_another_key(args: tuple[Any, ...]) -> None:
    assert key_of(Model(), *args) != key_of(Model(), argument())


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def convolutions() -> Iterator[None]:
    """As if set by an interface of PyTorch's after which, for the rest of the process, the older one raises."""
    set_by_itself, mixed = SimpleNamespace(fp32_precision="bf16"), RuntimeError("mix of the legacy and new APIs")
    with (
        mock.patch.object(torch.backends.mkldnn, "conv", set_by_itself),
        mock.patch.object(torch, "get_float32_matmul_precision", side_effect=mixed),
    ):
        yield


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        torch.inference_mode,
        torch.no_grad,
        deterministic,
        precision,
        convolutions,
        default_dtype,
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: torch._functorch.config.patch(functionalize_rng_ops=True),
    ],
)
def test_other_settings_of_pytorch_have_another_key(
    setting: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    model, x = Model(), argument()
    with setting():
        # What PyTorch is set back to need not be what it was before it was set at all.
        pass
    plain = key_of(model, x)
    with setting():
        assert key_of(model, x) != plain
    assert key_of(model, x) == plain


def test_two_formats_of_autocast_have_two_keys() -> None:
    keys = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(key_of(Model(), argument()))
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "default"},
        {"save_policy": retrograd.must_save(op="tanh")},
        {"fallback": "error"},
        {"kernels": "off"},
        {"verify": False},
        {"free_early": True},
        {"target": "cpu:x86-64-v3"},
    ],
    ids=_name_of,
)
def test_other_options_have_another_key(options: dict[str, Any]) -> None:
    assert key_of(Model(), argument(), **options) != key_of(Model(), argument())


def test_other_surroundings_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(Model(), argument())]
    with monkeypatch.context() as patch:
        patch.setenv("OMP_SCHEDULE", "static")
        keys.append(key_of(Model(), argument()))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.1")
        situation._releases.cache_clear()
        keys.append(key_of(Model(), argument()))
    situation._releases.cache_clear()
    for name, value in (("package_fingerprint", "other sources"), ("host_cpu", "another CPU")):
        with monkeypatch.context() as patch:
            patch.setattr(situation, name, lambda value=value: value)
            keys.append(key_of(Model(), argument()))
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    keys.append(key_of(Model(), argument()))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def _load(path: Path, source: str) -> ModuleType:
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("written_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


SOURCE = """
import torch

class Written(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return (y * x).sum()
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("(y * x).sum()", "(y + x).sum()"), ("(y * x).sum()", "(x * y).sum()"), ("(y * x).sum()", "(y * y).sum()")],
)
def test_other_code_has_another_key(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "written_model.py"
    first = key_of(_load(path, SOURCE).Written(), argument())
    assert first == key_of(_load(path, SOURCE).Written(), argument())
    assert first != key_of(_load(path, SOURCE.replace(old, new)).Written(), argument())


# -- What no key describes --------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Has a gradient in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def hook_values(hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


def pack(hidden: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return hidden.exp()


def catch(hidden: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        hook_values(hidden)
    return hidden


def sine(hidden: Tensor) -> tuple[Tensor, Any]:
    made = hidden.sin()
    return made, made.grad_fn


def hook_node(hidden: Tensor) -> Tensor:
    made, node = sine(hidden)
    node.register_hook(lambda inputs, _: tuple(None if g is None else g * 2 for g in inputs))
    return made


def hook_node_before(hidden: Tensor) -> Tensor:
    made, node = sine(hidden)
    node.next_functions[0][0].register_prehook(lambda outputs: (outputs[0] * 2,))
    return made


def hook_kept(hidden: Tensor) -> Tensor:
    made = hidden.exp()
    node: Any = made.grad_fn
    node._raw_saved_result.register_hooks(lambda kept: kept, lambda kept: kept * 2)
    return made.view_as(made)


def hook_unseen(hidden: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return hook_node(hidden)


def hook_unseen_nodes(hidden: Tensor) -> Tensor:
    made = hidden.sin()
    with torch._C.DisableTorchFunction():
        node: Any = made.grad_fn
        node.register_prehook(lambda outputs: (outputs[0] * 2,))
    return made


class DoubledInPlace(torch.autograd.Function):
    """Has a gradient in Python, which the write to a view hides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def write_to_view(hidden: Tensor) -> Tensor:
    made = hidden * 1
    write: Any = DoubledInPlace.apply
    write(made[0])
    return made


WRITE: Any = DoubledInPlace.apply


def write_to_view_by_name(hidden: Tensor) -> Tensor:
    made = hidden * 1
    WRITE(made[0])
    return made


def seed(hidden: Tensor) -> Tensor:
    torch.manual_seed(3)
    return hidden + torch.rand(6)


def own_op(hidden: Tensor) -> Tensor:
    @torch.library.custom_op("test_model_record::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    result: Tensor = twice(hidden)
    return result


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    """What TorchScript differentiates itself, from its third run on. It calls ops from C++, beside all modes."""
    return (x.sin() * x.cos()).tanh()


@pytest.mark.parametrize(
    "part",
    [
        Doubled.apply,
        hook_values,
        catch,
        hook_node,
        hook_node_before,
        hook_kept,
        hook_unseen,
        hook_unseen_nodes,
        write_to_view,
        write_to_view_by_name,
        seed,
        pack,
        own_op,
        scripted,
        lambda hidden: checkpoint(torch.sin, hidden, use_reentrant=False),
        lambda hidden: checkpoint(torch.sin, hidden, use_reentrant=True),
        lambda hidden: torch.vmap(torch.sin)(hidden),
        lambda hidden: hidden * torch.ones(6).add(1) if torch.compiler.is_compiling() else hidden,
        lambda hidden: hidden.neg() if bool((hidden > 0).all()) else hidden,
    ],
    ids=_name_of,
)
def test_what_a_record_does_not_show_has_no_key(part: Callable[[Tensor], Tensor]) -> None:
    model = Model()
    model.part = part
    assert key_of(model, argument()) is None


def test_a_graph_with_unknown_nodes_is_in_doubt() -> None:
    x = torch.ones(3, requires_grad=True)
    assert [*describe_graph([x.sin()], lambda _: "x")][2] == "SinBackward0"
    for _ in range(4):
        made = scripted(x)
    with pytest.raises(Doubt, match="shows nothing of itself"):
        [*describe_graph([made], lambda _: "x")]


def test_functions_of_other_threads_are_applied_while_a_model_is_recorded() -> None:
    model, found, double = Model(), [], cast(Any, Doubled).apply

    def part(hidden: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(double(torch.ones(2))))
        thread.start()
        thread.join()
        return hidden

    model.part = part
    assert key_of(model, argument()) is not None
    assert all(torch.equal(doubled, torch.full((2,), 2.0)) for doubled in found)
    assert found


def test_models_that_keep_tensors_have_no_key() -> None:
    model = Model()
    kept: dict[str, Tensor] = {}

    def keep(hidden: Tensor) -> Tensor:
        kept["hidden"] = hidden
        return hidden

    model.part = keep
    assert key_of(model, argument()) is None
    assert not kept


def test_tensors_that_are_no_state_have_no_key() -> None:
    model, constant = Model(), torch.ones(6)
    model.part = lambda hidden: hidden * constant
    assert key_of(model, argument()) is None


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooked_modules_have_no_key(register: str) -> None:
    model = Model()
    getattr(model.first, register)(lambda *_: None)
    assert key_of(model, argument()) is None


def test_subclasses_and_modes_have_no_key() -> None:
    class Named(Tensor):
        pass

    assert key_of(Model(), argument().as_subclass(Named)) is None
    with torch.device("cpu"):
        assert key_of(Model(), argument()) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert key_of(Model(), argument()) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert key_of(Model(), argument()) is None
    finally:
        handle.remove()
    assert key_of(Model(), argument()) is not None


def test_a_record_leaves_the_model_as_it_is() -> None:
    model = Model()
    model.bn = nn.BatchNorm1d(6)
    model.part = model.bn
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {*vars(model)}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert key_of(model, argument()) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert {*vars(model)} == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def chosen(x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.where(x > y, x, y), torch.where(x < y, x, y)]


def chosen_by_views(x: Tensor, y: Tensor) -> list[Tensor]:
    larger, smaller = (x > y).view(-1), (x < y).view(-1)
    return [torch.where(larger, x, y), torch.where(smaller, x, y)]


@pytest.mark.parametrize("alike", [chosen, chosen_by_views])
def test_which_is_given_of_what_is_computed_alike(alike: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
    """Both have the same ops, and behind them the same graph of gradients."""
    x, y = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    keys = {key_of(lambda x, y, number=number: alike(x, y)[number], x, y) for number in (0, 1)}
    assert None not in keys and len(keys) == 2


@pytest.mark.parametrize(
    "make", [lambda m: m.view(-1), lambda m: m.T, lambda m: m[:], lambda m: m.unbind()[0], Tensor.float]
)
def test_which_is_read_of_what_is_computed_alike(make: Callable[[Tensor], Tensor]) -> None:
    x, y = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)

    def model(x: Tensor, y: Tensor, number: int = 0) -> Tensor:
        made = [
            make((x > y)[None].expand(4, 4)[:, :1].contiguous()),
            make((x < y)[None].expand(4, 4)[:, :1].contiguous()),
        ]
        return x * made[number].float().sum() + y

    keys = {key_of(lambda x, y, number=number: model(x, y, number), x, y) for number in (0, 1)}
    assert None not in keys and len(keys) == 2


def test_settings_of_another_thread_are_in_no_key() -> None:
    """What compares with eager in the background, or traces, sets what all threads share, for as long as that takes."""
    model, x = Model(), torch.ones(2, 4)
    expected = key_of(model, x)
    for changed in (filled_memory, portable_ops):
        is_open, is_over = threading.Event(), threading.Event()

        def change(changed: Any = changed, is_open: threading.Event = is_open, over: threading.Event = is_over) -> None:
            with changed():
                is_open.set()
                over.wait()

        thread = threading.Thread(target=change)
        thread.start()
        is_open.wait()
        # Long enough to read the settings without the lock; with it, what reads them waits until then.
        closing = threading.Timer(0.5, is_over.set)
        closing.start()
        assert key_of(model, x) == expected
        thread.join()


def test_threads_that_fill_memory_leave_the_settings_as_they_were() -> None:
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def fill_first() -> None:
        with filled_memory():
            first_is_in.set()
            second_is_in.wait(0.5)
        first_is_out.set()

    def fill_second() -> None:
        with filled_memory():
            second_is_in.set()
            first_is_out.wait()

    first, second = threading.Thread(target=fill_first), threading.Thread(target=fill_second)
    first.start()
    first_is_in.wait()
    second.start()
    first.join()
    second.join()
    try:
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
