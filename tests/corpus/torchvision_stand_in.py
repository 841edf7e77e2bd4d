# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The names of torchvision that timm imports, for as long as timm is imported.

timm's models use one class of torchvision's, and no more than to ask whether a layer is one; its code for data sets,
which importing timm imports too, uses others. torchvision's wheels hold CUDA code, which does not load beside a PyTorch
for the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any


class _Absent(type):
    """The type of classes that stand for torchvision's: anything may be read from one, and none be made."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(name)

    def __call__(cls, *_arguments: object, **_named: object) -> Any:
        raise RuntimeError(f"torchvision is not installed, and {cls.__name__} is one of its classes")


def _absent(name: str) -> _Absent:
    return _Absent(name, (), {})


class _StandIn(ModuleType):
    """A module of torchvision's, each of whose names is an absent class."""

    def __getattr__(self, name: str) -> Any:
        # What timm does without where it is missing.
        if name.startswith("__") or name in ("Places365", "INaturalist", "QMNIST", "ImageNet"):
            raise AttributeError(name)
        value = _absent(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of torchvision."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision" or "feature_extraction" in name:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Let ``import torchvision`` find the stand-in, unless torchvision itself can be imported."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
