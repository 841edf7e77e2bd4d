# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules for iree-compile about single kernels: which op, and how it is to be computed.

They are written as a library of MLIR's transform dialect, which is applied to each kernel before iree-compile
configures it. What no rule matches is configured as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WARP = 32
"""Threads that a CUDA device runs in step."""


@dataclass(frozen=True)
class Rule:
    """The names of a sequence that matches an op and of one that acts on it, and the text of both."""

    matcher: str
    action: str
    text: str


def write_library(rules: Sequence[Rule]) -> str:
    """The library with these rules, of which the first that matches an op acts on it."""
    texts = "\n".join(rule.text for rule in rules)
    pairs = ",\n      ".join(f"@{rule.matcher} -> @{rule.action}" for rule in rules)
    return _LIBRARY.format(texts=texts, pairs=pairs)


def write_sizes(sizes: Sequence[int]) -> str:
    """Compares how often the loops of ``%structured`` run with these numbers, outermost first."""
    return "\n".join(
        f"""      %size{axis} = transform.match.structured.dim %structured[{axis}] : (!transform.any_op) -> !transform.param<i64>
{write_comparison(f"%size{axis}", size)}"""  # noqa: E501
        for axis, size in enumerate(sizes)
    )


def write_rank(rank: int) -> str:
    """Compares the number of loops of ``%structured``."""
    return f"""\
      %rank = transform.match.structured.rank %structured : (!transform.any_op) -> !transform.param<i64>
{write_comparison("%rank", rank)}"""


def write_action(name: str, config: str, translation: str) -> str:
    """A sequence that has an op ``%op`` compiled by ``config``, fields of ``#iree_gpu.lowering_config``, and its kernel
    by ``translation``, fields of ``#iree_codegen.translation_info``."""
    return _ACTION.format(name=name, info=write_info(config, translation))


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

_ACTION = """  transform.named_sequence @{name}(%op: !transform.any_op {{transform.readonly}}) {{
    %info = transform.param.constant {info} -> !transform.any_param
    transform.annotate %op "compilation_info" = %info : !transform.any_op, !transform.any_param
    transform.yield
  }}"""
