# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expressions of sizes: as text in MLIR, as data in a manifest, and as checks on every call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrograd.contract.reading import ManifestError, read_condition, read_size, to_json
from retrograd.contract.sizes import (
    OPERATORS,
    DynamicSize,
    Size,
    find_symbols,
    format_shape,
    format_size,
    holds,
    numbers_of,
    parse_shape,
)
from retrograd.runtime.arguments.size_checks import SizeChecks, SizeError

SYMBOLS = {"batch": 6, "tokens": 7}
# On a busy machine the first example takes a second to draw.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def expressions() -> st.SearchStrategy[Size]:
    leaves = st.one_of(st.integers(1, 9), st.sampled_from(sorted(SYMBOLS)))
    return st.recursive(leaves, lambda sub: st.tuples(st.sampled_from(sorted(OPERATORS)), sub, sub), max_leaves=6)


@UNHURRIED
@given(st.lists(expressions(), max_size=4))
def test_a_shape_survives_being_written(shape: list[Size]) -> None:
    assert parse_shape(format_shape(shape)) == tuple(shape)


@UNHURRIED
@given(expressions())
def test_an_expression_survives_json(size: Size) -> None:
    assert read_size(json.loads(json.dumps(to_json(size))), "size") == size
    assert json.loads(json.dumps(to_json(size))) == to_json(size)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", ()),
        ("batch", ("batch",)),
        ("batch, 4 * tokens", ("batch", ("*", 4, "tokens"))),
        ("(batch + 1) // 2, -1", (("//", ("+", "batch", 1), 2), -1)),
        ("max(1, batch) % 3", (("%", ("max", 1, "batch"), 3),)),
    ],
)
def test_shapes_are_read(text: str, shape: tuple[Size, ...]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["batch.real", "f(batch)", "1.5", "True", "batch +", "[1]", "a if b else c", "'x'"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no s"):
        parse_shape(text)


def test_conditions_have_other_numbers_too() -> None:
    assert read_condition(["<", "scale", 1.5], "condition") == ("<", "scale", 1.5)
    for data in ("batch", 1, ["<", "scale", None], ["near", 1, 2]):
        with pytest.raises(ManifestError, match="must be a condition"):
            read_condition(data, "condition")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("batch", "batch"),
        (("*", ("+", "batch", 1), 4), "(batch + 1) * 4"),
        (("+", ("min", "batch", 4), 1), "min(batch, 4) + 1"),
        (("or", ("==", "batch", 1), ("not", ("<", "tokens", 2))), "(batch == 1) or not(tokens < 2)"),
    ],
)
def test_expressions_as_text(expression: Any, text: str) -> None:
    assert format_size(expression) == text


def test_only_numbers_are_numbers() -> None:
    assert numbers_of((2, 3)) == (2, 3)
    with pytest.raises(ValueError, match=r"\(2, 4 \* batch\) differs from call to call"):
        numbers_of((2, ("*", 4, "batch")))


def test_symbols_are_found() -> None:
    assert find_symbols(parse_shape("4, batch * (tokens + 1)")) == {"batch", "tokens"}


@pytest.mark.parametrize("problem", [True, 1.5, None, [], ["^", 1, 2], ["*"], ["*", 1, {}]])
def test_what_is_no_expression_in_a_file_is_told(problem: Any) -> None:
    with pytest.raises(ManifestError, match=r"shape\[0\] must be a size: "):
        read_size(problem, "shape[0]")


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (("!=", "batch", 1), True),
        (("==", ("%", "batch", 4), 0), False),
        (("or", ("<", "batch", 3), ("not", ("<=", "tokens", 6))), True),
        (("and", ("<", "batch", 3), ("<", "tokens", 8)), False),
    ],
)
def test_conditions(condition: Any, expected: bool) -> None:
    assert holds(condition, SYMBOLS) is expected
    assert read_condition(json.loads(json.dumps(condition)), "condition") == condition


def checks() -> SizeChecks:
    sizes = (DynamicSize("batch", 6, 1, 64, 0, 0), DynamicSize("tokens", 7, 2, None, 0, 1))
    shapes = (("batch", "tokens"), (("*", "batch", "tokens"), 3))
    return SizeChecks(sizes, (("==", ("%", "tokens", 2), 0),), ("args[0]", "args[1]"), shapes)


def test_sizes_are_read_off_the_arguments() -> None:
    assert checks().read([(5, 4), (20, 3)]) == {"batch": 5, "tokens": 4}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(65, 4), (260, 3)], r"args\[0\].shape\[0\] is 65; 'batch' is 1 to 64; pass such a size, or compile again"),
        ([(5, 1), (5, 3)], r"args\[0\].shape\[1\] is 1; 'tokens' is 2 or more"),
        (
            [(5, 4), (21, 3)],
            r"args\[1\].shape\[0\] is 21; expected 20 = batch \* tokens, where 'batch' is args\[0\].shape\[0\] and "
            r"'tokens' is args\[0\].shape\[1\]; pass tensors that agree",
        ),
        ([(5, 4), (20, 2)], r"args\[1\].shape\[1\] is 2; expected 3, the size compiled for"),
        ([(5, 3), (15, 3)], r"args\[0\].shape\[1\] \('tokens'\) is 3; the program was traced for \(tokens % 2\) == 0"),
    ],
)
def test_other_sizes_are_refused_by_name(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(SizeError, match=message):
        checks().read(shapes)
