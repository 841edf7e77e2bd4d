# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-partition``: a joint function becomes ``@forward`` and ``@backward``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Self

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE, BWD_SHAPE, BWD_VALUE
from retrograd.contract.partitions import BUDGET, MIN_CUT, Partition
from retrograd.contract.roles import (
    BACKWARD,
    BUFFER,
    FORWARD,
    GRAD,
    INPUT,
    JOINT,
    OUTPUT,
    PARAM,
    SAVED,
    SIZE,
    name_in_role,
)
from retrograd.contract.sizes import find_symbols, parse_shape
from retrograd.dialects import ir
from retrograd.pipelines.analysis.kernels.liveness import compute_peak
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.memory_size import parse_memory_size
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.pareto import InfeasibleBudget
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan
from retrograd.pipelines.analysis.partition.policies import POLICIES, Decision, Policy, WithinBudget
from retrograd.pipelines.analysis.partition.read_graph import ReadGraph, ShapeReader, attribute_dicts, read_joint
from retrograd.pipelines.analysis.partition.schedule import schedule_plan
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.passes import VALUE, ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.function_builder import FunctionSketch, Port, build_function
from retrograd.pipelines.transforms.helpers.joint_checks import (
    check_plan,
    check_shapes,
    check_structure,
    check_tags,
    resolve_marks,
)


class BwdPartition(ModulePass):
    """Decides what is saved and what is recomputed, and splits ``@joint`` accordingly.

    The compiler gives it a policy, a value. Its options are text, as any pass's, for ``retrograd-opt`` and for commands
    that replay a failure: there alone a budget is read from text, by the same function that reads the user's.

    ``@forward`` takes the parameters, buffers and inputs it uses, gives the forward's results and marks what it keeps
    with ``bwd.save``. ``@backward`` takes those it uses, then what was saved, then tangents, and gives the gradients.
    What neither takes costs nothing at a call: of a model for texts and images, all of its parts for images.
    """

    description = "Split @joint into @forward and @backward, choosing what is saved between them"

    policy: Partition = field(
        default=MIN_CUT,
        metadata={
            "help": "default: save as eager does; min-cut: save the fewest bytes, recompute what is cheap; "
            "budget: recompute the least that keeps the peak of live bytes within the budget"
        },
    )
    budget: str | None = field(
        default=None,
        metadata={"help": "for policy=budget: bytes, as 1048576 or 64MiB, or a fraction of default's peak, as 0.5"},
    )

    in_order: bool = field(
        default=False, metadata={"help": "the planned peak that is noted is with one kernel at a time"}
    )
    value: Policy | None = field(default=None, metadata=VALUE)

    @classmethod
    def by(cls, policy: Policy, *, in_order: bool = False) -> Self:
        """The pass that does what ``policy`` decides; its options, as text, stand for that."""
        return cls(policy=policy.name, budget=policy.budget, in_order=in_order, value=policy)  # type: ignore[arg-type]

    def apply(self, module: ir.Operation) -> None:
        func = find_function(module, JOINT)
        if func is None:
            raise PassFailure(module, "bwd-partition: no function @joint in the module", "import a joint graph first")
        read = read_problem(func)
        decision = self._decide(func, read.graph)
        check_plan(func, read, decision.plan)
        apply_partition(module, func, read, decision.plan)
        module.attributes["bwd.partition"] = summarize(decision, read.graph, in_order=self.in_order)

    def _decide(self, func: ir.Operation, graph: JointGraph) -> Decision:
        try:
            return (self.value or self._read_policy(func)).decide(graph)
        except InfeasibleBudget as error:
            raise PassFailure(func, f"bwd-partition: {error}", f"set budget={error.least} or more") from error

    def _read_policy(self, func: ir.Operation) -> Policy:
        """The policy that the options stand for."""
        if self.policy != BUDGET:
            if self.budget is not None:
                message = f"bwd-partition: a budget means nothing to policy={self.policy}"
                raise PassFailure(func, message, "set policy=budget, or leave the budget out")
            return POLICIES[self.policy]
        try:
            return WithinBudget(parse_memory_size(self.budget))
        except ValueError as error:
            message, _, remedy = str(error).partition("; ")
            raise PassFailure(func, f"bwd-partition: {message}", remedy) from error


def read_problem(func: ir.Operation) -> ReadGraph:
    """The graph of ``@joint``, with what the user said must be saved or recomputed.

    Raises:
        PassFailure: it cannot be partitioned.
    """
    check_structure(func)
    check_shapes(func)
    check_tags(func)
    read = resolve_marks(read_joint(func))
    if not read.graph.backward_results:
        raise PassFailure(
            func,
            'bwd-partition: @joint has no result with bwd.role = "grad", nothing to differentiate',
            'mark the gradients among its results with bwd.role = "grad"',
        )
    return read


def apply_partition(module: ir.Operation, func: ir.Operation, read: ReadGraph, plan: PartitionPlan) -> None:
    """Carry ``plan`` out on the module: two functions in the place of ``func``."""
    graph, shapes = read.graph, ShapeReader(func)
    arguments = [
        Port(v, attributes) for v, attributes in zip(graph.arguments, attribute_dicts(func, "arg_attrs"), strict=True)
    ]
    results = attribute_dicts(func, "res_attrs")
    gradients = [a for a in results if a.get(BWD_ROLE) == GRAD]
    others = [a for a in results if a.get(BWD_ROLE) != GRAD]
    outputs = [Port(v, a) for v, a in zip(graph.forward_results, others, strict=True)]
    # An output that the backward needs is kept by whoever holds it: it is not returned a second time. (What the step
    # overwrites is saved as a copy in any case.)
    shared = [p for p in outputs if p.attributes.get(BWD_ROLE) == OUTPUT and p.value not in graph.mutated]
    given = {p.value: p.attributes for p in shared}
    saved = [Port(v, _saved_attributes(graph, v, shapes.text(read.values[v]), given.get(v))) for v in plan.saved]
    saves = [p for p in saved if p.value not in given]
    primals = [p for p in arguments if p.value not in graph.tangents]
    taken = {o for op in plan.forward for o in graph.ops[op].operands} | {p.value for p in (*outputs, *saves)}
    given_to = [p for p in primals if p.value in taken or p.attributes.get(BWD_ROLE) not in (PARAM, BUFFER, INPUT)]
    build_function(func, read, FunctionSketch(FORWARD, given_to, plan.forward, outputs, saves=saves))
    # What the backward does not use, it does not take; what the step overwrites, it takes as saved.
    used = {o for op in plan.backward for o in graph.ops[op].operands} | set(graph.backward_results)
    # The sizes that its results have, it takes too.
    sizes = {name for a in gradients for name in find_symbols(parse_shape(a.get(BWD_SHAPE, "")))}
    used |= {p.value for p in primals if p.attributes.get(BWD_ROLE) == SIZE and p.attributes.get(BWD_NAME) in sizes}
    kept = [p for p in primals if p.value in used and p.value not in plan.saved]
    tangents = [p for p in arguments if p.value in graph.tangents and p.value in used]
    grads = [Port(v, a) for v, a in zip(graph.backward_results, gradients, strict=True)]
    build_function(func, read, FunctionSketch(BACKWARD, [*kept, *saved, *tangents], plan.backward, grads))
    func.erase()


def _saved_attributes(graph: JointGraph, value: int, shape: str, output: Mapping[str, str] | None) -> dict[str, str]:
    name = graph.values[value].name
    known = name_in_role(SAVED, name) if output is None else output.get(BWD_NAME, name_in_role(SAVED, name))
    return {BWD_ROLE: SAVED, BWD_NAME: known, BWD_VALUE: name} | ({BWD_SHAPE: shape} if shape else {})


def summarize(decision: Decision, graph: JointGraph, *, in_order: bool = False) -> ir.Attribute:
    """Summarize the decision for reports: kept with the module so that nothing needs to be worked out again."""
    plan = decision.plan
    scheduled = schedule_plan(graph, plan, in_order=in_order)
    i64 = ir.IntegerType.get_signless(64)
    numbers = {
        "saved_bytes": plan.saved_bytes,
        "recomputed_flops": plan.recomputed_flops,
        "recomputed_ops": len(plan.recomputed),
        "forward_ops": _count_work(graph, plan.forward),
        "backward_ops": _count_work(graph, plan.backward),
        "peak_bytes_planned": compute_peak(graph, scheduled, in_order=in_order).bytes,
    }
    if spared := sum(graph.values[v].bytes - graph.values[v].saved_bytes for v in plan.saved):
        numbers["narrowed_bytes"] = spared
    attributes: dict[str, ir.Attribute] = {name: ir.IntegerAttr.get(i64, n) for name, n in numbers.items()}
    attributes["policy"] = ir.StringAttr.get(plan.policy)
    names = [graph.values[graph.ops[op].results[0]].name for op in plan.recomputed]
    attributes["recomputed"] = ir.ArrayAttr.get([ir.StringAttr.get(n) for n in names])
    attributes |= {key: _attribute(value) for key, value in decision.facts.items()}
    return ir.DictAttr.get(attributes)


def _attribute(value: Any) -> ir.Attribute:
    if isinstance(value, list):
        return ir.ArrayAttr.get([_attribute(v) for v in value])
    if isinstance(value, float):
        return ir.FloatAttr.get_f64(value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _count_work(graph: JointGraph, ops: tuple[int, ...]) -> int:
    return sum(graph.ops[op].kind is not OpKind.CONSTANT for op in ops)
