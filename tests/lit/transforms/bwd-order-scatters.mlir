// RUN: retrograd-opt %s --allow-unregistered-dialect -p 'bwd-order-scatters' | FileCheck %s

// CHECK-LABEL: func.func @write(
// CHECK: "tm_tensor.scatter"
// CHECK: unique_indices = false
// CHECK-NOT: unique_indices = true
func.func @write(%x: tensor<9x4xf32>, %rows: tensor<3x1xi64>, %values: tensor<3x1x4xf32>) -> tensor<9x4xf32> {
  %0 = "tm_tensor.scatter"(%values, %rows, %x) ({
  ^bb0(%new: f32, %old: f32):
    "tm_tensor.yield"(%new) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = true}
    : (tensor<3x1x4xf32>, tensor<3x1xi64>, tensor<9x4xf32>) -> tensor<9x4xf32>
  return %0 : tensor<9x4xf32>
}
