// RUN: retrograd-opt %s --split-input-file -p 'convert-bwd-to-func' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'convert-bwd-to-func' --mlir-print-op-generic | FileCheck %s --check-prefix=NONE

// Nothing of the bwd dialect is left, neither ops nor tokens.
// NONE-NOT: {{"bwd\.}}
// NONE-NOT: !bwd.

!tensor = !torch.vtensor<[2],f32>

// Each save is one more result, after those there were, in order; also of an argument, and of the same value twice.
// CHECK-LABEL: func.func @saves(
// CHECK-SAME: -> (!torch.vtensor<[2],f32> {bwd.name = "out", bwd.role = "output"}, !torch.vtensor<[2],f32> {bwd.name = "saved.e", bwd.role = "saved", bwd.value = "e"}, !torch.vtensor<[2],f32> {bwd.name = "saved.x", bwd.role = "saved", bwd.value = "x"}, !torch.vtensor<[2],f32> {bwd.name = "saved.again", bwd.role = "saved", bwd.value = "again"}) {
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp %arg0
// CHECK-NEXT: %[[OUT:.*]] = torch.aten.neg %[[E]]
// CHECK-NEXT: return %[[OUT]], %[[E]], %arg0, %[[E]] : !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32>
func.func @saves(%x: !tensor) -> (!tensor {bwd.role = "output", bwd.name = "out"}) {
  %e = torch.aten.exp %x : !tensor -> !tensor
  "bwd.save"(%e) {name = "e"} : (!tensor) -> ()
  "bwd.save"(%x) {name = "x"} : (!tensor) -> ()
  %out = torch.aten.neg %e : !tensor -> !tensor
  "bwd.save"(%e) {name = "again"} : (!tensor) -> ()
  return %out : !tensor
}

// -----

!tensor = !torch.vtensor<[2],f32>

// CHECK-LABEL: func.func @accumulates(
// CHECK-SAME: -> (!torch.vtensor<[2],f32> {bwd.name = "grad.3", bwd.role = "grad"}, !torch.vtensor<[2],f32> {bwd.name = "grad.0", bwd.role = "grad"}) {
// CHECK-NEXT: %[[NEG:.*]] = torch.aten.neg %arg0
// CHECK-NEXT: return %arg0, %[[NEG]]
func.func @accumulates(%g: !tensor) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %one = "bwd.accumulate_grad"(%g, %start) {param = 3 : i64} : (!tensor, !bwd.token) -> !bwd.token
  %neg = torch.aten.neg %g : !tensor -> !tensor
  %two = "bwd.accumulate_grad"(%neg, %one) {param = 0 : i64} : (!tensor, !bwd.token) -> !bwd.token
  return
}

// -----

!tensor = !torch.vtensor<[2],f32>

// Calls keep the order of the tokens; a hook that is called twice is declared once.
// CHECK-LABEL: module @hooks
// CHECK-DAG: func.func private @hook_7(!torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32>
// CHECK-DAG: func.func private @backward_7(!torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32>
// CHECK-DAG: func.func private @final_callbacks()
// CHECK: func.func @f(%arg0: !torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32> {
// CHECK-NEXT: %[[A:.*]] = call @hook_7(%arg0)
// CHECK-NEXT: %[[B:.*]] = call @backward_7(%[[A]])
// CHECK-NEXT: %[[C:.*]] = call @hook_7(%[[B]])
// CHECK-NEXT: call @final_callbacks() : () -> ()
// CHECK-NEXT: return %[[C]]
module @hooks {
  func.func @f(%g: !tensor) -> !tensor {
    %start = "bwd.create_token"() : () -> !bwd.token
    %a:2 = "bwd.call_hook"(%g, %start) {kind = "pre", hook = 7 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
    %b:2 = "bwd.call_backward"(%a#0, %a#1) {function = 7 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
    %c:2 = "bwd.call_hook"(%b#0, %b#1) {kind = "post", hook = 7 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
    %end = "bwd.final_callbacks"(%c#1) : (!bwd.token) -> !bwd.token
    return %c#0 : !tensor
  }
}

// -----

!tensor = !torch.vtensor<[2],f32>

// A barrier is its operand, also where that is a barrier, is saved, or is given by a hook.
// CHECK-LABEL: module @barriers
// CHECK: func.func @f(%arg0: !torch.vtensor<[2],f32>) -> (!torch.vtensor<[2],f32>, !torch.vtensor<[2],f32> {bwd.name = "saved.x", bwd.role = "saved", bwd.value = "x"}, !torch.vtensor<[2],f32> {bwd.name = "saved.h", bwd.role = "saved", bwd.value = "h"}) {
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp %arg0
// CHECK-NEXT: %[[H:.*]] = call @hook_0(%arg0)
// CHECK-NEXT: return %[[E]], %arg0, %[[H]]
module @barriers {
  func.func @f(%x: !tensor) -> !tensor {
    %start = "bwd.create_token"() : () -> !bwd.token
    %a = "bwd.recompute_barrier"(%x) : (!tensor) -> !tensor
    %b = "bwd.recompute_barrier"(%a) : (!tensor) -> !tensor
    %e = torch.aten.exp %b : !tensor -> !tensor
    "bwd.save"(%b) {name = "x"} : (!tensor) -> ()
    %h:2 = "bwd.call_hook"(%b, %start) {kind = "pack", hook = 0 : i64} : (!tensor, !bwd.token) -> (!tensor, !bwd.token)
    %c = "bwd.recompute_barrier"(%h#0) : (!tensor) -> !tensor
    "bwd.save"(%c) {name = "h"} : (!tensor) -> ()
    return %e : !tensor
  }
}

// -----

// What has no bwd op stays as it is.
// CHECK-LABEL: func.func @untouched(
// CHECK-SAME: %arg0: i32 {bwd.name = "x", bwd.role = "input"}) -> i32 {
// CHECK-NEXT: return %arg0 : i32
// CHECK: func.func private @elsewhere(i32)
func.func @untouched(%x: i32 {bwd.role = "input", bwd.name = "x"}) -> i32 {
  return %x : i32
}
func.func private @elsewhere(i32)
