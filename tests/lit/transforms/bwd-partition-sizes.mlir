// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition{policy=default},convert-bwd-to-func' | FileCheck %s

// Sizes are numbers of their own: the backward takes one that it uses, or that a gradient's shape has, and no tensor for it.
// What is saved keeps its shape, on both sides; bytes are those of the sizes that the trace was made with (6 x 4 x 4).
// CHECK: saved_bytes = 96 : i64
// CHECK-LABEL: func.func @forward(
// CHECK-SAME: %[[N:[a-z0-9]*]]: !torch.int {bwd.name = "batch", bwd.role = "size", bwd.value = "n"}
// CHECK-SAME: -> (!torch.vtensor<[?,4],f32> {bwd.name = "y", bwd.role = "output", bwd.shape = "batch, 4", bwd.value = "c"},
// CHECK-SAME: !torch.vtensor<[?,4],f32> {bwd.name = "saved.s", bwd.role = "saved", bwd.shape = "batch, 4", bwd.value = "s"})
// CHECK-LABEL: func.func @backward(
// CHECK-SAME: !torch.int {bwd.name = "batch", bwd.role = "size", bwd.value = "n"}
// CHECK-SAME: !torch.vtensor<[?,4],f32> {bwd.name = "saved.s", bwd.role = "saved", bwd.shape = "batch, 4", bwd.value = "s"}
// CHECK-SAME: bwd.role = "tangent"
module attributes {bwd.sizes = {batch = 6 : i64}} {
  func.func @joint(
      %x: !torch.vtensor<[?,4],f32> {bwd.role = "input", bwd.name = "x", bwd.value = "x", bwd.shape = "batch, 4"},
      %t: !torch.vtensor<[?,4],f32> {bwd.role = "tangent", bwd.name = "t", bwd.value = "tangents_1", bwd.shape = "batch, 4"},
      %n: !torch.int {bwd.role = "size", bwd.name = "batch", bwd.value = "n"})
      -> (!torch.vtensor<[?,4],f32> {bwd.role = "output", bwd.name = "y", bwd.value = "c", bwd.shape = "batch, 4"},
          !torch.vtensor<[?,4],f32> {bwd.role = "grad", bwd.name = "grad.x", bwd.value = "g", bwd.shape = "batch, 4"}) {
    %s = torch.aten.sin %x {bwd.values = ["s"], bwd.shapes = ["batch, 4"]} : !torch.vtensor<[?,4],f32> -> !torch.vtensor<[?,4],f32>
    %c = torch.aten.cos %s {bwd.values = ["c"], bwd.shapes = ["batch, 4"]} : !torch.vtensor<[?,4],f32> -> !torch.vtensor<[?,4],f32>
    %g = torch.aten.mul.Tensor %t, %s {bwd.values = ["g"], bwd.shapes = ["batch, 4"]} : !torch.vtensor<[?,4],f32>, !torch.vtensor<[?,4],f32> -> !torch.vtensor<[?,4],f32>
    return %c, %g : !torch.vtensor<[?,4],f32>, !torch.vtensor<[?,4],f32>
  }
}

// -----

// Arithmetic on sizes is done again in the half that needs it; a size that the backward has no use for, it does not take.
// CHECK-LABEL: func.func @forward(
// CHECK: torch.aten.mul.int
// CHECK-LABEL: func.func @backward(
// CHECK-NOT: "unused"
// CHECK: torch.aten.mul.int
// CHECK: return
module attributes {bwd.sizes = {batch = 6 : i64, unused = 3 : i64}} {
  func.func @joint(
      %w: !torch.vtensor<[4],f32> {bwd.role = "param", bwd.name = "w", bwd.value = "w"},
      %t: !torch.vtensor<[4],f32> {bwd.role = "tangent", bwd.name = "t", bwd.value = "tangents_1"},
      %n: !torch.int {bwd.role = "size", bwd.name = "batch", bwd.value = "n"},
      %m: !torch.int {bwd.role = "size", bwd.name = "unused", bwd.value = "m"})
      -> (!torch.vtensor<[4],f32> {bwd.role = "output", bwd.name = "y", bwd.value = "y"},
          !torch.vtensor<[4],f32> {bwd.role = "grad", bwd.name = "grad.w", bwd.value = "g"}) {
    %two = torch.constant.int 2
    %k = torch.aten.mul.int %n, %two : !torch.int, !torch.int -> !torch.int
    %y = torch.aten.mul.Scalar %w, %k {bwd.values = ["y"]} : !torch.vtensor<[4],f32>, !torch.int -> !torch.vtensor<[4],f32>
    %g = torch.aten.mul.Scalar %t, %k {bwd.values = ["g"]} : !torch.vtensor<[4],f32>, !torch.int -> !torch.vtensor<[4],f32>
    return %y, %g : !torch.vtensor<[4],f32>, !torch.vtensor<[4],f32>
  }
}
