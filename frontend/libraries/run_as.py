# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Says which function an island runs in the place of a traced op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter

from retrograd.frontend.layers import cudnn_layers
from retrograd.frontend.layers.biased_attention import BIASED_ATTENTION, BIASED_ATTENTION_BACKWARD
from retrograd.frontend.layers.lstm_layers import LSTM_LAYER, LSTM_LAYER_BACKWARD, lstm_layer, lstm_layer_backward
from retrograd.frontend.libraries.attention import (
    attention,
    attention_backward,
    biased_attention,
    biased_attention_backward,
    stacked,
)

aten, prims = torch.ops.aten, torch.ops.prims


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another type, as ``prims.convert_element_type`` gives it."""
    return tensor.to(dtype, copy=True)


RUN_AS: Mapping[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    BIASED_ATTENTION: biased_attention,
    BIASED_ATTENTION_BACKWARD: biased_attention_backward,
    aten.stack.default: stacked,
    # As an op of Python's, each takes 50 us more.
    LSTM_LAYER: lstm_layer,
    LSTM_LAYER_BACKWARD: lstm_layer_backward,
    cudnn_layers.CUDNN_LSTM: cudnn_layers.lstm_layer,
    cudnn_layers.CUDNN_LSTM_BACKWARD: cudnn_layers.lstm_layer_backward,
    cudnn_layers.CUDNN_RNN: cudnn_layers.rnn_layer,
    cudnn_layers.CUDNN_RNN_BACKWARD: cudnn_layers.rnn_layer_backward,
    # PyTorch runs these in Python, and makes a class at each call: 0.15 ms each, where the op of the same arguments
    # takes microseconds.
    prims.squeeze.default: aten.squeeze.dims,
    prims.transpose.default: aten.permute.default,
    prims.convert_element_type.default: converted,
}
"""Maps ops to the functions that an island runs in their place."""


class LibraryInterpreter(Interpreter):
    """Runs a graph on the device that its tensors are on, whichever its ops were traced for."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an op as an island would."""
        return super().call_function(RUN_AS.get(target, target), args, kwargs)
