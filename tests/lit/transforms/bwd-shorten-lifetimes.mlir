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

// -----

!m = !torch.vtensor<[64,64],f32>

// What is on the host between the halves counts while it is not. The forward is cut too: what it gives leaves behind its
// last use, four matrices at a time.
// CHECK: module attributes {bwd.island_plans = {backward = {{.*}}function = "backward_5"
// CHECK-SAME: forward = {arguments = ["w", "x"]
// CHECK-SAME: {arguments = ["w", "x"], function = "forward_0", results = ["a", "b", "c"], step = "run_stage"}
// CHECK-SAME: {arguments = ["w", "c"], function = "forward_1", results = ["d"], step = "run_stage"}
// CHECK-SAME: {arguments = ["w", "d"], function = "forward_2", results = ["e", "f", "y"], step = "run_stage"}
module attributes {bwd.offloaded = ["a", "b", "c", "d", "e", "f"]} {
func.func @forward(%w: !m {bwd.role = "param", bwd.name = "w", bwd.value = "w"}, %x: !m {bwd.role = "input", bwd.name = "x", bwd.value = "x"})
    -> (!m {bwd.role = "output", bwd.name = "out", bwd.value = "y"}, !m {bwd.role = "saved", bwd.name = "saved.a", bwd.value = "a"}, !m {bwd.role = "saved", bwd.name = "saved.b", bwd.value = "b"}, !m {bwd.role = "saved", bwd.name = "saved.c", bwd.value = "c"}, !m {bwd.role = "saved", bwd.name = "saved.d", bwd.value = "d"}, !m {bwd.role = "saved", bwd.name = "saved.e", bwd.value = "e"}, !m {bwd.role = "saved", bwd.name = "saved.f", bwd.value = "f"}) {
  %a = torch.aten.mm %x, %w {bwd.values = ["a"]} : !m, !m -> !m
  %b = torch.aten.mm %a, %w {bwd.values = ["b"]} : !m, !m -> !m
  %c = torch.aten.mm %b, %w {bwd.values = ["c"]} : !m, !m -> !m
  %d = torch.aten.mm %c, %w {bwd.values = ["d"]} : !m, !m -> !m
  %e = torch.aten.mm %d, %w {bwd.values = ["e"]} : !m, !m -> !m
  %f = torch.aten.mm %e, %w {bwd.values = ["f"]} : !m, !m -> !m
  %y = torch.aten.mm %f, %w {bwd.values = ["y"]} : !m, !m -> !m
  return %y, %a, %b, %c, %d, %e, %f : !m, !m, !m, !m, !m, !m, !m
}
func.func @backward(%w: !m {bwd.role = "param", bwd.name = "w", bwd.value = "w"}, %a: !m {bwd.role = "saved", bwd.name = "saved.a", bwd.value = "a"}, %b: !m {bwd.role = "saved", bwd.name = "saved.b", bwd.value = "b"}, %c: !m {bwd.role = "saved", bwd.name = "saved.c", bwd.value = "c"}, %d: !m {bwd.role = "saved", bwd.name = "saved.d", bwd.value = "d"}, %e: !m {bwd.role = "saved", bwd.name = "saved.e", bwd.value = "e"}, %f: !m {bwd.role = "saved", bwd.name = "saved.f", bwd.value = "f"}, %t: !m {bwd.role = "tangent", bwd.name = "tangent.out", bwd.value = "t"})
    -> (!m {bwd.role = "grad", bwd.name = "grad.x"}) {
  %d0 = torch.aten.mm %t, %f {bwd.values = ["d0"]} : !m, !m -> !m
  %d1 = torch.aten.mm %d0, %e {bwd.values = ["d1"]} : !m, !m -> !m
  %d2 = torch.aten.mm %d1, %d {bwd.values = ["d2"]} : !m, !m -> !m
  %d3 = torch.aten.mm %d2, %c {bwd.values = ["d3"]} : !m, !m -> !m
  %d4 = torch.aten.mm %d3, %b {bwd.values = ["d4"]} : !m, !m -> !m
  %g = torch.aten.mm %d4, %a {bwd.values = ["g"]} : !m, !m -> !m
  return %g : !m
}
}
