// RUN: retrograd-opt %s --split-input-file -p 'bwd-expand-powers' | FileCheck %s

// Of what may be negative the power of its size is taken, which gets the sign behind.
// CHECK-LABEL: func.func @powers(
// CHECK: ^bb0(%[[A:.*]]: f32, %[[B:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[SIZE:.*]] = math.absf %[[A]]
// CHECK: %[[POWER:.*]] = math.powf %[[SIZE]], %[[B]]
// CHECK: %[[KNOWN:.*]] = arith.select %{{.*}}, %{{.*}}, %[[POWER]]
// CHECK: %[[SIGNED:.*]] = math.copysign %[[KNOWN]], %[[A]]
// CHECK: %[[RIGHT:.*]] = arith.select %{{.*}}, %[[SIGNED]], %[[KNOWN]]
// CHECK: %[[ALL:.*]] = arith.select %{{.*}}, %{{.*}}, %[[RIGHT]]
// CHECK: linalg.yield %[[ALL]]
#id = affine_map<(i) -> (i)>
func.func @powers(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %both = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%x, %y : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %p = math.powf %a, %b : f32
    linalg.yield %p : f32
  } -> tensor<4xf32>
  return %both : tensor<4xf32>
}

// -----

// A constant whole exponent below zero makes a quotient; one that is not whole, a base above zero, and a whole exponent
// that is not below zero stay.
// CHECK-LABEL: func.func @constants(
// CHECK: ^bb0(%[[A:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[INVERSE:.*]] = arith.divf %{{.*}}, %[[A]]
// CHECK: %[[CUBE:.*]] = math.fpowi %[[INVERSE]], %{{.*}}
// CHECK: %[[BELOW:.*]] = arith.divf %{{.*}}, %[[CUBE]]
// CHECK: %[[ROOT:.*]] = math.powf %[[BELOW]], %{{.*}}
// CHECK: %[[BASE:.*]] = math.powf %{{.*}}, %[[ROOT]]
// CHECK: %[[WHOLE:.*]] = math.fpowi %[[BASE]], %{{.*}}
// CHECK: linalg.yield %[[WHOLE]]
#id = affine_map<(i) -> (i)>
func.func @constants(%x: tensor<4xf32>) -> tensor<4xf32> {
  %inverse = arith.constant -1 : i64
  %below = arith.constant -3 : i64
  %third = arith.constant 3 : i64
  %half = arith.constant 2.5 : f32
  %empty = tensor.empty() : tensor<4xf32>
  %all = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %out: f32):
    %p = math.fpowi %a, %inverse : f32, i64
    %q = math.fpowi %p, %below : f32, i64
    %r = math.powf %q, %half : f32
    %s = math.powf %half, %r : f32
    %t = math.fpowi %s, %third : f32, i64
    linalg.yield %t : f32
  } -> tensor<4xf32>
  return %all : tensor<4xf32>
}
