# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels that PyTorch has for its ops in this process: a user may have put others in their place, for all of his
program, and what was compared with PyTorch's own was not compared with these."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import torch
from torch._ops import OpOverload
from torch.fx import Graph

_NAMESPACES = ("aten", "prims")
_FOLDER = os.path.dirname(os.path.abspath(torch.__file__))


def find_ops(graph: Graph) -> tuple[str, ...]:
    """The names of PyTorch's ops in a graph."""
    targets = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    return tuple(sorted(target.name() for target in targets if target.namespace in _NAMESPACES))


def describe_kernels(ops: Iterable[str]) -> str:
    """Digests the kernels of these ops: the place in a source that registers each."""
    digest = hashlib.sha256()
    for op in ops:
        # PyTorch's own lie where it is installed.
        digest.update(torch._C._dispatch_dump(op).replace(_FOLDER, "torch").encode())
    return digest.hexdigest()
