// RUN: retrograd-opt %s --split-input-file -p 'bwd-offload-saved' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-narrow-saved,bwd-offload-saved' | FileCheck %s --check-prefix=NARROW
// RUN: retrograd-opt %s --split-input-file -p 'bwd-offload-saved{maybe=true}' | FileCheck %s --check-prefix=MAYBE

!square = !torch.vtensor<[16,16],f32>

// Residuals of ops that are marked, those of the second kind where it is asked for; what is an output too stays. No
// mark is left.
// CHECK-LABEL: module @some attributes {bwd.offloaded = ["exp"]}
// CHECK-NOT: bwd.offload =
// NARROW-LABEL: module @some attributes
// NARROW-SAME: bwd.offloaded = ["exp_bf16"]
// NARROW-NOT: bwd.offload =
// MAYBE-LABEL: module @some attributes {bwd.offloaded = ["exp", "sin"]}
// MAYBE-NOT: bwd.offload =
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

// -----

!square = !torch.vtensor<[16,16],f32>
!flat = !torch.vtensor<[256],f32>
!row = !torch.vtensor<[16],f32>

// A view of all of what is marked goes, one of a part of it stays.
// CHECK-LABEL: module @views attributes {bwd.offloaded = ["flat"]}
// MAYBE-LABEL: module @views attributes {bwd.offloaded = ["flat"]}
module @views {
  func.func @forward(%x: !square {bwd.role = "input", bwd.name = "x"}) -> (!square {bwd.role = "output", bwd.name = "out"}) {
    %zero = torch.constant.int 0
    %all = torch.constant.int 256
    %size = torch.prim.ListConstruct %all : (!torch.int) -> !torch.list<int>
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.offload = "always"} : !square -> !square
    %f = torch.aten.view %e, %size {bwd.values = ["flat"]} : !square, !torch.list<int> -> !flat
    %r = torch.aten.select.int %e, %zero, %zero {bwd.values = ["row"]} : !square, !torch.int, !torch.int -> !row
    %out = torch.aten.neg %e : !square -> !square
    "bwd.save"(%f) {name = "flat"} : (!flat) -> ()
    "bwd.save"(%r) {name = "row"} : (!row) -> ()
    return %out : !square
  }
  func.func @backward(%f: !flat {bwd.role = "saved", bwd.name = "saved.flat", bwd.value = "flat"},
                      %r: !row {bwd.role = "saved", bwd.name = "saved.row", bwd.value = "row"},
                      %t: !square {bwd.role = "tangent", bwd.name = "t"}) -> (!square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %n = torch.constant.int 16
    %size = torch.prim.ListConstruct %n, %n : (!torch.int, !torch.int) -> !torch.list<int>
    %e = torch.aten.view %f, %size : !flat, !torch.list<int> -> !square
    %g = torch.aten.mul.Tensor %t, %e : !square, !square -> !square
    %h = torch.aten.mul.Tensor %g, %r : !square, !row -> !square
    return %h : !square
  }
}
