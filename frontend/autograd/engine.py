# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What stands before PyTorch's engine while a backward may be captured.

Compiled autograd's switch is one for the whole process, it refuses a second thread and a backward inside a backward,
and forgets the callbacks that are queued on the engine. So it is thrown for one call at a time, under a lock, by an
engine that sees every ``backward()`` and ``grad()`` before PyTorch's own does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import _C
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import compiled_autograd
from torch._dynamo.eval_frame import skip_code
from torch.autograd import Variable

from retrograd.frontend.autograd.compiler import BackwardCall, OrderedCompiler, RuntimeCapture
from retrograd.frontend.autograd.reducers import take_over_reducers

_set_compiler = _C._dynamo.compiled_autograd.set_autograd_compiler
# Takes (inputs, sizes, scalars, hooks, packed_data), gives the results of the backward.
CapturedFunction = Callable[..., list[Any]]


class Client(Protocol):
    """Who wants backwards captured. There is one in a process, since PyTorch's cache of captures does not know who
    asked for one."""

    def is_active(self) -> bool:
        """Whether the calling thread's next backward is to be captured."""

    def receive(self, capture: RuntimeCapture) -> CapturedFunction:
        """Take a new capture; the function returned runs in its place, from now on, wherever PyTorch finds that the
        capture fits."""

    def refuse(self, error: Exception) -> None:
        """Be told that PyTorch could not capture a backward, which now runs eagerly."""


class Engine:
    """Has the backwards of a client captured, and runs the others as PyTorch does; like the client, one in a process.

    Threads run one after the other, under ``lock``, the one that is held while a graph is traced: a trace runs a
    backward, and a capture is traced and compiled inside one. Never captured are gradients of gradients
    (``create_graph=True``), anomaly mode, and a backward inside a backward: these run eagerly.
    """

    def __init__(self, client: Client, lock: AbstractContextManager[Any]) -> None:
        self._engine: Any = Variable._execution_engine
        self._client, self._lock = client, lock
        # Of the captured backward that is running, guarded by the lock: the callbacks queued so far (None: there is
        # none), and whether anything of it has run.
        self._callbacks: list[Callable[[], None]] | None = None
        self._began = False

    def run_backward(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """As ``torch._C._EngineBase.run_backward``: (tensors, grad_tensors, keep_graph, create_graph, inputs)."""
        # Where a function that is under torch.compile calls backward(), Dynamo is not to look at what follows.
        before = set_eval_frame(None)
        try:
            return self._run_backward(tensors, args, kwargs)
        finally:
            set_eval_frame(before)

    def _run_backward(self, tensors: Sequence[Any], args: Any, kwargs: Any) -> Any:
        # By place or by name, as torch.autograd.backward and grad do.
        create_graph = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
        inputs = (args[3] if len(args) > 3 else kwargs.get("inputs")) or ()
        with self._lock:
            if self._callbacks is not None:
                with self._without_capture():
                    return self._engine.run_backward(tensors, *args, **kwargs)
            if create_graph or torch.is_anomaly_enabled() or not self._client.is_active():
                return self._engine.run_backward(tensors, *args, **kwargs)
            try:
                return self._run_captured(tensors, inputs, args, kwargs)
            except Exception as error:
                if self._began:
                    raise
                refusal = take_over_reducers(error, tensors)
            if refusal is None:
                return self._run_backward(tensors, args, kwargs)
            self._client.refuse(refusal)
            return self._engine.run_backward(tensors, *args, **kwargs)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """As ``torch._C._EngineBase.queue_callback``: called when the backward that is running is done."""
        if self._callbacks is None:
            self._engine.queue_callback(callback)
        else:
            self._callbacks.append(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _run_captured(self, tensors: Sequence[Any], inputs: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """Run PyTorch's engine with compiled autograd's switch thrown.

        ``torch._dynamo.compiled_autograd._enable`` throws it for one compiler of its own class. No generator for a
        context, and no function more than there must be: this is done at each step.
        """
        callbacks: list[Callable[[], None]] = []
        self._callbacks, self._began = callbacks, False
        multithreaded = _C._is_multithreading_enabled()
        _C._set_multithreading_enabled(False)
        before = _set_compiler(partial(self._make_compiler, tensors, inputs), False)
        enabled, compiled_autograd.compiled_autograd_enabled = compiled_autograd.compiled_autograd_enabled, True
        try:
            try:
                results = self._engine.run_backward(tensors, *args, **kwargs)
            finally:
                _C._set_multithreading_enabled(multithreaded)
                compiled_autograd.compiled_autograd_enabled = enabled
                _set_compiler(*before)
            # A callback may queue another.
            while callbacks:
                callbacks.pop(0)()
            return results
        finally:
            self._callbacks = None

    def _make_compiler(self, tensors: Sequence[Any], inputs: Sequence[Any]) -> OrderedCompiler:
        return OrderedCompiler(BackwardCall(tensors, inputs), self._client.receive, self._run_function)

    def _run_function(
        self,
        used: Sequence[int],
        function: CapturedFunction,
        inputs: Any,
        sizes: Sequence[int],
        scalars: Any,
        hooks: Any,
        packed: Any,
    ) -> list[Any]:
        """What PyTorch's C++ code calls at each step: ``function``, with compiled autograd's switch off meanwhile.

        In the place of PyTorch's own, which besides makes a tensor of each size, for Dynamo, and gives what is compiled
        meanwhile a name: 10 us.
        """
        self._began = True
        before = _set_compiler(None, False)
        module: Any = compiled_autograd
        module.compiled_autograd_enabled = False
        module.active_disable_ctx = module.in_compiled_autograd_region = True
        try:
            return function(inputs, [sizes[number] for number in used], scalars, hooks, packed)
        finally:
            module.active_disable_ctx = module.in_compiled_autograd_region = False
            module.compiled_autograd_enabled = True
            _set_compiler(*before)

    @contextmanager
    def _without_capture(self) -> Iterator[None]:
        """A backward inside a captured one is PyTorch's own, and so are its callbacks."""
        callbacks, began = self._callbacks, self._began
        self._callbacks = None
        try:
            with compiled_autograd._disable():
                yield
        finally:
            self._callbacks, self._began = callbacks, began


skip_code(Engine.run_backward.__code__)


@contextmanager
def standing_before(engine: Engine) -> Iterator[None]:
    """Put an `Engine` before PyTorch's for a while."""
    original = Variable._execution_engine
    Variable._execution_engine = engine  # type: ignore[assignment]
    try:
        yield
    finally:
        Variable._execution_engine = original
