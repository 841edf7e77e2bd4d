# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the results of a joint graph become what the model returned: fresh tensors, inputs themselves, views,
constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch.utils import _pytree as pytree

from retrograd.contract.signature import (
    CONSTANT,
    SAME_INPUT,
    TENSOR,
    VIEW_OF_BASE,
    VIEW_OF_INPUT,
    VIEW_OF_OUTPUT,
    OutputSpec,
    TensorType,
)
from retrograd.frontend.doors.signature import type_of
from retrograd.frontend.doors.unregistered_objects import is_handed_on
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.size_expressions import to_size

_VIEW_OF_BASE = (OutputType.alias_of_intermediate, OutputType.alias_of_intermediate_save_as_output)


def output_specs(
    graph_module: torch.fx.GraphModule,
    metadata: ViewAndMutationMeta,
    is_tensor: Sequence[bool],
    leaves: Sequence[Any],
    names: Sequence[str],
    sizes: Mapping[sympy.Symbol, str],
) -> tuple[OutputSpec, ...]:
    """One spec per leaf of what the model returned, in order; ``leaves`` gives the constants among them, ``names``
    what to call each, ``sizes`` the names of the sizes that were left open."""
    values = _output_values(graph_module)
    specs: list[OutputSpec] = []
    index = 0
    for name, tensor, leaf in zip(names, is_tensor, leaves, strict=True):
        if not tensor:
            _check_constant(name, leaf)
            specs.append(OutputSpec(name, CONSTANT, constant=leaf))
            continue
        info = metadata.output_info[index]
        value = values[index]
        kind = _kind(info.output_type)
        kept = type_of(value, sizes)
        stride = tuple(to_size(n, sizes) for n in result_strides(value)) if kind == TENSOR else kept.stride
        specs.append(
            OutputSpec(
                name,
                kind,
                TensorType(kept.shape, kept.dtype, stride, kept.device, bool(info.requires_grad)),
                base=info.base_idx,
                offset=to_size(value.storage_offset(), sizes),
            )
        )
        index += 1
    return tuple(specs)


def result_strides(value: torch.Tensor) -> tuple[int | torch.SymInt, ...]:
    """Strides in elements for a result like ``value``: its own, or contiguous ones where several of its elements are
    one. An expanded axis keeps its stride of 0."""
    reach = 0
    for step, size in sorted((hint(s), hint(n)) for s, n in zip(value.stride(), value.shape, strict=True)):
        if 0 < step <= reach and size > 1:
            return contiguous_strides(value.shape)
        reach += step * (size - 1)
    return tuple(value.stride())


def contiguous_strides(shape: Sequence[int | torch.SymInt]) -> tuple[int | torch.SymInt, ...]:
    """Strides in elements of a tensor of this shape whose elements lie in order."""
    strides: list[int | torch.SymInt] = []
    step: int | torch.SymInt = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if hint(size) else 1)
    return tuple(reversed(strides))


def is_contiguous(value: torch.Tensor) -> bool:
    """Whether a traced tensor is, for the sizes that it was traced with; to ask the tensor would fix them."""
    expected = contiguous_strides(value.shape)
    steps = zip(value.stride(), expected, value.shape, strict=True)
    return all(hint(a) == hint(b) for a, b, n in steps if hint(n) != 1) or 0 in map(hint, value.shape)


def find_order(strides: Sequence[int | torch.SymInt]) -> AxisOrder:
    """The order of axes that these strides come from."""
    order = sorted(range(len(strides)), key=lambda axis: -hint(strides[axis]))
    return AxisOrder(tuple(order), frozenset(axis for axis, step in enumerate(strides) if hint(step) == 0))


def hint(size: int | torch.SymInt) -> int:
    """The number that a size was traced with; to ask the size itself would fix it."""
    return size if isinstance(size, int) else int(size.node.hint)


def _check_constant(name: str, leaf: Any) -> None:
    """Refuse a result that may hold tensors of the trace, or what changes from call to call."""
    if not is_handed_on(leaf):
        raise CaptureError(
            f"{name} of what the model returns is a {type(leaf).__name__}, whose tensors would not be seen",
            "return tensors, containers of them, and objects that have them as attributes",
        )


def _kind(output_type: OutputType) -> str:
    if output_type is OutputType.is_input:
        return SAME_INPUT
    if output_type is OutputType.alias_of_input:
        return VIEW_OF_INPUT
    if output_type is OutputType.alias_of_intermediate_base_is_user_output:
        return VIEW_OF_OUTPUT
    return VIEW_OF_BASE if output_type in _VIEW_OF_BASE else TENSOR


def _output_values(graph_module: torch.fx.GraphModule) -> list[torch.Tensor]:
    (output,) = graph_module.graph.find_nodes(op="output")
    flat = pytree.arg_tree_leaves(*output.args)
    plain = {
        desc.idx: node.meta["val"]
        for node, desc in zip(flat, output.meta["desc"], strict=True)
        if isinstance(desc, PlainAOTOutput)
    }
    return [plain[i] for i in sorted(plain)]


@dataclass(frozen=True)
class AxisOrder:
    """How the elements of a tensor lie, whatever its sizes: ``outer_to_inner`` are its axes by descending stride,
    ``expanded`` those of stride 0."""

    outer_to_inner: tuple[int, ...]
    expanded: frozenset[int]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that lies so."""
        once = tensor[tuple(slice(1) if axis in self.expanded else slice(None) for axis in range(tensor.dim()))]
        inverse = [self.outer_to_inner.index(axis) for axis in range(tensor.dim())]
        copy = once.permute(self.outer_to_inner).contiguous().permute(inverse)
        return copy.expand(tensor.shape)
