# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What makes executables of another state of the passes others in the cache."""

from pathlib import Path

import pytest

from retrograd import store
from retrograd.pipelines.toolchain.fingerprint import hash_sources, source_fingerprint
from retrograd.store import Store


def test_each_change_of_a_pass_is_seen(tmp_path: Path) -> None:
    passes = tmp_path / "pipelines" / "transforms"
    passes.mkdir(parents=True)
    (passes / "a.py").write_text("x = 1")
    seen = [hash_sources(tmp_path)]
    (passes / "a.py").write_text("x = 2")
    seen.append(hash_sources(tmp_path))
    (passes / "a.py").rename(passes / "b.py")
    seen.append(hash_sources(tmp_path))
    (tmp_path / "dialects").mkdir()
    (tmp_path / "dialects" / "a.py").write_text("x = 2")
    seen.append(hash_sources(tmp_path))
    (tmp_path / "retrograd" / "contract").mkdir(parents=True)
    (tmp_path / "retrograd" / "contract" / "a.py").write_text("x = 2")
    seen.append(hash_sources(tmp_path))
    assert len(set(seen)) == 5
    (tmp_path / "retrograd" / "api.py").write_text("no pass")
    (passes / "notes.txt").write_text("no code")
    (tmp_path / "other.py").write_text("no pass")
    assert hash_sources(tmp_path) == seen[-1]


def test_what_other_passes_made_is_not_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path))
    assert len(source_fingerprint()) == 64
    Store().put({"module": "m"}, b"executable")
    assert Store().get({"module": "m"}) == b"executable"
    monkeypatch.setattr(store, "source_fingerprint", lambda: "others")
    assert Store().get({"module": "m"}) is None
