# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Builders of bwd ops in terms of plain Python values, at the current insertion point and location."""

from collections.abc import Iterator, Sequence

from retrograd.contract.collectives import Collective
from retrograd.dialects import ir
from retrograd.dialects.bwd import (
    AccumulateGradOp,
    CallBackwardOp,
    CallHookOp,
    CollectiveOp,
    CreateTokenOp,
    FinalCallbacksOp,
    RecomputeBarrierOp,
    SaveOp,
    StartCollectiveOp,
    UpdateInputOp,
    WaitCollectiveOp,
)

# The type of no value at all. (An empty tuple prints as what does not parse.)
NONE = "!torch.none"


def create_token() -> ir.Value:
    """Start a chain; returns its first token."""
    return CreateTokenOp().results[0]


def call_hook(
    value: ir.Value, token: ir.Value, *, kind: str, hook: int, result_type: ir.Type | None = None
) -> tuple[ir.Value, ir.Value]:
    """Call hook number `hook` on `value`; returns what it gives (of `value`'s type unless told) and the next token."""
    op = CallHookOp(value, token, ir.StringAttr.get(kind), _index(hook), result_type or value.type)
    return op.results[0], op.results[1]


def accumulate_grad(gradient: ir.Value, token: ir.Value, *, param: int) -> ir.Value:
    """Add `gradient` to parameter number `param`; returns the next token."""
    return AccumulateGradOp(gradient, token, _index(param)).results[0]


def call_backward(
    value: ir.Value, token: ir.Value, *, function: int, result_type: ir.Type | None = None
) -> tuple[ir.Value, ir.Value]:
    """Call custom function number `function`'s backward; returns what it gives (of `value`'s type unless told) and the
    next token.
    """
    op = CallBackwardOp(value, token, _index(function), result_type or value.type)
    return op.results[0], op.results[1]


def final_callbacks(token: ir.Value) -> ir.Value:
    """Run the queued callbacks; returns the last token."""
    return FinalCallbacksOp(token).results[0]


def update_input(value: ir.Value, token: ir.Value, *, hook: int) -> ir.Value:
    """Write to an argument; `value` is a tuple as for `UpdateInputOp`. Returns the next token."""
    return UpdateInputOp(value, token, _index(hook)).results[0]


def collective(value: ir.Value, what: Collective, result_type: ir.Type) -> ir.Value:
    """Build the op that makes something of `value` together with other processes, and is done when that is there."""
    return CollectiveOp(value, *_describe(what), result_type).results[0]


def start_collective(
    value: ir.Value, token: ir.Value, what: Collective, result_type: ir.Type
) -> tuple[ir.Value, ir.Value]:
    """Start it on `value`, or on each of a tuple; returns what is in the making and the next token."""
    op = StartCollectiveOp(value, token, *_describe(what), result_type)
    return op.results[0], op.results[1]


def wait_collective(started: ir.Value) -> ir.Value:
    """Build the op that waits for a started collective."""
    return WaitCollectiveOp(started, started.type).results[0]


def read_collective(op: ir.Operation) -> Collective:
    """Read the exchange that an op of `collective` or `start_collective` is."""
    texts = (ir.StringAttr(op.attributes[name]).value for name in ("kind", "reduction", "group"))
    kind, reduction, group = texts
    return Collective(kind, reduction, ir.IntegerAttr(op.attributes["size"]).value, group)


def _describe(what: Collective) -> tuple[ir.Attribute, ...]:
    text = ir.StringAttr.get
    return text(what.collective), text(what.reduction), _index(what.size), text(what.group)


def save(value: ir.Value, *, name: str) -> ir.OpView:
    """Mark `value` as a residual called `name`; returns the op."""
    return SaveOp(value, ir.StringAttr.get(name))


def recompute_barrier(value: ir.Value) -> ir.Value:
    """`value` again, for a recomputation to start from."""
    return RecomputeBarrierOp(value, value.type).results[0]


def bundle(values: Sequence[ir.Value]) -> ir.Value:
    """Several values of torch types as one ``!torch.tuple``; a single value stays as it is, and none is
    ``torch.constant.none``.
    """
    if not values:
        return ir.torch.ConstantNoneOp().results[0]
    if len(values) == 1:
        return values[0]
    return ir.torch.PrimTupleConstructOp(bundle_type([v.type for v in values]), list(values)).results[0]


def bundle_type(types: Sequence[ir.Type]) -> ir.Type:
    """The type in which values of these types travel as one: that of what `bundle` gives."""
    if len(types) == 1:
        return types[0]
    elements = ", ".join(str(type_).removeprefix("!torch.") for type_ in types)
    return ir.Type.parse(f"!torch.tuple<{elements}>" if types else NONE)


def unbundle(value: ir.Value) -> list[ir.Value]:
    """Returns what `bundle` made one value of: a value that is neither a ``!torch.tuple`` nor ``!torch.none`` is its
    own only element."""
    types = bundled_types(value.type)
    if len(types) < 2:
        return [value] * len(types)
    return list(ir.torch.PrimTupleUnpackOp(types, value).results)


def bundled_types(type_: ir.Type) -> list[ir.Type]:
    """The types of the values that travel as one of this type."""
    text = str(type_)
    if text == NONE:
        return []
    if not text.startswith("!torch.tuple<"):
        return [type_]
    # The bindings have no accessor, and a torch type prints inside a tuple without its dialect.
    inner = text.removeprefix("!torch.tuple<").removesuffix(">")
    return [ir.Type.parse(element if element.startswith("!") else f"!torch.{element}") for element in _split(inner)]


def _split(text: str) -> Iterator[str]:
    """The parts of `text` between commas that no bracket or quotation holds."""
    depth, start, quoted = 0, 0, False
    for end, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in "<[({":
            depth += 1
        elif character in ">])}":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:end].strip()
            start = end + 1
    yield text[start:].strip()


def _index(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
