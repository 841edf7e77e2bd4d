// RUN: retrograd-opt %s --split-input-file -p 'bwd-keep-roundings' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// Where elements are compared with another tensor's, bfloat16 is rounded by its bits, wherever it is computed.
// CHECK-LABEL: func.func @compared(
// CHECK: ^bb0(%[[X:.*]]: bf16, %{{.*}}: bf16):
// CHECK: %[[LEFT:.*]] = arith.extf %[[X]] : bf16 to f32
// CHECK: %[[RIGHT:.*]] = arith.extf %[[X]] : bf16 to f32
// CHECK: %[[SQUARE:.*]] = arith.mulf %[[LEFT]], %[[RIGHT]] : f32
// CHECK: %[[BITS:.*]] = arith.bitcast %[[SQUARE]] : f32 to i32
// CHECK: %[[CUT:.*]] = arith.andi %{{.*}}, %{{.*}} : i32
// CHECK: %[[ROUNDED:.*]] = arith.bitcast %{{.*}} : i32 to f32
// CHECK: %[[IS_NAN:.*]] = arith.cmpf uno, %[[SQUARE]], %[[SQUARE]] : f32
// CHECK: %[[VALUE:.*]] = arith.select %[[IS_NAN]], %[[SQUARE]], %[[ROUNDED]] : f32
// CHECK: %[[NARROW:.*]] = arith.truncf %[[VALUE]] : f32 to bf16
// CHECK: linalg.yield %[[NARROW]] : bf16
// CHECK: arith.cmpf oeq
func.func @compared(%x: tensor<4xbf16>, %most: tensor<4xf32>, %o: tensor<4xbf16>, %c: tensor<4xi1>) -> tensor<4xi1> {
  %square = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xbf16>) outs(%o : tensor<4xbf16>) {
  ^bb0(%a: bf16, %b: bf16):
    %s = arith.mulf %a, %a : bf16
    linalg.yield %s : bf16
  } -> tensor<4xbf16>
  %mask = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%square, %most : tensor<4xbf16>, tensor<4xf32>) outs(%c : tensor<4xi1>) {
  ^bb0(%a: bf16, %b: f32, %d: i1):
    %wide = arith.extf %a : bf16 to f32
    %s = arith.cmpf oeq, %wide, %b : f32
    linalg.yield %s : i1
  } -> tensor<4xi1>
  return %mask : tensor<4xi1>
}

// -----

#id = affine_map<(d0) -> (d0)>

// Functions of `math` and roundings of f32 too; what is exact stays.
// CHECK-LABEL: func.func @functions(
// CHECK: math.exp %{{.*}} : f32
// CHECK: arith.bitcast %{{.*}} : f32 to i32
// CHECK: math.absf %{{.*}} : bf16
// CHECK: %[[BITS:.*]] = arith.bitcast %{{.*}} : f32 to i32
// CHECK: arith.truncf %{{.*}} : f32 to bf16
func.func @functions(%x: tensor<4xbf16>, %y: tensor<4xf32>, %o: tensor<4xbf16>, %c: tensor<4xi1>) -> (tensor<4xbf16>, tensor<4xbf16>, tensor<4xi1>) {
  %e = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xbf16>) outs(%o : tensor<4xbf16>) {
  ^bb0(%a: bf16, %b: bf16):
    %s = math.exp %a : bf16
    %t = math.absf %s : bf16
    linalg.yield %t : bf16
  } -> tensor<4xbf16>
  %n = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%y : tensor<4xf32>) outs(%o : tensor<4xbf16>) {
  ^bb0(%a: f32, %b: bf16):
    %s = arith.truncf %a : f32 to bf16
    linalg.yield %s : bf16
  } -> tensor<4xbf16>
  %m = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%e, %n : tensor<4xbf16>, tensor<4xbf16>) outs(%c : tensor<4xi1>) {
  ^bb0(%a: bf16, %b: bf16, %d: i1):
    %s = arith.cmpf une, %a, %b : bf16
    linalg.yield %s : i1
  } -> tensor<4xi1>
  return %e, %n, %m : tensor<4xbf16>, tensor<4xbf16>, tensor<4xi1>
}

// -----

#id = affine_map<(d0) -> (d0)>

// Neither a comparison with a constant asks for that, nor one of a tensor with itself, nor one by size.
// CHECK-LABEL: func.func @not_compared(
// CHECK-NOT: arith.bitcast
// CHECK: return
func.func @not_compared(%x: tensor<4xbf16>, %y: tensor<4xbf16>, %o: tensor<4xbf16>, %c: tensor<4xi1>) -> (tensor<4xbf16>, tensor<4xi1>) {
  %zero = arith.constant 0.0 : bf16
  %square = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xbf16>) outs(%o : tensor<4xbf16>) {
  ^bb0(%a: bf16, %b: bf16):
    %s = arith.mulf %a, %a : bf16
    linalg.yield %s : bf16
  } -> tensor<4xbf16>
  %mask = linalg.generic {indexing_maps = [#id, #id, #id, #id], iterator_types = ["parallel"]}
      ins(%square, %square, %y : tensor<4xbf16>, tensor<4xbf16>, tensor<4xbf16>) outs(%c : tensor<4xi1>) {
  ^bb0(%a: bf16, %b: bf16, %e: bf16, %d: i1):
    %s = arith.cmpf oeq, %a, %zero : bf16
    %t = arith.cmpf une, %a, %b : bf16
    %u = arith.cmpf olt, %a, %e : bf16
    %v = arith.andi %s, %t : i1
    %w = arith.andi %u, %v : i1
    linalg.yield %w : i1
  } -> tensor<4xi1>
  return %square, %mask : tensor<4xbf16>, tensor<4xi1>
}

// -----

#in = affine_map<(d0) -> (d0)>
#one = affine_map<(d0) -> ()>

// Of equal elements the first is the greatest: its place is looked for among rounded ones. Where nobody reads the
// place, none is asked for.
// CHECK-LABEL: func.func @greatest(
// CHECK: arith.bitcast
// CHECK-LABEL: func.func @maximum(
// CHECK-NOT: arith.bitcast
func.func @greatest(%x: tensor<4xbf16>, %o: tensor<4xbf16>, %m: tensor<bf16>, %i: tensor<i64>) -> tensor<i64> {
  %square = linalg.generic {indexing_maps = [#in, #in], iterator_types = ["parallel"]}
      ins(%x : tensor<4xbf16>) outs(%o : tensor<4xbf16>) {
  ^bb0(%a: bf16, %b: bf16):
    %s = arith.mulf %a, %a : bf16
    linalg.yield %s : bf16
  } -> tensor<4xbf16>
  %most:2 = linalg.generic {indexing_maps = [#in, #one, #one], iterator_types = ["reduction"]}
      ins(%square : tensor<4xbf16>) outs(%m, %i : tensor<bf16>, tensor<i64>) {
  ^bb0(%a: bf16, %b: bf16, %c: i64):
    %here = linalg.index 0 : index
    %place = arith.index_cast %here : index to i64
    %s = arith.cmpf ogt, %a, %b : bf16
    %t = arith.select %s, %a, %b : bf16
    %u = arith.select %s, %place, %c : i64
    linalg.yield %t, %u : bf16, i64
  } -> (tensor<bf16>, tensor<i64>)
  return %most#1 : tensor<i64>
}

// -----

#in = affine_map<(d0) -> (d0)>
#one = affine_map<(d0) -> ()>

func.func @maximum(%x: tensor<4xbf16>, %o: tensor<4xbf16>, %m: tensor<bf16>, %i: tensor<i64>) -> tensor<bf16> {
  %square = linalg.generic {indexing_maps = [#in, #in], iterator_types = ["parallel"]}
      ins(%x : tensor<4xbf16>) outs(%o : tensor<4xbf16>) {
  ^bb0(%a: bf16, %b: bf16):
    %s = arith.mulf %a, %a : bf16
    linalg.yield %s : bf16
  } -> tensor<4xbf16>
  %most:2 = linalg.generic {indexing_maps = [#in, #one, #one], iterator_types = ["reduction"]}
      ins(%square : tensor<4xbf16>) outs(%m, %i : tensor<bf16>, tensor<i64>) {
  ^bb0(%a: bf16, %b: bf16, %c: i64):
    %here = linalg.index 0 : index
    %place = arith.index_cast %here : index to i64
    %s = arith.cmpf ogt, %a, %b : bf16
    %t = arith.select %s, %a, %b : bf16
    %u = arith.select %s, %place, %c : i64
    linalg.yield %t, %u : bf16, i64
  } -> (tensor<bf16>, tensor<i64>)
  return %most#0 : tensor<bf16>
}
