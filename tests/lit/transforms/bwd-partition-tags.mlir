// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition{policy=default}' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition{policy=budget budget=1.0}' | FileCheck %s --check-prefix=BUDGET

!column = !torch.vtensor<[64,1],f32>
!row = !torch.vtensor<[1,64],f32>
!large = !torch.vtensor<[64,64],f32>

// A checkpointed product is recomputed, which no policy would do by itself.
// CHECK-LABEL: module @checkpointed
// CHECK-SAME: recomputed = ["mm", "exp"]
// CHECK-SAME: saved_bytes = 0 : i64
// CHECK-NOT: bwd.save
// CHECK: func.func @backward(
// CHECK-NEXT: torch.aten.mm
// CHECK-NEXT: torch.aten.exp
// CHECK-NEXT: torch.aten.mul.Tensor

// Where the peak stays below the budget without it, as well: what is recomputed by preference costs nothing.
// BUDGET-LABEL: module @checkpointed
// BUDGET-SAME: recompute_seconds = 0.0
// BUDGET-SAME: saved_bytes = 0 : i64
module @checkpointed {
  func.func @joint(%x: !column {bwd.role = "input", bwd.name = "x"}, %w: !row {bwd.role = "input", bwd.name = "w"},
                   %u: !large {bwd.role = "input", bwd.name = "u"}, %t: !large {bwd.role = "tangent", bwd.name = "t"})
      -> (!large {bwd.role = "output", bwd.name = "out"}, !large {bwd.role = "grad", bwd.name = "grad.y"}) {
    %y = torch.aten.mm %x, %w {bwd.values = ["mm"], bwd.recompute = "prefer", bwd.block = 0 : i64} : !column, !row -> !large
    %e = torch.aten.exp %y {bwd.values = ["exp"], bwd.recompute = "prefer", bwd.block = 0 : i64} : !large -> !large
    %out = torch.aten.neg %e {bwd.recompute = "prefer", bwd.block = 0 : i64} : !large -> !large
    %product = torch.aten.mul.Tensor %t, %e : !large, !large -> !large
    // The backward is fullest here: what was saved takes memory still, what was recomputed no more.
    %grad = torch.aten.mm %product, %u : !large, !large -> !large
    return %out, %grad : !large, !large
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// What crosses from one checkpointed block to the next is saved, here through a list.
// CHECK-LABEL: module @two_blocks
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: %[[A:.*]] = torch.aten.exp
// CHECK: "bwd.save"(%[[A]]) {name = "boundary"}
// CHECK: func.func @backward(
// CHECK-NOT: torch.aten.exp
// CHECK: torch.aten.cat
// CHECK: torch.aten.sin
// CHECK: return
// BUDGET-LABEL: module @two_blocks
// BUDGET-SAME: saved_bytes = 64 : i64
module @two_blocks {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %zero = torch.constant.int 0
    %a = torch.aten.exp %x {bwd.values = ["boundary"], bwd.recompute = "must", bwd.block = 0 : i64} : !square -> !square
    %list = torch.prim.ListConstruct %a : (!square) -> !torch.list<vtensor>
    %c = torch.aten.cat %list, %zero {bwd.recompute = "must", bwd.block = 1 : i64} : !torch.list<vtensor>, !torch.int -> !square
    %s = torch.aten.sin %c {bwd.values = ["sin"], bwd.recompute = "must", bwd.block = 1 : i64} : !square -> !square
    %out = torch.aten.neg %s {bwd.recompute = "must", bwd.block = 1 : i64} : !square -> !square
    %g = torch.aten.mul.Tensor %t, %s : !square, !square -> !square
    %grad = torch.aten.mul.Tensor %g, %a : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// A value marked to be saved is, also inside a checkpointed block: the mark is on a view of it.
// CHECK-LABEL: module @marked
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: %[[E:.*]] = torch.aten.exp
// CHECK: "bwd.save"(%[[E]]) {name = "exp"}
// CHECK: func.func @backward(
// CHECK-NOT: torch.aten.exp
// CHECK: torch.aten.sin
// CHECK: return
// BUDGET-LABEL: module @marked
// BUDGET: "bwd.save"(%{{.*}}) {name = "exp"}
module @marked {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %four = torch.constant.int 4
    %size = torch.prim.ListConstruct %four, %four : (!torch.int, !torch.int) -> !torch.list<int>
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.recompute = "prefer", bwd.block = 0 : i64} : !square -> !square
    %m = torch.aten.view %e, %size {bwd.recompute = "never", bwd.label = "e", bwd.block = 0 : i64} : !square, !torch.list<int> -> !square
    %s = torch.aten.sin %m {bwd.recompute = "prefer", bwd.block = 0 : i64} : !square -> !square
    %out = torch.aten.neg %s {bwd.recompute = "prefer", bwd.block = 0 : i64} : !square -> !square
    %g = torch.aten.mul.Tensor %t, %s : !square, !square -> !square
    %grad = torch.aten.mul.Tensor %g, %m : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// A wish not to recompute, which a budget of plenty has no reason to overrule.
// CHECK-LABEL: module @avoided
// CHECK: %[[E:.*]] = torch.aten.exp
// CHECK: "bwd.save"(%[[E]])
// BUDGET-LABEL: module @avoided
// BUDGET: "bwd.save"
module @avoided {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.recompute = "avoid"} : !square -> !square
    %out = torch.aten.neg %e : !square -> !square
    %grad = torch.aten.mul.Tensor %t, %e : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}
