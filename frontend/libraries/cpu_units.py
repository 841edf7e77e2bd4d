# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which half types PyTorch multiplies on this CPU by units of the CPU's for them, as oneDNN may use them."""

from __future__ import annotations

import os
import re
from functools import cache

import torch

# By which oneDNN is told to leave out what a CPU has, the first before the second, and what it is then left with that
# does not multiply float16, or bfloat16 in matrix units; it takes a name that it does not know for none.
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_WITHOUT_HALF_UNITS = re.compile(r"SSE41|AVX|AVX2(_VNNI(_2)?)?|AVX512_CORE(_VNNI|_BF16)?")
_WITHOUT_MATRIX_UNITS = re.compile(_WITHOUT_HALF_UNITS.pattern + r"|AVX512_CORE_FP16|AVX10_\d(_512)?")


@cache
def has_matrix_units() -> bool:
    """Whether PyTorch multiplies matrices of bfloat16 by units of the CPU's for that: it has them, and oneDNN, which
    reads its variables once, may use them."""
    return not _WITHOUT_MATRIX_UNITS.fullmatch(_told_isa()) and torch.cpu._is_amx_tile_supported()


@cache
def has_half_units() -> bool:
    """Whether PyTorch multiplies matrices of float16 by instructions for that."""
    return not _WITHOUT_HALF_UNITS.fullmatch(_told_isa()) and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _told_isa() -> str:
    return next((os.environ[name] for name in _ISA_VARIABLES if name in os.environ), "").upper()


def has_units_for(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of this half type by what the CPU has for it."""
    return (dtype is torch.bfloat16 and has_matrix_units()) or (dtype is torch.float16 and has_half_units())
