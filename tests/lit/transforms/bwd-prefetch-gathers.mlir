// RUN: retrograd-opt %s --split-input-file -p 'bwd-prefetch-gathers' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-prefetch-gathers{limit-bytes=16}' | FileCheck %s --check-prefix=LITTLE

!t = !torch.vtensor<[4],f32>
!u = !torch.vtensor<[8],f32>

// The second weight is gathered while the first layer is computed, ahead of the reduction in between; its cast goes
// with it. The first, at the start, stays. 32 bytes are more than the limit of 16.
// CHECK: bwd.collective_notes = ["moved: 1 times all_gather one stage earlier, 32 bytes"]
// CHECK: func.func @backward
// CHECK: %[[S:.*]]:2 = "bwd.start_collective"(%arg1, %{{.*}}) {group = "0", kind = "all_gather"
// CHECK: %[[W:.*]] = "bwd.wait_collective"(%[[S]]#0)
// CHECK: %[[C:.*]] = torch.aten.neg %arg2
// CHECK: %[[Q:.*]]:2 = "bwd.start_collective"(%[[C]], %[[S]]#1) {group = "0", kind = "all_gather"
// CHECK: %[[X:.*]] = torch.aten.mul.Tensor %arg0, %[[W]]
// CHECK: %[[R:.*]]:2 = "bwd.start_collective"(%[[X]], %[[Q]]#1) {group = "0", kind = "reduce_scatter"
// CHECK: %[[V:.*]] = "bwd.wait_collective"(%[[Q]]#0)
// CHECK: torch.aten.mul.Tensor %[[X]], %[[V]]
// CHECK: return
// LITTLE: func.func @backward
// LITTLE: kind = "all_gather"
// LITTLE: torch.aten.mul.Tensor
// LITTLE: kind = "reduce_scatter"
// LITTLE: kind = "all_gather"
// LITTLE: return
func.func @backward(%g: !u, %w: !t, %v: !t) -> (!u, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %s:2 = "bwd.start_collective"(%w, %t0) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!u, !bwd.token)
  %1 = "bwd.wait_collective"(%s#0) : (!u) -> !u
  %x = torch.aten.mul.Tensor %g, %1 : !u, !u -> !u
  %r:2 = "bwd.start_collective"(%x, %s#1) {kind = "reduce_scatter", reduction = "sum", size = 2 : i64, group = "0"} : (!u, !bwd.token) -> (!t, !bwd.token)
  %c = torch.aten.neg %v : !t -> !t
  %q:2 = "bwd.start_collective"(%c, %r#1) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!u, !bwd.token)
  %2 = "bwd.wait_collective"(%q#0) : (!u) -> !u
  %y = torch.aten.mul.Tensor %x, %2 : !u, !u -> !u
  %3 = "bwd.wait_collective"(%r#0) : (!t) -> !t
  return %y, %3 : !u, !t
}

// -----

!t = !torch.vtensor<[4],f32>
!u = !torch.vtensor<[8],f32>

// What the stage computes is what is gathered: it stays behind it.
// CHECK: func.func @backward
// CHECK: torch.aten.exp
// CHECK: torch.aten.neg
// CHECK: bwd.start_collective
// CHECK: return
func.func @backward(%g: !t) -> !u {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %x = torch.aten.exp %g : !t -> !t
  %y = torch.aten.neg %x : !t -> !t
  %s:2 = "bwd.start_collective"(%y, %t0) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!u, !bwd.token)
  %1 = "bwd.wait_collective"(%s#0) : (!u) -> !u
  return %1 : !u
}

// -----

!t = !torch.vtensor<[4],f32>
!u = !torch.vtensor<[8],f32>

// What a hook gives is there when it was called; what another collective gives, when that was waited for. No call of a
// hook that communicates by itself is passed, of another one it may be.
// CHECK: func.func @backward
// CHECK: torch.aten.exp
// CHECK: hook = 0
// CHECK: kind = "all_gather"
// CHECK: torch.aten.neg
// CHECK: hook = 1
// CHECK: kind = "all_gather"
// CHECK: torch.aten.sin
// CHECK: kind = "all_reduce"
// CHECK: bwd.wait_collective
// CHECK: kind = "all_gather"
// CHECK: kind = "all_gather"
// CHECK: torch.aten.cos
// CHECK: hook = 2
// CHECK: return
func.func @backward(%g: !t, %w: !t) -> (!u, !u, !u, !u, !t, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %x = torch.aten.exp %g : !t -> !t
  %h:2 = "bwd.call_hook"(%x, %t0) {kind = "tensor_pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %s:2 = "bwd.start_collective"(%h#0, %h#1) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!u, !bwd.token)
  %1 = "bwd.wait_collective"(%s#0) : (!u) -> !u
  %y = torch.aten.neg %g : !t -> !t
  %i:2 = "bwd.call_hook"(%y, %s#1) {kind = "tensor_pre", hook = 1 : i64, bwd.communication} : (!t, !bwd.token) -> (!t, !bwd.token)
  %q:2 = "bwd.start_collective"(%w, %i#1) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!u, !bwd.token)
  %2 = "bwd.wait_collective"(%q#0) : (!u) -> !u
  %z = torch.aten.sin %g : !t -> !t
  %a:2 = "bwd.start_collective"(%z, %q#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %3 = "bwd.wait_collective"(%a#0) : (!t) -> !t
  %b:2 = "bwd.start_collective"(%3, %a#1) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!u, !bwd.token)
  %4 = "bwd.wait_collective"(%b#0) : (!u) -> !u
  %n = torch.aten.cos %g : !t -> !t
  %j:2 = "bwd.call_hook"(%n, %b#1) {kind = "tensor_pre", hook = 2 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %d:2 = "bwd.start_collective"(%w, %j#1) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!u, !bwd.token)
  %5 = "bwd.wait_collective"(%d#0) : (!u) -> !u
  return %1, %2, %4, %5, %i#0, %j#0 : !u, !u, !u, !u, !t, !t
}

// -----

!u = !torch.vtensor<[8],f32>
!t = !torch.vtensor<[4],f32>

// A reduction is no gathering: it starts when what it takes is there, and not before others.
// CHECK: func.func @backward
// CHECK: torch.aten.exp
// CHECK: bwd.start_collective
// CHECK: return
func.func @backward(%g: !t, %w: !t) -> (!t, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %x = torch.aten.exp %g : !t -> !t
  %s:2 = "bwd.start_collective"(%w, %t0) {kind = "all_reduce", reduction = "sum", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %1 = "bwd.wait_collective"(%s#0) : (!t) -> !t
  return %1, %x : !t, !t
}
