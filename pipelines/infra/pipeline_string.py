# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Text of a pass pipeline to a tree. MLIR's own parser knows no Python pass.

    pipeline := element (',' element)*
    element  := name [ '{' options '}' ] [ '(' pipeline ')' ]

Options are kept as text: a native pass's are MLIR's to read, `split_options` reads ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from retrograd.contract.errors import RetrogradError

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SPACE = re.compile(r"\s*")
_CLOSING = {"{": "}", "[": "]", "(": ")", "<": ">"}


class PipelineSyntaxError(RetrogradError, ValueError):
    """A pipeline that is not well formed, or an element of one that cannot be used.

    ``str()`` shows the text with a caret under the column.

    Args:
        message: what is wrong.
        text: the whole pipeline.
        column: where in `text`, counted from 0.
    """

    def __init__(self, message: str, text: str, column: int) -> None:
        self.message = message
        self.text = text
        self.column = column
        super().__init__(f"<pipeline>:1:{column + 1}: error: {message}\n{self.excerpt}")

    @property
    def excerpt(self) -> str:
        """The pipeline on one line, and under it a caret at the column."""
        shown = "".join(" " if character.isspace() else character for character in self.text)
        return f"  {shown}\n  {' ' * self.column}^"


@dataclass(frozen=True)
class PipelineElement:
    """A pass, or an op with the passes that run on such ops, with its place in the text (from 0)."""

    name: str
    column: int
    options: str | None = None
    children: tuple[PipelineElement, ...] | None = None

    def __str__(self) -> str:
        options = "" if self.options is None else f"{{{self.options}}}"
        children = "" if self.children is None else f"({','.join(map(str, self.children))})"
        return f"{self.name}{options}{children}"


def parse_pipeline(text: str) -> PipelineElement:
    """The tree of a pipeline that is anchored on the module, ``builtin.module(...)``.

    Raises:
        PipelineSyntaxError: the text is not well formed or has another anchor.
    """
    elements, end = _parse_elements(text, _skip(text, 0))
    if end < len(text):
        raise PipelineSyntaxError(f"expected the end of the pipeline, found '{text[end]}'", text, end)
    root = elements[0]
    if len(elements) > 1 or root.children is None or root.name != "builtin.module" or root.options is not None:
        raise PipelineSyntaxError("expected one anchor around all passes: builtin.module(...)", text, root.column)
    return root


def split_options(text: str) -> dict[str, str]:
    """Options of a pass as name and value, both text; an option with no value is ``true``.

    Raises:
        ValueError: an option without a name, an option given twice, or brackets or quotation marks that do not close.
    """
    options: dict[str, str] = {}
    position = _skip(text, 0)
    while position < len(text):
        end = _find_end(text, position, stop=" \t\n")
        name, has_value, value = text[position:end].partition("=")
        if not name:
            raise ValueError(f"an option without a name: '{text[position:end]}'")
        if name in options:
            raise ValueError(f"option '{name}' is given twice")
        options[name] = _unwrap(value) if has_value else "true"
        position = _skip(text, end)
    return options


def _parse_elements(text: str, position: int) -> tuple[tuple[PipelineElement, ...], int]:
    elements: list[PipelineElement] = []
    while True:
        element, position = _parse_element(text, position)
        elements.append(element)
        if text[position : position + 1] != ",":
            return tuple(elements), position
        position = _skip(text, position + 1)


def _parse_element(text: str, start: int) -> tuple[PipelineElement, int]:
    match = _NAME.match(text, start)
    if match is None:
        raise PipelineSyntaxError(f"expected the name of a pass, found {_found(text, start)}", text, start)
    position = _skip(text, match.end())
    options: str | None = None
    children: tuple[PipelineElement, ...] | None = None
    if text[position : position + 1] == "{":
        end = _parse_options(text, position)
        options = text[position + 1 : end - 1].strip()
        position = _skip(text, end)
    if text[position : position + 1] == "(":
        opening = position
        position = _skip(text, position + 1)
        children = ()
        if text[position : position + 1] != ")":
            children, position = _parse_elements(text, position)
        if position == len(text):
            raise PipelineSyntaxError("this '(' is never closed", text, opening)
        if text[position] != ")":
            raise PipelineSyntaxError(f"expected ',' or ')', found {_found(text, position)}", text, position)
        position = _skip(text, position + 1)
    return PipelineElement(match.group(), start, options, children), position


def _parse_options(text: str, opening: int) -> int:
    try:
        return _find_end(text, opening, stop="", one_group=True)
    except ValueError as error:
        raise PipelineSyntaxError(str(error), text, opening) from error


def _find_end(text: str, start: int, *, stop: str, one_group: bool = False) -> int:
    """Where what starts at `start` ends: before a character of `stop` outside all brackets, or after one group."""
    closing: list[str] = []
    quote = ""
    for position in range(start, len(text)):
        character = text[position]
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
        elif closing and character == closing[-1]:
            closing.pop()
            if one_group and not closing:
                return position + 1
        elif not closing and character in stop:
            return position
    if quote or closing:
        raise ValueError(f"expected {quote or closing[-1]} before the end")
    return len(text)


def _unwrap(value: str) -> str:
    """A value without the quotation marks or braces around all of it."""
    if len(value) >= 2 and value[0] + value[-1] in ('""', "''", "{}"):
        return value[1:-1]
    return value


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _found(text: str, position: int) -> str:
    return "the end" if position >= len(text) else f"'{text[position]}'"
