# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Defines what every door hands to the build: a graph that is ready to be imported, and the facts about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from retrograd.contract.hooks import Communicating
from retrograd.contract.roles import JOINT
from retrograd.contract.signature import Signature
from retrograd.frontend.hooks.pack_tracing import Packings, trace_pairs

NO_PACKINGS = Packings({}, {})


@dataclass(frozen=True)
class Captured:
    """A graph of aten ops that went through ``PREPARE``; it becomes the function of this name.

    ``signature`` is what its arguments and results mean to the user, where that is known. ``packings`` are the hooks
    that pack what is saved. ``is_part`` says that it is one of several graphs that a model breaks into, so that a rule
    on what to save may be about another one.

    A backward that was captured as it ran, ``as_it_ran``, has hooks and calls of Python among its ops: ``bodies`` are
    the graphs of hooks that are part of it, by the name of the function, and ``communication`` the kinds and numbers of
    the hooks and custom functions that start some. ``in_order`` says that they are to run as captured, whatever
    schedule is asked for.

    ``eager_peak`` is the most bytes that a step takes in eager beyond its arguments, where a budget asks for that and
    it can be known.
    """

    graph_module: GraphModule
    function: str
    signature: Signature | None = None
    packings: Packings = NO_PACKINGS
    is_part: bool = False
    as_it_ran: bool = False
    bodies: Mapping[str, GraphModule] = field(default_factory=dict)
    communication: Collection[Communicating] = ()
    in_order: bool = False
    eager_peak: int | None = None

    @classmethod
    def of(
        cls, graph_module: GraphModule, function: str, signature: Signature | None = None, *, is_part: bool = False
    ) -> Captured:
        """A graph ahead of time: of a joint one, the hooks that values are marked with are traced; a forward alone
        saves nothing."""
        packings = trace_pairs(graph_module) if function == JOINT else NO_PACKINGS
        return cls(graph_module, function, signature, packings, is_part, bodies=packings.bodies())
