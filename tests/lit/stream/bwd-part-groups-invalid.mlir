// RUN: not iree_compile %s --passes=bwd-part-groups 2>&1 | FileCheck %s

// CHECK: bwd-part-groups-invalid.mlir:6:10: error: bwd-part-groups: 'stream.resource.pack' op: slice 0 of 64 bytes is alive from step 3 to 1; run it right after iree-stream-schedule-allocation
util.func public @backwards() -> (index, index) {
  %c64 = arith.constant 64 : index
  %0:2 = stream.resource.pack slices({
    [3, 1] = %c64
  }) : index
  util.return %0#0, %0#1 : index, index
}
