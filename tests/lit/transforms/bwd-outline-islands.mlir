// RUN: retrograd-opt %s --split-input-file -p 'bwd-outline-islands,bwd-verify-legality{level=staged}' | FileCheck %s

!t = !torch.vtensor<[2],f32>

// Two islands that do not depend on each other share the stages around them: two stages, not three. A value is freed
// after its last use, and @backward, which has no island, stays.
// CHECK: module attributes {bwd.island_plans = {forward = {arguments = ["x"], results = ["y", "u"], steps = [
// CHECK-SAME: {arguments = ["x"], function = "forward_0", results = ["a", "b"], step = "run_stage"}, {step = "free", values = ["x"]},
// CHECK-SAME: {arguments = ["a", "b"], bytes = [8, 8, 8], island = 4 : i64, results = ["p", "", "u"], step = "run_island"}, {step = "free", values = ["a"]},
// CHECK-SAME: {arguments = ["b"], bytes = [8], island = 7 : i64, results = ["q"], step = "run_island"}, {step = "free", values = ["b"]},
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

!open = !torch.vtensor<[?],f32>

// An island takes open sizes before tensors. What passes between stages says what its sizes are, and stages take them.
// Bytes are those of the sizes that were traced.
// CHECK: {arguments = ["x", "n"], function = "forward_0", results = ["a"], step = "run_stage"}
// CHECK-SAME: {arguments = ["n", "a"], bytes = [28], island = 0 : i64, results = ["p"], step = "run_island"}
// CHECK-SAME: {arguments = ["n", "p"], function = "forward_1", results = ["y"], step = "run_stage"}
// CHECK: func.func @forward_0(%{{.*}}: !torch.vtensor<[?],f32> {{{.*}}}, %{{.*}}: !torch.int {bwd.name = "n", bwd.role = "size", bwd.value = "n"}) -> (!torch.vtensor<[?],f32> {bwd.name = "a", bwd.role = "saved", bwd.shape = "n + 2", bwd.value = "a"})
module attributes {bwd.sizes = {n = 5 : i64}} {
  func.func @forward(%x: !open {bwd.role = "input", bwd.name = "x", bwd.value = "x", bwd.shape = "n"}, %n: !torch.int {bwd.role = "size", bwd.name = "n", bwd.value = "n"})
      -> (!open {bwd.role = "output", bwd.name = "out", bwd.shape = "n + 2"}) {
    %a = torch.operator "torch.some.pad"(%x) {bwd.values = ["a"], bwd.shapes = ["n + 2"]} : (!open) -> !open
    %p = torch.operator "torch.retrograd.island"(%n, %a) {bwd.island = 0 : i64, bwd.values = ["p"], bwd.shapes = ["n + 2"]} : (!torch.int, !open) -> !open
    %y = torch.aten.exp %p {bwd.values = ["y"], bwd.shapes = ["n + 2"]} : !open -> !open
    return %y : !open
  }
}

// -----

!t = !torch.vtensor<[2],f32>

// Islands that draw random numbers keep their order, whatever they depend on; a function may be islands alone.
// CHECK: steps = [{arguments = ["x"], bytes = [8], island = 0 : i64, results = ["a"], step = "run_island"},
// CHECK-SAME: {arguments = ["x"], bytes = [8], island = 1 : i64, results = ["b"], step = "run_island"}
// CHECK-NOT: func.func
func.func @forward(%x: !t {bwd.role = "input", bwd.name = "x", bwd.value = "x"})
    -> (!t {bwd.role = "output", bwd.name = "b"}, !t {bwd.role = "output", bwd.name = "a"}) {
  %a = torch.operator "torch.retrograd.island"(%x) {bwd.island = 0 : i64, bwd.random, bwd.values = ["a"]} : (!t) -> !t
  %b = torch.operator "torch.retrograd.island"(%x) {bwd.island = 1 : i64, bwd.random, bwd.values = ["b"]} : (!t) -> !t
  return %b, %a : !t, !t
}

// -----

!a = !torch.vtensor<[1024,16],f32>
!b = !torch.vtensor<[16,1024],f32>
!w = !torch.vtensor<[16,16],f32>

// The gradient of a weight is computed where its operands are, which are freed then, and not in the last stage.
// CHECK: steps = [{arguments = ["g", "saved.x"], function = "backward_0", results = ["d", "w"], step = "run_stage"}, {step = "free", values = ["g", "saved.x"]},
// CHECK-SAME: island = 0 : i64, results = ["h"]
// CHECK-SAME: {arguments = ["h"], function = "backward_1", results = ["y"], step = "run_stage"}
func.func @backward(%g: !a {bwd.role = "tangent", bwd.name = "g", bwd.value = "g"}, %x: !b {bwd.role = "saved", bwd.name = "saved.x", bwd.value = "saved.x"})
    -> (!w {bwd.role = "grad", bwd.name = "grad.w"}, !a {bwd.role = "grad", bwd.name = "grad.x"}) {
  %d = torch.aten.neg %g {bwd.values = ["d"]} : !a -> !a
  %h = torch.operator "torch.retrograd.island"(%d) {bwd.island = 0 : i64, bwd.values = ["h"]} : (!a) -> !a
  %y = torch.aten.exp %h {bwd.values = ["y"]} : !a -> !a
  %w = torch.aten.mm %x, %d {bwd.values = ["w"]} : !b, !a -> !w
  return %w, %y : !w, !a
}

// -----

!t = !torch.vtensor<[2],f32>

// A function that starts a collective is cut at its start and at the wait for it, in the order that it has: one stage
// is computed in between.
// CHECK: module attributes {bwd.island_plans = {backward = {arguments = ["g"], results = ["y", "r"], steps = [
// CHECK-SAME: {arguments = ["g"], function = "backward_0", results = ["a"], step = "run_stage"},
// CHECK-SAME: {arguments = ["a"], bytes = [8], collective = "all_reduce", group = "0", reduction = "sum", results = ["s"], size = 0 : i64, step = "start_collective"},
// CHECK-SAME: {arguments = ["g"], function = "backward_1", results = ["y"], step = "run_stage"},
// CHECK-SAME: {arguments = ["s"], results = ["r"], step = "wait_collective"}
// CHECK: func.func @backward_0(
// CHECK: func.func @backward_1(
func.func @backward(%g: !t {bwd.role = "tangent", bwd.name = "g", bwd.value = "g"})
    -> (!t {bwd.role = "grad", bwd.name = "grad.x"}, !t {bwd.role = "grad", bwd.name = "grad.w"}) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %a = torch.aten.exp %g {bwd.values = ["a"]} : !t -> !t
  %s:2 = "bwd.start_collective"(%a, %t0) {bwd.values = ["s", ""], kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %y = torch.aten.neg %g {bwd.values = ["y"]} : !t -> !t
  %r = "bwd.wait_collective"(%s#0) {bwd.values = ["r"]} : (!t) -> !t
  return %y, %r : !t, !t
}
