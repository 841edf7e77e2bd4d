# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes, as plain data, what a function queues on a CUDA device: kernels, copies and fills, one after the other."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retrograd.contract.archive import OWN

MEMBER = f"{OWN}launches.json"
"""The file in a vmfb that holds the plans of its functions."""
FORMAT = 2
_READABLE = (1, FORMAT)

Base = Literal["argument", "scratch", "global"]


@dataclass(frozen=True)
class Place:
    """Where bytes begin: ``offset`` into an argument (by its number), the scratch memory or a global (by its name)."""

    base: Base
    which: int | str
    offset: int


@dataclass(frozen=True)
class Kernel:
    """A launch of ``entry`` of an executable: sizes of the grid, places of the buffers, then constants of 32 bits."""

    executable: str
    entry: str
    grid: tuple[int, int, int]
    bindings: tuple[Place, ...]
    constants: tuple[int, ...]


@dataclass(frozen=True)
class Fill:
    """``length`` bytes are set to a pattern of ``width`` bytes (1, 2 or 4)."""

    target: Place
    length: int
    pattern: int
    width: int


@dataclass(frozen=True)
class Copy:
    """``length`` bytes go from one place to another."""

    source: Place
    target: Place
    length: int


@dataclass(frozen=True)
class Write:
    """The bytes of a constant go to a place; no function does so, but initializers."""

    target: Place
    contents: bytes


Step = Kernel | Fill | Copy | Write


@dataclass(frozen=True)
class Expected:
    """Describes what an argument must be: its shape and IREE's name of its elements, where they are known, and the
    fewest bytes."""

    shape: tuple[int, ...] | None = None
    element: str | None = None
    bytes: int = 0


@dataclass(frozen=True)
class LaunchPlan:
    """The steps of one function in an order that holds, and the bytes of scratch memory they take. ``globals`` are the
    buffers that an initializer leaves for others, as offsets into its scratch memory."""

    arguments: tuple[Expected, ...]
    scratch: int
    steps: tuple[Step, ...]
    globals: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Launches:
    """The plans of a module: of its initializers, in order, and of its functions by name; and why others have none."""

    initializers: tuple[LaunchPlan, ...]
    functions: Mapping[str, LaunchPlan]
    reasons: Mapping[str, str]

    def to_json(self) -> str:
        """The text that :func:`parse_launches` reads."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "initializers": [_plan_data(plan) for plan in self.initializers],
            "functions": {name: _plan_data(plan) for name, plan in self.functions.items()},
            "reasons": dict(self.reasons),
        }
        return json.dumps(data, separators=(",", ":"))


def parse_launches(text: str | bytes) -> Launches | None:
    """The plans that a vmfb holds; ``None`` for those of another format, as another release wrote them.

    Raises:
        ValueError: it is not what ``to_json`` writes.
    """
    try:
        data = json.loads(text)
        if data["format"] not in _READABLE:
            return None
        return Launches(
            tuple(_read_plan(plan) for plan in data["initializers"]),
            {str(name): _read_plan(plan) for name, plan in data["functions"].items()},
            {str(name): str(reason) for name, reason in data["reasons"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"launch plans are damaged: {error!r}") from error


def _plan_data(plan: LaunchPlan) -> dict[str, Any]:
    steps = [[type(step).__name__, _step_data(step)] for step in plan.steps]
    arguments = [dataclasses.astuple(argument) for argument in plan.arguments]
    return {"arguments": arguments, "scratch": plan.scratch, "steps": steps, "globals": dict(plan.globals)}


def _step_data(step: Step) -> tuple[Any, ...]:
    if isinstance(step, Write):
        return dataclasses.astuple(step.target), base64.b64encode(step.contents).decode()
    return dataclasses.astuple(step)


def _read_plan(data: Any) -> LaunchPlan:
    arguments = tuple(Expected(None if s is None else tuple(s), e, b) for s, e, b in data["arguments"])
    steps = tuple(_read_step(kind, fields) for kind, fields in data["steps"])
    return LaunchPlan(arguments, int(data["scratch"]), steps, dict(data["globals"]))


def _read_step(kind: str, fields: list[Any]) -> Step:
    if kind == "Kernel":
        executable, entry, (x, y, z), bindings, constants = fields
        return Kernel(executable, entry, (x, y, z), tuple(Place(*b) for b in bindings), tuple(constants))
    if kind == "Fill":
        target, length, pattern, width = fields
        return Fill(Place(*target), length, pattern, width)
    if kind == "Copy":
        source, target, length = fields
        return Copy(Place(*source), Place(*target), length)
    if kind == "Write":
        target, contents = fields
        return Write(Place(*target), base64.b64decode(contents, validate=True))
    raise ValueError(f"launch plans have the unknown step {kind!r}")
