// RUN: retrograd-opt %s --split-input-file -p 'bwd-narrow-products' | FileCheck %s

#same = affine_map<(d0, d1) -> (d0, d1)>

// As of a linear layer in bfloat16: both matrices are widened, and the bias is added in f32.
// CHECK-LABEL: func.func @widened(
// CHECK-NOT: arith.extf
// CHECK: linalg.matmul ins(%arg0, %arg1 : tensor<?x8xbf16>, tensor<8x16xbf16>) outs(%arg2 : tensor<?x16xf32>)
// CHECK-NOT: arith.extf
func.func @widened(%x: tensor<?x8xbf16>, %y: tensor<8x16xbf16>, %into: tensor<?x16xf32>, %wide: tensor<?x8xf32>,
    %other: tensor<8x16xf32>) -> tensor<?x16xf32> {
  %a = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<?x8xbf16>) outs(%wide : tensor<?x8xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<?x8xf32>
  %b = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<8x16xbf16>) outs(%other : tensor<8x16xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<8x16xf32>
  %r = linalg.matmul ins(%a, %b : tensor<?x8xf32>, tensor<8x16xf32>) outs(%into : tensor<?x16xf32>) -> tensor<?x16xf32>
  return %r : tensor<?x16xf32>
}

// -----

#same = affine_map<(d0, d1, d2) -> (d0, d1, d2)>

// A batch, with one matrix for both sides; it is read in f32 besides.
// CHECK-LABEL: func.func @batch(
// CHECK: %[[WIDE:.*]] = linalg.generic
// CHECK: %[[R:.*]] = linalg.batch_matmul ins(%arg0, %arg0 : tensor<3x8x8xf16>, tensor<3x8x8xf16>) outs(%arg1 : tensor<3x8x8xf32>)
// CHECK: return %[[R]], %[[WIDE]]
func.func @batch(%x: tensor<3x8x8xf16>, %into: tensor<3x8x8xf32>) -> (tensor<3x8x8xf32>, tensor<3x8x8xf32>) {
  %a = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<3x8x8xf16>) outs(%into : tensor<3x8x8xf32>) {
  ^bb0(%in: f16, %out: f32):
    %0 = arith.extf %in : f16 to f32
    linalg.yield %0 : f32
  } -> tensor<3x8x8xf32>
  %r = linalg.batch_matmul ins(%a, %a : tensor<3x8x8xf32>, tensor<3x8x8xf32>) outs(%into : tensor<3x8x8xf32>)
      -> tensor<3x8x8xf32>
  return %r, %a : tensor<3x8x8xf32>, tensor<3x8x8xf32>
}

// -----

#same = affine_map<(d0, d1) -> (d0, d1)>
#turned = affine_map<(d0, d1) -> (d1, d0)>

// One matrix is as wide as ever, one is computed besides, one is transposed on the way, two are of different types, and
// sums in 64 bits are others.
// CHECK-LABEL: func.func @others(
// CHECK-COUNT-5: linalg.generic
// CHECK: linalg.matmul ins(%{{.*}}, %arg1 : tensor<8x8xf32>, tensor<8x8xf32>)
// CHECK: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<8x8xf32>, tensor<8x8xf32>)
// CHECK: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<8x8xf32>, tensor<8x8xf32>)
// CHECK: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<8x8xf32>, tensor<8x8xf32>)
// CHECK: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<8x8xf64>, tensor<8x8xf64>)
func.func @others(%x: tensor<8x8xbf16>, %w: tensor<8x8xf32>, %h: tensor<8x8xf16>, %d: tensor<8x8xf64>)
    -> (tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf64>) {
  %a = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<8x8xbf16>) outs(%w : tensor<8x8xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  %twice = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<8x8xbf16>) outs(%w : tensor<8x8xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    %1 = arith.addf %0, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<8x8xf32>
  %turned = linalg.generic {indexing_maps = [#turned, #same], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<8x8xbf16>) outs(%w : tensor<8x8xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  %half = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%h : tensor<8x8xf16>) outs(%w : tensor<8x8xf32>) {
  ^bb0(%in: f16, %out: f32):
    %0 = arith.extf %in : f16 to f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  %double = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<8x8xbf16>) outs(%d : tensor<8x8xf64>) {
  ^bb0(%in: bf16, %out: f64):
    %0 = arith.extf %in : bf16 to f64
    linalg.yield %0 : f64
  } -> tensor<8x8xf64>
  %p = linalg.matmul ins(%a, %w : tensor<8x8xf32>, tensor<8x8xf32>) outs(%w : tensor<8x8xf32>) -> tensor<8x8xf32>
  %q = linalg.matmul ins(%a, %twice : tensor<8x8xf32>, tensor<8x8xf32>) outs(%w : tensor<8x8xf32>) -> tensor<8x8xf32>
  %r = linalg.matmul ins(%a, %turned : tensor<8x8xf32>, tensor<8x8xf32>) outs(%w : tensor<8x8xf32>) -> tensor<8x8xf32>
  %s = linalg.matmul ins(%a, %half : tensor<8x8xf32>, tensor<8x8xf32>) outs(%w : tensor<8x8xf32>) -> tensor<8x8xf32>
  %t = linalg.matmul ins(%double, %double : tensor<8x8xf64>, tensor<8x8xf64>) outs(%d : tensor<8x8xf64>)
      -> tensor<8x8xf64>
  return %p, %q, %r, %s, %t : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf64>
}

// -----

#same = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>

// As of a convolution in bfloat16, whose input is padded after it was widened.
// CHECK-LABEL: func.func @convolution(
// CHECK-NOT: arith.extf
// CHECK: %[[PADDED:.*]] = tensor.pad %arg0 low[0, 0, 1, 1] high[0, 0, 1, 1]
// CHECK: tensor.yield %{{.*}} : bf16
// CHECK: tensor<?x2x4x4xbf16> to tensor<?x2x6x6xbf16>
// CHECK: linalg.conv_2d_nchw_fchw {dilations = dense<1> : vector<2xi64>, strides = dense<1> : vector<2xi64>} ins(%[[PADDED]], %arg1 : tensor<?x2x6x6xbf16>, tensor<3x2x3x3xbf16>) outs(%arg2 : tensor<?x3x4x4xf32>)
// CHECK-NOT: arith.extf
func.func @convolution(%x: tensor<?x2x4x4xbf16>, %w: tensor<3x2x3x3xbf16>, %into: tensor<?x3x4x4xf32>,
    %wide: tensor<?x2x4x4xf32>, %filter: tensor<3x2x3x3xf32>) -> tensor<?x3x4x4xf32> {
  %zero = arith.constant 0.0 : f32
  %a = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%x : tensor<?x2x4x4xbf16>) outs(%wide : tensor<?x2x4x4xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<?x2x4x4xf32>
  %b = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%w : tensor<3x2x3x3xbf16>) outs(%filter : tensor<3x2x3x3xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<3x2x3x3xf32>
  %padded = tensor.pad %a low[0, 0, 1, 1] high[0, 0, 1, 1] {
  ^bb0(%i: index, %j: index, %k: index, %l: index):
    tensor.yield %zero : f32
  } : tensor<?x2x4x4xf32> to tensor<?x2x6x6xf32>
  %r = linalg.conv_2d_nchw_fchw {dilations = dense<1> : vector<2xi64>, strides = dense<1> : vector<2xi64>}
      ins(%padded, %b : tensor<?x2x6x6xf32>, tensor<3x2x3x3xf32>) outs(%into : tensor<?x3x4x4xf32>)
      -> tensor<?x3x4x4xf32>
  return %r : tensor<?x3x4x4xf32>
}

// -----

#same = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d1)>

// As of columns: slices side by side, transposed; beside one row for all.
// CHECK-LABEL: func.func @columns(
// CHECK-NOT: arith.extf
// CHECK: tensor.extract_slice %arg0[0, 0] [8, 4] [1, 1] : tensor<8x8xbf16> to tensor<8x4xbf16>
// CHECK: tensor.concat dim(1) {{.*}} : (tensor<8x4xbf16>, tensor<8x4xbf16>) -> tensor<8x8xbf16>
// CHECK: linalg.transpose ins(%{{.*}} : tensor<8x8xbf16>) outs(%{{.*}} : tensor<8x8xbf16>)
// CHECK: linalg.generic {{.*}} ins(%{{.*}} : tensor<8xbf16>) outs(%{{.*}} : tensor<8x8xbf16>)
// CHECK: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<8x8xbf16>, tensor<8x8xbf16>)
// CHECK-NOT: arith.extf
func.func @columns(%x: tensor<8x8xbf16>, %y: tensor<2x4xbf16>, %into: tensor<8x8xf32>, %other: tensor<2x4xf32>)
    -> tensor<8x8xf32> {
  %a = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<8x8xbf16>) outs(%into : tensor<8x8xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  %left = tensor.extract_slice %a[0, 0] [8, 4] [1, 1] : tensor<8x8xf32> to tensor<8x4xf32>
  %right = tensor.extract_slice %a[0, 4] [8, 4] [1, 1] : tensor<8x8xf32> to tensor<8x4xf32>
  %joined = tensor.concat dim(1) %right, %left : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x8xf32>
  %turned = linalg.transpose ins(%joined : tensor<8x8xf32>) outs(%into : tensor<8x8xf32>) permutation = [1, 0]
  %b = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<2x4xbf16>) outs(%other : tensor<2x4xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<2x4xf32>
  %flat = tensor.collapse_shape %b [[0, 1]] : tensor<2x4xf32> into tensor<8xf32>
  %spread = linalg.generic {indexing_maps = [#row, #same], iterator_types = ["parallel", "parallel"]}
      ins(%flat : tensor<8xf32>) outs(%into : tensor<8x8xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<8x8xf32>
  %r = linalg.matmul ins(%turned, %spread : tensor<8x8xf32>, tensor<8x8xf32>) outs(%into : tensor<8x8xf32>)
      -> tensor<8x8xf32>
  return %r : tensor<8x8xf32>
}

// -----

#same = affine_map<(d0, d1) -> (d0, d1)>

// What is filled up with ones is not what was widened.
// CHECK-LABEL: func.func @filled_with_ones(
// CHECK: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<8x8xf32>, tensor<8x8xf32>)
func.func @filled_with_ones(%x: tensor<8x4xbf16>, %narrow: tensor<8x4xf32>, %into: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %one = arith.constant 1.0 : f32
  %a = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<8x4xbf16>) outs(%narrow : tensor<8x4xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<8x4xf32>
  %padded = tensor.pad %a low[0, 0] high[0, 4] {
  ^bb0(%i: index, %j: index):
    tensor.yield %one : f32
  } : tensor<8x4xf32> to tensor<8x8xf32>
  %r = linalg.matmul ins(%padded, %padded : tensor<8x8xf32>, tensor<8x8xf32>) outs(%into : tensor<8x8xf32>)
      -> tensor<8x8xf32>
  return %r : tensor<8x8xf32>
}
