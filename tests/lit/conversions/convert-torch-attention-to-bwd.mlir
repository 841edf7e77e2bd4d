// RUN: retrograd-opt %s -p convert-torch-attention-to-bwd --split-input-file | FileCheck %s

!query = !torch.vtensor<[2,4,5,8],bf16>
!key = !torch.vtensor<[2,2,7,8],bf16>
!sums = !torch.vtensor<[2,4,5],f32>

// Without a mask and a scale: the mask is of no axes, the scale one over the root of the width.

// CHECK-LABEL: func.func @forward(
// CHECK-DAG: %[[QT:.*]] = torch_c.to_builtin_tensor %arg0
// CHECK-DAG: %[[KT:.*]] = torch_c.to_builtin_tensor %arg1
// CHECK-DAG: %[[NONE:.*]] = arith.constant dense<0.000000e+00> : tensor<bf16>
// CHECK: %[[R:.*]]:2 = "bwd.attention"(%[[QT]], %[[KT]], %{{.*}}, %[[NONE]]) {causal = true, scale = 0.353553385 : f32} : (tensor<2x4x5x8xbf16>, tensor<2x2x7x8xbf16>, tensor<2x2x7x8xbf16>, tensor<bf16>) -> (tensor<2x4x5x8xbf16>, tensor<2x4x5xf32>)
// CHECK-DAG: %[[O:.*]] = torch_c.from_builtin_tensor %[[R]]#0
// CHECK-DAG: %[[L:.*]] = torch_c.from_builtin_tensor %[[R]]#1
// CHECK: return %[[O]], %[[L]]
func.func @forward(%q: !query, %k: !key, %v: !key) -> (!query, !sums) {
  %dropout = torch.constant.float 0.0
  %causal = torch.constant.bool true
  %none = torch.constant.none
  %0:2 = torch.operator "torch.aten._scaled_dot_product_flash_attention_for_cpu"(%q, %k, %v, %dropout, %causal, %none, %none) : (!query, !key, !key, !torch.float, !torch.bool, !torch.none, !torch.none) -> (!query, !sums)
  return %0#0, %0#1 : !query, !sums
}

// -----

!heads = !torch.vtensor<[2,4,5,8],f32>
!sums = !torch.vtensor<[2,4,5],f32>
!mask = !torch.vtensor<[5,5],f32>

// CHECK-LABEL: func.func @backward(
// CHECK: "bwd.attention_backward"({{.*}}) {causal = false, scale = 5.000000e-01 : f32} : (tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5xf32>, tensor<5x5xf32>) -> (tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>)
func.func @backward(%g: !heads, %q: !heads, %o: !heads, %l: !sums, %m: !mask) -> (!heads, !heads, !heads) {
  %dropout = torch.constant.float 0.0
  %causal = torch.constant.bool false
  %scale = torch.constant.float 5.000000e-01
  %0:3 = torch.operator "torch.aten._scaled_dot_product_flash_attention_for_cpu_backward"(%g, %q, %q, %q, %o, %l, %dropout, %causal, %m, %scale) : (!heads, !heads, !heads, !heads, !heads, !sums, !torch.float, !torch.bool, !mask, !torch.float) -> (!heads, !heads, !heads)
  return %0#0, %0#1, %0#2 : !heads, !heads, !heads
}

// -----

!heads = !torch.vtensor<[2,4,5,8],f32>
!sums = !torch.vtensor<[2,4,5],f32>

// Of a mask with a gradient there is that of the scores.

// CHECK-LABEL: func.func @learned_mask(
// CHECK: "bwd.dropped_attention_backward_with_mask"({{.*}}) {causal = false, dropout = 1.000000e-01 : f32, scale = 0.353553385 : f32, stream = 3 : i64}
// CHECK-SAME: tensor<4x5x5xf32>, tensor<2xi64>) -> (tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5x5xf32>)
func.func @learned_mask(%q: !heads, %sums: !sums, %mask: !torch.vtensor<[4,5,5],f32>, %seed: !torch.vtensor<[2],si64>) -> (!heads, !torch.vtensor<[2,4,5,5],f32>) {
  %dropout = torch.constant.float 1.000000e-01
  %causal = torch.constant.bool false
  %none = torch.constant.none
  %stream = torch.constant.int 3
  %0:4 = torch.operator "torch.retrograd.attention_backward_with_mask"(%q, %q, %q, %q, %q, %sums, %dropout, %causal, %mask, %none, %seed, %stream) : (!heads, !heads, !heads, !heads, !heads, !sums, !torch.float, !torch.bool, !torch.vtensor<[4,5,5],f32>, !torch.none, !torch.vtensor<[2],si64>, !torch.int) -> (!heads, !heads, !heads, !torch.vtensor<[2,4,5,5],f32>)
  return %0#0, %0#3 : !heads, !torch.vtensor<[2,4,5,5],f32>
}

// -----

!heads = !torch.vtensor<[2,4,5,8],f32>
!sums = !torch.vtensor<[2,4,5],f32>

// With dropout: the numbers are those of a stream of the seed, in both halves.

// CHECK-LABEL: func.func @dropped(
// CHECK: %[[SEED:.*]] = torch_c.to_builtin_tensor %arg1 : !torch.vtensor<[2],si64> -> tensor<2xi64>
// CHECK: "bwd.dropped_attention"({{.*}}, %[[SEED]]) {causal = true, dropout = 1.000000e-01 : f32, scale = 0.353553385 : f32, stream = 3 : i64}
// CHECK: "bwd.dropped_attention_backward"({{.*}}) {causal = true, dropout = 1.000000e-01 : f32, scale = 0.353553385 : f32, stream = 3 : i64}
func.func @dropped(%q: !heads, %seed: !torch.vtensor<[2],si64>) -> (!heads, !heads, !heads, !heads) {
  %dropout = torch.constant.float 1.000000e-01
  %causal = torch.constant.bool true
  %none = torch.constant.none
  %stream = torch.constant.int 3
  %0:2 = torch.operator "torch.retrograd.attention"(%q, %q, %q, %dropout, %causal, %none, %none, %seed, %stream) : (!heads, !heads, !heads, !torch.float, !torch.bool, !torch.none, !torch.none, !torch.vtensor<[2],si64>, !torch.int) -> (!heads, !sums)
  %1:3 = torch.operator "torch.retrograd.attention_backward"(%q, %q, %q, %q, %0#0, %0#1, %dropout, %causal, %none, %none, %seed, %stream) : (!heads, !heads, !heads, !heads, !heads, !sums, !torch.float, !torch.bool, !torch.none, !torch.none, !torch.vtensor<[2],si64>, !torch.int) -> (!heads, !heads, !heads)
  return %0#0, %1#0, %1#1, %1#2 : !heads, !heads, !heads, !heads
}
