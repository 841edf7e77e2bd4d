// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-expand-erf' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// Up to one an odd polynomial of x, beyond one of |x|, with x's sign.
// CHECK-LABEL: func.func @f32(
// CHECK: ^bb0(%[[X:.*]]: f32, %{{.*}}: f32):
// CHECK: %[[SQUARE:.*]] = arith.mulf %[[X]], %[[X]]
// CHECK: %[[NEAR:.*]] = math.fma %{{.*}}, %[[X]], %[[X]]
// CHECK: %[[SIZE:.*]] = math.absf %[[X]]
// CHECK: %[[HELD:.*]] = arith.minimumf %[[SIZE]]
// CHECK: %[[U:.*]] = arith.subf %[[HELD]]
// CHECK: %[[T:.*]] = math.fma %{{.*}}, %[[U]]
// CHECK: %[[FAR:.*]] = math.copysign %{{.*}}, %[[X]]
// CHECK: %[[IS_NEAR:.*]] = arith.cmpf olt, %[[SIZE]]
// CHECK: %[[VALUE:.*]] = arith.select %[[IS_NEAR]], %[[NEAR]], %[[FAR]]
// CHECK: linalg.yield %[[VALUE]]
// CHECK-NOT: math.erf
func.func @f32(%x: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %t = math.erf %in : f32
    linalg.yield %t : f32
  } -> tensor<4xf32>
  return %y : tensor<4xf32>
}

// -----

// CHECK-LABEL: func.func @other(
// CHECK: math.erf %{{.*}} : bf16
// CHECK: math.erf %{{.*}} : f64
func.func @other(%x: bf16, %y: f64) -> (bf16, f64) {
  %s = math.erf %x : bf16
  %t = math.erf %y : f64
  return %s, %t : bf16, f64
}
