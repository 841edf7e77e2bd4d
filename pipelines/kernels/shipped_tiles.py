# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles of products and attention at sizes that people train, as measurements found them to be the fastest.

By architecture and question, where they win by more than noise over those that the estimates in ``tiles.py`` choose.
"""

from __future__ import annotations

from collections.abc import Mapping

SHIPPED: Mapping[str, Mapping[str, str]] = {
    "sm_90": {
        "attention key_gradients of 4x24x1024x128 and 8x1024 causal bf16": "32x128 8 warps 3 stages",
        "attention key_gradients of 8x12x1024x64 and 12x1024 causal bf16": "32x64 4 warps 3 stages",
        "attention key_gradients of 8x12x512x64 and 12x512 causal bf16": "32x64 4 warps 3 stages",
    },
}
