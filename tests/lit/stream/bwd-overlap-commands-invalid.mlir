// RUN: not iree_compile %s --passes=bwd-overlap-commands 2>&1 | FileCheck %s

// CHECK: bwd-overlap-commands-invalid.mlir:7:32: error: bwd-overlap-commands: 'stream.async.execute' op: its ops have no memory yet; run it behind iree-stream-cmd-transformation-pipeline
util.func public @no_memory(%x: !stream.resource<external>) -> !stream.resource<external> {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %result, %result_timepoint = stream.async.execute with(%x as %a: !stream.resource<external>{%c64}) -> !stream.resource<external>{%c64} {
    %1 = stream.async.clone %a : !stream.resource<external>{%c64} -> !stream.resource<external>{%c64}
    stream.yield %1 : !stream.resource<external>{%c64}
  } => !stream.timepoint
  %2 = stream.timepoint.await %result_timepoint => %result : !stream.resource<external>{%c64}
  util.return %2 : !stream.resource<external>
}
