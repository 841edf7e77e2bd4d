// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-inline-hooks'

!t = !torch.vtensor<[2],f32>

func.func private @hook_0(%x: !torch.vtensor<[3],f32>) -> !torch.vtensor<[3],f32> attributes {bwd.inline} {
  return %x : !torch.vtensor<[3],f32>
}
func.func @backward(%g: !t) -> !t {
  %start = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{bwd-inline-hooks: 'bwd.call_hook' op: @hook_0 takes !torch.vtensor<[3],f32>, and is called with !torch.vtensor<[2],f32>; trace the hook on what it is called with}}
  %h:2 = "bwd.call_hook"(%g, %start) {kind = "pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  return %h#0 : !t
}

// -----

!t = !torch.vtensor<[2],f32>

func.func private @hook_0(%x: !t) attributes {bwd.inline} {
  return
}
func.func @backward(%g: !t) -> !t {
  %start = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{bwd-inline-hooks: 'bwd.call_hook' op: @hook_0 gives !torch.none, and !torch.vtensor<[2],f32> is used; trace the hook on what it is called with}}
  %h:2 = "bwd.call_hook"(%g, %start) {kind = "pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  return %h#0 : !t
}

// -----

!t = !torch.vtensor<[2],f32>

func.func private @hook_0(%x: !t) -> !t attributes {bwd.inline} {
  // expected-error @below {{bwd-inline-hooks: 'bwd.create_token' op: @hook_0 does more than compute tensors; leave the hook in Python: take bwd.inline off it}}
  %start = "bwd.create_token"() : () -> !bwd.token
  return %x : !t
}
func.func @backward(%g: !t) -> !t {
  %start = "bwd.create_token"() : () -> !bwd.token
  %h:2 = "bwd.call_hook"(%g, %start) {kind = "pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  return %h#0 : !t
}
