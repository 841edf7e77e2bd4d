# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Names that the import writes in MLIR beside torch's ops, and passes read: attributes, and the operator of an
island."""

from __future__ import annotations

from enum import Enum

BWD_ROLE = "bwd.role"
"""Of an argument or result: what it is to the user, one of the roles."""

BWD_NAME = "bwd.name"
"""Of an argument or result: its name to the user."""

BWD_VALUE = "bwd.value"
"""Of an argument or result: its name in the captured graph."""

BWD_VALUES = "bwd.values"
"""Of an op: the names of its results in the captured graph."""

BWD_SHAPE = "bwd.shape"
"""Of an argument or result: its shape, where that is open."""

BWD_SHAPES = "bwd.shapes"
"""Of an op: the shapes of its results; empty for those that are fixed."""

BWD_SIZES = "bwd.sizes"
"""Of the module: the open sizes, and what they were in the trace."""

BWD_RECOMPUTE = "bwd.recompute"
"""Of an op: what the user asked of it, a `Tag`."""

BWD_BLOCK = "bwd.block"
"""Of an op: the number of the checkpointed block that it is in."""

BWD_LABEL = "bwd.label"
"""Of an op: the user's name of it, which rules on what to save know it by."""

BWD_PACKED_AS = "bwd.packed_as"
"""Of an op: the functions that pack its results where they are saved, by name; an empty name packs nothing."""

BWD_INLINE = "bwd.inline"
"""Of a function: its body takes the place of its calls."""

BWD_FLOPS = "bwd.flops"
"""Of an op that runs in torch and gives the same each time: its FLOPs."""

BWD_LATE = "bwd.late"
"""Of a collective: it was called in the backward."""

BWD_TURN = "bwd.turn"
"""Of a collective: which one it was, from 0, of those that were captured."""

BWD_ISLAND = "bwd.island"
"""Of an `ISLAND_OP`: its number."""

BWD_RANDOM = "bwd.random"
"""Of an `ISLAND_OP`: it draws random numbers."""

BWD_DONATED = "bwd.donated"
"""Of an argument: the caller gives it up, and the function may write over it after its last use: scratch memory lies
there, and of results "several", "one" of its size, or "none"; "joined" is several, and it may lie behind others such.
In what a program says of a function, the numbers of the arguments that are written over, with commas between."""

BWD_JOINED = "bwd.joined"
"""In what a program says of a function: the arguments that it takes one behind another in one storage, which it writes
over, as ``FIRST:SIZE:ARGUMENT:OFFSET`` by number and in bytes, with commas between. Those of one FIRST are in one; the
first is given as all bytes of that, and SIZE is how many there are. Of a module: residuals lie so for another backward,
and this one does not write over them."""

BWD_COPIED = "bwd.copied"
"""In what a program says of a function: the results that IREE fills, or copies to, by number, with commas between."""

BWD_FILLED = "bwd.filled"
"""In what a program says of a function: the arguments that it writes over and that IREE fills, or copies to, by number,
with commas between."""

BWD_PLACED = "bwd.placed"
"""In what a program says of a function: the results that lie in arguments that it writes over, as
``RESULT:ARGUMENT:OFFSET:SIZE`` by number and in bytes, with commas between."""

BWD_COPIED_OUT = "bwd.copied_out"
"""In what a program says of a function: of the results that lie in arguments those, by number and with commas between,
that its caller copies to memory of their own when it has returned."""

ISLAND_OP = "torch.retrograd.island"
"""An operator with any number of operands and results, which runs in torch."""


class Tag(Enum):
    """A user's demand on an op of the forward. The two in the middle are wishes, which the policy ``budget`` may
    overrule."""

    MUST = "must"  # recomputed, never saved
    PREFER = "prefer"  # recomputed
    AVOID = "avoid"  # not recomputed
    NEVER = "never"  # its results are saved if the backward uses them

    @property
    def recomputes(self) -> bool:
        """Whether it asks for recomputation."""
        return self in (Tag.MUST, Tag.PREFER)
