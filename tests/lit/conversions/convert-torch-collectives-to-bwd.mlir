// RUN: retrograd-opt %s --split-input-file -p 'convert-torch-collectives-to-bwd' | FileCheck %s

!t = !torch.vtensor<[4],f32>

// Each collective with the wait for it is one op, which has the name of what was waited for.
// CHECK-LABEL: @backward
// CHECK: %[[X:.*]] = torch.aten.neg
// CHECK-NEXT: %[[R:.*]] = "bwd.collective"(%[[X]]) {bwd.values = ["reduced"], group = "0", kind = "all_reduce", reduction = "avg", size = 0 : i64}
// CHECK-NEXT: %[[Y:.*]] = torch.aten.exp %[[X]]
// CHECK-NEXT: %[[G:.*]] = "bwd.collective"(%[[R]]) {bwd.values = ["gathered"], group = "1", kind = "all_gather", reduction = "", size = 2 : i64} : (!torch.vtensor<[4],f32>) -> !torch.vtensor<[8],f32>
// CHECK-NEXT: %[[S:.*]] = "bwd.collective"(%[[G]]) {bwd.values = ["scattered"], group = "1", kind = "reduce_scatter", reduction = "sum", size = 2 : i64} : (!torch.vtensor<[8],f32>) -> !torch.vtensor<[4],f32>
// CHECK-NEXT: return %[[R]], %[[Y]], %[[G]], %[[S]]
func.func @backward(%g: !t) -> (!t, !t, !torch.vtensor<[8],f32>, !t) {
  %avg = torch.constant.str "avg"
  %sum = torch.constant.str "sum"
  %first = torch.constant.str "0"
  %second = torch.constant.str "1"
  %two = torch.constant.int 2
  %x = torch.aten.neg %g : !t -> !t
  %a = torch.operator "torch._c10d_functional.all_reduce"(%x, %avg, %first) {bwd.values = ["started"]} : (!t, !torch.str, !torch.str) -> !t
  %y = torch.aten.exp %x : !t -> !t
  %r = torch.operator "torch._c10d_functional.wait_tensor"(%a) {bwd.values = ["reduced"]} : (!t) -> !t
  %b = torch.operator "torch._c10d_functional.all_gather_into_tensor"(%r, %two, %second) : (!t, !torch.int, !torch.str) -> !torch.vtensor<[8],f32>
  %h = torch.operator "torch._c10d_functional.wait_tensor"(%b) {bwd.values = ["gathered"]} : (!torch.vtensor<[8],f32>) -> !torch.vtensor<[8],f32>
  %c = torch.operator "torch._c10d_functional.reduce_scatter_tensor"(%h, %sum, %two, %second) : (!torch.vtensor<[8],f32>, !torch.str, !torch.int, !torch.str) -> !t
  %s = torch.operator "torch._c10d_functional.wait_tensor"(%c) {bwd.values = ["scattered"]} : (!t) -> !t
  return %r, %y, %h, %s : !t, !t, !torch.vtensor<[8],f32>, !t
}

// -----

!t = !torch.vtensor<[4],f32>

// What is waited for twice is one value. What nobody waits for, what is looked at before it is there, and other
// collectives stay.
// CHECK-LABEL: @backward
// CHECK: %[[R:.*]] = "bwd.collective"
// CHECK-NEXT: torch._c10d_functional.all_reduce
// CHECK-NEXT: torch._c10d_functional.all_reduce
// CHECK-NEXT: torch.aten.neg
// CHECK-NEXT: torch._c10d_functional.wait_tensor
// CHECK-NEXT: torch._c10d_functional.broadcast
// CHECK-NEXT: torch._c10d_functional.wait_tensor
// CHECK: return %[[R]], %[[R]]
func.func @backward(%g: !t) -> (!t, !t, !t, !t, !t) {
  %sum = torch.constant.str "sum"
  %group = torch.constant.str "0"
  %zero = torch.constant.int 0
  %a = torch.operator "torch._c10d_functional.all_reduce"(%g, %sum, %group) : (!t, !torch.str, !torch.str) -> !t
  %p = torch.operator "torch._c10d_functional.wait_tensor"(%a) : (!t) -> !t
  %q = torch.operator "torch._c10d_functional.wait_tensor"(%a) : (!t) -> !t
  %b = torch.operator "torch._c10d_functional.all_reduce"(%g, %sum, %group) : (!t, !torch.str, !torch.str) -> !t
  %c = torch.operator "torch._c10d_functional.all_reduce"(%g, %sum, %group) : (!t, !torch.str, !torch.str) -> !t
  %n = torch.aten.neg %c : !t -> !t
  %w = torch.operator "torch._c10d_functional.wait_tensor"(%c) : (!t) -> !t
  %d = torch.operator "torch._c10d_functional.broadcast"(%g, %zero, %group) : (!t, !torch.int, !torch.str) -> !t
  %v = torch.operator "torch._c10d_functional.wait_tensor"(%d) : (!t) -> !t
  return %p, %q, %n, %w, %v : !t, !t, !t, !t, !t
}

// -----

!t = !torch.vtensor<[4],f32>
!u = !torch.vtensor<[8],f32>

// What is gathered in the backward, of what the forward has, is gathered again; what depends on a tangent could not run
// before anyway. What is gathered in a checkpointed block of the forward is not.
// CHECK-LABEL: @joint
// CHECK: "bwd.collective"(%{{.*}}) {bwd.turn = 0 : i64, group = "0", kind = "all_gather", reduction = "", size = 2 : i64}
// CHECK: "bwd.collective"(%{{.*}}) {bwd.recompute = "must", bwd.turn = 1 : i64, group = "0", kind = "all_gather", reduction = "", size = 2 : i64}
// CHECK: "bwd.collective"(%{{.*}}) {bwd.turn = 2 : i64, group = "0", kind = "reduce_scatter", reduction = "sum", size = 2 : i64}
func.func @joint(%w: !t {bwd.role = "param", bwd.name = "w"}, %x: !u {bwd.role = "input", bwd.name = "x"}, %g: !u {bwd.role = "tangent", bwd.name = "g"})
    -> (!u {bwd.role = "output", bwd.name = "y"}, !t {bwd.role = "grad", bwd.name = "grad.w"}) {
  %group = torch.constant.str "0"
  %sum = torch.constant.str "sum"
  %two = torch.constant.int 2
  %a = torch.operator "torch._c10d_functional.all_gather_into_tensor"(%w, %two, %group) {bwd.recompute = "prefer"} : (!t, !torch.int, !torch.str) -> !u
  %p = torch.operator "torch._c10d_functional.wait_tensor"(%a) : (!u) -> !u
  %y = torch.aten.mul.Tensor %x, %p : !u, !u -> !u
  %b = torch.operator "torch._c10d_functional.all_gather_into_tensor"(%w, %two, %group) {bwd.late} : (!t, !torch.int, !torch.str) -> !u
  %q = torch.operator "torch._c10d_functional.wait_tensor"(%b) {bwd.late} : (!u) -> !u
  %m = torch.aten.mul.Tensor %g, %q : !u, !u -> !u
  %c = torch.operator "torch._c10d_functional.reduce_scatter_tensor"(%m, %sum, %two, %group) {bwd.late} : (!u, !torch.str, !torch.int, !torch.str) -> !t
  %s = torch.operator "torch._c10d_functional.wait_tensor"(%c) {bwd.late} : (!t) -> !t
  return %y, %s : !u, !t
}
