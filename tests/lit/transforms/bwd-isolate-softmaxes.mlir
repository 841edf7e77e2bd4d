// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-softmaxes' | FileCheck %s

#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
// Rows of 196: the exponentials are hidden from their sum and from the division.
// CHECK-LABEL: func.func @uneven(
// CHECK: %[[POWERS:.*]] = linalg.generic
// CHECK: math.exp
// CHECK: %[[HIDDEN:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[POWERS]]) : (tensor<4x196xf32>) -> tensor<4x196xf32>
// CHECK: %[[SUMS:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "reduction"]} ins(%[[HIDDEN]] :
// CHECK: linalg.generic {{.*}} ins(%[[HIDDEN]], %[[SUMS]] :
func.func @uneven(%a: tensor<4x196xf32>) -> tensor<4x196xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x196xf32>
  %rows = tensor.empty() : tensor<4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%rows : tensor<4xf32>) -> tensor<4xf32>
  %powers = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x196xf32>) outs(%empty : tensor<4x196xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = math.exp %x : f32
    linalg.yield %s : f32
  } -> tensor<4x196xf32>
  %sums = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%powers : tensor<4x196xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %shares = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%powers, %sums : tensor<4x196xf32>, tensor<4xf32>) outs(%empty : tensor<4x196xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.divf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x196xf32>
  return %shares : tensor<4x196xf32>
}

// -----

#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
// Vectors divide these rows.
// CHECK-LABEL: func.func @even(
// CHECK-NOT: compute_barrier
// CHECK: return
func.func @even(%a: tensor<4x192xf32>) -> tensor<4x192xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x192xf32>
  %rows = tensor.empty() : tensor<4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%rows : tensor<4xf32>) -> tensor<4xf32>
  %powers = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x192xf32>) outs(%empty : tensor<4x192xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = math.exp %x : f32
    linalg.yield %s : f32
  } -> tensor<4x192xf32>
  %sums = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%powers : tensor<4x192xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %shares = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%powers, %sums : tensor<4x192xf32>, tensor<4xf32>) outs(%empty : tensor<4x192xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.divf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x192xf32>
  return %shares : tensor<4x192xf32>
}

// -----

#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
// No exponentials.
// CHECK-LABEL: func.func @norm(
// CHECK-NOT: compute_barrier
// CHECK: return
func.func @norm(%a: tensor<4x196xf32>) -> tensor<4x196xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x196xf32>
  %rows = tensor.empty() : tensor<4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%rows : tensor<4xf32>) -> tensor<4xf32>
  %powers = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x196xf32>) outs(%empty : tensor<4x196xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = math.sqrt %x : f32
    linalg.yield %s : f32
  } -> tensor<4x196xf32>
  %sums = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%powers : tensor<4x196xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %shares = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%powers, %sums : tensor<4x196xf32>, tensor<4xf32>) outs(%empty : tensor<4x196xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.divf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x196xf32>
  return %shares : tensor<4x196xf32>
}

// -----

#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
// Exponentials that are summed and nothing else, as of a cross entropy.
// CHECK-LABEL: func.func @sum(
// CHECK-NOT: compute_barrier
// CHECK: return
func.func @sum(%a: tensor<4x196xf32>) -> tensor<4xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x196xf32>
  %rows = tensor.empty() : tensor<4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%rows : tensor<4xf32>) -> tensor<4xf32>
  %powers = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x196xf32>) outs(%empty : tensor<4x196xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = math.exp %x : f32
    linalg.yield %s : f32
  } -> tensor<4x196xf32>
  %sums = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%powers : tensor<4x196xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  return %sums : tensor<4xf32>
}

// -----

#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
#column = affine_map<(m, n) -> (n)>
// Sums of columns: rows are computed side by side.
// CHECK-LABEL: func.func @columns(
// CHECK-NOT: compute_barrier
// CHECK: return
func.func @columns(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x4xf32>
  %rows = tensor.empty() : tensor<4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%rows : tensor<4xf32>) -> tensor<4xf32>
  %powers = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = math.exp %x : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  %sums = linalg.generic {indexing_maps = [#id, #column], iterator_types = ["reduction", "parallel"]}
      ins(%powers : tensor<4x4xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %shares = linalg.generic {indexing_maps = [#id, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%powers, %sums : tensor<4x4xf32>, tensor<4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.divf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  return %shares : tensor<4x4xf32>
}
