# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Text of pipelines: what parses, to what, and where errors point."""

import pytest

from retrograd.pipelines.infra.pipeline_string import (
    PipelineElement,
    PipelineSyntaxError,
    parse_pipeline,
    split_options,
)


def parse_passes(text: str) -> tuple[PipelineElement, ...]:
    root = parse_pipeline(f"builtin.module({text})")
    assert root.name == "builtin.module"
    assert root.children is not None
    return root.children


def test_passes_options_and_nesting() -> None:
    a, nested, pipeline = parse_passes("a{opt=x opt2=y}, func.func(cse, canonicalize{n=2}) ,p{extra-library=}")
    assert (a.name, a.options, a.children) == ("a", "opt=x opt2=y", None)
    assert nested.name == "func.func"
    assert [(child.name, child.options) for child in nested.children or ()] == [("cse", None), ("canonicalize", "n=2")]
    assert (pipeline.name, pipeline.options) == ("p", "extra-library=")


def test_text_of_an_element_is_what_mlir_takes() -> None:
    text = 'func.func(cse,canonicalize{n=2 s="a,)b"}),pipeline{extra-library=},any(cse)'
    assert ",".join(map(str, parse_passes(text))) == text


def test_columns_are_those_of_the_text() -> None:
    first, second = parse_passes("first, any(second)")
    assert first.column == len("builtin.module(")
    assert (second.children or ())[0].column == len("builtin.module(first, any(")


def test_a_module_without_passes() -> None:
    assert parse_pipeline(" builtin.module( ) ").children == ()


def test_brackets_and_quotation_marks_in_options_hide_what_they_hold() -> None:
    (element,) = parse_passes("a{x={y=1, z=)} s='}' t=\"{\"}")
    assert element.options == "x={y=1, z=)} s='}' t=\"{\""


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 0, "expected the name of a pass, found the end"),
        ("cse", 0, "expected one anchor around all passes"),
        ("func.func(cse)", 0, "expected one anchor around all passes"),
        ("builtin.module", 0, "expected one anchor around all passes"),
        ("builtin.module{a=1}(cse)", 0, "expected one anchor around all passes"),
        ("builtin.module(cse),builtin.module(cse)", 0, "expected one anchor around all passes"),
        ("builtin.module(cse", 14, "this '(' is never closed"),
        ("builtin.module(func.func(cse)", 14, "this '(' is never closed"),
        ("builtin.module(cse,)", 19, "expected the name of a pass, found ')'"),
        ("builtin.module(cse;cse)", 18, "expected ',' or ')', found ';'"),
        ("builtin.module(cse))", 19, "expected the end of the pipeline, found ')'"),
        ("builtin.module(a{b=1)", 16, "expected } before the end"),
        ('builtin.module(a{b="1})', 16, 'expected " before the end'),
        ("builtin.module(-a)", 15, "expected the name of a pass, found '-'"),
    ],
)
def test_errors_point_at_the_place(text: str, column: int, message: str) -> None:
    with pytest.raises(PipelineSyntaxError) as caught:
        parse_pipeline(text)
    assert caught.value.column == column
    assert message in caught.value.message
    head, shown, caret = str(caught.value).splitlines()
    assert head.startswith(f"<pipeline>:1:{column + 1}: error: ")
    assert shown == f"  {text}"
    assert caret == " " * (column + 2) + "^"


def test_the_caret_stays_in_place_where_the_text_has_line_breaks() -> None:
    with pytest.raises(PipelineSyntaxError) as caught:
        parse_pipeline("builtin.module(\n  cse,\n  ?)")
    _, shown, caret = str(caught.value).split("\n")
    assert shown[caret.index("^")] == "?"


def test_split_options() -> None:
    assert split_options("") == {}
    assert split_options(" a=1   b-c=x,y flag d= ") == {"a": "1", "b-c": "x,y", "flag": "true", "d": ""}
    assert split_options("a='x y' b=\"z\" c={p=1 q=2} d=(1 2)") == {"a": "x y", "b": "z", "c": "p=1 q=2", "d": "(1 2)"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("a=1 a=2", "'a' is given twice"), ("=1", "without a name"), ("a={1", "expected } before the end")],
)
def test_split_options_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_options(text)
