# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the functions of a module are divided among processes, and where each leaves what it makes."""

from pathlib import Path

import pytest

from retrograd.pipelines.toolchain.module_parts import (
    count_lines,
    count_processors,
    divide_functions,
    part_path,
    part_paths,
    read_parts,
    write_parts,
)


def module(**lines: int) -> str:
    """A module of functions with so many lines each."""
    functions = "".join(function(name, count) for name, count in lines.items())
    return f"#map = affine_map<(d0) -> (d0)>\nmodule {{\n{functions}}}\n"


def function(name: str, lines: int, visibility: str = "") -> str:
    return f"  func.func {visibility}@{name}() {{\n" + "    op\n" * (lines - 2) + "  }\n"


def test_lines_are_those_of_public_functions() -> None:
    text = f"module {{\n{function('forward_0', 5)}{function('helper', 4, 'private ')}{function('backward', 7)}}}\n"
    assert count_lines(text) == {"forward_0": 5, "backward": 8}


def test_a_module_of_islands_alone_has_none() -> None:
    assert count_lines("module {\n}\n") == {} and divide_functions("module {\n}\n", 2) == ()


def test_the_longest_go_first_to_the_shortest_part() -> None:
    assert divide_functions(module(a=1000, b=3000, c=1900, d=2000), 2) == (("b", "a"), ("d", "c"))


@pytest.mark.parametrize(
    ("lines", "processors", "count"),
    [
        ({"a": 9000, "b": 9000, "c": 9000}, 1, 0),
        ({"a": 9000}, 2, 0),
        ({"a": 1200, "b": 1200}, 2, 0),
        ({"a": 2000, "b": 2000, "c": 800}, 16, 3),
        (dict.fromkeys("abcdef", 4000), 16, 4),
    ],
)
def test_there_are_parts_where_they_are_worth_it(lines: dict[str, int], processors: int, count: int) -> None:
    parts = divide_functions(module(**lines), processors)
    assert len(parts) == count
    assert not parts or sorted(name for part in parts for name in part) == sorted(lines)


def test_one_thread_has_one_processor() -> None:
    assert count_processors({"OMP_NUM_THREADS": "1"}) == 1
    assert count_processors({}) >= 1


def test_each_part_has_files_of_its_own(tmp_path: Path) -> None:
    first = tmp_path / "0_iree-stream.mlir"
    expected = [first, tmp_path / "0_iree-stream.1.mlir", tmp_path / "0_iree-stream.2.mlir"]
    assert [part_path(first, number) for number in range(3)] == expected
    for path in [*expected, tmp_path / "0_iree-stream-other.mlir", tmp_path / "module.1.vmfb"]:
        path.touch()
    assert part_paths(first) == expected
    assert part_paths(tmp_path / "1_iree-stream.mlir") == [tmp_path / "1_iree-stream.mlir"]


def test_parts_are_read_as_they_are_written() -> None:
    parts = (("forward_0", "backward_1"), ("forward_1",))
    assert read_parts(write_parts(parts)) == parts
