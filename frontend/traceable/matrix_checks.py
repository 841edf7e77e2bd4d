# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks of matrices, which raise in eager where one is singular or not positive definite.

``torch.linalg.inv`` and its like are traced as an op that says in a number per matrix (``info``) whether it had a
result, and a check of that number. An executable raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

CHECK = torch.ops.aten._linalg_check_errors.default
torch.fx.node.has_side_effect(CHECK)


@contextmanager
def plain_checks() -> Iterator[None]:
    """While this is open, checks are traced as ops like others, not in a chain of tokens."""
    effect = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    with mock.patch.object(effect, "_effect", None):
        yield
