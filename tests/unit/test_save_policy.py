# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules on what to save: what they match, how they read as text, and what is no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retrograd.contract.formats import FORMATS, narrowed_bytes
from retrograd.pipelines.stages.save_policy import (
    SavePolicy,
    SaveRule,
    must_recompute,
    must_save,
    offload,
    prefer_recompute,
    prefer_save,
    saved_dtype,
)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SaveRule("must-save"), True),
        (SaveRule("must-save", op="sum"), True),
        (SaveRule("must-save", op="aten.sum"), True),
        (SaveRule("must-save", op="aten.sum.dim_*"), True),
        (SaveRule("must-save", op="su?"), True),
        (SaveRule("must-save", op="mm"), False),
        (SaveRule("must-save", name="total"), True),
        (SaveRule("must-save", name="sum_?"), True),
        (SaveRule("must-save", name="total*", op="mm"), False),
        (SaveRule("must-save", dtype="float32"), True),
        (SaveRule("must-save", dtype="f32", min_bytes=64), True),
        (SaveRule("must-save", dtype="bf16"), False),
        (SaveRule("must-save", min_bytes=65), False),
    ],
)
def test_matching(rule: SaveRule, expected: bool) -> None:
    assert rule.matches("torch.aten.sum.dim_IntList", ("total", "sum_1"), ("f32", "float32"), 64) == expected


def test_text_and_back() -> None:
    policy = (
        must_save(op="mm")
        | must_recompute(name="h*", min_bytes=1)
        | prefer_save(dtype="f32")
        | prefer_recompute()
        | saved_dtype("int8-block", op="aten.exp")
        | offload(name="h*")
    )
    assert str(policy) == (
        "must-save op=mm; must-recompute name=h* min-bytes=1; prefer-save dtype=f32; prefer-recompute; "
        "int8-block op=aten.exp min-bytes=1024; offload name=h* min-bytes=1048576"
    )
    assert SavePolicy.parse(str(policy)) == policy
    assert SavePolicy.parse("") == SavePolicy()
    assert policy.offloads
    assert not policy.may_offload
    maybe = offload(op="mm", within_budget=True)
    assert (str(maybe), maybe.offloads, maybe.may_offload) == ("may-offload op=mm min-bytes=1048576", True, True)
    assert not must_save(op="mm").offloads
    assert hash(policy) == hash(SavePolicy.parse(str(policy)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep op=mm", "'keep' is none of must-save, prefer-save, prefer-recompute, must-recompute, bf16"),
        ("must-save opp=mm", "'opp=mm' is not one of op=..., name=..., dtype=..., min-bytes=..."),
        ("must-save mm", "'mm' is not one of"),
        ("must-save op=", "'' is no pattern"),
        ("bf16 min-bytes=-1", "min-bytes is '-1', expected a number of bytes"),
        ("bf16 min-bytes=1KiB", "min-bytes is '1KiB', expected a number of bytes"),
    ],
)
def test_what_is_no_rule(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        SavePolicy.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: saved_dtype("int4"), "saved_dtype: 'int4' is none of bf16, float8_e4m3, int8-block"),
        (lambda: must_save(name="a; b"), "'a; b' is no pattern"),
        (lambda: must_save(op=3), "3 is no pattern"),  # type: ignore[arg-type]
        (lambda: must_save(min_bytes=True), "min_bytes is True"),
        (lambda: must_save(min_bytes=-1), "min_bytes is -1"),
    ],
)
def test_bad_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("format", "shape", "element", "expected"),
    [
        ("bf16", (3, 5), "f32", 30),
        ("bf16", (3, 5), "f16", None),
        ("bf16", (), "f32", 2),
        ("float8_e4m3", (3, 5), "f32", 19),
        ("float8_e4m3", (3, 5), "bf16", 19),
        ("float8_e4m3", (1,), "f32", None),
        ("int8-block", (64,), "f32", 68),
        ("int8-block", (65,), "f32", 136),
        ("int8-block", (16,), "f32", None),
        ("int8-block", (64,), "si64", None),
        ("int4", (64,), "f32", None),
    ],
)
def test_sizes(format: str, shape: tuple[int, ...], element: str, expected: int | None) -> None:
    assert narrowed_bytes(format, shape, element) == expected


def test_parts_are_as_many_as_their_names() -> None:
    assert {format: len(kind.parts) for format, kind in FORMATS.items()} == {
        "bf16": 1,
        "float8_e4m3": 2,
        "int8-block": 2,
    }
