# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Eager islands: ops that do not compile run in torch between compiled functions, and gradients are eager's."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from compared import assert_same
from torch import nn

import retrograd
from retrograd import EagerIslandWarning, compile_backward
from retrograd.contract.environment import CACHE_FOLDER
from retrograd.frontend.decompositions import table as decompositions
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.toolchain import executable
from retrograd.pipelines.toolchain.subprocesses import ToolResult


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Islands are what these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerIslandWarning)
        yield


@pytest.fixture(scope="module", autouse=True)
def fewer_decompositions() -> Iterator[None]:
    """Distances, inverses and pieces, for which there are decompositions, stand for ops that do not compile."""
    kept = tuple(e for e in decompositions.DECOMPOSITIONS if not re.search("cdist|linalg|split", str(e.op)))
    with mock.patch.object(decompositions, "DECOMPOSITIONS", kept):
        yield


class Spectral(nn.Module):
    """Eigenvalues and a matrix inverse between layers, and running statistics that the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(torch.tanh(self.first(x)))
        spectrum = torch.linalg.eigvals(hidden[:4]).abs()
        inverse = torch.linalg.inv(hidden.T @ hidden + 2 * torch.eye(4))
        return self.last(hidden @ inverse) * spectrum.sum(), spectrum[1:]


def gradients(run: Callable[..., Any], leaves: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    """Outputs and gradients of ``leaves``."""
    outputs = run(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors = [o for o in outputs if o.requires_grad]
    weights = [torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape).to(o.dtype) for o in tensors]
    found = torch.autograd.grad(tensors, leaves, weights, allow_unused=True)
    return [*outputs, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))]


@pytest.fixture(scope="module")
def spectral() -> tuple[Spectral, Spectral, retrograd.CompiledBackward, torch.Tensor]:
    torch.manual_seed(0)
    model = Spectral()
    x = torch.randn(5, 4, requires_grad=True)
    eager = copy.deepcopy(model)
    with pytest.warns(EagerIslandWarning, match=r"run in torch: .*aten\.linalg_inv_ex.*explain\(\) says why"):
        step = compile_backward(model, (x,), verify=True)
    return model, eager, step, x


def test_steps_of_a_model_are_eagers(spectral: Any) -> None:
    model, eager, step, x = spectral
    for _ in range(2):
        ours = gradients(step, [x, *model.parameters()], x)
        assert_same(ours, gradients(eager, [x, *eager.parameters()], x))
    for mine, expected in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.allclose(mine, expected, rtol=2e-5)


def test_explain_lists_islands_with_reasons_and_shares(spectral: Any) -> None:
    _, _, step, x = spectral
    gradients(step, [x], x)
    islands = step.explain().to_dict()["islands"]
    (inverse,) = [i for i in islands if "linalg_inv_ex" in i["what"]]
    assert "test_islands.py:" in inverse["what"]
    assert any("complex64" in i["what"] for i in islands)
    assert 0 < sum(i["share"] for i in islands) < 1
    # A cell of the table goes over several lines.
    text = re.sub(r"[\s│]+", " ", str(step.explain()))
    assert re.search(r"% of( the time| .* time)", text)
    assert "unknown: parts run in torch" in text
    assert "and what torch takes" in text
    with pytest.raises(ValueError, match="parts run in torch"):
        step.explain().timeline()


def test_no_artifact_with_islands(spectral: Any, tmp_path: Path) -> None:
    with pytest.raises(retrograd.ArtifactError, match=r"run in torch(?s:.*)linalg_inv_ex"):
        spectral[2].save(tmp_path / "model.vmfb")
    assert list(tmp_path.iterdir()) == []


def test_what_an_island_raises_reaches_the_user(spectral: Any) -> None:
    def invert(x: torch.Tensor) -> torch.Tensor:
        inverse: torch.Tensor = torch.linalg.inv(x.exp() - 1)
        return inverse

    step = compile_backward(invert, (torch.eye(3).requires_grad_(),))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        step(torch.zeros(3, 3, requires_grad=True))


@pytest.mark.parametrize("fallback", ["error", "nothing"])
def test_other_fallbacks(fallback: Any) -> None:
    with pytest.raises((retrograd.CaptureError, ValueError), match=r"complex64, which executables|fallback 'nothing'"):
        compile_backward(
            lambda x: torch.linalg.eigvals(x).abs(), (torch.randn(4, 4).requires_grad_(),), fallback=fallback
        )


def test_an_op_that_does_not_lower_is_refused_without_islands() -> None:
    with pytest.raises(retrograd.CompileError, match="cdist"):
        compile_backward(lambda x: torch.cdist(x, x), (torch.randn(3, 2).requires_grad_(),), fallback="error")


def mixed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Integer results of an island, one that has no gradient, views of what it gives, and writes in place."""
    order = torch.linalg.lu_factor_ex(x)[1]
    distances = torch.cdist(x, y)
    distances = distances[1:].clone()
    distances[0] += y.sum()
    return distances.t(), order, x.detach() + 1, torch.cdist(y, y.detach()).sum()


@pytest.mark.long
def test_results_of_all_kinds() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(3, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    step = compile_backward(mixed, (x, y))
    assert_same(gradients(step, [x, y], x, y), gradients(mixed, [x, y], x, y))
    # Ops that are the same are compiled around alike.
    assert len(step.explain().to_dict()["islands"]) >= 3


@pytest.mark.long
def test_a_complex_argument_and_result() -> None:
    def turn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        inverse: torch.Tensor = torch.linalg.inv(x)
        return torch.view_as_complex(torch.stack([w, w.exp()], -1)) * inverse

    torch.manual_seed(4)
    x, w = torch.randn(3, 3, dtype=torch.complex64).requires_grad_(), torch.randn(3, requires_grad=True)
    step = compile_backward(turn, (x, w))
    assert step.explain().to_dict()["islands"]
    assert_same(gradients(step, [x, w], x, w), gradients(turn, [x, w], x, w))


def test_a_budget_counts_what_islands_give() -> None:
    """What an island gives is saved or used at once, never computed twice; the rest is recomputed as ever."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        angles = x.unsqueeze(-1) * torch.linspace(0, 1, 32)
        inverse: torch.Tensor = torch.linalg.inv(x @ x.T + 9 * torch.eye(4))
        return inverse.sum() * angles.sin().exp().sin().mean()

    torch.manual_seed(6)
    x = torch.randn(4, 4, requires_grad=True)
    step = compile_backward(spread, (x,), partition="budget", memory_budget=0.35)
    assert_same(gradients(step, [x], x), gradients(spread, [x], x))
    report = step.explain().to_dict()
    assert 0 < report["peak_bytes_predicted"] <= report["memory_budget"]
    assert report["recomputed_ops"] > 0
    assert not any("inv" in name for name in report["recomputed"])


def test_sizes_that_differ() -> None:
    """Islands of open sizes: numbers among their arguments, strides that differ, residuals of both kinds."""

    def spread(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        points = (x @ w).reshape(-1, 2, 2).transpose(0, 1)
        distances = torch.cdist(points, points.flip(0))
        return distances.sum((0, 2)) * x.exp().mean(1) + distances.new_ones(2 * x.shape[0]).sum()

    w = torch.randn(4, 4, requires_grad=True)
    example = torch.randn(5, 4, requires_grad=True)
    step = compile_backward(
        spread, (example, w), dynamic_shapes={"x": {0: torch.export.Dim("rows", max=64)}, "w": None}
    )
    assert len(step.explain().to_dict()["islands"]) >= 2
    for rows in (5, 1, 7):
        x = torch.randn(rows, 4, requires_grad=True)
        assert_same(gradients(step, [x, w], x, w), gradients(spread, [x, w], x, w))
    with pytest.raises(retrograd.ArgumentError, match="65"):
        step(torch.randn(65, 4), w)


def test_a_size_that_no_tensor_of_the_backward_has() -> None:
    """All that is saved is of half the size, which the forward hands over as a number."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2)
        return left.sin() * right

    given = [torch.randn(rows, 3, requires_grad=True) for rows in (8, 2, 30)]
    step = compile_backward(halves, (given[0],), dynamic_shapes=({0: 2 * torch.export.Dim("half", max=32)},))
    for x in given:
        assert_same(gradients(step, [x], x), gradients(halves, [x], x))


def test_random_islands_draw_as_torch_does() -> None:
    def pick(x: torch.Tensor) -> torch.Tensor:
        chosen = torch.multinomial(x.detach().softmax(-1), 2)
        return x.exp().gather(1, chosen) * torch.randperm(3).unsqueeze(1)

    torch.manual_seed(4)
    x = torch.randn(3, 5, requires_grad=True)
    step = compile_backward(pick, (x,), verify=True)
    torch.manual_seed(5)
    ours = gradients(step, [x], x)
    torch.manual_seed(5)
    assert_same(ours, gradients(pick, [x], x))


@pytest.mark.long
def test_a_checkpointed_block_with_an_island() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x.tanh(), x.sin()).exp()

    def run(x: torch.Tensor) -> torch.Tensor:
        blocked: torch.Tensor = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return blocked.sin()

    torch.manual_seed(2)
    x = torch.randn(3, 2, requires_grad=True)
    assert_same(gradients(compile_backward(run, (x,)), [x], x), gradients(run, [x], x))


def test_torch_compile_and_enable_use_islands() -> None:
    def distance(x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x.sin(), x.cos()).sum()

    torch.manual_seed(3)
    x = torch.randn(3, 2, requires_grad=True)
    expected = gradients(distance, [x], x)
    assert_same(gradients(torch.compile(distance, backend="retrograd"), [x], x), expected)
    known = len(retrograd.explain_recompiles())
    with retrograd.enable(cache=False), pytest.warns(retrograd.EagerIslandWarning) as caught:
        for _ in range(2):
            assert_same(gradients(distance, [x], x), expected)
    # The line that runs the backward, in `gradients`.
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    (entry,) = retrograd.explain_recompiles()[known:]
    assert entry.outcome == "compiled"
    assert any("runs in torch: aten._cdist_backward" in reason for reason in entry.reasons)


def test_alignments_run_in_torch() -> None:
    labels = torch.tensor([3, 2])

    def align(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(2), torch.tensor([[1, 2, 2], [3, 1, 0]]), torch.tensor([6, 5]), labels)

    torch.manual_seed(5)
    scores = torch.randn(6, 2, 4, requires_grad=True)
    step = retrograd.compile_backward(align, (scores,))
    assert_same(gradients(step, [scores], scores), gradients(align, [scores], scores))
    islands = step.explain().to_dict()["islands"]
    assert [i["what"].partition(" ")[0] for i in islands] == ["retrograd.ctc_loss", "retrograd.ctc_loss_backward"]
    with pytest.raises(retrograd.CaptureError, match=r"ctc_loss.* PyTorch has a kernel for it"):
        retrograd.compile_backward(align, (scores,), fallback="error")


class Small(torch.nn.Module):
    """What nobody trains much through, of small matrices and a special function: each runs in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.mix(x)
        gram = hidden.T @ hidden + torch.eye(3)
        lower = torch.linalg.cholesky(gram)
        solved = torch.cholesky_solve(x[:3], lower) + torch.linalg.solve(gram, x[:3])
        q, r = torch.linalg.qr(hidden)
        image = hidden.reshape(1, 1, 4, 6)
        pooled = F.fractional_max_pool2d(image, 2, output_size=(2, 2), _random_samples=torch.full((1, 1, 2), 0.4))
        smaller = F.interpolate(image, (2, 3), mode="bilinear", antialias=True)
        special = torch.special.i0e(hidden) + torch.polygamma(1, hidden.square() + 1) + torch.erfinv(hidden.tanh())
        parts = torch.segment_reduce(hidden, "mean", lengths=torch.tensor([3, 5]))
        ends = torch.logdet(gram) + torch.linalg.inv(gram).sum() + torch.frexp(hidden)[0].sum()
        return solved, q @ r.square(), pooled, smaller, special, parts, ends


@pytest.mark.long
def test_small_matrices_and_special_functions_run_in_torch() -> None:
    torch.manual_seed(7)
    model, x = Small(), torch.randn(8, 3)
    step = retrograd.compile_backward(model, (x,))
    expected = gradients(model, [*model.parameters()], x)
    assert_same(gradients(step, [*model.parameters()], x), expected)
    found = {op for i in step.explain().to_dict()["islands"] for op in i["what"].partition(" (")[0].split(", ")}
    named = (
        "linalg_cholesky_ex _linalg_solve_ex linalg_qr linalg_matrix_exp special_i0e polygamma erfinv segment_reduce"
    )
    assert found >= {f"aten.{name}" for name in named.split()}


class Chosen(torch.nn.Module):
    """Sorted rows, middles of them, bags and uneven pools: PyTorch has a kernel for each."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(6, 6)
        self.tables = torch.nn.ModuleList(nn.EmbeddingBag(5, 6, mode=m, padding_idx=2) for m in ("sum", "mean", "max"))
        self.sums = nn.EmbeddingBag(5, 6, mode="sum")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, weights = self.mix(x), torch.arange(6.0)
        ordered = hidden.sort(-1, descending=True).values * weights + hidden.sort(dim=0, stable=True).values
        middles = hidden.median(0).values + hidden.nanmedian(0).values + hidden.kthvalue(2, 0).values + hidden.median()
        often = hidden.round().mode(0).values + hidden.nanmedian()
        indices, offsets = torch.tensor([1, 2, 4, 2, 2, 3, 0, 1]), torch.tensor([0, 2, 2, 3])
        bags = [table(indices, offsets) for table in self.tables]
        bags.append(self.sums(indices, offsets, per_sample_weights=hidden[:, 0]))
        planes = hidden.reshape(1, 2, 4, 6)
        pools = F.adaptive_max_pool2d(planes, (3, 4)).sum((2, 3)), F.adaptive_max_pool3d(planes[None], (1, 3, 4)).sum()
        return ordered, middles, often, *bags, *pools


def test_what_is_chosen_among_many_runs_in_torch() -> None:
    torch.manual_seed(8)
    model, x = Chosen(), torch.randn(8, 6)
    step = retrograd.compile_backward(model, (x,))
    assert_same(gradients(step, [*model.parameters()], x), gradients(model, [*model.parameters()], x))
    found = {op for i in step.explain().to_dict()["islands"] for op in i["what"].partition(" (")[0].split(", ")}
    named = "median nanmedian kthvalue mode _embedding_bag adaptive_max_pool2d adaptive_max_pool3d"
    assert found >= {f"aten.{name}" for name in named.split()}


def test_backwards_that_differ_inside_of_an_island_are_two_programs() -> None:
    torch.manual_seed(4)
    x, y = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    known = len(retrograd.explain_recompiles())
    for norm in (1.5, 3.0):

        def distance(x: torch.Tensor, norm: float = norm) -> torch.Tensor:
            return torch.cdist(x.sin(), y, p=norm).sum()

        expected = gradients(distance, [x], x)
        with retrograd.enable():
            for _ in range(2):
                assert_same(gradients(distance, [x], x), expected)
    assert [entry.outcome for entry in retrograd.explain_recompiles()[known:]] == ["compiled", "compiled"]


def test_an_op_that_no_flags_compile_runs_in_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """iree-compile refuses every module with an arctangent in it, whatever its flags: among three ops it is found."""
    run = executable._run_compiler

    def refuse_arctangents(target: Target, arguments: Sequence[str], *others: Any) -> ToolResult:
        source = Path(arguments[0])
        if "math.atan" in source.read_text(encoding="utf-8"):
            return ToolResult(1, f"{source}:1:1: error: no arctangents here\n")
        return run(target, arguments, *others)

    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.setattr(executable, "_run_compiler", refuse_arctangents)
    x = torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2).atan() @ x.t()

    step = compile_backward(function, (x,))
    (island,) = step.explain().to_dict()["islands"]
    assert "atan" in island["what"]
    assert "no arctangents here" in island["what"]
    for ours, eager in zip(gradients(step, [x], x), gradients(function, [x], x), strict=True):
        torch.testing.assert_close(ours, eager)
