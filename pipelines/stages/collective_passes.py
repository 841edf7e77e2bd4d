# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the collectives of a module are joined and moved: asked for on the module, so that what is staged of it again,
such as a backward without some outputs, is treated alike."""

from __future__ import annotations

from dataclasses import asdict

from retrograd.contract.collectives import Collectives
from retrograd.dialects import ir
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.torch.bwd_bucket_reductions import BwdBucketReductions
from retrograd.pipelines.transforms.torch.bwd_prefetch_gathers import BwdPrefetchGathers

_ATTRIBUTE = "bwd.collectives"
_NOTHING = Collectives(0, 0, 0)


def request_collectives(module: ir.Module, collectives: Collectives | None) -> None:
    """Leave on an imported module how its collectives are to be joined and moved, where they are."""
    if collectives is None:
        return
    with module.context:
        i64 = ir.IntegerType.get_signless(64)
        numbers = {name: ir.IntegerAttr.get(i64, number) for name, number in asdict(collectives).items()}
        module.operation.attributes[_ATTRIBUTE] = ir.DictAttr.get(numbers)


def collective_passes(module: ir.Module) -> tuple[ModulePass, ...]:
    """The passes that join and move collectives, as it is asked for on the module; these do nothing otherwise."""
    asked, attributes = _NOTHING, module.operation.attributes
    if _ATTRIBUTE in attributes:
        asked = Collectives(**{e.name: ir.IntegerAttr(e.attr).value for e in ir.DictAttr(attributes[_ATTRIBUTE])})
    buckets = BwdBucketReductions(bucket_bytes=asked.bucket_bytes, first_bucket_bytes=asked.first_bucket_bytes)
    return buckets, BwdPrefetchGathers(limit_bytes=asked.prefetch_bytes)
