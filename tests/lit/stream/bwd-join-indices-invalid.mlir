// RUN: not iree_compile %s --passes=bwd-join-indices 2>&1 | FileCheck %s

// CHECK: bwd-join-indices-invalid.mlir:[[#]]:12: error: bwd-join-indices: 'arith.remsi' op: a place is divided by 0; give each loop a size
func.func @nothing(%out: tensor<96xi32>) -> tensor<96xi32> {
  %c0 = arith.constant 0 : index
  %0 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%out : tensor<96xi32>) {
  ^bb0(%o: i32):
    %place = linalg.index 0 : index
    %row = arith.remsi %place, %c0 : index
    %r = arith.index_cast %row : index to i32
    %1 = arith.addi %r, %r : i32
    linalg.yield %1 : i32
  } -> tensor<96xi32>
  return %0 : tensor<96xi32>
}
