// RUN: retrograd-opt %s --split-input-file -p 'bwd-crop-windows' | FileCheck %s

#window = affine_map<(d0, d1, d2) -> (d0, d1 * 2 + d2)>
#all = affine_map<(d0, d1, d2) -> (d0, d1, d2)>

// One window of two, of rows of three.
// CHECK-LABEL: func.func @single(
// CHECK-SAME: %[[X:.*]]: tensor<4x3xf32>
// CHECK: %[[S:.*]] = tensor.extract_slice %[[X]][0, 0] [4, 2] [1, 1] : tensor<4x3xf32> to tensor<4x2xf32>
// CHECK: linalg.generic {{.*}} ins(%[[S]] : tensor<4x2xf32>)
func.func @single(%x: tensor<4x3xf32>, %out: tensor<4x1x2xf32>) -> tensor<4x1x2xf32> {
  %r = linalg.generic {indexing_maps = [#window, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<4x3xf32>) outs(%out : tensor<4x1x2xf32>) {
  ^bb0(%in: f32, %o: f32):
    linalg.yield %in : f32
  } -> tensor<4x1x2xf32>
  return %r : tensor<4x1x2xf32>
}

// -----

#window = affine_map<(d0, d1, d2) -> (d0, d1 * 2 + d2)>
#all = affine_map<(d0, d1, d2) -> (d0, d1, d2)>

// The other axis may be open.
// CHECK-LABEL: func.func @open(
// CHECK-SAME: %[[X:.*]]: tensor<?x3xf32>
// CHECK: %[[N:.*]] = tensor.dim %[[X]]
// CHECK: tensor.extract_slice %[[X]][0, 0] [%[[N]], 2] [1, 1] : tensor<?x3xf32> to tensor<?x2xf32>
func.func @open(%x: tensor<?x3xf32>, %out: tensor<?x1x2xf32>) -> tensor<?x1x2xf32> {
  %r = linalg.generic {indexing_maps = [#window, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<?x3xf32>) outs(%out : tensor<?x1x2xf32>) {
  ^bb0(%in: f32, %o: f32):
    linalg.yield %in : f32
  } -> tensor<?x1x2xf32>
  return %r : tensor<?x1x2xf32>
}

// -----

#window = affine_map<(d0, d1, d2) -> (d0, d1 * 2 + d2)>
#all = affine_map<(d0, d1, d2) -> (d0, d1, d2)>

// Two windows stay a sum of two loops; one that takes the whole axis contradicts nothing.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: tensor.extract_slice
func.func @others(%x: tensor<4x5xf32>, %y: tensor<4x2xf32>, %out: tensor<4x2x2xf32>, %one: tensor<4x1x2xf32>)
    -> (tensor<4x2x2xf32>, tensor<4x1x2xf32>) {
  %r = linalg.generic {indexing_maps = [#window, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<4x5xf32>) outs(%out : tensor<4x2x2xf32>) {
  ^bb0(%in: f32, %o: f32):
    linalg.yield %in : f32
  } -> tensor<4x2x2xf32>
  %s = linalg.generic {indexing_maps = [#window, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%y : tensor<4x2xf32>) outs(%one : tensor<4x1x2xf32>) {
  ^bb0(%in: f32, %o: f32):
    linalg.yield %in : f32
  } -> tensor<4x1x2xf32>
  return %r, %s : tensor<4x2x2xf32>, tensor<4x1x2xf32>
}
