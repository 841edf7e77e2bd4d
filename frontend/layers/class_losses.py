# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cross entropy without tensors as large as its scores that only a few elements are used of.

A loss gathers one log-probability of each row, and its gradient is summed over rows that have one element that is not
zero. Compiled as they are traced, all log-probabilities are written to memory for the first, and the second reads as
many zeros; of a language model's vocabulary each is the largest tensor of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.preparation.graph_writer import GraphWriter

aten = torch.ops.aten
_ELEMENTWISE = (aten.sub.Tensor, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)
_CASTS = (torch.ops.prims.convert_element_type.default,)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_NLL_BACKWARD = (aten.nll_loss_backward, aten.nll_loss2d_backward)


def shorten_class_losses(graph_module: GraphModule) -> None:
    """Gather before what is computed element by element, and take the sum of a row for the one element that it has, in
    place."""
    graph = graph_module.graph
    gathers = graph.find_nodes(op="call_function", target=aten.gather.default)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    mode = next((mode for n in (*gathers, *sums) if (mode := getattr(n.meta.get("val"), "fake_mode", None))), None)
    if mode is None:
        return
    writer = GraphWriter(graph_module, mode, {})
    changed = [_sink(writer, node) for node in gathers] + [_take_element(writer, node) for node in sums]
    if any(changed):
        graph.eliminate_dead_code()
        recompile_when_called(graph_module)


def _sink(writer: GraphWriter, gather: Node) -> bool:
    """Gather from what an elementwise op takes in place of what it gives, as long as there is one."""
    if (made := _find_elementwise(gather)) is None:
        return False
    source, axis, index = made, gather.args[1], gather.args[2]
    assert isinstance(index, Node)
    with writer.at(gather):
        taken = [_chosen(writer, operand, source, axis, index) for operand in source.args]
        result = writer.node(source.target(*taken, **source.kwargs))  # type: ignore[operator]
    inner = [node for node in writer.written if node.target is aten.gather.default]
    gather.replace_all_uses_with(result)
    for node in inner:
        _sink(writer, node)
    return True


def _find_elementwise(gather: Node) -> Node | None:
    """The elementwise op that ``gather`` chooses whole elements of, one at each place of the other axes."""
    source, axis, index = gather.args[:3]
    source = _behind_views(source)
    if not isinstance(source, Node) or not isinstance(index, Node) or not isinstance(axis, int):
        return None
    shape, places = _shape(source), _shape(index)
    if not shape or places is None or len(shape) != len(places):
        return None
    axis %= len(shape)
    if not _same((*shape[:axis], *shape[axis + 1 :]), (*places[:axis], *places[axis + 1 :])):
        return None
    if source.target in _CASTS:
        return None if _rounds_product(source) else source
    fits = source.target in _ELEMENTWISE and all(_fits(operand, shape, axis) for operand in source.args)
    return source if fits else None


def _rounds_product(cast: Node) -> bool:
    """Whether a product is rounded, scaled and its bias added: in its own kernel, which then writes nothing wider."""
    source, given = _behind_views(cast.args[0]), cast.meta["val"].dtype
    if not isinstance(source, Node) or source.meta["val"].dtype.itemsize <= given.itemsize:
        return False
    summands = source.args if source.target is aten.add.Tensor else (source,)
    return any(_behind_factor(summand).target in _PRODUCTS for summand in summands if isinstance(summand, Node))


def _behind_factor(node: Node) -> Node:
    """The node that a number is multiplied with, as ``addmm`` multiplies by its factors."""
    source = _behind_views(node)
    if source.target is aten.mul.Tensor and isinstance(source.args[0], Node) and not isinstance(source.args[1], Node):
        source = _behind_views(source.args[0])
    assert isinstance(source, Node)
    return source


def _fits(operand: Any, shape: tuple[Any, ...], axis: int) -> bool:
    """Whether an operand has an element for each of the result, or one for all along the axis."""
    own = _shape(operand) if isinstance(operand, Node) else ()
    if own is None:
        return False
    if len(shape) > 1 and _same(own, shape[-1:]):
        return axis == len(shape) - 1
    return not own or _same(own, shape) or _same(own, (*shape[:axis], 1, *shape[axis + 1 :]))


def _chosen(writer: GraphWriter, operand: Any, source: Node, axis: Any, index: Node) -> Any:
    if not isinstance(operand, Node):
        return operand
    value, places = writer.value(operand), writer.value(index)
    own, whole = _shape(operand) or (), _shape(source) or ()
    if _same(own, whole):
        return aten.gather.default(value, axis, places)
    # A bias, one number for each class.
    return aten.index.Tensor(value, [places]) if _same(own, whole[-1:]) else value


def _behind_views(node: Any) -> Any:
    """Look through views of a value back to a node of its own shape, as where tokens were split into sequences and
    joined again."""
    source, shape = node, _shape(node) if isinstance(node, Node) else None
    while isinstance(source, Node) and source.target in _VIEWS:
        source = source.args[0]
        own = _shape(source)
        if own is not None and shape is not None and _same(own, shape):
            node = source
    return node


def _take_element(writer: GraphWriter, total: Node) -> bool:
    """The sum over the classes of ``nll_loss``'s gradient: what the class of the target has."""
    gradient, axes, *rest = total.args
    element = _read_gradient(gradient)
    if element is None or not isinstance(axes, list | tuple) or len(axes) != 1 or total.kwargs:
        return False
    (axis,) = axes
    own = _shape(element)
    # With weights of classes it differs from class to class.
    if own is None or not isinstance(axis, int) or len(own) <= axis or not _same(own[axis : axis + 1], (1,)):
        return False
    result = element
    if not (rest and rest[0]):
        with writer.at(total):
            result = writer.node(writer.value(element).squeeze(axis))
    total.replace_all_uses_with(result)
    return True


def _read_gradient(node: Any) -> Node | None:
    """Read, of a gradient of ``nll_loss`` as `decompositions/class_gradients.py` writes it, the value at the target's
    class."""
    # Overloads may be copies.
    origin = node.meta.get("original_aten") if _is(node, aten.where.self) else None
    if getattr(origin, "overloadpacket", None) not in _NLL_BACKWARD or not _is(node.args[0], aten.eq.Tensor):
        return None
    return node.args[1] if isinstance(node.args[1], Node) else None


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two shapes are the same at all sizes; nothing is asked of open ones."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _shape(node: Any) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None
