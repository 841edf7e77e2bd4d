# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules for iree-compile about single kernels: which op, and how it is to be computed.

They are written as a library of MLIR's transform dialect, which is applied to each kernel before iree-compile
configures it. What no rule matches is configured as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Loop = tuple[Literal["parallel", "reduction"], int]
"""A loop of an op: what it does, and how often (0: any number of times)."""

WARP = 32
"""Threads that a CUDA device runs in step."""


@dataclass(frozen=True)
class Rule:
    """The names of a sequence that matches an op and of one that acts on it, and the text of both."""

    matcher: str
    action: str
    text: str


def write_library(rules: Sequence[Rule]) -> str | None:
    """The library with these rules, of which the first that matches an op acts on it; ``None`` if there are none."""
    if not rules:
        return None
    texts = "\n".join(rule.text for rule in rules)
    pairs = ",\n      ".join(f"@{rule.matcher} -> @{rule.action}" for rule in rules)
    return _LIBRARY.format(texts=texts, pairs=pairs)


def write_matcher(name: str, loops: Sequence[Loop], inputs: int | None = None, *, whole: bool = False) -> str:
    """A sequence that matches a structured op of these loops, outermost first, and of as many inputs, if that is given;
    of one result, whose elements have 32 bits at most. ``whole`` is for ops whose first input has an element for each
    iteration, as a sum has and a product has not."""
    kinds = "\n".join(
        f'      "transform.match.structured.dim"(%structured) <{{raw_dim_list = array<i64: {axis}>, {kind}}}> : '
        "(!transform.any_op) -> ()"
        for axis, (kind, _) in enumerate(loops)
    )
    sizes = write_sizes([size for _, size in loops])
    counts = {"rank": ("rank", len(loops)), "results": ("num_inits", 1)}
    if inputs is not None:
        counts["inputs"] = ("num_inputs", inputs)
    compared = "\n".join(write_count(what, number, label) for label, (what, number) in counts.items())
    return _MATCHER.format(name=name, compared=compared, kinds=kinds, sizes=sizes, whole=_WHOLE * whole)


def write_sizes(sizes: Sequence[int]) -> str:
    """Compares how often the loops of ``%structured`` run with these numbers, outermost first; 0 stands for any."""
    return "\n".join(
        f"""      %size{axis} = transform.match.structured.dim %structured[{axis}] : (!transform.any_op) -> !transform.param<i64>
{write_comparison(f"%size{axis}", size)}"""  # noqa: E501
        for axis, size in enumerate(sizes)
        if size
    )


def write_count(what: str, number: int, label: str) -> str:
    """Compares a count of ``%structured``, its ``rank``, ``num_inits`` or ``num_inputs``, and names it by ``label``."""
    return f"""\
      %{label} = transform.match.structured.{what} %structured : (!transform.any_op) -> !transform.param<i64>
{write_comparison(f"%{label}", number)}"""


def write_action(name: str, config: str, translation: str, more: str = "") -> str:
    """A sequence that has an op ``%op`` compiled by ``config``, fields of ``#iree_gpu.lowering_config``, and its kernel
    by ``translation``, fields of ``#iree_codegen.translation_info``; ``more`` are further statements."""
    return _ACTION.format(name=name, info=write_info(config, translation), more=more)


def write_info(config: str, translation: str) -> str:
    """Write the attribute that has an op compiled so, by fields as for :func:`write_action`."""
    return (
        f"#iree_codegen.compilation_info<lowering_config = #iree_gpu.lowering_config<{{{config}}}>, "
        f"translation_info = #iree_codegen.translation_info<{translation}>>"
    )


def write_comparison(value: str, number: int) -> str:
    """Goes on where the parameter ``value`` is this number."""
    expected = f"%expected_{value.removeprefix('%')}"
    return f"""      {expected} = transform.param.constant {number} : i64 -> !transform.param<i64>
      transform.match.param.cmpi eq {value}, {expected} : !transform.param<i64>"""


_LIBRARY = """module @rules attributes {{transform.with_named_sequence}} {{
{texts}
  transform.named_sequence @__kernel_config(%kernel: !transform.any_op {{transform.consumed}}) -> !transform.any_op {{
    %configured = transform.foreach_match in %kernel
      {pairs}
      : (!transform.any_op) -> !transform.any_op
    transform.yield %configured : !transform.any_op
  }}
}}
"""

# Custom syntax has no place for the attributes `parallel`, `reduction` and `permutation`.
_MATCHER = """  transform.named_sequence @{name}(%op: !transform.any_op {{transform.readonly}}) -> !transform.any_op {{
    %matched = transform.match.structured %op : (!transform.any_op) -> !transform.any_op {{
    ^bb0(%structured: !transform.any_op):
{compared}
{kinds}
{sizes}{whole}
      %init = transform.match.structured.init %structured[0] : (!transform.any_op) -> !transform.any_value
      %bits = transform.match.structured.elemental_bitwidth %init : (!transform.any_value) -> !transform.param<i64>
      %most = transform.param.constant 32 : i64 -> !transform.param<i64>
      transform.match.param.cmpi le %bits, %most : !transform.param<i64>
      transform.match.structured.yield %structured : !transform.any_op
    }}
    transform.yield %matched : !transform.any_op
  }}"""

_WHOLE = """
      "transform.match.structured.input"(%structured) <{raw_position_list = array<i64: 0>, permutation}> : (!transform.any_op) -> ()"""  # noqa: E501

_ACTION = """  transform.named_sequence @{name}(%op: !transform.any_op {{transform.readonly}}) {{
    %info = transform.param.constant {info} -> !transform.any_param
    transform.annotate %op "compilation_info" = %info : !transform.any_op, !transform.any_param
{more}
    transform.yield
  }}"""
