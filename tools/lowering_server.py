# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``python -m retrograd.tools.lowering_server SOCKET PARENT`` lowers modules for the process that started it.

It has the bindings, the passes and their tables loaded, and forks a child for each module: that takes 0.05 s of CPU
time where a program of its own takes 0.25. What becomes of a child is no matter to the others. It ends with the process
that started it, of the number ``PARENT``, when that closes the other end of ``SOCKET``, and after a minute with nothing
to do.
"""

from retrograd.pipelines.toolchain.fork_server import serve
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline
from retrograd.tools.lower import main as lower

_MODULE = b"""
func.func @f(%x: !torch.vtensor<[4],f32> {bwd.role = "input", bwd.name = "x"})
    -> (!torch.vtensor<[4],f32> {bwd.role = "output", bwd.name = "y"}) {
  %0 = torch.aten.exp %x : !torch.vtensor<[4],f32> -> !torch.vtensor<[4],f32>
  return %0 : !torch.vtensor<[4],f32>
}
"""


def main() -> None:
    """Run the program; returns when its work is over."""
    warm_up()
    serve(lower)


def warm_up() -> None:
    """Lower a module: passes are imported when they are first used, and tables filled in."""
    from retrograd.pipelines.infra.opt_driver import OptOptions, Source, process

    pipeline = lowering_pipeline(None)
    process(Source("warm-up", _MODULE), OptOptions(pipeline=pipeline, allow_unregistered_dialect=True))


if __name__ == "__main__":
    main()
