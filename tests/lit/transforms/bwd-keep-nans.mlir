// RUN: retrograd-opt %s --split-input-file -p 'bwd-keep-nans' | FileCheck %s

// The larger and the smaller of two.
// CHECK-LABEL: func.func @extremes(
// CHECK: ^bb0(%[[A:.*]]: f32, %[[B:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[LARGER:.*]] = arith.maximumf %[[A]], %[[B]]
// CHECK: %[[SMALLER:.*]] = arith.minimumf %[[LARGER]], %[[B]]
// CHECK: linalg.yield %[[SMALLER]]
#id = affine_map<(i) -> (i)>
func.func @extremes(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %both = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%x, %y : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %c = arith.cmpf ogt, %a, %b : f32
    %m = arith.select %c, %a, %b : f32
    %d = arith.cmpf olt, %m, %b : f32
    %n = arith.select %d, %m, %b : f32
    linalg.yield %n : f32
  } -> tensor<4xf32>
  return %both : tensor<4xf32>
}

// -----

// Bounds that are numbers, and one that each element has its own of.
// CHECK-LABEL: func.func @clamps(
// CHECK: ^bb0(%[[X:.*]]: f32, %[[MOST:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[BELOW:.*]] = arith.cmpf olt, %[[X]], %[[LEAST:.*]] : f32
// CHECK: %[[RAISED:.*]] = arith.select %[[BELOW]], %[[LEAST]], %[[X]]
// CHECK: arith.minimumf %[[RAISED]], %[[MOST]]
#id = affine_map<(i) -> (i)>
func.func @clamps(%x: tensor<4xf32>, %most: tensor<4xf32>) -> tensor<4xf32> {
  %least = arith.constant -1.0 : f32
  %empty = tensor.empty() : tensor<4xf32>
  %held = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%x, %most : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %c = arith.cmpf ult, %a, %least : f32
    %m = arith.select %c, %least, %a : f32
    %d = arith.cmpf ugt, %m, %b : f32
    %n = arith.select %d, %b, %m : f32
    linalg.yield %n : f32
  } -> tensor<4xf32>
  return %held : tensor<4xf32>
}

// -----

// A ReLU keeps what is no number by itself; what is chosen by another comparison, and where the greatest element is,
// stay as they are.
// CHECK-LABEL: func.func @others(
// CHECK: arith.cmpf ugt
// CHECK: arith.select
// CHECK: arith.cmpf olt
// CHECK: arith.select
// CHECK: arith.cmpf ogt
// CHECK: arith.select
// CHECK-NOT: arith.maximumf
#id = affine_map<(i) -> (i)>
#none = affine_map<(i) -> ()>
func.func @others(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<f32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4xf32>
  %one = tensor.empty() : tensor<f32>
  %start = linalg.fill ins(%zero : f32) outs(%one : tensor<f32>) -> tensor<f32>
  %relu = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %out: f32):
    %c = arith.cmpf ugt, %a, %zero : f32
    %m = arith.select %c, %a, %zero : f32
    %d = arith.cmpf olt, %a, %zero : f32
    %n = arith.select %d, %zero, %m : f32
    linalg.yield %n : f32
  } -> tensor<4xf32>
  %most = linalg.generic {indexing_maps = [#id, #none], iterator_types = ["reduction"]}
      ins(%x : tensor<4xf32>) outs(%start : tensor<f32>) {
  ^bb0(%a: f32, %out: f32):
    %c = arith.cmpf ogt, %a, %out : f32
    %m = arith.select %c, %a, %out : f32
    linalg.yield %m : f32
  } -> tensor<f32>
  return %relu, %most : tensor<4xf32>, tensor<f32>
}

// -----

// A bound that is none makes all none; one that the body computes may be.
// CHECK-LABEL: func.func @unknown_bounds(
// CHECK: ^bb0(%[[X:.*]]: f32, %[[B:.*]]: bf16, %{{.*}}: f32):
// CHECK: %[[RAISED:.*]] = arith.maximumf %[[X]], %{{.*}} : f32
// CHECK: %[[WIDE:.*]] = arith.extf %[[B]]
// CHECK: arith.minimumf %[[RAISED]], %[[WIDE]] : f32
#id = affine_map<(i) -> (i)>
func.func @unknown_bounds(%x: tensor<4xf32>, %most: tensor<4xbf16>) -> tensor<4xf32> {
  %nan = arith.constant 0x7FC00000 : f32
  %empty = tensor.empty() : tensor<4xf32>
  %held = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%x, %most : tensor<4xf32>, tensor<4xbf16>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %b: bf16, %out: f32):
    %c = arith.cmpf ult, %a, %nan : f32
    %m = arith.select %c, %nan, %a : f32
    %wide = arith.extf %b : bf16 to f32
    %d = arith.cmpf ugt, %m, %wide : f32
    %n = arith.select %d, %wide, %m : f32
    linalg.yield %n : f32
  } -> tensor<4xf32>
  return %held : tensor<4xf32>
}

// -----

// The place of the largest is that of the first that is no number; what is a place among others by equality, that of the
// last one.
// CHECK-LABEL: func.func @places(
// CHECK: ^bb0(%[[A:.*]]: f32, %[[BEST:.*]]: f32, %[[WHERE:.*]]: i64):
// CHECK: %[[BEATS:.*]] = arith.cmpf ugt, %[[A]], %[[BEST]] : f32
// CHECK: %[[NUMBER:.*]] = arith.cmpf ord, %[[BEST]], %[[BEST]] : f32
// CHECK: %[[WINS:.*]] = arith.andi %[[BEATS]], %[[NUMBER]]
// CHECK: arith.select %[[WINS]], %{{.*}}, %[[WHERE]] : i64
// CHECK: %[[FOUND:.*]] = tensor.extract
// CHECK: arith.cmpi eq
// CHECK: %[[FIRST:.*]] = arith.select %{{.*}}, %{{.*}}, %{{.*}} : i64
// CHECK: %[[NONE:.*]] = arith.cmpf uno, %[[FOUND]], %[[FOUND]] : f32
// CHECK: %[[LAST:.*]] = arith.select %[[NONE]], %{{.*}}, %[[FIRST]] : i64
// CHECK: linalg.yield %[[LAST]]
#id = affine_map<(i) -> (i)>
#none = affine_map<(i) -> ()>
func.func @places(%x: tensor<4xf32>, %start: tensor<f32>, %nowhere: tensor<i64>) -> (tensor<f32>, tensor<i64>, tensor<i64>) {
  %minus = arith.constant -1 : i64
  %most:2 = linalg.generic {indexing_maps = [#id, #none, #none], iterator_types = ["reduction"]}
      ins(%x : tensor<4xf32>) outs(%start, %nowhere : tensor<f32>, tensor<i64>) {
  ^bb0(%a: f32, %best: f32, %where: i64):
    %i = linalg.index 0 : index
    %here = arith.index_cast %i : index to i64
    %m = arith.maximumf %a, %best : f32
    %c = arith.cmpf ogt, %a, %best : f32
    %p = arith.select %c, %here, %where : i64
    linalg.yield %m, %p : f32, i64
  } -> (tensor<f32>, tensor<i64>)
  %place = linalg.generic {indexing_maps = [#none, #id, #none], iterator_types = ["reduction"]}
      ins(%most#0, %x : tensor<f32>, tensor<4xf32>) outs(%nowhere : tensor<i64>) {
  ^bb0(%best: f32, %unread: f32, %where: i64):
    %i = linalg.index 0 : index
    %here = arith.index_cast %i : index to i64
    %a = tensor.extract %x[%i] : tensor<4xf32>
    %same = arith.cmpf oeq, %a, %best : f32
    %p = arith.select %same, %here, %where : i64
    %none = arith.cmpi eq, %where, %minus : i64
    %q = arith.select %none, %p, %where : i64
    linalg.yield %q : i64
  } -> tensor<i64>
  return %most#0, %most#1, %place : tensor<f32>, tensor<i64>, tensor<i64>
}
