// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-bwd-to-func'

// expected-error @below {{convert-bwd-to-func: 'func.func' op: a function takes or gives a !bwd.token; start the chain inside the function with bwd.create_token}}
func.func @takes_a_token(%t: !bwd.token) {
  return
}

// -----

// expected-error @below {{convert-bwd-to-func: 'func.func' op: a function takes or gives a !bwd.token; start the chain inside the function with bwd.create_token}}
func.func @gives_a_token() -> !bwd.token {
  %start = "bwd.create_token"() : () -> !bwd.token
  return %start : !bwd.token
}

// -----

// expected-error @below {{convert-bwd-to-func: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: i32) {
  "bwd.save"(%x) {name = "x"} : (i32) -> ()
  cf.br ^next
^next:
  return
}

// -----

func.func private @elsewhere(!bwd.token)
func.func @passes_a_token_on() {
  %start = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{convert-bwd-to-func: 'func.call' op: takes a !bwd.token, which only bwd ops can; order it by values that stay}}
  call @elsewhere(%start) : (!bwd.token) -> ()
  return
}

// -----

func.func @one_hook_of_two_types(%x: i32, %y: i64) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %a:2 = "bwd.call_hook"(%x, %start) {kind = "pre", hook = 0 : i64} : (i32, !bwd.token) -> (i32, !bwd.token)
  // expected-error @below {{convert-bwd-to-func: 'bwd.call_hook' op: @hook_0 is called as (i64) -> i64 here and as (i32) -> i32 elsewhere; give each hook a number of its own per signature}}
  %b:2 = "bwd.call_hook"(%y, %a#1) {kind = "pre", hook = 0 : i64} : (i64, !bwd.token) -> (i64, !bwd.token)
  return
}

// -----

!t = !torch.vtensor<[2],f32>
!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>

func.func @update(%w: !t, %new: !t) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %pair = torch.prim.TupleConstruct %w, %new : !t, !t -> !pair
  // expected-error @below {{convert-bwd-to-func: 'bwd.update_input' op: an update of an argument that is in no plan; run bwd-outline-stages first}}
  %end = "bwd.update_input"(%pair, %start) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
  return
}
