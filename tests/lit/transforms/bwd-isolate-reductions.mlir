// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-reductions' | FileCheck %s

// A matrix less its rows' sums meets its own transpose: the sums are hidden from both.
// CHECK-LABEL: func.func @transpose(
// CHECK: %[[SUMS:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "reduction"]
// CHECK: %[[HIDDEN:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[SUMS]]) : (tensor<4xf32>) -> tensor<4xf32>
// CHECK: %[[LESS:.*]] = linalg.generic {{.*}} ins(%{{.*}}, %[[HIDDEN]] :
// CHECK: %[[TURNED:.*]] = linalg.transpose ins(%[[LESS]]
// CHECK: linalg.generic {{.*}} ins(%[[TURNED]], %[[LESS]] :
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
func.func @transpose(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x4xf32>
  %rows = tensor.empty() : tensor<4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%rows : tensor<4xf32>) -> tensor<4xf32>
  %sums = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<4x4xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %less = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a, %sums : tensor<4x4xf32>, tensor<4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.subf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %turned = linalg.transpose ins(%less : tensor<4x4xf32>) outs(%empty : tensor<4x4xf32>) permutation = [1, 0]
  %both = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%turned, %less : tensor<4x4xf32>, tensor<4x4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.addf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  return %both : tensor<4x4xf32>
}

// -----

// Two sums, one of which is read along rows and the other along columns, may be one to IREE. What is returned is not
// hidden, and open sizes go along.
// CHECK-LABEL: func.func @equal(
// CHECK: %[[FIRST:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "reduction"]
// CHECK: %[[SIZE:.*]] = tensor.dim %[[FIRST]]
// CHECK: %[[ROWS:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[FIRST]], %[[SIZE]])
// CHECK: %[[SECOND:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "reduction"]
// CHECK: %[[COLUMNS:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[SECOND]],
// CHECK: linalg.generic {{.*}} ins(%[[ROWS]], %[[COLUMNS]] :
// CHECK: return %{{.*}}, %[[FIRST]]
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
#column = affine_map<(m, n) -> (n)>
func.func @equal(%a: tensor<?x?xf32>, %zeros: tensor<?xf32>, %empty: tensor<?x?xf32>)
    -> (tensor<?x?xf32>, tensor<?xf32>) {
  %first = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<?x?xf32>) outs(%zeros : tensor<?xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  %second = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<?x?xf32>) outs(%zeros : tensor<?xf32>) {
  ^bb0(%y: f32, %out: f32):
    %t = arith.addf %y, %out : f32
    linalg.yield %t : f32
  } -> tensor<?xf32>
  %both = linalg.generic {indexing_maps = [#row, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%first, %second : tensor<?xf32>, tensor<?xf32>) outs(%empty : tensor<?x?xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.mulf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<?x?xf32>
  return %both, %first : tensor<?x?xf32>, tensor<?xf32>
}

// -----

// The same where one of them keeps an axis of size 1.
// CHECK-LABEL: func.func @kept(
// CHECK-COUNT-2: compute_barrier
#id = affine_map<(b, m, n) -> (b, m, n)>
#row = affine_map<(b, m, n) -> (b, m)>
#kept = affine_map<(b, m, n) -> (b, m, 0)>
#column = affine_map<(b, m, n) -> (b, n)>
func.func @kept(%a: tensor<1x4x4xf32>, %zeros: tensor<1x4xf32>, %zeros_kept: tensor<1x4x1xf32>, %empty: tensor<1x4x4xf32>)
    -> tensor<1x4x4xf32> {
  %first = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a : tensor<1x4x4xf32>) outs(%zeros : tensor<1x4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<1x4xf32>
  %second = linalg.generic {indexing_maps = [#id, #kept], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a : tensor<1x4x4xf32>) outs(%zeros_kept : tensor<1x4x1xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<1x4x1xf32>
  %both = linalg.generic {indexing_maps = [#column, #kept, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%first, %second : tensor<1x4xf32>, tensor<1x4x1xf32>) outs(%empty : tensor<1x4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.subf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<1x4x4xf32>
  return %both : tensor<1x4x4xf32>
}

// -----

// Left alone: a softmax, whose maximum and sum are read along rows everywhere, through a view and with an axis of size 1
// too; sums of rows beside numbers of columns that are others; and an argument that meets its transpose.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: compute_barrier
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
#column = affine_map<(m, n) -> (n)>
#kept = affine_map<(m, n) -> (m, 0)>
#turned = affine_map<(m, n) -> (n, m)>
func.func @others(%a: tensor<4x4xf32>, %row: tensor<4xf32>, %zeros: tensor<4xf32>, %empty: tensor<4x4xf32>)
    -> (tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>) {
  %sums = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<4x4xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %most = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<4x4xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.maximumf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %column = tensor.expand_shape %sums [[0, 1]] output_shape [4, 1] : tensor<4xf32> into tensor<4x1xf32>
  %once = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a, %sums : tensor<4x4xf32>, tensor<4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.subf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %softmax = linalg.generic {indexing_maps = [#id, #kept, #id], iterator_types = ["parallel", "parallel"]}
      ins(%once, %column : tensor<4x4xf32>, tensor<4x1xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.mulf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %rows = linalg.generic {indexing_maps = [#row, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%sums, %most : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.mulf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %different = linalg.generic {indexing_maps = [#id, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%rows, %row : tensor<4x4xf32>, tensor<4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.mulf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %argument = linalg.generic {indexing_maps = [#id, #turned, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a, %a : tensor<4x4xf32>, tensor<4x4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.mulf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  return %softmax, %different, %argument : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>
}
