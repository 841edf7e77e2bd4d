# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passes of this project by name; a pass's module is imported when the pass is first asked for.

One name in four spellings: ``bwd-sink-recompute`` is ``BwdSinkRecompute`` in ``bwd_sink_recompute.py``, and
``bwd-sink-recompute.mlir`` tests it.
"""

from importlib import import_module

from retrograd.pipelines.infra.passes import ModulePass

PASSES: dict[str, str] = {
    "bwd-accumulate-products": "retrograd.pipelines.transforms.device.bwd_accumulate_products:BwdAccumulateProducts",
    "bwd-apply-save-policy": "retrograd.pipelines.transforms.torch.bwd_apply_save_policy:BwdApplySavePolicy",
    "bwd-bound-indices": "retrograd.pipelines.transforms.linalg.bwd_bound_indices:BwdBoundIndices",
    "bwd-bucket-reductions": "retrograd.pipelines.transforms.torch.bwd_bucket_reductions:BwdBucketReductions",
    "bwd-combine-scatters": "retrograd.pipelines.transforms.device.bwd_combine_scatters:BwdCombineScatters",
    "bwd-copy-updated": "retrograd.pipelines.transforms.linalg.bwd_copy_updated:BwdCopyUpdated",
    "bwd-crop-windows": "retrograd.pipelines.transforms.linalg.bwd_crop_windows:BwdCropWindows",
    "bwd-cse": "retrograd.pipelines.transforms.torch.bwd_cse:BwdCse",
    "bwd-drop-tangents": "retrograd.pipelines.transforms.torch.bwd_drop_tangents:BwdDropTangents",
    "bwd-expand-angles": "retrograd.pipelines.transforms.linalg.bwd_expand_angles:BwdExpandAngles",
    "bwd-expand-erf": "retrograd.pipelines.transforms.device.bwd_expand_erf:BwdExpandErf",
    "bwd-expand-sines": "retrograd.pipelines.transforms.device.bwd_expand_sines:BwdExpandSines",
    "bwd-expand-tanh": "retrograd.pipelines.transforms.device.bwd_expand_tanh:BwdExpandTanh",
    "bwd-expand-powers": "retrograd.pipelines.transforms.linalg.bwd_expand_powers:BwdExpandPowers",
    "bwd-export-complex": "retrograd.pipelines.transforms.linalg.bwd_export_complex:BwdExportComplex",
    "bwd-export-results": "retrograd.pipelines.transforms.linalg.bwd_export_results:BwdExportResults",
    "bwd-fold-elementwise": "retrograd.pipelines.transforms.device.bwd_fold_elementwise:BwdFoldElementwise",
    "bwd-fold-widenings": "retrograd.pipelines.transforms.device.bwd_fold_widenings:BwdFoldWidenings",
    "bwd-functionalize-rng": "retrograd.pipelines.transforms.torch.bwd_functionalize_rng:BwdFunctionalizeRng",
    "bwd-inline-hooks": "retrograd.pipelines.transforms.torch.bwd_inline_hooks:BwdInlineHooks",
    "bwd-isolate-arguments": "retrograd.pipelines.transforms.linalg.bwd_isolate_arguments:BwdIsolateArguments",
    "bwd-isolate-constants": "retrograd.pipelines.transforms.linalg.bwd_isolate_constants:BwdIsolateConstants",
    "bwd-isolate-gathers": "retrograd.pipelines.transforms.linalg.bwd_isolate_gathers:BwdIsolateGathers",
    "bwd-isolate-loops": "retrograd.pipelines.transforms.device.bwd_isolate_loops:BwdIsolateLoops",
    "bwd-isolate-products": "retrograd.pipelines.transforms.device.bwd_isolate_products:BwdIsolateProducts",
    "bwd-isolate-reductions": "retrograd.pipelines.transforms.linalg.bwd_isolate_reductions:BwdIsolateReductions",
    "bwd-isolate-scatters": "retrograd.pipelines.transforms.linalg.bwd_isolate_scatters:BwdIsolateScatters",
    "bwd-isolate-softmaxes": "retrograd.pipelines.transforms.device.bwd_isolate_softmaxes:BwdIsolateSoftmaxes",
    "bwd-keep-itself": "retrograd.pipelines.transforms.torch.bwd_keep_itself:BwdKeepItself",
    "bwd-keep-nans": "retrograd.pipelines.transforms.linalg.bwd_keep_nans:BwdKeepNans",
    "bwd-keep-roundings": "retrograd.pipelines.transforms.linalg.bwd_keep_roundings:BwdKeepRoundings",
    "bwd-mark-products": "retrograd.pipelines.transforms.device.bwd_mark_products:BwdMarkProducts",
    "bwd-narrow-products": "retrograd.pipelines.transforms.device.bwd_narrow_products:BwdNarrowProducts",
    "bwd-narrow-saved": "retrograd.pipelines.transforms.torch.bwd_narrow_saved:BwdNarrowSaved",
    "bwd-negate-products": "retrograd.pipelines.transforms.device.bwd_negate_products:BwdNegateProducts",
    "bwd-offload-saved": "retrograd.pipelines.transforms.torch.bwd_offload_saved:BwdOffloadSaved",
    "bwd-order-scatters": "retrograd.pipelines.transforms.device.bwd_order_scatters:BwdOrderScatters",
    "bwd-outline-islands": "retrograd.pipelines.transforms.torch.bwd_outline_islands:BwdOutlineIslands",
    "bwd-outline-stages": "retrograd.pipelines.transforms.torch.bwd_outline_stages:BwdOutlineStages",
    "bwd-pad-products": "retrograd.pipelines.transforms.device.bwd_pad_products:BwdPadProducts",
    "bwd-partition": "retrograd.pipelines.transforms.torch.bwd_partition:BwdPartition",
    "bwd-prefetch-gathers": "retrograd.pipelines.transforms.torch.bwd_prefetch_gathers:BwdPrefetchGathers",
    "bwd-repeat-elementwise": "retrograd.pipelines.transforms.device.bwd_repeat_elementwise:BwdRepeatElementwise",
    "bwd-schedule-collectives": "retrograd.pipelines.transforms.torch.bwd_schedule_collectives:BwdScheduleCollectives",
    "bwd-schedule-hooks": "retrograd.pipelines.transforms.torch.bwd_schedule_hooks:BwdScheduleHooks",
    "bwd-share-matrices": "retrograd.pipelines.transforms.device.bwd_share_matrices:BwdShareMatrices",
    "bwd-shorten-lifetimes": "retrograd.pipelines.transforms.torch.bwd_shorten_lifetimes:BwdShortenLifetimes",
    "bwd-sink-recompute": "retrograd.pipelines.transforms.torch.bwd_sink_recompute:BwdSinkRecompute",
    "bwd-split-collectives": "retrograd.pipelines.transforms.torch.bwd_split_collectives:BwdSplitCollectives",
    "bwd-split-long-products": "retrograd.pipelines.transforms.device.bwd_split_long_products:BwdSplitLongProducts",
    "bwd-split-columns": "retrograd.pipelines.transforms.device.bwd_split_columns:BwdSplitColumns",
    "bwd-stack-joins": "retrograd.pipelines.transforms.device.bwd_stack_joins:BwdStackJoins",
    "bwd-sum-by-rows": "retrograd.pipelines.transforms.device.bwd_sum_by_rows:BwdSumByRows",
    "bwd-uncontract-sums": "retrograd.pipelines.transforms.device.bwd_uncontract_sums:BwdUncontractSums",
    "bwd-verify-legality": "retrograd.pipelines.transforms.torch.bwd_verify_legality:BwdVerifyLegality",
    "convert-bwd-to-func": "retrograd.pipelines.conversions.convert_bwd_to_func:ConvertBwdToFunc",
    "convert-linalg-to-kernels": "retrograd.pipelines.conversions.convert_linalg_to_kernels:ConvertLinalgToKernels",
    "convert-torch-pools-to-linalg": (
        "retrograd.pipelines.conversions.convert_torch_pools_to_linalg:ConvertTorchPoolsToLinalg"
    ),
    "convert-recurrence-to-scf": ("retrograd.pipelines.conversions.convert_recurrence_to_scf:ConvertRecurrenceToScf"),
    "convert-torch-attention-to-bwd": (
        "retrograd.pipelines.conversions.convert_torch_attention_to_bwd:ConvertTorchAttentionToBwd"
    ),
    "convert-torch-collectives-to-bwd": (
        "retrograd.pipelines.conversions.convert_torch_collectives_to_bwd:ConvertTorchCollectivesToBwd"
    ),
    "convert-torch-complex-to-pairs": (
        "retrograd.pipelines.conversions.convert_torch_complex_to_pairs:ConvertTorchComplexToPairs"
    ),
    "convert-torch-convolution-to-bwd": (
        "retrograd.pipelines.conversions.convert_torch_convolution_to_bwd:ConvertTorchConvolutionToBwd"
    ),
    "convert-torch-operator-to-bwd": (
        "retrograd.pipelines.conversions.convert_torch_operator_to_bwd:ConvertTorchOperatorToBwd"
    ),
    "convert-torch-view-to-tensor": (
        "retrograd.pipelines.conversions.convert_torch_view_to_tensor:ConvertTorchViewToTensor"
    ),
}


def registered_passes() -> tuple[str, ...]:
    """Names of all passes of this project, sorted."""
    return tuple(sorted(PASSES))


def load_pass(name: str) -> type[ModulePass]:
    """The class of the pass called `name`.

    Raises:
        KeyError: no such pass.
        ImportError: the pass is registered, but its module or class is missing or does not import.
        TypeError: what is registered under `name` is not a pass of that name.
    """
    module, _, attribute = PASSES[name].partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(f"pass '{name}' is registered as {PASSES[name]}, which does not exist") from error
    if not (isinstance(found, type) and issubclass(found, ModulePass) and found.name == name):
        raise TypeError(f"pass '{name}' is registered as {PASSES[name]}, which is not a ModulePass of that name")
    return found
