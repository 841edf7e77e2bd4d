// RUN: retrograd-opt %s --split-input-file -p 'bwd-drop-tangents{absent=1},bwd-verify-legality{level=imported}' | FileCheck %s

!m = !torch.vtensor<[2,2],f32>

// A sum loses a term, twice; what leads to the term goes, and so do a gradient and what only these take. The names of
// the gradients stay.
// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %[[T:.*]]: !torch.vtensor<[2,2],f32> {bwd.name = "tangent.y", bwd.role = "tangent"}
// CHECK-NOT: tangent.z
// CHECK-SAME: ) -> (!torch.vtensor<[2,2],f32> {bwd.name = "grad.x", bwd.role = "grad", bwd.value = "add_1"}) {
// CHECK-NEXT: return %[[T]]
func.func @backward(%w: !m {bwd.role = "param", bwd.name = "w"}, %s: !m {bwd.role = "saved", bwd.name = "saved.s"},
                    %t: !m {bwd.role = "tangent", bwd.name = "tangent.y"},
                    %u: !m {bwd.role = "tangent", bwd.name = "tangent.z"})
    -> (!m {bwd.role = "grad", bwd.name = "grad.x", bwd.value = "add_1"}, !m {bwd.role = "grad", bwd.name = "grad.w"}) {
  %one = torch.constant.int 1
  %root = torch.aten.sqrt %s : !m -> !m
  %a = torch.aten.div.Tensor %u, %root : !m, !m -> !m
  %sum = torch.aten.add.Tensor %a, %t, %one : !m, !m, !torch.int -> !m
  %b = torch.aten.mm %u, %w : !m, !m -> !m
  %more = torch.aten.sub.Tensor %sum, %b, %one : !m, !m, !torch.int -> !m
  %g = torch.aten.exp %u : !m -> !m
  return %more, %g : !m, !m
}

// -----

!m = !torch.vtensor<[2,2],f32>
!four = !torch.vtensor<[4,2],f32>

// What is joined with something that is there is zeros; a sum with a factor, and what it is subtracted from, as well.
// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %[[T:[a-z0-9]+]]: !torch.vtensor<[2,2],f32> {bwd.name = "tangent.y", bwd.role = "tangent"})
// CHECK: %[[ZERO:.*]] = torch.vtensor.literal(dense<0.000000e+00> : tensor<f32>) : !torch.vtensor<[],f32>
// CHECK: %[[ZEROS:.*]] = torch.aten.expand %[[ZERO]]
// CHECK-SAME: -> !torch.vtensor<[2,2],f32>
// CHECK: torch.prim.ListConstruct %[[T]], %[[ZEROS]]
// CHECK-NEXT: torch.aten.cat
// CHECK: %[[OTHERS:.*]] = torch.aten.expand
// CHECK-NEXT: torch.aten.add.Tensor %[[OTHERS]], %[[T]]
// CHECK: %[[FROM:.*]] = torch.aten.expand
// CHECK-NEXT: torch.aten.sub.Tensor %[[FROM]], %[[T]]
func.func @backward(%t: !m {bwd.role = "tangent", bwd.name = "tangent.y"},
                    %u: !m {bwd.role = "tangent", bwd.name = "tangent.z"})
    -> (!four {bwd.role = "grad", bwd.name = "grad.x"}, !m {bwd.role = "grad", bwd.name = "grad.w"},
        !m {bwd.role = "grad", bwd.name = "grad.v"}) {
  %zero = torch.constant.int 0
  %one = torch.constant.int 1
  %two = torch.constant.int 2
  %n = torch.aten.neg %u : !m -> !m
  %list = torch.prim.ListConstruct %t, %n : (!m, !m) -> !torch.list<vtensor>
  %g = torch.aten.cat %list, %zero : !torch.list<vtensor>, !torch.int -> !four
  %h = torch.aten.add.Tensor %n, %t, %two : !m, !m, !torch.int -> !m
  %k = torch.aten.sub.Tensor %n, %t, %one : !m, !m, !torch.int -> !m
  return %g, %h, %k : !four, !m, !m
}

// -----

!row = !torch.vtensor<[3],f32>
!m = !torch.vtensor<[2,3],f32>

// A sum that also makes its operand larger is no plain sum. Choosing between a constant and what is absent is absent: of
// what depends on absent tangents alone, eager runs nothing, a hook that adds to the gradient included.
// CHECK-LABEL: func.func @backward(
// CHECK: %[[ZEROS:.*]] = torch.aten.expand {{.*}} -> !torch.vtensor<[2,3],f32>
// CHECK-NEXT: %[[SUM:.*]] = torch.aten.add.Tensor %{{.*}}, %[[ZEROS]]
// CHECK-NOT: torch.aten.where
// CHECK: return %[[SUM]] : !torch.vtensor<[2,3],f32>
func.func @backward(%c: !torch.vtensor<[2,3],i1> {bwd.role = "saved", bwd.name = "saved.c"},
                    %s: !m {bwd.role = "saved", bwd.name = "saved.s"},
                    %t: !row {bwd.role = "tangent", bwd.name = "tangent.y"},
                    %u: !m {bwd.role = "tangent", bwd.name = "tangent.z"})
    -> (!m {bwd.role = "grad", bwd.name = "grad.x"}, !m {bwd.role = "grad", bwd.name = "grad.w"}) {
  %one = torch.constant.int 1
  %chosen = torch.aten.where.self %c, %s, %u : !torch.vtensor<[2,3],i1>, !m, !m -> !m
  %hooked = torch.aten.add.Tensor %chosen, %s, %one : !m, !m, !torch.int -> !m
  %sum = torch.aten.add.Tensor %t, %hooked, %one : !row, !m, !torch.int -> !m
  return %sum, %hooked : !m, !m
}

// -----

!open = !torch.vtensor<[?,3],f32>
!twice = !torch.vtensor<[?,3],f32>

// Zeros of an open size, which becomes an argument.
// CHECK-LABEL: func.func @forward(
// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %[[T:[a-z0-9]+]]: !torch.vtensor<[?,3],f32> {bwd.name = "tangent.y", bwd.role = "tangent", bwd.shape = "b, 3"}
// CHECK-SAME: %[[B:[a-z0-9]+]]: !torch.int {bwd.name = "b", bwd.role = "size", bwd.value = "sym"})
// CHECK: %[[TWO:.*]] = torch.constant.int 2
// CHECK-NEXT: %[[SIZE:.*]] = torch.aten.mul.int %[[TWO]], %[[B]]
// CHECK: %[[SHAPE:.*]] = torch.prim.ListConstruct %[[SIZE]], %
// CHECK: torch.aten.expand %{{.*}}, %[[SHAPE]], %{{.*}} {bwd.shapes = ["2 * b, 3"]}
module attributes {bwd.sizes = {b = 5 : i64}} {
  func.func @forward(%b: !torch.int {bwd.role = "size", bwd.name = "b", bwd.value = "sym"}) {
    return
  }
  func.func @backward(%t: !open {bwd.role = "tangent", bwd.name = "tangent.y", bwd.shape = "b, 3"},
                      %u: !twice {bwd.role = "tangent", bwd.name = "tangent.z", bwd.shape = "2 * b, 3"})
      -> (!open {bwd.role = "grad", bwd.name = "grad.x", bwd.shape = "3 * b, 3"}) {
    %zero = torch.constant.int 0
    %list = torch.prim.ListConstruct %t, %u : (!open, !twice) -> !torch.list<vtensor>
    %g = torch.aten.cat %list, %zero {bwd.shapes = ["3 * b, 3"]} : !torch.list<vtensor>, !torch.int -> !open
    return %g : !open
  }
}

// -----

!m = !torch.vtensor<[2,2],f32>

// Of a sum of both absent nothing is left, and of a list of them.
// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %[[T:[a-z0-9]+]]: !torch.vtensor<[2,2],f32> {bwd.name = "tangent.y", bwd.role = "tangent"}) ->
// CHECK-NEXT: %[[G:.*]] = torch.aten.neg %[[T]]
// CHECK-NEXT: return %[[G]] : !torch.vtensor<[2,2],f32>
func.func @backward(%t: !m {bwd.role = "tangent", bwd.name = "tangent.y"},
                    %u: !m {bwd.role = "tangent", bwd.name = "tangent.z"})
    -> (!m {bwd.role = "grad", bwd.name = "grad.x"}, !torch.vtensor<[4,2],f32> {bwd.role = "grad", bwd.name = "grad.w"}) {
  %zero = torch.constant.int 0
  %one = torch.constant.int 1
  %g = torch.aten.neg %t : !m -> !m
  %n = torch.aten.neg %u : !m -> !m
  %s = torch.aten.add.Tensor %n, %u, %one : !m, !m, !torch.int -> !m
  %list = torch.prim.ListConstruct %n, %s : (!m, !m) -> !torch.list<vtensor>
  %h = torch.aten.cat %list, %zero : !torch.list<vtensor>, !torch.int -> !torch.vtensor<[4,2],f32>
  return %g, %h : !m, !torch.vtensor<[4,2],f32>
}
