# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs a graph of open sizes on CUDA in eager, and compiles it for sizes that come again by themselves.

Kernels of our own take fixed sizes, and code for open ones waits for the device at each function: a step of BERT base
under autocast took 13 to 29 times as long as in eager on an H200.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.sizes.size_nodes import has_open_sizes

_LOG = logging.getLogger(__name__)
# A size is compiled for when it comes for this time: training compiles for a minute then.
COMINGS = 3
# As many as Dynamo compiles of a function (`torch._dynamo.config.recompile_limit`).
MOST_SIZES = 8
# Of so many sizes it is counted how often they came.
MOST_COUNTED = 4096

Compile = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class RecurringSizes:
    """Calls a graph of Dynamo's, whose ``inputs`` have open sizes; ``compile_fixed`` compiles one of none."""

    def __init__(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any], compile_fixed: Compile) -> None:
        self._module, self._compile_fixed = graph_module, compile_fixed
        self._open = [place for place, value in enumerate(inputs) if has_open_sizes([value])]
        self._numbers = [place for place in self._open if not isinstance(inputs[place], Tensor)]
        self._met: Counter[Hashable] = Counter()
        self._calls: dict[Hashable, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """Run the graph, compiled if its sizes came ``COMINGS`` times."""
        key = tuple(
            [(a.shape, a.stride()) if isinstance(a, Tensor) else a for a in map(arguments.__getitem__, self._open)]
        )
        call = self._calls.get(key)
        if call is None and len(self._calls) < MOST_SIZES and not any(isinstance(a, FakeTensor) for a in arguments):
            if len(self._met) >= MOST_COUNTED and key not in self._met:
                self._met.clear()
            self._met[key] += 1
            if self._met[key] >= COMINGS:
                call = self._compile(key, arguments)
        return self._module.forward(*arguments) if call is None else call(*arguments)

    def _compile(self, key: Hashable, arguments: Sequence[Any]) -> Callable[..., Any]:
        with self._lock:
            if key not in self._calls:
                sizes = ", ".join(
                    "x".join(map(str, a.shape)) if isinstance(a, Tensor) else str(a)
                    for a in map(arguments.__getitem__, self._open)
                )
                _LOG.warning("compiling for the sizes %s, which came %d times", sizes, COMINGS)
                given = [a for place, a in enumerate(arguments) if place not in self._numbers]
                try:
                    fixed = self._compile_fixed(self._fix({n: arguments[n] for n in self._numbers}), given)
                except Exception as error:  # noqa: BLE001 (training goes on in eager, whatever it is)
                    _LOG.warning("run in eager: not compiled for the sizes %s: %s", sizes, error)
                    self._calls[key] = self._module.forward
                else:
                    self._calls[key] = lambda *a: fixed(*[v for i, v in enumerate(a) if i not in self._numbers])
        return self._calls[key]

    def _fix(self, numbers: dict[int, Any]) -> torch.fx.GraphModule:
        """A copy of the graph with these numbers in the place of arguments."""
        graph = torch.fx.Graph()
        made: dict[torch.fx.Node, Any] = {}
        placeholders = self._module.graph.find_nodes(op="placeholder")
        named = {placeholders[place].name: number for place, number in numbers.items()}
        for node in self._module.graph.nodes:
            if node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], made.__getitem__))
            elif node.name in named:
                made[node] = named[node.name]
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
        return make_graph_module(self._module, graph)
