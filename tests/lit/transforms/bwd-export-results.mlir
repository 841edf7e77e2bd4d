// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-export-results' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-export-results{twins-alone=true}' | FileCheck %s --check-prefix=ALONE
// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-export-results{donates=true}' | FileCheck %s --check-prefix=DONATES
// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-export-results{donates=true keeps-residuals=true}' | FileCheck %s --check-prefix=KEEPS
// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-export-results{writes-joined=true}' | FileCheck %s --check-prefix=JOINED

// ALONE-NOT: func.func @chain(
// ALONE: func.func @chain_into(
// ALONE-NOT: func.func @chain(
// The function stays; in its twin the result goes to storage where it is computed, and is read from there.
// CHECK-LABEL: func.func @chain(%arg0: tensor<2xf32> {bwd.name = "x"}) -> (tensor<2xf32> {bwd.name = "e"}, tensor<2xf32> {bwd.name = "n"}) {
// CHECK-NEXT: %[[E:.*]] = math.exp %arg0
// CHECK-NEXT: %[[N:.*]] = arith.negf %[[E]]
// CHECK-NEXT: return %[[E]], %[[N]]
// CHECK-LABEL: func.func @chain_into(
// CHECK-SAME: %arg0: tensor<2xf32> {bwd.name = "x"}, %[[TO_E:.*]]: !hal.buffer_view, %[[TO_N:.*]]: !hal.buffer_view) -> (tensor<2xf32> {bwd.name = "e"}, tensor<2xf32> {bwd.name = "n"}) {
// CHECK-NEXT: %[[E:.*]] = math.exp %arg0
// CHECK-NEXT: %[[STORED_E:.*]] = "hal.tensor.alias"(%[[E]], %[[TO_E]]) {operandSegmentSizes = array<i32: 1, 0, 1, 0>} : (tensor<2xf32>, !hal.buffer_view) -> tensor<2xf32>
// CHECK-NEXT: %[[N:.*]] = arith.negf %[[STORED_E]]
// CHECK-NEXT: %[[STORED_N:.*]] = "hal.tensor.alias"(%[[N]], %[[TO_N]])
// CHECK-NEXT: return %[[STORED_E]], %[[STORED_N]]
func.func @chain(%x: tensor<2xf32> {bwd.name = "x"}) -> (tensor<2xf32> {bwd.name = "e"}, tensor<2xf32> {bwd.name = "n"}) {
  %e = math.exp %x : tensor<2xf32>
  %n = arith.negf %e : tensor<2xf32>
  return %e, %n : tensor<2xf32>, tensor<2xf32>
}

// -----

// An argument that is returned, and a result that is returned twice: each storage gets a copy of its own.
// CHECK-LABEL: func.func @copies_into(
// CHECK-SAME: %[[X:.*]]: tensor<2xf32>, %[[A:.*]]: !hal.buffer_view, %[[B:.*]]: !hal.buffer_view, %[[C:.*]]: !hal.buffer_view)
// CHECK-DAG: %[[STORED_A:.*]] = "hal.tensor.alias"(%[[X]], %[[A]])
// CHECK-DAG: %[[E:.*]] = math.exp %[[X]]
// CHECK-DAG: %[[STORED_B:.*]] = "hal.tensor.alias"(%[[E]], %[[B]])
// CHECK-DAG: %[[STORED_C:.*]] = "hal.tensor.alias"(%[[STORED_B]], %[[C]])
// CHECK: return %[[STORED_A]], %[[STORED_B]], %[[STORED_C]]
func.func @copies(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>, tensor<2xf32>) {
  %e = math.exp %x : tensor<2xf32>
  return %x, %e, %e : tensor<2xf32>, tensor<2xf32>, tensor<2xf32>
}

// -----

// A constant is put into its storage where it is returned: an update of it would otherwise be written there as well.
// CHECK-LABEL: func.func @constants_into(
// CHECK-SAME: %[[X:.*]]: tensor<1xf32>, %[[A:.*]]: !hal.buffer_view, %[[B:.*]]: !hal.buffer_view)
// CHECK: %[[ZEROS:.*]] = linalg.fill
// CHECK-NEXT: %[[UPDATED:.*]] = tensor.insert_slice %[[X]] into %[[ZEROS]]
// CHECK-NEXT: %[[STORED_B:.*]] = "hal.tensor.alias"(%[[UPDATED]], %[[B]])
// CHECK-NEXT: %[[STORED_A:.*]] = "hal.tensor.alias"(%[[ZEROS]], %[[A]])
// CHECK-NEXT: return %[[STORED_A]], %[[STORED_B]]
func.func @constants(%x: tensor<1xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<2xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<2xf32>) -> tensor<2xf32>
  %updated = tensor.insert_slice %x into %zeros[0] [1] [1] : tensor<1xf32> into tensor<2xf32>
  return %zeros, %updated : tensor<2xf32>, tensor<2xf32>
}

// -----

// Sizes that are not known are read from the value itself.
// CHECK-LABEL: func.func @sizes_into(
// CHECK-SAME: %[[X:.*]]: tensor<?x3xf32>, %[[A:.*]]: !hal.buffer_view, %[[B:.*]]: !hal.buffer_view)
// CHECK-NEXT: %[[ZERO:.*]] = arith.constant 0 : index
// CHECK-NEXT: %[[ROWS:.*]] = tensor.dim %[[X]], %[[ZERO]]
// CHECK-NEXT: %[[STORED_A:.*]] = "hal.tensor.alias"(%[[X]], %[[ROWS]], %[[A]]) {operandSegmentSizes = array<i32: 1, 1, 1, 0>}
// CHECK-NEXT: %[[E:.*]] = math.exp %[[X]]
// CHECK-NEXT: %[[ZERO:.*]] = arith.constant 0 : index
// CHECK-NEXT: %[[ROWS:.*]] = tensor.dim %[[E]], %[[ZERO]]
// CHECK-NEXT: %[[STORED_B:.*]] = "hal.tensor.alias"(%[[E]], %[[ROWS]], %[[B]])
// CHECK-NEXT: return %[[STORED_A]], %[[STORED_B]]
func.func @sizes(%x: tensor<?x3xf32>) -> (tensor<?x3xf32>, tensor<?x3xf32>) {
  %e = math.exp %x : tensor<?x3xf32>
  return %x, %e : tensor<?x3xf32>, tensor<?x3xf32>
}

// -----

// Without results the twin has no storage; what has no body has no twin.
// CHECK-LABEL: func.func @nothing()
// CHECK-LABEL: func.func @nothing_into() {
// CHECK-NEXT: return
// CHECK: func.func private @elsewhere
// CHECK-NOT: @elsewhere_into
func.func @nothing() {
  return
}
func.func private @elsewhere(tensor<2xf32>) -> tensor<2xf32>

// -----

// What is scattered into zeros is scattered into its storage, filled with zeros of its own.
// CHECK-LABEL: func.func @scattered_into(
// CHECK-SAME: %{{.*}}: tensor<3x1x2xf32>, %{{.*}}: tensor<3x1xi64>, %[[A:.*]]: !hal.buffer_view)
// CHECK: %[[ZERO:.*]] = "util.optimization_barrier"(%{{.*}}) : (f32) -> f32
// CHECK: %[[OWN:.*]] = linalg.fill ins(%[[ZERO]] : f32)
// CHECK-NEXT: %[[STORED:.*]] = "hal.tensor.alias"(%[[OWN]], %[[A]])
// CHECK-NEXT: %[[SUM:.*]] = "tm_tensor.scatter"(%{{.*}}, %{{.*}}, %[[STORED]])
// CHECK: return %[[SUM]]
func.func @scattered(%x: tensor<3x1x2xf32>, %i: tensor<3x1xi64>) -> tensor<9x2xf32> {
  %zeros = arith.constant dense<0.0> : tensor<9x2xf32>
  %sum = "tm_tensor.scatter"(%x, %i, %zeros) ({
  ^bb0(%update: f32, %old: f32):
    %s = arith.addf %old, %update : f32
    "tm_tensor.yield"(%s) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<3x1x2xf32>, tensor<3x1xi64>, tensor<9x2xf32>) -> tensor<9x2xf32>
  return %sum : tensor<9x2xf32>
}

// -----

// One that something else reads, or that is scattered into other values, is aliased where it is computed.
// CHECK-LABEL: func.func @read_again_into(
// CHECK-SAME: %{{.*}}: !hal.buffer_view
// CHECK: %[[SUM:.*]] = "tm_tensor.scatter"(%{{.*}}, %{{.*}}, %cst)
// CHECK: %[[STORED:.*]] = "hal.tensor.alias"(%[[SUM]], %
// CHECK: %[[OTHER:.*]] = "tm_tensor.scatter"(%{{.*}}, %{{.*}}, %[[STORED]])
// CHECK: "hal.tensor.alias"(%[[OTHER]], %
func.func @read_again(%x: tensor<3x1x2xf32>, %i: tensor<3x1xi64>) -> (tensor<9x2xf32>, tensor<9x2xf32>) {
  %zeros = arith.constant dense<0.0> : tensor<9x2xf32>
  %sum = "tm_tensor.scatter"(%x, %i, %zeros) ({
  ^bb0(%update: f32, %old: f32):
    %s = arith.addf %old, %update : f32
    "tm_tensor.yield"(%s) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<3x1x2xf32>, tensor<3x1xi64>, tensor<9x2xf32>) -> tensor<9x2xf32>
  %other = "tm_tensor.scatter"(%x, %i, %sum) ({
  ^bb0(%update: f32, %old: f32):
    %s = arith.addf %old, %update : f32
    "tm_tensor.yield"(%s) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<3x1x2xf32>, tensor<3x1xi64>, tensor<9x2xf32>) -> tensor<9x2xf32>
  return %sum, %other : tensor<9x2xf32>, tensor<9x2xf32>
}

// -----

// Callers give up the tangents of the backward, and residuals that are no outputs; of no other function anything. What
// the forward gives may lie behind others.
// With keeps-residuals of the backward nothing either.
// KEEPS-LABEL: func.func @backward_into(
// KEEPS-NOT: bwd.donated
// DONATES-LABEL: func.func @backward(
// DONATES-NOT: bwd.donated
// DONATES: func.func @backward_into(
// DONATES-SAME: %arg0: tensor<2xf32> {bwd.name = "w", bwd.role = "param"}
// DONATES-SAME: %arg1: tensor<2xf32> {bwd.donated = "joined", bwd.name = "saved.exp", bwd.role = "saved"}
// DONATES-SAME: %arg2: tensor<2xf32> {bwd.name = "output", bwd.role = "saved"}
// DONATES-SAME: %arg3: tensor<2xf32> {bwd.donated = "several", bwd.name = "tangent.output", bwd.role = "tangent"}
// DONATES-SAME: %arg4: !hal.buffer_view)
func.func @backward(%w: tensor<2xf32> {bwd.name = "w", bwd.role = "param"}, %exp: tensor<2xf32> {bwd.name = "saved.exp", bwd.role = "saved"}, %out: tensor<2xf32> {bwd.name = "output", bwd.role = "saved"}, %t: tensor<2xf32> {bwd.name = "tangent.output", bwd.role = "tangent"}) -> tensor<2xf32> {
  %a = arith.mulf %exp, %t : tensor<2xf32>
  %b = arith.mulf %a, %out : tensor<2xf32>
  %c = arith.mulf %b, %w : tensor<2xf32>
  return %c : tensor<2xf32>
}

// DONATES-LABEL: func.func @forward_into(
// DONATES-NOT: bwd.donated
func.func @forward(%x: tensor<2xf32> {bwd.name = "saved.x", bwd.role = "saved"}) -> tensor<2xf32> {
  %c = math.exp %x : tensor<2xf32>
  return %c : tensor<2xf32>
}

// -----

// Not beside a second tangent: of a loss without that output another backward takes the residuals.
// DONATES-LABEL: func.func @backward_into(
// DONATES-SAME: %arg0: tensor<2xf32> {bwd.donated = "several", bwd.name = "saved.exp", bwd.role = "saved"}
func.func @backward(%exp: tensor<2xf32> {bwd.name = "saved.exp", bwd.role = "saved"}, %t: tensor<2xf32> {bwd.name = "tangent.a", bwd.role = "tangent"}, %u: tensor<2xf32> {bwd.name = "tangent.b", bwd.role = "tangent"}) -> tensor<2xf32> {
  %a = arith.mulf %exp, %t : tensor<2xf32>
  %b = arith.mulf %a, %u : tensor<2xf32>
  return %b : tensor<2xf32>
}
func.func @forward(%x: tensor<2xf32> {bwd.name = "x", bwd.role = "input"}) -> tensor<2xf32> {
  %c = math.exp %x : tensor<2xf32>
  return %c : tensor<2xf32>
}

// -----

// Such a backward gives up nothing where they lie as the first one takes them.
// DONATES-LABEL: func.func @backward_into(
// DONATES-NOT: bwd.donated
// DONATES: return
module attributes {bwd.joined} {
  func.func @backward(%exp: tensor<2xf32> {bwd.name = "saved.exp", bwd.role = "saved"}, %t: tensor<2xf32> {bwd.name = "tangent.a", bwd.role = "tangent"}) -> tensor<2xf32> {
    %a = arith.mulf %exp, %t : tensor<2xf32>
    return %a : tensor<2xf32>
  }
}

// -----

// What a plan frees after a stage and nobody else has is given up, if the stage takes it once; parameters are not.
// DONATES-LABEL: func.func @stage_0_into(
// DONATES-SAME: %arg0: tensor<2xf32> {bwd.name = "w", bwd.role = "param"}
// DONATES-SAME: %arg1: tensor<2xf32> {bwd.donated = "one"}
// DONATES-SAME: %arg2: tensor<2xf32>, %arg3: tensor<2xf32>, %arg4: tensor<2xf32>, %arg5: !hal.buffer_view)
module attributes {bwd.plan = {
    arguments = ["w", "t", "u", "v"], results = ["g"],
    steps = [
      {arguments = ["w", "t", "u", "u", "v"], function = "stage_0", results = ["a"], step = "run_stage"},
      {step = "free", values = ["w", "t", "u"]},
      {arguments = ["a", "v"], function = "stage_1", results = ["g"], step = "run_stage"}
    ]}} {
  func.func @stage_0(%w: tensor<2xf32> {bwd.name = "w", bwd.role = "param"}, %t: tensor<2xf32>, %u: tensor<2xf32>, %again: tensor<2xf32>, %v: tensor<2xf32>) -> tensor<2xf32> {
    %a = arith.mulf %t, %u : tensor<2xf32>
    %b = arith.mulf %a, %again : tensor<2xf32>
    %c = arith.mulf %b, %v : tensor<2xf32>
    %d = arith.mulf %c, %w : tensor<2xf32>
    return %d : tensor<2xf32>
  }
  func.func @stage_1(%a: tensor<2xf32>, %v: tensor<2xf32>) -> tensor<2xf32> {
    %c = arith.mulf %a, %v : tensor<2xf32>
    return %c : tensor<2xf32>
  }
}

// -----

// What one stage gave another is no residual, whatever its role is; with keeps-residuals it is all that is given up.
// DONATES-LABEL: func.func @second_into(
// DONATES-SAME: %arg0: tensor<2xf32> {bwd.donated = "one", bwd.name = "a", bwd.role = "saved"}
// DONATES-SAME: %arg1: tensor<2xf32> {bwd.donated = "one", bwd.name = "saved.r", bwd.role = "saved"}
// DONATES-SAME: %arg2: tensor<2xf32> {bwd.name = "output", bwd.role = "saved"}
// KEEPS-LABEL: func.func @first_into(
// KEEPS-NOT: bwd.donated
// KEEPS-LABEL: func.func @second_into(
// KEEPS-SAME: %arg0: tensor<2xf32> {bwd.donated = "none", bwd.name = "a", bwd.role = "saved"}
// KEEPS-SAME: %arg1: tensor<2xf32> {bwd.name = "saved.r", bwd.role = "saved"}
// KEEPS-SAME: %arg2: tensor<2xf32> {bwd.name = "output", bwd.role = "saved"}
module attributes {bwd.plan = {
    arguments = ["t", "r", "o"], results = ["g"],
    steps = [
      {arguments = ["t"], function = "first", results = ["a"], step = "run_stage"},
      {step = "free", values = ["t"]},
      {arguments = ["a", "r", "o"], function = "second", results = ["g"], step = "run_stage"},
      {step = "free", values = ["a", "r", "o"]}
    ]}} {
  func.func @first(%t: tensor<2xf32> {bwd.name = "tangent.output", bwd.role = "tangent"}) -> tensor<2xf32> {
    %a = math.exp %t : tensor<2xf32>
    return %a : tensor<2xf32>
  }
  func.func @second(%a: tensor<2xf32> {bwd.name = "a", bwd.role = "saved"}, %r: tensor<2xf32> {bwd.name = "saved.r", bwd.role = "saved"}, %o: tensor<2xf32> {bwd.name = "output", bwd.role = "saved"}) -> tensor<2xf32> {
    %b = arith.mulf %a, %r : tensor<2xf32>
    %c = arith.mulf %b, %o : tensor<2xf32>
    return %c : tensor<2xf32>
  }
}

// -----

// A result that is put together from pieces, and read: a kernel writes it, by a zero behind a barrier.
// JOINED-LABEL: func.func @rolled_into(
// JOINED-SAME: %[[A:.*]]: tensor<2xf32>, %[[B:.*]]: tensor<3xf32>, %[[TO_R:.*]]: !hal.buffer_view, %[[TO_N:.*]]: !hal.buffer_view)
// JOINED: %[[R:.*]] = tensor.concat dim(0) %[[A]], %[[B]]
// JOINED-DAG: %[[ZERO:.*]] = arith.constant -0.000000e+00 : f32
// JOINED-DAG: %[[HIDDEN:.*]] = "util.optimization_barrier"(%[[ZERO]])
// JOINED: %[[WRITTEN:.*]] = linalg.generic {{.*}} ins(%[[R]], %[[HIDDEN]] : tensor<5xf32>, f32)
// JOINED: arith.addf
// JOINED: %[[STORED:.*]] = "hal.tensor.alias"(%[[WRITTEN]], %[[TO_R]])
// JOINED: math.exp %[[STORED]]
// Without the option it is stored as it comes.
// CHECK-LABEL: func.func @rolled_into(
// CHECK: %[[R:.*]] = tensor.concat
// CHECK-NEXT: "hal.tensor.alias"(%[[R]],
func.func @rolled(%a: tensor<2xf32>, %b: tensor<3xf32>) -> (tensor<5xf32>, tensor<5xf32>) {
  %r = tensor.concat dim(0) %a, %b : (tensor<2xf32>, tensor<3xf32>) -> tensor<5xf32>
  %n = math.exp %r : tensor<5xf32>
  return %r, %n : tensor<5xf32>, tensor<5xf32>
}

// -----

// The zero of 16 bits is an integer on the host, where IREE holds no such float.
// JOINED-LABEL: func.func @half_rolled_into(
// JOINED-DAG: %[[ZERO:.*]] = arith.constant -32768 : i16
// JOINED-DAG: %[[HIDDEN:.*]] = "util.optimization_barrier"(%[[ZERO]])
// JOINED: linalg.generic {{.*}} ins(%{{.*}}, %[[HIDDEN]] : tensor<5xbf16>, i16)
// JOINED: ^bb0(%[[X:.*]]: bf16, %[[BITS:.*]]: i16,
// JOINED: %[[NOTHING:.*]] = arith.bitcast %[[BITS]] : i16 to bf16
// JOINED: arith.addf %[[X]], %[[NOTHING]] : bf16
func.func @half_rolled(%a: tensor<2xbf16>, %b: tensor<3xbf16>) -> (tensor<5xbf16>, tensor<5xbf16>) {
  %r = tensor.concat dim(0) %a, %b : (tensor<2xbf16>, tensor<3xbf16>) -> tensor<5xbf16>
  %n = math.exp %r : tensor<5xbf16>
  return %r, %n : tensor<5xbf16>, tensor<5xbf16>
}

// -----

// What nothing else reads, and what holds integers, is stored as it comes.
// JOINED-LABEL: func.func @unread_into(
// JOINED-NOT: linalg.generic
// JOINED: return
func.func @unread(%a: tensor<2xf32>, %b: tensor<3xf32>, %i: tensor<2xi64>) -> (tensor<5xf32>, tensor<4xi64>, tensor<4xi64>) {
  %r = tensor.concat dim(0) %a, %b : (tensor<2xf32>, tensor<3xf32>) -> tensor<5xf32>
  %k = tensor.concat dim(0) %i, %i : (tensor<2xi64>, tensor<2xi64>) -> tensor<4xi64>
  %n = arith.addi %k, %k : tensor<4xi64>
  return %r, %k, %n : tensor<5xf32>, tensor<4xi64>, tensor<4xi64>
}
