# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An entry that keeps a compiled model for other processes: all that comes after it is known what the model does.

An entry is pickled. Whoever can write to the cache's folder can have this process run what he likes in any case: it
holds machine code.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrograd.contract.manifest import Manifest
from retrograd.contract.plan import StagePlan
from retrograd.contract.tensors import FunctionSpec
from retrograd.frontend.doors.kept_binding import KeptBinding
from retrograd.kept_islands import KeptIsland


@dataclass(frozen=True)
class KeptModel:
    """``code`` is the key of the executable's own entry, ``functions`` what it has by name, ``plans`` and ``stages``
    how they are cut, with ``islands``, ``binding`` what is around them, ``manifest`` what describes it and ``notes``
    what its user is told.

    ``checks`` are the keys under which the cache knows each function to be right, by name; ``ops`` are the names of
    the ops that it was compiled from, and ``kernels`` describes the kernels that PyTorch had for them.
    """

    code: str
    functions: Mapping[str, FunctionSpec]
    plans: Mapping[str, StagePlan]
    stages: Sequence[FunctionSpec]
    islands: Sequence[KeptIsland]
    binding: KeptBinding
    manifest: Manifest
    notes: Sequence[str]
    checks: Mapping[str, str]
    ops: Sequence[str]
    kernels: str

    def dump(self) -> bytes:
        """It as bytes."""
        return pickle.dumps(self)

    @classmethod
    def read(cls, data: bytes) -> KeptModel:
        """Read what :meth:`dump` wrote."""
        found = pickle.loads(data)
        if not isinstance(found, cls):
            raise pickle.UnpicklingError("no kept model")
        return found
