# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passes from staged functions to linalg on tensors: which, in what order, for which targets and why.

``retrograd-opt --list-passes --markdown`` prints them as ``docs/passes.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from retrograd.pipelines.devices.device_targets import DATA_TILING
from retrograd.pipelines.devices.targets import Target, is_amd
from retrograd.pipelines.kernels.questions import write_chosen


@dataclass(frozen=True)
class Where:
    """For which targets a step is: in words, and asked. Code for no target in particular has what is for all."""

    text: str
    holds: Callable[[Target], bool]

    def asks(self, target: Target | None) -> bool:
        """Whether it is for ``target``; without one, whether it is for all."""
        return self is ALL if target is None else self.holds(target)


ALL = Where("all", lambda _: True)
CPU_AMONG = Where("a CPU among the devices", lambda target: "cpu" in target.kinds)
CPU_ALONE = Where("a CPU alone", lambda target: target.kinds == ("cpu",))
CUDA_ALONE = Where("CUDA alone", lambda target: target.kinds == ("cuda",))
CPU_OR_CUDA = Where("a CPU alone, CUDA alone", lambda target: CPU_ALONE.holds(target) or CUDA_ALONE.holds(target))
NOT_CPU_ALONE = Where("any but a CPU alone", lambda target: not CPU_ALONE.holds(target))
NO_CPU = Where("no CPU among the devices", lambda target: not CPU_AMONG.holds(target))
WIDE_VECTORS = Where("a CPU alone, of vectors of 512 bits", lambda target: target.has_avx512)
WIDE_AMD = Where(
    "this machine's CPU alone, of AMD's with vectors of 512 bits, kernels side by side",
    lambda target: target.name == "cpu" and target.has_avx512 and is_amd() and not target.is_in_order,
)
PACKING = Where(
    "a CPU alone, on packed operands",
    lambda target: CPU_ALONE.holds(target) and any(DATA_TILING in flags for flags in target.ladder),
)
LONG_SUMS = Where(
    "a CPU alone, on packed operands, kernels side by side",
    lambda target: PACKING.holds(target) and not target.is_in_order,
)
F64_CPU = Where("a CPU among the devices, with f64", lambda target: CPU_AMONG.holds(target) and target.has_f64)
MATRIX_UNITS = Where("CUDA or HIP among the devices", lambda target: not {"cuda", "hip"}.isdisjoint(target.kinds))
IN_ORDER = Where("kernels one at a time, for a memory budget", lambda target: target.is_in_order)


_TO_LINALG = ",".join(
    (
        "func.func(torch-restructure-non-constant-axes,torch-fuse-quantized-ops,convert-torch-to-tmtensor,canonicalize",
        "convert-torch-to-linalg,canonicalize,convert-torch-to-scf,convert-torch-to-arith,convert-torch-to-tensor)",
        "convert-torch-conversion-to-mlprogram,func.func(memref-expand,canonicalize,resolve-shaped-type-result-dims,cse)",
        "torch-func-backend-type-conversion,func.func(canonicalize,torch-finalizing-backend-type-conversion)",
    )
)


def _with_kernels(family: str) -> Where:
    return Where(f"CUDA with kernels of our own: {family}", lambda target: family in target.kernels)


@dataclass(frozen=True)
class Step:
    """A pass of the lowering, where it is run and why it is there, and stands there.

    ``name`` is a pass as a pipeline has it; ``options`` are what it is given besides, and for which targets: ``{arch}``
    in them is the architecture of the first device, and ``{tiles}`` the target's tiles of kernels of the ``family``.
    ``TWINS_ALONE`` is for what no file is written of, ``ASKING`` for what asks which tiles there are, ``DONATING`` for
    a CPU or CUDA device whose caller gives up what is the backward's, or a plan's, alone.
    """

    name: str
    where: Where
    why: str
    options: tuple[tuple[str, Where], ...] = ()
    family: str = ""

    def text(self, target: Target | None, *, twins_alone: bool, asking: bool = False, donating: bool = False) -> str:
        """The pass with its options, in a pipeline's text."""
        marked = {TWINS_ALONE: twins_alone, ASKING: asking, DONATING: donating and CPU_OR_CUDA.asks(target)}
        chosen = [text for text, where in self.options if (marked[where] if where in marked else where.asks(target))]
        if target is not None:
            tiles = write_chosen({q: tile for q, tile in target.tiles if q.partition(" ")[0] == self.family})
            chosen = [text.format(arch=target.devices[0].architecture, tiles=tiles) for text in chosen]
        return self.name + (f"{{{' '.join(chosen)}}}" if chosen else "")


TWINS_ALONE = Where("all, for what is called from here alone", lambda _: False)
DONATING = Where("a CPU alone, CUDA alone, for what is called from here alone", lambda _: False)
ASKING = Where("CUDA, to ask which tiles kernels could have", lambda _: False)


def _convert_to_kernels(family: str, why: str) -> Step:
    where = _with_kernels(family)
    tiled = Where(
        f"CUDA with tiles of {family} chosen",
        lambda target: any(question.startswith(f"{family} ") for question, _ in target.tiles),
    )
    options = ((f"arch={{arch}} families={family}", where), ('tiles="{tiles}"', tiled), ("ask=true ptx=none", ASKING))
    return Step("convert-linalg-to-kernels", where, why, options, family)


LOWERING: tuple[Step, ...] = (
    # What is in the torch dialect yet.
    Step("bwd-functionalize-rng", ALL, "torch-mlir has no random op that gives the same numbers on every device"),
    Step(
        "convert-recurrence-to-scf",
        ALL,
        "torch-mlir knows no such op; written out, each step would be compiled by itself",
    ),
    Step(
        "convert-torch-pools-to-linalg",
        ALL,
        "torch-mlir knows no such op; traces have it where convolutions take images with channels last",
    ),
    Step(
        "convert-torch-attention-to-bwd",
        ALL,
        "torch-mlir knows no such op; traces have it for targets with kernels of attention alone",
    ),
    Step(
        "convert-torch-convolution-to-bwd",
        ALL,
        "torch-mlir knows no such ops; traces have them for targets with kernels of convolutions alone",
    ),
    Step("convert-torch-complex-to-pairs", ALL, "torch-mlir lowers few complex ops; pairs are ordinary tensors"),
    Step("convert-torch-view-to-tensor", ALL, "views that torch-mlir refuses, or whose open sizes it loses"),
    Step("bwd-keep-itself", ALL, "torch-mlir takes x == x to be true; behind what makes comparisons of parts"),
    Step("func.func(torch-match-quantized-custom-ops)", ALL, "the first of torch-mlir's own pipeline"),
    Step(
        "torchdynamo-export-to-torch-backend-pipeline{extra-library=}",
        ALL,
        "ops that torch-mlir decomposes are decomposed; after ours, which know them whole",
    ),
    Step(
        _TO_LINALG,
        ALL,
        "torch ops become linalg on tensors: torch-backend-to-linalg-on-tensors-backend-pipeline less its last pass, "
        "which refuses bwd.attention; bwd-verify-legality is in its place",
    ),
    # What every device needs, on linalg.
    Step("bwd-verify-legality{level=linalg}", ALL, "no op of torch or bwd is left: later passes look for none"),
    Step(
        "bwd-keep-nans", ALL, "torch-mlir gives a number for the larger of two of which one is none; one op a body here"
    ),
    Step("bwd-expand-powers", ALL, "IREE computes powers by the logarithm, also of what has none"),
    Step("bwd-expand-angles", ALL, "IREE computes atan2 by a quotient, also of zero and zero, and loses signs"),
    Step("bwd-crop-windows", ALL, "IREE takes a single window of a tensor for all of it, and writes as much"),
    Step("bwd-export-complex", ALL, "callers see complex numbers where pairs are computed with"),
    Step(
        "bwd-isolate-loops",
        CPU_ALONE,
        "IREE copies whole what a loop carries, at each step, and has two loops write into one buffer",
    ),
    Step("bwd-isolate-constants", ALL, "IREE makes one of two equal tensors that are both written into"),
    Step("bwd-isolate-arguments", ALL, "IREE updates an argument in place at its last use"),
    Step(
        "bwd-bound-indices",
        ALL,
        "compiled code cannot raise at an index out of range: it gives NaN, not others' memory",
    ),
    Step("bwd-isolate-scatters", ALL, "IREE fuses into a scatter what reads the tensor as it was before"),
    Step(
        "bwd-isolate-gathers",
        ALL,
        "IREE computes in a gather's kernel what other threads have not written yet",
        (("copies-slices=true", NOT_CPU_ALONE),),
    ),
    Step("bwd-isolate-reductions", ALL, "IREE computes the diagonal alone of what reads one reduction at two places"),
    Step(
        "bwd-copy-updated",
        ALL,
        "a writer may run before a reader of the same tensor; after the barriers above, which are readers",
    ),
    Step(
        "bwd-export-results",
        ALL,
        "results are written where torch has its memory; after all that adds ops to a function's end",
        (
            ("twins-alone=true", TWINS_ALONE),
            ("donates=true", DONATING),
            ("keeps-residuals=true", CUDA_ALONE),
            ("writes-joined=true", NOT_CPU_ALONE),
        ),
    ),
    Step("bwd-keep-roundings", ALL, "LLVM drops roundings to bfloat16, which comparisons need; on twins too"),
    # What code for some needs.
    Step("bwd-negate-products", CPU_AMONG, "sums of broadcast products that do not compile otherwise"),
    Step("bwd-uncontract-sums", CPU_AMONG, "IREE sums products lane by lane; behind negations, which ask for sums too"),
    Step("bwd-repeat-elementwise", IN_ORDER, "less memory: tensors are computed again from arguments"),
    Step("bwd-fold-elementwise", CPU_ALONE, "IREE writes what several kernels read, even where they could compute it"),
    Step("bwd-sum-by-rows", MATRIX_UNITS, "what IREE puts parts of such a sum together by does not compile"),
    Step("bwd-split-columns", IN_ORDER, "less memory: one tap of a filter after another"),
    _convert_to_kernels("attention", "no other pass knows it"),
    _convert_to_kernels("convolutions", "no other pass knows them"),
    _convert_to_kernels("scatters", "before bwd-combine-scatters, which serves the scatters that are left"),
    Step("bwd-combine-scatters", NO_CPU, "IREE has one thread of a GPU add up all updates"),
    Step("bwd-order-scatters", CPU_ALONE, "IREE hands updates of one place to two threads"),
    Step(
        "bwd-split-long-products",
        LONG_SUMS,
        "IREE reads packed rows from behind the caches for each tile; before marks, which the pieces get",
    ),
    Step(
        "bwd-mark-products",
        CPU_ALONE,
        "IREE packs operands where that does not pay; before the passes that read the marks",
        (("avoid-tails=true", WIDE_VECTORS), ("pack-turned=true", WIDE_AMD)),
    ),
    Step("bwd-share-matrices", CPU_ALONE, "IREE copies a shared matrix for each product of a batch"),
    Step("bwd-accumulate-products", CPU_ALONE, "sums of products without memory for each term, unless it packs"),
    Step("bwd-expand-tanh", CPU_ALONE, "IREE's tanh is off by four units in the last place: too many for its gradient"),
    Step("bwd-isolate-softmaxes", CPU_ALONE, "IREE has no vectors for a softmax along rows that 16 does not divide"),
    Step("bwd-fold-widenings", NOT_CPU_ALONE, "on a GPU IREE's threads read what others did not write yet"),
    Step("bwd-isolate-products", PACKING, "IREE would pack all that the ops behind a packed product read"),
    Step("bwd-expand-sines", F64_CPU, "IREE's sines lose digits with the size of the argument; this form is in f64"),
    Step("bwd-narrow-products", MATRIX_UNITS, "matrix units take 16 bits: products before widenings, not after"),
    _convert_to_kernels("norms", "several sums along rows at once; before columns, whose sums it takes where it can"),
    _convert_to_kernels("columns", "sums of many rows, such as a batch norm's; when widenings are folded into them"),
    _convert_to_kernels("rows", "rows of odd lengths, op by op"),
    _convert_to_kernels("transposes", "matrices with a short side; before products, which see through the others"),
    _convert_to_kernels("products", "when products are narrow, and before they are padded for IREE's tiles"),
    Step(
        "bwd-expand-erf",
        CPU_OR_CUDA,
        "IREE's erf takes longer than its memory; behind our kernels, which have one",
    ),
    Step("bwd-stack-joins", NO_CPU, "IREE copies what is joined along an inner axis, row by row"),
    Step("bwd-pad-products", MATRIX_UNITS, "IREE's tiles run over the end of a batch whose sizes they do not divide"),
)


def lowering_pipeline(
    target: Target | None = None, *, twins_alone: bool = False, asking: bool = False, donating: bool = False
) -> str:
    """The passes from staged functions to linalg for a target, as text; without one, what all have in common.

    ``twins_alone`` leaves out the functions that give results: those that write them to storage have the same kernels.
    ``asking`` is for a module that is not compiled: which tiles its kernels could have is noted in it. ``donating``
    says that callers give up residuals and tangents, and plans what their stages give one another: scratch memory lies
    there after their last use, on CUDA in the latter alone.
    """
    told = {"twins_alone": twins_alone, "asking": asking, "donating": donating}
    chosen = [step.text(target, **told) for step in LOWERING if step.where.asks(target)]
    return f"builtin.module({','.join(chosen)})"
