# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads the bytes of a module's constants out of its text, where IREE has put them one behind the other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    **{name: np.dtype(f"<i{int(name[1:]) // 8}") for name in ("i8", "i16", "i32", "i64")},
    **{name: np.dtype(f"<f{int(name[1:]) // 8}") for name in ("f16", "f32", "f64")},
    # Its bits: numpy has no such type.
    "bf16": np.dtype("<u2"),
}
_ALIAS = re.compile(r"^#([\w.$-]+) = (#util\.composite<.*|dense.*)$")
_COMPOSITE = re.compile(r"#util\.composite<(\d+)xi8, \[(.*)\]>", re.DOTALL)
_DENSE = re.compile(r'dense(_resource)?<("[^"]*"|[^>]*)> : (?:tensor|vector)<((?:\d+x)*)(\w+)>')
_RESOURCE = re.compile(r'^ *("[^"]*"|[\w.$-]+): "0x([0-9A-Fa-f]*)",?$')


class ConstantData:
    """The constants of one module, by the names that its text has for them. The text, of megabytes, is read for them
    when the first is asked for: few modules have some."""

    def __init__(self, text: str) -> None:
        self._text: str | None = text
        self._resources: dict[str, str] = {}
        self._aliases: dict[str, str] = {}

    def _read(self, lines: Iterable[str]) -> None:
        open_alias: list[str] | None = None
        for line in lines:
            if open_alias is not None:
                open_alias.append(line)
                if line == "]>":
                    name, *rest = open_alias
                    self._aliases[name] = "".join(rest)
                    open_alias = None
            elif (alias := _ALIAS.match(line)) is not None:
                if alias[2].endswith("["):
                    open_alias = [alias[1], alias[2]]
                else:
                    self._aliases[alias[1]] = alias[2]
            elif (resource := _RESOURCE.match(line)) is not None:
                self._resources[resource[1]] = resource[2]

    def find(self, attribute: str) -> bytes:
        """The bytes of an attribute, or of the alias that stands for it.

        Raises:
            ValueError: it is written in another form.
        """
        if self._text is not None:
            self._read(self._text.splitlines())
            self._text = None
        text = self._aliases.get(attribute[1:], attribute) if attribute.startswith("#") else attribute
        composite = _COMPOSITE.fullmatch(text.strip())
        inner = composite[2] if composite else text
        found = list(_DENSE.finditer(inner))
        if re.sub(r"[\s,]", "", _DENSE.sub("", inner)) or not found:
            raise ValueError(f"a constant that is written as {text[:60]!r}")
        data = b"".join(self._bytes(*match.groups()) for match in found)
        if composite and len(data) != int(composite[1]):
            raise ValueError(f"a constant of {composite[1]} bytes of which {len(data)} are written")
        return data

    def _bytes(self, resource: str | None, text: str, shape: str, kind: str) -> bytes:
        if kind not in _DTYPES:
            raise ValueError(f"a constant of {kind}")
        dtype = _DTYPES[kind]
        count = math.prod(int(size) for size in shape.split("x") if size)
        if resource:
            if text not in self._resources:
                raise ValueError(f"a constant of which the text leaves out the resource {text}")
            # The first four bytes say how the rest is aligned.
            data = bytes.fromhex(self._resources[text])[4:]
        elif text.startswith('"0x'):
            data = bytes.fromhex(text[3:-1])
        else:
            data = b"".join(_number(one, dtype) for one in re.findall(r"[^\[\], ]+", text))
        # One value stands for all.
        data = data * count if len(data) == dtype.itemsize else data
        if len(data) != count * dtype.itemsize:
            raise ValueError(f"a constant of {count} numbers of {kind} of which {len(data)} bytes are written")
        return data


def _number(text: str, dtype: np.dtype[np.generic]) -> bytes:
    """One number as MLIR writes it; hexadecimal ones are its bits."""
    if text.startswith("0x"):
        return int(text, 16).to_bytes(dtype.itemsize, "little")
    if text in ("true", "false"):
        return int(text == "true").to_bytes(dtype.itemsize, "little")
    if dtype.kind == "u":
        bits = int(np.array(float(text), "<f4").view("<u4"))
        # To the nearest, and to an even one between two.
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")
    return np.array(int(text) if dtype.kind == "i" else float(text)).astype(dtype).tobytes()
