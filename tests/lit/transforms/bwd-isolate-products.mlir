// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-products' | FileCheck %s

// What is multiplied by two tensors: the product moves to right before the multiplications, which take it from behind a
// barrier. A view in between moves along; what only one of them takes is computed with them.
// CHECK-LABEL: func.func @two(
// CHECK: math.sin
// CHECK: math.cos
// CHECK: %[[PRODUCT:.*]] = linalg.matmul
// CHECK: %[[HIDDEN:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[PRODUCT]])
// CHECK: %[[VIEW:.*]] = tensor.expand_shape %[[HIDDEN]]
// CHECK: %[[FIRST:.*]] = linalg.generic {{.*}} ins(%[[VIEW]], %{{.*}} :
// CHECK: linalg.generic {{.*}} ins(%[[FIRST]], %{{.*}} :
#id = affine_map<(b, m, n) -> (b, m, n)>
#flat = affine_map<(m, n) -> (m, n)>
func.func @two(%x: tensor<8x4xf32>, %w: tensor<4x6xf32>, %a: tensor<2x4x6xf32>, %b: tensor<2x4x6xf32>)
    -> (tensor<2x4x6xf32>, tensor<2x4x6xf32>) {
  %zero = arith.constant 0.0 : f32
  %flat = tensor.empty() : tensor<8x6xf32>
  %empty = tensor.empty() : tensor<2x4x6xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%flat : tensor<8x6xf32>) -> tensor<8x6xf32>
  %0 = linalg.matmul {iree.opt.data_tiling} ins(%x, %w : tensor<8x4xf32>, tensor<4x6xf32>)
      outs(%zeros : tensor<8x6xf32>) -> tensor<8x6xf32>
  %1 = tensor.expand_shape %0 [[0, 1], [2]] output_shape [2, 4, 6] : tensor<8x6xf32> into tensor<2x4x6xf32>
  %sin = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%a : tensor<2x4x6xf32>) outs(%empty : tensor<2x4x6xf32>) {
  ^bb0(%i: f32, %out: f32):
    %s = math.sin %i : f32
    linalg.yield %s : f32
  } -> tensor<2x4x6xf32>
  %2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%1, %sin : tensor<2x4x6xf32>, tensor<2x4x6xf32>) outs(%empty : tensor<2x4x6xf32>) {
  ^bb0(%i: f32, %j: f32, %out: f32):
    %s = arith.mulf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<2x4x6xf32>
  %cos = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%b : tensor<2x4x6xf32>) outs(%empty : tensor<2x4x6xf32>) {
  ^bb0(%i: f32, %out: f32):
    %s = math.cos %i : f32
    linalg.yield %s : f32
  } -> tensor<2x4x6xf32>
  %3 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%2, %cos : tensor<2x4x6xf32>, tensor<2x4x6xf32>) outs(%empty : tensor<2x4x6xf32>) {
  ^bb0(%i: f32, %j: f32, %out: f32):
    %s = arith.mulf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<2x4x6xf32>
  return %3, %cos : tensor<2x4x6xf32>, tensor<2x4x6xf32>
}

// -----

// Left alone: a product that is added to a row and to a tensor of half its bytes, one on plain operands, one that is
// read twice, and one of open sizes.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: compute_barrier
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (n)>
func.func @others(%x: tensor<8x8xf32>, %a: tensor<8x8xf32>, %b: tensor<8x8xf32>, %row: tensor<8xf32>,
                  %half: tensor<8x8xf16>, %open: tensor<?x8xf32>, %c: tensor<?x8xf32>, %d: tensor<?x8xf32>)
    -> (tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<?x8xf32>) {
  %empty = tensor.empty() : tensor<8x8xf32>
  %0 = linalg.matmul {iree.opt.data_tiling} ins(%x, %x : tensor<8x8xf32>, tensor<8x8xf32>)
      outs(%a : tensor<8x8xf32>) -> tensor<8x8xf32>
  %sum = linalg.generic {indexing_maps = [#id, #id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%0, %half, %row : tensor<8x8xf32>, tensor<8x8xf16>, tensor<8xf32>) outs(%empty : tensor<8x8xf32>) {
  ^bb0(%i: f32, %j: f16, %k: f32, %out: f32):
    %wide = arith.extf %j : f16 to f32
    %s = arith.addf %i, %wide : f32
    linalg.yield %s : f32
  } -> tensor<8x8xf32>
  %1 = linalg.matmul ins(%x, %x : tensor<8x8xf32>, tensor<8x8xf32>) outs(%a : tensor<8x8xf32>) -> tensor<8x8xf32>
  %plain = linalg.generic {indexing_maps = [#id, #id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%1, %a, %b : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>) outs(%empty : tensor<8x8xf32>) {
  ^bb0(%i: f32, %j: f32, %k: f32, %out: f32):
    %s = arith.addf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<8x8xf32>
  %2 = linalg.matmul {iree.opt.data_tiling} ins(%x, %x : tensor<8x8xf32>, tensor<8x8xf32>)
      outs(%a : tensor<8x8xf32>) -> tensor<8x8xf32>
  %twice = linalg.generic {indexing_maps = [#id, #id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%2, %a, %b : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>) outs(%empty : tensor<8x8xf32>) {
  ^bb0(%i: f32, %j: f32, %k: f32, %out: f32):
    %s = arith.addf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<8x8xf32>
  %3 = linalg.matmul {iree.opt.data_tiling} ins(%open, %x : tensor<?x8xf32>, tensor<8x8xf32>)
      outs(%c : tensor<?x8xf32>) -> tensor<?x8xf32>
  %wide = linalg.generic {indexing_maps = [#id, #id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%3, %c, %d : tensor<?x8xf32>, tensor<?x8xf32>, tensor<?x8xf32>) outs(%c : tensor<?x8xf32>) {
  ^bb0(%i: f32, %j: f32, %k: f32, %out: f32):
    %s = arith.addf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<?x8xf32>
  return %sum, %plain, %twice, %2, %wide
      : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<?x8xf32>
}
