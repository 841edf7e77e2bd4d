# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Language models of transformers: encoders, decoders, and both together."""

from __future__ import annotations

from typing import Any

from corpus_configured import (
    CLASSES,
    WORDS,
    answered,
    causal,
    classified,
    entry,
    heard,
    only,
    padded,
    replaced,
    translated,
)

SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
}
# Special tokens are beyond a small vocabulary by default.
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER: dict[str, Any] = {**SMALL, **TOKENS, "num_key_value_heads": 2}
# By the names that GPT-2 has for them.
OLD: dict[str, Any] = {"vocab_size": WORDS, "n_layer": 2, "n_head": 4, **TOKENS}
LAYERS: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, **TOKENS}
HALVES: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
DEEPSEEK: dict[str, Any] = {
    **DECODER,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
WHISPER: dict[str, Any] = {
    **HALVES,
    **TOKENS,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
GPT_NEO: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FUNNEL: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 64,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
}
LED: dict[str, Any] = {
    **HALVES,
    **TOKENS,
    "decoder_start_token_id": 2,
    "attention_window": [4, 4],
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}
tokens = only(causal, "input_ids", "labels")

ENCODERS = [
    entry("BertForMaskedLM", "BertConfig", padded, **SMALL),
    entry(
        "BertForSequenceClassification",
        "BertConfig",
        classified,
        name="BertForSequenceClassification with dropout",
        random=True,
        **SMALL,
    ),
    entry("RobertaForSequenceClassification", "RobertaConfig", classified, **SMALL),
    entry("AlbertForMaskedLM", "AlbertConfig", padded, **SMALL, embedding_size=16),
    entry(
        "DistilBertForQuestionAnswering",
        "DistilBertConfig",
        answered,
        vocab_size=WORDS,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=64,
    ),
    entry("ElectraForPreTraining", "ElectraConfig", replaced, **SMALL, embedding_size=16),
    entry("DebertaV2ForSequenceClassification", "DebertaV2Config", classified, **SMALL, **DEBERTA),
    entry("MPNetForMaskedLM", "MPNetConfig", padded, **SMALL),
    entry(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        padded,
        **SMALL,
        **TOKENS,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
        global_attn_every_n_layers=2,
    ),
    entry("FNetForMaskedLM", "FNetConfig", tokens, **SMALL),
    entry("LongformerForMaskedLM", "LongformerConfig", padded, **SMALL, attention_window=8),
    entry("ConvBertForMaskedLM", "ConvBertConfig", padded, **SMALL),
    entry("FunnelForMaskedLM", "FunnelConfig", padded, **FUNNEL),
    entry("XLNetLMHeadModel", "XLNetConfig", padded, vocab_size=WORDS, d_model=32, n_layer=2, n_head=4, d_inner=64),
    entry(
        "EsmForMaskedLM",
        "EsmConfig",
        padded,
        **SMALL,
        pad_token_id=0,
        mask_token_id=3,
        position_embedding_type="rotary",
    ),
]
DECODERS = [
    entry("GPT2LMHeadModel", "GPT2Config", padded, **OLD, n_positions=64, n_embd=32),
    entry("GPTNeoForCausalLM", "GPTNeoConfig", padded, **GPT_NEO),
    entry("GPTNeoXForCausalLM", "GPTNeoXConfig", padded, **SMALL),
    entry("OPTForCausalLM", "OPTConfig", padded, **SMALL, ffn_dim=64, word_embed_proj_dim=32),
    entry("BloomForCausalLM", "BloomConfig", padded, **OLD, hidden_size=32),
    entry("LlamaForCausalLM", "LlamaConfig", padded, **DECODER),
    entry("MistralForCausalLM", "MistralConfig", padded, **DECODER, sliding_window=8),
    entry("MixtralForCausalLM", "MixtralConfig", padded, **DECODER, num_local_experts=4, output_router_logits=True),
    entry("Qwen2ForCausalLM", "Qwen2Config", padded, **DECODER),
    entry("Qwen3ForCausalLM", "Qwen3Config", padded, **DECODER, head_dim=8),
    entry(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        padded,
        **DECODER,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=32,
        num_experts_per_tok=2,
    ),
    entry("Gemma2ForCausalLM", "Gemma2Config", padded, **DECODER, head_dim=8, sliding_window=8),
    entry("Gemma3ForCausalLM", "Gemma3TextConfig", padded, **DECODER, head_dim=8, sliding_window=8),
    entry("PhiForCausalLM", "PhiConfig", padded, **DECODER),
    entry("Phi3ForCausalLM", "Phi3Config", padded, **DECODER),
    entry("FalconForCausalLM", "FalconConfig", padded, **LAYERS, num_attention_heads=4),
    entry("Olmo2ForCausalLM", "Olmo2Config", padded, **DECODER),
    entry("GraniteForCausalLM", "GraniteConfig", padded, **DECODER),
    entry("CohereForCausalLM", "CohereConfig", padded, **DECODER),
    entry("DeepseekV3ForCausalLM", "DeepseekV3Config", padded, **DEEPSEEK),
    entry("StableLmForCausalLM", "StableLmConfig", padded, **DECODER),
    entry("Starcoder2ForCausalLM", "Starcoder2Config", padded, **DECODER),
    entry("MambaForCausalLM", "MambaConfig", tokens, **LAYERS, state_size=4),
    entry("RwkvForCausalLM", "RwkvConfig", tokens, **LAYERS, attention_hidden_size=32, context_length=32),
]
PAIRS = [
    entry("T5ForConditionalGeneration", "T5Config", translated, **T5),
    entry("BartForConditionalGeneration", "BartConfig", translated, **HALVES, max_position_embeddings=64),
    entry(
        "MarianMTModel",
        "MarianConfig",
        translated,
        **HALVES,
        max_position_embeddings=64,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
        forced_eos_token_id=1,
    ),
    entry("MT5ForConditionalGeneration", "MT5Config", translated, **T5),
    entry("LEDForConditionalGeneration", "LEDConfig", translated, **LED),
    entry("WhisperForConditionalGeneration", "WhisperConfig", heard, **WHISPER),
]
PROGRAMS = [*ENCODERS, *DECODERS, *PAIRS]
