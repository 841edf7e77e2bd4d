// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-uncontract-sums' | FileCheck %s

#both = affine_map<(d0, d1) -> (d0, d1)>
#rows = affine_map<(d0, d1) -> (d0)>

// Behind a view, too; others read the product as it was.
// CHECK-LABEL: func.func @squares(
// CHECK: %[[P:.*]] = arith.mulf
// CHECK-NEXT: linalg.yield %[[P]]
// CHECK: ^bb0(%[[IN:.*]]: f32, %[[OUT:.*]]: f32):
// CHECK-NEXT: %[[ZERO:.*]] = arith.constant 0.000000e+00
// CHECK-NEXT: %[[ADDED:.*]] = arith.addf %[[IN]], %[[ZERO]]
// CHECK-NEXT: %[[SUM:.*]] = arith.addf %[[ADDED]], %[[OUT]]
// CHECK-NEXT: linalg.yield %[[SUM]]
func.func @squares(%x: tensor<6x3xf32>, %zero: tensor<6xf32>) -> (tensor<6xf32>, tensor<18xf32>) {
  %flat = tensor.collapse_shape %x [[0, 1]] : tensor<6x3xf32> into tensor<18xf32>
  %empty = tensor.empty() : tensor<18xf32>
  %squares = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]}
      ins(%flat : tensor<18xf32>) outs(%empty : tensor<18xf32>) {
  ^bb0(%a: f32, %out: f32):
    %p = arith.mulf %a, %a : f32
    linalg.yield %p : f32
  } -> tensor<18xf32>
  %again = tensor.expand_shape %squares [[0, 1]] output_shape [6, 3] : tensor<18xf32> into tensor<6x3xf32>
  %sum = linalg.generic {indexing_maps = [#both, #rows], iterator_types = ["parallel", "reduction"]}
      ins(%again : tensor<6x3xf32>) outs(%zero : tensor<6xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<6xf32>
  return %sum, %squares : tensor<6xf32>, tensor<18xf32>
}

// -----

#both = affine_map<(d0, d1) -> (d0, d1)>
#columns = affine_map<(d0, d1) -> (d1)>

// A product in the sum's own body.
// CHECK-LABEL: func.func @within(
// CHECK: %[[P:.*]] = arith.mulf
// CHECK: %[[ADDED:.*]] = arith.addf %[[P]], %{{.*}} : bf16
// CHECK-NEXT: arith.addf %{{.*}}, %[[ADDED]] : bf16
func.func @within(%x: tensor<5x3xbf16>, %zero: tensor<3xbf16>) -> tensor<3xbf16> {
  %sum = linalg.generic {indexing_maps = [#both, #columns], iterator_types = ["reduction", "parallel"]}
      ins(%x : tensor<5x3xbf16>) outs(%zero : tensor<3xbf16>) {
  ^bb0(%in: bf16, %out: bf16):
    %p = arith.mulf %in, %in : bf16
    %s = arith.addf %out, %p : bf16
    linalg.yield %s : bf16
  } -> tensor<3xbf16>
  return %sum : tensor<3xbf16>
}

// -----

#both = affine_map<(d0, d1) -> (d0, d1)>
#rows = affine_map<(d0, d1) -> (d0)>
#none = affine_map<(d0, d1) -> ()>

// Sums of what is no product, of integers, a largest number, and a product of two operands.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: arith.constant
func.func @others(%x: tensor<5x3xf32>, %y: tensor<5x3xf32>, %n: tensor<5x3xi64>, %zero: tensor<5xf32>, %none: tensor<i64>)
    -> (tensor<5xf32>, tensor<i64>, tensor<5xf32>, tensor<5xf32>) {
  %sum = linalg.generic {indexing_maps = [#both, #rows], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<5x3xf32>) outs(%zero : tensor<5xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<5xf32>
  %whole = linalg.generic {indexing_maps = [#both, #none], iterator_types = ["reduction", "reduction"]}
      ins(%n : tensor<5x3xi64>) outs(%none : tensor<i64>) {
  ^bb0(%in: i64, %out: i64):
    %p = arith.muli %in, %in : i64
    %s = arith.addi %p, %out : i64
    linalg.yield %s : i64
  } -> tensor<i64>
  %largest = linalg.generic {indexing_maps = [#both, #rows], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<5x3xf32>) outs(%zero : tensor<5xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.maximumf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<5xf32>
  %dots = linalg.generic {indexing_maps = [#both, #both, #rows], iterator_types = ["parallel", "reduction"]}
      ins(%x, %y : tensor<5x3xf32>, tensor<5x3xf32>) outs(%zero : tensor<5xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %p, %out : f32
    linalg.yield %s : f32
  } -> tensor<5xf32>
  return %sum, %whole, %largest, %dots : tensor<5xf32>, tensor<i64>, tensor<5xf32>, tensor<5xf32>
}
