# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every model of the registry trained in bfloat16 and under autocast: its gradients by the rule of narrow_gradients.

`make test-precisions` runs them, and prints how far from float32 each model is.
"""

from __future__ import annotations

import pytest
from models import MODELS
from models.precision import Precision
from narrow_gradients import train

STEPS = 5


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_in_a_narrow_precision(name: str, precision: Precision) -> None:
    distance = train(name, precision, STEPS)
    print(f"\n{name:20} {precision:8} {distance.ours:.4f} from float32, eager {distance.eager:.4f}")
    distance.check()
