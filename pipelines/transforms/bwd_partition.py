# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-partition``: a joint function becomes ``@forward`` and ``@backward``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

from retrograd.contract.roles import BACKWARD, FORWARD, GRAD, JOINT, OUTPUT, SAVED, SIZE
from retrograd.contract.sizes import find_symbols, parse_shape
from retrograd.dialects import ir
from retrograd.pipelines.analysis.graph import JointGraph
from retrograd.pipelines.analysis.liveness import compute_peak
from retrograd.pipelines.analysis.memory_size import parse_memory_size, resolve_memory_size
from retrograd.pipelines.analysis.min_cut import find_min_cut_partition
from retrograd.pipelines.analysis.op_kinds import OpKind
from retrograd.pipelines.analysis.pareto import Curve, InfeasibleBudget
from retrograd.pipelines.analysis.partition_plan import PartitionPlan, find_default_partition
from retrograd.pipelines.analysis.read_graph import SHAPE, ReadGraph, ShapeReader, attribute_dicts, read_joint
from retrograd.pipelines.analysis.schedule import schedule_plan
from retrograd.pipelines.functions import find_function
from retrograd.pipelines.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.function_builder import FunctionSketch, Port, build_function
from retrograd.pipelines.transforms.joint_checks import (
    check_plan,
    check_shapes,
    check_structure,
    check_tags,
    resolve_marks,
)

POLICIES: dict[str, Callable[[JointGraph], PartitionPlan]] = {
    "default": find_default_partition,
    "min-cut": find_min_cut_partition,
}


@dataclass(frozen=True)
class BwdPartition(ModulePass):
    """Decides what is saved and what is recomputed, and splits ``@joint`` accordingly.

    ``@forward`` takes every argument but the tangents, gives the forward's results and marks what it keeps with
    ``bwd.save``. ``@backward`` takes the parameters, buffers and inputs it uses, then what was saved, then tangents,
    and gives the gradients.
    """

    name: ClassVar[str] = "bwd-partition"
    description: ClassVar[str] = "Split @joint into @forward and @backward, choosing what is saved between them"

    policy: Literal["default", "min-cut", "budget"] = field(
        default="min-cut",
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

    def apply(self, module: ir.Operation) -> None:
        func = find_function(module, JOINT)
        if func is None:
            raise PassFailure(module, "bwd-partition: no function @joint in the module", "import a joint graph first")
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
        plan, bought = self._decide(func, read.graph)
        check_plan(func, read, plan)
        apply_partition(module, func, read, plan)
        module.attributes["bwd.partition"] = summarize(plan, read.graph, bought, in_order=self.in_order)

    def _decide(self, func: ir.Operation, graph: JointGraph) -> tuple[PartitionPlan, dict[str, Any]]:
        """The plan, and what is to be said of it besides itself."""
        if self.policy != "budget":
            if self.budget is not None:
                message = f"bwd-partition: a budget means nothing to policy={self.policy}"
                raise PassFailure(func, message, "set policy=budget, or leave the budget out")
            return POLICIES[self.policy](graph), {}
        try:
            size = parse_memory_size(self.budget)
        except ValueError as error:
            message, _, remedy = str(error).partition("; ")
            raise PassFailure(func, f"bwd-partition: {message}", remedy) from error
        budget = resolve_memory_size(size, compute_peak(graph, find_default_partition(graph)).bytes)
        curve = _find_curve(graph)
        try:
            point = curve.pick(budget)
        except InfeasibleBudget as error:
            raise PassFailure(func, f"bwd-partition: {error}", f"set budget={error.least} or more") from error
        return point.plan, _describe_purchase(curve, budget)


@lru_cache(maxsize=1)
def _find_curve(graph: JointGraph) -> Curve:
    """The curve of a graph; compiling within a budget asks for one point of the same after another.

    Its solver is imported when a budget is first asked for: OR-Tools brings pandas, which takes longer to import than
    all that the other policies need.
    """
    from retrograd.pipelines.analysis.budget import find_curve

    return find_curve(graph)


def apply_partition(module: ir.Operation, func: ir.Operation, read: ReadGraph, plan: PartitionPlan) -> None:
    """Carry ``plan`` out on the module: two functions in the place of ``func``."""
    graph, shapes = read.graph, ShapeReader(func)
    arguments = [
        Port(v, attributes) for v, attributes in zip(graph.arguments, attribute_dicts(func, "arg_attrs"), strict=True)
    ]
    results = attribute_dicts(func, "res_attrs")
    gradients = [a for a in results if a.get("bwd.role") == GRAD]
    others = [a for a in results if a.get("bwd.role") != GRAD]
    outputs = [Port(v, a) for v, a in zip(graph.forward_results, others, strict=True)]
    # An output that the backward needs is kept by whoever holds it: it is not returned a second time. (What the step
    # overwrites is saved as a copy in any case.)
    shared = [p for p in outputs if p.attributes.get("bwd.role") == OUTPUT and p.value not in graph.mutated]
    given = {p.value: p.attributes for p in shared}
    saved = [Port(v, _saved_attributes(graph, v, shapes.text(read.values[v]), given.get(v))) for v in plan.saved]
    saves = [p for p in saved if p.value not in given]
    primals = [p for p in arguments if p.value not in graph.tangents]
    build_function(func, read, FunctionSketch(FORWARD, primals, plan.forward, outputs, saves=saves))
    # What the backward does not use, it does not take; what the step overwrites, it takes as saved.
    used = {o for op in plan.backward for o in graph.ops[op].operands} | set(graph.backward_results)
    # The sizes that its results have, it takes too.
    sizes = {name for a in gradients for name in find_symbols(parse_shape(a.get(SHAPE, "")))}
    used |= {p.value for p in primals if p.attributes.get("bwd.role") == SIZE and p.attributes.get("bwd.name") in sizes}
    kept = [p for p in primals if p.value in used and p.value not in plan.saved]
    tangents = [p for p in arguments if p.value in graph.tangents and p.value in used]
    grads = [Port(v, a) for v, a in zip(graph.backward_results, gradients, strict=True)]
    build_function(func, read, FunctionSketch(BACKWARD, [*kept, *saved, *tangents], plan.backward, grads))
    func.erase()


def _saved_attributes(graph: JointGraph, value: int, shape: str, output: Mapping[str, str] | None) -> dict[str, str]:
    name = graph.values[value].name
    known = f"saved.{name}" if output is None else output.get("bwd.name", f"saved.{name}")
    return {"bwd.role": SAVED, "bwd.name": known, "bwd.value": name} | ({SHAPE: shape} if shape else {})


def _describe_purchase(curve: Curve, budget: int) -> dict[str, Any]:
    point = curve.pick(budget)
    return {
        "pareto": [[p.peak, p.cost] for p in curve.points],
        "recompute_seconds": point.cost,
        "recompute_seconds_gap": curve.gap(budget),
    }


def summarize(plan: PartitionPlan, graph: JointGraph, more: dict[str, Any], *, in_order: bool = False) -> ir.Attribute:
    """What was decided, for reports: kept with the module so that nothing needs to be worked out again."""
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
    attributes |= {key: _attribute(value) for key, value in more.items()}
    return ir.DictAttr.get(attributes)


def _attribute(value: Any) -> ir.Attribute:
    if isinstance(value, list):
        return ir.ArrayAttr.get([_attribute(v) for v in value])
    if isinstance(value, float):
        return ir.FloatAttr.get_f64(value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _count_work(graph: JointGraph, ops: tuple[int, ...]) -> int:
    return sum(graph.ops[op].kind is not OpKind.CONSTANT for op in ops)
