# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Architectures of timm, as it builds them by name, with random parameters and small images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from corpus_case import Program, Sample, generator, mean_square
from torchvision_stand_in import standing_in

with standing_in():
    import timm
    from timm.models.convmixer import ConvMixer
    from timm.models.metaformer import MetaFormer
    from timm.models.mlp_mixer import MlpMixer

# Norms over fewer than so many images are ill-conditioned where these have come down to a pixel.
BATCH, CLASSES = 4, 10


def _build(make: Callable[..., torch.nn.Module], image: int, settings: dict[str, Any]) -> Sample:
    built = make(num_classes=CLASSES, **settings)

    def inputs(turn: int) -> dict[str, Any]:
        return {"x": torch.randn(BATCH, 3, image, image, generator=generator(turn))}

    return Sample(built.train(), inputs, mean_square)


def create(model: str, **settings: Any) -> torch.nn.Module:
    """A model by the name that timm has for it, for as many classes as the others."""
    made: torch.nn.Module = timm.create_model(model, pretrained=False, num_classes=CLASSES, **settings)
    return made


def entry(model: str, image: int = 64, *, name: str = "", **settings: Any) -> Program:
    """A program by the name that timm has for it; ``settings`` take the place of its own."""
    make = functools.partial(timm.create_model, model, pretrained=False)
    return Program(f"timm {name or model}", "timm", functools.partial(_build, make, image, settings))


def of_class(make: Callable[..., torch.nn.Module], image: int, **settings: Any) -> Program:
    """A program by its class, whose named models take no other sizes than their own."""
    return Program(f"timm {make.__name__}", "timm", functools.partial(_build, make, image, settings))


PROGRAMS = [
    entry("resnet18", layers=(1, 1, 1, 1), name="resnet10"),
    entry("resnet50"),
    entry("efficientnet_b0"),
    entry("mobilenetv3_small_050"),
    entry("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    entry("vit_tiny_patch16_224", 32, img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3),
    entry(
        "swin_tiny_patch4_window7_224",
        32,
        img_size=32,
        window_size=4,
        depths=(2, 2),
        embed_dim=24,
        num_heads=(2, 4),
        drop_path_rate=0.0,
    ),
    entry("regnetx_002"),
    entry("densenet121", block_config=(2, 2, 2, 2), growth_rate=8, name="densenet of 8 layers"),
    entry("cait_xxs24_224", 32, img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=4),
    entry("beit_base_patch16_224", 32, img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=4),
    entry("eva02_tiny_patch14_224", 32, img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=4),
    entry("levit_128s", 32, img_size=32, embed_dim=(16, 32, 48), num_heads=(2, 2, 2), depth=(1, 1, 1), key_dim=8),
    entry("mobilevit_xxs"),
    entry("nfnet_l0", 32, depths=(1, 1, 1, 1), name="nfnet of 4 blocks"),
    entry("res2net50_26w_4s", layers=(1, 1, 1, 1), name="res2net of 4 blocks"),
    of_class(MlpMixer, 32, img_size=32, patch_size=8, num_blocks=2, embed_dim=32),
    of_class(ConvMixer, 32, dim=32, depth=2, patch_size=4),
    of_class(MetaFormer, 64, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    entry("xcit_nano_12_p8_224", 32, img_size=32, depth=2, embed_dim=32, num_heads=4),
]
