// RUN: iree_compile %s --passes=bwd-pack-scratch | FileCheck %s

// Buffers, and results, lie in arguments that the caller gave up, after their last use.

stream.executable private @kernels {
  stream.executable.export public @one
}

// Of two buffers, the first is alive with the argument, and lies in the block; the second comes when it is dead, and
// lies there. The function says so.
// CHECK-LABEL: util.func public @buffer(
// CHECK-SAME: iree.reflection = {bwd.donated = "0", iree.abi.declaration = "sync func"}
// CHECK: alloca uninitialized : !stream.resource<transient>{%c4096{{.*}}} =>
// CHECK: with(%{{.*}} as %[[A:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[R:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[S:.*]]: !stream.resource<transient>
// CHECK: ro %[[A]][
// CHECK-NEXT: wo %[[S]][
// CHECK: ro %[[S]][
// CHECK-NEXT: wo %[[A]][%{{.*}} for %c4096] : !stream.resource<external>{%c4096}
// CHECK: ro %[[A]][
// CHECK-NEXT: rw %[[R]][
util.func public @buffer(%arg0: !hal.buffer_view {bwd.donated = "several"}, %arg1: !hal.buffer_view) attributes {iree.reflection = {iree.abi.declaration = "sync func"}} {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c4096 = arith.constant 4096 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %held = util.optimization_barrier %given : !stream.resource<external>
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c4096,
    [1, 2] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c64}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c4096] : !stream.resource<external>{%c4096},
      wo %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0},
      wo %s[%pack#2 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#2 for %c4096] : !stream.resource<transient>{%pack#0},
      rw %r[%c0 for %c64] : !stream.resource<external>{%c64}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  util.return
}

// A result that is as large lies there too, and nothing is left of its own storage but the name.
// CHECK-LABEL: util.func public @result(
// CHECK-SAME: iree.reflection = {bwd.donated = "0", bwd.placed = "0:0:0:16384"}
// CHECK: with(%{{.*}} as %[[A:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[R:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[S:.*]]: !stream.resource<transient>
// CHECK: ro %[[A]][
// CHECK-NEXT: wo %[[S]][
// CHECK: ro %[[S]][
// CHECK-NEXT: wo %[[A]][%{{.*}} for %c16384] : !stream.resource<external>{%c16384}
util.func public @result(%arg0: !hal.buffer_view {bwd.donated = "several"}, %arg1: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c16384 = arith.constant 16384 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %pack:2 = stream.resource.pack slices({
    [0, 1] = %c16384
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c16384}, %result as %r: !stream.resource<external>{%c16384}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c16384] : !stream.resource<external>{%c16384},
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

// Of its size one lies there, where no other may.
// CHECK-LABEL: util.func public @result_one(
// CHECK-SAME: iree.reflection = {bwd.donated = "0", bwd.placed = "0:0:0:16384"}
util.func public @result_one(%arg0: !hal.buffer_view {bwd.donated = "one"}, %arg1: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c16384 = arith.constant 16384 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %pack:2 = stream.resource.pack slices({
    [0, 1] = %c16384
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c16384}, %result as %r: !stream.resource<external>{%c16384}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c16384] : !stream.resource<external>{%c16384},
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

// And none where scratch memory alone may.
// CHECK-LABEL: util.func public @result_none(
// CHECK-NOT: bwd.placed
util.func public @result_none(%arg0: !hal.buffer_view {bwd.donated = "none"}, %arg1: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c16384 = arith.constant 16384 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<4096xf32> in !stream.resource<external>{%c16384}
  %pack:2 = stream.resource.pack slices({
    [0, 1] = %c16384
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c16384}, %result as %r: !stream.resource<external>{%c16384}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c16384] : !stream.resource<external>{%c16384},
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

// What IREE copies to a result may be refused, and then the call is made again: nothing is written over. The function
// says which results these are.
// CHECK-LABEL: util.func public @copied(
// CHECK-SAME: iree.reflection = {bwd.copied = "0"}
// CHECK-NOT: bwd.donated = "{{[0-9]}}
// CHECK: as %[[S:[^:]*]]: !stream.resource<transient>
// CHECK: ro %[[S]][
// CHECK-NEXT: wo %[[S]][
util.func public @copied(%arg0: !hal.buffer_view {bwd.donated = "several"}, %arg1: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %c4096 = arith.constant 4096 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c4096,
    [1, 2] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c64}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c4096] : !stream.resource<external>{%c4096},
      wo %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0},
      wo %s[%pack#2 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.copy %s[%pack#2], %r[%c0], %c64 : !stream.resource<transient>{%pack#0} -> !stream.resource<external>{%c64}
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %result : tensor<16xf32> in !stream.resource<external>{%c64} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}

// In a branch too.
// CHECK-LABEL: util.func public @copied_in_a_branch(
// CHECK-SAME: iree.reflection = {bwd.copied = "1"}
util.func public @copied_in_a_branch(%is_so: i1, %arg0: !hal.buffer_view, %arg1: !hal.buffer_view, %arg2: !hal.buffer_view) -> (!hal.buffer_view, !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c64 = arith.constant 64 : index
  %zero = arith.constant 0 : i32
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %first = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %second = stream.tensor.import consume %arg2 : !hal.buffer_view -> tensor<16xf32> in !stream.resource<external>{%c64}
  %done = stream.cmd.execute with(%given as %a: !stream.resource<external>{%c64}, %first as %r: !stream.resource<external>{%c64}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c64] : !stream.resource<external>{%c64},
      wo %r[%c0 for %c64] : !stream.resource<external>{%c64}
    }
  } => !stream.timepoint
  %filled = scf.if %is_so -> (!stream.timepoint) {
    %now = stream.cmd.execute await(%done) => with(%second as %r: !stream.resource<external>{%c64}) {
      stream.cmd.fill %zero, %r[%c0 for %c64] : i32 -> !stream.resource<external>{%c64}
    } => !stream.timepoint
    scf.yield %now : !stream.timepoint
  } else {
    scf.yield %done : !stream.timepoint
  }
  %one = stream.tensor.export %first : tensor<16xf32> in !stream.resource<external>{%c64} -> !hal.buffer_view
  %ready = stream.timepoint.await %filled => %second : !stream.resource<external>{%c64}
  %other = stream.tensor.export %ready : tensor<16xf32> in !stream.resource<external>{%c64} -> !hal.buffer_view
  util.return %one, %other : !hal.buffer_view, !hal.buffer_view
}

// An argument that is imported twice, or that is handed on, or that nobody gave up is written to by nobody.
// CHECK-LABEL: util.func public @kept(
// CHECK-NOT: bwd.donated = "{{[0-9]}}
// CHECK: as %[[S:[^:]*]]: !stream.resource<transient>
// CHECK: ro %[[S]][
// CHECK-NEXT: wo %[[S]][
util.func public @kept(%arg0: !hal.buffer_view {bwd.donated = "several"}, %arg1: !hal.buffer_view {bwd.donated = "several"}, %arg2: !hal.buffer_view) -> !hal.buffer_view {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %twice = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %again = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %handed = stream.tensor.import %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %theirs = stream.tensor.import %arg2 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c4096,
    [1, 2] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%twice as %a: !stream.resource<external>{%c4096}, %again as %b: !stream.resource<external>{%c4096}, %handed as %c: !stream.resource<external>{%c4096}, %theirs as %d: !stream.resource<external>{%c4096}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c4096] : !stream.resource<external>{%c4096},
      ro %b[%c0 for %c4096] : !stream.resource<external>{%c4096},
      ro %c[%c0 for %c4096] : !stream.resource<external>{%c4096},
      ro %d[%c0 for %c4096] : !stream.resource<external>{%c4096},
      wo %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0},
      wo %s[%pack#2 for %c4096] : !stream.resource<transient>{%pack#0}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %given_back = stream.tensor.export %handed : tensor<1024xf32> in !stream.resource<external>{%c4096} -> !hal.buffer_view
  util.return %given_back : !hal.buffer_view
}
