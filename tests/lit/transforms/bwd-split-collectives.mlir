// RUN: retrograd-opt %s --split-input-file -p 'bwd-split-collectives' | FileCheck %s

!t = !torch.vtensor<[4],f32>

// Starts are on one chain, in the order of the function.
// CHECK-LABEL: @forward
// CHECK: %[[T0:.*]] = "bwd.create_token"
// CHECK-NEXT: %[[S:.*]]:2 = "bwd.start_collective"(%{{.*}}, %[[T0]]) {bwd.values = ["r.started", ""], group = "0", kind = "all_reduce", reduction = "sum", size = 0 : i64}
// CHECK-NEXT: %[[R:.*]] = "bwd.wait_collective"(%[[S]]#0) {bwd.values = ["r"]}
// CHECK-NEXT: %[[Q:.*]]:2 = "bwd.start_collective"(%[[R]], %[[S]]#1)
// CHECK-NEXT: %[[P:.*]] = "bwd.wait_collective"(%[[Q]]#0)
// CHECK-NEXT: return %[[P]]
func.func @forward(%x: !t) -> !t {
  %r = "bwd.collective"(%x) {bwd.values = ["r"], kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  %p = "bwd.collective"(%r) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  return %p : !t
}

// -----

!t = !torch.vtensor<[4],f32>

// With hooks they share the chain; the body of a hook stays for where it is inlined, and a function without any too.
// CHECK-LABEL: @backward
// CHECK: %[[T0:.*]] = "bwd.create_token"
// CHECK-NEXT: %[[H:.*]]:2 = "bwd.call_hook"(%{{.*}}, %[[T0]])
// CHECK-NEXT: %[[S:.*]]:2 = "bwd.start_collective"(%[[H]]#0, %[[H]]#1)
// CHECK-NEXT: %[[R:.*]] = "bwd.wait_collective"(%[[S]]#0)
// CHECK-NEXT: "bwd.accumulate_grad"(%[[R]], %[[S]]#1)
// CHECK-LABEL: @hook_1
// CHECK: "bwd.collective"
// CHECK-LABEL: @other
// CHECK-NEXT: return
func.func @backward(%g: !t) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %h:2 = "bwd.call_hook"(%g, %start) {kind = "tensor_pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %r = "bwd.collective"(%h#0) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  %acc = "bwd.accumulate_grad"(%r, %h#1) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
  return
}
func.func @hook_1(%g: !t) -> !t attributes {bwd.inline} {
  %r = "bwd.collective"(%g) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  return %r : !t
}
func.func @other(%g: !t) -> !t {
  return %g : !t
}

// -----

!open = !torch.vtensor<[?],f32>

// Open sizes are kept.
// CHECK: "bwd.start_collective"(%{{.*}}) {bwd.shapes = ["s0", ""]
// CHECK: "bwd.wait_collective"(%{{.*}}) {bwd.shapes = ["s0"]
func.func @forward(%x: !open) -> !open {
  %r = "bwd.collective"(%x) {bwd.shapes = ["s0"], kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!open) -> !open
  return %r : !open
}

// -----

!t = !torch.vtensor<[4],f32>

// Turns are kept, whatever stands where: what a collective takes comes with it, and the rest stays in its order.
// CHECK-LABEL: @backward
// CHECK: %[[N:.*]] = torch.aten.neg %arg1
// CHECK-NEXT: %[[S:.*]]:2 = "bwd.start_collective"(%[[N]], %{{.*}}) {bwd.values = ["", ""], group = "0", kind = "all_gather"
// CHECK-NEXT: %[[W:.*]] = "bwd.wait_collective"(%[[S]]#0)
// CHECK-NEXT: "bwd.start_collective"(%arg0, %[[S]]#1) {bwd.values = ["", ""], group = "0", kind = "all_reduce"
// CHECK-NEXT: "bwd.wait_collective"
// CHECK-NEXT: torch.aten.exp %arg0
// CHECK-NEXT: return
func.func @backward(%g: !t, %w: !t) -> (!t, !t, !torch.vtensor<[8],f32>) {
  %r = "bwd.collective"(%g) {bwd.turn = 4 : i64, kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  %e = torch.aten.exp %g : !t -> !t
  %n = torch.aten.neg %w : !t -> !t
  %a = "bwd.collective"(%n) {bwd.turn = 2 : i64, kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t) -> !torch.vtensor<[8],f32>
  return %r, %e, %a : !t, !t, !torch.vtensor<[8],f32>
}

// -----

!t = !torch.vtensor<[4],f32>

// What draws random numbers does not pass what draws others.
// CHECK-LABEL: @backward
// CHECK: bwd.island = 0
// CHECK: bwd.island = 1
// CHECK: kind = "all_gather"
// CHECK: kind = "all_reduce"
// CHECK: return
func.func @backward(%g: !t) -> (!t, !t, !torch.vtensor<[8],f32>) {
  %r = "bwd.collective"(%g) {bwd.turn = 1 : i64, kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  %e = torch.operator "torch.retrograd.island"(%g) {bwd.island = 0 : i64, bwd.random} : (!t) -> !t
  %n = torch.operator "torch.retrograd.island"(%g) {bwd.island = 1 : i64, bwd.random} : (!t) -> !t
  %a = "bwd.collective"(%n) {bwd.turn = 0 : i64, kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t) -> !torch.vtensor<[8],f32>
  return %r, %e, %a : !t, !t, !torch.vtensor<[8],f32>
}
