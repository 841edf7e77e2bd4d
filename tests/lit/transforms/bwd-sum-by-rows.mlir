// RUN: retrograd-opt %s -p 'bwd-sum-by-rows' | FileCheck %s

#cube = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#turned = affine_map<(d0, d1, d2) -> (d2, d0, d1)>
#none = affine_map<(d0, d1, d2) -> ()>
#matrix = affine_map<(d0, d1) -> (d0, d1)>
#nothing = affine_map<(d0, d1) -> ()>
#kept = affine_map<(d0, d1) -> (0, 0)>

// With what is computed of each element first; a second operand lies otherwise.
// CHECK-LABEL: func.func @sum(
// CHECK: %[[ROWS:.*]] = linalg.generic {{.*}}iterator_types = ["parallel", "parallel", "reduction"]{{.*}} outs(%{{.*}} : tensor<8x512xf32>)
// CHECK: arith.mulf
// CHECK: arith.addf
// CHECK: %[[FEWER:.*]] = linalg.generic {{.*}}iterator_types = ["parallel", "reduction"]{{.*}} ins(%[[ROWS]] : tensor<8x512xf32>)
// CHECK: arith.addf
// CHECK: linalg.generic {{.*}}iterator_types = ["reduction"]{{.*}} ins(%[[FEWER]] : tensor<8xf32>)
// CHECK: arith.addf
func.func @sum(%x: tensor<8x512x1024xf32>, %y: tensor<1024x8x512xf32>) -> tensor<f32> {
  %zero = arith.constant 0.0 : f32
  %0 = tensor.empty() : tensor<f32>
  %1 = linalg.fill ins(%zero : f32) outs(%0 : tensor<f32>) -> tensor<f32>
  %2 = linalg.generic {indexing_maps = [#cube, #turned, #none], iterator_types = ["reduction", "reduction", "reduction"]} ins(%x, %y : tensor<8x512x1024xf32>, tensor<1024x8x512xf32>) outs(%1 : tensor<f32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %3 = arith.mulf %a, %b : f32
    %4 = arith.addf %3, %o : f32
    linalg.yield %4 : f32
  } -> tensor<f32>
  return %2 : tensor<f32>
}

// CHECK-LABEL: func.func @largest(
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "reduction"]
// CHECK: arith.maximumf
// CHECK: linalg.generic {{.*}}iterator_types = ["reduction"]{{.*}} ins(%{{.*}} : tensor<4096xf32>)
// CHECK: arith.maximumf
func.func @largest(%x: tensor<4096x512xf32>) -> tensor<f32> {
  %least = arith.constant 0xFF800000 : f32
  %0 = tensor.empty() : tensor<f32>
  %1 = linalg.fill ins(%least : f32) outs(%0 : tensor<f32>) -> tensor<f32>
  %2 = linalg.generic {indexing_maps = [#matrix, #nothing], iterator_types = ["reduction", "reduction"]} ins(%x : tensor<4096x512xf32>) outs(%1 : tensor<f32>) {
  ^bb0(%a: f32, %o: f32):
    %3 = arith.maximumf %a, %o : f32
    linalg.yield %3 : f32
  } -> tensor<f32>
  return %2 : tensor<f32>
}

// A product, and what keeps axes of one number.
// CHECK-LABEL: func.func @product(
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "reduction"]{{.*}} outs(%{{.*}} : tensor<4096xf32>)
// CHECK: arith.mulf
// CHECK: linalg.generic {{.*}}iterator_types = ["reduction"]{{.*}} ins(%{{.*}} : tensor<4096xf32>) outs(%{{.*}} : tensor<1x1xf32>)
// CHECK: arith.mulf
func.func @product(%x: tensor<4096x512xf32>) -> tensor<1x1xf32> {
  %one = arith.constant 1.0 : f32
  %0 = tensor.empty() : tensor<1x1xf32>
  %1 = linalg.fill ins(%one : f32) outs(%0 : tensor<1x1xf32>) -> tensor<1x1xf32>
  %2 = linalg.generic {indexing_maps = [#matrix, #kept], iterator_types = ["reduction", "reduction"]} ins(%x : tensor<4096x512xf32>) outs(%1 : tensor<1x1xf32>) {
  ^bb0(%a: f32, %o: f32):
    %3 = arith.mulf %a, %o : f32
    linalg.yield %3 : f32
  } -> tensor<1x1xf32>
  return %2 : tensor<1x1xf32>
}

// From a number that counts once, a product of what was so far, and few numbers: as they are.
// CHECK-LABEL: func.func @others(
// CHECK-COUNT-3: iterator_types = ["reduction", "reduction"]
// CHECK-NOT: linalg.generic
func.func @others(%x: tensor<4096x512xf32>, %few: tensor<8x32xf32>) -> (tensor<f32>, tensor<f32>, tensor<f32>) {
  %zero = arith.constant 0.0 : f32
  %one = arith.constant 1.0 : f32
  %0 = tensor.empty() : tensor<f32>
  %1 = linalg.fill ins(%zero : f32) outs(%0 : tensor<f32>) -> tensor<f32>
  %2 = linalg.fill ins(%one : f32) outs(%0 : tensor<f32>) -> tensor<f32>
  %3 = linalg.generic {indexing_maps = [#matrix, #nothing], iterator_types = ["reduction", "reduction"]} ins(%x : tensor<4096x512xf32>) outs(%2 : tensor<f32>) {
  ^bb0(%a: f32, %o: f32):
    %6 = arith.addf %a, %o : f32
    linalg.yield %6 : f32
  } -> tensor<f32>
  %4 = linalg.generic {indexing_maps = [#matrix, #nothing], iterator_types = ["reduction", "reduction"]} ins(%x : tensor<4096x512xf32>) outs(%1 : tensor<f32>) {
  ^bb0(%a: f32, %o: f32):
    %6 = arith.mulf %o, %o : f32
    %7 = arith.addf %a, %6 : f32
    linalg.yield %7 : f32
  } -> tensor<f32>
  %5 = linalg.generic {indexing_maps = [#matrix, #nothing], iterator_types = ["reduction", "reduction"]} ins(%few : tensor<8x32xf32>) outs(%1 : tensor<f32>) {
  ^bb0(%a: f32, %o: f32):
    %6 = arith.addf %a, %o : f32
    linalg.yield %6 : f32
  } -> tensor<f32>
  return %3, %4, %5 : tensor<f32>, tensor<f32>, tensor<f32>
}
