# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Files that are there as a whole, or as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograd.contract.whole_files import replacing


@pytest.mark.parametrize("synced", [False, True])
def test_a_file_takes_the_place_of_another_when_it_is_whole(synced: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path, synced=synced) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()])
def test_what_fails_leaves_no_trace(failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(type(failure)), replacing(path) as file:
        file.write(b"ne")
        raise failure
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
