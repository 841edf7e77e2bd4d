// RUN: iree_compile %s --passes=bwd-part-groups | FileCheck %s

// Commands of a group run one after another where less memory is alive at the fullest step then.

stream.executable private @kernels {
  stream.executable.export public @first
  stream.executable.export public @last
  stream.executable.export public @next
}

// The last to read one buffer runs before what writes the other; what takes next to nothing runs beside one of them.
// CHECK-LABEL: util.func public @parted(
// CHECK: stream.cmd.dispatch @kernels::@first
// CHECK-NOT: @kernels::@next
// CHECK: stream.cmd.concurrent {
// CHECK-NEXT: stream.cmd.fill
// CHECK-NEXT: stream.cmd.dispatch @kernels::@last
// CHECK: stream.cmd.dispatch @kernels::@next
// CHECK-NOT: stream.cmd.concurrent
// CHECK: stream.cmd.dispatch @kernels::@last
util.func public @parted(%arg0: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0 : i32
  %c64 = arith.constant 64 : index
  %c128 = arith.constant 128 : index
  %c32768 = arith.constant 32768 : index
  %result = stream.tensor.import consume %arg0 : !hal.buffer_view -> tensor<32xf32> in !stream.resource<external>{%c128}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c32768,
    [1, 2] = %c32768
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%result as %r: !stream.resource<external>{%c128}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@first {
      wo %s[%pack#1 for %c32768] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.concurrent {
      stream.cmd.dispatch @kernels::@next {
        wo %s[%pack#2 for %c32768] : !stream.resource<transient>{%pack#0}
      }
      stream.cmd.fill %zero, %r[%c64 for %c64] : i32 -> !stream.resource<external>{%c128}
      stream.cmd.dispatch @kernels::@last {
        ro %s[%pack#1 for %c32768] : !stream.resource<transient>{%pack#0},
        wo %r[%c0 for %c64] : !stream.resource<external>{%c128}
      }
    }
    stream.cmd.dispatch @kernels::@last {
      ro %s[%pack#2 for %c32768] : !stream.resource<transient>{%pack#0},
      rw %r[%c0 for %c64] : !stream.resource<external>{%c128}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %result : tensor<32xf32> in !stream.resource<external>{%c128} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}

// Both buffers are alive behind the group whatever the order.
// CHECK-LABEL: util.func public @whole(
// CHECK: stream.cmd.concurrent {
// CHECK: stream.cmd.dispatch @kernels::@next
// CHECK: stream.cmd.dispatch @kernels::@first
// CHECK: }
util.func public @whole(%arg0: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c32768 = arith.constant 32768 : index
  %result = stream.tensor.import consume %arg0 : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c32768,
    [0, 1] = %c32768
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%result as %r: !stream.resource<external>{%c64}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.concurrent {
      stream.cmd.dispatch @kernels::@next {
        wo %s[%pack#2 for %c32768] : !stream.resource<transient>{%pack#0}
      }
      stream.cmd.dispatch @kernels::@first {
        wo %s[%pack#1 for %c32768] : !stream.resource<transient>{%pack#0}
      }
    }
    stream.cmd.dispatch @kernels::@last {
      ro %s[%pack#1 for %c32768] : !stream.resource<transient>{%pack#0},
      ro %s[%pack#2 for %c32768] : !stream.resource<transient>{%pack#0},
      wo %r[%c0 for %c64] : !stream.resource<external>{%c64}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %result : tensor<16xf32> in !stream.resource<external>{%c64} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}
