# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels in a module: an executable for each, with its PTX, and the ops that dispatch them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from retrograd.contract.trials import CompiledKernel
from retrograd.dialects import ir
from retrograd.pipelines.devices.device_targets import CUDA_ARCHITECTURES
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.questions import Launch
from retrograd.pipelines.transforms.helpers.maker import Maker

# Of IREE, unknown here: modules that hold them are read with unregistered dialects allowed.
DISPATCH = "flow.dispatch"
# What stands for PTX where none is compiled, in tests of what takes which kernel.
NO_PTX = CompiledKernel(ptx="", threads=128, shared=0, scratch=0)

_SOURCE = """
"hal.executable.source"() ({{
  "hal.executable.export"() ({{
  ^bb0(%device: !hal.device, %x: index, %y: index, %z: index):
    "hal.return"(%x, %y, %z) : (index, index, index) -> ()
  }}, {{}}) {{sym_name = "{label}", sym_visibility = "public", ordinal = 0 : index,
    layout = #hal.pipeline.layout<constants = {numbers}, bindings = [{bindings}]>,
    workgroup_size = [{threads} : index, 1 : index, 1 : index], subgroup_size = 32 : index,
    workgroup_local_memory = {shared} : index}} : () -> ()
  "hal.executable.source_end"() : () -> ()
}}) {{sym_name = "{label}_cuda", sym_visibility = "private",
  objects = #hal.executable.objects<{{
    {target} = [#hal.executable.object<{{path = "{label}.ptx"{data}}}>]}}>}} : () -> ()
"""


def create_dispatch(
    launch: Launch, compiled: CompiledKernel, operands: Sequence[ir.Value], result: ir.Type, before: ir.Operation
) -> ir.Value:
    """Dispatch a kernel of one result in front of an op; gives that, of type ``result``."""
    (value,) = create_dispatches(launch, compiled, operands, [result], before)
    return value


def create_dispatches(
    launch: Launch,
    compiled: CompiledKernel,
    operands: Sequence[ir.Value],
    types: Sequence[ir.Type],
    before: ir.Operation,
) -> list[ir.Value]:
    """Dispatch a kernel in front of an op; gives its results, of these ``types``."""
    make, integer = Maker.before(before), ir.IntegerType.get_signless(32)
    grid = [make.index(count) for count in launch.grid]
    numbers = [make.constant(ir.IntegerAttr.get(integer, number)) for number in launch.numbers]
    results = list(types)
    if compiled.scratch:
        size, byte = prod(launch.grid) * compiled.scratch, ir.IntegerType.get_signless(8)
        results.append(ir.RankedTensorType.get([size], byte, loc=before.location))
    attributes: dict[str, ir.Attribute] = {
        "entry_points": ir.Attribute.parse(f"[@{launch.kernel.label}_cuda::@{launch.kernel.label}]"),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(grid), len(operands) + len(numbers), 0, 0]),
    }
    if launch.written is not None:
        attributes["tied_operands"] = ir.Attribute.parse(f"[{launch.written} : index]")
    made = make.op(DISPATCH, [*grid, *operands, *numbers], results, attributes)
    return list(made.results)[: len(types)]


def add_executables(module: ir.Operation, kernels: Mapping[Kernel, tuple[CompiledKernel, bool]], target: str) -> None:
    """Put an executable for each kernel in front of a module's functions, with its PTX; ``target`` is the architecture.
    With a kernel goes whether it updates an operand in place. What is there, as another family has it too, stays."""
    block = module.regions[0].blocks[0]
    names = (view.operation.attributes.get("sym_name") for view in block.operations)
    known = {name.value for name in names if isinstance(name, ir.StringAttr)}
    for kernel, (compiled, updates) in kernels.items():
        if f"{kernel.label}_cuda" in known:
            continue
        parsed = ir.Module.parse(write_executable(kernel, compiled, target, updates=updates))
        parsed.body.operations[0].operation.clone(ip=ir.InsertionPoint.at_block_begin(block))


def write_executable(kernel: Kernel, compiled: CompiledKernel, target: str, *, updates: bool) -> str:
    """The executable of a kernel as text, its PTX in it as data."""
    results = kernel.results - updates
    read = len(kernel.pointers) - results
    plain, written = "#hal.pipeline.binding<storage_buffer, ReadOnly>", "#hal.pipeline.binding<storage_buffer>"
    bindings = [plain] * (read - updates) + [written] * (results + updates + bool(compiled.scratch))
    # Written out, and not as a resource of the module: the bindings do not look into attributes of IREE's.
    digits = compiled.ptx.encode().hex()
    data = f', data = dense<"0x{digits}"> : vector<{len(digits) // 2}xi8>' if digits else ""
    return _SOURCE.format(
        label=kernel.label,
        numbers=len(kernel.numbers),
        bindings=", ".join(bindings),
        threads=compiled.threads,
        shared=compiled.shared,
        target=CUDA_ARCHITECTURES[target].executable(target),
        data=data,
    )
