# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models of every common kind, written out here: what is benchmarked, and what the tests train.

``MODELS[name].make("test" | "bench")`` gives a model, its arguments and its loss; see :class:`models.case.Entry`.
"""

from __future__ import annotations

from models import (
    bert,
    cnn,
    contrast,
    diffusion,
    gpt,
    graph_convolution,
    llama,
    lstm,
    mixture,
    mlp,
    mobilenet,
    pinn,
    resnet,
    t5,
    transformer,
    unet,
    vae,
    vit,
    wavenet,
)
from models.case import SIZES, Case, Entry, Size

__all__ = ["MODELS", "SIZES", "Case", "Entry", "Size"]

MODELS: dict[str, Entry] = {
    entry.name: entry
    for module in (
        mlp,
        cnn,
        resnet,
        mobilenet,
        unet,
        vit,
        transformer,
        gpt,
        llama,
        mixture,
        t5,
        bert,
        lstm,
        wavenet,
        graph_convolution,
        diffusion,
        vae,
        pinn,
        contrast,
    )
    for entry in module.ENTRIES
}
