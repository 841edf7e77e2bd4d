# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How tensors lie in memory where what a library computes meets compiled code, which gives and takes contiguous ones.

A library takes views as they lie, so the views that an op reads become part of its island, down to a tensor that is
contiguous: the three parts of one projection are taken out of it without a copy. What lies permuted (channels last, or
heads before rows) passes the border in the order of its memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.layers.convolution_ops import LAST
from retrograd.frontend.libraries.channels_last import find_turned
from retrograd.frontend.libraries.joined_layers import WITH, join_layers
from retrograd.frontend.libraries.kernel_calls import note_refusals
from retrograd.frontend.libraries.kernel_convolutions import find_kernel_convolutions, lay_out_convolutions
from retrograd.frontend.libraries.ops import LIBRARY, lays_channels_last, mark_library_ops
from retrograd.frontend.libraries.permutations import is_view, join_permutations, sink
from retrograd.frontend.libraries.written_out import write_out_pools
from retrograd.frontend.sizes.size_nodes import SIZE

aten, prims = torch.ops.aten, torch.ops.prims
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Besides all ops that are views by their schema. Strides that an op names are of memory that is not there.
_VIEWS = (aten._unsafe_view.default, aten.reshape.default, aten.detach.default)
_NO_VIEWS = (aten.as_strided.default,)
# Ops whose second argument is what all elements are.
_FILLED = (aten.full.default, aten.full_like.default)
# Views of some or all elements, as they are.
_SOME = (aten.slice.Tensor, aten.select.int, aten.view.default, aten.unsqueeze.default, aten.permute.default)
# Views of all elements in their order, of what is contiguous.
_RESHAPED = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
# The tensor itself, to an op that writes to none of what it takes.
_SAME = (aten.alias.default, aten.detach.default)
_PARTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)


def attach_views(graph_module: GraphModule) -> None:
    """Mark what libraries and kernels of our own compute now, and bring all that libraries take and give into the order
    of memory, in place, as all that convolutions do which take images with channels last; note what no kernel takes,
    and why."""
    graph = graph_module.graph
    of_libraries = mark_library_ops(graph)
    ours = find_kernel_convolutions(graph)
    marked = [*of_libraries, *ours]
    note_refusals(graph_module)
    if marked:
        join_permutations(graph)
    turned = find_turned(graph, marked) if lays_channels_last() else []
    permutations: list[Node] = []
    for node in marked:
        if node not in turned and node in ours:
            continue
        copies: dict[Node, Node] = {}
        for value in list(node.all_input_nodes):
            is_turned = node in turned and value.meta["val"].dim() == len(LAST)
            with graph.inserting_before(node):
                taken = _taken_last(graph, node, value) if is_turned else _taken(graph, node, value, copies)
                node.replace_input_with(value, taken)
        if node in turned:
            _lay_out_images(node)
        given = _give(graph, node)
        if node in turned:
            permutations += [outside for value, outside in given.items() if value.args[1:] != (1,)]
        else:
            _give_stacked(graph, node, list(given.values()))
            _give_reshaped(node)
    if permutations:
        sink(graph_module, permutations)
    if ours:
        lay_out_convolutions(graph, ours)
        join_permutations(graph)
    if lays_channels_last():
        write_out_pools(graph_module)
    if marked:
        # Sizes stay: shapes are written in terms of them.
        graph.eliminate_dead_code(lambda node: node.is_impure() or SIZE in node.meta)
        join_layers(graph)
        recompile_when_called(graph_module)


def _taken(graph: Graph, op: Node, value: Node, copies: dict[Node, Node]) -> Node:
    """Return what the op is to take in place of ``value``: a view of its own, of something contiguous; ``copies`` are
    the views that it has so far."""
    if value in copies:
        return copies[value]
    source = _source_of(value)
    if value.target in _SAME:
        return _taken(graph, op, value.args[0], copies)  # type: ignore[arg-type]
    constant = find_constant(value)
    if constant is not None:
        copies[value] = _belongs(_filled(graph, value, constant), op)
        return copies[value]
    # What another island gives in the order of its memory passes the border once, also where that is a view of it.
    if _is_contiguous(value) and (source is None or LIBRARY in value.meta):
        return value
    if source is not None:
        argument = _taken(graph, op, source, copies)
        copies[value] = _belongs(graph.node_copy(value, lambda n: argument if n is source else n), op)
        return copies[value]
    order = _order_of(value)
    return value if order is None else _permuted(graph, op, _permuted(graph, None, value, order), _inverse(order))


def _taken_last(graph: Graph, op: Node, value: Node) -> Node:
    """Return what a convolution is to take in place of ``value``: a view of what has its channels last in memory."""
    return _permuted(graph, op, _laid_last(graph, value), _inverse([*LAST]))


def _laid_last(graph: Graph, value: Node) -> Node:
    """``value`` with its channels last. What it is converted from is laid so, and then converted: a parameter's copy in
    another type is written once, as the forward and the backward take it."""
    if value.target is prims.convert_element_type.default:
        source = value.args[0]
        assert isinstance(source, Node), "a tensor is converted"
        laid = _laid_last(graph, source)
        converted = graph.node_copy(value, lambda node: laid if node is source else node)
        converted.meta = {**value.meta, "val": laid.meta["val"].to(value.meta["val"].dtype)}
        converted.meta.pop("tensor_meta", None)
        return converted
    node = _permuted(graph, None, value, [*LAST])
    node.meta["val"] = node.meta["val"].contiguous()
    if is_view(node.meta["val"].shape, LAST):
        node.target, node.args = aten.view.default, (value, [*node.meta["val"].shape])
    return node


def find_constant(value: Node) -> float | None:
    """The number that all elements of a tensor of known size are, such as the first states of a layer that is given
    none; ``None`` where there is no such."""
    tensor = value.meta["val"]
    if not isinstance(tensor, Tensor) or not all(isinstance(n, int) for n in tensor.shape):
        return None
    if value.target in _FILLED:
        return None if isinstance(value.args[1], Node) else value.args[1]  # type: ignore[return-value]
    return find_constant(value.args[0]) if value.target in _SOME else None  # type: ignore[arg-type]


def _filled(graph: Graph, value: Node, number: float) -> Node:
    """A constant once more, as a tensor of its own."""
    tensor = value.meta["val"]
    how = {"dtype": tensor.dtype, "device": tensor.device}
    node = graph.call_function(aten.full.default, ([*tensor.shape], number), how)
    node.meta = {"val": tensor.contiguous(), "stack_trace": value.stack_trace}
    return node


def _source_of(view: Node) -> Node | None:
    """The tensor that a node is a view of; of a part, the tuple that it is taken from."""
    if _is_view(view.target):
        return view.args[0] if isinstance(view.args[0], Node) else None
    if view.target is operator.getitem and isinstance(view.args[0], Node) and view.args[0].target in _PARTS:
        return view.args[0]
    return view.args[0] if view.target in _PARTS and isinstance(view.args[0], Node) else None


def _is_view(target: Any) -> bool:
    if target in _VIEWS:
        return True
    return isinstance(target, OpOverload) and target.is_view and target not in (*_PARTS, *_NO_VIEWS)


def _give(graph: Graph, op: Node) -> dict[Node, Node]:
    """Have what the op gives pass the border in the order of its memory; returns by what compiled code permutes it."""
    given = [user for user in op.users if user.target is operator.getitem] or [op]
    permutations: dict[Node, Node] = {}
    _lay_out_attention(op, given)
    for node in given:
        order = None if _is_contiguous(node) else _order_of(node)
        if order is None:
            continue
        users = list(node.users)
        with graph.inserting_after(node):
            inside = _permuted(graph, op, node, order)
        with graph.inserting_after(inside):
            outside = _permuted(graph, None, inside, _inverse(order))
        for user in users:
            user.replace_input_with(node, outside)
        permutations[node] = outside
    return permutations


def _give_stacked(graph: Graph, op: Node, outside: Sequence[Node]) -> None:
    """Have attention give the gradients of queries, keys and values as one tensor in the order of its memory, where
    that is what they are put together to: those of three parts of one projection are. Compiled code would turn each
    around, and then all of them back."""
    joined = [_only_user(node) for node in outside]
    if op.target is not BACKWARD or LIBRARY not in op.meta or len(joined) < 2 or len({*joined}) > 1:
        return
    view = _only_user(joined[0])
    turned = _only_user(view)
    if joined[0] is None or view is None or turned is None or turned.target is not aten.permute.default:
        return
    parts = [node.args[0] for node in outside]
    shape = [len(outside), *outside[0].meta["val"].shape]
    order: Any = turned.args[1]
    place = order.index(0)
    left = [axis - 1 for axis in order if axis]
    is_stack = joined[0].target is aten.cat.default and tuple(joined[0].args) in ((outside,), ([*outside], 0))
    if not is_stack or view.target is not aten.view.default or [*view.meta["val"].shape] != shape:
        return
    # Each was permuted, and is back in its order.
    if any([node.args[1][axis] for axis in left] != sorted(left) for node in outside):  # type: ignore[index]
        return
    with graph.inserting_before(joined[0]):
        stacked = graph.call_function(aten.stack.default, (parts, place))
    stacked.meta = {"val": turned.meta["val"].contiguous(), "stack_trace": op.stack_trace}
    turned.replace_all_uses_with(_belongs(stacked, op))


def _only_user(node: Node | None) -> Node | None:
    """The node that alone reads another one."""
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 else None


def _give_reshaped(op: Node) -> None:
    """Have the op give a result in the shape in which alone it is read: a gradient that is returned so would be copied
    by compiled code."""
    for node in [user for user in op.users if user.target is operator.getitem] or [op]:
        while len(node.users) == 1 and _is_contiguous(node):
            (view,) = node.users
            if view.target not in _RESHAPED or LIBRARY in view.meta or view.args[0] is not node:
                break
            node = _belongs(view, op)


def _lay_out_images(op: Node) -> None:
    """Have what a convolution gives be known as lying with channels last, as it does where all that it takes does."""
    for node in [user for user in op.users if user.target is operator.getitem] or [op]:
        value = node.meta["val"]
        if value is not None and value.dim() == len(LAST):
            node.meta = {**node.meta, "val": value.contiguous(memory_format=torch.channels_last)}
            node.meta.pop("tensor_meta", None)


def _lay_out_attention(op: Node, given: list[Node]) -> None:
    """Have what attention gives be known as lying as CUDA's kernels give it: as the query, and gradients as what they
    are of. The trace has it as the CPU's lays it out."""
    if op.target is FORWARD:
        like: dict[Any, Any] = {0: op.args[0]}
    elif op.target is BACKWARD:
        like = dict(enumerate(op.args[1:4]))
    else:
        return
    for node in given:
        source, value = like.get(node.args[1]), node.meta["val"]
        value = torch.empty_like(source.meta["val"]) if isinstance(source, Node) else value.contiguous()
        node.meta = {**node.meta, "val": value}
        node.meta.pop("tensor_meta", None)


def _is_contiguous(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_contiguous()


def _order_of(node: Node) -> list[int] | None:
    """The axes of a dense tensor from the outermost in memory to the innermost; none where it is not dense."""
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    return order if value.permute(order).is_contiguous() else None


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def _permuted(graph: Graph, op: Node | None, value: Node, order: list[int]) -> Node:
    """A permutation of a tensor, in the island of ``op`` or, without one, in compiled code."""
    node = graph.call_function(aten.permute.default, (value, order))
    node.meta = {"val": value.meta["val"].permute(order), "stack_trace": (op or value).stack_trace}
    return node if op is None else _belongs(node, op)


def _belongs(node: Node, op: Node) -> Node:
    """Make a view of what an op takes or gives part of its island; around a kernel of ours it is compiled."""
    if LIBRARY not in op.meta:
        return node
    node.meta = {**node.meta, LIBRARY: op.meta[LIBRARY], WITH: op.name}
    return node
