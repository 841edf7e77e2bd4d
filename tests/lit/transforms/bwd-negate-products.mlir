// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-negate-products' | FileCheck %s

#both = affine_map<(d0, d1) -> (d0, d1)>
#columns = affine_map<(d0, d1) -> (d1)>
#none = affine_map<(d0, d1) -> ()>

// One factor is the same for all rows, and both loops are summed over.
// CHECK-LABEL: func.func @weighted(
// CHECK: ^bb0(%[[X:.*]]: f32, %[[W:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[N:.*]] = arith.negf %[[X]]
// CHECK-NEXT: %[[P:.*]] = arith.mulf %[[N]], %[[W]]
// CHECK-NEXT: %[[R:.*]] = arith.negf %[[P]]
// CHECK-NEXT: linalg.yield %[[R]]
func.func @weighted(%x: tensor<5x3xf32>, %w: tensor<3xf32>, %zero: tensor<f32>) -> tensor<f32> {
  %empty = tensor.empty() : tensor<5x3xf32>
  %product = linalg.generic {indexing_maps = [#both, #columns, #both], iterator_types = ["parallel", "parallel"]}
      ins(%x, %w : tensor<5x3xf32>, tensor<3xf32>) outs(%empty : tensor<5x3xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %p = arith.mulf %a, %b : f32
    linalg.yield %p : f32
  } -> tensor<5x3xf32>
  %sum = linalg.generic {indexing_maps = [#both, #none], iterator_types = ["reduction", "reduction"]}
      ins(%product : tensor<5x3xf32>) outs(%zero : tensor<f32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<f32>
  return %sum : tensor<f32>
}

// -----

#both = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (0, d1)>
#none = affine_map<(d0, d1) -> ()>

// Integers, and a factor that was spread by an op of its own, from a tensor of one row.
// CHECK-LABEL: func.func @spread(
// CHECK: ^bb0(%[[X:.*]]: i64, %[[W:.*]]: i64, %{{.*}}: i64):
// CHECK: %[[N:.*]] = arith.subi %{{.*}}, %[[X]]
// CHECK-NEXT: %[[P:.*]] = arith.muli %[[N]], %[[W]]
// CHECK: %[[R:.*]] = arith.subi %{{.*}}, %[[P]]
// CHECK-NEXT: linalg.yield %[[R]]
func.func @spread(%x: tensor<5x3xi64>, %w: tensor<1x3xi64>, %zero: tensor<i64>) -> tensor<i64> {
  %empty = tensor.empty() : tensor<5x3xi64>
  %wide = linalg.generic {indexing_maps = [#row, #both], iterator_types = ["parallel", "parallel"]}
      ins(%w : tensor<1x3xi64>) outs(%empty : tensor<5x3xi64>) {
  ^bb0(%a: i64, %out: i64):
    linalg.yield %a : i64
  } -> tensor<5x3xi64>
  %product = linalg.generic {indexing_maps = [#both, #both, #both], iterator_types = ["parallel", "parallel"]}
      ins(%x, %wide : tensor<5x3xi64>, tensor<5x3xi64>) outs(%empty : tensor<5x3xi64>) {
  ^bb0(%a: i64, %b: i64, %out: i64):
    %p = arith.muli %a, %b : i64
    linalg.yield %p : i64
  } -> tensor<5x3xi64>
  %sum = linalg.generic {indexing_maps = [#both, #none], iterator_types = ["reduction", "reduction"]}
      ins(%product : tensor<5x3xi64>) outs(%zero : tensor<i64>) {
  ^bb0(%in: i64, %out: i64):
    %s = arith.addi %in, %out : i64
    linalg.yield %s : i64
  } -> tensor<i64>
  return %sum : tensor<i64>
}

// -----

#both = affine_map<(d0, d1) -> (d0, d1)>
#rows = affine_map<(d0, d1) -> (d0)>
#columns = affine_map<(d0, d1) -> (d1)>
#none = affine_map<(d0, d1) -> ()>

// What is the same along the inner loop, and sums that keep the loop that a factor lacks, compile as they are.
// CHECK-LABEL: func.func @others(
// CHECK-NOT: arith.negf
func.func @others(%x: tensor<5x3xf32>, %v: tensor<5xf32>, %w: tensor<3xf32>, %zero: tensor<f32>, %zeros: tensor<5xf32>)
    -> (tensor<f32>, tensor<5xf32>) {
  %empty = tensor.empty() : tensor<5x3xf32>
  %first = linalg.generic {indexing_maps = [#both, #rows, #both], iterator_types = ["parallel", "parallel"]}
      ins(%x, %v : tensor<5x3xf32>, tensor<5xf32>) outs(%empty : tensor<5x3xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %p = arith.mulf %a, %b : f32
    linalg.yield %p : f32
  } -> tensor<5x3xf32>
  %second = linalg.generic {indexing_maps = [#both, #columns, #both], iterator_types = ["parallel", "parallel"]}
      ins(%x, %w : tensor<5x3xf32>, tensor<3xf32>) outs(%empty : tensor<5x3xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %p = arith.mulf %a, %b : f32
    linalg.yield %p : f32
  } -> tensor<5x3xf32>
  %all = linalg.generic {indexing_maps = [#both, #none], iterator_types = ["reduction", "reduction"]}
      ins(%first : tensor<5x3xf32>) outs(%zero : tensor<f32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<f32>
  %kept = linalg.generic {indexing_maps = [#both, #rows], iterator_types = ["parallel", "reduction"]}
      ins(%second : tensor<5x3xf32>) outs(%zeros : tensor<5xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<5xf32>
  return %all, %kept : tensor<f32>, tensor<5xf32>
}
