# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-apply-save-policy``: the user's rules become marks on the ops that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Literal, Self

from retrograd.contract.attributes import BWD_LABEL, BWD_RECOMPUTE, Tag
from retrograd.contract.roles import JOINT
from retrograd.contract.tensors import DTYPES
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.read_graph import ReadGraph, read_joint
from retrograd.pipelines.analysis.partition.value_numbering import ALWAYS, KEPT_ON_HOST, MAYBE, STORED
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.passes import VALUE, ModulePass, PassFailure
from retrograd.pipelines.stages.save_policy import ACTIONS, MAY_OFFLOAD, OFFLOAD, SavePolicy, SaveRule

# What a rule goes by: the op, names and dtypes of what it gives, and their bytes.
_Described = tuple[str, tuple[str, ...], tuple[str, ...], int]


class BwdApplySavePolicy(ModulePass):
    """Writes ``bwd.recompute``, ``bwd.saved_dtype`` and ``bwd.offload`` on ops of the forward in ``@joint`` that a rule
    matches.

    What the model itself says must be (``retrograd.save``, a checkpoint's policy) stays; a rule that says that it must
    be otherwise is an error. A preference gives way to the rules.
    """

    description = "Mark ops by the user's rules on what to save, to recompute, in what type, and where"

    rules: str = field(default="", metadata={"help": "such as 'must-save op=mm; bf16 min-bytes=1024'"})
    unmatched: Literal["error", "ignore"] = field(
        default="error", metadata={"help": "what to do about a rule that matches nothing"}
    )
    value: SavePolicy | None = field(default=None, metadata=VALUE)

    @classmethod
    def by(cls, policy: SavePolicy, *, unmatched: Literal["error", "ignore"] = "error") -> Self:
        """The pass that marks ops by ``policy``; its options, as text, stand for that."""
        return cls(rules=str(policy), unmatched=unmatched, value=policy)

    def apply(self, module: ir.Operation) -> None:
        func = find_function(module, JOINT)
        if func is None:
            message = "bwd-apply-save-policy: no function @joint in the module"
            raise PassFailure(module, message, "import a joint graph first, and partition it afterwards")
        try:
            policy = self.value or SavePolicy.parse(self.rules)
        except ValueError as error:
            message, _, remedy = str(error).partition("; ")
            raise PassFailure(func, f"bwd-apply-save-policy: {message}", remedy or "see SaveRule") from error
        read = read_joint(func)
        candidates = [op for op in read.graph.ops if _is_candidate(read.graph, op)]
        used = {rule for op in candidates for rule in mark_op(read, op, policy)}
        for rule in policy.rules:
            if rule not in used and self.unmatched == "error":
                message = f"bwd-apply-save-policy: the rule '{rule}' matches no value of the forward"
                raise PassFailure(func, message, _find_remedy(rule, [_describe(read, op) for op in candidates]))


def mark_op(read: ReadGraph, op: Op, policy: SavePolicy) -> list[SaveRule]:
    """Mark one op by the first rule of each sort that matches it; returns all that match.

    Raises:
        PassFailure: a rule says that the op must be treated otherwise than the model says.
    """
    target, described = read.ops[op.id], _describe(read, op)
    found = [rule for rule in policy.rules if rule.matches(*described)]
    tagging = next((rule for rule in found if rule.action in ACTIONS), None)
    if tagging is not None:
        _set_tag(target, op.tag, ACTIONS[tagging.action], tagging)
    stored = next((rule for rule in found if rule.action not in (*ACTIONS, OFFLOAD, MAY_OFFLOAD)), None)
    if stored is not None:
        _mark_maker(read, op, STORED, ir.StringAttr.get(stored.action))
    moved = next((rule for rule in found if rule.action in (OFFLOAD, MAY_OFFLOAD)), None)
    if moved is not None:
        mark = ir.StringAttr.get(ALWAYS if moved.action == OFFLOAD else MAYBE)
        # Of a view that is saved itself, its own; of an argument's it is all that there is.
        target.attributes[KEPT_ON_HOST] = mark
        _mark_maker(read, op, KEPT_ON_HOST, mark)
    return found


def _describe(read: ReadGraph, op: Op) -> _Described:
    target = read.ops[op.id]
    tensors = [r for r in op.results if read.graph.values[r].is_tensor]
    elements = {element_type(read.values[r].type) for r in tensors}
    dtypes = tuple(sorted({name for e in elements for name in (e, DTYPES.get(e, e))}))
    label = ir.StringAttr(target.attributes[BWD_LABEL]).value if BWD_LABEL in target.attributes else ""
    names = tuple(filter(None, (label, *(read.graph.values[r].name for r in tensors))))
    return op.name, names, dtypes, sum(read.graph.values[r].bytes for r in tensors)


def _find_remedy(rule: SaveRule, described: Sequence[_Described]) -> str:
    """Say what to do about a rule that matches nothing: some of ``described`` may be too small."""
    of_any_size = replace(rule, min_bytes=0)
    sizes = [each[-1] for each in described if of_any_size.matches(*each)]
    if not sizes:
        return "look for ops and names in the module at stage 'imported'"
    return f"the largest that it is about has {max(sizes)} bytes: say min_bytes={max(sizes)} or less"


def _set_tag(target: ir.Operation, given: Tag | None, wanted: Tag, rule: SaveRule) -> None:
    if given is not None and {given, wanted} == {Tag.MUST, Tag.NEVER}:
        message = f"bwd-apply-save-policy: the model says bwd.recompute = '{given.value}', and the policy '{rule}'"
        raise PassFailure(target, message, "take one of the two away")
    if given in (None, Tag.PREFER, Tag.AVOID):
        target.attributes[BWD_RECOMPUTE] = ir.StringAttr.get(wanted.value)


def _mark_maker(read: ReadGraph, op: Op, name: str, mark: ir.Attribute) -> None:
    """Say how to save, on the op that makes the value: for a view of all of it, the one that it looks at."""
    values, root = read.graph.values, read.graph.view_root(op.results[0])
    producer = values[root].producer if values[root].bytes == values[op.results[0]].bytes else op.id
    if producer is not None:
        read.ops[producer].attributes[name] = mark


def _is_candidate(graph: JointGraph, op: Op) -> bool:
    is_tensor = any(graph.values[r].is_tensor for r in op.results)
    return is_tensor and op.kind is not OpKind.CONSTANT and op.id not in graph.tangent_ops
