// RUN: retrograd-opt %s --split-input-file -p 'bwd-shorten-lifetimes{gain=1},bwd-verify-legality{level=staged}' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-shorten-lifetimes{gain=1 floor=100000000}' | FileCheck %s --check-prefix=FLOOR
// RUN: retrograd-opt %s --split-input-file -p 'bwd-shorten-lifetimes' | FileCheck %s --check-prefix=GAIN

!m = !torch.vtensor<[64,64],f32>

// As few stages as reach the least peak: what the first one took is freed before the next gradients have memory; %e, an
// operand of a product, is in memory in any case. The view of %w is in two, since handed over it would be a copy. The
// forward, of one product after another, stays whole.
// CHECK: module attributes {bwd.island_plans = {backward = {arguments = ["w", "a", "b", "y", "t"], results = ["g2", "g1", "g0"], steps = [
// CHECK-SAME: {arguments = ["w", "a", "b", "t"], function = "backward_0", results = ["g2", "e"], step = "run_stage"}, {step = "free", values = ["b", "t"]},
// CHECK-SAME: {arguments = ["a", "e"], function = "backward_1", results = ["g1"], step = "run_stage"}, {step = "free", values = ["a"]},
// CHECK-SAME: {arguments = ["w", "y", "e"], function = "backward_2", results = ["g0"], step = "run_stage"}, {step = "free", values = ["w", "y", "e"]}]}}}
// CHECK: func.func @forward(
// CHECK: func.func @backward_0(
// CHECK: torch.aten.t %
// CHECK: func.func @backward_1(
// CHECK-NEXT: torch.aten.mm
// CHECK: func.func @backward_2(
// CHECK-NEXT: torch.aten.t %
// CHECK-NEXT: torch.aten.mm
// CHECK-NEXT: torch.aten.mul.Tensor
// FLOOR-NOT: @backward_0
// FLOOR: func.func @backward(
// GAIN-NOT: @backward_0
// GAIN: func.func @backward(
func.func @forward(%w: !m {bwd.role = "param", bwd.name = "w", bwd.value = "w"}, %x: !m {bwd.role = "input", bwd.name = "x", bwd.value = "x"})
    -> (!m {bwd.role = "output", bwd.name = "out", bwd.value = "y"}, !m {bwd.role = "saved", bwd.name = "saved.a", bwd.value = "a"}, !m {bwd.role = "saved", bwd.name = "saved.b", bwd.value = "b"}) {
  %a = torch.aten.mm %x, %w {bwd.values = ["a"]} : !m, !m -> !m
  %b = torch.aten.exp %a {bwd.values = ["b"]} : !m -> !m
  %y = torch.aten.mm %b, %w {bwd.values = ["y"]} : !m, !m -> !m
  return %y, %a, %b : !m, !m, !m
}
func.func @backward(%w: !m {bwd.role = "param", bwd.name = "w", bwd.value = "w"}, %a: !m {bwd.role = "saved", bwd.name = "saved.a", bwd.value = "a"}, %b: !m {bwd.role = "saved", bwd.name = "saved.b", bwd.value = "b"}, %y: !m {bwd.role = "saved", bwd.name = "out", bwd.value = "y"}, %t: !m {bwd.role = "tangent", bwd.name = "tangent.out", bwd.value = "t"})
    -> (!m {bwd.role = "grad", bwd.name = "grad.2"}, !m {bwd.role = "grad", bwd.name = "grad.1"}, !m {bwd.role = "grad", bwd.name = "grad.0"}) {
  %wt = torch.aten.t %w {bwd.values = ["wt"]} : !m -> !m
  %g2 = torch.aten.mm %b, %t {bwd.values = ["g2"]} : !m, !m -> !m
  %d = torch.aten.mm %t, %wt {bwd.values = ["d"]} : !m, !m -> !m
  %e = torch.aten.mul.Tensor %d, %a {bwd.values = ["e"]} : !m, !m -> !m
  %g1 = torch.aten.mm %a, %e {bwd.values = ["g1"]} : !m, !m -> !m
  %f = torch.aten.mm %e, %wt {bwd.values = ["f"]} : !m, !m -> !m
  %g0 = torch.aten.mul.Tensor %f, %y {bwd.values = ["g0"]} : !m, !m -> !m
  return %g2, %g1, %g0 : !m, !m, !m
}

// -----

!m = !torch.vtensor<[64,64],f32>

// One gradient of one kernel: nothing to cut.
// CHECK-NOT: bwd.island_plans
// CHECK: func.func @backward(
func.func @backward(%x: !m {bwd.role = "input", bwd.name = "x"}, %t: !m {bwd.role = "tangent", bwd.name = "t"})
    -> (!m {bwd.role = "grad", bwd.name = "grad.x"}) {
  %g = torch.aten.mul.Tensor %x, %t : !m, !m -> !m
  return %g : !m
}
