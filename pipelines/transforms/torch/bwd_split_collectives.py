# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-split-collectives``: each collective as its start and the wait for it, between which others can compute."""

from __future__ import annotations

from itertools import pairwise

from retrograd.contract.attributes import BWD_INLINE, BWD_RANDOM, BWD_SHAPES, BWD_TURN, BWD_VALUES
from retrograd.dialects import builders, bwd, ir
from retrograd.pipelines.analysis.partition.read_graph import value_names
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.hook_reader import COLLECTIVE_OP as COLLECTIVE


class BwdSplitCollectives(ModulePass):
    """Makes of each ``bwd.collective`` a ``bwd.start_collective`` and a ``bwd.wait_collective``.

    Starts are on the chain of tokens, with what other effects the function has, in the order in which they stand: all
    processes are to start the same in the same order. Those that have turns, as captured, take these: where repeated
    computation stands depends on sizes, which may differ between processes. Bodies of hooks stay as they are, for where
    they are inlined.
    """

    description = "Split collectives into a start, which is an effect, and a wait"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            if BWD_INLINE not in func.attributes:
                block = only_block(func, self.name)
                _take_turns(block, self.name)
                _split(block)


def _take_turns(block: ir.Block, name: str) -> None:
    """Put collectives into the order of their turns, each with what it takes, where they are in another one."""
    ops = [view.operation for view in block.operations]
    found = [op for op in ops if op.name == COLLECTIVE and BWD_TURN in op.attributes]
    ordered = sorted(found, key=lambda op: ir.IntegerAttr(op.attributes[BWD_TURN]).value)
    if ordered == found:
        return
    # What draws random numbers keeps its order too.
    random = [op for op in ops if BWD_RANDOM in op.attributes]
    before = {after: op for chain in (ordered, random) for op, after in pairwise(chain)}
    done: dict[ir.Operation, None] = {}
    opened: set[ir.Operation] = set()
    pending = ops[::-1]
    while pending:
        op = pending[-1]
        needed = [o for o in (*_taken_ops(op, block), *filter(None, [before.get(op)])) if o not in done]
        if op in done or not needed:
            done[pending.pop()] = None
        elif opened.isdisjoint(needed):
            opened.add(op)
            pending += needed
        else:
            message = f"{name}: a collective takes what one gives whose turn comes later"
            raise PassFailure(op, message, "number collectives in the order of the captured graph")
    for op in [op for op in done if op != ops[-1]]:
        op.move_before(ops[-1])


def _taken_ops(op: ir.Operation, block: ir.Block) -> list[ir.Operation]:
    """The ops of a block whose results another one of it takes, itself or in its regions."""
    inner = [inner for region in op.regions for part in region.blocks for inner in walk(part)]
    owners = (v.owner for each in (op, *inner) for v in each.operands if isinstance(v, ir.OpResult))
    return [owner.operation for owner in owners if owner.operation.block == block]


def _split(block: ir.Block) -> None:
    ops = [view.operation for view in block.operations]
    if all(op.name != COLLECTIVE for op in ops):
        return
    with ops[0].location, ir.InsertionPoint(ops[0]):
        token = builders.create_token()
    for op in ops:
        if op.name == "bwd.create_token":
            op.results[0].replace_all_uses_with(token)
            op.erase()
        elif op.name == COLLECTIVE:
            with op.location, ir.InsertionPoint(op):
                token = _split_one(op, token)
        elif op.operands and bwd.is_token(op.operands[len(op.operands) - 1]):
            op.operands[len(op.operands) - 1] = token
            if op.results and bwd.is_token(op.results[len(op.results) - 1]):
                token = op.results[len(op.results) - 1]


def _split_one(op: ir.Operation, token: ir.Value) -> ir.Value:
    """Put start and wait in the place of a collective; returns the next token."""
    what, result = builders.read_collective(op), op.results[0]
    started, next_token = builders.start_collective(op.operands[0], token, what, result.type)
    value = builders.wait_collective(started)
    (name,) = value_names(op)
    text = ir.StringAttr.get
    started.owner.attributes[BWD_VALUES] = ir.ArrayAttr.get([text(f"{name}.started" if name else ""), text("")])
    value.owner.attributes[BWD_VALUES] = ir.ArrayAttr.get([text(name)])
    if BWD_SHAPES in op.attributes:
        (shape,) = ir.ArrayAttr(op.attributes[BWD_SHAPES])
        started.owner.attributes[BWD_SHAPES] = ir.ArrayAttr.get([shape, text("")])
        value.owner.attributes[BWD_SHAPES] = ir.ArrayAttr.get([shape])
    result.replace_all_uses_with(value)
    op.erase()
    return next_token
