# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What PyTorch's layers ask of a tensor's contents, answered without them; what anybody else asks is not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.python.value_questions import AnsweredQuestions
from retrograd.frontend.traceable.portable_ops import PortableAttention

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


def make_encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)


def check_in_a_trace(encoder: Callable[..., Tensor], x: Tensor, **masks: Tensor) -> None:
    """The same results, and without the masks' values, as in a trace, some result at all."""
    with AnsweredQuestions():
        found = encoder(x, **masks)
    torch.testing.assert_close(found, encoder(x, **masks))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, AnsweredQuestions():
        assert encoder(mode.from_tensor(x), **{k: mode.from_tensor(m) for k, m in masks.items()}).shape == x.shape


def test_masks_are_not_asked_if_they_are_causal() -> None:
    encoder, x = make_encoder(), torch.randn(2, 5, 8)
    check_in_a_trace(encoder, x, mask=CAUSAL)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(DataDependentOutputException):
        encoder(mode.from_tensor(x), mask=mode.from_tensor(CAUSAL))


def test_all_masks_of_a_transformer() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    masks = {f"{name}_mask": CAUSAL for name in ("src", "tgt", "memory")}
    paddings = {f"{name}_key_padding_mask": PADDING.float() * -1e9 for name in ("src", "tgt", "memory")}
    x = torch.randn(2, 5, 8)
    check_in_a_trace(lambda x, **masks: model(x, x, **masks), x, **masks, **paddings)


def test_padding_is_not_asked_where_it_is() -> None:
    encoder, x = make_encoder().eval(), torch.randn(2, 5, 8)
    check_in_a_trace(encoder, x, src_key_padding_mask=PADDING)
    encoder.requires_grad_(False)
    assert encoder(x, src_key_padding_mask=PADDING)[PADDING].count_nonzero() == 0
    with AnsweredQuestions(), pytest.raises(CaptureError, match="gives zeros where src_key_padding_mask"):
        encoder(x, src_key_padding_mask=PADDING)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_averages_over_all_batches(affine: bool) -> None:
    eager = nn.BatchNorm2d(3, momentum=None, affine=affine).double()
    ours = deepcopy(eager)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
        with AnsweredQuestions():
            torch.testing.assert_close(ours(x), eager(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict(), rtol=1e-12, atol=1e-12)
    with AnsweredQuestions():
        torch.testing.assert_close(ours.eval()(x), eager.eval()(x))


@pytest.mark.parametrize("options", [{"momentum": 0.3}, {"momentum": None, "track_running_stats": False}])
def test_other_batch_norms_are_let_alone(options: dict[str, float | bool | None]) -> None:
    eager = nn.BatchNorm1d(3, **options)  # type: ignore[arg-type]
    ours, x = deepcopy(eager), torch.randn(4, 3)
    with AnsweredQuestions():
        assert torch.equal(ours(x), eager(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), eager.buffers(), strict=True))


class Asking(nn.BatchNorm1d):
    """A batch norm that asks questions of its own."""

    def _check_input_dim(self, input: Tensor) -> None:
        super()._check_input_dim(input)
        self.asked = bool(input.sum() > 0), float(input.sum())


def test_what_a_model_asks_is_not_answered() -> None:
    layer = Asking(2, momentum=None)
    with AnsweredQuestions():
        assert float(torch.tensor(3.0)) == 3.0 and bool(torch.tensor(True)) and torch.tensor(2).item() == 2
        layer(torch.full((2, 2), 2.0))
    assert layer.asked == (True, 8.0)


def test_other_threads_are_answered_by_pytorch() -> None:
    is_causal = nn.modules.transformer._detect_is_causal_mask
    with AnsweredQuestions(), ThreadPoolExecutor(1) as other:
        assert not is_causal(CAUSAL)
        assert other.submit(is_causal, CAUSAL).result()
    assert is_causal(CAUSAL)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5)])
@pytest.mark.parametrize("weighted", ["", "f", "a", "fa"])
@pytest.mark.parametrize("correction", [0, 1, 2])
def test_covariances(shape: tuple[int, ...], weighted: str, correction: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = {"fweights": torch.tensor([1, 3, 0, 2, 1])} if "f" in weighted else {}
    weights |= {"aweights": torch.rand(5, dtype=torch.float64, requires_grad=True)} if "a" in weighted else {}
    leaves = [t for t in (x, *weights.values()) if t.requires_grad]

    def run() -> tuple[Tensor, ...]:
        found = x.cov(correction=correction, **weights)
        return found, *torch.autograd.grad((found * torch.arange(1.0, 1 + found.numel()).view_as(found)).sum(), leaves)

    expected = run()
    with AnsweredQuestions():
        torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, AnsweredQuestions():
        fakes = {name: mode.from_tensor(t) for name, t in weights.items()}
        assert mode.from_tensor(x).cov(correction=correction, **fakes).shape == expected[0].shape


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (2, 1)])
def test_correlations(shape: tuple[int, ...]) -> None:
    """Of a single observation they are NaN."""
    x = torch.randn(shape, dtype=torch.float64)
    with AnsweredQuestions():
        found = torch.corrcoef(x)
    torch.testing.assert_close(found, torch.corrcoef(x), rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_mask_is_applied_where_the_query_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager leaves out a causal one, wherever it is."""
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, device="meta")
    x, seen = torch.randn(2, 5, 8, device="meta"), list[Any]()
    attend: Any = F.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[3] if len(args) > 3 else kwargs.get("attn_mask"))
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    with PortableAttention(), AnsweredQuestions():
        assert layer(x, x, tgt_mask=CAUSAL).shape == x.shape
    assert [mask.device.type for mask in seen if mask is not None] == ["meta"]
