# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Defines passes: frozen dataclasses with options as their fields, and `apply`."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, Union

from retrograd.contract.errors import RetrogradError
from retrograd.dialects import ir

# The metadata of a field that is no option: a value that text cannot hold, which whoever makes the pass gives it. The
# options then say, in a command that replays a failure, what comes to the same.
VALUE: Mapping[str, bool] = types.MappingProxyType({"value": True})
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class PassFailure(Exception):
    """Raised by a pass that cannot do its work on the module it was given.

    Args:
        op: the op that it stopped at; None stands for the module.
        message: what is wrong.
        remedy: what the user can do about it.
    """

    def __init__(self, op: ir.Operation | ir.OpView | None, message: str, remedy: str) -> None:
        super().__init__(f"{message}; {remedy}")
        self.message = message
        self.remedy = remedy
        # The op itself is not kept: by the time that anyone looks it may be gone, and a touch would end the process.
        self.op_name: str | None = None if op is None else op.operation.name
        self.location: ir.Location | None = None if op is None else op.location


class PassOptionError(RetrogradError, ValueError):
    """An option that a pass does not have, or a value that it cannot take."""


@dataclass(frozen=True)
class PassOption:
    """One option of a pass, as text for people: ``--list-passes`` and error messages."""

    name: str
    type: str
    default: str
    help: str

    def __str__(self) -> str:
        return f"{self.name}=<{self.type}>"


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class ModulePass:
    """A pass over a ``builtin.module``; ``BwdSinkRecompute`` is called ``bwd-sink-recompute``.

    A subclass is a frozen dataclass without saying so. Its fields are its options, but for those whose metadata is
    ``VALUE``, and all have defaults; their types are bool, int, float, str, a ``Literal`` of texts, or one of these
    ``| None``. ``field(default=..., metadata={"help": "..."})`` says what an option is for.
    """

    name: ClassVar[str]
    description: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    def apply(self, module: ir.Operation) -> None:
        """Rewrite `module`, a ``builtin.module``, in place.

        Raises:
            PassFailure: the module cannot be rewritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """The pass with `options`, text by name: the field's, with ``-`` for ``_``. The rest have their defaults.

        Raises:
            PassOptionError: no such option, or not a value of its type; the message lists the options.
        """
        # To read annotations takes longer than all else here, and most passes have no options.
        kinds = typing.get_type_hints(cls) if options else {}
        fields = {_option_name(field): field for field in cls._option_fields()}
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in fields:
                raise PassOptionError(f"{cls.name} has no option '{name}'; {cls._listed_options()}")
            try:
                values[fields[name].name] = parse_value(kinds[fields[name].name], text)
            except ValueError as error:
                raise PassOptionError(f"option '{name}' of {cls.name}: {error}; {cls._listed_options()}") from error
        return cls(**values)

    @classmethod
    def options(cls) -> tuple[PassOption, ...]:
        """The options, in the order in which the fields are declared."""
        kinds = typing.get_type_hints(cls)
        return tuple(
            PassOption(
                name=_option_name(field),
                type=describe_type(kinds[field.name]),
                default=_default_text(field),
                help=str(field.metadata.get("help", "")),
            )
            for field in cls._option_fields()
        )

    def __str__(self) -> str:
        """The pass with its options as a pipeline has it; those that have their defaults are left out."""
        given = ((field, getattr(self, field.name)) for field in self._option_fields())
        options = " ".join(f"{_option_name(f)}={_value_text(value)}" for f, value in given if value != f.default)
        return self.name + (f"{{{options}}}" if options else "")

    @classmethod
    def _option_fields(cls) -> list[dataclasses.Field[Any]]:
        return [field for field in dataclasses.fields(cls) if "value" not in field.metadata]

    @classmethod
    def _listed_options(cls) -> str:
        options = cls.options()
        return f"its options are {', '.join(map(str, options))}" if options else "it has none"


def parse_value(kind: Any, text: str) -> Any:
    """`text` as a value of type `kind`: bool, int, float, str, a ``Literal`` or a union of those with None.

    Raises:
        ValueError: not such a value; the message says what was expected.
        TypeError: `kind` is none of these types.
    """
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _parse_optional(typing.get_args(kind), text)
    if origin is Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, found '{text}'")
        return choices[text]
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise ValueError(f"expected true or false, found '{text}'")
        return _TRUTHS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            raise ValueError(f"expected {describe_type(kind)}, found '{text}'") from error
    raise TypeError(f"pass options cannot be of type {kind}")


def _parse_optional(kinds: tuple[Any, ...], text: str) -> Any:
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return None if text == "none" else parse_value(kind, text)


def describe_type(kind: Any) -> str:
    """A type of option in words, such as ``int`` or ``default|min-cut``."""
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return "|".join(describe_type(one) for one in typing.get_args(kind))
    if origin is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    return "none" if kind is type(None) else str(kind.__name__)


def _option_name(field: dataclasses.Field[Any]) -> str:
    return field.name.replace("_", "-")


def _default_text(field: dataclasses.Field[Any]) -> str:
    return _value_text(field.default)


def _value_text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
