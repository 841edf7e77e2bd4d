# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Machine code as the cache keeps it, with what is known of it; whoever only runs it imports no compiler."""

from __future__ import annotations

import json
from typing import Any


def pack_code(known: dict[str, Any], vmfb: bytes) -> bytes:
    """An entry of the cache: ``known`` as JSON in one line, and the code."""
    return json.dumps(known).encode() + b"\n" + vmfb


def unpack_code(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Read what :func:`pack_code` was given."""
    header, vmfb = _split(data)
    known: dict[str, Any] = json.loads(header)
    return known, vmfb


def code_of(data: bytes) -> bytes:
    """The code of an entry alone."""
    return _split(data)[1]


def _split(data: bytes) -> tuple[bytes, bytes]:
    header, _, vmfb = data.partition(b"\n")
    return header, vmfb
