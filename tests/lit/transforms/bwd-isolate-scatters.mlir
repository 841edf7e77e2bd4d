// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-scatters' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// What is computed for a scatter, seen through views, is a tensor of its own before it.
// CHECK-LABEL: func.func @widened(
// CHECK: %[[WIDE:.*]] = linalg.generic
// CHECK: %[[ROWS:.*]] = tensor.expand_shape %[[WIDE]]
// CHECK-NEXT: %[[OWN:.*]] = "util.optimization_barrier"(%[[ROWS]]) : (tensor<2x1xf32>) -> tensor<2x1xf32>
// CHECK-NEXT: "tm_tensor.scatter"(%[[OWN]], %{{.*}}, %{{.*}}) ({
func.func @widened(%x: tensor<2xbf16>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<2xf32>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<2xbf16>) outs(%empty : tensor<2xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<2xf32>
  %rows = tensor.expand_shape %wide [[0, 1]] output_shape [2, 1] : tensor<2xf32> into tensor<2x1xf32>
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

// Nothing computes an argument, so that nothing can be fused.
// CHECK-LABEL: func.func @argument(
// CHECK-NOT: util.optimization_barrier
// CHECK: return
func.func @argument(%rows: tensor<2x1xf32>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}
