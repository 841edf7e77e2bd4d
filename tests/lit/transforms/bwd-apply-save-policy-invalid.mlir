// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-apply-save-policy{rules="must-save op=exp"}'

// expected-error @below {{bwd-apply-save-policy: no function @joint in the module; import a joint graph first, and partition it afterwards}}
module @nothing_to_mark {
  func.func @forward() {
    return
  }
}

// -----

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-apply-save-policy: 'func.func' op: the rule 'must-save op=exp' matches no value of the forward; look for ops and names in the module at stage 'imported'}}
func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %out = torch.aten.sin %x : !one -> !one
  %grad = torch.aten.exp %t : !one -> !one
  return %out, %grad : !one, !one
}

// -----

!one = !torch.vtensor<[4],f32>

func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  // expected-error @below {{bwd-apply-save-policy: 'torch.aten.exp' op: the model says bwd.recompute = 'must', and the policy 'must-save op=exp'; take one of the two away}}
  %out = torch.aten.exp %x {bwd.recompute = "must"} : !one -> !one
  %grad = torch.aten.mul.Tensor %t, %out : !one, !one -> !one
  return %out, %grad : !one, !one
}
