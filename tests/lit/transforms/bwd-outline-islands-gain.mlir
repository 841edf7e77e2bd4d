// RUN: retrograd-opt %s -p 'bwd-outline-islands{gain=65536},bwd-verify-legality{level=staged}' | FileCheck %s
// RUN: retrograd-opt %s -p 'bwd-outline-islands{gain=16777216},bwd-verify-legality{level=staged}' | FileCheck %s --check-prefix=WHOLE

!l = !torch.vtensor<[256,128],f32>
!g = !torch.vtensor<[256,1],f32>
!w = !torch.vtensor<[128,128],f32>

// What a product takes is made from a residual of its size, which is freed in front of the product.
// CHECK: steps = [{arguments = ["g", "saved.l"], function = "backward_0", results = ["d"], step = "run_stage"}, {step = "free", values = ["g", "saved.l"]},
// CHECK-SAME: {arguments = ["w", "d"], function = "backward_1", results = ["y"], step = "run_stage"}, {step = "free", values = ["w", "d"]},
// CHECK-SAME: island = 0 : i64
// WHOLE: steps = [{arguments = ["g", "w", "saved.l"], function = "backward_0", results = ["y"], step = "run_stage"}
func.func @backward(%g: !g {bwd.role = "tangent", bwd.name = "g", bwd.value = "g"}, %w: !w {bwd.role = "param", bwd.name = "w", bwd.value = "w"}, %l: !l {bwd.role = "saved", bwd.name = "saved.l", bwd.value = "saved.l"})
    -> (!l {bwd.role = "grad", bwd.name = "grad.x"}) {
  %d = torch.aten.mul.Tensor %l, %g {bwd.values = ["d"]} : !l, !g -> !l
  %y = torch.aten.mm %d, %w {bwd.values = ["y"]} : !l, !w -> !l
  %h = torch.operator "torch.retrograd.island"(%y) {bwd.island = 0 : i64, bwd.values = ["h"]} : (!l) -> !l
  return %h : !l
}
