// RUN: retrograd-opt %s --split-input-file -p 'bwd-narrow-saved' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-narrow-saved,convert-bwd-to-func' | FileCheck %s --check-prefix=FUNC

!square = !torch.vtensor<[16,16],f32>
!half = !torch.vtensor<[16,16],f16>

// Packed right after the last use in the forward, unpacked in front of the first in the backward.
// CHECK-LABEL: module @bf16 attributes {bwd.narrowed = {exp = "bf16"}}
// CHECK: func.func @forward(
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp
// CHECK-NEXT: %[[S:.*]] = torch.aten.sin %[[E]]
// CHECK-NEXT: %[[BF16:.*]] = torch.constant.int 15
// CHECK-NEXT: %[[P:.*]] = torch.prims.convert_element_type %[[E]], %[[BF16]] : !torch.vtensor<[16,16],f32>, !torch.int -> !torch.vtensor<[16,16],bf16>
// CHECK-NEXT: %[[OUT:.*]] = torch.aten.neg %[[S]]
// CHECK-NEXT: "bwd.save"(%[[P]]) {name = "exp_bf16"}
// CHECK-NEXT: return %[[OUT]]
// CHECK: func.func @backward(%[[X:.*]]: !torch.vtensor<[16,16],f32> {bwd.name = "x", bwd.role = "input"}, %[[P:.*]]: !torch.vtensor<[16,16],bf16> {bwd.name = "saved.exp_bf16", bwd.role = "saved", bwd.value = "exp_bf16"}, %[[T:.*]]: {{.*}}bwd.role = "tangent"}) ->
// CHECK-NEXT: %[[H:.*]] = torch.aten.mul.Tensor %[[T]], %[[X]]
// CHECK-NEXT: %[[F32:.*]] = torch.constant.int 6
// CHECK-NEXT: %[[E:.*]] = torch.prims.convert_element_type %[[P]], %[[F32]]
// CHECK-NEXT: torch.aten.mul.Tensor %[[H]], %[[E]]
// FUNC-LABEL: module @bf16
// FUNC: func.func @forward({{.*}} -> ({{.*}}, !torch.vtensor<[16,16],bf16> {bwd.name = "saved.exp_bf16", bwd.role = "saved", bwd.value = "exp_bf16"})
module @bf16 {
  func.func @forward(%x: !square {bwd.role = "input", bwd.name = "x"}) -> (!square {bwd.role = "output", bwd.name = "out"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.saved_dtype = "bf16"} : !square -> !square
    %s = torch.aten.sin %e : !square -> !square
    %out = torch.aten.neg %s : !square -> !square
    "bwd.save"(%e) {name = "exp"} : (!square) -> ()
    return %out : !square
  }
  func.func @backward(%x: !square {bwd.role = "input", bwd.name = "x"},
                      %e: !square {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"},
                      %t: !square {bwd.role = "tangent", bwd.name = "t"}) -> (!square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %h = torch.aten.mul.Tensor %t, %x : !square, !square -> !square
    %g = torch.aten.mul.Tensor %h, %e : !square, !square -> !square
    return %g : !square
  }
}

// -----

!square = !torch.vtensor<[16,16],f32>

// One scale for all; a value that is saved as it is stays.
// CHECK-LABEL: module @float8
// CHECK: torch.aten.abs
// CHECK: torch.aten.amax
// CHECK: torch.aten.clamp_min
// CHECK: %[[SCALE:.*]] = torch.aten.div.Scalar
// CHECK: torch.aten.div.Tensor %{{.*}}, %[[SCALE]]
// CHECK: %[[P:.*]] = torch.prims.convert_element_type {{.*}} -> !torch.vtensor<[16,16],f8E4M3FN>
// CHECK: "bwd.save"(%[[P]]) {name = "exp_float8"}
// CHECK-NEXT: "bwd.save"(%[[SCALE]]) {name = "exp_scale"}
// CHECK-NEXT: "bwd.save"(%{{.*}}) {name = "sin"}
// CHECK: func.func @backward(%[[P:.*]]: !torch.vtensor<[16,16],f8E4M3FN> {{.*}}, %[[SCALE:.*]]: !torch.vtensor<[1,1],f32> {{.*}}, %[[S:.*]]: !torch.vtensor<[16,16],f32> {{.*}}, %[[T:.*]]:
// CHECK: %[[W:.*]] = torch.prims.convert_element_type %[[P]]
// CHECK-NEXT: %[[E:.*]] = torch.aten.mul.Tensor %[[W]], %[[SCALE]]
// CHECK-NEXT: torch.aten.mul.Tensor %[[T]], %[[E]]
module @float8 {
  func.func @forward(%x: !square {bwd.role = "input", bwd.name = "x"}) -> (!square {bwd.role = "output", bwd.name = "out"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.saved_dtype = "float8_e4m3"} : !square -> !square
    %s = torch.aten.sin %e : !square -> !square
    %out = torch.aten.neg %s : !square -> !square
    "bwd.save"(%e) {name = "exp"} : (!square) -> ()
    "bwd.save"(%s) {name = "sin"} : (!square) -> ()
    return %out : !square
  }
  func.func @backward(%e: !square {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"},
                      %s: !square {bwd.role = "saved", bwd.name = "saved.sin", bwd.value = "sin"},
                      %t: !square {bwd.role = "tangent", bwd.name = "t"}) -> (!square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %h = torch.aten.mul.Tensor %t, %e : !square, !square -> !square
    %g = torch.aten.mul.Tensor %h, %s : !square, !square -> !square
    return %g : !square
  }
}

// -----

!odd = !torch.vtensor<[7,10],f32>
!few = !torch.vtensor<[2],f32>
!places = !torch.vtensor<[7,10],si64>

// Blocks of 64, the last filled up with zeros. Integers, and what would take no less, are saved as they are.
// CHECK-LABEL: module @int8_block attributes {bwd.narrowed = {exp = "int8-block"}}
// CHECK: torch.aten.constant_pad_nd {{.*}} -> !torch.vtensor<[128],f32>
// CHECK: torch.aten.amax {{.*}} -> !torch.vtensor<[2,1],f32>
// CHECK: torch.aten.round
// CHECK: "bwd.save"(%{{.*}}) {name = "exp_int8"} : (!torch.vtensor<[2,64],si8>)
// CHECK-NEXT: "bwd.save"(%{{.*}}) {name = "exp_scales"} : (!torch.vtensor<[2,1],f32>)
// CHECK-NEXT: "bwd.save"(%{{.*}}) {name = "few"} : (!torch.vtensor<[2],f32>)
// CHECK-NEXT: "bwd.save"(%{{.*}}) {name = "places"} : (!torch.vtensor<[7,10],si64>)
// CHECK: func.func @backward(
// CHECK: torch.aten.slice.Tensor {{.*}} -> !torch.vtensor<[70],f32>
// CHECK: torch.aten.view {{.*}} -> !torch.vtensor<[7,10],f32>
// CHECK: return
module @int8_block {
  func.func @forward(%x: !odd {bwd.role = "input", bwd.name = "x"}, %y: !few {bwd.role = "input", bwd.name = "y"},
                     %i: !places {bwd.role = "input", bwd.name = "i"}) -> (!odd {bwd.role = "output", bwd.name = "out"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.saved_dtype = "int8-block"} : !odd -> !odd
    %f = torch.aten.exp %y {bwd.values = ["few"], bwd.saved_dtype = "int8-block"} : !few -> !few
    %p = torch.aten.neg %i {bwd.values = ["places"], bwd.saved_dtype = "int8-block"} : !places -> !places
    %out = torch.aten.neg %e : !odd -> !odd
    "bwd.save"(%e) {name = "exp"} : (!odd) -> ()
    "bwd.save"(%f) {name = "few"} : (!few) -> ()
    "bwd.save"(%p) {name = "places"} : (!places) -> ()
    return %out : !odd
  }
  func.func @backward(%e: !odd {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"},
                      %f: !few {bwd.role = "saved", bwd.name = "saved.few", bwd.value = "few"},
                      %p: !places {bwd.role = "saved", bwd.name = "saved.places", bwd.value = "places"},
                      %t: !odd {bwd.role = "tangent", bwd.name = "t"})
      -> (!odd {bwd.role = "grad", bwd.name = "grad.x"}, !few {bwd.role = "grad", bwd.name = "grad.y"}, !places {bwd.role = "grad", bwd.name = "grad.i"}) {
    %g = torch.aten.mul.Tensor %t, %e : !odd, !odd -> !odd
    return %g, %f, %p : !odd, !few, !places
  }
}

// -----

!square = !torch.vtensor<[16,16],f32>

// The user's hooks: their bodies pack and unpack, however many bytes that takes, and are gone. A rule's type goes first.
// CHECK-LABEL: module @hooks attributes {bwd.narrowed = {exp = "pack_0", sin = "bf16"}}
// CHECK: %[[E:.*]] = torch.aten.exp
// CHECK-NEXT: %[[S:.*]] = torch.aten.sin %[[E]]
// CHECK-NEXT: %[[A:.*]] = torch.aten.neg %[[E]] {bwd.values = ["exp_packed.negated"]}
// CHECK-NEXT: %[[NONE:.*]] = torch.constant.none
// CHECK-NEXT: %[[B:.*]] = torch.aten.sum %[[E]], %[[NONE]]
// CHECK-NEXT: %[[OUT:.*]] = torch.aten.neg %[[S]]
// CHECK: "bwd.save"(%[[A]]) {name = "exp_packed_0"}
// CHECK-NEXT: "bwd.save"(%[[B]]) {name = "exp_packed_1"}
// CHECK: "bwd.save"(%{{.*}}) {name = "sin_bf16"}
// CHECK: func.func @backward(%[[A:.*]]: !torch.vtensor<[16,16],f32> {bwd.name = "saved.exp_packed_0", bwd.role = "saved", bwd.value = "exp_packed_0"}, %[[B:.*]]: !torch.vtensor<[],f32> {{{.*}}}, %{{.*}}: !torch.vtensor<[16,16],bf16> {{{.*}}}, %[[T:.*]]: {{.*}}) ->
// CHECK-NEXT: %[[H:.*]] = torch.aten.cos %[[T]]
// CHECK-NEXT: %[[E:.*]] = torch.aten.mul.Tensor %[[A]], %[[B]] {bwd.values = ["unpacked.whole"]}
// CHECK-NEXT: torch.aten.mul.Tensor %[[H]], %[[E]]
// CHECK-NOT: @pack_0
// CHECK-NOT: @unpack_0
module @hooks {
  func.func @forward(%x: !square {bwd.role = "input", bwd.name = "x"}) -> (!square {bwd.role = "output", bwd.name = "out"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.packed_as = ["pack_0"]} : !square -> !square
    %s = torch.aten.sin %e {bwd.values = ["sin"], bwd.packed_as = ["pack_0"], bwd.saved_dtype = "bf16"} : !square -> !square
    %out = torch.aten.neg %s : !square -> !square
    "bwd.save"(%e) {name = "exp"} : (!square) -> ()
    "bwd.save"(%s) {name = "sin"} : (!square) -> ()
    return %out : !square
  }
  func.func @backward(%e: !square {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"},
                      %s: !square {bwd.role = "saved", bwd.name = "saved.sin", bwd.value = "sin"},
                      %t: !square {bwd.role = "tangent", bwd.name = "t"}) -> (!square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %h = torch.aten.cos %t : !square -> !square
    %i = torch.aten.mul.Tensor %h, %e : !square, !square -> !square
    %g = torch.aten.mul.Tensor %i, %s : !square, !square -> !square
    return %g : !square
  }
  func.func private @pack_0(%v: !square) -> (!square, !torch.vtensor<[],f32>) attributes {bwd.inline} {
    %a = torch.aten.neg %v {bwd.values = ["negated"]} : !square -> !square
    %none = torch.constant.none
    %b = torch.aten.sum %v, %none : !square, !torch.none -> !torch.vtensor<[],f32>
    return %a, %b : !square, !torch.vtensor<[],f32>
  }
  func.func private @unpack_0(%a: !square, %b: !torch.vtensor<[],f32>) -> !square attributes {bwd.inline} {
    %v = torch.aten.mul.Tensor %a, %b {bwd.values = ["whole"]} : !square, !torch.vtensor<[],f32> -> !square
    return %v : !square
  }
}

// -----

!open = !torch.vtensor<[?,16],f32>

// What is packed of open sizes says what they are; a scale has none.
// CHECK-LABEL: module @open_sizes
// CHECK: func.func @forward(
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp
// CHECK: %[[ABS:.*]] = torch.aten.abs %[[E]] {bwd.shapes = ["batch, 16"]} : !torch.vtensor<[?,16],f32> -> !torch.vtensor<[?,16],f32>
// CHECK: torch.aten.amax %[[ABS]], {{.*}} -> !torch.vtensor<[1,1],f32>
// CHECK: %[[P:.*]] = torch.prims.convert_element_type {{.*}} {bwd.shapes = ["batch, 16"]} : {{.*}} -> !torch.vtensor<[?,16],f8E4M3FN>
// CHECK: func.func @backward(%{{.*}}: !torch.vtensor<[?,16],f8E4M3FN> {bwd.name = "saved.exp_float8", bwd.role = "saved", bwd.shape = "batch, 16", bwd.value = "exp_float8"}, %{{.*}}: !torch.vtensor<[1,1],f32> {bwd.name = "saved.exp_scale", bwd.role = "saved", bwd.value = "exp_scale"})
// CHECK: torch.aten.mul.Tensor {{.*}} {bwd.shapes = ["batch, 16"]}
// FUNC-LABEL: module @open_sizes
// FUNC: func.func @forward({{.*}} -> (!torch.vtensor<[?,16],f8E4M3FN> {bwd.name = "saved.exp_float8", bwd.role = "saved", bwd.shape = "batch, 16", bwd.value = "exp_float8"}, !torch.vtensor<[1,1],f32> {bwd.name = "saved.exp_scale", bwd.role = "saved", bwd.value = "exp_scale"})
module @open_sizes attributes {bwd.sizes = {batch = 8 : i64}} {
  func.func @forward(%x: !open {bwd.role = "input", bwd.name = "x", bwd.shape = "batch, 16"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.saved_dtype = "float8_e4m3", bwd.shapes = ["batch, 16"]} : !open -> !open
    "bwd.save"(%e) {name = "exp"} : (!open) -> ()
    return
  }
  func.func @backward(%e: !open {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp", bwd.shape = "batch, 16"}) -> (!open {bwd.role = "grad", bwd.name = "g", bwd.shape = "batch, 16"}) {
    %g = torch.aten.neg %e {bwd.shapes = ["batch, 16"]} : !open -> !open
    return %g : !open
  }
}

// -----

!one = !torch.vtensor<[16],f32>

// An op that takes two of what is saved: both are unpacked in front of it.
// CHECK-LABEL: module @both
// CHECK: func.func @backward(
// CHECK: torch.prims.convert_element_type
// CHECK: torch.prims.convert_element_type
// CHECK: torch.aten.mul.Tensor
module @both {
  func.func @forward(%x: !one {bwd.role = "input", bwd.name = "x"}) {
    %e = torch.aten.exp %x {bwd.values = ["exp"], bwd.saved_dtype = "bf16"} : !one -> !one
    %s = torch.aten.sin %x {bwd.values = ["sin"], bwd.saved_dtype = "bf16"} : !one -> !one
    "bwd.save"(%e) {name = "exp"} : (!one) -> ()
    "bwd.save"(%s) {name = "sin"} : (!one) -> ()
    return
  }
  func.func @backward(%e: !one {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"},
                      %s: !one {bwd.role = "saved", bwd.name = "saved.sin", bwd.value = "sin"}) -> (!one {bwd.role = "grad", bwd.name = "g"}) {
    %g = torch.aten.mul.Tensor %e, %s : !one, !one -> !one
    return %g : !one
  }
}
