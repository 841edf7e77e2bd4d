# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The on-disk cache as the pipelines see it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from retrograd.pipelines.toolchain.fingerprint import source_fingerprint
from retrograd.runtime.cache import Cache, cache_key

if TYPE_CHECKING:
    from retrograd.options import Options


class Store:
    """Results of the compiler, by what they depend on and by retrograd's own sources."""

    def __init__(self) -> None:
        self._cache = Cache()

    def get(self, parts: dict[str, str]) -> bytes | None:
        """Returns what was put there for ``parts``."""
        return self._cache.get(self.key_of(parts))

    def put(self, parts: dict[str, str], data: bytes) -> None:
        """Keep ``data`` for ``parts``."""
        self._cache.put(self.key_of(parts), data)

    def making(self, parts: dict[str, str]) -> AbstractContextManager[None]:
        """Let no other process make what is kept for ``parts`` meanwhile."""
        return self._cache.making(self.key_of(parts))

    def get_by_key(self, key: str) -> bytes | None:
        """Returns what was put there for the parts that :meth:`key_of` gave ``key`` for."""
        return self._cache.get(key)

    def key_of(self, parts: dict[str, str]) -> str:
        """The key of what is kept for ``parts``."""
        return cache_key({**parts, "sources": source_fingerprint()})


def open_store(options: Options) -> Store | None:
    """The on-disk cache, if it is wanted."""
    return Store() if options.cache else None
