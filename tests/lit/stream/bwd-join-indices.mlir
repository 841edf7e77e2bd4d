// RUN: iree_compile %s --passes=bwd-join-indices | FileCheck %s

#id = affine_map<(d0) -> (d0)>
#two = affine_map<(d0, d1) -> (d0, d1)>

// Loops of 8, 12 and 512 that IREE made one of, whose element is numbered in row-major order.
// CHECK-LABEL: func.func @all(
// CHECK: %[[PLACE:.*]] = linalg.index 0
// CHECK: %[[CAST:.*]] = arith.index_cast %[[PLACE]] : index to i32
// CHECK: linalg.yield %[[CAST]]
func.func @all(%out: tensor<49152xi32>) -> tensor<49152xi32> {
  %c12 = arith.constant 12 : index
  %c512 = arith.constant 512 : index
  %n12 = arith.constant 12 : i32
  %n512 = arith.constant 512 : i32
  %0 = linalg.generic {indexing_maps = [#id], iterator_types = ["parallel"]} outs(%out : tensor<49152xi32>) {
  ^bb0(%o: i32):
    %place = linalg.index 0 : index
    %column = arith.remsi %place, %c512 : index
    %rows = arith.divsi %place, %c512 : index
    %row = arith.remui %rows, %c12 : index
    %batch = arith.divui %rows, %c12 : index
    %b = arith.index_cast %batch : index to i32
    %r = arith.index_cast %row : index to i32
    %c = arith.index_cast %column : index to i32
    %1 = arith.muli %b, %n12 : i32
    %2 = arith.addi %1, %r : i32
    %3 = arith.muli %n512, %2 : i32
    %4 = arith.addi %3, %c : i32
    linalg.yield %4 : i32
  } -> tensor<49152xi32>
  return %0 : tensor<49152xi32>
}

// With a factor and a constant that overflow.
// CHECK-LABEL: func.func @more(
// CHECK: %[[PLACE:.*]] = linalg.index 0
// CHECK: %[[CAST:.*]] = arith.index_cast %[[PLACE]] : index to i32
// CHECK: %[[SCALED:.*]] = arith.muli %[[CAST]], %c-2147483648
// CHECK: arith.addi %[[SCALED]], %c-5
func.func @more(%out: tensor<96xi32>) -> tensor<96xi32> {
  %c12 = arith.constant 12 : index
  %n12 = arith.constant 12 : i32
  %factor = arith.constant -2147483648 : i32
  %constant = arith.constant -5 : i32
  %0 = linalg.generic {indexing_maps = [#id], iterator_types = ["parallel"]} outs(%out : tensor<96xi32>) {
  ^bb0(%o: i32):
    %place = linalg.index 0 : index
    %row = arith.remsi %place, %c12 : index
    %batch = arith.divsi %place, %c12 : index
    %b = arith.index_cast %batch : index to i32
    %r = arith.index_cast %row : index to i32
    %1 = arith.muli %b, %n12 : i32
    %2 = arith.addi %1, %r : i32
    %3 = arith.muli %2, %factor : i32
    %4 = arith.addi %3, %constant : i32
    linalg.yield %4 : i32
  } -> tensor<96xi32>
  return %0 : tensor<96xi32>
}

// Not the same division, other factors, a place that may be negative: as it was.
// CHECK-LABEL: func.func @others(
// CHECK: %[[FIRST:.*]] = arith.addi %{{.*}}, %{{.*}} : i32
// CHECK: %[[SECOND:.*]] = arith.addi %{{.*}}, %{{.*}} : i32
// CHECK: %[[THIRD:.*]] = arith.addi %{{.*}}, %{{.*}} : i32
// CHECK: arith.xori %[[FIRST]], %[[SECOND]]
// CHECK: arith.xori %{{.*}}, %[[THIRD]]
func.func @others(%out: tensor<4x96xi32>) -> tensor<4x96xi32> {
  %c12 = arith.constant 12 : index
  %c8 = arith.constant 8 : index
  %n12 = arith.constant 12 : i32
  %n8 = arith.constant 8 : i32
  %0 = linalg.generic {indexing_maps = [#two], iterator_types = ["parallel", "parallel"]} outs(%out : tensor<4x96xi32>) {
  ^bb0(%o: i32):
    %line = linalg.index 0 : index
    %place = linalg.index 1 : index
    %row = arith.remsi %place, %c12 : index
    %other = arith.divsi %place, %c8 : index
    %own = arith.divsi %place, %c12 : index
    %below = arith.subi %line, %place : index
    %negative = arith.divsi %below, %c12 : index
    %rest = arith.remsi %below, %c12 : index
    %r = arith.index_cast %row : index to i32
    %q = arith.index_cast %other : index to i32
    %p = arith.index_cast %own : index to i32
    %n = arith.index_cast %negative : index to i32
    %m = arith.index_cast %rest : index to i32
    %1 = arith.muli %q, %n12 : i32
    %2 = arith.addi %1, %r : i32
    %3 = arith.muli %p, %n8 : i32
    %4 = arith.addi %3, %r : i32
    %5 = arith.muli %n, %n12 : i32
    %6 = arith.addi %5, %m : i32
    %7 = arith.xori %2, %4 : i32
    %8 = arith.xori %7, %6 : i32
    linalg.yield %8 : i32
  } -> tensor<4x96xi32>
  return %0 : tensor<4x96xi32>
}
