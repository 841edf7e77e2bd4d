// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-fold-widenings' | FileCheck %s

#rows = affine_map<(d0, d1) -> (d0, d1)>
#columns = affine_map<(d0, d1) -> (d1)>

// A layer norm's gradient in bfloat16: both sums widen what they read themselves.
// CHECK-LABEL: func.func @sums_of_columns(
// CHECK: %[[SUM:.*]] = linalg.generic {{.*}}"reduction", "parallel"]} ins(%arg0 : tensor<6x12xbf16>)
// CHECK-NEXT: ^bb0(%[[IN:.*]]: bf16, %[[OUT:.*]]: f32):
// CHECK-NEXT: %[[WIDE:.*]] = arith.extf %[[IN]] : bf16 to f32
// CHECK-NEXT: arith.addf %[[WIDE]], %[[OUT]] : f32
// CHECK: linalg.generic {{.*}} ins(%arg0, %arg1, %arg0 : tensor<6x12xbf16>, tensor<12xbf16>, tensor<6x12xbf16>)
// CHECK-NEXT: ^bb0(%[[A:.*]]: bf16, %[[B:.*]]: bf16, %[[C:.*]]: bf16, %{{.*}}: f32):
// CHECK: %[[SEEN:.*]] = arith.extf %[[C]] : bf16 to f32
// CHECK: %[[CENTRED:.*]] = arith.subf
// CHECK: arith.mulf %[[CENTRED]], %[[SEEN]] : f32
// CHECK: arith.addf
// CHECK-NOT: linalg.generic
// CHECK: return
func.func @sums_of_columns(%x: tensor<6x12xbf16>, %m: tensor<12xbf16>, %into: tensor<12xf32>)
    -> (tensor<12xf32>, tensor<12xf32>) {
  %empty = tensor.empty() : tensor<6x12xf32>
  %wide = linalg.generic {indexing_maps = [#rows, #rows], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<6x12xbf16>) outs(%empty : tensor<6x12xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<6x12xf32>
  %sum = linalg.generic {indexing_maps = [#rows, #columns], iterator_types = ["reduction", "parallel"]}
      ins(%wide : tensor<6x12xf32>) outs(%into : tensor<12xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<12xf32>
  %centred = linalg.generic {indexing_maps = [#rows, #columns, #rows], iterator_types = ["parallel", "parallel"]}
      ins(%x, %m : tensor<6x12xbf16>, tensor<12xbf16>) outs(%empty : tensor<6x12xf32>) {
  ^bb0(%in: bf16, %mean: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    %g = arith.extf %mean : bf16 to f32
    %c = arith.subf %f, %g : f32
    linalg.yield %c : f32
  } -> tensor<6x12xf32>
  %product = linalg.generic {indexing_maps = [#rows, #rows, #columns], iterator_types = ["reduction", "parallel"]}
      ins(%centred, %wide : tensor<6x12xf32>, tensor<6x12xf32>) outs(%into : tensor<12xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %p = arith.mulf %a, %b : f32
    %s = arith.addf %p, %out : f32
    linalg.yield %s : f32
  } -> tensor<12xf32>
  return %sum, %product : tensor<12xf32>, tensor<12xf32>
}

// -----

#rows = affine_map<(d0, d1) -> (d0, d1)>
#turned = affine_map<(d0, d1) -> (d1, d0)>
#first = affine_map<(d0, d1) -> (d0)>
#second = affine_map<(d0, d1) -> (d1)>

// The maps of what is folded are read through the reader's; what is returned as well stays.
// CHECK-DAG: #[[SECOND:.*]] = affine_map<(d0, d1) -> (d1)>
// CHECK-DAG: #[[ROWS:.*]] = affine_map<(d0, d1) -> (d0, d1)>
// CHECK-LABEL: func.func @spread_and_turned(
// CHECK: %[[SPREAD:.*]] = linalg.generic
// CHECK: linalg.generic {indexing_maps = [#[[SECOND]], #[[ROWS]], #[[ROWS]]]
// CHECK-SAME: ins(%arg0, %arg1 : tensor<6xf32>, tensor<12x6xf32>)
// CHECK: return %[[SPREAD]]
func.func @spread_and_turned(%x: tensor<6xf32>, %y: tensor<12x6xf32>) -> (tensor<6x12xf32>, tensor<12x6xf32>) {
  %empty = tensor.empty() : tensor<6x12xf32>
  %other = tensor.empty() : tensor<12x6xf32>
  %spread = linalg.generic {indexing_maps = [#first, #rows], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<6xf32>) outs(%empty : tensor<6x12xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<6x12xf32>
  %r = linalg.generic {indexing_maps = [#turned, #rows, #rows], iterator_types = ["parallel", "parallel"]}
      ins(%spread, %y : tensor<6x12xf32>, tensor<12x6xf32>) outs(%other : tensor<12x6xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<12x6xf32>
  return %spread, %r : tensor<6x12xf32>, tensor<12x6xf32>
}

// -----

#rows = affine_map<(d0, d1) -> (d0, d1)>
#first = affine_map<(d0, d1) -> (d0)>
#one = affine_map<(d0) -> (d0)>

// Nothing else says how often the sum's second loop runs.
// CHECK-LABEL: func.func @behind_a_barrier(
// CHECK: %[[SPREAD:.*]] = linalg.generic
// CHECK: %[[HIDDEN:.*]] = "util.optimization_barrier"(%[[SPREAD]])
// CHECK-NEXT: linalg.generic {{.*}} ins(%[[HIDDEN]] : tensor<6x12xf32>)
func.func @behind_a_barrier(%x: tensor<6xf32>, %into: tensor<6xf32>) -> tensor<6xf32> {
  %empty = tensor.empty() : tensor<6x12xf32>
  %spread = linalg.generic {indexing_maps = [#first, #rows], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<6xf32>) outs(%empty : tensor<6x12xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<6x12xf32>
  %sum = linalg.generic {indexing_maps = [#rows, #first], iterator_types = ["parallel", "reduction"]}
      ins(%spread : tensor<6x12xf32>) outs(%into : tensor<6xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<6xf32>
  return %sum : tensor<6xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>
#rows = affine_map<(d0, d1) -> (d0, d1)>
#columns = affine_map<(d0, d1) -> (d1)>

// The narrow tensor takes the shape that is read; an argument of open size, too.
// CHECK-LABEL: func.func @widened_after(
// CHECK: %[[ROWS:.*]] = tensor.expand_shape %arg0 {{.*}} : tensor<?xbf16> into tensor<?x12xbf16>
// CHECK: linalg.generic {{.*}}"reduction", "parallel"]} ins(%[[ROWS]] : tensor<?x12xbf16>)
// CHECK: arith.extf
// CHECK: arith.addf
// CHECK-NOT: linalg.generic
func.func @widened_after(%x: tensor<?xbf16>, %n: index, %rows: index, %into: tensor<12xf32>) -> tensor<12xf32> {
  %empty = tensor.empty(%n) : tensor<?xf32>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<?xbf16>) outs(%empty : tensor<?xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<?xf32>
  %shaped = tensor.expand_shape %wide [[0, 1]] output_shape [%rows, 12] : tensor<?xf32> into tensor<?x12xf32>
  %sum = linalg.generic {indexing_maps = [#rows, #columns], iterator_types = ["reduction", "parallel"]}
      ins(%shaped : tensor<?x12xf32>) outs(%into : tensor<12xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<12xf32>
  return %sum : tensor<12xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// Neither functions that take long nor what narrows or keeps its width is computed anew by each reader.
// CHECK-LABEL: func.func @left_alone(
// CHECK-COUNT-3: linalg.generic
// CHECK-NOT: util.optimization_barrier
// CHECK: return
func.func @left_alone(%x: tensor<4xbf16>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %slow = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xbf16>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    %e = math.exp %f : f32
    linalg.yield %e : f32
  } -> tensor<4xf32>
  %same = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%y : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %f = arith.negf %in : f32
    linalg.yield %f : f32
  } -> tensor<4xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%slow, %same : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// A mask is narrower than what it selects from, which is as wide as the result: IREE copies no such op.
// CHECK-LABEL: func.func @masked(
// CHECK: %[[KEPT:.*]] = linalg.generic {{.*}} ins(%arg0, %arg1, %arg2
// CHECK: linalg.generic {{.*}} ins(%[[KEPT]], %arg1
// CHECK: return
func.func @masked(%mask: tensor<4xi1>, %x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %kept = linalg.generic {indexing_maps = [#id, #id, #id, #id], iterator_types = ["parallel"]}
      ins(%mask, %x, %y : tensor<4xi1>, tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%m: i1, %a: f32, %b: f32, %out: f32):
    %s = arith.select %m, %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%kept, %x : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.mulf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  return %r : tensor<4xf32>
}
