# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passes as a page of Markdown: what runs, in what order, where and why, and the options of each pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from retrograd.pipelines.infra.registry import load_pass, registered_passes
from retrograd.pipelines.stages.stage_steps import (
    BACKWARD_STAGES,
    ISLANDS,
    LEFT_OUT,
    LIFETIMES,
    MARKS,
    STAGES,
    StageStep,
)
from retrograd.pipelines.toolchain.lowering_steps import LOWERING, Step

_HEAD = """\
# Passes

Printed by `retrograd-opt --list-passes --markdown` from the lists that the compiler itself runs; a unit test compares.
`docs/architecture.md` says what the stages are; the docstring of a pass, in `pipelines/transforms/` and
`pipelines/conversions/`, has its details.
"""
_STAGES = """
## The stages of a joint graph

Of `compile_backward` and `torch.compile` (`pipelines/stages/stage_steps.py`); a forward alone is not partitioned.

"""
_BACKWARD_STAGES = """
## The stages of a backward that was captured as it ran

Of `retrograd.enable()`.

"""
_LOWERING = """
## From staged functions to linalg

In this order (`pipelines/toolchain/lowering_steps.py`). "all" are all targets. Passes that are not among those listed
below are torch-mlir's.
"""
_PASSES = """
## All passes, and their options

"""


def describe_passes() -> str:
    """The page ``docs/passes.md``."""
    rows = [(f"`{step.name}`{_describe_options(step)}", step.where.text, step.why) for step in LOWERING]
    others = {
        "scheduled, where ops run in torch": ISLANDS,
        "scheduled, with free_early": LIFETIMES,
        "scheduled, of a loss without some outputs: first": LEFT_OUT,
    }
    stages = {"imported, with a save_policy: first": MARKS, **STAGES, **others}
    parts = [_HEAD, _STAGES, _table_stages(stages), _BACKWARD_STAGES, _table_stages(BACKWARD_STAGES)]
    parts += [_LOWERING, "\n", _table(("pass", "where", "why"), rows), _PASSES, *_list_passes()]
    return "".join(parts)


def _table_stages(stages: Mapping[str, Iterable[StageStep]]) -> str:
    rows = [(stage, f"`{step.name}`", step.why) for stage, steps in stages.items() for step in steps]
    return _table(("to reach", "pass", "why"), rows)


def _describe_options(step: Step) -> str:
    """The options of a step; of one that is not given everywhere, where it is."""
    texts = (f"`{text}`" + (f" ({where.text})" if where is not step.where else "") for text, where in step.options)
    return "".join(f" {text}" for text in texts)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    # A bar would end the cell.
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def _list_passes() -> Iterator[str]:
    for name in registered_passes():
        pass_ = load_pass(name)
        yield f"- `{name}`: {pass_.description}.\n"
        for option in pass_.options():
            yield f"  - `{option}` (default: `{option.default or 'empty'}`): {option.help}\n"
