# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The model's parameters and buffers while its backward is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn.utils import stateless


@contextlib.contextmanager
def lasting_state(model: torch.nn.Module, runs_python: Callable[[], bool]) -> Iterator[None]:
    """Leave a trace's tensors in the place of the model's parameters and buffers when the forward is done, if
    ``runs_python`` says that Python of the user's runs in the backward: a custom function that calls the model once
    more, and differentiates it (an adjoint), or a hook. PyTorch puts the model's own back in between. To the trace
    these would be constants, and no gradient would come to the parameters."""
    reparametrize = stateless._reparametrize_module
    with contextlib.ExitStack() as late:

        @contextlib.contextmanager
        def lasting(module: torch.nn.Module, tensors: Mapping[str, Any], **options: Any) -> Iterator[None]:
            late.close()
            with contextlib.ExitStack() as now:
                now.enter_context(reparametrize(module, dict(tensors), **options))
                yield
                if module is model and runs_python():
                    late.push(now.pop_all())

        with mock.patch.object(stateless, "_reparametrize_module", lasting):
            yield
