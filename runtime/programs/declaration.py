# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The types that a compiled function declares for its results."""

import re
from dataclasses import dataclass

import torch

# The torch dtypes whose bytes an element of this MLIR type is; signs are the operations', not the type's.
ELEMENT_DTYPES = {
    "bf16": {torch.bfloat16},
    "f16": {torch.float16},
    "f32": {torch.float32},
    "f64": {torch.float64},
    "f8E4M3FN": {torch.float8_e4m3fn},
    "f8E4M3FNUZ": {torch.float8_e4m3fnuz},
    "f8E5M2": {torch.float8_e5m2},
    "f8E5M2FNUZ": {torch.float8_e5m2fnuz},
    "i1": {torch.bool},
    "i8": {torch.int8, torch.uint8},
    "i16": {torch.int16, torch.uint16},
    "i32": {torch.int32, torch.uint32},
    "i64": {torch.int64, torch.uint64},
    "complex<f32>": {torch.complex64},
    "complex<f64>": {torch.complex128},
}
_TENSOR_TYPE = re.compile(r"tensor<((?:[0-9?]+x)*)([^<>]+(?:<[^<>]*>)?)>")


@dataclass(frozen=True)
class DeclaredTensor:
    """The type of a result, None standing for a size that the function takes as it is."""

    sizes: tuple[int | None, ...]
    element: str

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the function can write this result to the storage of ``tensor``."""
        if tensor.shape != self.sizes:
            if tensor.dim() != len(self.sizes):
                return False
            if any(size not in (None, given) for size, given in zip(self.sizes, tensor.shape, strict=True)):
                return False
        return tensor.dtype in ELEMENT_DTYPES.get(self.element, {tensor.dtype})

    def __str__(self) -> str:
        return f"tensor<{''.join('?x' if size is None else f'{size}x' for size in self.sizes)}{self.element}>"


def parse_results(declaration: str) -> tuple[DeclaredTensor, ...]:
    """The results of a declaration that IREE keeps with an exported function, in order."""
    # Attributes of a result hold types of their own.
    found = _TENSOR_TYPE.findall(re.sub(r"\{[^}]*\}", "", declaration.partition(" -> ")[2]))
    return tuple(
        DeclaredTensor(tuple(None if size == "?" else int(size) for size in sizes.split("x")[:-1]), element)
        for sizes, element in found
    )
