# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Complex numbers are refused by name and place, wherever they are in a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retrograd.frontend.capture import CaptureError, capture_joint


def inside(x: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fft(x)
    return spectrum.abs()


def result(x: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fft(x)
    return spectrum


@pytest.mark.parametrize(
    ("model", "message"), [(inside, r"the op .* gives complex"), (result, "result of the model is")]
)
def test_complex_is_refused(model: Callable[[Tensor], Tensor], message: str) -> None:
    with contextlib.ExitStack() as stack, pytest.raises(CaptureError, match=message) as caught:
        capture_joint(stack, model, (torch.randn(8, requires_grad=True),))
    assert "real and imaginary parts" in str(caught.value)
    assert message.startswith("result") or "test_element_types.py" in str(caught.value)
