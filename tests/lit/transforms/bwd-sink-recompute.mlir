// RUN: retrograd-opt %s --split-input-file -p 'bwd-sink-recompute' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-sink-recompute,bwd-sink-recompute' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-sink-recompute{in-order=true}' | FileCheck %s --check-prefix=ORDER

!square = !torch.vtensor<[64,64],f64>

// Each chain right before its first use: the second is not alive while the first is used. (Products of f64 are packed.)
// CHECK-LABEL: func.func @backward(
// CHECK-NEXT: %[[A:.*]] = torch.aten.exp
// CHECK-NEXT: %[[G:.*]] = torch.aten.mm %{{.*}}, %[[A]]
// CHECK-NEXT: %[[B:.*]] = torch.aten.mm %[[A]], %[[A]]
// CHECK-NEXT: %[[H:.*]] = torch.aten.mm %[[G]], %[[B]]
// CHECK-NEXT: %[[C:.*]] = torch.aten.mm %[[A]], %{{.*}}
// CHECK-NEXT: torch.aten.mm %[[H]], %[[C]]
func.func @backward(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
    -> (!square {bwd.role = "grad", bwd.name = "grad.x"}) {
  %a = torch.aten.exp %x : !square -> !square
  %b = torch.aten.mm %a, %a : !square, !square -> !square
  %c = torch.aten.mm %a, %x : !square, !square -> !square
  %g = torch.aten.mm %t, %a : !square, !square -> !square
  %h = torch.aten.mm %g, %b : !square, !square -> !square
  %k = torch.aten.mm %h, %c : !square, !square -> !square
  return %k : !square
}

// -----

!small = !torch.vtensor<[8,8],f32>
!row = !torch.vtensor<[1,8],f32>

// Two chains for one op: the critical path first.
// CHECK-LABEL: func.func @backward(
// CHECK-NEXT: torch.aten.exp
// CHECK-NEXT: %[[LONG:.*]] = torch.aten.mm
// CHECK-NEXT: %[[SHORT:.*]] = torch.aten.neg
// CHECK-NEXT: torch.aten.mul.Tensor %[[SHORT]], %[[LONG]]
func.func @backward(%x: !small {bwd.role = "input", bwd.name = "x"}, %t: !small {bwd.role = "tangent", bwd.name = "t"})
    -> (!small {bwd.role = "grad", bwd.name = "grad.x"}) {
  %short = torch.aten.neg %x : !small -> !small
  %e = torch.aten.exp %x : !small -> !small
  %long = torch.aten.mm %e, %e : !small, !small -> !small
  %both = torch.aten.mul.Tensor %short, %long : !small, !small -> !small
  %g = torch.aten.mul.Tensor %t, %both : !small, !small -> !small
  return %g : !small
}

// -----

!small = !torch.vtensor<[4,4],f32>
!tall = !torch.vtensor<[256,4],f32>
!wide = !torch.vtensor<[4,256],f32>

// To wait with the reduction would keep what it reads alive next to what is as large: it stays in front. With one kernel
// at a time neither order takes less, since its kernel waits for the product with the other one in both: it sinks.
// CHECK-LABEL: func.func @backward(
// CHECK: torch.aten.cumsum
// CHECK-NEXT: torch.aten.amax
// CHECK: torch.aten.cumsum
// ORDER: torch.aten.cumsum
// ORDER-NEXT: torch.aten.mul.Tensor
// ORDER-COUNT-2: torch.aten.cumsum
// ORDER: torch.aten.amax
func.func @backward(%x: !wide {bwd.role = "input", bwd.name = "x"}, %t: !wide {bwd.role = "tangent", bwd.name = "t"})
    -> (!torch.vtensor<[4,1],f32> {bwd.role = "grad", bwd.name = "grad.x"}) {
  %one = torch.constant.int 1
  %none = torch.constant.none
  %true = torch.constant.bool true
  %dims = torch.prim.ListConstruct %one : (!torch.int) -> !torch.list<int>
  %large = torch.aten.cumsum %x, %one, %none : !wide, !torch.int, !torch.none -> !wide
  %few = torch.aten.amax %large, %dims, %true : !wide, !torch.list<int>, !torch.bool -> !torch.vtensor<[4,1],f32>
  %a = torch.aten.mul.Tensor %t, %large : !wide, !wide -> !wide
  %b = torch.aten.cumsum %a, %one, %none : !wide, !torch.int, !torch.none -> !wide
  %c = torch.aten.cumsum %b, %one, %none : !wide, !torch.int, !torch.none -> !wide
  %d = torch.aten.amax %c, %dims, %true : !wide, !torch.list<int>, !torch.bool -> !torch.vtensor<[4,1],f32>
  %g = torch.aten.mul.Tensor %d, %few : !torch.vtensor<[4,1],f32>, !torch.vtensor<[4,1],f32> -> !torch.vtensor<[4,1],f32>
  return %g : !torch.vtensor<[4,1],f32>
}
