# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Staged modules that are kept between runs: what the passes make of an imported module that they have seen.

The key is the text of the imported module, with locations, which are in what is made, and all else that the passes go
by; a store adds the sources of the passes. What is kept is JSON: to read it runs nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from retrograd.contract.plan import StagePlan
from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.dialects import ir
from retrograd.pipelines.stages.backward_variants import find_left_out, stage_first
from retrograd.pipelines.stages.lifetimes import shorten_lifetimes
from retrograd.pipelines.stages.staged import ExecutableStore, Progress, StagedModule, stage_module


@dataclass(frozen=True)
class Staging:
    """How a module is staged: by a ``policy`` without a budget; ``for_loss``, with the backward of the loss in place of
    the whole one, where one output is one; and cut where that saves ``cut_gain`` bytes, if it may be cut."""

    policy: str
    for_loss: bool
    cut_gain: int | None

    def stage(self, module: ir.Module, progress: Progress) -> StagedModule:
        """Run the passes on an imported module, in place.

        Raises:
            PipelineError: a pass refused it; names the op.
        """
        staged = stage_module(module, self.policy, progress)
        absent = find_left_out(staged) if self.for_loss else frozenset()
        first = stage_first(staged, absent, progress) if absent else staged
        return first if self.cut_gain is None else shorten_lifetimes(first, self.cut_gain)


@dataclass(frozen=True)
class KeptStages:
    """The entries that one imported module, staged in one way, has in a store; none where there is no store."""

    store: ExecutableStore | None
    parts: dict[str, str]

    @classmethod
    def of(
        cls, store: ExecutableStore | None, module: ir.Module, staging: Staging, versions: Mapping[str, str]
    ) -> KeptStages:
        """Describe the entry of ``module``, before any pass has run; ``versions`` are the releases of what stages
        it."""
        if store is None:
            return cls(None, {})
        text = module.operation.get_asm(enable_debug_info=True)
        return cls(store, {"entry": "stages, with notes", "module": text, "staging": repr(staging), **versions})

    def get(self, progress: Progress) -> StagedModule | None:
        """Returns the module as it was staged before; ``progress`` has the times of this compilation."""
        found = None if self.store is None else self.store.get(self.parts)
        return None if found is None else _decode(found, progress.seconds)

    def put(self, staged: StagedModule) -> None:
        """Keep it."""
        if self.store is not None:
            self.store.put(self.parts, _encode(staged))


# -- JSON -------------------------------------------------------------------------------------------------------------

# The text of a module stands in ``whole`` again: texts are by their places in a list.


def _encode(staged: StagedModule) -> bytes:
    places: dict[str, int] = {}
    entry = _to_dict(staged, lambda text: places.setdefault(text, len(places)))
    return zlib.compress(json.dumps({"texts": list(places), "staged": entry}).encode(), level=1)


def _decode(data: bytes, seconds: dict[str, float]) -> StagedModule:
    kept = json.loads(zlib.decompress(data))
    return _from_dict(kept["staged"], kept["texts"], seconds)


def _to_dict(staged: StagedModule, place: Callable[[str], int]) -> dict[str, Any]:
    return {
        "texts": {name: place(text) for name, text in staged.texts.items()},
        "source": place(staged.source),
        "functions": [asdict(function) for function in staged.functions],
        "partition": staged.partition,
        "merged": staged.merged,
        "narrowed": staged.narrowed,
        "plans": {name: plan.to_dict() for name, plan in staged.plans.items()},
        "stages": [asdict(function) for function in staged.stages],
        "whole": None if staged.whole is None else _to_dict(staged.whole, place),
        "memory_budget": staged.memory_budget,
        "notes": staged.notes,
        "offloaded": staged.offloaded,
    }


def _from_dict(entry: Mapping[str, Any], texts: list[str], seconds: dict[str, float]) -> StagedModule:
    made = {
        "texts": {name: texts[place] for name, place in entry["texts"].items()},
        "source": texts[entry["source"]],
        "functions": tuple(map(_function, entry["functions"])),
        "plans": {name: StagePlan.from_dict(plan) for name, plan in entry["plans"].items()},
        "stages": tuple(map(_function, entry["stages"])),
        "notes": tuple(entry["notes"]),
        "offloaded": tuple(entry["offloaded"]),
        "whole": None if entry["whole"] is None else _from_dict(entry["whole"], texts, seconds),
    }
    return StagedModule(seconds=seconds, **{**entry, **made})


def _function(entry: Mapping[str, Any]) -> FunctionSpec:
    sides = {side: tuple(map(_tensor, entry[side])) for side in ("arguments", "results")}
    return FunctionSpec(**{**entry, **sides})


def _tensor(entry: Mapping[str, Any]) -> TensorSpec:
    tensor = TensorSpec(**entry)
    return replace(tensor, shape=_as_tuples(tensor.shape), example=_as_tuples(tensor.example))


def _as_tuples(value: Any) -> Any:
    """Sizes that are expressions are tuples in tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
