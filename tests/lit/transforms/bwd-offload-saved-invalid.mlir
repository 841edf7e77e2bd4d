// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-offload-saved'

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-offload-saved: no functions @forward and @backward in the module; run bwd-partition first}}
module @not_partitioned {
  func.func @joint(%x: !one) -> !one {
    return %x : !one
  }
}
