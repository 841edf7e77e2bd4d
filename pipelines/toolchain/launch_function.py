# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Works out one function of IREE's HAL phase, statement by statement, as IREE's virtual machine would run it: with
numbers, and places for buffers. A method reads one op; the form that it reads stands above it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from retrograd.contract.launches import Copy, Expected, Fill, Kernel, LaunchPlan, Place, Step, Write
from retrograd.pipelines.toolchain.constant_data import ConstantData
from retrograd.pipelines.toolchain.pool import Pool

GLOBAL = r'@("[^"]*"|[\w$.]+)'
_BUFFERS = ("!hal.buffer", "!hal.command_buffer")
_FLAGS = r'flags\("None"\)'
# Ops that queue nothing and give nothing that the rest asks for.
_IGNORED = re.compile(
    r"(?:%[\w$.-]+ = )?(?:hal\.(?:fence\.(?:create|join|await)|command_buffer\.(?:finalize|execution_barrier)"
    r"|device\.allocator|memory_type|buffer_usage|encoding_type)|util\.(?:status\.check_ok|null))\b"
)
_V = r"(%[\w$.-]+)"
_PLACE = rf"\({_V} : (index|!hal\.buffer)\)\[{_V}"
_BINDING = re.compile(rf"{_PLACE}, %[\w$.-]+\]")
_CMD = rf"<{_V} : !hal\.command_buffer>"
_PUT = r"<%[\w$.-]+ : !hal\.device> affinity\(\S+\) wait\(\S+\) signal\(\S+\) "


class Unknown(Exception):
    """Something that has no plan; the message says what, for people to read."""


@dataclass(frozen=True)
class _Slot:
    """The buffer of that number among those that commands get when they are queued, and an offset into it."""

    number: int
    offset: int = 0


# A command before its buffers are known: makes a step of what tells where they are.
_Command = Callable[[Callable[[Place | _Slot], Place]], Step]


@dataclass
class _Commands:
    """The commands that a command buffer records, in order."""

    steps: list[_Command] = field(default_factory=list)


@dataclass(frozen=True)
class _Contents:
    """The bytes of a constant, on the host; an attribute's, or an alias's, as the text has them."""

    attribute: str


_Value = int | float | str | Place | _Slot | _Commands | _Contents


@dataclass
class Module:
    """The facts read so far: globals, statements of functions that record commands, why other globals are not known."""

    constants: ConstantData
    globals: dict[str, _Value] = field(default_factory=dict)
    recorders: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


_Handler = Callable[["Reader", re.Match[str]], None]
_STATEMENTS: list[tuple[re.Pattern[str], _Handler]] = []


def _form(pattern: str) -> Callable[[_Handler], _Handler]:
    """Have a method of the reader read statements of this form."""

    def note(handle: _Handler) -> _Handler:
        _STATEMENTS.append((re.compile(pattern), handle))
        return handle

    return note


class Reader:
    """Works out one function."""

    def __init__(self, module: Module, arguments: list[str]) -> None:
        self._module = module
        self._values: dict[str, _Value] = {}
        self._arguments = [Expected() for _ in arguments]
        self._is_initializer = not arguments
        self._problem: str | None = None
        for number, kind in enumerate(arguments):
            if kind != "!hal.buffer_view":
                self._problem = "it takes sizes"
            else:
                self._values[f"%arg{number}"] = Place("argument", number, 0)
        self.steps: list[Step] = []
        self.kept: dict[str, int] = {}
        self.returned: _Commands | None = None
        self._pool = Pool()
        # Whether constants were imported, and what the blocks behind that get, by label.
        self._imported: set[str] = set()
        self._handed: dict[str, list[str]] = {}

    def plan(self) -> LaunchPlan:
        """Return the plan that was read."""
        return LaunchPlan(tuple(self._arguments), self._pool.size, tuple(self.steps), self.kept)

    def read(self, line: str) -> None:
        """One statement.

        Raises:
            Unknown: there is no plan of it.
        """
        if self._problem is not None:
            raise Unknown(self._problem)
        if line in ("", "util.return") or _IGNORED.match(line):
            return
        for pattern, handle in _STATEMENTS:
            if (match := pattern.fullmatch(line)) is not None:
                handle(self, match)
                return
        op = re.search(r"(?:^|= )\"?([a-z_]+\.[a-z_.]+)", line)
        raise Unknown(f"{op[1] if op else line[:40]!r} has no plan in this form")

    def _value(self, name: str) -> _Value:
        if name not in self._values:
            raise Unknown("it depends on sizes or values that only a call has")
        return self._values[name]

    def _number(self, name: str) -> int:
        value = self._value(name)
        if not isinstance(value, int):
            raise Unknown("a number is not constant")
        return value

    def _numbers(self, names: str) -> list[int]:
        return [self._number(name) for name in names.split(", ") if name]

    def _place(self, name: str, kind: str, offset: str) -> Place | _Slot:
        """A buffer as ops name it: one of its own, or its number among those that commands get."""
        shift = self._number(offset)
        if kind == "index":
            return _Slot(self._number(name), shift)
        value = self._value(name)
        if not isinstance(value, Place):
            raise Unknown("a buffer is not known")
        return Place(value.base, value.which, value.offset + shift)

    @_form(rf"{_V} = arith\.constant (\S+) : (index|i\d+|f\d+|bf16)")
    @_form(r"(%false|%true)[\w$.-]* = arith\.constant (true|false)()")
    def constant(self, m: re.Match[str]) -> None:
        """`arith.constant`."""
        name, text, kind = m.groups()
        if kind.startswith("f"):
            self._values[name] = to_bits(text, kind)
        elif text in ("true", "false"):
            self._values[name] = int(text == "true")
        else:
            self._values[name] = int(text)

    @_form(rf"{_V} = util\.optimization_barrier {_V} : \S+")
    @_form(rf"{_V} = arith\.bitcast {_V} : (?:f32 to i32|f64 to i64)")
    @_form(rf"{_V} = hal\.buffer_view\.buffer<{_V} : !hal\.buffer_view> : !hal\.buffer")
    @_form(rf"{_V} = hal\.ex\.file\.from_memory .* buffer\({_V} : !util\.buffer\)\[.*\] flags\(\S+\) : !hal\.file")
    def same(self, m: re.Match[str]) -> None:
        """Bind a result to the value that the op takes; numbers with a fraction are their bits from the beginning."""
        if m[2] in self._values:
            self._values[m[1]] = self._values[m[2]]

    @_form(rf"{_V} = hal\.element_type<(\w+)> : i32")
    def element_type(self, m: re.Match[str]) -> None:
        """`hal.element_type`."""
        self._values[m[1]] = m[2]

    @_form(rf"{_V} = util\.global\.load (?:immutable )?{GLOBAL} : (\S+)")
    def load(self, m: re.Match[str]) -> None:
        """`util.global.load`."""
        name, of, kind = m.groups()
        if kind in _BUFFERS:
            if of not in self._module.globals:
                raise Unknown(self._module.refused.get(of, f"nothing that is known here sets {of}"))
            self._values[name] = self._module.globals[of]
        elif kind in ("!hal.device", "!hal.executable"):
            self._values[name] = f"{kind} {of}"

    @_form(rf"util\.global\.store {_V}, {GLOBAL} : (\S+)")
    def store(self, m: re.Match[str]) -> None:
        """`util.global.store`: an initializer leaves a buffer, or commands, for functions."""
        name, of, kind = m.groups()
        value = self._value(name)
        if not self._is_initializer or kind not in _BUFFERS or of in self._module.globals:
            raise Unknown("it changes a global")
        if isinstance(value, _Commands):
            self._module.globals[of] = value
        elif isinstance(value, Place) and value.base == "scratch":
            self._module.globals[of] = Place("global", of, 0)
            self.kept[of] = value.offset
        else:
            raise Unknown("it changes a global")

    @_form(rf"{_V} = util\.call {GLOBAL}\(([^)]*)\) : \([^)]*\) -> !hal\.command_buffer")
    def call(self, m: re.Match[str]) -> None:
        """`util.call` of a function that records commands, on buffers that it takes."""
        body = self._module.recorders.get(m[2])
        if body is None:
            raise Unknown("it calls a function")
        recorder = Reader(self._module, [])
        for number, name in enumerate(m[3].split(", ") if m[3] else []):
            if name in self._values:
                recorder._values[f"%arg{number}"] = self._values[name]
        for line in body:
            recorder.read(line)
        if recorder.returned is None or recorder.steps or recorder.kept or recorder._pool.size:
            raise Unknown("it calls a function that does more than record commands")
        self._values[m[1]] = recorder.returned

    @_form(rf"util\.return {_V} : !hal\.command_buffer")
    def give(self, m: re.Match[str]) -> None:
        """`util.return`: what a function that records commands gives."""
        value = self._values.get(m[1])
        if isinstance(value, _Commands):
            self.returned = value

    @_form(
        rf"{_V} = hal\.buffer_view\.create buffer{_PLACE}, %[\w$.-]+\] shape\(.*\) type\({_V}\) "
        r"encoding\(%dense_row_major\) : !hal\.buffer_view"
    )
    def view(self, m: re.Match[str]) -> None:
        """`hal.buffer_view.create`: a result."""
        self._values[m[1]] = self._place(*m.group(2, 3, 4))

    @_form(r"util\.return (%.*?) : !hal\.buffer_view(?:, !hal\.buffer_view)*")
    def give_views(self, m: re.Match[str]) -> None:
        """`util.return` of results: each has to be the argument that is its storage, whole."""
        names = m[1].split(", ")
        first = len(self._arguments) - len(names)
        for number, name in enumerate(names):
            if self._value(name) != Place("argument", first + number, 0):
                raise Unknown("it gives results in memory of its own")

    @_form(
        rf"hal\.buffer_view\.assert<{_V} : !hal\.buffer_view> message\(\"[^\"]*\"\) shape\(\[(.*)\]\) "
        rf"type\({_V}\) encoding\(%dense_row_major\)"
    )
    def assert_view(self, m: re.Match[str]) -> None:
        """`hal.buffer_view.assert`: what an argument must be."""
        place, element = self._value(m[1]), self._value(m[3])
        if not isinstance(place, Place) or not isinstance(place.which, int) or not isinstance(element, str):
            raise Unknown("what it takes is not known")
        known = self._arguments[place.which]
        self._arguments[place.which] = Expected(tuple(self._numbers(m[2])), element, known.bytes)

    @_form(rf"hal\.buffer\.assert<{_V} : !hal\.buffer> .* minimum_length\({_V}\) .*")
    def assert_buffer(self, m: re.Match[str]) -> None:
        """`hal.buffer.assert`: how many bytes an argument has at least."""
        place = self._value(m[1])
        if isinstance(place, Place) and isinstance(place.which, int):
            known = self._arguments[place.which]
            self._arguments[place.which] = Expected(known.shape, known.element, max(known.bytes, self._number(m[2])))

    @_form(rf"{_V} = hal\.buffer\.subspan<{_V} : !hal\.buffer>\[{_V}, \S+\] : !hal\.buffer")
    def subspan(self, m: re.Match[str]) -> None:
        """`hal.buffer.subspan`."""
        place = self._place(m[2], "!hal.buffer", m[3])
        self._values[m[1]] = place

    @_form(
        rf"{_V} = hal\.device\.queue\.alloca{_PUT}pool\(\S+\) type\(\S+\) usage\(\S+\) {_FLAGS} : "
        rf"!hal\.buffer\{{{_V}\}}"
    )
    def allocate(self, m: re.Match[str]) -> None:
        """`hal.device.queue.alloca`: the first gap in the scratch memory that it fits."""
        offset = self._pool.allocate(self._number(m[2]))
        self._values[m[1]] = Place("scratch", "", offset)

    @_form(rf"hal\.device\.queue\.dealloca{_PUT}buffer\({_V} : !hal\.buffer\) flags\(\S+\)")
    def free(self, m: re.Match[str]) -> None:
        """`hal.device.queue.dealloca`."""
        place = self._value(m[1])
        if not isinstance(place, Place) or place.base != "scratch" or not self._pool.free(place.offset):
            raise Unknown("it frees memory that it did not allocate")

    @_form(rf"{_V} = util\.buffer\.constant (?:\"[^\"]*\" )?<[^>]*> : !util\.buffer = (.*)")
    def buffer_constant(self, m: re.Match[str]) -> None:
        """`util.buffer.constant`: a constant's bytes, on the host."""
        if not self._is_initializer:
            raise Unknown("it holds a constant")
        self._values[m[1]] = _Contents(m[2])

    @_form(rf"{_V} = hal\.allocator\.allocate<%[\w$.-]+ : !hal\.allocator> .* : !hal\.buffer\{{{_V}\}}")
    def place_constant(self, m: re.Match[str]) -> None:
        """`hal.allocator.allocate`: memory for a constant, which stays."""
        self._values[m[1]] = Place("scratch", "", self._pool.allocate(self._number(m[2])))

    @_form(
        rf"hal\.device\.queue\.read{_PUT}source\({_V} : !hal\.file\)\[{_V}\] target{_PLACE}\] "
        rf"length\({_V}\) {_FLAGS}"
    )
    def read_file(self, m: re.Match[str]) -> None:
        """`hal.device.queue.read`: a constant goes to the device."""
        contents, target = self._value(m[1]), _own(self._place(*m.group(3, 4, 5)))
        if not isinstance(contents, _Contents):
            raise Unknown("a file is not a constant's")
        first = self._number(m[2])
        try:
            data = self._module.constants.find(contents.attribute)[first : first + self._number(m[6])]
        except ValueError as error:
            raise Unknown(str(error)) from error
        if len(data) != self._number(m[6]):
            raise Unknown("it reads behind the end of a constant")
        self.steps.append(Write(target, data))

    @_form(rf"{_V}, %[\w$.-]+ = hal\.allocator\.import<.* source\({_V} : !util\.buffer\).* : i1, !hal\.buffer")
    def import_constant(self, m: re.Match[str]) -> None:
        """`hal.allocator.import`: whether the device reads the host's memory, which is not asked: a copy it reads."""
        if isinstance(self._value(m[2]), _Contents):
            self._imported.add(m[1])

    @_form(rf"cf\.cond_br {_V}, \^(\w+)\(%.*\), \^\w+")
    def choose(self, m: re.Match[str]) -> None:
        """`cf.cond_br` upon an import: the block that copies follows."""
        if m[1] not in self._imported:
            raise Unknown("it branches")
        self._handed[m[2]] = []

    @_form(r"cf\.br \^(\w+)\((.*) : .*\)")
    def branch(self, m: re.Match[str]) -> None:
        """`cf.br` behind a copy."""
        if m[1] not in self._handed:
            raise Unknown("it branches")
        self._handed[m[1]] = m[2].split(", ")

    @_form(r"\^(\w+)(?:\((.*)\))?:.*")
    def block(self, m: re.Match[str]) -> None:
        """The beginning of a block, which gets what the one before it gave."""
        names = re.findall(r"(%[\w$.-]+): ", m[2] or "")
        handed = self._handed.get(m[1], [])
        if len(names) != len(handed):
            raise Unknown("it branches")
        for name, given in zip(names, handed, strict=True):
            if given in self._values:
                self._values[name] = self._values[given]

    @_form(rf"{_V} = hal\.command_buffer\.create .*")
    def begin(self, m: re.Match[str]) -> None:
        """`hal.command_buffer.create`."""
        self._values[m[1]] = _Commands()

    @_form(
        rf"hal\.command_buffer\.dispatch{_CMD} target\(.*?\)\[{_V}\] workgroups\(\[([^\]]*)\]\) "
        rf"(?:constants\(\[([^\]]*)\]\) )?bindings\(\[(.*)\]\) {_FLAGS}"
    )
    def dispatch(self, m: re.Match[str]) -> None:
        """`hal.command_buffer.dispatch`."""
        commands, function, grid, constants, buffers = m.groups()
        executable, _, entry = str(self._value(function)).partition("::")
        x, y, z = self._numbers(grid)
        numbers = tuple(number & 0xFFFFFFFF for number in self._numbers(constants or ""))
        found = _BINDING.findall(buffers)
        if len(found) != buffers.count("]"):
            raise Unknown("a kernel's buffers are written in another form")
        places = [self._place(*binding) for binding in found]
        self._add(commands, lambda at: Kernel(executable, entry, (x, y, z), tuple(map(at, places)), numbers))

    @_form(rf"{_V} = hal\.executable\.lookup\.function target\(.*\) function\(@([\w$]+)::@([\w$]+)::@([\w$]+)\) : i64")
    def lookup(self, m: re.Match[str]) -> None:
        """`hal.executable.lookup.function`: executable, variant and entry point, as files in a vmfb are named."""
        self._values[m[1]] = f"{m[2]}_{m[3]}::{m[4]}"

    @_form(rf"hal\.command_buffer\.fill_buffer{_CMD} target{_PLACE}, {_V}\] pattern\({_V} : i(\d+)\) {_FLAGS}")
    def fill(self, m: re.Match[str]) -> None:
        """`hal.command_buffer.fill_buffer`."""
        target, length = self._place(*m.group(2, 3, 4)), self._number(m[5])
        pattern, width = self._pattern(*m.group(6, 7))
        self._add(m[1], lambda at: Fill(at(target), length, pattern, width))

    @_form(rf"hal\.device\.queue\.fill{_PUT}target{_PLACE}\] length\({_V}\) pattern\({_V} : i(\d+)\) {_FLAGS}")
    def queue_fill(self, m: re.Match[str]) -> None:
        """`hal.device.queue.fill`."""
        target = self._place(*m.group(1, 2, 3))
        self.steps.append(Fill(_own(target), self._number(m[4]), *self._pattern(*m.group(5, 6))))

    def _pattern(self, name: str, bits: str) -> tuple[int, int]:
        """Return the pattern that a fill writes, and its width in bytes."""
        width = int(bits) // 8
        if width not in (1, 2, 4):
            raise Unknown(f"a fill with patterns of {width} bytes")
        return self._number(name) & (1 << 8 * width) - 1, width

    @_form(rf"hal\.command_buffer\.copy_buffer{_CMD} source{_PLACE}\] target{_PLACE}\] length\({_V}\) {_FLAGS}")
    def copy(self, m: re.Match[str]) -> None:
        """`hal.command_buffer.copy_buffer`."""
        source, target, length = self._place(*m.group(2, 3, 4)), self._place(*m.group(5, 6, 7)), self._number(m[8])
        self._add(m[1], lambda at: Copy(at(source), at(target), length))

    @_form(rf"hal\.device\.queue\.copy{_PUT}source{_PLACE}\] target{_PLACE}\] length\({_V}\) {_FLAGS}")
    def queue_copy(self, m: re.Match[str]) -> None:
        """`hal.device.queue.copy`."""
        source, target = self._place(*m.group(1, 2, 3)), self._place(*m.group(4, 5, 6))
        self.steps.append(Copy(_own(source), _own(target), self._number(m[7])))

    def _add(self, commands: str, make: _Command) -> None:
        value = self._value(commands)
        if not isinstance(value, _Commands):
            raise Unknown("commands that are not known")
        value.steps.append(make)

    @_form(rf"hal\.device\.queue\.execute{_PUT}commands\((?P<commands>%[^)]*)\) {_FLAGS}")
    @_form(rf"hal\.device\.queue\.execute{_PUT}commands\(\[(?P<commands>%[^\]]*)\]\)(?: {_FLAGS})?")
    @_form(
        rf"hal\.device\.queue\.execute\.indirect{_PUT}commands\((?P<commands>%\S+)\) "
        rf"bindings\(\[(?P<buffers>.*)\]\) {_FLAGS}"
    )
    def execute(self, m: re.Match[str]) -> None:
        """`hal.device.queue.execute`, and `.indirect`, which gives the buffers that commands know by number."""
        groups = m.groupdict()
        found = _BINDING.findall(groups.get("buffers") or "")
        slots = [_own(self._place(*binding)) for binding in found]
        if len(found) != (groups.get("buffers") or "").count("]"):
            raise Unknown("buffers of commands are written in another form")

        def at(place: Place | _Slot) -> Place:
            if isinstance(place, Place):
                return place
            base = slots[place.number]
            return Place(base.base, base.which, base.offset + place.offset)

        for name in groups["commands"].split(", "):
            value = self._value(name)
            if not isinstance(value, _Commands):
                raise Unknown("commands that are not known")
            self.steps += [make(at) for make in value.steps]


def _own(place: Place | _Slot) -> Place:
    if isinstance(place, _Slot):
        raise Unknown("a buffer has a number where it needs a name")
    return place


def to_bits(text: str, kind: str) -> int:
    """The bits of a constant of MLIR's of a type with a fraction (``f32``, ``f64``).

    Raises:
        Unknown: the type has no such bits here.
    """
    if text.startswith("0x"):
        return int(text, 16)
    if kind not in ("f32", "f64"):
        raise Unknown(f"a constant of type {kind}")
    code = kind[1:]
    packed = struct.pack("<f" if code == "32" else "<d", float(text))
    return int.from_bytes(packed, "little")
