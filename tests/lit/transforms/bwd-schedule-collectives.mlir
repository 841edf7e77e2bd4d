// RUN: retrograd-opt %s --split-input-file -p 'bwd-schedule-collectives' | FileCheck %s

!t = !torch.vtensor<[4],f32>

// Each starts when what it takes is computed, in their order, and is waited for where it is needed: the product is
// computed meanwhile. An island beside them is no obstacle.
// CHECK-LABEL: @backward
// CHECK: %[[A:.*]] = torch.aten.neg
// CHECK: %[[S:.*]]:2 = "bwd.start_collective"(%[[A]],
// CHECK: %[[B:.*]] = torch.aten.exp
// CHECK: %[[Q:.*]]:2 = "bwd.start_collective"(%[[B]], %[[S]]#1)
// CHECK: %[[I:.*]] = torch.operator "torch.retrograd.island"
// CHECK: %[[P:.*]] = torch.aten.mul.Tensor %[[I]], %[[I]]
// CHECK: %[[R:.*]] = "bwd.wait_collective"(%[[S]]#0)
// CHECK: torch.aten.mul.Tensor %[[R]], %[[P]]
// CHECK: torch.aten.sin
// CHECK: "bwd.wait_collective"(%[[Q]]#0)
func.func @backward(%g: !t) -> (!t, !t, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %i = torch.operator "torch.retrograd.island"(%g) {bwd.island = 0 : i64} : (!t) -> !t
  %p = torch.aten.mul.Tensor %i, %i : !t, !t -> !t
  %a = torch.aten.neg %g : !t -> !t
  %s:2 = "bwd.start_collective"(%a, %t0) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %r = "bwd.wait_collective"(%s#0) : (!t) -> !t
  %n = torch.aten.mul.Tensor %r, %p : !t, !t -> !t
  %z = torch.aten.sin %n : !t -> !t
  %b = torch.aten.exp %g : !t -> !t
  %q:2 = "bwd.start_collective"(%b, %s#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %w = "bwd.wait_collective"(%q#0) : (!t) -> !t
  return %z, %w, %p : !t, !t, !t
}
