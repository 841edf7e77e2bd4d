// RUN: retrograd-opt %s | FileCheck %s
// RUN: retrograd-opt %s | retrograd-opt | FileCheck %s
// RUN: retrograd-opt %s --emit-bytecode | retrograd-opt | FileCheck %s
// RUN: retrograd-opt %s --mlir-print-op-generic | retrograd-opt | FileCheck %s
// RUN: retrograd-opt %s -p 'cse,canonicalize,symbol-dce,func.func(cse,canonicalize)' | FileCheck %s --check-prefix=OPT

!tensor = !torch.vtensor<[2],f32>
!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[3],f32>>

// A hook's result that nobody uses, and a second call of the same hook: both stay.
// CHECK-LABEL: func.func @hooks(
// CHECK: %[[START:.*]] = "bwd.create_token"() : () -> !bwd.token
// CHECK: %[[ONE:.*]]:2 = "bwd.call_hook"(%arg0, %[[START]]) {hook = 0 : i64, kind = "tensor_pre"} : (!torch.vtensor<[2],f32>, !bwd.token) -> (!torch.vtensor<[2],f32>, !bwd.token)
// CHECK: "bwd.call_hook"(%arg0, %[[START]]) {hook = 0 : i64, kind = "tensor_pre"}
// CHECK: "bwd.call_hook"(%{{.*}}, %[[ONE]]#1) {hook = 1 : i64, kind = "pre"} : (!torch.tuple<vtensor<[2],f32>, vtensor<[3],f32>>, !bwd.token)
// OPT-LABEL: func.func @hooks(
// OPT: "bwd.create_token"
// OPT: "bwd.call_hook"(%arg0, %{{.*}}) {hook = 0 : i64
// OPT: "bwd.call_hook"(%arg0, %{{.*}}) {hook = 0 : i64
// OPT: "bwd.call_hook"(%{{.*}}, %{{.*}}) {hook = 1 : i64
// OPT: return
func.func @hooks(%grad: !tensor, %other: !torch.vtensor<[3],f32>) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %a:2 = "bwd.call_hook"(%grad, %start) {kind = "tensor_pre", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %b:2 = "bwd.call_hook"(%grad, %start) {kind = "tensor_pre", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %both = torch.prim.TupleConstruct %a#0, %other : !tensor, !torch.vtensor<[3],f32> -> !pair
  %c:2 = "bwd.call_hook"(%both, %a#1) {kind = "pre", hook = 1 : i64} : (!pair, !bwd.token) -> (!pair, !bwd.token)
  return
}

// CHECK-LABEL: func.func @kinds(
// CHECK-COUNT-5: "bwd.call_hook"
func.func @kinds(%x: !tensor, %start: !bwd.token) -> !bwd.token {
  %a:2 = "bwd.call_hook"(%x, %start) {kind = "post", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %b:2 = "bwd.call_hook"(%x, %a#1) {kind = "post_acc_grad", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %c:2 = "bwd.call_hook"(%x, %b#1) {kind = "unpack", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %d:2 = "bwd.call_hook"(%x, %c#1) {kind = "pack", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %e:2 = "bwd.call_hook"(%x, %d#1) {kind = "cpp_tensor_pre", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  return %e#1 : !bwd.token
}

// CHECK-LABEL: func.func @gradients(
// CHECK: %[[START:.*]] = "bwd.create_token"
// CHECK: "bwd.accumulate_grad"(%arg0, %[[START]]) {param = 0 : i64} : (!torch.vtensor<[2],f32>, !bwd.token) -> !bwd.token
// CHECK: "bwd.accumulate_grad"(%arg0, %[[START]]) {param = 0 : i64}
// CHECK: "bwd.call_backward"(%arg0, %{{.*}}) {function = 2 : i64} : (!torch.vtensor<[2],f32>, !bwd.token) -> (!torch.vtensor<[2],f32>, !bwd.token)
// CHECK: "bwd.call_backward"(%arg0, %{{.*}}) {function = 2 : i64}
// CHECK: "bwd.final_callbacks"(%{{.*}}) : (!bwd.token) -> !bwd.token
// CHECK: "bwd.final_callbacks"(%{{.*}})
// OPT-LABEL: func.func @gradients(
// OPT: %[[START:.*]] = "bwd.create_token"
// OPT-NEXT: %[[A:.*]] = "bwd.accumulate_grad"(%arg0, %[[START]])
// OPT-NEXT: "bwd.accumulate_grad"(%arg0, %[[START]])
// OPT-NEXT: "bwd.call_backward"(%arg0, %[[A]])
// OPT-NEXT: %[[B:.*]]:2 = "bwd.call_backward"(%arg0, %[[A]])
// OPT-NEXT: "bwd.final_callbacks"(%[[B]]#1)
// OPT-NEXT: "bwd.final_callbacks"(%[[B]]#1)
// OPT-NEXT: return
func.func @gradients(%grad: !tensor) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %a = "bwd.accumulate_grad"(%grad, %start) {param = 0 : i64} : (!tensor, !bwd.token) -> !bwd.token
  %a2 = "bwd.accumulate_grad"(%grad, %start) {param = 0 : i64} : (!tensor, !bwd.token) -> !bwd.token
  %b:2 = "bwd.call_backward"(%grad, %a) {function = 2 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %b2:2 = "bwd.call_backward"(%grad, %a) {function = 2 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
  %c = "bwd.final_callbacks"(%b2#1) : (!bwd.token) -> !bwd.token
  %c2 = "bwd.final_callbacks"(%b2#1) : (!bwd.token) -> !bwd.token
  return
}

// Saves stay, each; a barrier stays as long as it is used, and two are never one.
// CHECK-LABEL: func.func @residuals(
// CHECK: "bwd.save"(%arg0) {name = "x"} : (!torch.vtensor<[2],f32>) -> ()
// CHECK: "bwd.save"(%arg0) {name = "x"}
// CHECK-COUNT-3: "bwd.recompute_barrier"(%arg0) : (!torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32>
// OPT-LABEL: func.func @residuals(
// OPT-NEXT: "bwd.save"(%arg0)
// OPT-NEXT: "bwd.save"(%arg0)
// OPT-NEXT: %[[FIRST:.*]] = "bwd.recompute_barrier"(%arg0)
// OPT-NEXT: %[[SECOND:.*]] = "bwd.recompute_barrier"(%arg0)
// OPT-NEXT: return %[[FIRST]], %[[SECOND]]
func.func @residuals(%x: !tensor) -> (!tensor, !tensor) {
  "bwd.save"(%x) {name = "x"} : (!tensor) -> ()
  "bwd.save"(%x) {name = "x"} : (!tensor) -> ()
  %first = "bwd.recompute_barrier"(%x) : (!tensor) -> !tensor
  %second = "bwd.recompute_barrier"(%x) : (!tensor) -> !tensor
  %unused = "bwd.recompute_barrier"(%x) : (!tensor) -> !tensor
  return %first, %second : !tensor, !tensor
}

// A token that nobody takes orders nothing.
// OPT-LABEL: func.func @unused_token()
// OPT-NEXT: return
func.func @unused_token() {
  %start = "bwd.create_token"() : () -> !bwd.token
  return
}

// Attention that nobody reads goes, and one that is there twice is computed once.
// CHECK-LABEL: func.func @attention(
// CHECK: "bwd.attention_backward"(%{{.*}}) {causal = false, scale = 1.250000e-01 : f32}
// OPT-LABEL: func.func @attention(
// OPT-COUNT-1: "bwd.attention"(
// OPT-NOT: "bwd.attention
// OPT: return
func.func @attention(%q: tensor<1x4x5x8xf32>, %k: tensor<1x2x7x8xf32>, %m: tensor<4x1x7xf32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>) {
  %a, %b = "bwd.attention"(%q, %k, %k, %m) {causal = true, scale = 0.125 : f32} : (tensor<1x4x5x8xf32>, tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>, tensor<4x1x7xf32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  %c, %d = "bwd.attention"(%q, %k, %k, %m) {causal = true, scale = 0.125 : f32} : (tensor<1x4x5x8xf32>, tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>, tensor<4x1x7xf32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  %e:3 = "bwd.attention_backward"(%q, %q, %k, %k, %a, %b, %m) {causal = false, scale = 0.125 : f32} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5xf32>, tensor<4x1x7xf32>) -> (tensor<1x4x5x8xf32>, tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
  return %a, %c : tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>
}

// Convolutions with channels last, of two groups, and their gradients.
// CHECK-LABEL: func.func @convolution(
// CHECK: "bwd.convolution_filter_gradient"(%{{.*}}) {dilation = [1, 1], padding = [1, 0], stride = [2, 1]}
// OPT-LABEL: func.func @convolution(
// OPT-COUNT-1: "bwd.convolution"(
// OPT-NOT: "bwd.convolution"(
// OPT-NOT: "bwd.convolution_filter_gradient"(
// OPT: return
func.func @convolution(%x: tensor<3x9x7x8xf32>, %w: tensor<6x3x1x4xf32>) -> (tensor<3x5x7x6xf32>, tensor<3x9x7x8xf32>) {
  %a = "bwd.convolution"(%x, %w) {stride = [2, 1], padding = [1, 0], dilation = [1, 1]} : (tensor<3x9x7x8xf32>, tensor<6x3x1x4xf32>) -> tensor<3x5x7x6xf32>
  %b = "bwd.convolution"(%x, %w) {stride = [2, 1], padding = [1, 0], dilation = [1, 1]} : (tensor<3x9x7x8xf32>, tensor<6x3x1x4xf32>) -> tensor<3x5x7x6xf32>
  %c = "bwd.convolution_input_gradient"(%b, %w) {stride = [2, 1], padding = [1, 0], dilation = [1, 1]} : (tensor<3x5x7x6xf32>, tensor<6x3x1x4xf32>) -> tensor<3x9x7x8xf32>
  %d = "bwd.convolution_filter_gradient"(%b, %x) {stride = [2, 1], padding = [1, 0], dilation = [1, 1]} : (tensor<3x5x7x6xf32>, tensor<3x9x7x8xf32>) -> tensor<6x3x1x4xf32>
  return %a, %c : tensor<3x5x7x6xf32>, tensor<3x9x7x8xf32>
}
