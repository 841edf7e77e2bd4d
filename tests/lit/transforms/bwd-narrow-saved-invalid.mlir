// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-narrow-saved'

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-narrow-saved: no functions @forward and @backward in the module; run bwd-partition first}}
module @not_partitioned {
  func.func @joint(%x: !one) -> !one {
    return %x : !one
  }
}

// -----

!one = !torch.vtensor<[4],f32>

module @no_such_type {
  func.func @forward(%x: !one {bwd.role = "input", bwd.name = "x"}) {
    // expected-error @below {{bwd-narrow-saved: 'torch.aten.exp' op: bwd.saved_dtype is "int4"; it is one of bf16, float8_e4m3, int8-block}}
    %e = torch.aten.exp %x {bwd.saved_dtype = "int4"} : !one -> !one
    "bwd.save"(%e) {name = "exp"} : (!one) -> ()
    return
  }
  func.func @backward(%e: !one {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"}) -> (!one {bwd.role = "grad", bwd.name = "g"}) {
    return %e : !one
  }
}

// -----

!open = !torch.vtensor<[?],f32>

module @open_size attributes {bwd.sizes = {batch = 100 : i64}} {
  func.func @forward(%x: !open {bwd.role = "input", bwd.name = "x", bwd.shape = "batch"}) {
    // expected-error @below {{bwd-narrow-saved: 'torch.aten.exp' op: a value of type !torch.vtensor<[?],f32>, whose size differs from call to call, is saved as int8-block; save it as one of bf16, float8_e4m3, or compile without dynamic_shapes}}
    %e = torch.aten.exp %x {bwd.saved_dtype = "int8-block", bwd.shapes = ["batch"]} : !open -> !open
    "bwd.save"(%e) {name = "exp"} : (!open) -> ()
    return
  }
  func.func @backward(%e: !open {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp", bwd.shape = "batch"}) -> (!open {bwd.role = "grad", bwd.name = "g", bwd.shape = "batch"}) {
    return %e : !open
  }
}

// -----

!one = !torch.vtensor<[4],f32>

module @no_such_hook {
  func.func @forward(%x: !one {bwd.role = "input", bwd.name = "x"}) {
    // expected-error @below {{bwd-narrow-saved: 'torch.aten.exp' op: bwd.packed_as names @pack_0, and there is no @unpack_0; trace both hooks into functions of the module}}
    %e = torch.aten.exp %x {bwd.packed_as = ["pack_0"]} : !one -> !one
    "bwd.save"(%e) {name = "exp"} : (!one) -> ()
    return
  }
  func.func @backward(%e: !one {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"}) -> (!one {bwd.role = "grad", bwd.name = "g"}) {
    return %e : !one
  }
  func.func private @pack_0(%v: !one) -> !one attributes {bwd.inline} {
    return %v : !one
  }
}

// -----

!one = !torch.vtensor<[4],f32>
!half = !torch.vtensor<[4],f16>

module @other_type {
  func.func @forward(%x: !one {bwd.role = "input", bwd.name = "x"}) {
    // expected-error @below {{bwd-narrow-saved: 'torch.aten.exp' op: @pack_0 and @unpack_0 do not pack and unpack a !torch.vtensor<[4],f32>; trace the hooks on what they are called with}}
    %e = torch.aten.exp %x {bwd.packed_as = ["pack_0"]} : !one -> !one
    "bwd.save"(%e) {name = "exp"} : (!one) -> ()
    return
  }
  func.func @backward(%e: !one {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"}) -> (!one {bwd.role = "grad", bwd.name = "g"}) {
    return %e : !one
  }
  func.func private @pack_0(%v: !one) -> !one attributes {bwd.inline} {
    return %v : !one
  }
  func.func private @unpack_0(%v: !one) -> !half attributes {bwd.inline} {
    %int5 = torch.constant.int 5
    %h = torch.prims.convert_element_type %v, %int5 : !one, !torch.int -> !half
    return %h : !half
  }
}
