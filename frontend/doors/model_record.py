# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Digests what a model does: by that a program that was compiled in another process is known to be the model's.

The forward runs once on fake tensors, as the first half of a trace does, and what reaches PyTorch is written down: each
call of its functions with arguments and the user's line, each aten op below autograd, and the graph that autograd made
of them, with what its nodes keep. A joint graph follows from these. A trace has the backward as well, and goes through
decompositions: it takes ten times as long.

What such a record does not show is refused: hooks, a look at autograd's graph, where hooks can be put, Python and C++
of others in a backward, ops of other libraries, objects of unknown kinds. There is then no digest, and the model is
traced.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.fx import traceback as fx_traceback
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrograd.frontend.doors.flat_module import TENSOR, FlatModule
from retrograd.frontend.doors.recorded_graph import Doubt, describe_graph, is_ours
from retrograd.frontend.hooks.pack_hooks import find_open_hooks
from retrograd.frontend.python.argument_answers import AskedArguments
from retrograd.frontend.traceable.portable_ops import portable_ops

_LOG = logging.getLogger(__name__)
# Of whose ops the gradients are known by PyTorch's release and by our sources.
_NAMESPACES = {"aten", "prim", "prims", "retrograd"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
# The attribute of tensors that leads to it.
_GRAPH = "grad_fn.__get__"
_FOLDERS = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, enum.__file__))


def record_model(flat: FlatModule, examples: Sequence[torch.Tensor], constants: Sequence[Any]) -> str:
    """The digest of what the model does with arguments like these, of which ``constants`` are no tensors; nothing runs.

    Raises:
        Doubt: it does what a record does not show, or fails on fake tensors.
    """
    flat.examples, flat.made.kind = tuple(examples), FakeTensor
    record = _Record()
    try:
        _write(flat, examples, constants, record)
    except Doubt:
        raise
    except Exception as error:
        raise Doubt(f"it fails while it is recorded: {error}") from error
    finally:
        flat.tracing = False
        record.forget_tensors()
        kept = flat.made.take_out_kept(flat.parts())
    if kept is not None:
        raise Doubt(str(kept))
    _refuse_what_trace_asks(flat)
    record.write("outputs", *(_constant(leaf) for leaf in flat.out_leaves), *flat.out_names, repr(flat.out_spec))
    return record.digest


def _write(flat: FlatModule, examples: Sequence[torch.Tensor], constants: Sequence[Any], record: _Record) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        state = {**dict(flat.named_parameters()), **dict(flat.named_buffers())}
        fakes = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
        arguments = [mode.from_tensor(tensor) for tensor in examples]
        record.write(repr(flat.in_spec), *map(record.encode, [*fakes.values(), *arguments, *constants]))
        outputs = _run(flat, fakes, arguments, mode, record)
        # Of those that are computed alike, which are given.
        record.write("given", *map(record.encode_known, outputs))
        record.write(*describe_graph([*outputs, *fakes.values(), *arguments], record.encode))


def _run(
    flat: FlatModule,
    fakes: Mapping[str, torch.Tensor],
    arguments: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    record: _Record,
) -> Sequence[torch.Tensor]:
    flat.tracing = True
    with (
        stateless._reparametrize_module(flat, dict(fakes)),
        fx_traceback.preserve_node_meta(),
        AskedArguments(),
        mode,
        portable_ops(),
        _functions_refused(record),
        _Ops(record),
        _Calls(record),
    ):
        outputs: Sequence[torch.Tensor] = flat(*arguments)
    return outputs


@contextlib.contextmanager
def _functions_refused(record: _Record) -> Iterator[None]:
    """While this is open, this thread applies no ``autograd.Function`` but ours: one that writes to a view is hidden
    in the node of that write."""
    # That of a base: who keeps ``apply`` of a class under a name of his own comes by here too.
    thread = threading.get_ident()

    def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not is_ours(kind):
            record.refuse(f"Python of the user's computes a gradient: {kind.__qualname__}")
        return super(_SingleLevelFunction, kind).apply(*args, **kwargs)  # type: ignore[misc]

    with mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply)):
        yield


def _refuse_what_trace_asks(flat: FlatModule) -> None:
    """Raise where the trace asked the arguments' contents, or the model whether it compiles, or saw it put hooks on
    itself or on what it computes."""
    if flat.checks or flat.answers or flat.asks_compiling or flat.own_hooks.has_noted:
        raise Doubt("it asks what arguments contain, or whether it compiles, or hooks its own modules")
    if flat.hooks_graph:
        raise Doubt("Python of the user's runs in its backward: hooks on autograd's graph, or custom functions")
    for module in flat.modules():
        if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
            raise Doubt("a module has hooks")


def _constant(leaf: Any) -> str:
    if leaf is TENSOR:
        return "tensor"
    if not isinstance(leaf, _PLAIN):
        raise Doubt(f"it returns a {type(leaf).__name__}")
    return f"{type(leaf).__name__} {leaf!r}"


class _Record:
    """A digest of what was written down so far; tensors are known by the order in which they came."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        # Kept besides, as the model may catch what is raised.
        self.doubt: Doubt | None = None
        # How many functions of PyTorch's run, one inside of the other.
        self.calls = 0
        self._numbers: dict[int, int] = {}
        # By address a tensor is known only for as long as it lives.
        self._alive: list[Any] = []

    @property
    def digest(self) -> str:
        if self.doubt is not None:
            raise self.doubt
        return self._hash.hexdigest()

    def refuse(self, message: str) -> NoReturn:
        self.doubt = Doubt(message)
        raise self.doubt

    def forget_tensors(self) -> None:
        """Let go of the tensors: what is alive after that is held by the model."""
        self._alive.clear()
        self._numbers.clear()

    def write(self, *texts: str) -> None:
        for text in texts:
            _LOG.debug("%s", text)
            data = text.encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def encode(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value)
        # Exactly: classes derived from these may behave otherwise.
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, _NAMED):
            return str(value)
        if type(value) in (tuple, list, torch.Size):
            return f"{type(value).__name__}({','.join(map(self.encode, value))})"
        if type(value) is dict:
            return "{" + ",".join(f"{self.encode(k)}:{self.encode(v)}" for k, v in value.items()) + "}"
        if type(value) is slice:
            return f"slice{self.encode((value.start, value.stop, value.step))}"
        if isinstance(value, torch.finfo | torch.iinfo):
            return repr(value)
        self.refuse(f"a {type(value).__name__} is handed to PyTorch")

    def encode_known(self, tensor: torch.Tensor) -> str:
        """As :meth:`encode`, of a tensor that has a number: one that came by no function that was seen has none."""
        if id(tensor) not in self._numbers:
            self.refuse("it has a tensor that no function of PyTorch's has made")
        return self.encode(tensor)

    def _encode_tensor(self, tensor: torch.Tensor) -> str:
        number = self._numbers.get(id(tensor))
        if number is not None:
            return f"%{number}"
        if not isinstance(tensor, FakeTensor) or type(tensor) not in (FakeTensor, torch.nn.Parameter):
            self.refuse(f"it computes with a {type(tensor).__name__} that is neither an argument nor in its state")
        number = self._numbers[id(tensor)] = len(self._numbers)
        self._alive.append(tensor)
        strided = tensor.layout == torch.strided
        where = (tuple(tensor.stride()), tensor.storage_offset()) if strided else ()
        return (
            f"%{number} new {tensor.dtype} {tuple(tensor.shape)} {where} {tensor.device} {tensor.layout} "
            f"{tensor.requires_grad} {tensor.is_leaf} {tensor.is_conj()} {tensor.is_neg()} {tensor.is_inference()}"
        )


class _Calls(TorchFunctionMode):
    """Writes down each call of a function of PyTorch's, the modes that it is made in and the user's line."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if find_open_hooks() is not None:
            self._record.refuse("hooks of saved tensors are open in it")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._record.refuse("it has a transform of torch.func")
        record = self._record
        if not record.calls:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    record.encode_known(leaf)
        modes = f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {torch._C._is_any_autocast_enabled()}"
        arguments = [record.encode(value) for value in args]
        named = [f"{name}={record.encode(kwargs[name])}" for name in sorted(kwargs)]
        name = _name_of(func)
        if name is None:
            record.refuse(f"it calls {func!r} by way of PyTorch")
        if name == _GRAPH:
            # Hooks can be put on its nodes, and on what these keep, which nothing shows.
            record.refuse("it looks at autograd's graph")
        marks = record.encode(fx_traceback.current_meta.get("custom"))
        record.write(name, modes, marks, _place(sys._getframe(1)), *arguments, *named)
        record.calls += 1
        try:
            result = func(*args, **kwargs)
        finally:
            record.calls -= 1
        # Of a view it is another tensor than the op below autograd gave.
        record.write(*(record.encode(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        return result


class _Ops(TorchDispatchMode):
    """Writes down each aten op below autograd, with what it gives."""

    def __init__(self, record: _Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
            self._record.refuse(f"it calls {func}, of whose gradient nothing is known")
        if torch._C._is_torch_function_all_disabled():
            self._record.refuse("it calls PyTorch where no mode sees its functions")
        if not self._record.calls:
            # A function of C++ with a gradient of its own, for one, which the node of a write to a view hides. It is
            # told at the end: not all C++ lets an error through.
            self._record.doubt = Doubt(f"other code than PyTorch's functions calls {func}")
        kwargs = kwargs or {}
        record = self._record
        named = [f"{name}={record.encode(kwargs[name])}" for name in sorted(kwargs)]
        record.write(str(func), *(record.encode(value) for value in args), *named)
        result = func(*args, **kwargs)
        record.write(record.encode(result))
        return result


def _name_of(func: Any) -> str | None:
    """The name of a function of PyTorch's or ours; none of another, which a mode sees if a subclass calls it."""
    owner = getattr(func, "__self__", None)
    if type(owner).__name__ in ("getset_descriptor", "property"):
        # What reads or sets an attribute of a tensor.
        read = owner.fget if isinstance(owner, property) else owner
        return f"{getattr(read, '__name__', '')}.{func.__name__}"
    module = getattr(func, "__module__", None) or getattr(getattr(func, "__objclass__", None), "__module__", None)
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None)
    if name is None or not (module is None or module.partition(".")[0] in ("torch", "retrograd", "builtins")):
        return None
    return f"{module}.{name}"


def _place(frame: FrameType | None) -> str:
    """The innermost line of the model's, if there is one."""
    while frame is not None and frame.f_code is not _run.__code__:
        code = frame.f_code
        name = code.co_filename
        if not (name.startswith(_FOLDERS) or "retrograd" in frame.f_globals.get("__name__", "")[:9]):
            return f"{name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return ""
