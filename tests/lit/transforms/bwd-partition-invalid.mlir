// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-partition'
// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-partition{policy=default}'

// expected-error @below {{bwd-partition: no function @joint in the module; import a joint graph first}}
module @nothing_to_split {
  func.func @forward() {
    return
  }
}

// -----

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-partition: 'func.func' op: @joint has no result with bwd.role = "grad", nothing to differentiate; mark the gradients among its results with bwd.role = "grad"}}
func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}) -> (!one {bwd.role = "output", bwd.name = "out"}) {
  return %x : !one
}

// -----

// expected-error @below {{bwd-partition: 'func.func' op: @joint has 0 blocks, expected one; capture the graph without control flow}}
func.func private @joint(!torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32>

// -----

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-partition: 'func.func' op: @joint has 2 blocks, expected one; capture the graph without control flow}}
func.func @joint(%t: !one {bwd.role = "tangent", bwd.name = "t"}) -> (!one {bwd.role = "grad", bwd.name = "grad.x"}) {
  cf.br ^next
^next:
  return %t : !one
}

// -----

!one = !torch.vtensor<[4],f32>

func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %true = torch.constant.bool true
  // expected-error @below {{bwd-partition: 'torch.prim.If' op: an op with a region can be in neither half; capture the graph without control flow}}
  %grad = torch.prim.If %true -> (!one) {
    torch.prim.If.yield %x : !one
  } else {
    torch.prim.If.yield %t : !one
  }
  return %grad : !one
}

// -----

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-partition: 'func.func' op: a result of the forward depends on a tangent; mark it with bwd.role = "grad" if it belongs to the backward}}
func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %out = torch.aten.mul.Tensor %x, %t : !one, !one -> !one
  return %out, %t : !one, !one
}

// -----

!one = !torch.vtensor<[4],f32>

// expected-error @below {{bwd-partition: 'func.func' op: a result of the forward depends on a tangent; mark it}}
func.func @joint(%t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  return %t, %t : !one, !one
}

// -----

!one = !torch.vtensor<[4],f32>

// A number that is read out of a tensor, by an op that nobody knows to be free of effects.
func.func @joint(%x: !torch.vtensor<[],si64> {bwd.role = "input", bwd.name = "x"},
                 %y: !one {bwd.role = "input", bwd.name = "y"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  // expected-error @below {{bwd-partition: 'torch.aten.Int.Tensor' op: the backward needs a result that is no tensor, so not saved, of what must not run twice; give the backward a tensor or a constant in its place}}
  %n = torch.aten.Int.Tensor %x : !torch.vtensor<[],si64> -> !torch.int
  %out = torch.aten.mul.Scalar %y, %n : !one, !torch.int -> !one
  %grad = torch.aten.mul.Scalar %t, %n : !one, !torch.int -> !one
  return %out, %grad : !one, !one
}

// -----

!one = !torch.vtensor<[4],f32>

func.func @joint(%t: !one {bwd.role = "tangent", bwd.name = "t"}) -> (!one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %start = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{bwd-partition: 'bwd.accumulate_grad' op: no result of @joint depends on this op, so that neither half would run it; lower it first, or return what it gives}}
  %next = "bwd.accumulate_grad"(%t, %start) {param = 0 : i64} : (!one, !bwd.token) -> !bwd.token
  return %t : !one
}

// -----

!one = !torch.vtensor<[4],f32>

func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  // expected-error @below {{bwd-partition: 'torch.aten.exp' op: bwd.recompute is "always"; it is one of "must", "prefer", "avoid", "never"}}
  %out = torch.aten.exp %x {bwd.recompute = "always"} : !one -> !one
  %grad = torch.aten.mul.Tensor %t, %out : !one, !one -> !one
  return %out, %grad : !one, !one
}

// -----

!one = !torch.vtensor<[4],f32>

func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %none = torch.constant.none
  // expected-error @below {{bwd-partition: 'torch.aten.bernoulli' op: it must be recomputed, but a second run may give something else; save its result, or draw random numbers with torch's default generator}}
  %mask = torch.aten.bernoulli %x, %none {bwd.recompute = "must"} : !one, !torch.none -> !one
  %grad = torch.aten.mul.Tensor %t, %mask : !one, !one -> !one
  return %mask, %grad : !one, !one
}

// -----

!one = !torch.vtensor<[4],f32>

// A checkpoint's policy says one thing of the op, a mark on its result the other.
func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  %four = torch.constant.int 4
  %size = torch.prim.ListConstruct %four : (!torch.int) -> !torch.list<int>
  // expected-error @below {{bwd-partition: 'torch.aten.exp' op: it must be recomputed, and its result must be saved; take one of the two marks away}}
  %e = torch.aten.exp %x {bwd.recompute = "must"} : !one -> !one
  %marked = torch.aten.view %e, %size {bwd.recompute = "never", bwd.label = "e"} : !one, !torch.list<int> -> !one
  %grad = torch.aten.mul.Tensor %t, %marked : !one, !one -> !one
  return %marked, %grad : !one, !one
}

// -----

!one = !torch.vtensor<[4],f32>

func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
    -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
  // expected-error @below {{bwd-partition: 'torch.aten.mul.Tensor' op: an op of the backward is marked bwd.recompute = 'never'; mark ops of the forward: the backward's own are neither kept nor repeated}}
  %grad = torch.aten.mul.Tensor %t, %x {bwd.recompute = "never"} : !one, !one -> !one
  return %x, %grad : !one, !one
}

// -----

!open = !torch.vtensor<[?],f32>

// expected-error @below {{bwd-partition: 'func.func' op: of a value of type !torch.vtensor<[?],f32>, open sizes are not written in its shape, ''; write all its sizes in bwd.shape or bwd.shapes, over symbols of bwd.sizes}}
func.func @joint(%x: !open {bwd.role = "input", bwd.name = "x"}, %t: !open {bwd.role = "tangent", bwd.name = "t"})
    -> (!open {bwd.role = "output", bwd.name = "out"}, !open {bwd.role = "grad", bwd.name = "grad.x"}) {
  return %x, %t : !open, !open
}

// -----

!open = !torch.vtensor<[?],f32>

module attributes {bwd.sizes = {batch = 6 : i64}} {
  func.func @joint(%x: !open {bwd.role = "input", bwd.name = "x", bwd.shape = "batch"}, %t: !open {bwd.role = "tangent", bwd.name = "t", bwd.shape = "batch"})
      -> (!open {bwd.role = "output", bwd.name = "out", bwd.shape = "batch"}, !open {bwd.role = "grad", bwd.name = "grad.x", bwd.shape = "batch"}) {
    // expected-error @below {{bwd-partition: 'torch.aten.exp' op: 'batch.real' is no size: it may have numbers, symbols, + - * // %, min and max; write bwd.shapes as in 'batch, 4 * tokens'}}
    %e = torch.aten.exp %x {bwd.shapes = ["batch.real"]} : !open -> !open
    return %e, %t : !open, !open
  }
}
