# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Refuse models and arguments of which there is no joint graph, and joint graphs without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._functorch._aot_autograd.descriptors import GradAOTOutput
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

from retrograd.contract.signature import Signature
from retrograd.frontend.doors.flat_module import FlatModule, state_name
from retrograd.frontend.python.argument_answers import Answer
from retrograd.frontend.python.source_locations import IN_PARTS, TO_MODULE, CaptureError, shared_memory_error


def check_differentiable(flat: FlatModule, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse to compile where nothing requires grad, or gradients are off."""
    if not torch.is_grad_enabled():
        raise CaptureError(
            "nothing to differentiate: gradients are off, by torch.no_grad() or torch.inference_mode()",
            "compile outside of it; what is compiled runs there as well",
        )
    if not any(t.requires_grad for t in (*flat.parameters(), *tensors)):
        if flat.model is None:
            raise CaptureError(
                "nothing to differentiate: no argument of the function requires grad, and parameters of modules it "
                "uses are not its own",
                f"{TO_MODULE}, or give it an argument that requires grad",
            )
        raise CaptureError(
            "nothing to differentiate: no parameter and no argument requires grad",
            "call requires_grad_() on a parameter or an argument, or use the model without compile_backward",
        )


def check_memory_of_state(model: torch.nn.Module | None) -> None:
    """Refuse parameters and buffers on "meta", which a call could hand over no more than eager could compute with."""
    for name, tensor in [] if model is None else [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise CaptureError(
                f"{name} is on the meta device, without values",
                "give it values, by to_empty() and its initialization; a module that functional_call() is given with "
                "other tensors is to be no part of the model: keep it in a tuple, (module,)",
            )


def check_requiring(flat: FlatModule, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an argument that the model has require grad and that is given a second time."""
    given = [*tensors, *flat.parameters(), *flat.buffers()]
    for number in flat.requiring:
        if sum(other is tensors[number] for other in given) > 1:
            raise CaptureError(
                "the model has an argument require grad that is given to it a second time, as another argument or a "
                "buffer",
                "give a clone() of it",
            )


def check_counters(flat: FlatModule, signature: Signature) -> None:
    """Refuse a model that goes by a number in a buffer that it writes to: a counter, which is another at each call. Of
    truth values there are two."""
    count, state = len(flat.examples or ()), (*signature.params, *signature.buffers)
    written = {state[place].name for place in signature.mutated if place < len(state)}
    names = [state_name(name) for name in flat.small_buffers]
    for answer in flat.answers:
        if not isinstance(answer, Answer) or isinstance(answer.value, bool):
            continue
        asked = {names[place - count] for place in answer.steps.arguments if place >= count}
        if asked & written:
            raise CaptureError(
                f"the model goes by the number in its buffer {min(asked & written)}, and writes another to it, at "
                f"{answer.place}",
                f"index by the tensor: queue.index_copy(0, (start + torch.arange(n)) % len(queue), x); {IN_PARTS}",
            )


def check_gradients(graph_module: torch.fx.GraphModule) -> None:
    """Refuse a joint graph that has no gradient."""
    (output,) = graph_module.graph.find_nodes(op="output")
    if not any(isinstance(desc, GradAOTOutput) for desc in output.meta["desc"]):
        raise CaptureError(
            "nothing to differentiate: no output depends on what requires grad, other than as a view of an argument",
            "return what is computed from a parameter or an argument that requires grad, not detached",
        )
    (results,) = output.args
    if all(r is None for r, desc in zip(results, output.meta["desc"], strict=True) if isinstance(desc, GradAOTOutput)):
        raise CaptureError(
            "nothing to differentiate: autograd's gradient of all that requires grad is None",
            "use the model without compile_backward, or return something else besides that has a gradient",
        )


def check_writes(metadata: ViewAndMutationMeta, primals: int) -> None:
    """Refuse writes to arguments that change more than the values in them."""
    if len(metadata.input_info) != primals:
        raise shared_memory_error()
    if any(info.mutates_metadata or info.mutates_storage_metadata for info in metadata.input_info):
        raise CaptureError(
            "the model changes the shape, strides or storage of an argument, parameter or buffer",
            "work on a view instead: x = x.unsqueeze(0), not x.unsqueeze_(0)",
        )
