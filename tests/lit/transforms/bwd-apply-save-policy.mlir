// RUN: retrograd-opt %s --split-input-file -p 'bwd-apply-save-policy{rules="must-save op=mm; must-recompute name=e*; bf16 dtype=f32 min-bytes=64" unmatched=ignore}' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-apply-save-policy{rules="bf16 op=mm; may-offload op=exp; offload dtype=f32 min-bytes=64" unmatched=ignore}' | FileCheck %s --check-prefix=HOST

!square = !torch.vtensor<[4,4],f32>
!row = !torch.vtensor<[4],f32>

// The first rule that matches holds, of those on recomputation and of those on types; neither is about the backward.
// CHECK-LABEL: module @rules
// CHECK: torch.aten.mm {{.*}} {bwd.recompute = "never", bwd.saved_dtype = "bf16", bwd.values = ["early"]}
// CHECK-NEXT: torch.aten.exp {{.*}} {bwd.recompute = "must", bwd.saved_dtype = "bf16", bwd.values = ["exp"]}
// CHECK-NEXT: torch.aten.neg {{.*}} {bwd.values = ["few"]}
// CHECK-NEXT: torch.aten.add.Tensor {{.*}} {bwd.saved_dtype = "bf16"}
// CHECK-NEXT: torch.aten.mul.Tensor %{{.*}}, %{{.*}} :
// Where values are kept is a sort of its own, beside their types; a value that is smaller stays.
// HOST-LABEL: module @rules
// HOST: torch.aten.mm {{.*}} {bwd.offload = "always", bwd.saved_dtype = "bf16", bwd.values = ["early"]}
// HOST-NEXT: torch.aten.exp {{.*}} {bwd.offload = "maybe", bwd.values = ["exp"]}
// HOST-NEXT: torch.aten.neg {{.*}} {bwd.values = ["few"]}
// HOST: torch.aten.mul.Tensor %{{.*}}, %{{.*}} :
module @rules {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %r: !row {bwd.role = "input", bwd.name = "r"},
                   %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %one = torch.constant.int 1
    %y = torch.aten.mm %x, %x {bwd.values = ["early"]} : !square, !square -> !square
    %e = torch.aten.exp %y {bwd.values = ["exp"]} : !square -> !square
    %n = torch.aten.neg %r {bwd.values = ["few"]} : !row -> !row
    %out = torch.aten.add.Tensor %e, %n, %one : !square, !row, !torch.int -> !square
    %grad = torch.aten.mul.Tensor %t, %e : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// The model's word stands, its preferences give way; a type on a view is one on what it looks at.
// CHECK-LABEL: module @model
// CHECK: torch.aten.exp {{.*}}bwd.recompute = "must", bwd.saved_dtype = "bf16"
// CHECK: torch.aten.sin {{.*}}bwd.recompute = "must", bwd.saved_dtype = "bf16"
module @model {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.recompute = "prefer"} : !square -> !square
    %s = torch.aten.sin %e {bwd.recompute = "must"} : !square -> !square
    %grad = torch.aten.mul.Tensor %t, %s : !square, !square -> !square
    return %s, %grad : !square, !square
  }
}
