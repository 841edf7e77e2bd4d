# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Replaces PyTorch's engine while backwards may be captured.

Compiled autograd's switch is one for the whole process, it refuses a second thread and a backward inside a backward,
and forgets the callbacks that are queued on the engine. So it is thrown for one call at a time, under a lock, by an
engine that sees every ``backward()`` and ``grad()`` before PyTorch's own does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch import _C
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import compiled_autograd
from torch._dynamo.eval_frame import skip_code
from torch._guards import TracingContext
from torch.autograd import Variable

from retrograd.frontend.autograd.engine.eager_reasons import (
    describe_roots,
    keeping_graph,
    keeps_graph,
    name_rank,
    why_eager,
)
from retrograd.frontend.autograd.engine.fresh_gradients import find_fresh_leaves, without_gradients
from retrograd.frontend.autograd.engine.kept_graphs import KeptGraphs
from retrograd.frontend.autograd.engine.late_hooks import LATE, LateHook, hooks_watched
from retrograd.frontend.autograd.engine.reducers import take_over_reducers
from retrograd.frontend.autograd.engine.trials import Trial, Trials, read_clock
from retrograd.frontend.autograd.tracing.compiler import (
    BackwardCall,
    BackwardRun,
    FreesTooEarly,
    NeedsEngine,
    OrderedCompiler,
    RunsCompiled,
    RunsEagerly,
    RuntimeCapture,
    TakesTurn,
)

_LOG = logging.getLogger("retrograd")
_set_compiler = _C._dynamo.compiled_autograd.set_autograd_compiler
# Takes (inputs, sizes, scalars, hooks, packed_data) and a BackwardRun, gives the results of the backward.
CapturedFunction = Callable[..., list[Any]]
# Of how many kinds of roots it is remembered how their backward ran.
MOST_ROOTS = 1024


class Client(Protocol):
    """Who wants backwards captured. There is one in a process, since PyTorch's cache of captures does not know who
    asked for one."""

    def is_active(self) -> bool:
        """Whether the calling thread's next backward is to be captured."""

    def times_backwards(self) -> bool:
        """Whether a backward that takes longer compiled is to be left to PyTorch's engine."""

    def receive(self, capture: RuntimeCapture) -> CapturedFunction:
        """Take a new capture; the function returned runs in its place, from now on, wherever PyTorch finds that the
        capture fits."""

    def refuse(self, error: Exception) -> None:
        """Note that PyTorch could not capture a backward, which now runs eagerly."""

    def leave(self, reason: str) -> None:
        """Note why a backward is not captured, and runs eagerly."""


class Engine:
    """Has the backwards of a client captured, and runs the others as PyTorch does; like the client, one in a process.

    One backward runs after the other, under ``lock``, the one that is held while a graph is traced: a trace runs a
    backward, and a capture is traced and compiled inside one. Never captured are gradients of gradients
    (``create_graph=True``), anomaly mode, a backward inside a backward, one that a dispatch mode is to see, and one
    inside a transform such as ``vmap``: these run eagerly.

    PyTorch's graph frees what it saved when it is captured. Where that may have to run eagerly after all, it is told to
    keep it; when a recording is done, it is asked for it once more, to free it. That is so too where the roots are like
    those of one that runs compiled, and the graph was not captured before.
    """

    def __init__(self, client: Client, lock: AbstractContextManager[Any]) -> None:
        self._engine: Any = Variable._execution_engine
        self._client, self._lock = client, lock
        # The captured backward that is running, guarded by the lock.
        self._running: _Running | None = None
        # Of backwards by their roots, whether they ran compiled the last time.
        self._compiled: dict[Hashable, bool] = {}
        # Of which roots there are backwards that PyTorch's engine has to run, whatever else of these roots is compiled.
        self._kept: set[Hashable] = set()
        self._trials = Trials()
        self._recorded = KeptGraphs()

    def run_backward(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward: takes what ``torch._C._EngineBase.run_backward`` takes, (tensors, grad_tensors, keep_graph,
        create_graph, inputs)."""
        # Where a function that is under torch.compile calls backward(), Dynamo is not to look at what follows.
        before = set_eval_frame(None)
        try:
            with self._lock:
                return self._run_backward(tensors, args, kwargs)
        finally:
            set_eval_frame(before)

    def _run_backward(self, tensors: Sequence[Any], args: Any, kwargs: Any) -> Any:
        is_active = self._client.is_active()
        if not is_active or (self._trials.is_left(tensors) and self._client.times_backwards()):
            return self._engine.run_backward(tensors, *args, **kwargs)
        # By place or by name, as torch.autograd.backward and grad do.
        create_graph = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
        is_nested = self._running is not None or torch._C._current_graph_task_id() != -1
        inputs = (args[3] if len(args) > 3 else kwargs.get("inputs")) or ()
        gradients = args[0] if args else kwargs.get("grad_tensors")
        if reason := why_eager(is_nested, create_graph, gradients):
            # A trace of Dynamo's runs backwards too, which are none of the user's.
            if TracingContext.try_get() is None:
                self._client.leave(reason)
            return self._engine.run_backward(tensors, *args, **kwargs)
        return self._run_active(BackwardCall(tensors, inputs), args, kwargs)

    def _run_active(self, call: BackwardCall, args: Any, kwargs: Any, is_known: bool = False) -> Any:
        """Run what is to be captured, if it can be; what is known to be compiled need not keep its graph."""
        keeps, roots = keeps_graph(args, kwargs), describe_roots(call.roots)
        # What is a step of a training.
        is_timed = not (keeps or call.inputs) and self._client.times_backwards()
        takes_turn = is_timed and not is_known and self._trials.takes_turn(roots)
        is_new = roots in self._kept or not self._compiled.get(roots, False)
        is_held = not (keeps or is_known) and (is_new or takes_turn)
        repeats = keeps and self._recorded.has(call.roots)
        running = _Running(call, is_held, keeps or is_held, takes_turn, repeats)
        start = read_clock() if is_timed else 0.0
        try:
            outcome, given = self._attempt(running, args, kwargs)
        except LateHook:
            self._remember(roots, False)
            self._kept.add(roots)
            raise
        # Not where an exception is handled, whose frames have the tensors of the backward.
        match outcome:
            case _Outcome.DONE:
                if keeps and running.was_recorded:
                    self._recorded.add(call.roots)
                if running.was_eager:
                    self._remember(roots, False)
                elif is_timed and running.trial is not None:
                    self._trials.add_compiled(roots, call.roots, running.trial, read_clock() - start)
                return given
            case _Outcome.COMPILED:
                self._remember(roots, True)
                return self._run_active(call, args, kwargs, is_known=True)
            case _Outcome.FREES_TOO_EARLY:
                self._remember(roots, False)
                return self._run_active(call, args, kwargs)
            case _Outcome.EAGER if isinstance(given, TakesTurn):
                return self._time_eager(call, given.trial, args, kwargs)
            case _Outcome.EAGER:
                self._remember(roots, False)
                if isinstance(given, NeedsEngine):
                    self._kept.add(roots)
            case _Outcome.REFUSED:
                refusal = take_over_reducers(given, call.roots)
                if refusal is None:
                    return self._run_active(call, args, kwargs)
                self._client.refuse(refusal)
        return self._engine.run_backward(call.roots, *args, **kwargs)

    def _time_eager(self, call: BackwardCall, trial: Trial, args: Any, kwargs: Any) -> Any:
        """Run a backward as PyTorch does, to know how long that takes."""
        start = read_clock()
        given = self._engine.run_backward(call.roots, *args, **kwargs)
        taken = read_clock() - start
        if (reason := self._trials.add_eager(call.roots, trial, taken)) is not None:
            self._client.leave(reason)
        return given

    def _remember(self, roots: Hashable, was_compiled: bool) -> None:
        """Keep how a backward of these roots ran."""
        if len(self._compiled) >= MOST_ROOTS:
            self._compiled.clear()
            self._kept.clear()
        self._compiled[roots] = was_compiled

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Queue a callback, as ``torch._C._EngineBase.queue_callback`` does: it is called when the backward that is
        running is done."""
        running = self._running
        if running is not None and running.task == torch._C._current_graph_task_id():
            running.callbacks.append(callback)
        else:
            self._engine.queue_callback(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _attempt(self, running: _Running, args: Any, kwargs: Any) -> tuple[_Outcome, Any]:
        """Run a backward captured, or find that it is not to be: then nothing has run."""
        keeping = keeping_graph(args, kwargs) if running.is_held else (args, kwargs)
        fresh = find_fresh_leaves(running.call) if running.is_held else []
        self._running = running
        try:
            try:
                results = self._run_switched(running, *keeping)
            except RunsEagerly as outcome:
                return _Outcome.EAGER, outcome.with_traceback(None)
            except RunsCompiled:
                return _Outcome.COMPILED, None
            except FreesTooEarly:
                return _Outcome.FREES_TOO_EARLY, None
            except Exception as error:
                if running.began:
                    name_rank(error)
                    raise
                return _Outcome.REFUSED, error
            if running.is_held:
                with without_gradients(fresh):
                    self._free_saved(running, args, kwargs)
            running.task = torch._C._current_graph_task_id()
            # A callback may queue another.
            while running.callbacks:
                running.callbacks.pop(0)()
            return _Outcome.DONE, results
        finally:
            self._running = None

    def _free_saved(self, running: _Running, args: Any, kwargs: Any) -> None:
        """Free what the graph of a backward that is done saved, by asking PyTorch for it once more, which finds the
        capture that ran, or traces another. Nothing runs."""
        running.is_done = True
        try:
            self._run_switched(running, args, kwargs)
        except Exception as error:  # noqa: BLE001 (the backward is done)
            # A hook wrote to what was saved, as an optimizer's step in the backward does: it is freed with the graph.
            _LOG.info("PyTorch does not capture a backward again, to free what it saved: %s", error)

    def _run_switched(self, running: _Running, args: Any, kwargs: Any) -> Any:
        """Run PyTorch's engine with compiled autograd's switch thrown.

        ``torch._dynamo.compiled_autograd._enable`` throws it for one compiler of its own class. No generator for a
        context, and no function more than there must be: this is done at each step.
        """
        multithreaded = running.is_multithreaded = _C._is_multithreading_enabled()
        _C._set_multithreading_enabled(False)
        before = _set_compiler(partial(self._make_compiler, running), False)
        enabled, compiled_autograd.compiled_autograd_enabled = compiled_autograd.compiled_autograd_enabled, True
        try:
            return self._engine.run_backward(running.call.roots, *args, **kwargs)
        finally:
            _C._set_multithreading_enabled(multithreaded)
            compiled_autograd.compiled_autograd_enabled = enabled
            _set_compiler(*before)

    def _make_compiler(self, running: _Running) -> OrderedCompiler:
        """Makes the compiler that PyTorch asks for where it finds no capture that fits."""
        if not (running.can_restart or running.is_done):
            raise FreesTooEarly
        return OrderedCompiler(running.call, self._client.receive, self._run_function)

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
        """Run ``function`` at a step, with compiled autograd's switch off meanwhile; PyTorch's C++ code calls it.

        In the place of PyTorch's own, which besides makes a tensor of each size, for Dynamo, and gives what is compiled
        meanwhile a name: 10 us.
        """
        running = self._running
        assert running is not None
        if running.is_done:
            return running.results
        running.began, running.task = True, torch._C._current_graph_task_id()
        before = _set_compiler(None, False)
        module: Any = compiled_autograd
        module.compiled_autograd_enabled = False
        module.active_disable_ctx = module.in_compiled_autograd_region = True
        # As whoever is called finds it in eager.
        _C._set_multithreading_enabled(running.is_multithreaded)
        try:
            if hooks:
                LATE.begin(running.call, hooks)
            running.results = function(inputs, [sizes[number] for number in used], scalars, hooks, packed, running)
            return running.results
        finally:
            if hooks:
                LATE.end()
            _C._set_multithreading_enabled(False)
            module.active_disable_ctx = module.in_compiled_autograd_region = False
            module.compiled_autograd_enabled = True
            _set_compiler(*before)


@dataclass(slots=True)
class _Running(BackwardRun):
    """The backward that runs captured: the callbacks queued so far, the number of its task in PyTorch's engine, whether
    the engine has threads outside of it, whether anything of it has run, and whether all of it has; and the results
    that PyTorch takes."""

    callbacks: list[Callable[[], None]] = field(default_factory=list)
    task: int = -1
    is_multithreaded: bool = True
    began: bool = False
    is_done: bool = False
    results: list[Any] = field(default_factory=list)


class _Outcome(Enum):
    """How a captured backward ended: it ran; or it is to run eagerly, or as it was compiled, or is to be captured anew
    with what it saved kept, or PyTorch cannot capture it."""

    DONE = auto()
    EAGER = auto()
    COMPILED = auto()
    FREES_TOO_EARLY = auto()
    REFUSED = auto()


skip_code(Engine.run_backward.__code__)


@contextmanager
def standing_before(engine: Engine) -> Iterator[None]:
    """Put an `Engine` before PyTorch's for a while."""
    original = Variable._execution_engine
    Variable._execution_engine = engine  # type: ignore[assignment]
    try:
        with hooks_watched():
            yield
    finally:
        Variable._execution_engine = original
