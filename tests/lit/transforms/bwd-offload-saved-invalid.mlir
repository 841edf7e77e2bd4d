// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-offload-saved'

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-offload-saved: no functions @forward and @backward in the module; run bwd-partition first}}
module @not_partitioned {
  func.func @joint(%x: !one) -> !one {
    return %x : !one
  }
}

// -----

!one = !torch.vtensor<[4],f32>

module @no_such_mark {
  func.func @forward(%x: !one {bwd.role = "input", bwd.name = "x"}) {
    // expected-error @below {{bwd-offload-saved: 'torch.aten.exp' op: bwd.offload is "often"; it is 'always' or 'maybe'}}
    %e = torch.aten.exp %x {bwd.offload = "often"} : !one -> !one
    "bwd.save"(%e) {name = "exp"} : (!one) -> ()
    return
  }
  func.func @backward(%e: !one {bwd.role = "saved", bwd.name = "saved.exp", bwd.value = "exp"}) -> (!one {bwd.role = "grad", bwd.name = "g"}) {
    return %e : !one
  }
}
