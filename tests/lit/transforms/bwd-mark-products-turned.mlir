// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-mark-products{pack-turned=true}' | FileCheck %s

// As a linear layer reads its weight; not one that lies as it is read, and none of few rows.
// CHECK-LABEL: func.func @layer(
// CHECK: linalg.matmul {iree.opt.data_tiling} ins(%{{.*}}, %{{.*}} : tensor<128x128xf32>, tensor<128x128xf32>)
// CHECK-NOT: iree.opt.data_tiling
func.func @layer(%x: tensor<128x128xf32>, %few: tensor<8x2048xf32>, %w: tensor<128x128xf32>, %v: tensor<128x2048xf32>,
                 %y: tensor<128x128xf32>, %z: tensor<8x128xf32>)
    -> (tensor<128x128xf32>, tensor<128x128xf32>, tensor<8x128xf32>) {
  %empty = tensor.empty() : tensor<128x128xf32>
  %turned = linalg.transpose ins(%w : tensor<128x128xf32>) outs(%empty : tensor<128x128xf32>) permutation = [1, 0]
  %0 = linalg.matmul ins(%x, %turned : tensor<128x128xf32>, tensor<128x128xf32>) outs(%y : tensor<128x128xf32>) -> tensor<128x128xf32>
  %1 = linalg.matmul ins(%0, %w : tensor<128x128xf32>, tensor<128x128xf32>) outs(%y : tensor<128x128xf32>) -> tensor<128x128xf32>
  %wide = tensor.empty() : tensor<2048x128xf32>
  %other = linalg.transpose ins(%v : tensor<128x2048xf32>) outs(%wide : tensor<2048x128xf32>) permutation = [1, 0]
  %2 = linalg.matmul ins(%few, %other : tensor<8x2048xf32>, tensor<2048x128xf32>) outs(%z : tensor<8x128xf32>) -> tensor<8x128xf32>
  return %0, %1, %2 : tensor<128x128xf32>, tensor<128x128xf32>, tensor<8x128xf32>
}
