# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-linalg-to-kernels``: what IREE's code generator is slow at is dispatched to kernels of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.kernels.attention import Attention
from retrograd.pipelines.kernels.columns import Columns
from retrograd.pipelines.kernels.convolutions import Convolutions
from retrograd.pipelines.kernels.dispatch import NO_PTX, add_executables
from retrograd.pipelines.kernels.family import CHOICES, Family, Plan, Refusal
from retrograd.pipelines.kernels.kernel import KernelError
from retrograd.pipelines.kernels.norms import REPLACED, Norms
from retrograd.pipelines.kernels.products import Products
from retrograd.pipelines.kernels.ptx import compile_kernels
from retrograd.pipelines.kernels.questions import QUESTIONS, Chosen, TilesError, read_chosen
from retrograd.pipelines.kernels.rows import Rows
from retrograd.pipelines.kernels.scatters import Scatters
from retrograd.pipelines.kernels.tiles import ARCHITECTURES
from retrograd.pipelines.kernels.transposes import Transposes
from retrograd.pipelines.transforms.helpers.fills import FILL
from retrograd.pipelines.transforms.helpers.generics import GENERIC

FAMILIES: Mapping[str, Callable[[str, Chosen], Family]] = {
    "attention": Attention,
    "columns": Columns,
    "convolutions": Convolutions,
    "norms": Norms,
    "products": Products,
    "rows": Rows,
    "scatters": Scatters,
    "transposes": Transposes,
}
"""Families by name; each is made for an architecture, with the tiles that were chosen."""

ORDER = ("attention", "convolutions", "scatters", "norms", "columns", "rows", "transposes", "products")
"""Families as the pipeline has them, a pass each: a plan names values that another family's kernels would take away."""

EMPTY = "tensor.empty"
_UNREAD = (GENERIC, FILL, EMPTY, "tensor.expand_shape", "tensor.collapse_shape")


class ConvertLinalgToKernels(ModulePass):
    """Puts a dispatch of a kernel of ours, an executable with its PTX in the module, where an op was that a family of
    kernels takes; all other ops stay, and IREE generates their code.

    The PTX is data of the module: neither iree-compile nor what runs its result needs Triton, which compiled it.
    """

    description = "Dispatch kernels of our own where IREE's code generator is slow, for CUDA"

    arch: str = field(default="sm_90", metadata={"help": "the architecture that kernels are compiled for"})
    families: str = field(
        default="attention,columns,convolutions,norms,products,rows,scatters,transposes",
        metadata={"help": "names of families, by commas"},
    )
    ptx: Literal["embed", "none"] = field(
        default="embed", metadata={"help": "none leaves out the PTX: to see what takes which kernel, without Triton"}
    )

    tiles: str = field(
        default="", metadata={"help": "tiles to take in place of those of the table, as QUESTION:TILES;QUESTION:TILES"}
    )
    ask: bool = field(default=False, metadata={"help": "note which tiles there are for each kernel, to be measured"})

    def apply(self, module: ir.Operation) -> None:
        chosen = self._read_tiles()
        for name in self._find_families():
            self._convert(module, name, chosen)

    def _convert(self, module: ir.Operation, family: str, chosen: Chosen) -> None:
        """Puts the kernels of one family in."""
        plans: list[Plan] = []
        choices: list[str] = []
        asked: list[str] = []
        for func in functions(module):
            kind = FAMILIES[family](self.arch, chosen)
            for view in list(only_block(func, self.name).operations):
                found = self._plan(kind, view.operation)
                if found is not None:
                    choices.append(str(found))
                if found is not None and not isinstance(found, Refusal):
                    plans.append(found)
                    asked += [question.to_json() for question in found.questions()] if self.ask else []
        kernels = {kernel: updates for plan in plans for kernel, updates in plan.kernels().items()}
        compiled = dict.fromkeys(kernels, NO_PTX)
        if self.ptx == "embed":
            try:
                compiled = compile_kernels(kernels, self.arch)
            except KernelError as error:
                raise PassFailure(None, f"{self.name}: {error}", "or leave out the pass") from error
        for plan in plans:
            plan.apply(compiled)
        for func in functions(module):
            _erase_unread(only_block(func, self.name))
        add_executables(module, {kernel: (compiled[kernel], kernels[kernel]) for kernel in kernels}, self.arch)
        _note(module, CHOICES, choices)
        _note(module, QUESTIONS, asked)

    def _plan(self, kind: Family, op: ir.Operation) -> Plan | Refusal | None:
        try:
            return kind.plan(op)
        except TilesError as error:
            raise PassFailure(op, f"{self.name}: {error}", "measure anew, or leave out the option tiles") from error

    def _read_tiles(self) -> Chosen:
        try:
            return read_chosen(self.tiles)
        except ValueError as error:
            raise PassFailure(None, f"{self.name}: option tiles: {error}", "or leave it out") from error

    def _find_families(self) -> list[str]:
        names = self.families.split(",")
        unknown = [name for name in names if name not in FAMILIES]
        if unknown:
            raise PassFailure(
                None, f"{self.name}: no family of kernels '{unknown[0]}'", f"there are {', '.join(FAMILIES)}"
            )
        if self.arch not in ARCHITECTURES:
            raise PassFailure(
                None, f"{self.name}: no kernels for '{self.arch}'", f"there are some for {', '.join(ARCHITECTURES)}"
            )
        return sorted(names, key=ORDER.index)


def _erase_unread(block: ir.Block) -> None:
    """Erase what a kernel computes besides, and nobody reads now."""
    for view in reversed(list(block.operations)):
        op = view.operation
        is_left = op.name in _UNREAD or REPLACED in op.attributes
        if is_left and not any(list(result.uses) for result in op.results):
            op.erase()


def _note(module: ir.Operation, name: str, lines: list[str]) -> None:
    """Add lines to an attribute of a module that says something of its kernels."""
    before = [ir.StringAttr(line).value for line in module.attributes[name]] if name in module.attributes else []
    if before or lines:
        module.attributes[name] = ir.ArrayAttr.get([ir.StringAttr.get(line) for line in [*before, *lines]])
