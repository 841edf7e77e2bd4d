// RUN: retrograd-opt %s -p 'bwd-expand-angles' | FileCheck %s

// Of a point whose numbers are both zero or both infinite one of the same angle is taken, and the sign is put behind.
// CHECK-LABEL: func.func @angles(
// CHECK: ^bb0(%[[Y:.*]]: f32, %[[X:.*]]: f32, %{{.*}}: f32):
// CHECK-DAG: %[[ONE:.*]] = arith.constant 1.0
// CHECK-DAG: %[[HEIGHT:.*]] = math.absf %[[Y]]
// CHECK: %[[NONE:.*]] = arith.andi
// CHECK: %[[ALL:.*]] = arith.andi
// CHECK: %[[EITHER:.*]] = arith.ori %[[NONE]], %[[ALL]]
// CHECK: %[[SIDE:.*]] = math.copysign %[[ONE]], %[[X]]
// CHECK: %[[ALONG:.*]] = arith.select %[[EITHER]], %[[SIDE]], %[[X]]
// CHECK: %[[UP:.*]] = arith.select %[[ALL]], %[[ONE]], %[[HEIGHT]]
// CHECK: %[[ANGLE:.*]] = math.atan2 %[[UP]], %[[ALONG]]
// CHECK: %[[SIGNED:.*]] = math.copysign %[[ANGLE]], %[[Y]]
// CHECK: linalg.yield %[[SIGNED]]
#id = affine_map<(i) -> (i)>
func.func @angles(%y: tensor<4xf32>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %empty = tensor.empty() : tensor<4xf32>
  %both = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}
      ins(%y, %x : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %p = math.atan2 %a, %b : f32
    linalg.yield %p : f32
  } -> tensor<4xf32>
  return %both : tensor<4xf32>
}
