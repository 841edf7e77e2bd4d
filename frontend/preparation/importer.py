# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Import of a captured joint graph to MLIR: one function ``@joint`` of torch ops, with roles and names on arguments and
results.

torch-mlir's importer does the translation, unpatched. Added here: ``bwd.role`` and ``bwd.name`` on arguments and
results (what they are to the user), ``bwd.value`` (the FX node), and ``bwd.values`` on ops, so that a decision made on
MLIR can be carried out on FX; what the user asked to be saved or recomputed (``bwd.recompute``), the checkpointed block
(``bwd.block``), the name of a marked value (``bwd.label``), and the functions that pack saved values
(``bwd.packed_as``).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch_mlir.extras.fx_importer import FxImporter, GraphNodeImporter, RefMapping, RefTracker

from retrograd.contract.attributes import (
    BWD_BLOCK,
    BWD_FLOPS,
    BWD_INLINE,
    BWD_ISLAND,
    BWD_LABEL,
    BWD_LATE,
    BWD_NAME,
    BWD_PACKED_AS,
    BWD_RANDOM,
    BWD_RECOMPUTE,
    BWD_ROLE,
    BWD_SHAPE,
    BWD_SHAPES,
    BWD_SIZES,
    BWD_VALUE,
    BWD_VALUES,
    ISLAND_OP,
)
from retrograd.contract.roles import JOINT
from retrograd.contract.signature import Signature
from retrograd.contract.sizes import format_shape
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.frontend.doors.checkpoints import find_tag, is_late_collective
from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.doors.port_roles import argument_role, result_role
from retrograd.frontend.hooks.pack_hooks import PACKED_AS
from retrograd.frontend.islands.island_choice import Island
from retrograd.frontend.islands.island_graphs import ISLAND, outline_islands
from retrograd.frontend.libraries.ops import FLOPS
from retrograd.frontend.preparation.tensor_graphs import flatten_output, on_tensors
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.size_expressions import to_shape
from retrograd.frontend.sizes.size_nodes import SIZE, find_heads, find_names

_NOTHING: Mapping[str, torch.fx.GraphModule] = {}
# Of open sizes, by their symbols.
Names: TypeAlias = Mapping[sympy.Symbol, str]


class ImportFailure(CaptureError):
    """torch-mlir's importer does not take an op; ``node`` is the name of its node."""

    def __init__(self, message: str, node: str) -> None:
        super().__init__(
            f"import to MLIR failed: {message}", "report the op; replace it by ops that torch-mlir imports"
        )
        self.node = node


class NodeImporter(GraphNodeImporter):  # type: ignore[misc]
    """torch-mlir's importer of one function, which remembers where it is and knows calls of islands."""

    node: torch.fx.Node | None = None

    def _import_hop(self, loc: ir.Location, node: torch.fx.Node, hop: Any) -> None:
        self.node = node
        super()._import_hop(loc, node, hop)

    def _import_argument(self, loc: ir.Location, arg: Any, expected_jit_type: Any = None) -> ir.Value:
        # torch-mlir's own imports a constant once for each op that takes it, and refuses to where these share a node.
        if isinstance(arg, torch.fx.Node) and arg.op == "get_attr" and (arg, 0) in self._v:
            return self.resolve_node_value(arg)
        return super()._import_argument(loc, arg, expected_jit_type)

    def _import_literal(self, py_value: Any, info: Any = None) -> ir.Value:
        # torch-mlir's own copies a mask to numbers: in the fake tensor mode that is on, the copy would have no values.
        with _disable_current_modes():
            return super()._import_literal(py_value, info)

    def _import_torch_op_overload(self, loc: ir.Location, node: torch.fx.Node, concrete_target: Any = None) -> None:
        self.node = node
        if node.target is not ISLAND:
            super()._import_torch_op_overload(loc, node, concrete_target)
            return
        sizes, values, number, random = cast(tuple[list[torch.fx.Node], list[torch.fx.Node], int, bool], node.args)
        attributes = {
            "name": ir.StringAttr.get(ISLAND_OP),
            BWD_ISLAND: ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number),
        }
        if FLOPS in node.meta:
            attributes[BWD_FLOPS] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), node.meta[FLOPS])
        call = ir.Operation.create(
            "torch.operator",
            results=[self._cc.value_info_to_type(v) for v in node.meta["val"]],
            operands=[self._import_argument(loc, v) for v in (*sizes, *values)],
            attributes=attributes | ({BWD_RANDOM: ir.UnitAttr.get()} if random else {}),
            loc=loc,
        )
        for index, result in enumerate(call.results):
            self.bind_node_value(node, result, index)
        self._multi_result_nodes.add(node)


class KeptTensors(RefTracker):  # type: ignore[misc]
    """Knows the literals of constant tensors, and keeps the tensors alive for as long.

    torch-mlir's own knows a tensor by its address alone. One that was made for the import, and is gone, leaves its
    literal to the next one there: of two masks the second became the first, and the program trained on that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def track(self, referrent: Any) -> RefMapping:
        """Finds what the import knows of an object, and keeps the object alive: it is known by its address."""
        self._kept.append(referrent)
        return super().track(referrent)


def import_graph(
    traced: torch.fx.GraphModule,
    signature: Signature | None = None,
    *,
    function: str = JOINT,
    bodies: Mapping[str, torch.fx.GraphModule] = _NOTHING,
    islands: Sequence[Island] = (),
) -> ir.Module:
    """Translate a graph that AOTAutograd traced to a module with one function on ``!torch.vtensor`` types, and private
    functions to be inlined (``bwd.inline``) for ``bodies``, by name.

    Results that are no tensors (``None`` for no gradient) are left out. The FX graph is not changed. Without a
    signature, arguments and results are known by their numbers. Each of ``islands`` is one op of any number of
    operands and results, ``torch.operator "torch.retrograd.island"``.

    Raises:
        ImportFailure: an op that torch-mlir's importer does not know; names the op and the user's line.
    """
    context = make_context()
    node_importers: list[NodeImporter] = []

    def remember(*args: Any) -> NodeImporter:
        node_importers.append(NodeImporter(*args))
        return node_importers[-1]

    importer = FxImporter(context=context, graph_node_importer_cls=remember, py_attr_tracker=KeptTensors())
    for name, graph_module in {function: outline_islands(traced, islands), **bodies}.items():
        try:
            func = _import_function(importer, graph_module, name, signature)
        except (NotImplementedError, TypeError, ValueError) as error:
            node = node_importers[-1].node if name == function and node_importers else None
            raise ImportFailure(str(error), node.name if node is not None else "") from error
        with context, ir.Location.unknown():
            _name_values(node_importers[-1])
            _tag_ops(node_importers[-1])
            _write_shapes(node_importers[-1], importer.module, graph_module.graph)
            if name in bodies:
                func.attributes["sym_visibility"] = ir.StringAttr.get("private")
                func.attributes[BWD_INLINE] = ir.UnitAttr.get()
    module: ir.Module = importer.module
    module.operation.verify()
    return module


def _import_function(
    importer: FxImporter, traced: torch.fx.GraphModule, name: str, signature: Signature | None
) -> ir.Operation:
    graph_module, descs = on_tensors(traced)
    func = importer.import_stateless_graph(graph_module.graph, func_name=name)
    with importer.module.context, ir.Location.unknown():
        _annotate(func, graph_module.graph, descs, signature)
    return func


def _name_values(node_importer: GraphNodeImporter) -> None:
    """Write on each op the FX names of its results; a tuple's elements carry the names of their getitem nodes."""
    names: dict[tuple[ir.Operation, int], str] = {}
    for (node, index), value in node_importer._v.items():
        if not isinstance(value, ir.OpResult):
            continue
        place = (value.owner, value.result_number)
        if node.target is operator.getitem or place not in names:
            names[place] = (
                node.name
                if node.target is operator.getitem or len(value.owner.results) == 1
                else f"{node.name}.{index}"
            )
    ops = {owner for owner, _ in names}
    for op in ops:
        op.attributes[BWD_VALUES] = ir.ArrayAttr.get(
            [ir.StringAttr.get(names.get((op, i), "")) for i in range(len(op.results))]
        )


def _tag_ops(node_importer: GraphNodeImporter) -> None:
    """Write on each op what the user asked of the node that it was imported from."""
    for (node, _), value in node_importer._v.items():
        if not isinstance(value, ir.OpResult) or node.target is operator.getitem:
            continue
        if is_late_collective(node):
            value.owner.attributes[BWD_LATE] = ir.UnitAttr.get()
        tag, block, label = find_tag(node)
        if tag is not None:
            value.owner.attributes[BWD_RECOMPUTE] = ir.StringAttr.get(tag.value)
        if block is not None:
            value.owner.attributes[BWD_BLOCK] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), block)
        if label:
            value.owner.attributes[BWD_LABEL] = ir.StringAttr.get(label)
        packed_as = node.meta.get(PACKED_AS, ())
        if any(packed_as) and len(packed_as) == len(value.owner.results):
            value.owner.attributes[BWD_PACKED_AS] = ir.ArrayAttr.get([ir.StringAttr.get(n) for n in packed_as])


def _annotate(func: Any, graph: torch.fx.Graph, descs: Sequence[Any], signature: Signature | None) -> None:
    placeholders = graph.find_nodes(op="placeholder")
    arguments = [argument_role(node.meta["desc"], signature) for node in placeholders]
    (output,) = graph.find_nodes(op="output")
    nodes = flatten_output(output.args[0])
    results = [result_role(desc, signature) for desc in descs]
    names = find_names(graph)
    func.attributes["arg_attrs"] = _attributes(arguments, placeholders, names)
    func.attributes["res_attrs"] = _attributes(results, nodes, names)


def _attributes(roles: Sequence[tuple[str, str]], nodes: Sequence[torch.fx.Node], names: Names) -> ir.Attribute:
    entries = []
    for (role, name), node in zip(roles, nodes, strict=True):
        entry = {BWD_ROLE: role, BWD_NAME: name, BWD_VALUE: node.name}
        shape = _shape_text(node.meta.get("val"), names)
        entries.append(entry | ({BWD_SHAPE: shape} if shape else {}))
    return ir.ArrayAttr.get([ir.DictAttr.get({k: ir.StringAttr.get(v) for k, v in e.items()}) for e in entries])


def _shape_text(value: Any, names: Names) -> str:
    """The shape of a traced tensor, if it has sizes that differ from call to call."""
    if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
        return ""
    return format_shape(to_shape(value, names))


def _traced(node: torch.fx.Node, index: int, place: int, count: int) -> Mapping[int, Any]:
    """Map places to traced results of the op that yields a node's value: of an op that takes a list of tensors apart
    all ``count``, also those that nobody asked for."""
    source = node.args[0].meta.get("val") if node.target is operator.getitem else None  # type: ignore[union-attr]
    if isinstance(source, tuple | list) and len(source) == count:
        return dict(enumerate(source))
    traced = node.meta.get("val")
    return {place: traced[index] if isinstance(traced, tuple | list) else traced}


def _write_shapes(node_importer: GraphNodeImporter, module: ir.Module, graph: torch.fx.Graph) -> None:
    """Write on each op the shapes of its results that differ from call to call, and on the module the sizes that the
    trace was made with."""
    names = find_names(graph)
    if not names:
        return
    # By the first result: operands and attributes are part of an op's hash, which changes with them.
    shapes: dict[ir.Value, list[str]] = {}
    for (node, index), value in node_importer._v.items():
        if not isinstance(value, ir.OpResult):
            continue
        results, place = value.owner.results, value.result_number
        for number, traced in _traced(node, index, place, len(results)).items():
            if text := _shape_text(traced, names):
                shapes.setdefault(results[0], [""] * len(results))[number] = text
    for first, texts in shapes.items():
        first.owner.attributes[BWD_SHAPES] = ir.ArrayAttr.get([ir.StringAttr.get(t) for t in texts])
    i64 = ir.IntegerType.get_signless(64)
    hints = {node.meta[SIZE]: ir.IntegerAttr.get(i64, hint(node.meta["val"])) for node in find_heads(graph)}
    module.operation.attributes[BWD_SIZES] = ir.DictAttr.get(hints)
