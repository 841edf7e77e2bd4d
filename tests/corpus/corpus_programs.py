# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Every program of the corpus, by name."""

from __future__ import annotations

import corpus_language
import corpus_perception
import corpus_timm
import corpus_torch
from corpus_case import Program

PROGRAMS: dict[str, Program] = {
    program.name: program
    for programs in (corpus_language.PROGRAMS, corpus_perception.PROGRAMS, corpus_timm.PROGRAMS, corpus_torch.PROGRAMS)
    for program in programs
}

# Programs that compile in seconds, of every kind, and the doors through which the tests try them.
QUICK: dict[str, tuple[str, ...]] = {
    "two towers, contrastive": ("compile_backward", "torch.compile", "enable"),
    "GPT2LMHeadModel": ("compile_backward",),
    "LlamaForCausalLM": ("torch.compile",),
    "ViTForImageClassification": ("enable",),
    "timm MlpMixer": ("compile_backward",),
    "graph attention": ("compile_backward",),
    "Wasserstein critic with gradient penalty": ("compile_backward",),
}
