# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""All that what a model is compiled to depends on, beside what it does with its arguments: these, its parameters, how
PyTorch is set, and who compiles. It is part of the key of what is kept of the model, so that too much in it is a miss,
and too little would be a wrong program."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from retrograd.contract.environment import CACHE_FOLDER
from retrograd.contract.manifest import PACKAGES
from retrograd.frontend.autograd.engine.family_lock import SETTINGS
from retrograd.frontend.doors.recorded_graph import Doubt
from retrograd.options import Options
from retrograd.pipelines.devices.targets import host_cpu
from retrograd.pipelines.toolchain.fingerprint import package_fingerprint

_VARIABLES = ("RETROGRAD_", "OMP_", "MKL_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH", "PYTORCH", "IREE_", "KMP_")
# Where something is kept, and what is written to logs.
_OF_NO_MATTER = (CACHE_FOLDER, "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_HOME")
_OTHER_PACKAGES = ("iree-base-runtime", "numpy", "triton")


def read_situation(
    model: Callable[..., Any], named: Sequence[tuple[str, torch.Tensor]], options: Options
) -> dict[str, str]:
    """The situation as texts by name; ``named`` are the model's parameters, buffers and arguments.

    Raises:
        Doubt: something is on that no text describes.
    """
    _refuse_modes()
    # Of other threads, one may trace, or compare with eager.
    with SETTINGS:
        settings = [*_describe_torch()]
    return {
        "name": _describe_model(model),
        "tensors": "\n".join(_describe_tensors(named)),
        "options": repr(options),
        "torch": "\n".join(settings),
        "environment": "\n".join(_describe_environment()),
        "packages": "\n".join(_releases()),
        "host": host_cpu(),
        "package": package_fingerprint(),
    }


def _refuse_modes() -> None:
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise Doubt("modes are on that change what PyTorch's functions do")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Doubt("a transform of torch.func is open")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise Doubt("hooks of saved tensors are open")
    if any(table for name, table in vars(torch_module).items() if name.startswith("_global_") and name.endswith("s")):
        raise Doubt("hooks of all modules are registered")


def _describe_model(model: Callable[..., Any]) -> str:
    lines = [f"{type(model).__module__}.{type(model).__qualname__} {getattr(model, '__qualname__', '')}"]
    owner = getattr(model, "__self__", model)
    if isinstance(owner, torch.nn.Module):
        for path, module in owner.named_modules(remove_duplicate=False):
            kind = type(module)
            lines.append(f"{path} {kind.__module__}.{kind.__qualname__} {module.training}")
    return "\n".join(lines)


def _describe_tensors(named: Sequence[tuple[str, torch.Tensor]]) -> Iterable[str]:
    tensors: dict[int, int] = {}
    memories: dict[int, int] = {}
    for name, tensor in named:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not tensor.is_nested
        if not is_plain or tensor.layout != torch.strided:
            raise Doubt(f"{name} is a {type(tensor).__name__} of layout {tensor.layout}")
        # Which are one tensor, and which one memory.
        same = tensors.setdefault(id(tensor), len(tensors))
        memory = memories.setdefault(tensor.untyped_storage().data_ptr() or -id(tensor), len(memories))
        yield (
            f"{name} {same} {memory} {type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} "
            f"{tensor.storage_offset()} {tensor.device} {tensor.requires_grad} {tensor.is_leaf} {tensor._is_view()} "
            f"{tensor.is_conj()} {tensor.is_neg()} {tensor.is_inference()}"
        )


def _describe_torch() -> Iterable[str]:
    onednn: Any = torch.backends.mkldnn
    places = (torch.backends, onednn, onednn.matmul, onednn.conv, onednn.rnn)
    for device in ("cpu", "cuda"):
        yield f"autocast {device} {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    settings: dict[str, Any] = {
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        # Not by get_float32_matmul_precision, which raises where these were set one by one.
        "products": [place.fp32_precision for place in places],
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "cudnn": (torch._C._get_cudnn_enabled(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "nnpack": torch._C._get_nnpack_enabled(),
        "attention": (
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
        ),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "float16 sums": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "functorch": torch._functorch.config.get_hash().hex(),
        "anomalies": torch.is_anomaly_enabled(),
    }
    yield from (f"{name} {value}" for name, value in settings.items())


def _describe_environment() -> Iterable[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) and name not in _OF_NO_MATTER:
            yield f"{name}={value}"


@cache
def _releases() -> tuple[str, ...]:
    built = (sys.version, platform.platform(), torch.__version__, str(torch.version.git_version))
    return (*built, *(f"{name} {_release(name)}" for name in (*PACKAGES.values(), *_OTHER_PACKAGES)))


def _release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
