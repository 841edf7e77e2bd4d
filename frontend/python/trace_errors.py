# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Say what went wrong where PyTorch's trace fails: in the user's words, with the line and a remedy."""

from __future__ import annotations

import traceback
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.frontend.python.source_locations import (
    DENSE_REMEDY,
    IN_PARTS,
    LAYERS,
    NESTED_FOLDER,
    NOT_USER,
    CaptureError,
    ModelError,
    written_constant,
)

# How PyTorch's error begins where requires_grad_(False) meets a tensor of a trace.
_NO_LEAF = "you can only change requires_grad flags of leaf variables"
# What PyTorch says where a tensor of a trace is written into one that is none.
_WRITES_CONSTANT = "mutating a non-functional tensor with a functional tensor"
# How PyTorch's errors begin where a tensor of a trace is asked for its memory.
_LEAVES_TORCH = (".numpy() is not supported for tensor subclasses", "Cannot access data pointer of Tensor")
_DATA_DEPENDENT = {
    "DataDependentOutputException": "control flow or .item(): a Python value that depends on a tensor's contents",
    "GuardOnDataDependentSymNode": "control flow: a branch that depends on a tensor's contents",
    "DynamicOutputShapeException": "shape: the size of a result depends on a tensor's contents",
}
_NESTED_REMEDY = "pad what is shorter, and mask what was padded"
_DATA_DEPENDENT_REMEDY = (
    "use torch.where or masks instead, or compute the value outside the model and pass it as an argument; "
    "in place of x[i] by an i of no axis, write x[i[None]][0]"
)
# Where PyTorch has torch.cond, scan and the like.
_CONTROL_FOLDER = "_higher_order_ops"
# What to do about single ops.
_REMEDIES = {
    "aten.bincount.default": "count with F.one_hot(x, n).sum(0), by a number n of classes",
    "aten._unique2.default": "pass what unique() gives as an argument",
    "aten.nonzero.default": "use torch.where on whole tensors, or pass the indices as an argument",
    "aten.repeat_interleave.Tensor": "pass output_size=, the sum of the repeats, as a number",
    "aten._local_scalar_dense.default": (
        "use torch.where, or pass the value as an argument; in place of x[i] and x.narrow(0, i, n) by an i of no axis, "
        "write x[i[None]][0] and x.index_select(0, i + torch.arange(n))"
    ),
}


def capture_error(error: Exception) -> CaptureError:
    """Translate what the tracer raised: the line of the user's code, what was met there and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [f for f in frames if not f.filename.startswith(NOT_USER)]
    # Of a model made of torch's layers only, the layer's own line says more than none.
    user = user or [f for f in frames if f.filename.startswith(LAYERS) and f.name == "forward"]
    where = (
        f' at File "{user[-1].filename}", line {user[-1].lineno}, in {user[-1].name}\n    {user[-1].line}'
        if user
        else ""
    )
    kind = type(error).__name__
    if any(f.filename.startswith(NESTED_FOLDER) for f in frames):
        return CaptureError(f"a nested tensor is made, which no graph holds{where}", f"{_NESTED_REMEDY}; {IN_PARTS}")
    if control := [Path(f.filename).stem for f in frames if Path(f.filename).parent.name == _CONTROL_FOLDER]:
        return CaptureError(
            f"PyTorch's {control[0]}, which is traced by torch.compile alone{where}",
            f"compute both branches and choose with torch.where, or write a Python loop; {IN_PARTS}",
        )
    if kind in _DATA_DEPENDENT:
        remedy = _REMEDIES.get(str(getattr(error, "func", "")), _DATA_DEPENDENT_REMEDY)
        return CaptureError(f"data-dependent {_DATA_DEPENDENT[kind]}{where}", f"{remedy}; {IN_PARTS}")
    first = _first_line(error)
    if first.startswith(_LEAVES_TORCH):
        return CaptureError(
            f"a tensor's contents are handed to NumPy or another library, which no graph records{where}",
            f"compute it outside of the model and pass the result as an argument; {IN_PARTS}",
        )
    if _WRITES_CONSTANT in first:
        return written_constant(where)
    if first.startswith(_NO_LEAF):
        return CaptureError(
            f"the model has a tensor that requires grad require none, which no trace does{where}",
            "do so before it is compiled, or use detach() of it: of a module's parameters, torch.func.functional_call("
            "module, {name: p.detach() for name, p in module.named_parameters()}, args)",
        )
    op = _untraceable_op(error)
    if op is not None:
        return CaptureError(
            f"PyTorch cannot trace {op}, whether or not it can run it: {kind}: {first}{where}",
            "call the op outside of the model, or write what it computes in other ops",
        )
    if first.startswith("Sparse ") and "do not have strides" in first:
        return CaptureError(f"the model computes with a tensor of a sparse layout{where}", DENSE_REMEDY)
    remedy = f"the model must run on these arguments in eager mode first; where it does, {IN_PARTS.removeprefix('or ')}"
    return ModelError(f"{kind}: {first}{where}", remedy)


def is_about_contents(error: Exception) -> bool:
    """Whether the tracer raised it because the model asks for the contents of a tensor."""
    return type(error).__name__ in _DATA_DEPENDENT or _first_line(error).startswith(_LEAVES_TORCH)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _untraceable_op(error: Exception) -> str | None:
    """The op at which PyTorch's own kernel for fake tensors fails by its code, and not by a check of the arguments."""
    if not isinstance(error, TypeError | AttributeError | AssertionError | NotImplementedError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ops = [frame.f_locals.get("func") for frame in frames if frame.f_code is FakeTensorMode._dispatch_impl.__code__]
    return str(ops[-1]) if ops else None
