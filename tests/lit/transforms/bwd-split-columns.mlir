// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-split-columns' | FileCheck %s

// The gradient of a filter of two taps: each tap's slice is taken again right in front of a product of its own, and the
// products are joined.
// CHECK-LABEL: func.func @taps(
// CHECK-SAME: %[[GO:[a-z0-9]+]]: tensor<6x8xf32>, %[[X:[a-z0-9]+]]: tensor<1x4x9xf32>
// CHECK-NOT: tensor.concat
// CHECK: %[[LEFT:.*]] = tensor.extract_slice %[[X]][0, 0, 0] [1, 4, 8]
// CHECK: %[[TURNED:.*]] = linalg.transpose ins(%[[LEFT]] : tensor<1x4x8xf32>) outs(%{{.*}} : tensor<1x8x4xf32>)
// CHECK: %[[MATRIX:.*]] = tensor.collapse_shape %[[TURNED]] {{\[}}[0, 1], [2]] : tensor<1x8x4xf32> into tensor<8x4xf32>
// CHECK: %[[FIRST:.*]] = linalg.matmul ins(%[[GO]], %[[MATRIX]] : tensor<6x8xf32>, tensor<8x4xf32>) outs(%{{.*}} : tensor<6x4xf32>)
// CHECK: %[[RIGHT:.*]] = tensor.extract_slice %[[X]][0, 0, 1] [1, 4, 8]
// CHECK: %[[SECOND:.*]] = linalg.matmul ins(%[[GO]],
// CHECK: %[[WHOLE:.*]] = tensor.concat dim(1) %[[FIRST]], %[[SECOND]] : (tensor<6x4xf32>, tensor<6x4xf32>) -> tensor<6x8xf32>
// CHECK: return %[[WHOLE]]
func.func @taps(%go: tensor<6x8xf32>, %x: tensor<1x4x9xf32>) -> tensor<6x8xf32> {
  %zero = arith.constant 0.0 : f32
  %left = tensor.extract_slice %x[0, 0, 0] [1, 4, 8] [1, 1, 1] : tensor<1x4x9xf32> to tensor<1x4x8xf32>
  %right = tensor.extract_slice %x[0, 0, 1] [1, 4, 8] [1, 1, 1] : tensor<1x4x9xf32> to tensor<1x4x8xf32>
  %columns = tensor.concat dim(1) %left, %right : (tensor<1x4x8xf32>, tensor<1x4x8xf32>) -> tensor<1x8x8xf32>
  %empty = tensor.empty() : tensor<1x8x8xf32>
  %turned = linalg.transpose ins(%columns : tensor<1x8x8xf32>) outs(%empty : tensor<1x8x8xf32>) permutation = [0, 2, 1]
  %matrix = tensor.collapse_shape %turned [[0, 1], [2]] : tensor<1x8x8xf32> into tensor<8x8xf32>
  %start = tensor.empty() : tensor<6x8xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%start : tensor<6x8xf32>) -> tensor<6x8xf32>
  %0 = linalg.matmul ins(%go, %matrix : tensor<6x8xf32>, tensor<8x8xf32>) outs(%zeros : tensor<6x8xf32>)
      -> tensor<6x8xf32>
  return %0 : tensor<6x8xf32>
}

// -----

// Columns that something else takes too are in memory anyway.
// CHECK-LABEL: func.func @shared(
// CHECK: tensor.concat
// CHECK: linalg.matmul ins({{.*}} : tensor<6x8xf32>, tensor<8x8xf32>)
// CHECK-NOT: tensor.concat
// CHECK: return
func.func @shared(%go: tensor<6x8xf32>, %x: tensor<1x4x8xf32>) -> (tensor<6x8xf32>, tensor<1x8x8xf32>) {
  %zero = arith.constant 0.0 : f32
  %columns = tensor.concat dim(1) %x, %x : (tensor<1x4x8xf32>, tensor<1x4x8xf32>) -> tensor<1x8x8xf32>
  %empty = tensor.empty() : tensor<1x8x8xf32>
  %turned = linalg.transpose ins(%columns : tensor<1x8x8xf32>) outs(%empty : tensor<1x8x8xf32>) permutation = [0, 2, 1]
  %matrix = tensor.collapse_shape %turned [[0, 1], [2]] : tensor<1x8x8xf32> into tensor<8x8xf32>
  %start = tensor.empty() : tensor<6x8xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%start : tensor<6x8xf32>) -> tensor<6x8xf32>
  %0 = linalg.matmul ins(%go, %matrix : tensor<6x8xf32>, tensor<8x8xf32>) outs(%zeros : tensor<6x8xf32>)
      -> tensor<6x8xf32>
  return %0, %columns : tensor<6x8xf32>, tensor<1x8x8xf32>
}

// -----

// What a product that does not start at zero adds to would have to be cut as well.
// CHECK-LABEL: func.func @added(
// CHECK: tensor.concat
// CHECK: linalg.matmul ins({{.*}} : tensor<6x8xf32>, tensor<8x8xf32>)
// CHECK-NOT: tensor.concat
// CHECK: return
func.func @added(%go: tensor<6x8xf32>, %x: tensor<1x4x8xf32>, %to: tensor<6x8xf32>) -> tensor<6x8xf32> {
  %columns = tensor.concat dim(1) %x, %x : (tensor<1x4x8xf32>, tensor<1x4x8xf32>) -> tensor<1x8x8xf32>
  %empty = tensor.empty() : tensor<1x8x8xf32>
  %turned = linalg.transpose ins(%columns : tensor<1x8x8xf32>) outs(%empty : tensor<1x8x8xf32>) permutation = [0, 2, 1]
  %matrix = tensor.collapse_shape %turned [[0, 1], [2]] : tensor<1x8x8xf32> into tensor<8x8xf32>
  %0 = linalg.matmul ins(%go, %matrix : tensor<6x8xf32>, tensor<8x8xf32>) outs(%to : tensor<6x8xf32>)
      -> tensor<6x8xf32>
  return %0 : tensor<6x8xf32>
}

// -----

// Taps of more axes, as those of one row of a large filter are, with two strides in the first piece.
// CHECK-LABEL: func.func @row(
// CHECK-SAME: %[[GO:[a-z0-9]+]]: tensor<6x8xf32>, %[[X:[a-z0-9]+]]: tensor<1x2x3x4x2xf32>, %[[Y:[a-z0-9]+]]: tensor<1x1x3x4x2xf32>
// CHECK: %[[FLAT:.*]] = tensor.collapse_shape %[[X]] {{\[}}[0], [1, 2], [3, 4]] : tensor<1x2x3x4x2xf32> into tensor<1x6x8xf32>
// CHECK: linalg.transpose ins(%[[FLAT]] : tensor<1x6x8xf32>) outs(%{{.*}} : tensor<1x8x6xf32>)
// CHECK: linalg.matmul ins(%[[GO]], %{{.*}} : tensor<6x8xf32>, tensor<8x6xf32>) outs(%{{.*}} : tensor<6x6xf32>)
// CHECK: tensor.collapse_shape %[[Y]] {{\[}}[0], [1, 2], [3, 4]] : tensor<1x1x3x4x2xf32> into tensor<1x3x8xf32>
// CHECK: linalg.matmul ins(%[[GO]], %{{.*}} : tensor<6x8xf32>, tensor<8x3xf32>) outs(%{{.*}} : tensor<6x3xf32>)
// CHECK: tensor.concat dim(1) %{{.*}}, %{{.*}} : (tensor<6x6xf32>, tensor<6x3xf32>) -> tensor<6x9xf32>
func.func @row(%go: tensor<6x8xf32>, %x: tensor<1x2x3x4x2xf32>, %y: tensor<1x1x3x4x2xf32>) -> tensor<6x9xf32> {
  %zero = arith.constant 0.0 : f32
  %taps = tensor.concat dim(1) %x, %y : (tensor<1x2x3x4x2xf32>, tensor<1x1x3x4x2xf32>) -> tensor<1x3x3x4x2xf32>
  %columns = tensor.collapse_shape %taps [[0], [1, 2], [3, 4]] : tensor<1x3x3x4x2xf32> into tensor<1x9x8xf32>
  %empty = tensor.empty() : tensor<1x8x9xf32>
  %turned = linalg.transpose ins(%columns : tensor<1x9x8xf32>) outs(%empty : tensor<1x8x9xf32>) permutation = [0, 2, 1]
  %matrix = tensor.collapse_shape %turned [[0, 1], [2]] : tensor<1x8x9xf32> into tensor<8x9xf32>
  %start = tensor.empty() : tensor<6x9xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%start : tensor<6x9xf32>) -> tensor<6x9xf32>
  %0 = linalg.matmul ins(%go, %matrix : tensor<6x8xf32>, tensor<8x9xf32>) outs(%zeros : tensor<6x9xf32>)
      -> tensor<6x9xf32>
  return %0 : tensor<6x9xf32>
}

// -----

// Positions that are split off the second axis are no columns of one tap after another.
// CHECK-LABEL: func.func @batch(
// CHECK: tensor.concat
// CHECK: linalg.matmul ins({{.*}} : tensor<6x8xf32>, tensor<8x4xf32>)
// CHECK-NOT: tensor.concat
// CHECK: return
func.func @batch(%go: tensor<6x8xf32>, %x: tensor<1x1x4x8xf32>) -> tensor<6x4xf32> {
  %zero = arith.constant 0.0 : f32
  %taps = tensor.concat dim(3) %x : (tensor<1x1x4x8xf32>) -> tensor<1x1x4x8xf32>
  %columns = tensor.collapse_shape %taps [[0, 1], [2], [3]] : tensor<1x1x4x8xf32> into tensor<1x4x8xf32>
  %empty = tensor.empty() : tensor<1x8x4xf32>
  %turned = linalg.transpose ins(%columns : tensor<1x4x8xf32>) outs(%empty : tensor<1x8x4xf32>) permutation = [0, 2, 1]
  %matrix = tensor.collapse_shape %turned [[0, 1], [2]] : tensor<1x8x4xf32> into tensor<8x4xf32>
  %start = tensor.empty() : tensor<6x4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%start : tensor<6x4xf32>) -> tensor<6x4xf32>
  %0 = linalg.matmul ins(%go, %matrix : tensor<6x8xf32>, tensor<8x4xf32>) outs(%zeros : tensor<6x4xf32>)
      -> tensor<6x4xf32>
  return %0 : tensor<6x4xf32>
}

// -----

// Pieces of 128 and of 64 bytes: two of the smaller ones stay joined, which is as much as one of the larger ones.
// CHECK-LABEL: func.func @groups(
// CHECK: linalg.matmul ins({{.*}} : tensor<6x8xf32>, tensor<8x4xf32>)
// CHECK: linalg.matmul ins({{.*}} : tensor<6x8xf32>, tensor<8x4xf32>)
// CHECK: tensor.concat dim(1) {{.*}} : (tensor<6x4xf32>, tensor<6x4xf32>) -> tensor<6x8xf32>
// CHECK: tensor.concat dim(1) {{.*}} : (tensor<1x2x8xf32>, tensor<1x2x8xf32>) -> tensor<1x4x8xf32>
// CHECK: linalg.matmul ins({{.*}} : tensor<6x8xf32>, tensor<8x4xf32>)
// CHECK: linalg.matmul ins({{.*}} : tensor<6x8xf32>, tensor<8x2xf32>)
// CHECK: tensor.concat dim(1) {{.*}} : (tensor<6x4xf32>, tensor<6x2xf32>) -> tensor<6x6xf32>
func.func @groups(%go: tensor<6x8xf32>, %x: tensor<1x4x8xf32>, %y: tensor<1x2x8xf32>)
    -> (tensor<6x8xf32>, tensor<6x6xf32>) {
  %zero = arith.constant 0.0 : f32
  %large = tensor.concat dim(1) %x, %x : (tensor<1x4x8xf32>, tensor<1x4x8xf32>) -> tensor<1x8x8xf32>
  %e0 = tensor.empty() : tensor<1x8x8xf32>
  %t0 = linalg.transpose ins(%large : tensor<1x8x8xf32>) outs(%e0 : tensor<1x8x8xf32>) permutation = [0, 2, 1]
  %m0 = tensor.collapse_shape %t0 [[0, 1], [2]] : tensor<1x8x8xf32> into tensor<8x8xf32>
  %s0 = tensor.empty() : tensor<6x8xf32>
  %z0 = linalg.fill ins(%zero : f32) outs(%s0 : tensor<6x8xf32>) -> tensor<6x8xf32>
  %0 = linalg.matmul ins(%go, %m0 : tensor<6x8xf32>, tensor<8x8xf32>) outs(%z0 : tensor<6x8xf32>) -> tensor<6x8xf32>
  %small = tensor.concat dim(1) %y, %y, %y : (tensor<1x2x8xf32>, tensor<1x2x8xf32>, tensor<1x2x8xf32>) -> tensor<1x6x8xf32>
  %e1 = tensor.empty() : tensor<1x8x6xf32>
  %t1 = linalg.transpose ins(%small : tensor<1x6x8xf32>) outs(%e1 : tensor<1x8x6xf32>) permutation = [0, 2, 1]
  %m1 = tensor.collapse_shape %t1 [[0, 1], [2]] : tensor<1x8x6xf32> into tensor<8x6xf32>
  %s1 = tensor.empty() : tensor<6x6xf32>
  %z1 = linalg.fill ins(%zero : f32) outs(%s1 : tensor<6x6xf32>) -> tensor<6x6xf32>
  %1 = linalg.matmul ins(%go, %m1 : tensor<6x8xf32>, tensor<8x6xf32>) outs(%z1 : tensor<6x6xf32>) -> tensor<6x6xf32>
  return %0, %1 : tensor<6x8xf32>, tensor<6x6xf32>
}
