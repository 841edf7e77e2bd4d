// RUN: iree_compile %s --passes=bwd-pack-scratch | FileCheck %s

// Buffers that are alive at the fullest step lie in storage for results while that holds nothing.

stream.executable private @kernels {
  stream.executable.export public @one
}

// Storage for a result is free until it is written: the first buffer lies there, the second, which the command that
// writes the result reads, in the block.
// CHECK-LABEL: util.func public @result(
// CHECK: alloca uninitialized : !stream.resource<transient>{%c4096{{.*}}} =>
// CHECK: with(%{{.*}} as %[[A:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[R:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[S:.*]]: !stream.resource<transient>
// CHECK: ro %[[A]][
// CHECK-NEXT: wo %[[R]][%{{.*}} for %c4096] : !stream.resource<external>{%c4096}
// CHECK: ro %[[R]][
// CHECK-NEXT: wo %[[S]][
// CHECK: ro %[[S]][
// CHECK-NEXT: wo %[[R]][
util.func public @result(%arg0: !hal.buffer_view, %arg1: !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c4096,
    [1, 2] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c4096}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
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
      wo %r[%c0 for %c4096] : !stream.resource<external>{%c4096}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  util.return
}

// Storage that another region of commands accesses may hold something already: nothing lies there.
// CHECK-LABEL: util.func public @two_regions(
// CHECK: as %[[S:[^:]*]]: !stream.resource<transient>
// CHECK: wo %[[S]][
// CHECK: ro %[[S]][
// CHECK-NEXT: wo %[[S]][
util.func public @two_regions(%arg0: !hal.buffer_view, %arg1: !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c4096,
    [1, 2] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c4096}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
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
      wo %r[%c0 for %c4096] : !stream.resource<external>{%c4096}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %later = stream.cmd.execute await(%freed) => with(%result as %b: !stream.resource<external>{%c4096}) {
    stream.cmd.dispatch @kernels::@one {
      ro %b[%c0 for %c4096] : !stream.resource<external>{%c4096}
    }
  } => !stream.timepoint
  util.return
}

// Storage that is imported twice may hold something of the other import: nothing lies there.
// CHECK-LABEL: util.func public @two_imports(
// CHECK: as %[[S:[^:]*]]: !stream.resource<transient>
// CHECK: wo %[[S]][
// CHECK: ro %[[S]][
// CHECK-NEXT: wo %[[S]][
util.func public @two_imports(%arg0: !hal.buffer_view, %arg1: !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %again = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %pack:3 = stream.resource.pack slices({
    [0, 1] = %c4096,
    [1, 2] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c4096}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
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
      wo %r[%c0 for %c4096] : !stream.resource<external>{%c4096}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  util.return
}

// Storage for results is imported for kernels: what is filled stays in the block. The other buffer is hosted.
// CHECK-LABEL: util.func public @filled(
// CHECK: with(%{{.*}} as %[[A:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[R:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[S:.*]]: !stream.resource<transient>
// CHECK: stream.cmd.fill %{{.*}}, %[[S]][
// CHECK: rw %[[S]][
// CHECK: wo %[[R]][
util.func public @filled(%arg0: !hal.buffer_view, %arg1: !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %c0_i32 = arith.constant 0 : i32
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %pack:3 = stream.resource.pack slices({
    [0, 2] = %c4096,
    [1, 2] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c4096}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.fill %c0_i32, %s[%pack#1 for %c4096] : i32 -> !stream.resource<transient>{%pack#0}
    stream.cmd.dispatch @kernels::@one {
      rw %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0},
      ro %a[%c0 for %c4096] : !stream.resource<external>{%c4096},
      wo %s[%pack#2 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0},
      ro %s[%pack#2 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      wo %r[%c0 for %c4096] : !stream.resource<external>{%c4096}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  util.return
}

// A command of the same group writes the result: nothing lies there.
// CHECK-LABEL: util.func public @at_the_same_time(
// CHECK: as %[[S:[^:]*]]: !stream.resource<transient>
// CHECK: wo %[[S]][
util.func public @at_the_same_time(%arg0: !hal.buffer_view, %arg1: !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %pack:2 = stream.resource.pack slices({
    [0, 1] = %c4096
  }) : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c4096}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.concurrent {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c4096] : !stream.resource<external>{%c4096},
      wo %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      wo %r[%c0 for %c4096] : !stream.resource<external>{%c4096}
    }
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%pack#1 for %c4096] : !stream.resource<transient>{%pack#0}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  util.return
}

// A place within a buffer goes with it.
// CHECK-LABEL: util.func public @part(
// CHECK-DAG: %[[HALF:.*]] = arith.constant 2048 : index
// CHECK: with(%{{.*}} as %[[A:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[R:.*]]: !stream.resource<external>{{.*}}, %{{.*}} as %[[S:.*]]: !stream.resource<transient>
// CHECK: wo %[[R]][%c2048{{.*}} for %c2048]
// CHECK-NEXT: wo %[[R]][%c0{{.*}} for %c2048]
util.func public @part(%arg0: !hal.buffer_view, %arg1: !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c4096 = arith.constant 4096 : index
  %c2048 = arith.constant 2048 : index
  %given = stream.tensor.import %arg0 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %result = stream.tensor.import consume %arg1 : !hal.buffer_view -> tensor<1024xf32> in !stream.resource<external>{%c4096}
  %pack:2 = stream.resource.pack slices({
    [0, 1] = %c4096
  }) : index
  %half = arith.addi %pack#1, %c2048 : index
  %scratch, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%pack#0} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %a: !stream.resource<external>{%c4096}, %result as %r: !stream.resource<external>{%c4096}, %scratch as %s: !stream.resource<transient>{%pack#0}) {
    stream.cmd.dispatch @kernels::@one {
      ro %a[%c0 for %c4096] : !stream.resource<external>{%c4096},
      wo %s[%half for %c2048] : !stream.resource<transient>{%pack#0},
      wo %s[%pack#1 for %c2048] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      ro %s[%half for %c2048] : !stream.resource<transient>{%pack#0}
    }
    stream.cmd.dispatch @kernels::@one {
      wo %r[%c0 for %c4096] : !stream.resource<external>{%c4096}
    }
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %scratch : !stream.resource<transient>{%pack#0} => !stream.timepoint
  util.return
}
