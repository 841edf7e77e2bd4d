// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-accumulate-products' | FileCheck %s

// A sum of three products: each starts at what the one before gave, hidden from IREE, which would add it afterwards.
// CHECK-LABEL: func.func @rows(
// CHECK-SAME: %[[W:.*]]: tensor<8x16x32xf32>, %[[X:.*]]: tensor<8x32x4xf32>
// CHECK: %[[ZEROS:.*]] = linalg.fill
// CHECK: %[[FIRST:.*]] = linalg.batch_matmul ins(%[[W]], %[[X]] : {{.*}}) outs(%[[ZEROS]]
// CHECK: %[[HIDDEN:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[FIRST]])
// CHECK: %[[SECOND:.*]] = linalg.batch_matmul ins(%[[W]], %[[X]] : {{.*}}) outs(%[[HIDDEN]]
// CHECK: %[[AGAIN:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[SECOND]])
// CHECK: %[[THIRD:.*]] = linalg.batch_matmul ins(%[[W]], %[[X]] : {{.*}}) outs(%[[AGAIN]]
// CHECK-NOT: linalg.generic
// CHECK: return %[[THIRD]]
#id = affine_map<(b, m, n) -> (b, m, n)>
func.func @rows(%w: tensor<8x16x32xf32>, %x: tensor<8x32x4xf32>) -> tensor<8x16x4xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<8x16x4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<8x16x4xf32>) -> tensor<8x16x4xf32>
  %0 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %1 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%0, %1 : tensor<8x16x4xf32>, tensor<8x16x4xf32>) outs(%empty : tensor<8x16x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<8x16x4xf32>
  %3 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %4 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%3, %2 : tensor<8x16x4xf32>, tensor<8x16x4xf32>) outs(%empty : tensor<8x16x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<8x16x4xf32>
  return %4 : tensor<8x16x4xf32>
}

// -----

// Left alone: a product that is read elsewhere too, one whose operands are packed, a difference.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: compute_barrier
// CHECK-COUNT-3: linalg.generic
#id = affine_map<(b, m, n) -> (b, m, n)>
func.func @others(%w: tensor<8x16x32xf32>, %x: tensor<8x32x4xf32>)
    -> (tensor<8x16x4xf32>, tensor<8x16x4xf32>, tensor<8x16x4xf32>, tensor<8x16x4xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<8x16x4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<8x16x4xf32>) -> tensor<8x16x4xf32>
  %0 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %1 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%0, %1 : tensor<8x16x4xf32>, tensor<8x16x4xf32>) outs(%empty : tensor<8x16x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<8x16x4xf32>
  %3 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %4 = linalg.batch_matmul {iree.opt.data_tiling} ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>)
      outs(%zeros : tensor<8x16x4xf32>) -> tensor<8x16x4xf32>
  %5 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%3, %4 : tensor<8x16x4xf32>, tensor<8x16x4xf32>) outs(%empty : tensor<8x16x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<8x16x4xf32>
  %6 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %7 = linalg.batch_matmul ins(%w, %x : tensor<8x16x32xf32>, tensor<8x32x4xf32>) outs(%zeros : tensor<8x16x4xf32>)
      -> tensor<8x16x4xf32>
  %8 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%6, %7 : tensor<8x16x4xf32>, tensor<8x16x4xf32>) outs(%empty : tensor<8x16x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.subf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<8x16x4xf32>
  return %0, %2, %5, %8 : tensor<8x16x4xf32>, tensor<8x16x4xf32>, tensor<8x16x4xf32>, tensor<8x16x4xf32>
}
