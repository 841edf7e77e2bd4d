// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-expand-tanh' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// Near zero a polynomial of x, elsewhere a quotient of exponentials with x's sign.
// CHECK-LABEL: func.func @f32(
// CHECK: ^bb0(%[[X:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[SIZE:.*]] = math.absf %[[X]]
// CHECK: %[[E:.*]] = math.exp
// CHECK: %[[ABOVE:.*]] = arith.addf %[[E]], %[[E]]
// CHECK: %[[BELOW:.*]] = arith.addf %[[ONE:.*]], %[[E]]
// CHECK: %[[MISSING:.*]] = arith.divf %[[ABOVE]], %[[BELOW]]
// CHECK: %[[FAR_SIZE:.*]] = arith.subf %[[ONE]], %[[MISSING]]
// CHECK: %[[FAR:.*]] = math.copysign %[[FAR_SIZE]], %[[X]]
// CHECK: %[[SQUARE:.*]] = arith.mulf %[[X]], %[[X]]
// CHECK: %[[NEAR:.*]] = math.fma %{{.*}}, %[[X]], %[[X]]
// CHECK: %[[IS_NEAR:.*]] = arith.cmpf olt, %[[SIZE]]
// CHECK: %[[VALUE:.*]] = arith.select %[[IS_NEAR]], %[[NEAR]], %[[FAR]]
// CHECK: linalg.yield %[[VALUE]]
// CHECK-NOT: math.tanh
func.func @f32(%x: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %t = math.tanh %in : f32
    linalg.yield %t : f32
  } -> tensor<4xf32>
  return %y : tensor<4xf32>
}

// -----

// Half types have fewer digits than IREE's form gives them.
// CHECK-LABEL: func.func @half(
// CHECK: math.tanh %{{.*}} : bf16
func.func @half(%x: bf16) -> bf16 {
  %t = math.tanh %x : bf16
  return %t : bf16
}
