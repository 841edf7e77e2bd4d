# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The models whose backward passes are timed: one of each common kind, 5 to 100 ms in eager PyTorch on two cores."""

from __future__ import annotations

from models import MODELS, Entry

_TIMED = ("linear_regression", "mlp", "cnn", "lstm", "transformer", "language_model", "several_outputs")

SUITE: dict[str, Entry] = {name: MODELS[name] for name in _TIMED}
