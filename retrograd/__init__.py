# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiler for PyTorch backward passes.

The names below are loaded on first use: `retrograd-opt` works on MLIR text alone and must not pay for `import torch`.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.api import CompiledBackward, compile_backward, load
    from retrograd.frontend.source import CaptureError
    from retrograd.runtime.artifact import ArtifactError

    __version__: str

# Public name -> the module that defines it. The imports above say the same to type checkers.
_EXPORTS = {
    "ArtifactError": "retrograd.runtime.artifact",
    "CaptureError": "retrograd.frontend.source",
    "CompiledBackward": "retrograd.api",
    "compile_backward": "retrograd.api",
    "load": "retrograd.api",
}

__all__ = ["ArtifactError", "CaptureError", "CompiledBackward", "__version__", "compile_backward", "load"]


def __getattr__(name: str) -> Any:
    """Load a public name on its first use (PEP 562).

    Raises:
        AttributeError: retrograd has no public name `name`.
    """
    value: Any
    if name == "__version__":
        value = metadata.version("retrograd")
    elif name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
    else:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
