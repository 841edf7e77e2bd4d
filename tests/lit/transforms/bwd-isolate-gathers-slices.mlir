// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-gathers{copies-slices=true}' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-gathers' | FileCheck %s --check-prefix=KEPT

#id = affine_map<(d0) -> (d0)>
#map = affine_map<(d0, d1) -> (d0, d1)>

// Channels of several images have gaps between the images; they are copied, and widened as they are read. A slice along
// the first axis, and one of a single image, have none.
// CHECK-LABEL: func.func @channels(
// CHECK: %[[SLICE:.*]] = tensor.extract_slice %arg1[0, 4]
// CHECK-NEXT: %[[COPY:.*]] = "util.optimization_barrier"(%[[SLICE]]) : (tensor<2x4xbf16>) -> tensor<2x4xbf16>
// CHECK: linalg.generic {{.*}} ins(%[[COPY]] : tensor<2x4xbf16>)
// CHECK-NOT: util.optimization_barrier
// KEPT-NOT: util.optimization_barrier
func.func @channels(%places: tensor<4xi64>, %x: tensor<2x12xbf16>) -> (tensor<4xf32>, tensor<4xbf16>, tensor<4xbf16>) {
  %one = arith.constant 1 : index
  %zero = arith.constant 0 : index
  %empty = tensor.empty() : tensor<4xf32>
  %narrow = tensor.empty() : tensor<4xbf16>
  %all = tensor.empty() : tensor<2x4xf32>
  %slice = tensor.extract_slice %x[0, 4] [2, 4] [1, 1] : tensor<2x12xbf16> to tensor<2x4xbf16>
  %wide = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel"]}
      ins(%slice : tensor<2x4xbf16>) outs(%all : tensor<2x4xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<2x4xf32>
  %gathered = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %wide[%one, %at] : tensor<2x4xf32>
    linalg.yield %value : f32
  } -> tensor<4xf32>
  %last = tensor.extract_slice %x[1, 0] [1, 12] [1, 1] : tensor<2x12xbf16> to tensor<1x12xbf16>
  %row = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%narrow : tensor<4xbf16>) {
  ^bb0(%in: i64, %out: bf16):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %last[%zero, %at] : tensor<1x12xbf16>
    linalg.yield %value : bf16
  } -> tensor<4xbf16>
  %part = tensor.extract_slice %x[1, 2] [1, 6] [1, 1] : tensor<2x12xbf16> to tensor<1x6xbf16>
  %piece = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%narrow : tensor<4xbf16>) {
  ^bb0(%in: i64, %out: bf16):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %part[%zero, %at] : tensor<1x6xbf16>
    linalg.yield %value : bf16
  } -> tensor<4xbf16>
  return %gathered, %row, %piece : tensor<4xf32>, tensor<4xbf16>, tensor<4xbf16>
}
