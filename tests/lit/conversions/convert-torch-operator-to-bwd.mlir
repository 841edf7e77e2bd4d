// RUN: retrograd-opt %s --split-input-file -p 'convert-torch-operator-to-bwd' | FileCheck %s

!tensor = !torch.vtensor<[2],f32>
!token = !torch.vtensor<[0],si8>

// Every effect, on one chain. Several values travel as a tuple, one as itself, none as torch.constant.none; results
// that nobody uses are none too. Numbers and kinds become attributes, and what gave them goes.
// CHECK-LABEL: func.func @effects(
// CHECK-SAME: %[[X:.*]]: !torch.vtensor<[2],f32>, %[[Y:.*]]: !torch.vtensor<[3],f32>) -> !torch.vtensor<[2],f32> {
// CHECK-NEXT: %[[START:.*]] = "bwd.create_token"() : () -> !bwd.token
// CHECK-NEXT: %[[BOTH:.*]] = torch.prim.TupleConstruct %[[X]], %[[Y]]
// CHECK-NEXT: %[[PRE:.*]]:2 = "bwd.call_hook"(%[[BOTH]], %[[START]]) {hook = 4 : i64, kind = "pre"} : (!torch.tuple<vtensor<[2],f32>, vtensor<[3],f32>>, !bwd.token) -> (!torch.tuple<vtensor<[2],f32>, vtensor<[3],f32>>, !bwd.token)
// CHECK-NEXT: %[[GIVEN:.*]]:2 = torch.prim.TupleUnpack %[[PRE]]#0 {bwd.values = ["a", "b"]}
// CHECK-NEXT: %[[GRAD:.*]]:2 = "bwd.call_backward"(%[[GIVEN]]#0, %[[PRE]]#1) {bwd.values = ["c", ""], function = 1 : i64} : (!torch.vtensor<[2],f32>, !bwd.token) -> (!torch.vtensor<[2],f32>, !bwd.token)
// CHECK-NEXT: %[[ACC:.*]] = "bwd.accumulate_grad"(%[[GRAD]]#0, %[[GRAD]]#1) {param = 7 : i64}
// CHECK-NEXT: %[[NONE:.*]] = torch.constant.none
// CHECK-NEXT: %[[POST:.*]]:2 = "bwd.call_hook"(%[[NONE]], %[[ACC]]) {hook = 5 : i64, kind = "post_acc_grad"} : (!torch.none, !bwd.token) -> (!torch.none, !bwd.token)
// CHECK-NEXT: "bwd.final_callbacks"(%[[POST]]#1)
// CHECK-NEXT: return %[[GIVEN]]#0
func.func @effects(%x: !tensor, %y: !torch.vtensor<[3],f32>) -> !tensor {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  %both = torch.prim.ListConstruct %x, %y : (!tensor, !torch.vtensor<[3],f32>) -> !torch.list<vtensor>
  %pre = torch.constant.str "pre"
  %four = torch.constant.int 4
  %h:2 = torch.operator "torch.retrograd.call_hook"(%both, %start, %pre, %four) : (!torch.list<vtensor>, !token, !torch.str, !torch.int) -> (!torch.list<vtensor>, !token)
  %g:2 = torch.prim.ListUnpack %h#0 {bwd.values = ["a", "b"]} : !torch.list<vtensor> -> !tensor, !torch.vtensor<[3],f32>
  %one = torch.prim.ListConstruct %g#0 : (!tensor) -> !torch.list<vtensor>
  %first = torch.constant.int 1
  %b:2 = torch.operator "torch.retrograd.call_backward"(%one, %h#1, %first) : (!torch.list<vtensor>, !token, !torch.int) -> (!torch.list<vtensor>, !token)
  %c = torch.prim.ListUnpack %b#0 {bwd.values = ["c"]} : !torch.list<vtensor> -> !tensor
  %seven = torch.constant.int 7
  %acc = torch.operator "torch.retrograd.accumulate_grad"(%c, %b#1, %seven) : (!tensor, !token, !torch.int) -> !token
  %nothing = torch.prim.ListConstruct : () -> !torch.list<vtensor>
  %post = torch.constant.str "post_acc_grad"
  %five = torch.constant.int 5
  %p:2 = torch.operator "torch.retrograd.call_hook"(%nothing, %acc, %post, %five) : (!torch.list<vtensor>, !token, !torch.str, !torch.int) -> (!torch.list<vtensor>, !token)
  %end = torch.operator "torch.retrograd.final_callbacks"(%p#1) : (!token) -> !token
  return %g#0 : !tensor
}

// -----

!tensor = !torch.vtensor<[2],f32>
!token = !torch.vtensor<[0],si8>

// What else uses a list or a constant keeps it; other ops of the library stay, and so do empty tensors that are none of
// the tokens.
// CHECK-LABEL: func.func @others(
// CHECK: %[[LIST:.*]] = torch.prim.ListConstruct %arg0, %arg0
// CHECK: %[[INT:.*]] = torch.constant.int 0
// CHECK: "bwd.call_hook"
// CHECK: torch.aten.cat %[[LIST]], %[[INT]]
// CHECK: torch.operator "torch.retrograd.uniform"
// CHECK: return {{.*}} !torch.vtensor<[0],si8>
func.func @others(%x: !tensor, %empty: !token, %sizes: !torch.list<int>) -> (!torch.vtensor<[4],f32>, !tensor, !token) {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  %both = torch.prim.ListConstruct %x, %x : (!tensor, !tensor) -> !torch.list<vtensor>
  %pre = torch.constant.str "pre"
  %zero = torch.constant.int 0
  %h:2 = torch.operator "torch.retrograd.call_hook"(%both, %start, %pre, %zero) : (!torch.list<vtensor>, !token, !torch.str, !torch.int) -> (!torch.list<vtensor>, !token)
  %cat = torch.aten.cat %both, %zero : !torch.list<vtensor>, !torch.int -> !torch.vtensor<[4],f32>
  %u = torch.operator "torch.retrograd.uniform"(%x, %zero, %sizes) : (!tensor, !torch.int, !torch.list<int>) -> !tensor
  return %cat, %u, %empty : !torch.vtensor<[4],f32>, !tensor, !token
}

// -----

!tensor = !torch.vtensor<[2],f32>
!token = !torch.vtensor<[0],si8>

// CHECK-LABEL: func.func @update(
// CHECK: %[[BOTH:.*]] = torch.prim.TupleConstruct %arg0, %arg1
// CHECK-NEXT: "bwd.update_input"(%[[BOTH]], %{{.*}}) {hook = 3 : i64}
func.func @update(%p: !tensor, %new: !tensor) {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  %both = torch.prim.ListConstruct %p, %new : (!tensor, !tensor) -> !torch.list<vtensor>
  %three = torch.constant.int 3
  %t = torch.operator "torch.retrograd.update_input"(%both, %start, %three) : (!torch.list<vtensor>, !token, !torch.int) -> !token
  return
}

// -----

!open = !torch.vtensor<[?],f32>
!token = !torch.vtensor<[0],si8>

// Open shapes of what a call gives stay with it, on the call or on what takes the results apart.
// CHECK-LABEL: func.func @shapes(
// CHECK: "bwd.call_hook"({{.*}}) {bwd.shapes = ["s0", ""], bwd.values = ["a", ""], hook = 0 : i64, kind = "tensor_pre"}
// CHECK: torch.prim.TupleUnpack {{.*}} {bwd.shapes = ["s0", ""], bwd.values = ["b", "c"]}
func.func @shapes(%x: !open {bwd.shape = "s0"}) -> !open {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  %list = torch.prim.ListConstruct %x : (!open) -> !torch.list<vtensor>
  %kind = torch.constant.str "tensor_pre"
  %zero = torch.constant.int 0
  %h:2 = torch.operator "torch.retrograd.call_hook"(%list, %start, %kind, %zero) : (!torch.list<vtensor>, !token, !torch.str, !torch.int) -> (!torch.list<vtensor>, !token)
  %a = torch.prim.ListUnpack %h#0 {bwd.values = ["a"], bwd.shapes = ["s0"]} : !torch.list<vtensor> -> !open
  %one = torch.prim.ListConstruct %a : (!open) -> !torch.list<vtensor>
  %b:2 = torch.operator "torch.retrograd.call_backward"(%one, %h#1, %zero) : (!torch.list<vtensor>, !token, !torch.int) -> (!torch.list<vtensor>, !token)
  %g:2 = torch.prim.ListUnpack %b#0 {bwd.values = ["b", "c"], bwd.shapes = ["s0", ""]} : !torch.list<vtensor> -> !open, !torch.vtensor<[2],f32>
  return %g#0 : !open
}
