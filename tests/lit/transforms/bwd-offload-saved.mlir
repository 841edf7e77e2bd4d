// RUN: retrograd-opt %s --split-input-file -p 'bwd-offload-saved' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-narrow-saved,bwd-offload-saved' | FileCheck %s --check-prefix=NARROW
// RUN: retrograd-opt %s --split-input-file -p 'bwd-offload-saved{maybe=true}' | FileCheck %s --check-prefix=MAYBE

!square = !torch.vtensor<[16,16],f32>

// Residuals of ops that are marked, those of the second kind where it is asked for; what is an output too stays. No
// mark is left.
// CHECK-LABEL: module @some attributes {bwd.offloaded = ["exp"]}
// CHECK-NOT: bwd.offload
// NARROW-LABEL: module @some attributes
// NARROW-SAME: bwd.offloaded = ["exp_bf16"]
// NARROW-NOT: bwd.offload
// MAYBE-LABEL: module @some attributes {bwd.offloaded = ["exp", "sin"]}
// MAYBE-NOT: bwd.offload
module @some {
  func.func @forward(%x: !square {bwd.role = "input", bwd.name = "x"}) -> (!square {bwd.role = "output", bwd.name = "out"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.saved_dtype = "bf16", bwd.offload = "always"} : !square -> !square
    %s = torch.aten.sin %e {bwd.values = ["sin"], bwd.offload = "maybe"} : !square -> !square
    %out = torch.aten.neg %s {bwd.values = ["neg"], bwd.offload = "always"} : !square -> !square
    "bwd.save"(%e) {name = "exp"} : (!square) -> ()
    "bwd.save"(%s) {name = "sin"} : (!square) -> ()
    "bwd.save"(%out) {name = "neg"} : (!square) -> ()
    return %out : !square
  }
  func.func @backward(%e: !square {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"},
                      %s: !square {bwd.role = "saved", bwd.name = "saved.sin", bwd.value = "sin"},
                      %o: !square {bwd.role = "saved", bwd.name = "out", bwd.value = "neg"},
                      %t: !square {bwd.role = "tangent", bwd.name = "t"}) -> (!square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %c = torch.aten.cos %s {bwd.offload = "always"} : !square -> !square
    %g = torch.aten.mul.Tensor %t, %e : !square, !square -> !square
    %h = torch.aten.mul.Tensor %g, %o : !square, !square -> !square
    %i = torch.aten.mul.Tensor %h, %c : !square, !square -> !square
    return %i : !square
  }
}

// -----

!square = !torch.vtensor<[16,16],f32>

// Nothing that is marked is saved.
// CHECK-LABEL: module @none {
// MAYBE-LABEL: module @none {
module @none {
  func.func @forward(%x: !square {bwd.role = "input", bwd.name = "x"}) -> (!square {bwd.role = "output", bwd.name = "out"}) {
    %e = torch.aten.exp %x {bwd.offload = "always"} : !square -> !square
    return %e : !square
  }
  func.func @backward(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"}) -> (!square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.offload = "always"} : !square -> !square
    %g = torch.aten.mul.Tensor %t, %e : !square, !square -> !square
    return %g : !square
  }
}
