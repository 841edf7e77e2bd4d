// RUN: retrograd-opt %s --split-input-file -p 'bwd-cse{across-halves=true}' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-cse' | FileCheck %s --check-prefix=HALVES
// RUN: retrograd-opt %s --split-input-file -p 'bwd-cse,cse,convert-bwd-to-func' | FileCheck %s --check-prefix=KEPT

!square = !torch.vtensor<[4,4],f32>

// Equal chains are found link by link; the names that are gone are kept on the module.
// CHECK-LABEL: module @chains attributes {bwd.merged = {exp_1 = "exp", mul_1 = "mul"}}
// CHECK: %[[E:.*]] = torch.aten.exp {{.*}}"exp"
// CHECK-NEXT: %[[M:.*]] = torch.aten.mul.Tensor %[[E]], %[[E]] {{.*}}"mul"
// CHECK-NEXT: %[[OUT:.*]] = torch.aten.neg %[[M]]
// CHECK-NEXT: %[[GRAD:.*]] = torch.aten.mul.Tensor %{{.*}}, %[[M]]
// CHECK-NEXT: return %[[OUT]], %[[GRAD]]

// Merged within each half only, the backward has its own chain.
// HALVES-LABEL: module @chains {
// HALVES: torch.aten.exp
// HALVES: torch.aten.exp
// HALVES: return
module @chains {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"]} : !square -> !square
    %m = torch.aten.mul.Tensor %e, %e {bwd.values = ["mul"]} : !square, !square -> !square
    %out = torch.aten.neg %m : !square -> !square
    %e1 = torch.aten.exp %x {bwd.values = ["exp_1"]} : !square -> !square
    %m1 = torch.aten.mul.Tensor %e1, %e1 {bwd.values = ["mul_1"]} : !square, !square -> !square
    %grad = torch.aten.mul.Tensor %t, %m1 : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// Another attribute, another operand, another type of result: another op.
// CHECK-LABEL: func.func @differences(
// CHECK: torch.constant.int 1
// CHECK-NEXT: torch.constant.int 2
// CHECK-NEXT: torch.aten.add.Tensor
// CHECK-NEXT: torch.aten.add.Tensor
// CHECK: torch.aten.sum
// CHECK-NEXT: torch.aten.sum
// CHECK-NEXT: torch.aten.add.Tensor
func.func @differences(%x: !square, %y: !square) -> (!square, !torch.vtensor<[],f32>, !torch.vtensor<[],f64>) {
  %one = torch.constant.int 1
  %two = torch.constant.int 2
  %a = torch.aten.add.Tensor %x, %y, %one : !square, !square, !torch.int -> !square
  %b = torch.aten.add.Tensor %x, %y, %two : !square, !square, !torch.int -> !square
  %none = torch.constant.none
  %s = torch.aten.sum %a, %none : !square, !torch.none -> !torch.vtensor<[],f32>
  %w = torch.aten.sum %a, %none : !square, !torch.none -> !torch.vtensor<[],f64>
  %c = torch.aten.add.Tensor %a, %b, %one : !square, !square, !torch.int -> !square
  return %c, %s, %w : !square, !torch.vtensor<[],f32>, !torch.vtensor<[],f64>
}

// -----

!one = !torch.vtensor<[4],f32>

// A second draw has other numbers, and nothing is known of an op without a kind.
// CHECK-LABEL: func.func @impure(
// CHECK-COUNT-2: torch.aten.bernoulli
// CHECK-COUNT-2: torch.operator "torch.custom.twice"
func.func @impure(%x: !one) -> !one {
  %none = torch.constant.none
  %a = torch.aten.bernoulli %x, %none : !one, !torch.none -> !one
  %b = torch.aten.bernoulli %x, %none : !one, !torch.none -> !one
  %c = torch.operator "torch.custom.twice"(%a) : (!one) -> !one
  %d = torch.operator "torch.custom.twice"(%a) : (!one) -> !one
  %e = torch.aten.mul.Tensor %c, %d : !one, !one -> !one
  %f = torch.aten.mul.Tensor %b, %e : !one, !one -> !one
  return %f : !one
}

// -----

!one = !torch.vtensor<[4],f32>

// The caller owns each result, and may write to one.
// CHECK-LABEL: func.func @results(
// CHECK-NEXT: %[[A:.*]] = torch.aten.exp
// CHECK-NEXT: %[[B:.*]] = torch.aten.exp
// CHECK-NEXT: %[[C:.*]] = torch.aten.neg %[[A]]
// CHECK-NEXT: return %[[A]], %[[B]], %[[C]]
func.func @results(%x: !one) -> (!one, !one, !one) {
  %a = torch.aten.exp %x : !one -> !one
  %b = torch.aten.exp %x : !one -> !one
  %c0 = torch.aten.exp %x : !one -> !one
  %c = torch.aten.neg %c0 : !one -> !one
  return %a, %b, %c : !one, !one, !one
}

// -----

!mutable = !torch.tensor<[4],f32>

// A tensor that may be written to between the two.
// CHECK-LABEL: func.func @mutable(
// CHECK-COUNT-2: torch.aten.exp
func.func @mutable(%x: !mutable) -> !mutable {
  %a = torch.aten.exp %x : !mutable -> !mutable
  %b = torch.aten.exp %x : !mutable -> !mutable
  %c = torch.aten.mul.Tensor %a, %b : !mutable, !mutable -> !mutable
  return %c : !mutable
}

// -----

!one = !torch.vtensor<[4],f32>

// What starts at a barrier is a recomputation: neither this pass nor MLIR's own takes it back.
// CHECK-LABEL: func.func @backward(
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp
// CHECK-NEXT: "bwd.recompute_barrier"
// CHECK-NEXT: torch.aten.exp
// KEPT-LABEL: func.func @backward(
// KEPT-NEXT: torch.aten.exp
// KEPT-NEXT: torch.aten.exp
// KEPT-NEXT: torch.aten.mul.Tensor
func.func @backward(%x: !one {bwd.role = "input", bwd.name = "x"}) -> (!one {bwd.role = "grad", bwd.name = "g"}) {
  %e = torch.aten.exp %x : !one -> !one
  %fresh = "bwd.recompute_barrier"(%x) : (!one) -> !one
  %again = torch.aten.exp %fresh : !one -> !one
  %g = torch.aten.mul.Tensor %e, %again : !one, !one -> !one
  return %g : !one
}

// -----

!values = !torch.vtensor<[4,1],f32>
!places = !torch.vtensor<[4,1],si64>
!rows = !torch.vtensor<[4,64],f32>

// Of a result that the captured graph takes from the second op only, the name is the second's.
// CHECK-LABEL: module @partly_used attributes {bwd.merged = {getitem_1 = "getitem"}}
// CHECK: torch.aten.max.dim {{.*}}["getitem", "getitem_2"]
// CHECK-NOT: torch.aten.max.dim
module @partly_used {
  func.func @joint(%x: !rows) -> (!values, !places) {
    %one = torch.constant.int 1
    %true = torch.constant.bool true
    %a, %b = torch.aten.max.dim %x, %one, %true {bwd.values = ["getitem", "max_1.1"]} : !rows, !torch.int, !torch.bool -> !values, !places
    %c, %d = torch.aten.max.dim %x, %one, %true {bwd.values = ["getitem_1", "getitem_2"]} : !rows, !torch.int, !torch.bool -> !values, !places
    %e = torch.aten.mul.Tensor %a, %c : !values, !values -> !values
    %f = torch.aten.neg %d : !places -> !places
    return %e, %f : !values, !places
  }
}
