# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-offload-saved``: which residuals go to memory of the host."""

from __future__ import annotations

from dataclasses import field

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE, BWD_VALUE
from retrograd.contract.roles import BACKWARD, FORWARD, is_own_residual
from retrograd.dialects import ir
from retrograd.pipelines.analysis.partition.read_graph import attribute_dicts, read_joint
from retrograd.pipelines.analysis.partition.value_numbering import ALWAYS, KEPT_ON_HOST, MAYBE
from retrograd.pipelines.infra.functions import find_function, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import walk

OFFLOADED = "bwd.offloaded"


class BwdOffloadSaved(ModulePass):
    """Lists on the module, as ``bwd.offloaded = ["exp"]``, the residuals whose op, or that of what they are a view of
    all of, has ``bwd.offload = "always"``, and with ``maybe`` those with ``"maybe"`` too: the runtime keeps them on the
    host. What is an output too stays where its owner has it. The marks are gone afterwards, so that kernels are the
    same with them and without.
    """

    description = "List the residuals that go to memory of the host"

    maybe: bool = field(default=False, metadata={"help": "list those too that go there where a budget's plan says so"})

    def apply(self, module: ir.Operation) -> None:
        forward, backward = (find_function(module, name) for name in (FORWARD, BACKWARD))
        if forward is None or backward is None:
            message = f"{self.name}: no functions @forward and @backward in the module"
            raise PassFailure(module, message, "run bwd-partition first")
        ops = [op for func in (forward, backward) for op in walk(only_block(func, self.name))]
        marked = [op for op in ops if KEPT_ON_HOST in op.attributes]
        kept = self._find_kept(forward, backward) if marked else []
        for op in marked:
            del op.attributes[KEPT_ON_HOST]
        if kept:
            module.attributes[OFFLOADED] = ir.ArrayAttr.get([ir.StringAttr.get(name) for name in kept])

    def _find_kept(self, forward: ir.Operation, backward: ir.Operation) -> list[str]:
        own = {
            entry.get(BWD_VALUE, "")
            for entry in attribute_dicts(backward, "arg_attrs")
            if is_own_residual(entry.get(BWD_ROLE, ""), entry.get(BWD_NAME, ""))
        }
        read = read_joint(forward)
        values, numbers = read.graph.values, {value: number for number, value in enumerate(read.values)}
        kept = []
        for save in [op for op in walk(only_block(forward, self.name)) if op.name == "bwd.save"]:
            name, number = ir.StringAttr(save.attributes["name"]).value, numbers[save.operands[0]]
            root = read.graph.view_root(number)
            # A view of all of it is it.
            makers = [read.values[v] for v in {number, root} if values[v].bytes == values[number].bytes]
            if name in own and any(map(self._is_listed, makers)):
                kept.append(name)
        return kept

    def _is_listed(self, value: ir.Value) -> bool:
        """Whether a value is to go to the host.

        Raises:
            PassFailure: its mark is none of those that there are.
        """
        if not isinstance(value, ir.OpResult) or KEPT_ON_HOST not in value.owner.attributes:
            return False
        mark = value.owner.attributes[KEPT_ON_HOST]
        if mark not in (ir.StringAttr.get(ALWAYS), ir.StringAttr.get(MAYBE)):
            message = f"{self.name}: {KEPT_ON_HOST} is {mark}"
            raise PassFailure(value.owner, message, f"it is '{ALWAYS}' or '{MAYBE}'")
        return self.maybe or mark == ir.StringAttr.get(ALWAYS)


def read_offloaded(module: ir.Operation) -> tuple[str, ...]:
    """Read which residuals ``bwd-offload-saved`` listed on a module, by the names of their values."""
    if OFFLOADED not in module.attributes:
        return ()
    return tuple(ir.StringAttr(name).value for name in ir.ArrayAttr(module.attributes[OFFLOADED]))
