# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where in the user's code an op came from, while tracing and when tracing fails."""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.contract.errors import RetrogradError
from retrograd.contract.roles import GRAD

_TORCH = str(Path(torch.__file__).parent)
NESTED_FOLDER = str(Path(torch.nested.__file__).parent)
LAYERS = str(Path(torch.nn.modules.__file__).parent)
_OURS = str(Path(__file__).parents[1])
# What calls the model: further out there is none of its code.
_MODEL = str(Path(_OURS) / "doors" / "flat_module.py")
# Modes that are active stand between the model's code and torch.
_MODE = "__torch_function__"
# Frames of these places are never the user's code.
NOT_USER = (_TORCH, _OURS, str(Path(__file__).parents[2] / "runtime"), str(Path(contextlib.__file__)))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# What Python is told of a tensor but for its contents, which may be otherwise at another call.
_ASKS = {
    torch.Tensor.requires_grad.__get__: "requires_grad",  # type: ignore[attr-defined]
    torch.Tensor.stride: "stride",
    torch.Tensor.is_contiguous: "is_contiguous",
    torch.Tensor.as_strided: "stride",
    torch.as_strided: "stride",
}
_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]
# And what a tensor of a trace does not have.
_NOT_TRACED = {
    _GRADIENT: ("the gradient in .grad", "pass it as an argument"),
    torch.Tensor._version.__get__: (  # type: ignore[attr-defined]
        "how often it was written to, by ._version",
        "decide it outside of the model and pass it as an argument",
    ),
}
# The names of what writes to its first argument, and of what has such a name and does not.
_WRITES_NONE = ("requires_grad_", "detach_", "share_memory_", "rename_")
_WRITES = re.compile(r"[a-z]\w*_|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|__setitem__")
# What gives a tensor's contents to Python.
READS = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.item)


class CaptureError(RetrogradError, RuntimeError):
    """A model could not be captured. ``message`` says what and where in the user's code, ``remedy`` what to do about
    it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"capture: {message}\n  remedy: {remedy}")
        self.message = message
        self.remedy = remedy


TO_MODULE = "make it the forward of an nn.Module that has these modules as attributes"
"""What to do with a function that uses modules."""


class ModelError(CaptureError):
    """The model raised what neither its tensors' contents nor PyTorch's tracer explain: eager may raise it as well."""


class SourceTracker(TorchFunctionMode):
    """Writes the user's source line on every op traced, and refuses gradients that would silently get lost.

    A tensor that requires grad and is neither a parameter of the module nor an argument (a closure's, say) would be
    traced as a constant and get no gradient. ``seen`` is called with what each function returns, and the user's
    line; ``read`` with tensors of the user's, neither parameters nor arguments, whose contents Python takes. What
    Python asks of parameters, buffers and arguments, ``given`` by their identity, is added to ``asked``, with the name
    of each. ``meet`` is told of each call, and with what values, and says whether it does nothing.
    ``is_awaited`` says of a tensor that would be refused that it is known only after the run whether it is; those that
    are ``gradless``, by name, require no grad and have none.
    """

    def __init__(
        self,
        seen: Callable[[Any, str | None], None],
        read: Callable[[torch.Tensor], None],
        given: Mapping[int, str] | None = None,
        asked: set[tuple[str, str]] | None = None,
        meet: Callable[[Any, Sequence[Any], Callable[[], str]], bool] = lambda *_call: False,
        is_awaited: Callable[[torch.Tensor, CaptureError], bool] = lambda *_outside: False,
        gradless: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._seen = seen
        self._read = read
        self._given = given or {}
        self._asked = set() if asked is None else asked
        self._meet = meet
        self._is_awaited = is_awaited
        self._gradless = gradless

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = user_frame(sys._getframe(1))
        line = None if frame is None else format_frame(frame)
        if line is not None:
            fx_traceback.current_meta["stack_trace"] = line
        # As module.to(dtype) does with each parameter that has this type already.
        if func == _SET_DATA and args[0] is not args[1]:
            raise CaptureError(
                f"the model assigns to .data of a tensor, which no graph records{_at(frame)}",
                "write to the tensor in place under torch.no_grad(): tensor.copy_(...)",
            )
        # From Python 3.13 on there is `None` where another mode passes no names on.
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and _is_from_outside(leaf):
                error = CaptureError(
                    f"a tensor of shape {tuple(leaf.shape)} that requires grad is neither an argument nor a parameter "
                    f"of the module{_at(frame)}",
                    f"pass it as an argument, register it as a parameter, or detach() it; of a function that uses "
                    f"modules, {TO_MODULE}",
                )
                if not self._is_awaited(leaf, error):
                    raise error
        if func in READS and isinstance(args[0], torch.Tensor) and is_plain_tensor(args[0]):
            self._read(args[0])
            # Of fake memory there would be nothing to read.
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        # It would be written to while it is traced.
        if args and isinstance(args[0], torch.Tensor) and is_plain_tensor(args[0]) and _writes(func):
            raise written_constant(_at(frame))
        if func in _ASKS or func in _NOT_TRACED:
            self._note_asked(func, args, kwargs, sys._getframe(1), line)
        if self._meet(func, leaves, lambda: _at(frame)):
            return None
        result = func(*args, **(kwargs or {}))
        self._seen(result, line)
        return result

    def _note_asked(self, func: Any, args: Any, kwargs: Any, frame: FrameType, line: str | None) -> None:
        name = self._given.get(id(args[0])) if args else None
        if name is None or not _is_called_by_user(func, frame):
            return
        has_none = func == _GRADIENT and name in self._gradless
        if func in _NOT_TRACED and not has_none:
            what, remedy = _NOT_TRACED[func]
            where = "" if line is None else f", at {line}"
            raise CaptureError(f"the model asks a tensor for {what}, which a trace does not have{where}", remedy)
        by_format = func == torch.Tensor.is_contiguous and (len(args) > 1 or kwargs)
        self._asked.add((GRAD if has_none else "stride" if by_format else _ASKS[func], name))


def _is_from_outside(tensor: torch.Tensor) -> bool:
    """Whether a tensor that requires grad is none of the trace's. ``torch.func`` wraps those of the trace, once for
    each transform that is open; what is inside says whose it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return is_plain_tensor(tensor) and tensor.requires_grad


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the user's, with contents, and none of a trace's."""
    is_wrapped = torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not is_wrapped


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the model that is not torch's; of a model made of torch's layers only, the layer's own."""
    layer = None
    while frame is not None and (frame.f_code.co_name == _MODE or not frame.f_code.co_filename.startswith(_OURS)):
        name = frame.f_code.co_filename
        if not name.startswith(NOT_USER):
            return frame
        layer = layer or (frame if name.startswith(LAYERS) else None)
        frame = frame.f_back
    return layer


def _is_called_by_user(func: Any, frame: FrameType | None) -> bool:
    """Whether a function was called from a frame of the user's, but for modes in between that hand the call on."""
    while frame is not None and frame.f_code.co_name == _MODE and frame.f_locals.get("func") == func:
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def is_user_file(filename: str) -> bool:
    """Whether a function of this file is none of torch's and none of ours."""
    return not filename.startswith(NOT_USER)


def place_of_caller() -> str:
    """``, at File "model.py", line 12, in forward`` for the user's code that called ours; empty where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_USER):
        if frame.f_code.co_filename == _MODEL:
            return ""
        frame = frame.f_back
    return _at(frame)


def source_place(stack_trace: str | None) -> str:
    """``/home/me/model.py:12`` from the lines that a traced op keeps of the user's code; empty where it keeps none."""
    match = re.search(r'File "([^"]+)", line (\d+)', stack_trace or "")
    return f"{match[1]}:{match[2]}" if match else ""


def written_constant(where: str) -> CaptureError:
    """The error for a write, at that place, to a tensor that the trace does not know."""
    return CaptureError(
        f"the model writes to a tensor that is neither a parameter, a buffer nor an argument{where}",
        'make it a buffer: self.register_buffer("name", tensor, persistent=False); or pass it as an argument',
    )


def _writes(func: Any) -> bool:
    """Whether a function writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return _WRITES.fullmatch(name) is not None and name not in _WRITES_NONE


IN_PARTS = (
    'or use torch.compile(model, backend="retrograd"), which compiles what is before that line and what is after it '
    "(where it is in a loop, nothing of that function), or retrograd.enable(), which compiles the backward as it runs"
)


def format_frame(frame: FrameType) -> str:
    """The line that a frame is at, as in a traceback."""
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {line}'


def _at(frame: FrameType | None) -> str:
    return "" if frame is None else f", at {format_frame(frame)}"


class LeftToEagerError(CaptureError):
    """A program that no graph holds, of whatever sizes: ``torch.compile`` runs it in eager, where the other doors
    refuse it."""


DENSE_REMEDY = (
    "use dense tensors, such as to_dense(), or an embedding without sparse=True; or "
    'torch.compile(model, backend="retrograd") or retrograd.enable(), which leave what computes with others to eager'
)
"""The remedy for tensors of other layouts than ``torch.strided``."""


def refuse_backward_writes(graph: torch.fx.Graph) -> None:
    """Raise where a backward writes to what the graph takes: PyTorch's trace has the writes of a forward as results,
    and those of a backward as ops."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = node.args[0]
        if isinstance(written, torch.fx.Node) and written.op == "placeholder":
            place = source_place(node.meta.get("stack_trace"))
            raise LeftToEagerError(
                f"the backward writes to a buffer, parameter or argument{place and f' at {place}'}, which a compiled "
                "program does in its forward alone",
                "write to it in the forward, or in a hook on a parameter, which runs outside of the model; or use "
                'torch.compile(model, backend="retrograd"), which runs it in eager, or retrograd.enable()',
            )


def shared_memory_error() -> LeftToEagerError:
    """The error for arguments that AOTAutograd made one of, because a write to one changes the others."""
    return LeftToEagerError(
        "the model writes to an argument, parameter or buffer that shares its memory with another",
        "give each of them memory of its own, with clone()",
    )


@contextlib.contextmanager
def without_stacks_of_fakes() -> Iterator[None]:
    """Keep torch from logging the stack of an error of a trace that is about to be raised, as one of ours, or after
    which another way is gone."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
