# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One program for many sizes: gradients are eager's at all of them, and sizes it was not compiled for are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

import retrograd
from retrograd import saved_dtype
from retrograd.contract.sizes import holds
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.size_one import admit_ones
from retrograd.pipelines.infra.diagnostics import PipelineError
from retrograd.runtime.arguments.calling import ArgumentError

TOLERANCE = 2e-5
BATCH, TOKENS = Dim("batch", min=1, max=64), Dim("tokens", max=64)

Arguments = tuple[Tensor, ...]


class Classifier(nn.Module):
    """An MLP with layer norm, dropout (off) and cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 5))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


class Attention(nn.Module):
    """Embeddings of tokens and places, two heads, a causal mask made in the model, and a mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(64, 8)
        self.mix = nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        h = self.tokens(ids) + self.places(torch.arange(count))
        q, k, v = self.mix(h).view(ids.shape[0], count, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~torch.ones(count, count).tril().bool(), float("-inf"))
        mixed: Tensor = (scores.softmax(-1) @ v).transpose(1, 2)
        return mixed.reshape(ids.shape[0], count, 8).mean(1)


class Shapes(nn.Module):
    """Outputs whose layouts and sizes are functions of the batch: a transpose, a view, a slice of an input, doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(nn.functional.dropout(x, 0.0))
        return {
            "transposed": y.t(),
            "view": y.view(-1, 2, 3),
            "slice": x[1:],
            "doubled": torch.cat([y, y], 0),
            "scaled": y.sum() * x.shape[0],
        }


def gradients(model: nn.Module, call: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
    """Outputs and gradients of a step, with the same tangents for the same shapes."""
    given = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in arguments]
    outputs = [o for o in torch.utils._pytree.tree_leaves(call(*given)) if o.numel()]
    generator = torch.Generator().manual_seed(3)
    tangents = [torch.randn(o.shape, generator=generator) for o in outputs]
    wanted = [*model.parameters(), *(g for g in given if g.requires_grad)]
    found = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    return [o.detach() for o in outputs] + [
        torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)
    ]


def assert_same(model: nn.Module, call: Callable[..., Any], arguments: Arguments) -> None:
    ours, theirs = gradients(model, call, arguments), gradients(model, model, arguments)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert float((a - b).norm()) <= TOLERANCE * max(float(b.norm()), 1e-2)


@pytest.fixture(scope="module")
def classifier() -> tuple[Classifier, retrograd.CompiledBackward]:
    torch.manual_seed(0)
    model = Classifier()
    arguments = (torch.randn(6, 8, requires_grad=True), torch.randint(5, (6,)))
    return model, retrograd.compile_backward(model, arguments, dynamic_shapes={"x": {0: BATCH}, "labels": {0: BATCH}})


@pytest.fixture(scope="module")
def attention() -> tuple[Attention, retrograd.CompiledBackward]:
    torch.manual_seed(0)
    model = Attention()
    shapes = ({0: Dim.DYNAMIC, 1: TOKENS},)
    return model, retrograd.compile_backward(model, (torch.randint(20, (3, 7)),), dynamic_shapes=shapes)


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True)
@given(batch=st.one_of(st.sampled_from([1, 2, 31, 64]), st.integers(1, 64)))
def test_every_batch_size_of_one_program(classifier: tuple[Classifier, Any], batch: int) -> None:
    model, step = classifier
    torch.manual_seed(batch)
    assert_same(model, step, (torch.randn(batch, 8), torch.randint(5, (batch,))))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(batch=st.integers(1, 9), tokens=st.integers(1, 64))
@pytest.mark.parametrize("_", [None])
def test_batch_and_sequence_at_once(attention: tuple[Attention, Any], _: None, batch: int, tokens: int) -> None:
    model, step = attention
    assert_same(model, step, (torch.randint(20, (batch, tokens)),))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 13), (5, 1)])
def test_batch_and_sequence_of_one(attention: tuple[Attention, Any], batch: int, tokens: int) -> None:
    model, step = attention
    assert_same(model, step, (torch.randint(20, (batch, tokens)),))


def test_residuals_are_counted_at_the_sizes_of_the_trace(classifier: tuple[Classifier, Any]) -> None:
    _, step = classifier
    report = step.explain().to_dict()
    assert report["sizes"] == ["batch = 6 (1 to 64)"]
    assert report["saved_bytes"] > 0
    assert report["peak_bytes_predicted"] > report["saved_bytes"]
    backward = step.manifest.function("backward")
    assert [a.name for a in backward.arguments if a.role == "size"] == ["batch"]
    assert ("batch", 12) in {a.shape for a in backward.arguments if a.role == "saved"}


def test_guards(classifier: tuple[Classifier, Any], attention: tuple[Attention, Any]) -> None:
    _, step = classifier
    with pytest.raises(ArgumentError, match=r"args\[0\].shape\[0\] is 65; 'batch' is 1 to 64; pass such a size"):
        step(torch.randn(65, 8), torch.randint(5, (65,)))
    with pytest.raises(ArgumentError, match=r"args\[1\].shape\[0\] is 4; expected 5 = batch, where 'batch' is args"):
        step(torch.randn(5, 8), torch.randint(5, (4,)))
    with pytest.raises(ArgumentError, match=r"expected torch.float32 of shape \(batch, 8\)"):
        step(torch.randn(5, 9), torch.randint(5, (5,)))
    with pytest.raises(ArgumentError, match=r"args\[0\].shape\[1\] is 65; 'tokens' is 1 to 64"):
        attention[1](torch.randint(20, (2, 65)))


def test_layouts_of_outputs_and_a_saved_file(tmp_path: Path) -> None:
    model = Shapes()
    # An example of size 1 is traced for several.
    step = retrograd.compile_backward(
        model, (torch.randn(1, 4, requires_grad=True),), dynamic_shapes=({0: BATCH},), portable=True
    )
    step.save(tmp_path / "shapes.vmfb")
    loaded = retrograd.load(tmp_path / "shapes.vmfb", model)
    for batch in (1, 2, 7):
        arguments = (torch.randn(batch, 4),)
        for call in (step, loaded):
            assert_same(model, call, arguments)
            given = arguments[0].clone().requires_grad_()
            ours, theirs = call(given), model(given)
            if batch > 1:
                assert {k: v.stride() for k, v in ours.items()} == {k: v.stride() for k, v in theirs.items()}
    with pytest.raises(ArgumentError, match="'batch' is 1 to 64"):
        loaded(torch.randn(65, 4))


def test_random_masks_have_the_sizes_of_the_call() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Dropout(0.5))
    step = retrograd.compile_backward(model, (torch.randn(4, 8),), dynamic_shapes=({0: BATCH},), verify=True)
    for batch in (1, 5, 50):
        output = step(torch.ones(batch, 8))
        (gradient,) = torch.autograd.grad(output.sum(), [layer.bias])
        # What the mask dropped gives no gradient: forward and backward have the same one.
        assert torch.allclose(gradient, 2.0 * (output != 0).sum(0))


@pytest.mark.parametrize(
    ("function", "admitted"),
    [
        (lambda x, w: (x * w).squeeze(0), False),
        (lambda x, w: x * w * (2 if x.shape[0] == 1 else 1), False),
        (lambda x, w: (x * w).t().contiguous().view(-1) + w.sum(), True),
        (lambda x, w: nn.functional.batch_norm(x * w, None, None, training=True), False),
    ],
)
def test_sizes_of_1_are_admitted_where_the_graph_is_right_for_them(
    function: Callable[..., Tensor], admitted: bool
) -> None:
    arguments = (torch.randn(6, 4), torch.randn(4, requires_grad=True))
    with ExitStack() as stack:
        captured = capture_joint(stack, function, arguments, None, ({0: BATCH}, None))
    conditions = admit_ones(captured, function, arguments, None).signature.conditions
    assert all(holds(condition, {"batch": 1}) for condition in conditions) is admitted
    assert all(holds(condition, {"batch": n}) for condition in conditions for n in range(2, 65))


def test_divisibility_is_a_guard() -> None:
    def halves(x: Tensor, w: Tensor) -> Tensor:
        first, second = x.view(2, -1, 4).unbind(0)
        return first * w + second

    w = torch.randn(4, requires_grad=True)
    step = retrograd.compile_backward(halves, (torch.randn(6, 4), w), dynamic_shapes=({0: BATCH}, None))
    x = torch.randn(10, 4)
    (gradient,) = torch.autograd.grad(step(x, w).sum(), [w])
    assert torch.allclose(gradient, x[:5].sum(0), atol=1e-5)
    with pytest.raises(ArgumentError, match=r"'batch'\) is 5; the program was traced for .*% 8"):
        step(torch.randn(5, 4), w)


def test_sizes_that_are_derived_from_others() -> None:
    """As multiples of one that an argument has, which may be 1, and of one that none has.

    The model writes into the same zeros twice in its backward, and sorts the same places twice; it takes halves.
    """

    def pairs(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        (a, _), (b, _) = x.sort(0), x.sin().sort(0)
        first, second = x.chunk(2)
        return (
            (first.sin() * second).sum()
            + (x[1:] * x[:-1]).sum()
            + (a * b).sum()
            + (x.view(-1, 2, 4).sum(1) * y).sum()
            + z.view(-1, 3).prod(1).sum()
        )

    def arguments(half: int, third: int) -> Arguments:
        sizes = [(2 * half, 4), (half, 4), (3 * third,)]
        return tuple(torch.randn(size, generator=generator).requires_grad_() for size in sizes)

    generator = torch.Generator().manual_seed(0)
    half, third = Dim("half", max=32), Dim("third", max=9)
    shapes = ({0: 2 * half}, {0: half}, {0: 3 * third})
    step = retrograd.compile_backward(pairs, arguments(3, 2), dynamic_shapes=shapes, fallback="error")
    assert [name.partition(" ")[0] for name in step.explain().to_dict()["sizes"]] == ["half", "s0"]
    for sizes in ((3, 2), (1, 1), (11, 3)):
        given = arguments(*sizes)
        ours, eager = (torch.autograd.grad(function(*given), given) for function in (step, pairs))
        for mine, theirs in zip(ours, eager, strict=True):
            assert torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(
        ArgumentError, match=r"args\[0\].shape\[0\] is 6; expected 4 = 2 \* half, where 'half' is args\[1\]"
    ):
        step(torch.randn(6, 4), torch.randn(2, 4), torch.randn(3))
    with pytest.raises(ArgumentError, match=r"args\[2\].shape\[0\] \('s0'\) is 4; the program was traced for .*% 3"):
        step(torch.randn(6, 4), torch.randn(3, 4), torch.randn(4))
    with pytest.raises(ArgumentError, match=r"is 30; 's0' is 1 to 27"):
        step(torch.randn(6, 4), torch.randn(3, 4), torch.randn(30))


@pytest.mark.long
def test_pieces_of_an_open_size() -> None:
    def pieces(x: Tensor, y: Tensor) -> Tensor:
        left, right = torch.cat([x, y]).split([x.shape[0], y.shape[0]])
        result: Tensor = left.sin() + x.chunk(2)[0].sum() * right.cos().sum()
        return result

    torch.manual_seed(0)
    cases = ((8, 5), (3, 7), (33, 1))
    shapes = ({0: Dim("n", min=2, max=64)}, {0: Dim("m", max=64)})
    given = [tuple(torch.randn(size, 3, requires_grad=True) for size in sizes) for sizes in cases]
    step = retrograd.compile_backward(pieces, given[0], dynamic_shapes=shapes, fallback="error")
    for arguments in given:
        outputs = [function(*arguments) for function in (step, pieces)]
        ours, eager = (torch.autograd.grad(output, arguments, torch.ones_like(output)) for output in outputs)
        torch.testing.assert_close(ours, eager, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.long
def test_a_budget_and_narrow_types_hold_for_open_sizes() -> None:
    """Bytes are those at the sizes of the trace, where IREE then takes as many as was worked out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    given = (torch.randn(32, 8, requires_grad=True),)
    shapes, policy = ({0: BATCH},), saved_dtype("bf16")
    step = retrograd.compile_backward(
        model, given, dynamic_shapes=shapes, partition="budget", memory_budget=1.2, save_policy=policy
    )
    for rows in (32, 1, 50):
        narrow, wide = (gradients(model, call, (torch.ones(rows, 8),)) for call in (step, model))
        assert all((a - b).norm() <= 2e-2 * b.norm() for a, b in zip(narrow, wide, strict=True))
    report = step.explain().to_dict()
    assert 0 < report["peak_bytes_measured"] == report["peak_bytes_predicted"] <= report["memory_budget"]
    assert report["narrowed_bytes"] > 0


def linear(shapes: Any, x: Tensor | None = None) -> Any:
    return retrograd.compile_backward(nn.Linear(4, 4), (torch.randn(6, 4) if x is None else x,), dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": {0: BATCH}}, r"(?s)dynamic_shapes: .*write it as for torch\.export\.export"),
        (({0: BATCH, 1: Dim("width")},), r"args\[0\].shape\[1\] was asked to be dynamic, but .* one size of it, 4"),
        (({0: Dim("batch", max=5)},), r"args\[0\].shape\[0\] is 6, but dynamic_shapes says 1 to 5"),
        (({0: 4 * Dim("quarter")},), r"args\[0\].shape\[0\] is 6, which is not '4\*quarter' for any 'quarter'"),
    ],
)
def test_what_cannot_be_open_is_told_when_compiling(shapes: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        linear(shapes)


def test_sizes_of_two_names_that_must_be_equal() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    arguments = (torch.randn(6, requires_grad=True), torch.randn(6))
    with pytest.raises(CaptureError, match=r"\('a'\) and args\[1\].shape\[0\] \('b'\) to be equal; *|to be equal"):
        retrograd.compile_backward(add, arguments, dynamic_shapes=({0: Dim("a")}, {0: Dim("b")}))
    with pytest.raises(CaptureError, match=r"args\[1\].shape\[0\] is 5 \('a'\), and 'a' is 6 in args\[0\]"):
        a = Dim("a")
        retrograd.compile_backward(add, (arguments[0], torch.randn(5)), dynamic_shapes=({0: a}, {0: a}))


def test_what_depends_on_fixed_sizes_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"is saved as int8-block; save it as one of bf16, float8_e4m3"):
        retrograd.compile_backward(
            nn.Sequential(nn.Linear(4, 64), nn.Tanh()),
            (torch.randn(6, 4),),
            save_policy=saved_dtype("int8-block"),
            dynamic_shapes=({0: BATCH},),
        )
    # A recurrent layer is a loop over its sequence.
    with pytest.raises(CaptureError, match=r"args\[0\].shape\[1\] was asked to be dynamic.*it loops over that axis"):
        retrograd.compile_backward(
            nn.LSTM(2, 2, batch_first=True), (torch.randn(2, 3, 2),), dynamic_shapes=({1: TOKENS},)
        )


@pytest.mark.long
def test_a_part_of_a_split_that_nobody_reads() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(8, 12)

        def forward(self, x: Tensor) -> Tensor:
            first, second, _ = self.projection(x).split([4, 4, 4], -1)
            return torch.sum(first * second)

    model = Parts()
    step = retrograd.compile_backward(model, (torch.randn(3, 8),), dynamic_shapes=({0: BATCH},))
    for rows in (2, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(step(x), model(x))


class Padded(nn.Module):
    """A sequence of three beside a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        sequences = nn.utils.rnn.pad_sequence([self.layer(x), self.layer(y)], batch_first=True)
        return sequences.sin().sum()


@pytest.mark.short_cases("compile_backward")
@pytest.mark.parametrize("door", ["compile_backward", "torch.compile"])
def test_padding_to_an_open_length(door: str) -> None:
    """The backward of a pad is a pad by a negative amount, which nobody compiles rightly where it is open."""
    torch.manual_seed(0)
    model, x = Padded(), torch.randn(3, 4)
    if door == "torch.compile":
        torch._dynamo.reset()
        step = torch.compile(model, backend="retrograd", options={"cache": False})
    else:
        lengths = torch.export.Dim("length", min=4, max=20)
        step = retrograd.compile_backward(model, (x, torch.randn(6, 4)), dynamic_shapes=({}, {0: lengths}), cache=False)
    for length in (4, 5, 9):
        y = torch.randn(length, 4)
        found, expected = (torch.autograd.grad(call(x, y), [*model.parameters()]) for call in (step, model))
        torch.testing.assert_close(found, expected)
