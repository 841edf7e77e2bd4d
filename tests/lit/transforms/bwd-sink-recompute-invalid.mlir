// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-sink-recompute'

// expected-error @below {{bwd-sink-recompute: no function @backward in the module; run bwd-partition first}}
module @nothing_to_sink {
  func.func @joint() {
    return
  }
}

// -----

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-sink-recompute: 'func.func' op: @backward has 2 blocks, expected one; capture the graph without control flow}}
func.func @backward(%t: !one {bwd.role = "tangent", bwd.name = "t"}) -> (!one {bwd.role = "grad", bwd.name = "grad.x"}) {
  cf.br ^next
^next:
  return %t : !one
}
