// RUN: iree_compile %s --passes=bwd-pack-scratch | FileCheck %s

// Placed in this order, the third would find no gap of its size and lie behind both: 1024 bytes. The largest is first,
// the second lies behind it, and the first takes what the third takes later.
// CHECK-LABEL: util.func public @gap(
// CHECK-NOT: stream.resource.pack
// CHECK: %[[SIZE:.*]] = arith.constant 768 : index
// CHECK: %[[FIRST:.*]] = arith.constant 0 : index
// CHECK: %[[SECOND:.*]] = arith.constant 512 : index
// CHECK: %[[THIRD:.*]] = arith.constant 0 : index
// CHECK: util.return %[[SIZE]], %[[FIRST]], %[[SECOND]], %[[THIRD]]
util.func public @gap() -> (index, index, index, index) {
  %c256 = arith.constant 256 : index
  %c500 = arith.constant 500 : index
  %c250 = arith.constant 250 : index
  %0:4 = stream.resource.pack slices({
    [0, 1] = %c256,
    [0, 3] = %c250,
    [2, 3] = %c500
  }) : index
  util.return %0#0, %0#1, %0#2, %0#3 : index, index, index, index
}

// Nothing is alive together: all have the same place.
// CHECK-LABEL: util.func public @in_turn(
// CHECK: arith.constant 64 : index
// CHECK-COUNT-2: arith.constant 0 : index
// CHECK: util.return
util.func public @in_turn() -> (index, index, index) {
  %c64 = arith.constant 64 : index
  %c4 = arith.constant 4 : index
  %0:3 = stream.resource.pack slices({
    [0, 0] = %c64,
    [1, 1] = %c4
  }) : index
  util.return %0#0, %0#1, %0#2 : index, index, index
}

// A size that the caller gives: IREE works the places out when it runs.
// CHECK-LABEL: util.func public @open(
// CHECK: stream.resource.pack
util.func public @open(%size: index) -> (index, index) {
  %0:2 = stream.resource.pack slices({
    [0, 0] = %size
  }) : index
  util.return %0#0, %0#1 : index, index
}
