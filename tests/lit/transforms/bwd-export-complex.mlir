// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-export-complex' | FileCheck %s

// CHECK-LABEL: func.func @both(
// CHECK-SAME: %[[X:[a-z0-9]*]]: tensor<3xcomplex<f32>> {bwd.name = "x"}, %[[Y:[a-z0-9]*]]: tensor<3x2xf32>) -> (tensor<3xcomplex<f32>>, tensor<3x2xf32>)
// CHECK: %[[P:.*]] = "flow.tensor.bitcast"(%[[X]]) {operandSegmentSizes = array<i32: 1, 0, 0>} : (tensor<3xcomplex<f32>>) -> tensor<3x2xf32>
// CHECK: %[[S:.*]] = arith.addf %[[P]], %[[Y]]
// CHECK: %[[Z:.*]] = "flow.tensor.bitcast"(%[[S]]) {operandSegmentSizes = array<i32: 1, 0, 0>} : (tensor<3x2xf32>) -> tensor<3xcomplex<f32>>
// CHECK: return %[[Z]], %[[S]]
func.func @both(%x: tensor<3x2xf32> {bwd.complex, bwd.name = "x"}, %y: tensor<3x2xf32>) -> (tensor<3x2xf32> {bwd.complex}, tensor<3x2xf32>) {
  %s = arith.addf %x, %y : tensor<3x2xf32>
  return %s, %s : tensor<3x2xf32>, tensor<3x2xf32>
}

// -----

// Open sizes are those of what is cast.
// CHECK-LABEL: func.func @open(
// CHECK-SAME: %[[X:[a-z0-9]*]]: tensor<?x4xcomplex<f64>>) -> tensor<?x4xcomplex<f64>>
// CHECK: %[[N:.*]] = tensor.dim %[[X]]
// CHECK: %[[P:.*]] = "flow.tensor.bitcast"(%[[X]], %[[N]], %[[N]]) {operandSegmentSizes = array<i32: 1, 1, 1>} : (tensor<?x4xcomplex<f64>>, index, index) -> tensor<?x4x2xf64>
// CHECK: %[[S:.*]] = arith.addf %[[P]], %[[P]]
// CHECK: %[[M:.*]] = tensor.dim %[[S]]
// CHECK: "flow.tensor.bitcast"(%[[S]], %[[M]], %[[M]])
func.func @open(%x: tensor<?x4x2xf64> {bwd.complex}) -> (tensor<?x4x2xf64> {bwd.complex}) {
  %s = arith.addf %x, %x : tensor<?x4x2xf64>
  return %s : tensor<?x4x2xf64>
}

// -----

// CHECK-LABEL: func.func @plain(
// CHECK-NOT: bitcast
func.func @plain(%x: tensor<3x2xf32>) -> tensor<3x2xf32> {
  return %x : tensor<3x2xf32>
}
