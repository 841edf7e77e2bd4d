# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scratch memory of a program's functions, read off IREE's IR after its stream phase.

What a function allocates there is a constant, or worked out from its arguments' sizes by integer arithmetic, which is
done here with the sizes of the trace (``bwd.sizes`` on the module).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping

from retrograd.contract.roles import INTO, SIZE
from retrograd.contract.sizes import evaluate_size, parse_shape

LAYOUT_PASS = "iree-stream-fold-uniform-operands"
"""After this pass of IREE's, one of the last of its stream phase, :func:`read_transients` reads."""

_FUNCTION = re.compile(r"^  util\.func public @(\w+)\((.*?)\{\n(.*?)^  \}", flags=re.MULTILINE | re.DOTALL)
_HINTS = re.compile(r"bwd\.sizes = \{([^}]*)\}")
_ARGUMENT = re.compile(r"(%\w+): [!\w.]+ \{([^}]*)\}")
_RESULT = re.compile(r"^ *(%[\w-]+) = ([\w.]+) ?(.*)", flags=re.MULTILINE)
_VALUE = re.compile(r"%[\w-]+|(?<=\[)\d+(?=\])")
# What defines or waits for timepoints, and allocates or frees on the way.
_EVENT = re.compile(
    r"^    (?P<results>%[^=]*) = stream\.(?P<op>resource\.alloca|resource\.dealloca|timepoint\.\w+|cmd\.execute)\b"
    r"(?P<rest>[^\n]*)",
    flags=re.MULTILINE,
)
_SCRATCH = re.compile(r"!stream\.resource<transient>\{(%[\w-]+)\}")
# What a function allocates that takes storage for all its results: one of them that it writes somewhere else first, as
# where two results are one value.
_ALLOCATED = re.compile(r"!stream\.resource<(?:transient|external)>\{(%[\w-]+)\}")
_NAME = re.compile(r"%[\w-]+")
_OPERATIONS: dict[str, Callable[..., int]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "divsi": operator.floordiv,
    "divui": operator.floordiv,
    "floordivsi": operator.floordiv,
    "ceildivsi": lambda a, b: -(-a // b),
    "ceildivui": lambda a, b: -(-a // b),
    "remsi": operator.mod,
    "remui": operator.mod,
    "minsi": min,
    "minui": min,
    "maxsi": max,
    "maxui": max,
    "index_cast": int,
    "index_castui": int,
    "select": lambda condition, a, b: a if condition else b,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    name: compare
    for sign in "su"
    for name, compare in (
        (f"{sign}lt", operator.lt),
        (f"{sign}le", operator.le),
        (f"{sign}gt", operator.gt),
        (f"{sign}ge", operator.ge),
    )
} | {"eq": operator.eq, "ne": operator.ne}


def read_transients(stream: str, *, frees_late: bool = False) -> dict[str, int]:
    """Peak scratch bytes of each exported function, at the sizes of the trace; functions of which they cannot be told
    are left out.

    Transient resources are allocated and freed in program order; where a driver ``frees_late``, when the host has
    waited for it: it runs ahead of the device, and what it allocates is there at once. (The statistics that IREE can
    write add up all functions.)
    """
    found = _HINTS.search(stream)
    hints = {name: int(size) for name, size in re.findall(r"(\w+) = (\d+)", found[1])} if found else {}
    peaks: dict[str, int] = {}
    for name, signature, body in _FUNCTION.findall(stream):
        values = _read_arguments(signature, hints)
        values.update(_evaluate(body, values))
        peak = _find_peak(body, values, frees_late, _ALLOCATED if name.endswith(INTO) else _SCRATCH)
        if peak is not None:
            peaks[name] = peak
    return peaks


def _find_peak(body: str, values: Mapping[str, int], frees_late: bool, counted: re.Pattern[str]) -> int | None:
    """The most that is allocated in a function at one time, of the resources ``counted``; None where a size is not
    known."""
    live = peak = 0
    # By timepoint, what is free once it is reached and is not free yet: the names that freed it, with bytes.
    behind: dict[str, dict[str, int]] = {}
    freed: set[str] = set()
    for event in _EVENT.finditer(body):
        results, operands = _NAME.findall(event["results"]), _NAME.findall(event["rest"])
        reached = {name: size for operand in operands for name, size in behind.get(operand, {}).items()}
        scratch = counted.search(event["rest"]) if event["op"].startswith("resource.") else None
        if scratch is not None and scratch[1] not in values:
            return None
        size = values[scratch[1]] if scratch is not None else 0
        if event["op"] == "resource.alloca":
            live += size
            peak = max(peak, live)
        elif event["op"] == "resource.dealloca":
            reached[results[0]] = size
        if event["op"] == "timepoint.await" or not frees_late:
            live -= sum(count for name, count in reached.items() if name not in freed)
            freed.update(reached)
        behind.update(dict.fromkeys(results, reached))
    return peak


def _read_arguments(signature: str, hints: Mapping[str, int]) -> dict[str, int]:
    """The numbers among the arguments, and the sizes of tensors as ``%arg0[1]``."""
    values: dict[str, int] = {}
    for name, attributes in _ARGUMENT.findall(signature):
        fields = dict(re.findall(r'bwd\.(\w+) = "([^"]*)"', attributes))
        if fields.get("role") == SIZE and fields.get("name") in hints:
            values[name] = hints[fields["name"]]
        for axis, size in enumerate(parse_shape(fields.get("shape", ""))):
            values[f"{name}[{axis}]"] = evaluate_size(size, hints)
    return values


def _evaluate(body: str, known: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The numbers that a function works out, by name, as far as they follow from those that are known."""
    values = dict(known)
    for name, op, rest in _RESULT.findall(body):
        number = _work_out(op, rest, values)
        if number is not None:
            values[name] = number
            yield name, number


def _work_out(op: str, rest: str, values: Mapping[str, int]) -> int | None:
    if op == "arith.constant":
        constant = re.match(r"(-?\d+) : ", rest)
        return int(constant[1]) if constant else None
    # The types that follow a colon have no values in them.
    names = _VALUE.findall(rest.partition(" loc(")[0])
    if op == "hal.buffer_view.dim":
        return values.get(f"{names[0]}[{names[1]}]") if len(names) == 2 else None
    operands = [values[n] for n in names if n in values]
    if not operands or len(operands) < len(names):
        return None
    if op == "util.align":
        return -(-operands[0] // operands[1]) * operands[1]
    if op == "arith.cmpi":
        return int(_COMPARISONS[rest.partition(",")[0]](*operands))
    operation = _OPERATIONS.get(op.removeprefix("arith.")) if op.startswith("arith.") else None
    return None if operation is None else operation(*operands)
