// RUN: retrograd-opt %s --split-input-file -p 'bwd-inline-hooks' | FileCheck %s

!t = !torch.vtensor<[2],f32>

// The body stands in the place of the call, the chain closes over it, and other hooks stay. Bodies go, called or not.
// CHECK-LABEL: module @in_place
// CHECK-NEXT: func.func @backward(%[[G:.*]]: {{.*}}, %[[W:.*]]: {{.*}}) -> {{.*}} {
// CHECK-NEXT: %[[START:.*]] = "bwd.create_token"
// CHECK-NEXT: %[[A:.*]] = torch.aten.mul.Tensor %[[G]], %[[W]] {bwd.values = ["hook_0.m"]}
// CHECK-NEXT: %[[H:.*]]:2 = "bwd.call_hook"(%[[A]], %[[START]]) {hook = 1
// CHECK-NEXT: return %[[H]]#0, %[[W]]
// CHECK-NOT: @hook
module @in_place {
  func.func private @hook_0(%x: !t, %y: !t) -> (!t, !t) attributes {bwd.inline} {
    %m = torch.aten.mul.Tensor %x, %y {bwd.values = ["m"]} : !t, !t -> !t
    return %m, %y : !t, !t
  }
  func.func private @hook_9(%x: !t) -> !t attributes {bwd.inline} {
    return %x : !t
  }
  func.func @backward(%g: !t, %w: !t) -> (!t, !t) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %both = torch.prim.TupleConstruct %g, %w : !t, !t -> !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>
    %h:2 = "bwd.call_hook"(%both, %start) {kind = "pre", hook = 0 : i64} : (!torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>, !bwd.token) -> (!torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>, !bwd.token)
    %u:2 = torch.prim.TupleUnpack %h#0 : !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>> -> !t, !t
    %k:2 = "bwd.call_hook"(%u#0, %h#1) {kind = "tensor_pre", hook = 1 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
    return %k#0, %u#1 : !t, !t
  }
}

// -----

!t = !torch.vtensor<[2],f32>
!p = !torch.vtensor<[2],bf16>

// Packing moves behind the last use that the forward makes of its value, unpacking right before the first use.
// CHECK-LABEL: func.func @joint(
// CHECK: torch.aten.exp
// CHECK: torch.aten.sin
// CHECK-NEXT: torch.constant.int 15
// CHECK-NEXT: torch.prims.convert_element_type {{.*}} !torch.vtensor<[2],bf16>
// CHECK: torch.aten.neg
// CHECK-NEXT: torch.constant.int 6
// CHECK-NEXT: torch.prims.convert_element_type {{.*}} !torch.vtensor<[2],f32>
// CHECK-NEXT: torch.aten.mul.Tensor
// CHECK: torch.aten.mul.Tensor
func.func private @hook_0(%x: !t) -> !p attributes {bwd.inline} {
  %type = torch.constant.int 15
  %y = torch.prims.convert_element_type %x, %type : !t, !torch.int -> !p
  return %y : !p
}
func.func private @hook_1(%x: !p) -> !t attributes {bwd.inline} {
  %type = torch.constant.int 6
  %y = torch.prims.convert_element_type %x, %type : !p, !torch.int -> !t
  return %y : !t
}
func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"}) -> (!t {bwd.role = "output", bwd.name = "o"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %a = torch.aten.exp %x : !t -> !t
  %pack:2 = "bwd.call_hook"(%a, %start) {kind = "pack", hook = 0 : i64} : (!t, !bwd.token) -> (!p, !bwd.token)
  %o = torch.aten.sin %a : !t -> !t
  %s:2 = "bwd.call_hook"(%pack#0, %pack#1) {kind = "unpack", hook = 1 : i64} : (!p, !bwd.token) -> (!t, !bwd.token)
  %n = torch.aten.neg %t : !t -> !t
  %g = torch.aten.mul.Tensor %n, %s#0 : !t, !t -> !t
  %r = torch.aten.mul.Tensor %g, %t : !t, !t -> !t
  return %o, %r : !t, !t
}
