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
