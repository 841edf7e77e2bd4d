// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-outline-stages'

// expected-error @below {{bwd-outline-stages: no function @backward in the module; import a backward first}}
module {
}

// -----

!t = !torch.vtensor<[2],f32>

// expected-error @below {{bwd-outline-stages: 'func.func' op: returns a !torch.int, which no stage can give; return tensors only}}
func.func @backward(%g: !t) -> !torch.int {
  %start = "bwd.create_token"() : () -> !bwd.token
  %end = "bwd.final_callbacks"(%start) : (!bwd.token) -> !bwd.token
  %zero = torch.constant.int 0
  return %zero : !torch.int
}

// -----

!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>

func.func @backward() {
  %start = "bwd.create_token"() : () -> !bwd.token
  %none = torch.constant.none
  // expected-error @below {{bwd-outline-stages: 'bwd.call_hook' op: gives a tuple that is used as one; take it apart with one torch.prim.TupleUnpack}}
  %h:2 = "bwd.call_hook"(%none, %start) {kind = "unpack", hook = 0 : i64} : (!torch.none, !bwd.token) -> (!pair, !bwd.token)
  %t:2 = torch.prim.TupleUnpack %h#0 : !pair -> !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32>
  %u:2 = torch.prim.TupleUnpack %h#0 : !pair -> !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32>
  return
}

// -----

!t = !torch.vtensor<[2],f32>
!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>

func.func @backward(%g: !t) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %a = torch.aten.exp %g : !t -> !t
  %pair = torch.prim.TupleConstruct %a, %g : !t, !t -> !pair
  // expected-error @below {{bwd-outline-stages: 'bwd.update_input' op: updates what is no argument of the function; bundle the argument and its new value with torch.prim.TupleConstruct}}
  %end = "bwd.update_input"(%pair, %start) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
  return
}
