// RUN: iree_compile %s --passes=bwd-pack-scratch | FileCheck %s

// Arguments that the caller gave up lie one behind another where what is larger than each of them then fits.

stream.executable private @kernels {
  stream.executable.export public @one
}

// A buffer of 24 KiB is alive when both arguments are dead, of 16 KiB each: it begins in the first, which stands for
// both and is taken as bytes, and the block holds nothing. The one that is read last is the first.
// CHECK-LABEL: util.func public @buffer(
// CHECK-SAME: iree.reflection = {bwd.joined = "1:32768:1:0,1:32768:0:16384"}
// CHECK-NOT: hal.buffer_view.assert<%arg1
// CHECK: stream.tensor.import %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%[[ALL:.*]]}
// CHECK: %[[BEHIND:.*]] = arith.constant 16384 : index
// CHECK: with(%{{.*}} as %{{.*}}: !stream.resource<external>{%{{.*}}}, %{{.*}} as %[[B:.*]]: !stream.resource<external>{%[[ALL]]}
// CHECK: ro %[[B]][%[[BEHIND]] for %{{.*}}] : !stream.resource<external>{%[[ALL]]}
// CHECK: ro %[[B]][%{{.*}} for %{{.*}}] : !stream.resource<external>{%[[ALL]]}
// CHECK: wo %[[B]][%{{.*}} for %c24576] : !stream.resource<external>{%[[ALL]]}
// CHECK: ro %[[B]][%{{.*}} for %c24576] : !stream.resource<external>{%[[ALL]]}
util.func public @buffer(%arg0: !hal.buffer_view {bwd.donated = "joined"}, %arg1: !hal.buffer_view {bwd.donated = "joined"}, %arg2: !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %c64 = arith.constant 64 : index
  %c16384 = arith.constant 16384 : index
  %c24576 = arith.constant 24576 : index
  %f32 = hal.element_type<f32> : i32
  %row_major = hal.encoding_type<dense_row_major> : i32
  %first = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  hal.buffer_view.assert<%arg1 : !hal.buffer_view> message("input1") shape([%c4096]) type(%f32) encoding(%row_major)
  %second = stream.tensor.import %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %result = stream.tensor.import consume %arg2 : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %pack:2 = stream.resource.pack slices({
    [2, 3] = %c24576
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%first as %a: !stream.resource<external>{%c16384}, %second as %b: !stream.resource<external>{%c16384}, %result as %r: !stream.resource<external>{%c64}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c16384] : !stream.resource<external>{%c16384},
      wo %r[%c0 for %c64] : !stream.resource<external>{%c64}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %b[%c0 for %c16384] : !stream.resource<external>{%c16384},
      rw %r[%c0 for %c64] : !stream.resource<external>{%c64}
    }
    stream.cmd.dispatch @kernels::@one {
      wo %s[%pack#1 for %c24576] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c24576] : !stream.resource<transient>{%pack#0},
      rw %r[%c0 for %c64] : !stream.resource<external>{%c64}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  util.return
}

// A result of 32 KiB fills both, and has no storage of its own.
// CHECK-LABEL: util.func public @result(
// CHECK-SAME: iree.reflection = {bwd.joined = "0:32768:0:0,0:32768:1:16384", bwd.placed = "0:0:0:32768"}
util.func public @result(%arg0: !hal.buffer_view {bwd.donated = "joined"}, %arg1: !hal.buffer_view {bwd.donated = "joined"}, %arg2: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c16384 = arith.constant 16384 : index
  %c32768 = arith.constant 32768 : index
  %first = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %second = stream.tensor.import %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %result = stream.tensor.import consume %arg2 : !hal.buffer_view -> tensor<8192xf32> in !stream.resource<external>{%c32768}
  %pack:2 = stream.resource.pack slices({
    [0, 2] = %c64
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%first as %a: !stream.resource<external>{%c16384}, %second as %b: !stream.resource<external>{%c16384}, %result as %r: !stream.resource<external>{%c32768}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c16384] : !stream.resource<external>{%c16384},
      wo %s[%pack#1 for %c64] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %b[%c0 for %c16384] : !stream.resource<external>{%c16384},
      rw %s[%pack#1 for %c64] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c64] : !stream.resource<transient>{%pack#0},
      wo %r[%c0 for %c32768] : !stream.resource<external>{%c32768}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %result : tensor<8192xf32> in !stream.resource<external>{%c32768} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}

// A result that IREE fills lies there too; the function says that the argument is filled.
// CHECK-LABEL: util.func public @filled(
// CHECK-SAME: iree.reflection = {bwd.filled = "0", bwd.joined = "0:32768:0:0,0:32768:1:16384", bwd.placed = "0:0:0:32768"}
// CHECK: stream.cmd.fill %{{.*}}, %[[A:.*]][%{{.*}} for %c32768] : i32 -> !stream.resource<external>
util.func public @filled(%arg0: !hal.buffer_view {bwd.donated = "joined"}, %arg1: !hal.buffer_view {bwd.donated = "joined"}, %arg2: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0 : i32
  %c64 = arith.constant 64 : index
  %c16384 = arith.constant 16384 : index
  %c32768 = arith.constant 32768 : index
  %first = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %second = stream.tensor.import %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %result = stream.tensor.import consume %arg2 : !hal.buffer_view -> tensor<8192xf32> in !stream.resource<external>{%c32768}
  %pack:2 = stream.resource.pack slices({
    [0, 2] = %c64
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%first as %a: !stream.resource<external>{%c16384}, %second as %b: !stream.resource<external>{%c16384}, %result as %r: !stream.resource<external>{%c32768}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c16384] : !stream.resource<external>{%c16384},
      wo %s[%pack#1 for %c64] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %b[%c0 for %c16384] : !stream.resource<external>{%c16384},
      rw %s[%pack#1 for %c64] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.fill %zero, %r[%c0 for %c32768] : i32 -> !stream.resource<external>{%c32768}
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c64] : !stream.resource<transient>{%pack#0},
      rw %r[%c0 for %c32768] : !stream.resource<external>{%c32768}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %result : tensor<8192xf32> in !stream.resource<external>{%c32768} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}
