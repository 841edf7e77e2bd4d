// RUN: not iree_compile %s --passes=bwd-pack-scratch 2>&1 | FileCheck %s
// RUN: not iree_compile %s --passes=bwd-pack 2>&1 | FileCheck %s --check-prefix=NAME

// CHECK: bwd-pack-scratch-invalid.mlir:8:10: error: bwd-pack-scratch: 'stream.resource.pack' op: slice 0 of 64 bytes is alive from step 3 to 1; run it right after iree-stream-schedule-allocation
// NAME: iree_compile: error: unknown pass 'bwd-pack'; the passes are bwd-join-indices, bwd-overlap-commands, bwd-pack-scratch, bwd-part-groups
util.func public @backwards() -> (index, index) {
  %c64 = arith.constant 64 : index
  %0:2 = stream.resource.pack slices({
    [3, 1] = %c64
  }) : index
  util.return %0#0, %0#1 : index, index
}
