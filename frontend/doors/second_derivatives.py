# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of gradients of what is compiled: computed in eager where that is possible, else refused with the line.

Compiled code has no derivative of its backward. AOTAutograd's ``autograd.Function`` raises one step too late, and names
neither what was compiled nor where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd.contract.errors import RetrogradError
from retrograd.frontend.doors.function_changes import FunctionChange
from retrograd.frontend.python.source_locations import place_of_caller

_REMEDY = (
    "compile a function that has the inner derivative in it, by torch.autograd.grad(..., create_graph=True): the loss "
    "of a PINN, a WGAN's gradient penalty"
)


_OF_WRITES = (
    "write to it after backward(), or have the model read a clone() of it; or compile with partition='default', which "
    "saves what eager does: others save a buffer where that takes fewer bytes than what is computed from it"
)


class WrittenBetweenError(RetrogradError, RuntimeError):
    """A tensor that was saved for the backward was written to before it."""


class SecondDerivativeError(RetrogradError, RuntimeError):
    """A gradient of a gradient of what was compiled."""


class SecondDerivatives(FunctionChange):
    """Gives what AOTAutograd builds in this thread second derivatives, of ``eager``, or an error.

    ``name`` is what was compiled, to its user; ``eager`` is a function of the same tensors that gives the same outputs,
    if there is one. It is set aside (``eager = None``) where it would not be the same. Releases of PyTorch before 2.13
    cannot be changed: its own error is all that they give.
    """

    def __init__(self, name: str, eager: Callable[..., Sequence[Any]] | None = None) -> None:
        self.name, self.eager = name, eager

    def _change(self, function: Any) -> Any:
        # Imported where a trace has done so: it takes a second, and who loads a file traces nothing.
        from torch._dynamo.eval_frame import set_code_exec_strategy
        from torch._dynamo.types import FrameAction, FrameExecStrategy

        forward, backward = function.forward, function.backward
        autocast = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}

        def forward_kept(ctx: Any, *given: Any) -> Any:
            ctx.given = None if self.eager is None else [(t, getattr(t, "_version", 0)) for t in given]
            return forward(ctx, *given)

        def backward_twice(ctx: Any, *given: Any) -> Any:
            if torch.is_grad_enabled() and self._is_one_to_one(function.metadata) and ctx.given is not None:
                return self._differentiate(ctx.given, given[0], autocast)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                # Whoever keeps a loss is not to keep all that it was computed from.
                ctx.given = None
            try:
                return backward(ctx, *given)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                told = str(error).partition(" Hint:")[0]
                raise WrittenBetweenError(f"backward of {self.name}: {told}\n  remedy: {_OF_WRITES}") from error

        for ours in (forward_kept, backward_twice, self._refuse_later):
            # In a gradient that a model takes itself, which torch.compile runs between its graphs, these and what they
            # call would be compiled too.
            set_code_exec_strategy(ours.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
        function.forward, function.backward = staticmethod(forward_kept), staticmethod(backward_twice)
        function._double_backward = staticmethod(self._refuse_later)
        return function

    def _is_one_to_one(self, metadata: Any) -> bool:
        """Whether what AOTAutograd's function takes and gives are the arguments and results themselves."""
        written = any(i.mutates_data or i.mutates_metadata for i in metadata.input_info)
        return self.eager is not None and not written and not metadata.num_intermediate_bases

    def _differentiate(self, given: Sequence[Any], tangents: Sequence[Any], autocast: dict[str, torch.dtype]) -> Any:
        """The gradients of all arguments, which can be differentiated, by a run of the forward in eager."""
        tensors = [t for t, _ in given]
        if any(isinstance(t, torch.Tensor) and t._version != version for t, version in given):
            raise SecondDerivativeError(
                f"gradients of gradients of {self.name}: an argument was written to since; clone() it before"
            )
        assert self.eager is not None
        # Under names of their own: of two arguments one may have been computed from the other, and hooks of theirs see
        # what comes of this.
        tensors = [t.view_as(t) if isinstance(t, torch.Tensor) and t.requires_grad else t for t in tensors]
        with contextlib.ExitStack() as stack:
            for device, dtype in autocast.items():
                stack.enter_context(torch.autocast(device, dtype))
            outputs = self.eager(*tensors)
        pairs = [
            (o, t)
            for o, t in zip(outputs, tangents, strict=True)
            if isinstance(o, torch.Tensor) and o.requires_grad and t is not None
        ]
        wanted = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [t for _, t in pairs], create_graph=True, allow_unused=True
            )
        )
        return tuple(next(found) if isinstance(t, torch.Tensor) and t.requires_grad else None for t in tensors)

    def _refuse_later(self, ctx: Any, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        """The gradients, of which the gradients are refused if they are asked for."""
        message = (
            f"gradients of gradients of {self.name}, which retrograd compiled, are not there: those that were computed "
            f"with create_graph=True{place_of_caller()}\n  remedy: {_REMEDY}; or compute them in eager, on the model "
            "itself"
        )

        class RefusedTwice(torch.autograd.Function):
            @staticmethod
            def forward(_ctx: Any, *_tensors: Any) -> Any:
                return run()

            @staticmethod
            def backward(_ctx: Any, *_gradients: Any) -> Any:
                raise SecondDerivativeError(message)

        tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
        # Saved tensors are detached: without one that requires grad, nothing would be recorded.
        return RefusedTwice.apply(torch.empty(0, requires_grad=True, device="cpu"), *tensors)  # type: ignore[no-untyped-call]
