// RUN: iree_compile %s --passes=bwd-pack-scratch | FileCheck %s

// A result of a sixteenth of what was given up needs no storage of its own while the block is there: it lies in what is
// dead, and its caller copies it when the function has returned.

stream.executable private @kernels {
  stream.executable.export public @one
}

// CHECK-LABEL: util.func public @small(
// CHECK-SAME: iree.reflection = {bwd.copied_out = "0", bwd.donated = "0", bwd.placed = "0:0:0:16384"}
util.func public @small(%arg0: !hal.buffer_view {bwd.donated = "several"}, %arg1: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c16384 = arith.constant 16384 : index
  %c262144 = arith.constant 262144 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<65536xf32> in !stream.resource<external>{%c262144}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %pack:2 = stream.resource.pack slices({
    [0, 1] = %c16384
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  // CHECK: stream.cmd.execute {{.*}} as %[[GIVEN:[a-z0-9]+]]: !stream.resource<external>{%c262144}
  // CHECK: wo %[[GIVEN]][%{{.*}} for %c16384] : !stream.resource<external>{%c262144}
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c262144}, %result as %r: !stream.resource<external>{%c16384}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c262144] : !stream.resource<external>{%c262144},
      wo %s[%pack#1 for %c16384] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c16384] : !stream.resource<transient>{%pack#0},
      wo %r[%c0 for %c16384] : !stream.resource<external>{%c16384}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %result : tensor<4096xf32> in !stream.resource<external>{%c16384} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}

// One that is larger than that stays where it is: to copy it would take time.
// CHECK-LABEL: util.func public @larger(
// CHECK-NOT: bwd.copied_out
util.func public @larger(%arg0: !hal.buffer_view {bwd.donated = "several"}, %arg1: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c16384 = arith.constant 16384 : index
  %c131072 = arith.constant 131072 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<32768xf32> in !stream.resource<external>{%c131072}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %pack:2 = stream.resource.pack slices({
    [0, 1] = %c16384
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c131072}, %result as %r: !stream.resource<external>{%c16384}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c131072] : !stream.resource<external>{%c131072},
      wo %s[%pack#1 for %c16384] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c16384] : !stream.resource<transient>{%pack#0},
      wo %r[%c0 for %c16384] : !stream.resource<external>{%c16384}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %result : tensor<4096xf32> in !stream.resource<external>{%c16384} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}
