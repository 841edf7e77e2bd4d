# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels that PyTorch has for its ops in this process: a user may have put others in their place, for all of his
program, and what was compared with PyTorch's own was not compared with these.

PyTorch knows of a kernel the place in a source that registers it. Of its own, with a release, that says what they
compute. Of others it does not: a source is edited, and all that a decorator of ``torch.library`` registers has the
place of that decorator.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from functools import cache

import torch
from torch._ops import OpOverload
from torch.fx import Graph

_NAMESPACES = ("aten", "prims")
_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# What a user's decorators register has this place.
_DECORATORS = _FOLDER + "library.py"
_PLACE = re.compile(r"registered at (.*):\d+ ")
# Where PyTorch was built is told by the place of its schemas.
_SCHEMAS = re.compile(r"^debug: registered at (.*?)build/aten/src/ATen/RegisterSchema\.cpp:", re.MULTILINE)
_SOURCES = ("aten/", "build/aten/", "torch/csrc/")


def find_ops(graph: Graph) -> tuple[str, ...]:
    """The names of PyTorch's ops in a graph."""
    targets = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    return tuple(sorted(target.name() for target in targets if target.namespace in _NAMESPACES))


def describe_kernels(ops: Iterable[str]) -> str | None:
    """Digests the kernels of these ops; ``None`` where one is not PyTorch's own."""
    digest = hashlib.sha256()
    for op in ops:
        registered = torch._C._dispatch_dump(op)
        if not all(map(_is_own, _PLACE.findall(registered))):
            return None
        digest.update(registered.replace(_FOLDER, "torch/").encode())
    return digest.hexdigest()


def _is_own(place: str) -> bool:
    """Whether a kernel that is registered there is PyTorch's."""
    if place.startswith(_FOLDER):
        return place != _DECORATORS
    built = _built_in()
    return built is not None and place.startswith(tuple(built + folder for folder in _SOURCES))


@cache
def _built_in() -> str | None:
    found = _SCHEMAS.search(torch._C._dispatch_dump("aten::sin"))
    return None if found is None else found[1]
