// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-combine-scatters' | FileCheck %s

// CHECK-LABEL: func.func @rows(
// CHECK: %[[FLAT:.*]] = tensor.collapse_shape %arg0 {{\[\[}}0], [1, 2]] : tensor<5x1x4xf32> into tensor<5x4xf32>
// CHECK: %[[PLACES:.*]] = tensor.extract_slice %arg1[0, 0] [5, 1] [1, 1] : tensor<5x1xi64> to tensor<5xi64>
// CHECK: %[[SUMS:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "reduction"]}
// CHECK-SAME: ins(%[[PLACES]], %[[PLACES]], %[[FLAT]] : tensor<5xi64>, tensor<5xi64>, tensor<5x4xf32>)
// CHECK: %[[SAME:.*]] = arith.cmpi eq
// CHECK: %[[OWN:.*]] = arith.select %[[SAME]]
// CHECK: arith.addf %{{.*}}, %[[OWN]]
// CHECK: %[[SHAPED:.*]] = tensor.expand_shape %[[SUMS]]
// CHECK: "tm_tensor.scatter"(%[[SHAPED]], %arg1, %{{.*}})
// CHECK-NEXT: ^bb0(%[[NEW:.*]]: f32, %{{.*}}: f32):
// CHECK-NEXT: "tm_tensor.yield"(%[[NEW]])
// CHECK: unique_indices = true
func.func @rows(%x: tensor<5x1x4xf32>, %rows: tensor<5x1xi64>) -> tensor<9x4xf32> {
  %zeros = arith.constant dense<0.0> : tensor<9x4xf32>
  %0 = "tm_tensor.scatter"(%x, %rows, %zeros) ({
  ^bb0(%new: f32, %old: f32):
    %sum = arith.addf %old, %new : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<5x1x4xf32>, tensor<5x1xi64>, tensor<9x4xf32>) -> tensor<9x4xf32>
  return %0 : tensor<9x4xf32>
}

// -----

// Single numbers, each at a row and a column.
// CHECK-LABEL: func.func @numbers(
// CHECK: linalg.generic {{.*}} iterator_types = ["parallel", "reduction"]}
// CHECK: %[[ROW:.*]] = arith.cmpi eq
// CHECK: %[[COLUMN:.*]] = arith.cmpi eq
// CHECK: %[[BOTH:.*]] = arith.andi %[[ROW]], %[[COLUMN]] : i1
// CHECK: arith.select %[[BOTH]]
// CHECK: arith.addi
// CHECK: unique_indices = true
func.func @numbers(%x: tensor<7x1x1xi32>, %places: tensor<7x2xi64>) -> tensor<3x4xi32> {
  %zero = arith.constant 0 : i32
  %empty = tensor.empty() : tensor<3x4xi32>
  %zeros = linalg.fill ins(%zero : i32) outs(%empty : tensor<3x4xi32>) -> tensor<3x4xi32>
  %0 = "tm_tensor.scatter"(%x, %places, %zeros) ({
  ^bb0(%new: i32, %old: i32):
    %sum = arith.addi %old, %new : i32
    "tm_tensor.yield"(%sum) : (i32) -> ()
  }) {dimension_map = array<i64: 0, 1>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<7x1x1xi32>, tensor<7x2xi64>, tensor<3x4xi32>) -> tensor<3x4xi32>
  return %0 : tensor<3x4xi32>
}

// -----

// What is not zero, not added up, or has no second update for a place, stays as it is.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: linalg.generic
// CHECK: return
func.func @others(%x: tensor<5x1x4xf32>, %rows: tensor<5x1xi64>, %table: tensor<9x4xf32>)
    -> (tensor<9x4xf32>, tensor<9x4xf32>, tensor<9x4xf32>, tensor<9x4xf32>) {
  %zeros = arith.constant dense<0.0> : tensor<9x4xf32>
  %ones = arith.constant dense<1.0> : tensor<9x4xf32>
  %0 = "tm_tensor.scatter"(%x, %rows, %table) ({
  ^bb0(%new: f32, %old: f32):
    %sum = arith.addf %old, %new : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<5x1x4xf32>, tensor<5x1xi64>, tensor<9x4xf32>) -> tensor<9x4xf32>
  %1 = "tm_tensor.scatter"(%x, %rows, %ones) ({
  ^bb0(%new: f32, %old: f32):
    %sum = arith.addf %old, %new : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<5x1x4xf32>, tensor<5x1xi64>, tensor<9x4xf32>) -> tensor<9x4xf32>
  %2 = "tm_tensor.scatter"(%x, %rows, %zeros) ({
  ^bb0(%new: f32, %old: f32):
    %largest = arith.maximumf %old, %new : f32
    "tm_tensor.yield"(%largest) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<5x1x4xf32>, tensor<5x1xi64>, tensor<9x4xf32>) -> tensor<9x4xf32>
  %3 = "tm_tensor.scatter"(%x, %rows, %zeros) ({
  ^bb0(%new: f32, %old: f32):
    %sum = arith.addf %old, %new : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = true}
    : (tensor<5x1x4xf32>, tensor<5x1xi64>, tensor<9x4xf32>) -> tensor<9x4xf32>
  return %0, %1, %2, %3 : tensor<9x4xf32>, tensor<9x4xf32>, tensor<9x4xf32>, tensor<9x4xf32>
}

// -----

// Zeros in storage that the caller gives are zeros too.
// CHECK-LABEL: func.func @stored(
// CHECK: linalg.generic {{.*}} iterator_types = ["parallel", "reduction"]}
// CHECK: unique_indices = true
func.func @stored(%x: tensor<5x1xf32>, %rows: tensor<5x1xi64>, %storage: !hal.buffer_view) -> tensor<9xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<9xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<9xf32>) -> tensor<9xf32>
  %stored = "hal.tensor.alias"(%zeros, %storage) {operandSegmentSizes = array<i32: 1, 0, 1, 0>}
      : (tensor<9xf32>, !hal.buffer_view) -> tensor<9xf32>
  %0 = "tm_tensor.scatter"(%x, %rows, %stored) ({
  ^bb0(%new: f32, %old: f32):
    %sum = arith.addf %old, %new : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = false}
    : (tensor<5x1xf32>, tensor<5x1xi64>, tensor<9xf32>) -> tensor<9xf32>
  return %0 : tensor<9xf32>
}
