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

// What a dispatch writes is read by the second and by the third, which run together; the copy takes what the third
// writes elsewhere. The fill is beside all that the others write, the last reads what the copy writes.
// CHECK-LABEL: util.func public @written(
// CHECK: stream.cmd.execute
// CHECK-NEXT: stream.cmd.concurrent {
// CHECK-NEXT: stream.cmd.dispatch @kernels::@one {
// CHECK-NEXT: wo
// CHECK-NEXT: }
// CHECK-NEXT: stream.cmd.fill %{{.*}}, %{{.*}}[%c128 for %c64]
// CHECK-NEXT: }
// CHECK-NEXT: stream.cmd.concurrent {
// CHECK-NEXT: stream.cmd.dispatch @kernels::@one {
// CHECK-NEXT: ro
// CHECK-NEXT: wo
// CHECK-NEXT: }
// CHECK-NEXT: stream.cmd.dispatch @kernels::@one {
// CHECK-NEXT: ro
// CHECK-NEXT: rw
// CHECK-NEXT: }
// CHECK-NEXT: }
// CHECK-NEXT: stream.cmd.copy
// CHECK-NEXT: stream.cmd.dispatch @kernels::@one {
// CHECK-NEXT: ro %{{.*}}[%c64 for %c64]
// CHECK-NEXT: wo
// CHECK-NEXT: }
// CHECK-NEXT: } => !stream.timepoint
util.func public @written(%block: !stream.resource<transient>, %out: !stream.resource<external>) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c128 = arith.constant 128 : index
  %c192 = arith.constant 192 : index
  %c256 = arith.constant 256 : index
  %zero = arith.constant 0 : i8
  %0 = stream.cmd.execute with(%block as %b: !stream.resource<transient>{%c256}, %out as %o: !stream.resource<external>{%c256}) {
    stream.cmd.dispatch @kernels::@one {
      wo %b[%c0 for %c64] : !stream.resource<transient>{%c256}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %b[%c0 for %c64] : !stream.resource<transient>{%c256},
      wo %o[%c0 for %c64] : !stream.resource<external>{%c256}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %b[%c0 for %c64] : !stream.resource<transient>{%c256},
      rw %b[%c64 for %c64] : !stream.resource<transient>{%c256}
    }
    stream.cmd.copy %b[%c64], %o[%c64], %c64 : !stream.resource<transient>{%c256} -> !stream.resource<external>{%c256}
    stream.cmd.fill %zero, %o[%c128 for %c64] : i8 -> !stream.resource<external>{%c256}
    stream.cmd.dispatch @kernels::@one {
      ro %o[%c64 for %c64] : !stream.resource<external>{%c256},
      wo %b[%c192 for %c64] : !stream.resource<transient>{%c256}
    }
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}

// A command that says nothing of what it touches runs by itself.
// CHECK-LABEL: util.func public @flush(
// CHECK: stream.cmd.execute
// CHECK-NEXT: stream.cmd.fill
// CHECK-NEXT: stream.cmd.flush
// CHECK-NEXT: stream.cmd.fill
// CHECK-NEXT: } => !stream.timepoint
util.func public @flush(%block: !stream.resource<transient>) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c128 = arith.constant 128 : index
  %zero = arith.constant 0 : i8
  %0 = stream.cmd.execute with(%block as %b: !stream.resource<transient>{%c128}) {
    stream.cmd.fill %zero, %b[%c0 for %c64] : i8 -> !stream.resource<transient>{%c128}
    stream.cmd.flush %b[%c0 for %c64] : !stream.resource<transient>{%c128}
    stream.cmd.fill %zero, %b[%c64 for %c64] : i8 -> !stream.resource<transient>{%c128}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}

// The second half of a resource, and all of it: a place in the one is another place in the other.
// CHECK-LABEL: util.func public @part(
// CHECK-NOT: stream.cmd.concurrent
// CHECK: util.return
util.func public @part(%block: !stream.resource<transient>) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c128 = arith.constant 128 : index
  %zero = arith.constant 0 : i8
  %half = stream.resource.subview %block[%c64] : !stream.resource<transient>{%c128} -> !stream.resource<transient>{%c64}
  %0 = stream.cmd.execute with(%block as %a: !stream.resource<transient>{%c128}, %half as %b: !stream.resource<transient>{%c64}) {
    stream.cmd.fill %zero, %a[%c64 for %c64] : i8 -> !stream.resource<transient>{%c128}
    stream.cmd.fill %zero, %b[%c0 for %c64] : i8 -> !stream.resource<transient>{%c64}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}

// A resource that was waited for is the same one.
// CHECK-LABEL: util.func public @awaited(
// CHECK-NOT: stream.cmd.concurrent
// CHECK: util.return
util.func public @awaited(%block: !stream.resource<transient>, %other: !stream.resource<transient>, %ready: !stream.timepoint) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %zero = arith.constant 0 : i8
  %w:2 = stream.timepoint.await %ready => %other, %block : !stream.resource<transient>{%c64}, !stream.resource<transient>{%c64}
  %0 = stream.cmd.execute with(%block as %a: !stream.resource<transient>{%c64}, %w#1 as %b: !stream.resource<transient>{%c64}) {
    stream.cmd.fill %zero, %a[%c0 for %c64] : i8 -> !stream.resource<transient>{%c64}
    stream.cmd.fill %zero, %b[%c0 for %c64] : i8 -> !stream.resource<transient>{%c64}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}

// One buffer, imported twice.
// CHECK-LABEL: util.func public @imported(
// CHECK-NOT: stream.cmd.concurrent
// CHECK: util.return
util.func public @imported(%view: !hal.buffer_view) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %zero = arith.constant 0 : i8
  %x = stream.tensor.import %view : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %y = stream.tensor.import %view : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %0 = stream.cmd.execute with(%x as %a: !stream.resource<external>{%c64}, %y as %b: !stream.resource<external>{%c64}) {
    stream.cmd.fill %zero, %a[%c0 for %c64] : i8 -> !stream.resource<external>{%c64}
    stream.cmd.fill %zero, %b[%c0 for %c64] : i8 -> !stream.resource<external>{%c64}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}

// What a branch gives may be what it was given: all resources are taken to be one.
// CHECK-LABEL: util.func public @chosen(
// CHECK-NOT: stream.cmd.concurrent
// CHECK: util.return
util.func public @chosen(%block: !stream.resource<transient>, %other: !stream.resource<transient>, %choice: i1) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %zero = arith.constant 0 : i8
  %either = arith.select %choice, %block, %other : !stream.resource<transient>
  %0 = stream.cmd.execute with(%block as %a: !stream.resource<transient>{%c64}, %either as %b: !stream.resource<transient>{%c64}) {
    stream.cmd.fill %zero, %a[%c0 for %c64] : i8 -> !stream.resource<transient>{%c64}
    stream.cmd.fill %zero, %b[%c0 for %c64] : i8 -> !stream.resource<transient>{%c64}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}

// Memory of one's own, a global's, a caller's: none is another's.
// CHECK-LABEL: util.func public @own(
// CHECK: stream.cmd.concurrent {
// CHECK-NEXT: stream.cmd.fill
// CHECK-NEXT: stream.cmd.fill
// CHECK-NEXT: stream.cmd.fill
// CHECK-NEXT: }
util.global private mutable @state : !stream.resource<variable>
util.func public @own(%view: !hal.buffer_view) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %zero = arith.constant 0 : i8
  %x = stream.tensor.import %view : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %block, %ready = stream.resource.alloca uninitialized : !stream.resource<transient>{%c64} => !stream.timepoint
  %state = util.global.load @state : !stream.resource<variable>
  %0 = stream.cmd.execute await(%ready) => with(%x as %a: !stream.resource<external>{%c64}, %block as %b: !stream.resource<transient>{%c64}, %state as %c: !stream.resource<variable>{%c64}) {
    stream.cmd.fill %zero, %a[%c0 for %c64] : i8 -> !stream.resource<external>{%c64}
    stream.cmd.fill %zero, %b[%c0 for %c64] : i8 -> !stream.resource<transient>{%c64}
    stream.cmd.fill %zero, %c[%c0 for %c64] : i8 -> !stream.resource<variable>{%c64}
  } => !stream.timepoint
  util.return %0 : !stream.timepoint
}
