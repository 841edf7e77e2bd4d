// RUN: retrograd-opt %s --split-input-file -p 'bwd-stack-joins' | FileCheck %s

// Halves of rows.
// CHECK-LABEL: func.func @halves(
// CHECK-SAME: %[[A:.*]]: tensor<4x8xf32>, %[[B:.*]]: tensor<4x8xf32>)
// CHECK: %[[FIRST:.*]] = tensor.expand_shape %[[A]] {{\[}}[0, 1], [2]] output_shape [1, 4, 8]
// CHECK: %[[SECOND:.*]] = tensor.expand_shape %[[B]] {{\[}}[0, 1], [2]] output_shape [1, 4, 8]
// CHECK: %[[ALL:.*]] = tensor.concat dim(0) %[[FIRST]], %[[SECOND]]
// CHECK: %[[TURNED:.*]] = linalg.transpose ins(%[[ALL]] : tensor<2x4x8xf32>) outs(%{{.*}} : tensor<4x2x8xf32>) permutation = [1, 0, 2]
// CHECK: %[[JOINED:.*]] = tensor.collapse_shape %[[TURNED]] {{\[}}[0], [1, 2]] : tensor<4x2x8xf32> into tensor<4x16xf32>
// CHECK: return %[[JOINED]]
func.func @halves(%a: tensor<4x8xf32>, %b: tensor<4x8xf32>) -> tensor<4x16xf32> {
  %joined = tensor.concat dim(1) %a, %b : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x16xf32>
  return %joined : tensor<4x16xf32>
}

// -----

// Three of them, along an axis in the middle.
// CHECK-LABEL: func.func @middle(
// CHECK: tensor.concat dim(0) %{{.*}}, %{{.*}}, %{{.*}} : (tensor<1x2x3x5xbf16>, tensor<1x2x3x5xbf16>, tensor<1x2x3x5xbf16>) -> tensor<3x2x3x5xbf16>
// CHECK: linalg.transpose ins(%{{.*}} : tensor<3x2x3x5xbf16>) outs(%{{.*}} : tensor<2x3x3x5xbf16>) permutation = [1, 0, 2, 3]
// CHECK: tensor.collapse_shape %{{.*}} {{\[}}[0], [1, 2], [3]] : tensor<2x3x3x5xbf16> into tensor<2x9x5xbf16>
func.func @middle(%a: tensor<2x3x5xbf16>, %b: tensor<2x3x5xbf16>) -> tensor<2x9x5xbf16> {
  %joined = tensor.concat dim(1) %a, %b, %a : (tensor<2x3x5xbf16>, tensor<2x3x5xbf16>, tensor<2x3x5xbf16>) -> tensor<2x9x5xbf16>
  return %joined : tensor<2x9x5xbf16>
}

// -----

// Each lies in one piece already.
// CHECK-LABEL: func.func @outermost(
// CHECK: tensor.concat dim(0)
// CHECK: tensor.concat dim(1)
// CHECK-NOT: linalg.transpose
func.func @outermost(%a: tensor<4x8xf32>, %b: tensor<1x8xf32>) -> (tensor<8x8xf32>, tensor<1x16xf32>) {
  %rows = tensor.concat dim(0) %a, %a : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
  %columns = tensor.concat dim(1) %b, %b : (tensor<1x8xf32>, tensor<1x8xf32>) -> tensor<1x16xf32>
  return %rows, %columns : tensor<8x8xf32>, tensor<1x16xf32>
}

// -----

// What differs in size, or has an open one, is joined as it was.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: linalg.transpose
func.func @others(%a: tensor<4x8xf32>, %b: tensor<4x7xf32>, %c: tensor<?x8xf32>) -> (tensor<4x15xf32>, tensor<?x16xf32>) {
  %other = tensor.concat dim(1) %a, %b : (tensor<4x8xf32>, tensor<4x7xf32>) -> tensor<4x15xf32>
  %open = tensor.concat dim(1) %c, %c : (tensor<?x8xf32>, tensor<?x8xf32>) -> tensor<?x16xf32>
  return %other, %open : tensor<4x15xf32>, tensor<?x16xf32>
}
