# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the results of a joint graph become what the model returned: fresh tensors, inputs themselves, views,
constants."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch.utils import _pytree as pytree

from retrograd.frontend.signature import OutputSpec, TensorType
from retrograd.frontend.source import CaptureError

_CONSTANTS = (bool, int, float, complex, str, bytes, enum.Enum, type, type(None), torch.dtype, torch.device)
_VIEW_OF_BASE = (
    OutputType.alias_of_intermediate,
    OutputType.alias_of_intermediate_save_as_output,
)


def output_specs(
    graph_module: torch.fx.GraphModule,
    metadata: ViewAndMutationMeta,
    is_tensor: Sequence[bool],
    leaves: Sequence[Any],
    out_spec: pytree.TreeSpec,
) -> tuple[OutputSpec, ...]:
    """One spec per leaf of what the model returned, in order; ``leaves`` gives the constants among them."""
    names = _leaf_names(out_spec)
    values = _output_values(graph_module)
    specs: list[OutputSpec] = []
    index = 0
    for name, tensor, leaf in zip(names, is_tensor, leaves, strict=True):
        if not tensor:
            _check_constant(name, leaf)
            specs.append(OutputSpec(name, "constant", constant=leaf))
            continue
        info = metadata.output_info[index]
        value = values[index]
        kind = _kind(info.output_type)
        kept = TensorType.of(value)
        stride = result_strides(value) if kind == "tensor" else kept.stride
        specs.append(
            OutputSpec(
                name,
                kind,
                TensorType(kept.shape, kept.dtype, stride, kept.device, bool(info.requires_grad)),
                base=info.base_idx,
                offset=int(value.storage_offset()),
            )
        )
        index += 1
    return tuple(specs)


def result_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements for a result like ``value``: its own, or contiguous ones where several of its elements are
    one. An expanded axis keeps its stride of 0."""
    reach = 0
    for step, size in sorted((int(s), int(n)) for s, n in zip(value.stride(), value.shape, strict=True)):
        if 0 < step <= reach and size > 1:
            return tuple(int(s) for s in torch.empty(value.shape, device="meta").stride())
        reach += step * (size - 1)
    return tuple(int(s) for s in value.stride())


def _check_constant(name: str, leaf: Any) -> None:
    """Refuse a result that may hold tensors of the trace, or what changes from call to call."""
    if not isinstance(leaf, _CONSTANTS):
        raise CaptureError(
            f"{name} of what the model returns is a {type(leaf).__name__}, whose tensors would not be seen",
            "return tensors and containers of them; or tell torch of a class of your own with "
            "torch.utils._pytree.register_dataclass",
        )


def _kind(output_type: OutputType) -> str:
    if output_type is OutputType.is_input:
        return "input"
    if output_type is OutputType.alias_of_input:
        return "view_of_input"
    if output_type is OutputType.alias_of_intermediate_base_is_user_output:
        return "view_of_output"
    return "view_of_base" if output_type in _VIEW_OF_BASE else "tensor"


def _leaf_names(out_spec: pytree.TreeSpec) -> list[str]:
    numbered = pytree.tree_unflatten(list(range(out_spec.num_leaves)), out_spec)
    keyed, _ = pytree.tree_flatten_with_path(numbered)
    return ["output" + pytree.keystr(path) for path, _ in keyed]


def _output_values(graph_module: torch.fx.GraphModule) -> list[torch.Tensor]:
    (output,) = graph_module.graph.find_nodes(op="output")
    flat = pytree.arg_tree_leaves(*output.args)
    plain = {
        desc.idx: node.meta["val"]
        for node, desc in zip(flat, output.meta["desc"], strict=True)
        if isinstance(desc, PlainAOTOutput)
    }
    return [plain[i] for i in sorted(plain)]
