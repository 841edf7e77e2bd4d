// RUN: iree_compile %s --passes=bwd-overlap-commands | FileCheck %s

stream.executable private @kernels {
  stream.executable.export public @one workgroups() -> (index, index, index) {
    %c1 = arith.constant 1 : index
    stream.return %c1, %c1, %c1 : index, index, index
  }
}

// The third reads what the first wrote; the second has nothing to do with either and runs with the first. The fourth
// writes where the second read.
// CHECK-LABEL: util.func public @waves(
// CHECK: stream.cmd.execute
// CHECK-NEXT: stream.cmd.concurrent {
// CHECK-NEXT: stream.cmd.fill {{.*}}[%c0 for %c64]
// CHECK-NEXT: stream.cmd.copy {{.*}}[%c128]
// CHECK-NEXT: }
// CHECK-NEXT: stream.cmd.concurrent {
// CHECK-NEXT: stream.cmd.dispatch
// CHECK-NEXT: ro %{{.*}}[%c0 for %c64]
// CHECK: stream.cmd.fill {{.*}}[%c128 for %c64]
// CHECK-NEXT: }
// CHECK-NEXT: } => !stream.timepoint
util.func public @waves(%block: !stream.resource<transient>, %out: !stream.resource<external>, %at: index) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c128 = arith.constant 128 : index
  %c256 = arith.constant 256 : index
  %zero = arith.constant 0 : i8
  %0 = stream.cmd.execute with(%block as %b: !stream.resource<transient>{%c256}, %out as %o: !stream.resource<external>{%c256}) {
    stream.cmd.fill %zero, %b[%c0 for %c64] : i8 -> !stream.resource<transient>{%c256}
    stream.cmd.copy %b[%c128], %o[%c0], %c64 : !stream.resource<transient>{%c256} -> !stream.resource<external>{%c256}
    stream.cmd.dispatch @kernels::@one {
      ro %b[%c0 for %c64] : !stream.resource<transient>{%c256},
      wo %o[%c64 for %c64] : !stream.resource<external>{%c256}
    }
    stream.cmd.fill %zero, %b[%c128 for %c64] : i8 -> !stream.resource<transient>{%c256}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}

// A place that is worked out at run time may be any; both resources are one.
// CHECK-LABEL: util.func public @open(
// CHECK-NOT: stream.cmd.concurrent
// CHECK: util.return
util.func public @open(%block: !stream.resource<transient>, %at: index) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c128 = arith.constant 128 : index
  %zero = arith.constant 0 : i8
  %0 = stream.cmd.execute with(%block as %a: !stream.resource<transient>{%c128}, %block as %b: !stream.resource<transient>{%c128}) {
    stream.cmd.fill %zero, %a[%at for %c64] : i8 -> !stream.resource<transient>{%c128}
    stream.cmd.fill %zero, %b[%c64 for %c64] : i8 -> !stream.resource<transient>{%c128}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}
