// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-gathers' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// A gather from what a gather gave, seen through a view, is a kernel of its own.
// CHECK-LABEL: func.func @chain(
// CHECK: %[[FIRST:.*]] = linalg.generic
// CHECK: tensor.extract %arg1[
// CHECK: %[[ROWS:.*]] = tensor.expand_shape %[[FIRST]]
// CHECK: %[[HIDDEN:.*]] = "util.optimization_barrier"(%[[ROWS]]) : (tensor<4x1xf32>) -> tensor<4x1xf32>
// CHECK-NEXT: linalg.generic
// CHECK: tensor.extract %[[HIDDEN]][
// CHECK: tensor.extract %[[HIDDEN]][
// CHECK-NOT: util.optimization_barrier
func.func @chain(%places: tensor<4xi64>, %table: tensor<9xf32>) -> tensor<4xf32> {
  %zero = arith.constant 0 : index
  %empty = tensor.empty() : tensor<4xf32>
  %first = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %table[%at] : tensor<9xf32>
    linalg.yield %value : f32
  } -> tensor<4xf32>
  %rows = tensor.expand_shape %first [[0, 1]] output_shape [4, 1] : tensor<4xf32> into tensor<4x1xf32>
  %second = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %rows[%at, %zero] : tensor<4x1xf32>
    %top = tensor.extract %rows[%zero, %zero] : tensor<4x1xf32>
    %sum = arith.addf %value, %top : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  return %second : tensor<4xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// A widened argument is gathered from as it is; one of what was computed is not.
// CHECK-LABEL: func.func @widened(
// CHECK: linalg.generic
// CHECK: arith.extf
// CHECK-NOT: util.optimization_barrier
// CHECK: arith.addf
// CHECK: %[[WIDE:.*]] = linalg.generic
// CHECK: arith.extf
// CHECK: "util.optimization_barrier"(%[[WIDE]])
func.func @widened(%places: tensor<4xi64>, %table: tensor<9xbf16>) -> (tensor<4xf32>, tensor<4xf32>) {
  %empty = tensor.empty() : tensor<4xf32>
  %narrow = tensor.empty() : tensor<9xbf16>
  %all = tensor.empty() : tensor<9xf32>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%table : tensor<9xbf16>) outs(%all : tensor<9xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<9xf32>
  %first = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %wide[%at] : tensor<9xf32>
    linalg.yield %value : f32
  } -> tensor<4xf32>
  %doubled = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%table : tensor<9xbf16>) outs(%narrow : tensor<9xbf16>) {
  ^bb0(%in: bf16, %out: bf16):
    %sum = arith.addf %in, %in : bf16
    linalg.yield %sum : bf16
  } -> tensor<9xbf16>
  %wider = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%doubled : tensor<9xbf16>) outs(%all : tensor<9xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<9xf32>
  %second = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %wider[%at] : tensor<9xf32>
    linalg.yield %value : f32
  } -> tensor<4xf32>
  return %first, %second : tensor<4xf32>, tensor<4xf32>
}

// -----

#row = affine_map<(d0, d1) -> (d0, d1)>
#kept = affine_map<(d0, d1) -> (d0)>
#id = affine_map<(d0) -> (d0)>

// A reduction is a kernel of its own anyway, and an argument is none.
// CHECK-LABEL: func.func @reduced(
// CHECK-NOT: util.optimization_barrier
func.func @reduced(%places: tensor<4xi64>, %x: tensor<4x8xf32>, %start: tensor<4xf32>) -> tensor<4xf32> {
  %sums = linalg.generic {indexing_maps = [#row, #kept], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<4x8xf32>) outs(%start : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %sum = arith.addf %in, %out : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%start : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %sums[%at] : tensor<4xf32>
    %other = tensor.extract %start[%at] : tensor<4xf32>
    %sum = arith.addf %value, %other : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// One element of each row, and every other one, have gaps between them; the first half of a row has none.
// CHECK-LABEL: func.func @spaced(
// CHECK: %[[COLUMN:.*]] = tensor.collapse_shape
// CHECK-DAG: %[[FIRST:.*]] = "util.optimization_barrier"(%[[COLUMN]]) : (tensor<9xf32>) -> tensor<9xf32>
// CHECK-DAG: %[[SECOND:.*]] = "util.optimization_barrier"(%{{.*}}) : (tensor<5xf32>) -> tensor<5xf32>
// CHECK-NOT: util.optimization_barrier
// CHECK: linalg.generic
// CHECK: tensor.extract %[[FIRST]][
// CHECK: tensor.extract %[[SECOND]][
// CHECK: tensor.extract %{{.*}}[%{{.*}}] : tensor<4xf32>
func.func @spaced(%places: tensor<4xi64>, %x: tensor<9x8xf32>, %y: tensor<9xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %cut = tensor.extract_slice %x[0, 3] [9, 1] [1, 1] : tensor<9x8xf32> to tensor<9x1xf32>
  %column = tensor.collapse_shape %cut [[0, 1]] : tensor<9x1xf32> into tensor<9xf32>
  %others = tensor.extract_slice %y[0] [5] [2] : tensor<9xf32> to tensor<5xf32>
  %half = tensor.extract_slice %y[0] [4] [1] : tensor<9xf32> to tensor<4xf32>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %a = tensor.extract %column[%at] : tensor<9xf32>
    %b = tensor.extract %others[%at] : tensor<5xf32>
    %c = tensor.extract %half[%at] : tensor<4xf32>
    %ab = arith.addf %a, %b : f32
    %sum = arith.addf %ab, %c : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  return %r : tensor<4xf32>
}
