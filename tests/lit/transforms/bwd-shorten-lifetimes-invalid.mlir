// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-shorten-lifetimes'

// expected-error @below {{bwd-shorten-lifetimes: no function @backward in the module; run bwd-partition first}}
module @nothing_to_cut {
  func.func @joint() {
    return
  }
}

// -----

!t = !torch.vtensor<[2],f32>

func.func @backward(%t: !t {bwd.role = "tangent", bwd.name = "t"}) -> (!t {bwd.role = "grad", bwd.name = "grad.x"}) {
  // expected-error @below {{bwd-shorten-lifetimes: 'torch.operator' op: a function with effects; bwd-outline-stages and bwd-outline-islands cut at these}}
  %i = torch.operator "torch.retrograd.island"(%t) {bwd.island = 0 : i64, bwd.values = ["p"]} : (!t) -> !t
  return %i : !t
}
