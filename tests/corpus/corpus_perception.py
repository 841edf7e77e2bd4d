# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models of transformers that see and hear, alone or beside text, and those of series of numbers."""

from __future__ import annotations

import functools
from typing import Any

from corpus_case import mean_square
from corpus_configured import (
    CLASSES,
    IMAGE,
    captioned,
    entry,
    episode,
    filmed,
    forecast,
    images,
    laid_out,
    measured,
    only,
    pictured_question,
    segmented,
    spectrum,
    spoken,
    without,
)
from corpus_language import DECODER, SMALL

SEEN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": CLASSES,
}

SWIN: dict[str, Any] = {
    "image_size": IMAGE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": CLASSES,
}
STAGES: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": CLASSES}
SEGFORMER: dict[str, Any] = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 16, 32, 32],
    "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 32,
    "num_labels": CLASSES,
}
MOBILE_VIT: dict[str, Any] = {
    "image_size": 64,
    "hidden_sizes": [24, 32, 40],
    "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 40],
    "num_labels": CLASSES,
}
POOL: dict[str, Any] = {
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "num_encoder_blocks": 2,
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "padding": [2, 1],
    "num_labels": CLASSES,
}
PVT: dict[str, Any] = {
    "image_size": IMAGE,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "sequence_reduction_ratios": [4, 2, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
    "patch_sizes": [4, 2, 2, 2],
    "num_labels": CLASSES,
}
MASKED: dict[str, Any] = {
    **{name: value for name, value in SEEN.items() if name != "num_labels"},
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
DPT: dict[str, Any] = {
    **SEEN,
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 16, 16, 16],
    "fusion_hidden_size": 16,
    "is_hybrid": False,
}
WAVES: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "max_position_embeddings"},
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
SPECTRUM: dict[str, Any] = {
    **{name: value for name, value in SEEN.items() if name != "image_size"},
    "max_length": 24,
    "num_mel_bins": 16,
    "frequency_stride": 8,
    "time_stride": 8,
}
PAIRED: dict[str, Any] = {
    "text_config": {**without(DECODER, "num_labels", "num_key_value_heads"), "projection_dim": 16},
    "vision_config": {**without(SEEN, "num_labels"), "projection_dim": 16},
}
ACTING: dict[str, Any] = {
    "state_dim": 4,
    "act_dim": 2,
    "hidden_size": 32,
    "max_ep_len": 16,
    "n_layer": 2,
    "n_head": 4,
}
PATCHES: dict[str, Any] = {
    "num_input_channels": 2,
    "context_length": 32,
    "prediction_length": 8,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 32,
}
SERIES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}

DETECTION: dict[str, Any] = {
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_queries": 4,
}

VISION = [
    entry("ViTForImageClassification", "ViTConfig", images, **SEEN),
    entry("DeiTForImageClassification", "DeiTConfig", images, **SEEN),
    entry("BeitForImageClassification", "BeitConfig", images, **SEEN, use_relative_position_bias=True),
    entry("Dinov2ForImageClassification", "Dinov2Config", images, **SEEN),
    entry("SwinForImageClassification", "SwinConfig", images, **SWIN),
    entry("Swinv2ForImageClassification", "Swinv2Config", images, **SWIN),
    entry("ConvNextForImageClassification", "ConvNextConfig", images, **STAGES, num_stages=2),
    entry("ConvNextV2ForImageClassification", "ConvNextV2Config", images, **STAGES, num_stages=2),
    entry("ResNetForImageClassification", "ResNetConfig", images, **STAGES, embedding_size=16, layer_type="basic"),
    entry("RegNetForImageClassification", "RegNetConfig", images, **STAGES, embedding_size=16, groups_width=8),
    entry("SegformerForSemanticSegmentation", "SegformerConfig", functools.partial(segmented, size=64), **SEGFORMER),
    entry("MobileNetV2ForImageClassification", "MobileNetV2Config", images, depth_multiplier=0.35, num_labels=CLASSES),
    entry("MobileViTForImageClassification", "MobileViTConfig", functools.partial(images, size=64), **MOBILE_VIT),
    entry("PoolFormerForImageClassification", "PoolFormerConfig", images, **POOL),
    entry("PvtForImageClassification", "PvtConfig", images, **PVT),
    entry("ViTMAEForPreTraining", "ViTMAEConfig", only(images, "pixel_values"), **MASKED, random=True),
    entry("DPTForSemanticSegmentation", "DPTConfig", segmented, **DPT),
    entry("DetrForObjectDetection", "DetrConfig", only(images, "pixel_values"), loss=mean_square, **DETECTION),
    entry(
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        filmed,
        **{**SEEN, "image_size": 16},
        num_frames=4,
        tubelet_size=2,
    ),
]
SOUND = [
    entry("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", spoken, **WAVES),
    entry("HubertForSequenceClassification", "HubertConfig", spoken, **WAVES),
    entry("ASTForAudioClassification", "ASTConfig", spectrum, **SPECTRUM),
]
MIXED = [
    entry("CLIPModel", "CLIPConfig", captioned, **PAIRED, projection_dim=16),
    entry("SiglipModel", "SiglipConfig", only(captioned, "input_ids", "pixel_values", "return_loss"), **PAIRED),
    entry("ViltForQuestionAnswering", "ViltConfig", pictured_question, **SMALL, image_size=IMAGE, patch_size=8),
    entry("LayoutLMForTokenClassification", "LayoutLMConfig", laid_out, **SMALL, max_2d_position_embeddings=64),
    entry("DecisionTransformerModel", "DecisionTransformerConfig", episode, loss=mean_square, **ACTING),
    entry("PatchTSTForPrediction", "PatchTSTConfig", measured, **PATCHES),
    entry("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", forecast, **SERIES),
]
PROGRAMS = [*VISION, *SOUND, *MIXED]
