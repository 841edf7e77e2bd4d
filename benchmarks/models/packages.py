# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models of transformers and torchvision as these packages have them, with random parameters, at sizes people train.

Dropout and whatever else draws random numbers stays as the packages' defaults have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, identity


class Called(nn.Module):
    """``model`` called with positional arguments that it knows by ``names``; gives its loss, or the cross entropy of
    what it gives with the last argument."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] | None) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *args: Tensor) -> Tensor:
        if self.names is None:
            *inputs, labels = args
            outputs = self.model(*inputs)
            logits = outputs["out"] if isinstance(outputs, Mapping) else outputs
            return F.cross_entropy(logits.float(), labels)
        return self.model(**dict(zip(self.names, args, strict=True))).loss.float()  # type: ignore[no-any-return]


def _transformer(kind: str, settings: Mapping[str, Any], **inputs: Tensor) -> Case:
    import transformers

    config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('Model').removesuffix('LMHead')}Config")
    model = getattr(transformers, kind)(config(**settings)).train()
    return Case(Called(model, tuple(inputs)), tuple(inputs.values()), identity)


def _vision(name: str, batch: int, *size: int, family: str = "", classes: int = 1000, **settings: Any) -> Case:
    import torchvision

    models = getattr(torchvision.models, family) if family else torchvision.models
    model = getattr(models, name)(weights=None, **settings).train()
    places = size if family == "segmentation" else ()
    return Case(
        Called(model, None),
        (torch.randn(batch, 3, *size), torch.randint(0, classes, (batch, *places))),
        identity,
    )


def _words(batch: int, tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, tokens))


def gpt2() -> Case:
    text = _words(8, 512, 50257)
    return _transformer("GPT2LMHeadModel", {"use_cache": False}, input_ids=text, labels=text)


def bert() -> Case:
    text = _words(32, 128, 30522)
    seen = torch.arange(128) < torch.linspace(128, 64, 32).long()[:, None]
    return _transformer("BertForMaskedLM", {}, input_ids=text, attention_mask=seen.long(), labels=text)


def vit() -> Case:
    settings = {"num_labels": 1000}
    pixels, labels = torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))
    return _transformer("ViTForImageClassification", settings, pixel_values=pixels, labels=labels)


def swin() -> Case:
    settings = {"num_labels": 1000}
    pixels, labels = torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,))
    return _transformer("SwinForImageClassification", settings, pixel_values=pixels, labels=labels)


def segformer() -> Case:
    settings = {"num_labels": 150}
    pixels, labels = torch.randn(8, 3, 512, 512), torch.randint(0, 150, (8, 512, 512))
    return _transformer("SegformerForSemanticSegmentation", settings, pixel_values=pixels, labels=labels)


def t5() -> Case:
    settings = {"d_model": 768, "d_ff": 3072, "num_layers": 6, "num_heads": 12, "use_cache": False}
    settings |= {"decoder_start_token_id": 0}
    source, target = _words(8, 512, 32000), _words(8, 128, 32000)
    return _transformer("T5ForConditionalGeneration", settings, input_ids=source, labels=target)


def bart() -> Case:
    settings = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12}
    settings |= {"decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "use_cache": False}
    source, target = _words(8, 512, 50265), _words(8, 128, 50265)
    return _transformer("BartForConditionalGeneration", settings, input_ids=source, labels=target)


def whisper() -> Case:
    settings = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8}
    settings |= {"decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "use_cache": False}
    spectrum, text = torch.randn(8, 80, 3000), _words(8, 128, 50000)
    return _transformer("WhisperForConditionalGeneration", settings, input_features=spectrum, labels=text)


def wav2vec2() -> Case:
    settings = {"num_labels": 10, "layerdrop": 0.0, "apply_spec_augment": False}
    sound, labels = torch.randn(8, 80000), torch.randint(0, 10, (8,))
    return _transformer("Wav2Vec2ForSequenceClassification", settings, input_values=sound, labels=labels)


def qwen() -> Case:
    settings = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 12, "num_attention_heads": 14}
    settings |= {"num_key_value_heads": 2, "vocab_size": 151936, "use_cache": False, "tie_word_embeddings": True}
    text = _words(4, 1024, 151936)
    return _transformer("Qwen2ForCausalLM", settings, input_ids=text, labels=text)


class Recurrent(nn.Module):
    """Words through an LSTM, to the words after them."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(text[:, :-1]))
        return F.cross_entropy(self.head(states).flatten(0, 1).float(), text[:, 1:].flatten())


PACKAGES: dict[str, Callable[[], Case]] = {
    "hf-gpt2": gpt2,
    "hf-bert": bert,
    "hf-vit": vit,
    "hf-swin": swin,
    "hf-segformer": segformer,
    "hf-t5": t5,
    "hf-bart": bart,
    "hf-whisper": whisper,
    "hf-wav2vec2": wav2vec2,
    "hf-qwen2": qwen,
    "tv-convnext": lambda: _vision("convnext_tiny", 32, 224, 224),
    "tv-efficientnet": lambda: _vision("efficientnet_b0", 64, 224, 224),
    "tv-mobilenet": lambda: _vision("mobilenet_v3_large", 64, 224, 224),
    "tv-densenet": lambda: _vision("densenet121", 32, 224, 224),
    "tv-deeplab": lambda: _vision(
        "deeplabv3_resnet50", 8, 256, 256, family="segmentation", classes=21, weights_backbone=None
    ),
    "tv-r3d": lambda: _vision("r3d_18", 8, 16, 112, 112, family="video", classes=400),
    "lstm": lambda: Case(Recurrent(10000, 512, 2), (_words(32, 129, 10000),), identity),
}
"""By name, ``hf-`` of transformers, ``tv-`` of torchvision."""
PACKAGE_RUNS = (
    *("hf-gpt2:autocast", "hf-gpt2:f32", "hf-bert:autocast", "hf-vit:autocast", "hf-swin:autocast", "hf-t5:bf16"),
    *("hf-bart:f32", "hf-whisper:bf16", "hf-wav2vec2:autocast", "hf-qwen2:bf16", "hf-segformer:autocast"),
    *("tv-convnext:autocast", "tv-efficientnet:autocast", "tv-mobilenet:f32", "tv-densenet:autocast"),
    *("tv-deeplab:autocast", "tv-r3d:autocast", "lstm:f32"),
)
