// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-expand-sines' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// Turns in f64, of which the nearest quarter is taken off; a polynomial of what is left.
// CHECK-LABEL: func.func @sine(
// CHECK: ^bb0(%[[X:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[ONE:.*]] = arith.constant 1.000000e+00 : f32
// CHECK: %[[WIDE:.*]] = arith.extf %[[X]] : f32 to f64
// CHECK: %[[SIZE:.*]] = math.absf %[[X]]
// CHECK: arith.cmpf oge, %[[SIZE]]
// CHECK: arith.mulf %[[WIDE]], %{{.*}} : f64
// CHECK: arith.mulf %[[WIDE]], %{{.*}} : f64
// CHECK: arith.mulf %[[WIDE]], %{{.*}} : f64
// CHECK: %[[BITS:.*]] = arith.bitcast %{{.*}} : f64 to i64
// CHECK: %[[COUNT:.*]] = arith.trunci %[[BITS]] : i64 to i32
// CHECK: %[[ANGLE:.*]] = arith.truncf %{{.*}} : f64 to f32
// CHECK: %[[SINE:.*]] = math.fma %{{.*}}, %[[ANGLE]], %[[ANGLE]]
// CHECK: %[[COSINE:.*]] = math.fma %{{.*}}, %{{.*}}, %[[ONE]]
// CHECK: %[[CHOSEN:.*]] = arith.select %{{.*}}, %[[COSINE]], %[[SINE]]
// CHECK: %[[NEGATED:.*]] = arith.negf %[[CHOSEN]]
// CHECK: %[[SIGNED:.*]] = arith.select %{{.*}}, %[[NEGATED]], %[[CHOSEN]]
// CHECK: %[[VALUE:.*]] = arith.select %{{.*}}, %[[X]], %[[SIGNED]]
// CHECK: linalg.yield %[[VALUE]]
// CHECK-NOT: math.sin
func.func @sine(%x: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = math.sin %in : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  return %y : tensor<4xf32>
}

// -----

// A cosine is the sine a quarter of a turn on; there is no case for small numbers.
// CHECK-LABEL: func.func @cosine(
// CHECK-SAME: %[[X:.*]]: f32
// CHECK: %[[ONE:.*]] = arith.constant 1 : i32
// CHECK: %[[COUNT:.*]] = arith.trunci
// CHECK: arith.addi %[[COUNT]], %[[ONE]]
// CHECK: %[[NEGATED:.*]] = arith.negf
// CHECK: %[[VALUE:.*]] = arith.select %{{.*}}, %[[NEGATED]]
// CHECK-NOT: arith.select
// CHECK: return %[[VALUE]]
func.func @cosine(%x: f32) -> f32 {
  %c = math.cos %x : f32
  return %c : f32
}

// -----

// Half types are widened.
// CHECK-LABEL: func.func @half(
// CHECK-SAME: %[[X:.*]]: bf16
// CHECK: arith.extf %[[X]] : bf16 to f32
// CHECK: %[[VALUE:.*]] = arith.truncf %{{.*}} : f32 to bf16
// CHECK: return %[[VALUE]]
func.func @half(%x: bf16) -> bf16 {
  %s = math.sin %x : bf16
  return %s : bf16
}

// -----

// IREE has functions of its own in f64.
// CHECK-LABEL: func.func @double(
// CHECK: math.cos %{{.*}} : f64
func.func @double(%x: f64) -> f64 {
  %c = math.cos %x : f64
  return %c : f64
}
