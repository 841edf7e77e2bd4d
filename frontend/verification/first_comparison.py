# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The first call of a compiled program compared with eager, output by output and gradient by gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._functorch._aot_autograd.descriptors import GradAOTOutput

from retrograd.contract.signature import CONSTANT
from retrograd.frontend.doors.capture import CapturedGraph
from retrograd.frontend.hooks.hook_calls import hooks_left_out
from retrograd.frontend.verification.errors import VerificationError
from retrograd.frontend.verification.rounding import find_tolerances

# Largest relative error (norm of the difference over the norm of eager's) that rounding explains, by dtype; 0 for the
# others.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

Call = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def verified(
    call: Call,
    captured: CapturedGraph,
    reference: Call | None = None,
    locate: Callable[[Sequence[torch.Tensor]], str] | None = None,
) -> Call:
    """``call``, whose first use is compared with the captured model, or ``reference``, on copies of its arguments.
    Where they differ, the error ends with what ``locate`` says of the arguments."""
    pending = [True]

    def checked(primals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if pending:
            try:
                with hooks_left_out():
                    compare_with_eager(call, captured, primals, reference)
            except VerificationError as error:
                if locate is None:
                    raise
                raise VerificationError(f"{error}\n{locate(primals)}") from error
            pending.clear()
        return call(primals)

    return checked


def compare_with_eager(
    call: Call, captured: CapturedGraph, primals: Sequence[torch.Tensor], reference: Call | None = None
) -> None:
    """Run ``call`` and the captured model on copies of ``primals``, backpropagate the same tangents, compare all.

    A ``reference`` takes the place of the captured model. Both start from the same state of torch's default generator,
    which is as before afterwards.

    Raises:
        VerificationError: they differ; names the first output, buffer or gradient that does, and by how much.
    """
    names = [s.name for s in (*captured.signature.params, *captured.signature.buffers)]
    names += [i.name for i in captured.signature.inputs if i.type is not None]
    run_reference = reference or partial(run_eager, captured)
    allowed, allowed_gradients = _tolerances(captured)
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=()):
        ours, theirs = _copies(primals), _copies(primals)
        state = torch.get_rng_state()
        compiled = list(call(ours))
        torch.set_rng_state(state)
        eager = list(run_reference(theirs))
        outputs = [o.name for o in captured.signature.outputs if o.kind != CONSTANT]
        for name, a, b in zip(outputs, compiled, eager, strict=True):
            _compare(name, a, b, allowed)
        for name, a, b in zip(names, ours, theirs, strict=True):
            _compare(name, a, b, allowed)
        differentiable = [(a, b) for a, b in zip(compiled, eager, strict=True) if b.requires_grad]
        tangents = [torch.randn_like(b) for _, b in differentiable]
        wanted = [i for i, t in enumerate(theirs) if t.requires_grad]
        gradients = (
            torch.autograd.grad(
                [p[side] for p in differentiable], [tensors[i] for i in wanted], tangents, allow_unused=True
            )
            for side, tensors in enumerate((ours, theirs))
        )
        pairs = [
            [torch.zeros_like(ours[i]) if g is None else g for g in p] for i, *p in zip(wanted, *gradients, strict=True)
        ]
        # A gradient that is zero but for rounding (a bias in front of a batch norm) is measured against the others.
        floor = 1e-2 * max((float(to_double(b).norm()) for _, b in pairs), default=0.0)
        for i, (a, b) in zip(wanted, pairs, strict=True):
            _compare(f"gradient of {names[i]}", a, b, allowed_gradients.get(i, 0.0), floor=floor)


def _tolerances(captured: CapturedGraph) -> tuple[float, dict[int, float]]:
    """Find the errors that are allowed to the outputs, and to each gradient, by the number of the primal, for what they
    are computed from."""
    graph = captured.graph_module.graph
    tolerances = find_tolerances(graph, tolerance_of)
    primals = {node.meta["desc"]: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    (output,) = graph.find_nodes(op="output")
    forward, gradients = 0.0, {}
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):
        if not isinstance(node, torch.fx.Node):
            continue
        if isinstance(description, GradAOTOutput):
            gradients[primals[description.grad_of]] = tolerances[node]
        else:
            forward = max(forward, tolerances[node])
    return forward, gradients


def forward_tolerance(captured: CapturedGraph) -> float:
    """The relative error that rounding explains of the outputs, for what they are computed from."""
    return _tolerances(captured)[0]


def _copies(primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # A leaf that requires grad could not be written to in place, which the model may do.
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in primals]


def run_eager(captured: CapturedGraph, primals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the user's model, with these parameters, buffers and tensor arguments in the place of its own."""
    state = len(captured.signature.params) + len(captured.signature.buffers)
    qualified = [*captured.joint.params_spec, *captured.joint.buffers_spec]
    outputs: Sequence[torch.Tensor] = torch.func.functional_call(
        captured.module, dict(zip(qualified, primals[:state], strict=True)), tuple(primals[state:]), tie_weights=False
    )
    return outputs


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative error that rounding explains; none of integers and booleans."""
    return TOLERANCES.get(dtype.to_real() if dtype.is_complex else dtype, 0.0)


def to_double(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as float64; complex ones as pairs along one more axis."""
    plain = tensor.detach()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).double()


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of ``expected``, or ``floor`` if that is larger; infinite if infinities or
    NaNs are in other places."""
    a, b = (to_double(tensor) for tensor in (found, expected))
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a[finite], b[finite]
    difference = float((a - b).norm())
    return difference / max(float(b.norm()), floor, 1e-30) if difference else 0.0


def _compare(name: str, compiled: torch.Tensor, eager: torch.Tensor, allowed: float, *, floor: float = 0.0) -> None:
    if compiled.shape != eager.shape or compiled.dtype != eager.dtype:
        raise VerificationError(
            f"{name}: compiled {compiled.dtype} {tuple(compiled.shape)}, eager {eager.dtype} {tuple(eager.shape)}"
        )
    own = tolerance_of(eager.dtype)
    # What is rounded in a wider type is as exact as what it is computed from; integers are the same or they are not.
    error, tolerance = relative_error(compiled, eager, floor), max(own, allowed) if own else own
    if not error <= tolerance:
        raise VerificationError(
            f"{name}: the compiled value differs from eager's by {error:.2e} (relative norm; {tolerance:.0e} is "
            f"allowed for {eager.dtype}); the model is not compiled correctly, please report it"
        )
