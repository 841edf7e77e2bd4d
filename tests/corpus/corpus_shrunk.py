# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Makes the configuration of any architecture of transformers small, by what its sizes are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from corpus_configured import CLASSES, IMAGE, WORDS, still

# The sizes that a configuration may have, whatever architecture it is of; one that has no such attribute gets none.
_WIDTHS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("decoder_hidden_size", "encoder_hidden_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "decoder_d_ff"), 64),
    **dict.fromkeys(("d_kv", "head_dim", "attention_head_size", "rotary_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "num_mel_bins"), 16),
    **dict.fromkeys(("state_size", "time_step_rank", "mamba_d_state"), 4),
    "projection_dim": 32,
}
_COUNTS: dict[str, Any] = {
    **dict.fromkeys(("n_layer", "num_hidden_layers", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "decoder_num_layers", "num_feat_extract_layers"), 2),
    **dict.fromkeys(("n_head", "num_attention_heads", "num_heads", "n_heads", "decoder_num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "index_n_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_topk"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "ffn_layers"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_conv": 2,
    "moe_layer_start_index": 0,
}
_INPUTS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), WORDS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "patch_size", "num_conv_pos_embeddings"), 8),
    "num_conv_pos_embedding_groups": 4,
    "type_vocab_size": 2,
    "image_size": IMAGE,
    "max_length": 32,
    "num_labels": CLASSES,
    "conv_dim": (16, 16),
    "conv_kernel": (5, 3),
    "conv_stride": (3, 2),
}
# Special tokens are beyond a small vocabulary by default, or are none where a model asks for one.
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SMALL: Mapping[str, Any] = {**_WIDTHS, **_COUNTS, **_INPUTS, **_TOKENS}
# Configurations within configurations: of a text model within one for images and texts, say.
_DEPTH = 3
# The parameters of a model that a step still takes less than a second of.
MOST_PARAMETERS = 100_000_000


class NoProgramError(Exception):
    """Eager itself does not run the model that a configuration was shrunk to, or it is not small."""


def shrink(kind: type[Any]) -> Any:
    """A configuration of this class, of small sizes, whose model drops nothing at random and keeps no cache."""
    config = kind()
    _shrink(config, _DEPTH)
    if isinstance(stages := getattr(config, "hidden_sizes", None), list | tuple):
        config.hidden_sizes = [16 * 2 ** min(stage, 2) for stage in range(len(stages))]
    if isinstance(depths := getattr(config, "depths", None), list | tuple):
        config.depths = [1] * len(depths)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return still(config)


def _shrink(config: Any, depth: int) -> None:
    for name, size in SMALL.items():
        if is_to_shrink(name, getattr(config, name, None), size):
            try:
                setattr(config, name, size)
            except (AttributeError, NotImplementedError, TypeError, ValueError):
                # A property that is computed from others, or checked against them: they are smaller, or it stays.
                continue
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig) and depth:
            _shrink(value, depth - 1)
        elif name == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            config.layer_types = (kinds + kinds)[:2]


def is_to_shrink(name: str, value: Any, size: Any) -> bool:
    """Whether an attribute that is ``value`` becomes ``size``: it is there, and a number or numbers as that is."""
    if value is None:
        return name in _TOKENS
    return isinstance(value, list | tuple) == isinstance(size, list | tuple)


def image_size_of(config: Any) -> int:
    """The side of an image that a model takes: that of its configuration, where it is small."""
    side = getattr(config, "image_size", IMAGE)
    side = side[0] if isinstance(side, list | tuple) and side else side
    return side if isinstance(side, int) and side <= 2 * IMAGE else IMAGE


def check_small(model: torch.nn.Module) -> torch.nn.Module:
    """The model.

    Raises:
        NoProgramError: it has too many parameters.
    """
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS:
        raise NoProgramError(f"{count} parameters are too many")
    return model


def without_drops(model: torch.nn.Module) -> torch.nn.Module:
    """The model, which drops nothing at random any more."""
    for module in model.modules():
        for name in ("p", "drop_prob"):
            if type(module).__name__.startswith(("Drop", "StochasticDepth")) and hasattr(module, name):
                setattr(module, name, 0.0)
    return model
