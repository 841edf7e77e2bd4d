// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-drop-tangents{absent=1}'

// expected-error @below {{bwd-drop-tangents: no function @backward in the module; run bwd-partition first}}
module @nothing_to_drop {
  func.func @joint() {
    return
  }
}

// -----

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-drop-tangents: 'func.func' op: no tangent number '1' among the 1 of @backward; count them from 0 in the order of its arguments, as in absent=0,2}}
func.func @backward(%t: !one {bwd.role = "tangent", bwd.name = "t"}) -> (!one {bwd.role = "grad", bwd.name = "grad.x"}) {
  return %t : !one
}

// -----

!one = !torch.vtensor<[4],f32>

func.func @backward(%t: !one {bwd.role = "tangent", bwd.name = "t"}, %u: !one {bwd.role = "tangent", bwd.name = "u"}) {
  %start = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{bwd-drop-tangents: 'bwd.call_hook' op: calls Python in @backward; a backward with hooks is captured as it runs, where no tangent is absent}}
  %g, %end = "bwd.call_hook"(%t, %start) {kind = "tensor_pre", hook = 0 : i64} : (!one, !bwd.token) -> (!one, !bwd.token)
  return
}

// -----

!one = !torch.vtensor<[4],si64>

func.func @backward(%t: !one {bwd.role = "tangent", bwd.name = "t"}, %u: !one {bwd.role = "tangent", bwd.name = "u"})
    -> (!one {bwd.role = "grad", bwd.name = "grad.x"}) {
  // expected-error @below {{bwd-drop-tangents: 'torch.aten.mul.Tensor' op: takes an absent !torch.vtensor<[4],si64>, for which no zeros can be made; pass zeros for the tangent that it comes from}}
  %g = torch.aten.mul.Tensor %t, %u : !one, !one -> !one
  return %g : !one
}

// -----

!open = !torch.vtensor<[?],f32>

module attributes {bwd.sizes = {b = 5 : i64}} {
  func.func @backward(%t: !open {bwd.role = "tangent", bwd.name = "t", bwd.shape = "b"},
                      %u: !open {bwd.role = "tangent", bwd.name = "u", bwd.shape = "b"})
      -> (!open {bwd.role = "grad", bwd.name = "grad.x", bwd.shape = "b"}) {
    // expected-error @below {{bwd-drop-tangents: 'torch.aten.mul.Tensor' op: takes zeros of the size 'b', which no function takes; pass zeros for the tangent that it comes from}}
    %g = torch.aten.mul.Tensor %t, %u {bwd.shapes = ["b"]} : !open, !open -> !open
    return %g : !open
  }
}
