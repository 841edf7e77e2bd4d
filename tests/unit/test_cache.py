# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The compilation cache: whatever happens to its folder, an entry is whole or a miss."""

import errno
import hashlib
import multiprocessing
import os
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from retrograd.contract.environment import CACHE_FOLDER
from retrograd.runtime.cache import Cache, cache_key, default_folder

HEADER_BYTES = 50
WAIT_SECONDS = 60


def key(name: object) -> str:
    return cache_key({"name": str(name)})


def use_at(cache: Cache, name: object, seconds: float) -> None:
    os.utime(cache.folder / f"{key(name)}.entry", (seconds, seconds))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "deep" / "cache")


def test_what_is_put_is_got(cache: Cache) -> None:
    assert cache.get(key("a")) is None
    cache.put(key("a"), b"one")
    cache.put(key("b"), b"")
    assert cache.get(key("a")) == b"one"
    assert cache.get(key("b")) == b""
    cache.put(key("a"), b"two")
    assert Cache(cache.folder).get(key("a")) == b"two"


def test_size_entries_and_clear(cache: Cache) -> None:
    assert (cache.size(), cache.entries(), cache.clear()) == (0, [], 0)
    for name in ("a", "b"):
        cache.put(key(name), bytes(100))
    use_at(cache, "a", 2000.0)
    use_at(cache, "b", 1000.0)
    assert [(entry.key, entry.last_used) for entry in cache.entries()] == [(key("b"), 1000.0), (key("a"), 2000.0)]
    assert cache.size() == 2 * (HEADER_BYTES + 100)
    assert cache.clear() == 2
    assert cache.get(key("a")) is None
    assert list(cache.folder.iterdir()) == []


def test_clear_leaves_the_files_of_others(cache: Cache) -> None:
    cache.put(key("a"), b"data")
    (cache.folder / "notes.txt").write_text("mine")
    (cache.folder / "notes.entry").write_text("mine too")
    assert cache.clear() == 1
    assert sorted(path.name for path in cache.folder.iterdir()) == ["notes.entry", "notes.txt"]


@pytest.mark.parametrize("position", [0, 20, 49, 50, 149])
def test_an_altered_entry_is_a_miss_and_removed(cache: Cache, position: int) -> None:
    cache.put(key("a"), bytes(100))
    path = cache.folder / f"{key('a')}.entry"
    stored = bytearray(path.read_bytes())
    stored[position] ^= 1
    path.write_bytes(stored)
    assert cache.get(key("a")) is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 10, 49, 50, 149])
def test_a_cut_entry_is_a_miss_and_removed(cache: Cache, length: int) -> None:
    cache.put(key("a"), bytes(range(100)))
    path = cache.folder / f"{key('a')}.entry"
    path.write_bytes(path.read_bytes()[:length])
    assert cache.get(key("a")) is None
    assert not path.exists()


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=3 * (HEADER_BYTES + 100))
    for age, name in enumerate("abc"):
        cache.put(key(name), bytes(100))
        use_at(cache, name, 1000.0 + age)
    # Reading is a use: `b` is now the oldest.
    assert cache.get(key("a")) == bytes(100)
    cache.put(key("d"), bytes(100))
    assert {entry.key for entry in cache.entries()} == {key("a"), key("c"), key("d")}
    assert cache.size() <= cache.max_bytes


def test_one_large_entry_displaces_many(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    for age, name in enumerate("abcdef"):
        cache.put(key(name), bytes(100))
        use_at(cache, name, 1000.0 + age)
    cache.put(key("large"), bytes(700))
    assert [entry.key for entry in cache.entries()] == [key("f"), key("large")]


def test_an_entry_larger_than_the_cache_is_not_stored(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    cache.put(key("a"), bytes(100))
    cache.put(key("large"), bytes(1000))
    assert cache.get(key("large")) is None
    assert cache.get(key("a")) == bytes(100)


def test_what_killed_writers_left_is_removed_in_time(cache: Cache) -> None:
    cache.put(key("a"), b"data")
    old, new = cache.folder / ".x.1.tmp", cache.folder / ".x.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 86400,) * 2)
    cache.put(key("b"), b"data")
    assert (old.exists(), new.exists()) == (False, True)
    assert cache.clear() == 2
    assert not new.exists()


@pytest.mark.parametrize("bad", ["", "../escape", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_keys_are_digests(cache: Cache, bad: str) -> None:
    with pytest.raises(ValueError, match="make keys with cache_key"):
        cache.get(bad)
    with pytest.raises(ValueError, match="make keys with cache_key"):
        cache.put(bad, b"")
    with pytest.raises(ValueError, match="make keys with cache_key"), cache.making(bad):
        pass


def test_a_folder_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match=f"cannot be used .*set {CACHE_FOLDER}") as caught:
        cache.put(key("a"), b"data")
        cache.put(key("b"), b"data")
        assert cache.get(key("a")) is None
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (cache.size(), cache.entries(), cache.clear()) == (0, [], 0)


def test_a_folder_that_others_fill_is_read_in_silence(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(key("a"), b"data")

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(key("a")) == b"data"


def test_what_another_makes_is_waited_for(cache: Cache) -> None:
    begun, looked = threading.Event(), threading.Event()

    def make() -> None:
        with cache.making(key("a")):
            begun.set()
            assert looked.wait(WAIT_SECONDS)
            # Time for the other to ask for it: what does not wait finds nothing.
            time.sleep(0.2)
            cache.put(key("a"), b"data")

    maker = threading.Thread(target=make)
    maker.start()
    assert begun.wait(WAIT_SECONDS)
    assert cache.get(key("a")) is None
    looked.set()
    with Cache(cache.folder).making(key("a")):
        assert cache.get(key("a")) == b"data"
    maker.join()
    assert [entry.key for entry in cache.entries()] == [key("a")]


def test_nobody_waits_for_ever(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.runtime.cache._MOST_SECONDS", 0.05)
    with cache.making(key("a")), Cache(cache.folder).making(key("a")):
        cache.put(key("a"), b"data")
    assert cache.get(key("a")) == b"data"


def test_a_killed_maker_is_not_waited_for(cache: Cache) -> None:
    def make(queue: Any) -> None:
        with cache.making(key("a")):
            queue.put(None)
            time.sleep(WAIT_SECONDS)

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    maker = context.Process(target=make, args=(queue,))
    maker.start()
    queue.get(timeout=WAIT_SECONDS)
    maker.kill()
    with cache.making(key("a")), pytest.raises(Timeout):
        # It is held now, and not only no more waited for.
        FileLock(cache.folder / f".{key('a')[:2]}.lock", timeout=0).acquire()
    maker.join()


def test_clearing_leaves_the_locks_that_are_held(cache: Cache) -> None:
    for name in "abc":
        with cache.making(key(name)):
            cache.put(key(name), b"data")
    with cache.making(key("b")):
        assert cache.clear() == 3
        assert [path.name for path in cache.folder.iterdir()] == [f".{key('b')[:2]}.lock"]
    cache.clear()
    assert list(cache.folder.iterdir()) == []


def test_a_folder_without_locks_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = Cache(tmp_path / "file" / "cache")
    with cache.making(key("a")), cache.making(key("a")):
        pass


def test_a_full_disk_leaves_no_half_entry(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    # Such a disk is found when the file is written out: its end then does not get there.
    def full(self: Path, target: Path) -> Path:
        with self.open("r+b") as file:
            file.truncate(10)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.put(key("a"), bytes(100))
    assert list(cache.folder.iterdir()) == []


def test_an_entry_evicted_while_it_is_read_is_whole_or_a_miss(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(key("a"), b"data")
    path = cache.folder / f"{key('a')}.entry"
    read = Path.read_bytes

    def read_then_evict(self: Path) -> bytes:
        data = read(self)
        path.unlink()
        return data

    monkeypatch.setattr(Path, "read_bytes", read_then_evict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(key("a")) == b"data"
    monkeypatch.undo()
    assert cache.get(key("a")) is None


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "named"))
    assert Cache().folder == tmp_path / "named"
    assert Cache(tmp_path / "given").folder == tmp_path / "given"
    monkeypatch.setenv(CACHE_FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "retrograd"


def test_cache_keys_tell_parts_apart() -> None:
    assert cache_key({"a": "1", "b": "2"}) == cache_key({"b": "2", "a": "1"})
    different: list[dict[str, str | bytes]] = [
        {},
        {"a": ""},
        {"a": "1"},
        {"a": b"1"},
        {"b": "1"},
        {"a": "1", "b": ""},
        {"a": "1b", "c": ""},
        {"a": "", "b": "1"},
        {"ab": "1"},
    ]
    assert len({cache_key(parts) for parts in different}) == len(different)
    assert len(cache_key({})) == hashlib.sha256().digest_size * 2


def value_of(name: int) -> bytes:
    return random.Random(name).randbytes(500 + 100 * name)


def hammer(folder: Path, seed: int, queue: Any) -> None:
    """Read and write at random in a cache that has no room for all; report what was wrong and how often it hit."""
    cache, chance, wrong, hits = Cache(folder, max_bytes=6000), random.Random(seed), 0, 0
    warnings.simplefilter("error")
    for _ in range(1500):
        name = chance.randrange(10)
        if chance.random() < 0.5:
            cache.put(key(name), value_of(name))
        else:
            data = cache.get(key(name))
            hits += data is not None
            wrong += data is not None and data != value_of(name)
    queue.put((wrong, hits))


def test_two_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=hammer, args=(tmp_path, seed, queue)) for seed in range(2)]
    for worker in workers:
        worker.start()
    try:
        reports = [queue.get(timeout=WAIT_SECONDS) for _ in workers]
        for worker in workers:
            worker.join(WAIT_SECONDS)
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    assert [wrong for wrong, _ in reports] == [0, 0]
    assert all(hits > 0 for _, hits in reports)
    assert Cache(tmp_path, max_bytes=6000).size() <= 6000
    assert all(path.suffix == ".entry" for path in tmp_path.iterdir())
