// RUN: retrograd-opt %s --split-input-file -p 'bwd-outline-islands,bwd-verify-legality{level=staged}' | FileCheck %s

!t = !torch.vtensor<[2],f32>

// Two islands that do not depend on each other share the stages around them: two stages, not three. A value is freed
// after its last use, and @backward, which has no island, stays.
// CHECK: module attributes {bwd.island_plans = {forward = {arguments = ["x"], results = ["y", "u"], steps = [
// CHECK-SAME: {arguments = ["x"], function = "forward_0", results = ["a", "b"], step = "run_stage"}, {step = "free", values = ["x"]},
// CHECK-SAME: {arguments = ["a", "b"], island = 4 : i64, results = ["p", "", "u"], step = "run_island"}, {step = "free", values = ["a"]},
// CHECK-SAME: {arguments = ["b"], island = 7 : i64, results = ["q"], step = "run_island"}, {step = "free", values = ["b"]},
// CHECK-SAME: {arguments = ["p", "q"], function = "forward_1", results = ["y"], step = "run_stage"}, {step = "free", values = ["p", "q"]}]}}}
// CHECK: func.func @forward_0(%[[X:.*]]: !torch.vtensor<[2],f32> {bwd.name = "x", bwd.role = "input", bwd.value = "x"})
// CHECK-NEXT: %[[A:.*]] = torch.aten.exp %[[X]]
// CHECK-NEXT: %[[B:.*]] = torch.aten.neg %[[A]]
// CHECK-NEXT: return %[[A]], %[[B]]
// CHECK: func.func @forward_1(%[[P:.*]]: {{.*}} {bwd.name = "p", bwd.role = "saved", bwd.value = "p"}, %[[Q:.*]]: {{.*}}) -> ({{.*}} {bwd.name = "out", bwd.role = "output", bwd.value = "y"})
// CHECK-NEXT: %[[S:.*]] = torch.aten.mul.Tensor %[[P]], %[[Q]]
// CHECK-NEXT: return %[[S]]
// CHECK: func.func @backward(
func.func @forward(%x: !t {bwd.role = "input", bwd.name = "x", bwd.value = "x"})
    -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "saved", bwd.name = "saved.u"}) {
  %a = torch.aten.exp %x {bwd.values = ["a"]} : !t -> !t
  %b = torch.aten.neg %a {bwd.values = ["b"]} : !t -> !t
  %i:3 = torch.operator "torch.retrograd.island"(%a, %b) {bwd.island = 4 : i64, bwd.values = ["p", "unused", "u"]} : (!t, !t) -> (!t, !t, !t)
  %j = torch.operator "torch.retrograd.island"(%b) {bwd.island = 7 : i64, bwd.values = ["q"]} : (!t) -> !t
  %y = torch.aten.mul.Tensor %i#0, %j {bwd.values = ["y"]} : !t, !t -> !t
  return %y, %i#2 : !t, !t
}
func.func @backward(%g: !t {bwd.role = "tangent", bwd.name = "g"}) -> (!t {bwd.role = "grad", bwd.name = "grad.x"}) {
  return %g : !t
}

// -----

!t = !torch.vtensor<[2],f32>

// Islands that draw random numbers keep their order, whatever they depend on; a function may be islands alone.
// CHECK: steps = [{arguments = ["x"], island = 0 : i64, results = ["a"], step = "run_island"},
// CHECK-SAME: {arguments = ["x"], island = 1 : i64, results = ["b"], step = "run_island"}
// CHECK-NOT: func.func
func.func @forward(%x: !t {bwd.role = "input", bwd.name = "x", bwd.value = "x"})
    -> (!t {bwd.role = "output", bwd.name = "b"}, !t {bwd.role = "output", bwd.name = "a"}) {
  %a = torch.operator "torch.retrograd.island"(%x) {bwd.island = 0 : i64, bwd.random, bwd.values = ["a"]} : (!t) -> !t
  %b = torch.operator "torch.retrograd.island"(%x) {bwd.island = 1 : i64, bwd.random, bwd.values = ["b"]} : (!t) -> !t
  return %b, %a : !t, !t
}
