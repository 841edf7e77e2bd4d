// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-share-matrices' | FileCheck %s

// The weights of a convolution, once for each image: the product takes them as they are.
// CHECK-DAG: #[[W:.*]] = affine_map<(d0, d1, d2, d3) -> (d1, d3)>
// CHECK-DAG: #[[X:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d3, d2)>
// CHECK-DAG: #[[Y:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2)>
// CHECK-LABEL: func.func @weights(
// CHECK-SAME: %[[WEIGHT:.*]]: tensor<1x16x32xf32>, %[[IMAGES:.*]]: tensor<8x32x4xf32>,
// CHECK: %[[MATRIX:.*]] = tensor.collapse_shape %[[WEIGHT]] {{\[\[}}0, 1], [2]] : tensor<1x16x32xf32> into tensor<16x32xf32>
// CHECK: linalg.batch_matmul indexing_maps = [#[[W]], #[[X]], #[[Y]]] ins(%[[MATRIX]], %[[IMAGES]] : tensor<16x32xf32>, tensor<8x32x4xf32>)
#one = affine_map<(b, g, m, k) -> (0, m, k)>
#all = affine_map<(b, g, m, k) -> (b, g, m, k)>
func.func @weights(%w: tensor<1x16x32xf32>, %x: tensor<8x32x4xf32>, %y: tensor<8x16x4xf32>) -> tensor<8x16x4xf32> {
  %0 = tensor.empty() : tensor<8x1x16x32xf32>
  %1 = linalg.generic {indexing_maps = [#one, #all], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%w : tensor<1x16x32xf32>) outs(%0 : tensor<8x1x16x32xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<8x1x16x32xf32>
  %2 = tensor.collapse_shape %1 [[0], [1, 2], [3]] : tensor<8x1x16x32xf32> into tensor<8x16x32xf32>
  %3 = linalg.batch_matmul ins(%2, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%y : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  return %3 : tensor<8x16x4xf32>
}

// -----

// So may the second operand be; where both are, one of them has to be a batch.
// CHECK-DAG: #[[TERMS:.*]] = affine_map<(d0, d1, d2, d3) -> (d3, d2)>
// CHECK-DAG: #[[ROWS:.*]] = affine_map<(d0, d1, d2, d3) -> (d1, d3)>
// CHECK-LABEL: func.func @second(
// CHECK-SAME: %[[X:.*]]: tensor<8x4x16xf32>, %[[W:.*]]: tensor<16x32xf32>, %[[V:.*]]: tensor<4x16xf32>
// CHECK: linalg.batch_matmul indexing_maps = [#{{.*}}, #[[TERMS]], #{{.*}}] ins(%[[X]], %[[W]] : tensor<8x4x16xf32>, tensor<16x32xf32>)
// CHECK: linalg.batch_matmul indexing_maps = [#[[ROWS]], #{{.*}}, #{{.*}}] ins(%[[V]], %{{.*}} : tensor<4x16xf32>, tensor<8x16x32xf32>)
#one = affine_map<(b, m, k) -> (m, k)>
#all = affine_map<(b, m, k) -> (b, m, k)>
func.func @second(%x: tensor<8x4x16xf32>, %w: tensor<16x32xf32>, %v: tensor<4x16xf32>, %y: tensor<8x4x32xf32>)
    -> tensor<8x4x32xf32> {
  %0 = tensor.empty() : tensor<8x16x32xf32>
  %1 = linalg.generic {indexing_maps = [#one, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%w : tensor<16x32xf32>) outs(%0 : tensor<8x16x32xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<8x16x32xf32>
  %2 = tensor.empty() : tensor<8x4x16xf32>
  %3 = linalg.generic {indexing_maps = [#one, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%v : tensor<4x16xf32>) outs(%2 : tensor<8x4x16xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<8x4x16xf32>
  %4 = linalg.batch_matmul ins(%x, %1 : tensor<8x4x16xf32>, tensor<8x16x32xf32>) outs(%y : tensor<8x4x32xf32>)
      -> tensor<8x4x32xf32>
  %5 = linalg.batch_matmul ins(%3, %1 : tensor<8x4x16xf32>, tensor<8x16x32xf32>) outs(%4 : tensor<8x4x32xf32>)
      -> tensor<8x4x32xf32>
  return %5 : tensor<8x4x32xf32>
}

// -----

// Of a convolution in groups the matrices differ; a matrix that is repeated transposed is not read as it lies; and what
// is to be packed is left alone.
// CHECK-LABEL: func.func @others(
// CHECK: linalg.batch_matmul ins(%{{.*}}, %{{.*}} : tensor<8x3x5xf32>
// CHECK: linalg.batch_matmul ins(%{{.*}}, %{{.*}} : tensor<8x3x5xf32>
// CHECK: linalg.batch_matmul {iree.opt.data_tiling} ins(%{{.*}}, %{{.*}} : tensor<8x3x5xf32>
#groups = affine_map<(b, g, m, k) -> (g, m, k)>
#wide = affine_map<(b, g, m, k) -> (b, g, m, k)>
#turned = affine_map<(b, m, k) -> (k, m)>
#one = affine_map<(b, m, k) -> (m, k)>
#all = affine_map<(b, m, k) -> (b, m, k)>
func.func @others(%w: tensor<2x3x5xf32>, %t: tensor<5x3xf32>, %v: tensor<3x5xf32>, %x: tensor<8x5x4xf32>,
                  %y: tensor<8x3x4xf32>) -> tensor<8x3x4xf32> {
  %0 = tensor.empty() : tensor<4x2x3x5xf32>
  %1 = linalg.generic {indexing_maps = [#groups, #wide], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%w : tensor<2x3x5xf32>) outs(%0 : tensor<4x2x3x5xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<4x2x3x5xf32>
  %2 = tensor.collapse_shape %1 [[0, 1], [2], [3]] : tensor<4x2x3x5xf32> into tensor<8x3x5xf32>
  %3 = linalg.batch_matmul ins(%2, %x : tensor<8x3x5xf32>, tensor<8x5x4xf32>) outs(%y : tensor<8x3x4xf32>)
      -> tensor<8x3x4xf32>
  %4 = tensor.empty() : tensor<8x3x5xf32>
  %5 = linalg.generic {indexing_maps = [#turned, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%t : tensor<5x3xf32>) outs(%4 : tensor<8x3x5xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<8x3x5xf32>
  %6 = linalg.batch_matmul ins(%5, %x : tensor<8x3x5xf32>, tensor<8x5x4xf32>) outs(%3 : tensor<8x3x4xf32>)
      -> tensor<8x3x4xf32>
  %7 = linalg.generic {indexing_maps = [#one, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%v : tensor<3x5xf32>) outs(%4 : tensor<8x3x5xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<8x3x5xf32>
  %8 = linalg.batch_matmul {iree.opt.data_tiling} ins(%7, %x : tensor<8x3x5xf32>, tensor<8x5x4xf32>)
      outs(%6 : tensor<8x3x4xf32>) -> tensor<8x3x4xf32>
  return %8 : tensor<8x3x4xf32>
}
