# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A folder of compiled code, shared by processes, that can only ever save time.

Whatever goes wrong with an entry (evicted while it is read, cut short, altered) is a miss; whatever goes wrong with the
folder is one warning and no caching. An entry is one file: a header, the sha256 of its data, the data. Files appear by
rename, so that a reader sees a whole entry or none. The time of last change is the time of last use.
"""

import contextlib
import hashlib
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

from retrograd.contract.environment import CACHE_FOLDER
from retrograd.contract.whole_files import TEMPORARY_SUFFIX, replacing

DEFAULT_MAX_BYTES = 2 * 1024**3

_HEADER = b"retrograd-cache-1\n"
_DIGEST_BYTES = 32
_SUFFIX = ".entry"
_LOCK_SUFFIX = ".lock"
# A writer that is still alive renames its file long before this; what is older belongs to a process that was killed.
_ABANDONED_SECONDS = 3600.0
# The longest that one process waits for another that makes what both need; then it makes it too.
_MOST_SECONDS = 600.0
_KEY_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CacheEntry:
    """One entry: its key, its bytes on disk, and when it was last used (seconds since the epoch)."""

    key: str
    bytes: int
    last_used: float


class Cache:
    """Bytes by key in a folder, at most `max_bytes` of them, the least recently used going first. Without `folder`, the
    folder is `$RETROGRAD_CACHE_DIR` or else the user's cache folder of the platform."""

    def __init__(self, folder: Path | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()
        self.max_bytes = max_bytes
        self._warned = False

    def get(self, key: str) -> bytes | None:
        """The data stored under `key`, or None. An entry that is not whole is removed.

        Raises:
            ValueError: `key` did not come from `cache_key`.
        """
        path = self._path(key)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        data = _unpack(stored)
        if data is None:
            _remove(path)
            return None
        # Evicted since it was read, or in a folder that others fill: what was read is whole all the same.
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store `data` under `key` and evict what no longer fits. An entry larger than the cache is not stored.

        Raises:
            ValueError: `key` did not come from `cache_key`.
        """
        path = self._path(key)
        packed = _HEADER + hashlib.sha256(data).digest() + data
        if len(packed) > self.max_bytes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(packed)
            self._evict()
        except OSError as error:
            self._warn(error)

    @contextlib.contextmanager
    def making(self, key: str) -> Iterator[None]:
        """Wait while another process or thread makes what is to be put under `key`: inside, look once more.

        For at most ten minutes, and not where the folder takes no locks. The end of a process ends its locks. There are
        256 of them, so that some keys share one; whoever makes an entry must not ask for another meanwhile.

        Raises:
            ValueError: `key` did not come from `cache_key`.
        """
        name = self._path(key).name[:2]
        with contextlib.ExitStack() as stack:
            # A timeout is one of these too.
            with contextlib.suppress(OSError, NotImplementedError):
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(self.folder / f".{name}{_LOCK_SUFFIX}", timeout=_MOST_SECONDS))
            yield

    def clear(self) -> int:
        """Remove every entry, what killed writers left, and locks that nobody holds; the number of entries removed."""
        removed = sum(_remove(self._path(entry.key)) for entry in self.entries())
        self._remove_abandoned(age=0.0)
        for path, _ in self._files(_LOCK_SUFFIX):
            # Whoever waits for one just now makes what another process may be making too.
            with contextlib.suppress(OSError, NotImplementedError), FileLock(path, timeout=0):
                _remove(path)
        return removed

    def size(self) -> int:
        """The bytes on disk of all entries."""
        return sum(entry.bytes for entry in self.entries())

    def entries(self) -> list[CacheEntry]:
        """All entries, the least recently used first."""
        found = []
        for path, stat in self._files(_SUFFIX):
            key = path.name.removesuffix(_SUFFIX)
            if _KEY_PATTERN.fullmatch(key):
                found.append((stat.st_mtime_ns, CacheEntry(key, stat.st_size, stat.st_mtime)))
        return [entry for _, entry in sorted(found, key=lambda pair: (pair[0], pair[1].key))]

    def _path(self, key: str) -> Path:
        # Keys become file names: nothing but what cache_key gives may get this far.
        if not _KEY_PATTERN.fullmatch(key):
            raise ValueError(f"cache key {key!r} is not 64 hex digits; make keys with cache_key")
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """The files of the folder that end in `suffix`, without those that vanish while they are listed."""
        try:
            paths = [path for path in self.folder.iterdir() if path.name.endswith(suffix)]
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn(error)
            return
        for path in paths:
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            yield path, stat

    def _evict(self) -> None:
        self._remove_abandoned(age=_ABANDONED_SECONDS)
        entries = self.entries()
        excess = sum(entry.bytes for entry in entries) - self.max_bytes
        for entry in entries:
            if excess <= 0:
                return
            _remove(self._path(entry.key))
            excess -= entry.bytes

    def _remove_abandoned(self, age: float) -> None:
        now = time.time()
        for path, stat in self._files(TEMPORARY_SUFFIX):
            if now - stat.st_mtime >= age:
                _remove(path)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the compilation cache in {self.folder} cannot be used ({error.strerror}), so nothing is kept there; "
                f"set {CACHE_FOLDER} to a folder that can be written",
                RuntimeWarning,
                stacklevel=3,
            )


def default_folder() -> Path:
    """`$RETROGRAD_CACHE_DIR`, or the user's cache folder of the platform when it is unset or empty."""
    named = os.environ.get(CACHE_FOLDER)
    return Path(named) if named else Path(platformdirs.user_cache_dir("retrograd"))


def cache_key(parts: Mapping[str, str | bytes]) -> str:
    """64 hex digits that are the same for the same named parts, in whatever order, and differ for any others."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        value = parts[name]
        kind, content = (b"s", value.encode()) if isinstance(value, str) else (b"b", value)
        # Lengths go first, so that no two lists of parts run together into the same bytes.
        for field in (name.encode(), kind, content):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
    return digest.hexdigest()


def _unpack(stored: bytes) -> bytes | None:
    start = len(_HEADER) + _DIGEST_BYTES
    data = stored[start:]
    whole = stored[: len(_HEADER)] == _HEADER and stored[len(_HEADER) : start] == hashlib.sha256(data).digest()
    return data if whole else None


def _remove(path: Path) -> bool:
    """Remove a file; whether it was this call that did."""
    try:
        path.unlink()
    except OSError:
        # Gone already, or not ours to remove: an entry that stays is checked again when it is read.
        return False
    return True
