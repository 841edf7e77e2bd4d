# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The modes of ``torch.compile``."""

# Inductor's modes trade compile time for speed. Here the fastest code is tried first in any case; CUDA graphs, which
# keep memory, are those of "reduce-overhead" alone, and "max-autotune" measures the tiles of kernels on the device.
MEASURING = ("max-autotune", "max-autotune-no-cudagraphs")
MODES = ("default", "reduce-overhead", *MEASURING)
