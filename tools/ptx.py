# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiles kernels to PTX with Triton, for a parent that does not import it: JSON in, JSON out; no GPU is needed."""

import json
import os
import re
import sys
import tempfile
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.contract.trials import CompiledKernel
from retrograd.pipelines.kernels.kernel import ELEMENTS, Kernel, KernelError
from retrograd.pipelines.kernels.ptx import adapt_ptx, drop_vector_flags


def compile_kernel(kernel: Kernel, architecture: str) -> CompiledKernel:
    """PTX of one kernel, which Triton's assembler has checked.

    Raises:
        KernelError: Triton gave PTX of another form than this release knows.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    function = getattr(_find_module(kernel), kernel.function)
    names = function.arg_names
    types = {name: f"*{ELEMENTS[element]}" for name, element in kernel.pointers}
    types |= dict.fromkeys(kernel.numbers, "i32") | dict.fromkeys(dict(kernel.constants), "constexpr")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in kernel.aligned}
    source = (GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource)(
        function, signature={name: types[name] for name in names}, constexprs=dict(kernel.constants), attrs=aligned
    )
    knobs.runtime.add_stages_inspection_hook = _mend_stages
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    found = compile(source, target=target, options={"num_warps": kernel.warps, "num_stages": kernel.stages})
    scratch = int(found.metadata.global_scratch_size)
    ptx = adapt_ptx(found.asm["ptx"], kernel, scratch)
    return CompiledKernel(ptx, _count_threads(ptx, kernel), int(found.metadata.shared), scratch)


def _mend_stages(_backend: object = None, stages: dict[str, Any] | None = None, *_given: object) -> tuple[str, str]:
    """Have PTX made of LLVM's code as `drop_vector_flags` leaves it. Triton calls this for each kernel, and without
    arguments for what tells its own cache of another way to compile."""
    if stages is not None:
        make = stages["ptx"]
        stages["ptx"] = lambda llvm, metadata: make(drop_vector_flags(str(llvm)), metadata)
    return drop_vector_flags.__name__, drop_vector_flags.__name__


def _count_threads(ptx: str, kernel: Kernel) -> int:
    """The threads of a workgroup: those of warps that only fetch are in the PTX alone."""
    threads = re.search(r"\.reqntid (\d+)", ptx)
    if threads is None:
        raise KernelError(f"the PTX of {kernel.label} does not say how many threads it has: another release of Triton?")
    return int(threads[1])


def _find_module(kernel: Kernel) -> ModuleType:
    """The module that a kernel's function is in. Triton reads a function's source from its file."""
    if not kernel.text:
        return import_module(f"retrograd.pipelines.kernels.source.{kernel.source}")
    path = Path(os.environ["TRITON_CACHE_DIR"]) / f"{kernel.label}.py"
    path.write_text(kernel.text, encoding="utf-8")
    spec = spec_from_file_location(kernel.label, path)
    if spec is None or spec.loader is None:
        raise KernelError(f"the source of {kernel.label} is no module")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(kernel: Kernel, architecture: str) -> dict[str, Any]:
    """A compiled kernel as JSON, or why there is none: the kernels behind it are compiled all the same."""
    from triton.errors import TritonError

    try:
        return vars(compile_kernel(kernel, architecture))
    except (KernelError, TritonError, RuntimeError, ValueError, AssertionError) as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        return {"error": f"{kernel.label}: {type(error).__name__}: {last}"[:500]}


def main() -> int:
    """Read what to compile from standard input, write what came of it to standard output."""
    request = json.load(sys.stdin)
    kernels = [Kernel.from_dict(fields) for fields in request["kernels"]]
    # Triton's own cache is not needed: what is compiled here is kept by the parent.
    with tempfile.TemporaryDirectory(prefix="retrograd-triton-") as folder:
        os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_DISABLE_LINE_INFO": "1"}
        answers = [_answer(kernel, request["architecture"]) for kernel in kernels]
    json.dump(answers, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
