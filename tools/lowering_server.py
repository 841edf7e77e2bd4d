# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``python -m retrograd.tools.lowering_server SOCKET PARENT`` lowers modules for the process that started it.

It has the bindings, the passes and their tables loaded and a context made, and forks a child for each module: a small
one takes a fifth of the CPU time that a program of its own does. What becomes of a child is no matter to the others. It
ends with the process that started it, of the number ``PARENT``, when that closes the other end of ``SOCKET``, and after
a minute with nothing to do.
"""

from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.toolchain.fork_server import serve
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline
from retrograd.tools.lower import main as lower

# The backward of a linear layer and its activation: what it leaves unloaded, each child loads anew. With an op by
# itself a child took a third longer.
_MODULE = b"""
func.func @backward(
    %x: !torch.vtensor<[3,4],f32> {bwd.role = "input", bwd.name = "x"},
    %y: !torch.vtensor<[3,2],f32> {bwd.role = "saved", bwd.name = "saved.y"},
    %t: !torch.vtensor<[3,2],f32> {bwd.role = "tangent", bwd.name = "tangent.y"})
    -> (!torch.vtensor<[2,4],f32> {bwd.role = "grad", bwd.name = "grad.weight"},
        !torch.vtensor<[2],f32> {bwd.role = "grad", bwd.name = "grad.bias"}) {
  %none = torch.constant.none
  %true = torch.constant.bool true
  %0 = torch.constant.int 0
  %1 = torch.constant.int 1
  %2 = torch.constant.int 2
  %6 = torch.constant.int 6
  %cpu = torch.constant.device "cpu"
  %shape = torch.prim.ListConstruct %2 : (!torch.int) -> !torch.list<int>
  %rows = torch.prim.ListConstruct %0 : (!torch.int) -> !torch.list<int>
  %axes = torch.prim.ListConstruct %1, %0 : (!torch.int, !torch.int) -> !torch.list<int>
  %off = torch.aten.le.Scalar %y, %0 : !torch.vtensor<[3,2],f32>, !torch.int -> !torch.vtensor<[3,2],i1>
  %zero = torch.aten.scalar_tensor %0, %6, %0, %cpu, %none
      : !torch.int, !torch.int, !torch.int, !torch.Device, !torch.none -> !torch.vtensor<[],f32>
  %g = torch.aten.where.self %off, %zero, %t
      : !torch.vtensor<[3,2],i1>, !torch.vtensor<[],f32>, !torch.vtensor<[3,2],f32> -> !torch.vtensor<[3,2],f32>
  %column = torch.aten.permute %g, %axes : !torch.vtensor<[3,2],f32>, !torch.list<int> -> !torch.vtensor<[2,3],f32>
  %w = torch.aten.mm %column, %x
      : !torch.vtensor<[2,3],f32>, !torch.vtensor<[3,4],f32> -> !torch.vtensor<[2,4],f32>
  %sum = torch.aten.sum.dim_IntList %g, %rows, %true, %none
      : !torch.vtensor<[3,2],f32>, !torch.list<int>, !torch.bool, !torch.none -> !torch.vtensor<[1,2],f32>
  %b = torch.aten.view %sum, %shape : !torch.vtensor<[1,2],f32>, !torch.list<int> -> !torch.vtensor<[2],f32>
  return %w, %b : !torch.vtensor<[2,4],f32>, !torch.vtensor<[2],f32>
}
"""


def main() -> None:
    """Run the program; returns when its work is over."""
    # Here and below: with the first import, `lower` sees to it that the bindings leave out what is of no use.
    from retrograd.dialects.context import make_context

    warm_up()
    context = make_context()
    serve(lambda arguments: lower(arguments, context))


def warm_up() -> bool:
    """Lower a module: passes are imported when they are first used, and tables filled in. Returns whether it could."""
    from retrograd.pipelines.infra.opt_driver import OptOptions, Source, process

    pipeline = lowering_pipeline(find_target("cpu"))
    return process(Source("warm-up", _MODULE), OptOptions(pipeline=pipeline, allow_unregistered_dialect=True)).ok


if __name__ == "__main__":
    main()
