// RUN: retrograd-opt %s --split-input-file -p 'bwd-pad-products' | FileCheck %s

// CHECK-LABEL: func.func @sizes_that_do_not_divide(
// CHECK: %[[X:.*]] = tensor.pad %arg0 low[0, 0, 0] high[0, 8, 6]
// CHECK: arith.constant 0.000000e+00 : bf16
// CHECK: : tensor<3x24x10xbf16> to tensor<3x32x16xbf16>
// CHECK: %[[Y:.*]] = tensor.pad %arg1 low[0, 0, 0] high[0, 6, 4]
// CHECK: %[[R:.*]] = linalg.batch_matmul ins(%[[X]], %[[Y]] : {{.*}}) outs(%{{.*}} : tensor<3x32x16xf32>)
// CHECK: %[[CUT:.*]] = tensor.extract_slice %[[R]][0, 0, 0] [3, 24, 12] [1, 1, 1]
// CHECK: return %[[CUT]] : tensor<3x24x12xf32>
func.func @sizes_that_do_not_divide(
    %x: tensor<3x24x10xbf16>, %y: tensor<3x10x12xbf16>, %into: tensor<3x24x12xf32>) -> tensor<3x24x12xf32> {
  %r = linalg.batch_matmul ins(%x, %y : tensor<3x24x10xbf16>, tensor<3x10x12xbf16>)
      outs(%into : tensor<3x24x12xf32>) -> tensor<3x24x12xf32>
  return %r : tensor<3x24x12xf32>
}

// -----

// Sixteen terms of bfloat16 at a time, thirty-two of eight bits each.
// CHECK-LABEL: func.func @sizes_that_divide(
// CHECK-NOT: tensor.pad
// CHECK: linalg.batch_matmul
// CHECK: tensor.pad {{.*}} high[0, 0, 16]
// CHECK: tensor.pad {{.*}} high[0, 16, 0]
// CHECK-NOT: tensor.pad
// CHECK-NOT: tensor.extract_slice
func.func @sizes_that_divide(
    %x: tensor<5x32x16xbf16>, %y: tensor<5x16x48xbf16>, %v: tensor<5x32x16xf8E4M3FN>, %w: tensor<5x16x48xf8E4M3FN>,
    %into: tensor<5x32x48xf32>) -> tensor<5x32x48xf32> {
  %r = linalg.batch_matmul ins(%x, %y : tensor<5x32x16xbf16>, tensor<5x16x48xbf16>)
      outs(%into : tensor<5x32x48xf32>) -> tensor<5x32x48xf32>
  %s = linalg.batch_matmul ins(%v, %w : tensor<5x32x16xf8E4M3FN>, tensor<5x16x48xf8E4M3FN>)
      outs(%r : tensor<5x32x48xf32>) -> tensor<5x32x48xf32>
  return %s : tensor<5x32x48xf32>
}

// -----

// Tiles divide large batches of float32: 12 x 197 x 197 x 64 multiplications.
// CHECK-LABEL: func.func @large_batch_of_float32(
// CHECK: tensor.pad %arg0 low[0, 0, 0] high[0, 11, 0]
// CHECK: tensor.pad %arg1 low[0, 0, 0] high[0, 0, 11]
// CHECK: linalg.batch_matmul {{.*}} outs(%{{.*}} : tensor<12x208x208xf32>)
// CHECK: tensor.extract_slice {{.*}} [12, 197, 197] [1, 1, 1]
func.func @large_batch_of_float32(
    %x: tensor<12x197x64xf32>, %y: tensor<12x64x197xf32>, %into: tensor<12x197x197xf32>) -> tensor<12x197x197xf32> {
  %r = linalg.batch_matmul ins(%x, %y : tensor<12x197x64xf32>, tensor<12x64x197xf32>)
      outs(%into : tensor<12x197x197xf32>) -> tensor<12x197x197xf32>
  return %r : tensor<12x197x197xf32>
}

// -----

// Matrix units do not multiply float32, and a small batch is not worth the copies; products without a batch are masked
// right.
// CHECK-LABEL: func.func @other_products(
// CHECK-NOT: tensor.pad
func.func @other_products(
    %x: tensor<3x24x10xf32>, %y: tensor<3x10x12xf32>, %into: tensor<3x24x12xf32>, %v: tensor<24x10xbf16>,
    %w: tensor<10x12xbf16>, %sum: tensor<24x12xf32>) -> (tensor<3x24x12xf32>, tensor<24x12xf32>) {
  %r = linalg.batch_matmul ins(%x, %y : tensor<3x24x10xf32>, tensor<3x10x12xf32>)
      outs(%into : tensor<3x24x12xf32>) -> tensor<3x24x12xf32>
  %s = linalg.matmul ins(%v, %w : tensor<24x10xbf16>, tensor<10x12xbf16>) outs(%sum : tensor<24x12xf32>)
      -> tensor<24x12xf32>
  return %r, %s : tensor<3x24x12xf32>, tensor<24x12xf32>
}

// -----

// CHECK-LABEL: func.func @open_sizes(
// CHECK: %[[K:.*]] = tensor.dim %arg0, %{{.*}}
// CHECK: %[[STEPS:.*]] = arith.ceildivsi %[[K]], %{{.*}}
// CHECK: %[[FULL:.*]] = arith.muli %[[STEPS]], %{{.*}}
// CHECK: %[[MISSING:.*]] = arith.subi %[[FULL]], %[[K]]
// CHECK: tensor.pad %arg0 low[0, 0, 0] high[0, 0, %[[MISSING]]]
// CHECK: linalg.batch_matmul
// CHECK-NOT: tensor.extract_slice
func.func @open_sizes(
    %x: tensor<?x32x?xf16>, %y: tensor<?x?x16xf16>, %into: tensor<?x32x16xf32>) -> tensor<?x32x16xf32> {
  %r = linalg.batch_matmul ins(%x, %y : tensor<?x32x?xf16>, tensor<?x?x16xf16>)
      outs(%into : tensor<?x32x16xf32>) -> tensor<?x32x16xf32>
  return %r : tensor<?x32x16xf32>
}
