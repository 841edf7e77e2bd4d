# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes the choice of what to save and what to recompute as an integer program in CP-SAT.

A 0-1 variable for each value that can be saved and for each op that can run again, as in Checkmate's program (P. Jain
et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization", MLSys 2020), with each op
recomputed at most once more (Moccasin, B. Bartan et al., ICML 2023, limits repeats in the same way). Without limits its
matrix is that of a minimum cut (see ``recompute_cut``), whose linear relaxation has integer corners: with one limit
on top, of bytes or of work, the relaxation is Lagrange's bound, and a thousand values take a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortools.sat.python import cp_model

from retrograd.contract.attributes import Tag
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import UNREPEATABLE
from retrograd.pipelines.analysis.partition.recompute_cut import find_candidates

# Work becomes whole numbers that add up to this at the most.
RESOLUTION = 2**40


class LeastSaved:
    """The fewest bytes to save where recomputation is limited. ``work`` is what each op of ``graph`` costs to run
    again; every legal plan keeps the rows."""

    def __init__(self, graph: JointGraph, work: Sequence[float]) -> None:
        self.graph = graph
        self.model = cp_model.CpModel()
        self.saved = {v: self.model.new_bool_var("") for v in find_candidates(graph)}
        # What the step overwrites is saved wherever the backward uses it.
        self.copies = {v: self.model.new_bool_var("") for v in sorted(graph.mutated)}
        movable = [op for op in graph.ops if op.id not in graph.tangent_ops]
        self.runs = {op.id: self.model.new_bool_var("") for op in movable}
        self.early = {
            op.id: self.model.new_bool_var("") for op in movable if op.id not in graph.forward_ops and op.results
        }
        self._add_needs()
        self._add_forward()
        twice = self._add_repeated()
        # A power of two: whole numbers of work, such as FLOPs, stay exact.
        self.scale = 2.0 ** math.floor(math.log2(RESOLUTION / (sum(work[op] for op in twice) or 1.0)))
        again = sum(round(work[op] * self.scale) * variable for op, variable in twice.items())
        priced = {**self.saved, **self.copies}
        self.model.minimize(sum(graph.values[v].saved_bytes * variable for v, variable in priced.items()))
        self.row = self.model.add(again <= 0)

    def solve(self, limit: float, effort: float, gap: float = 0.0) -> frozenset[int] | None:
        """Values to save, of which the ops that run again take at most ``limit`` work: proven to be within ``gap`` of
        the fewest bytes, or the best that were found with so much effort; ``None`` if none was."""
        self.row.proto.linear.domain[1] = int(limit * self.scale)
        solver = cp_model.CpSolver()
        # With deterministic time and one worker, the same program has the same solution on any machine.
        solver.parameters.max_deterministic_time = max(0.0, effort)
        solver.parameters.num_workers = 1
        # All clauses are rows of the relaxation too: it is nearly integral.
        solver.parameters.linearization_level = 2
        solver.parameters.relative_gap_limit = gap
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return frozenset(v for v, variable in self.saved.items() if solver.value(variable))

    def _add_needs(self) -> None:
        """Require that what an op of the backward takes is saved, or its producer runs in the backward too."""
        graph = self.graph
        for op in graph.ops:
            if op.id not in graph.tangent_ops:
                for operand in dict.fromkeys(op.operands):
                    self._need(operand, (self.runs[op.id].negated(),))
                if op.kind in UNREPEATABLE and op.id in graph.forward_ops:
                    self.model.add(self.runs[op.id] == 0)
            elif op.id in graph.backward_ops:
                for operand in dict.fromkeys(op.operands):
                    self._need(operand, ())
        for result in dict.fromkeys(graph.backward_results):
            self._need(result, ())
        for op in graph.ops:
            if op.tag is Tag.NEVER and op.id in graph.forward_ops:
                for result in op.results:
                    if result in self.saved:
                        self.model.add(self.saved[result] == 1)

    def _need(self, value: int, unless: Sequence[cp_model.LiteralT]) -> None:
        producer = self.graph.values[value].producer
        if value in self.copies:
            self.model.add_bool_or([self.copies[value], *unless])
        if producer is None or producer in self.graph.tangent_ops:
            return
        ways = [self.runs[producer], *([self.saved[value]] if value in self.saved else [])]
        self.model.add_bool_or([*ways, *unless])

    def _add_forward(self) -> None:
        """Require that the forward computes what is saved for the backward alone, and what that takes."""
        graph = self.graph
        for number, variable in self.early.items():
            op = graph.ops[number]
            for result in op.results:
                if result in self.saved:
                    self.model.add_implication(self.saved[result], variable)
            for operand in op.operands:
                producer = graph.values[operand].producer
                if producer in self.early:
                    self.model.add_implication(variable, self.early[producer])
            if op.kind in UNREPEATABLE:
                self.model.add_bool_or([variable.negated(), self.runs[number].negated()])

    def _add_repeated(self) -> dict[int, cp_model.IntVar]:
        """For each op whether it runs in both halves."""
        twice = {}
        for number, runs in self.runs.items():
            early = self.early.get(number)
            twice[number] = runs
            if early is not None:
                twice[number] = self.model.new_bool_var("")
                self.model.add_bool_or([twice[number], runs.negated(), early.negated()])
        return twice
