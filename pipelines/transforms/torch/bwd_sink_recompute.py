# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-sink-recompute``: what the backward recomputes runs right before it is used."""

from __future__ import annotations

from dataclasses import field

from retrograd.contract.roles import BACKWARD
from retrograd.dialects import ir
from retrograd.pipelines.analysis.partition.read_graph import read_joint
from retrograd.pipelines.analysis.partition.schedule import find_low_schedule
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.passes import ModulePass, PassFailure


class BwdSinkRecompute(ModulePass):
    """Moves each chain of ops that depends on no tangent right before its first use in ``@backward``.

    ``bwd-partition`` leaves them at the beginning, where all that they give would be alive at once. Of several chains
    that one op needs, the one with the critical path goes first. Liveness decides: the backward's scratch memory is
    never more than before, and where sinking would raise it, the ops stay. Source of the idea:
    ``torch._functorch.partitioners.reordering_to_mimic_autograd_engine``.
    """

    description = "Move what @backward recomputes right before its first use, if that costs no memory"

    in_order: bool = field(default=False, metadata={"help": "kernels are to run one at a time: liveness counts so"})

    def apply(self, module: ir.Operation) -> None:
        func = find_function(module, BACKWARD)
        if func is None:
            message = "bwd-sink-recompute: no function @backward in the module"
            raise PassFailure(module, message, "run bwd-partition first")
        if len(func.regions[0].blocks) != 1:
            message = f"bwd-sink-recompute: @backward has {len(func.regions[0].blocks)} blocks, expected one"
            raise PassFailure(func, message, "capture the graph without control flow")
        read = read_joint(func)
        order = find_low_schedule(read.graph, range(len(read.graph.ops)), read.graph.arguments, in_order=self.in_order)
        end = list(func.regions[0].blocks[0].operations)[-1].operation
        for number in order:
            read.ops[number].move_before(end)
