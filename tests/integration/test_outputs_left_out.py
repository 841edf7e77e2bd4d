# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses that use some of the outputs: gradients, and which there are at all, as in eager, beside every subset."""

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import outputs_left_out
import pytest
import torch
import torch.nn.functional as F
from executables import compile_once
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import retrograd
import retrograd.stagers
from retrograd import ZeroTangentWarning, compile_backward
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages import staged

BATCH = torch.export.Dim("batch", max=64)


@pytest.fixture(autouse=True)
def _compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that keep away from the cache, to see what is compiled when, compile the same models."""
    monkeypatch.setattr(staged, "compile_executable", compile_once)


class Heads(nn.Module):
    """A trunk and three heads, one of them with the slope of a root, which is infinite where the trunk gives zero."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.left(h).sum(), torch.sqrt(h), self.right(h)


class Language(nn.Module):
    """What a language model returns: a loss and its logits, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embedding(tokens)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Normalized(nn.Module):
    """A block that is checkpointed, running statistics that the step updates, and a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = checkpoint(lambda y: torch.tanh(self.first(y)), self.norm(x), use_reentrant=False)
        side = self.second(h)
        # Not linear: of a gradient of zero it makes one of 1. Eager calls none for a gradient that is not there.
        side.register_hook(lambda gradient: gradient + 1)
        return h.exp().sum(), side


def infinite_slopes(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` is zero."""
    return (x * w).sum() + 3 * x.sum(), torch.linalg.vector_norm(x), torch.log(x.square()) + w


def pieces(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eager gives the backward of a split zeros for the pieces that nobody uses."""
    first, second, third = (x * w).split((1, 2, 1), 1)
    return first, torch.sqrt(second.abs() * 0), third.flip(0)


def views(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one value, and of an argument."""
    h = torch.tanh(x) * w
    return h[0], h.t(), x.view(-1)


def arguments(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """An output that is an argument."""
    return x, x.sin() * w


def written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A value that is written to between two outputs."""
    h = x * w
    first = h.exp()
    h[0] = w.sum()
    return first, h


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def tokens(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (batch, 3)), torch.randint(7, (batch, 3))


CASES: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "heads": lambda: (Heads(), (torch.randn(5, 4),)),
    "language": lambda: (Language(), tokens(2)),
    "normalized": lambda: (Normalized(), (torch.randn(5, 4),)),
    "infinite_slopes": lambda: (infinite_slopes, (torch.zeros(3, requires_grad=True), randn(3))),
    "pieces": lambda: (pieces, (randn(5, 4), randn(4))),
    "views": lambda: (views, (randn(2, 3), randn(3))),
    "arguments": lambda: (arguments, (randn(2, 3), randn(3))),
    "written": lambda: (written, (randn(2, 3), randn(3))),
}


def leaves_of(model: Any, args: Sequence[Tensor]) -> list[Tensor]:
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    return [*parameters, *(a for a in args if a.requires_grad)]


def gradients(run: Callable[..., Any], leaves: list[Tensor], args: Sequence[Tensor], used: Sequence[int]) -> Any:
    """Gradients of a loss of the outputs with these numbers; ``None`` where there is none."""
    outputs = pytree.tree_leaves(run(*args))
    loss = torch.stack([(outputs[i] * outputs[i].detach().cos()).sum() for i in used]).sum()
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def check_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [g is None for g in found] == [g is None for g in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


def subsets(count: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [used for size in sizes for used in itertools.combinations(range(count), size)]


@pytest.mark.short_cases("normalized", "infinite_slopes", "views", "arguments", "written")
@pytest.mark.parametrize("name", CASES)
def test_subsets_of_the_outputs(name: str) -> None:
    """Each output alone and all of them; of the heads two of the three as well."""
    torch.manual_seed(0)
    model, args = CASES[name]()
    other = copy.deepcopy(model)
    step = compile_backward(model, args, fallback="error")
    count = len(pytree.tree_leaves(other(*args)))
    for used in subsets(count, (1, 2, 3) if name == "heads" else (1, count)):
        expected = gradients(other, leaves_of(other, args), args, used)
        check_same(gradients(step, leaves_of(model, args), args, used), expected)


@pytest.mark.short_cases("halves")
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda batch: (Heads(), (torch.randn(batch, 4),)), {"x": {0: BATCH}}),
        (lambda batch: (Language(), tokens(batch)), {"tokens": {0: BATCH}, "labels": {0: BATCH}}),
        # Nothing is saved: only the tangents have the size that the zeros are of.
        (lambda batch: (halves, (randn(batch, 4),)), {"x": {0: BATCH}}),
    ],
    ids=["heads", "language", "halves"],
)
def test_open_sizes(make: Callable[[int], Any], shapes: Any) -> None:
    torch.manual_seed(0)
    model, args = make(5)
    step = compile_backward(model, args, dynamic_shapes=shapes)
    for batch, used in itertools.product((5, 3, 1), ((0,), (1,))):
        _, args = make(batch)
        expected = gradients(model, leaves_of(model, args), args, used)
        check_same(gradients(step, leaves_of(model, args), args, used), expected)
    assert len(step.explain().to_dict()["backward_variants"]) == 2


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.split(2, 1)
    return first * 2, second * 3


def test_a_backward_is_compiled_when_it_is_first_needed_and_kept() -> None:
    model, x, phases = Heads(), torch.randn(5, 4), list[str]()
    step = compile_backward(model, (x,), cache=False, progress=phases.append)
    leaves, first = leaves_of(model, (x,)), len(phases)
    gradients(step, leaves, (x,), (0, 1, 2))
    assert phases[first:].count("iree-compile") == 1
    assert step.explain().to_dict()["backward_variants"] == []
    gradients(step, leaves, (x,), (1,))
    second = len(phases)
    assert phases[first:].count("iree-compile") == 2
    assert "drop tangents" in phases[first:]
    other = copy.deepcopy(model)
    gradients(step, leaves, (x,), (1,))
    gradients(step.bind(other), leaves_of(other, (x,)), (x,), (1,))
    gradients(step, leaves, (x,), (0, 1, 2))
    assert phases[second:] == []
    assert step.explain().to_dict()["backward_variants"] == ["without output[0], output[2]"]
    assert "backwards for outputs left out" in str(step.explain())


def test_the_backward_of_a_loss_is_compiled_at_once() -> None:
    """A model that returns its loss and its logits is compiled once for a step of training; of all outputs when a step
    asks for it; and a file holds the backward of all."""
    torch.manual_seed(0)
    model, phases = Language(), list[str]()
    args = (torch.randint(7, (2, 3)), torch.randint(7, (2, 3)))
    step, leaves = compile_backward(model, args, cache=False, progress=phases.append), leaves_of(model, args)
    compiled = len(phases)
    assert phases.count("iree-compile") == phases.count("lower") == 1
    for _ in range(2):
        check_same(gradients(step, leaves, args, (0,)), gradients(model, leaves, args, (0,)))
    assert phases[compiled:] == []
    assert step.explain().to_dict()["backward_variants"] == ["without output['logits']"]
    for _ in range(2):
        check_same(gradients(step, leaves, args, (0, 1)), gradients(model, leaves, args, (0, 1)))
    assert phases[compiled:].count("iree-compile") == 1
    assert len(step.explain().to_dict()["verification"]) == 3


@pytest.mark.long
def test_a_file_has_the_backward_of_all_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()
    args = (torch.randint(7, (2, 3)), torch.randint(7, (2, 3)))
    compile_backward(model, args, cache=False).save(tmp_path / "language.rgb")
    loaded, leaves = retrograd.load(tmp_path / "language.rgb").bind(model), leaves_of(model, args)
    check_same(gradients(loaded, leaves, args, (0, 1)), gradients(model, leaves, args, (0, 1)))


@pytest.mark.long_cases("island")
@pytest.mark.parametrize("fallback", ["island", "error"])
def test_a_backward_of_all_outputs_that_does_not_compile(fallback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in torch, and says so; or that is an error. That of the loss goes on."""
    torch.manual_seed(0)
    model = Language()
    args = (torch.randint(7, (2, 3)), torch.randint(7, (2, 3)))
    step, leaves = compile_backward(model, args, cache=False, fallback=fallback), leaves_of(model, args)
    check_same(gradients(step, leaves, args, (0,)), gradients(model, leaves, args, (0,)))

    def refuse(*_: Any, **__: Any) -> Any:
        raise CompileError("iree-compile", "no such instruction", "", "")

    monkeypatch.setattr("retrograd.stagers.build_executable", refuse)
    if fallback == "error":
        with pytest.raises(CompileError, match="no such instruction"):
            gradients(step, leaves, args, (0, 1))
    else:
        with pytest.warns(retrograd.EagerIslandWarning, match="backward of all outputs is not compiled"):
            found = gradients(step, leaves, args, (0, 1))
        check_same(found, gradients(model, leaves, args, (0, 1)))
    check_same(gradients(step, leaves, args, (0,)), gradients(model, leaves, args, (0,)))


@pytest.mark.long
def test_the_cache_has_it_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of the run compile this too.
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), Twice()), torch.randn(2, 4)
    for compiles in (True, False):
        phases = list[str]()
        step = compile_backward(model, (x,), progress=phases.append)
        first = len(phases)
        gradients(step, leaves_of(model, (x,)), (x,), (1,))
        assert ("iree-compile" in phases[first:]) is compiles
        assert "drop tangents" in phases[first:]


def test_stages_that_are_kept_are_those_of_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next time no pass runs, and what leaves out outputs is made of the same stages; a policy has its own."""
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, args = Language(), (torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]))
    steps = []
    policies: tuple[tuple[Literal["min-cut", "default"], bool], ...]
    policies = (("min-cut", True), ("min-cut", False), ("default", True))
    for policy, passes in policies:
        phases = list[str]()
        steps.append(compile_backward(model, args, partition=policy, progress=phases.append))
        assert ("partition" in phases) is passes
    found = [step.mlir(stage) for step in steps[:2] for stage in ("imported", "partitioned", "scheduled")]
    assert found[:3] == found[3:]
    for used in ((0,), (1,)):
        torch.testing.assert_close(
            *(gradients(call, leaves_of(model, args), args, used) for call in (steps[1], model)), rtol=1e-5, atol=1e-6
        )


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.sin()


def test_threads_that_need_the_same_backward_compile_it_once() -> None:
    model, x, phases = Heads(), torch.randn(5, 4), list[str]()
    step = compile_backward(model, (x,), cache=False, progress=phases.append)
    leaves, found, first = leaves_of(model, (x,)), list[Any](), len(phases)
    threads = [threading.Thread(target=lambda: found.append(gradients(step, leaves, (x,), (2,)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert phases[first:].count("drop tangents") == 1
    for one in found:
        check_same(one, gradients(model, leaves, (x,), (2,)))
    assert len(found) == 3


def test_several_losses_of_one_step() -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(5, 4)
    step, leaves = compile_backward(model, (x,)), leaves_of(model, (x,))
    results = []
    for run in (model, step):
        model.zero_grad()
        outputs = run(x)
        outputs[0].backward(retain_graph=True)
        outputs[2].sum().backward()
        # Two calls in one graph, with other outputs of each.
        (run(x)[0] + run(x + 1)[2].sum() + run(x)[2].sum()).backward()
        results.append([None if p.grad is None else p.grad.clone() for p in leaves])
    check_same(results[1], results[0])


def train(x: Tensor, *, compiled: bool) -> tuple[list[str], list[Tensor]]:
    """Two steps on the first output, with hooks on what it reaches: the calls of these, sorted, and the parameters
    then."""
    torch.manual_seed(1)
    model, calls = Heads(), list[str]()
    for name, parameter in [*model.trunk.named_parameters(), *model.left.named_parameters()]:
        parameter.register_hook(lambda _, name=name: calls.append(f"gradient of {name}"))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(f"after {name}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    run = compile_backward(model, (x,)) if compiled else model
    for _ in range(2):
        optimizer.zero_grad()
        run(x)[0].backward()
        optimizer.step()
    return sorted(calls), [p.detach() for p in model.parameters()]


def test_hooks_run_and_optimizers_move_what_they_do_in_eager() -> None:
    x = torch.randn(5, 4)
    (expected_calls, expected), (calls, found) = train(x, compiled=False), train(x, compiled=True)
    assert calls == expected_calls
    assert len(calls) == 16
    check_same(found, expected)


def shifted(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of ``x`` is the first tangent itself."""
    return x + v.exp(), w.sin()


def test_hooks_are_not_called_with_none() -> None:
    """Autograd comes to every argument of the compiled step: what somebody looks at gets zeros."""
    x, w, v = randn(3), randn(3), randn(3)
    step, seen = compile_backward(shifted, (x, w, v)), list[Tensor]()
    handles = [x.register_hook(lambda gradient: seen.append(gradient))]
    handles.append(v.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad)))
    step(x, w, v)[1].sum().backward()
    assert [bool((gradient == 0).all()) for gradient in seen] == [True, True]
    for handle in handles:
        handle.remove()
    check_same(torch.autograd.grad(step(x, w, v)[1].sum(), (x, v), allow_unused=True), (None, None))
    # What leads to an argument that is no leaf may have hooks that nobody sees.
    seen.clear()
    doubled = x * 2
    doubled.register_hook(lambda gradient: seen.append(gradient))
    (gradient,) = torch.autograd.grad(step(doubled, w, v)[1].sum(), x)
    assert bool((gradient == 0).all())
    assert len(seen) == 1


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(self.first(x)), 0.5)
        return h.sum(), self.second(h)


@pytest.mark.long
def test_dropout_has_the_masks_of_its_forward() -> None:
    model, x = Dropped(), torch.randn(5, 6)
    step = compile_backward(model, (x,))
    found = []
    for used in ((0,), (0, 1)):
        torch.manual_seed(3)
        outputs = step(x)
        loss = sum(outputs[i].sum() * (1 - i) for i in used)
        found.append(torch.autograd.grad(loss, list(model.first.parameters())))
    check_same(*found)
    assert bool(found[0][0].any())


@pytest.mark.long
@pytest.mark.parametrize("policy", [None, retrograd.must_save(op="tanh") | retrograd.saved_dtype("bf16", op="tanh")])
def test_a_memory_budget_and_a_save_policy(policy: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Tanh()] * 3
    model, x = nn.Sequential(*layers, nn.Linear(16, 4), Twice()), torch.randn(32, 16)
    options: dict[str, Any] = (
        {"partition": "budget", "memory_budget": 1.25} if policy is None else {"save_policy": policy}
    )
    step, leaves = compile_backward(model, (x,), **options), leaves_of(model, (x,))
    for used in ((0,), (1,)):
        found, expected = (gradients(run, leaves, (x,), used) for run in (step, model))
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < (2e-5 if policy is None else 2e-2)
    assert step.explain().to_dict()["backward_variants"] == ["without output[1]", "without output[0]"]


class Spectral(nn.Module):
    """Eigenvalues, which run in torch, for one of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.last(h), torch.linalg.eigvals(h).abs()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::retrograd.EagerIslandWarning")
def test_islands() -> None:
    torch.manual_seed(0)
    model, x = Spectral(), torch.randn(4, 4)
    step, leaves = compile_backward(model, (x,)), leaves_of(model, (x,))
    for used in subsets(2, (1, 2)):
        check_same(gradients(step, leaves, (x,), used), gradients(model, leaves, (x,), used))
    assert len(step.explain().to_dict()["backward_variants"]) == 2


@pytest.mark.long
def test_verified_programs_have_them_too() -> None:
    model, x = Heads(), torch.randn(5, 4)
    step, leaves = compile_backward(model, (x,), verify=True), leaves_of(model, (x,))
    for _ in range(2):
        check_same(gradients(step, leaves, (x,), (2,)), gradients(model, leaves, (x,), (2,)))


def test_what_cannot_be_compiled_takes_zeros_and_says_so() -> None:
    model, x = Heads(), torch.randn(5, 4)
    steps = [compile_backward(model, (x,), fallback=fallback) for fallback in ("island", "error")]
    leaves = leaves_of(model, (x,))
    broken = CompileError("iree-compile", "no such code", "", "")
    with mock.patch.object(retrograd.stagers, "build_executable", side_effect=broken):
        with pytest.warns(ZeroTangentWarning, match=r"the backward without output\[0\], output\[1\] is not compiled"):
            found = gradients(steps[0], leaves, (x,), (2,))
        with pytest.raises(CompileError, match="no such code"):
            gradients(steps[1], leaves, (x,), (2,))
    expected = gradients(model, leaves, (x,), (2,))
    # The head that the loss leaves out has zeros; the root's slope is infinite where the trunk gives zero.
    left = [bool((g == 0).all()) for g in found]
    assert left[2:4] == [True, True]
    check_same(found[4:], expected[4:])
    (text,) = steps[0].explain().to_dict()["backward_variants"]
    assert text == "zeros for output[0], output[1]: iree-compile: no such code"


def test_a_file_has_the_whole_backward(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), Twice()), torch.randn(2, 4)
    step, leaves = compile_backward(model, (x,)), leaves_of(model, (x,))
    found = gradients(step, leaves, (x,), (1,))
    step.save(tmp_path / "model.vmfb")
    loaded = retrograd.load(tmp_path / "model.vmfb", model)
    check_same(gradients(loaded, leaves, (x,), (1,)), found)
    assert "backward_variants" in step.explain().to_dict()
    assert "backward_variants" not in loaded.explain().to_dict()


def test_gradients_of_gradients_are_refused_as_ever() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), Twice()), torch.randn(2, 4)
    step, leaves = compile_backward(model, (x,)), leaves_of(model, (x,))
    first = torch.autograd.grad(step(x)[1].sum(), leaves, create_graph=True)
    check_same(first, torch.autograd.grad(model(x)[1].sum(), leaves))
    with pytest.raises(
        RuntimeError,
        match=r"gradients of gradients of Sequential(?s:.*)create_graph=True, at File(?s:.*)remedy: compile a function",
    ):
        torch.autograd.grad(first[0].sum(), leaves)


def test_enable_has_the_graph_of_the_loss() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(5, 4), Heads()
    for used in ((0,), (2,)):
        expected = gradients(model, leaves_of(model, (x,)), (x,), used)
        for _ in range(2):
            model.zero_grad()
            with retrograd.enable():
                outputs = model(x)
                sum((outputs[i] * outputs[i].detach().cos()).sum() for i in used).backward()
            check_same([p.grad for p in model.parameters()], expected)


@pytest.mark.long
@pytest.mark.parametrize("shapes", [None, {"input": {0: BATCH}}], ids=["fixed", "open"])
def test_compiled_autograd_copies_the_whole_backward_of_a_compiled_step(shapes: Any) -> None:
    x, model = torch.randn(5, 4).abs(), nn.Sequential(nn.Linear(4, 3), Forked())
    step = compile_backward(model, (x,), dynamic_shapes=shapes)
    leaves = leaves_of(model, (x,))
    for used in ((0,), (1,)):
        expected = gradients(model, leaves, (x,), used)
        for _ in range(2):
            model.zero_grad()
            with retrograd.enable():
                outputs = step(x)
                sum((outputs[i] * outputs[i].detach().cos()).sum() for i in used).backward()
            zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, expected, strict=True)]
            check_same([p.grad for p in leaves], zeros)


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(input), self.second(input)


def test_torch_compile_makes_zeros_whatever_the_backend() -> None:
    torch.manual_seed(0)
    model, x = Forked(), torch.randn(2, 3)
    leaves = leaves_of(model, (x,))
    for backend in ("aot_eager", "retrograd"):
        torch._dynamo.reset()
        found = gradients(torch.compile(model, backend=backend), leaves, (x,), (0,))
        assert [g is not None and bool((g == 0).all()) for g in found] == [False, False, True, True]


@pytest.mark.long
def test_the_benchmark_compares_both_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert outputs_left_out.main(["--size", "test", "--repeats", "1"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == ["eager", "eager", "retrograd", "retrograd"]
    assert all(float(row[2]) > 0 for row in rows)


class Nothing(nn.Module):
    """Outputs of which the gradients are zeros whatever the tangent: without elements, and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        empty, sign = self.second(input[:0]), torch.sign(self.second.bias)
        return self.first(input), empty, self.second(input)[:0], sign, self.first.weight * 2


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2), (3,), (0, 4), (0, 1, 2, 3, 4)])
def test_gradients_that_are_zeros_whatever_the_tangent(used: tuple[int, ...]) -> None:
    model, x = Nothing(), torch.randn(2, 3)
    step = compile_backward(model, (x,))
    for one in (model, step):
        model.zero_grad()
        sum(one(x)[number].sum() for number in used).backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if one is model:
            expected = found
    assert [g is None for g in found] == [g is None for g in expected]
    torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None])


def test_a_backward_of_all_outputs_with_what_does_not_compile_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not was settled of the loss's backward, which has fewer ops."""
    finish, ran = retrograd.stagers.WithoutTangents.finish, mock.Mock(wraps=torch.fx.Interpreter.run)

    def failing(self: Any, staged: Any) -> Any:
        if not self.absent:
            raise CompileError("iree-compile", "an op of the second output", "", "")
        return finish(self, staged)

    monkeypatch.setattr(retrograd.stagers.WithoutTangents, "finish", failing)
    model, x = Heads(), torch.randn(3, 4)
    leaves, whole = leaves_of(model, (x,)), (0, 1, 2)
    step = compile_backward(model, (x,), cache=False)
    gradients(step, leaves, (x,), (0,))
    expected = gradients(model, leaves, (x,), whole)
    monkeypatch.setattr(torch.fx.Interpreter, "run", ran)
    for _ in range(3):
        ran.reset_mock()
        check_same(gradients(step, leaves, (x,), whole), expected)
    assert not ran.called
