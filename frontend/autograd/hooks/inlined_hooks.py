# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks that are part of a graph while it is traced: a call of ``@hook_N``, whose body is traced apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.contract.hooks import name_of_hook
from retrograd.frontend.autograd.engine.hook_calls import call_user_hook
from retrograd.frontend.autograd.engine.python_calls import find_source
from retrograd.frontend.autograd.hooks.hook_inlining import Finder, FromGraph, Gradient, InlinedCall, find_accumulations
from retrograd.frontend.autograd.hooks.hook_tape import HookTape, trace_tape
from retrograd.frontend.autograd.hooks.open_hooks import HookStays, StandIns, has_open_size
from retrograd.frontend.autograd.sizes.open_sizes import OpenSizes
from retrograd.frontend.autograd.steps.recorder import Recorder
from retrograd.frontend.hooks import hook_ops
from retrograd.frontend.python.source_locations import CaptureError


class InlinedHooks:
    """The inlined calls of one capture.

    A hook that writes to an input gives the new value, and an op of its own writes it: whatever reads the input after
    that, of other hooks, takes the new value. ``extras`` are the tensors that hooks read and that are no inputs.
    """

    def __init__(self, recorded: Recorder, inputs: Sequence[torch.Tensor]) -> None:
        self.calls, self._hooks = recorded.inlined, recorded.hooks
        self.extras = _find_extras(recorded)
        self._places = {id(tensor): len(inputs) + n for n, (tensor, _) in enumerate(self.extras)}
        self._real = [*inputs, *[tensor for tensor, _ in self.extras]]
        accumulations = find_accumulations(recorded.capture)
        # Accumulations that leave the gradient to hooks, and the last of these hooks.
        self._owned = {name for name, hooks in accumulations.items() if hooks[-1] in self.calls}
        self._last = {hooks[-1] for hooks in accumulations.values()}
        self.start([])

    def start(self, values: Sequence[torch.Tensor]) -> None:
        """Begin a trace on tensors that stand for inputs and extras."""
        self._arguments = list(values)
        self._values = list(values)
        self._outdated: set[int] = set()
        self._gradients: dict[int, torch.Tensor] = {}
        self.tapes: dict[str, tuple[HookTape, list[int]]] = {}
        # The nodes of the capture that the hooks are, by the names of their functions.
        self.nodes: dict[str, str] = {}

    def bodies(self) -> dict[str, torch.fx.GraphModule]:
        """The graphs of the hooks that were called, by the names of their functions."""
        return {name: trace_tape(tape, results) for name, (tape, results) in self.tapes.items()}

    def take_gradient(self, accumulation: str, param: int, gradient: torch.Tensor) -> bool:
        """Keep a gradient for the hooks of its accumulation, if they are inlined."""
        if accumulation in self._owned:
            self._gradients[param] = gradient
        return accumulation in self._owned

    def check_reads(self, node: torch.fx.Node) -> None:
        """Refuse what reads an input that a hook has written to.

        Raises:
            CaptureError: it does; eager refuses it too, if it looks at the version of the tensor.
        """
        for argument in node.all_input_nodes if self._outdated else ():
            place, index = find_source(argument)
            if place == "inputs" and index in self._outdated:
                message = f"{node.name} reads a tensor that a hook inside the same backward has written to"
                raise CaptureError(message, "leave the hook in Python")

    def call(
        self, name: str, kind: str, number: int, values: Mapping[torch.fx.Node, Any], token: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Trace a call. Returns the tensors that the hook gives, the next token, and a gradient that is to be
        accumulated now."""
        call = self.calls[name]
        written = [*call.updates, *call.tape.results]
        like = [call.tape.before.get(n, call.tape.tensors[n]) for n in written]
        self.tapes[name_of_hook(number)] = (call.tape, written)
        self.nodes[name_of_hook(number)] = name
        with hook_ops.declared_results({(kind, number): like}):
            given, token = hook_ops.call_hook(self._read(call, values), token, kind, number)
        if call.param is None:
            return given, token, None
        for update, value in zip(call.updates, given, strict=False):
            token = self._update(call, update, value, token, number)
        self._gradients.pop(call.param)
        if len(given) > len(call.updates):
            self._gradients[call.param] = given[-1]
        return [], token, self._gradients.pop(call.param, None) if name in self._last else None

    def is_open(self, name: str, values: Mapping[torch.fx.Node, Any], args: Sequence[Any]) -> bool:
        """Whether a call is given, or reads, a tensor of a size that is open.

        Raises:
            HookStays: it writes to tensors as well.
        """
        call = self.calls[name]
        if not has_open_size([args, self._read(call, values)]):
            return False
        if call.param is not None:
            raise HookStays(name, "it reads a tensor whose size differs")
        if call.tape.collected:
            raise HookStays(name, "other processes take part, and a tensor's size differs")
        return True

    def run_open(
        self, name: str, values: Mapping[torch.fx.Node, Any], args: Sequence[Any], kwargs: Any, sizes: OpenSizes
    ) -> Any:
        """Trace a hook of tensors whose sizes are open as part of the graph: its code runs once more, on tensors that
        stand for them. What it was seen to do may hold for one set of sizes alone.

        Raises:
            HookStays: it does not run on these, or goes by the number that a size is.
        """
        call = self.calls[name]
        found = [call.tape.tensors[number] for number in call.tape.externals]
        before = sizes.closed()
        try:
            with StandIns(dict(zip(map(id, found), self._read(call, values), strict=True))):
                given = call_user_hook(self._hooks[name], *args, **kwargs)
        except Exception as error:
            raise HookStays(name, f"its code does not run on open sizes: {type(error).__name__}: {error}") from error
        if sizes.closed() != before:
            raise HookStays(name, "its code goes by the number that a size is")
        return given

    def _read(self, call: InlinedCall, values: Mapping[torch.fx.Node, Any]) -> list[torch.Tensor]:
        """Find the tensors that a hook reads."""
        nodes = {node.name: node for node in values}
        read: list[torch.Tensor] = []
        for number, source in zip(call.tape.externals, call.sources, strict=True):
            match source:
                case FromGraph():
                    given = pytree.tree_leaves(values[nodes[source.node]])
                    read.append([t for t in given if isinstance(t, torch.Tensor)][source.index])
                case Gradient():
                    assert call.param is not None
                    if call.param not in self._gradients:
                        raise CaptureError("a hook reads a gradient that another one freed", "leave it in Python")
                    read.append(self._gradients[call.param])
                case _:
                    place = self._place(call, number, source)
                    if place in self._outdated and self._values[place] is self._arguments[place]:
                        raise CaptureError("a hook reads a view of what another one wrote to", "leave it in Python")
                    read.append(self._values[place])
        return read

    def _update(
        self, call: InlinedCall, number: int, value: torch.Tensor, token: torch.Tensor, hook: int
    ) -> torch.Tensor:
        """Write to the argument that an external of a call is."""
        place = self._place(call, number, call.sources[call.tape.externals.index(number)])
        storage = self._real[place].untyped_storage().data_ptr()
        sharing = [n for n, t in enumerate(self._real) if t.untyped_storage().data_ptr() == storage]
        self._outdated.update(sharing)
        self._values[place] = value
        views = [self._arguments[n] for n in sharing if n != place]
        return hook_ops.update_input(self._arguments[place], value, views, token, hook)

    def _place(self, call: InlinedCall, number: int, source: Any) -> int:
        """The argument that an external of a call is."""
        return source if isinstance(source, int) else self._places[id(call.tape.tensors[number])]


def _find_extras(recorded: Recorder) -> list[tuple[torch.Tensor, Finder]]:
    extras: dict[int, tuple[torch.Tensor, Finder]] = {}
    for call in recorded.inlined.values():
        for number, source in zip(call.tape.externals, call.sources, strict=True):
            if callable(source):
                tensor = call.tape.tensors[number]
                extras.setdefault(id(tensor), (tensor, source))
    return list(extras.values())
