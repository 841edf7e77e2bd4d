// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-cse'

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-cse: 'func.func' op: a function of 2 blocks, expected one; capture the graph without control flow}}
func.func @joint(%t: !one {bwd.role = "tangent", bwd.name = "t"}) -> (!one {bwd.role = "grad", bwd.name = "grad.x"}) {
  cf.br ^next
^next:
  return %t : !one
}
