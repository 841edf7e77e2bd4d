// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-torch-operator-to-bwd'

!token = !torch.vtensor<[0],si8>

func.func @a_token_from_nowhere(%t: !token) {
  // expected-error @below {{convert-torch-operator-to-bwd: 'torch.operator' op: operand 0 of torch.retrograd.final_callbacks comes from no op that gives a token; start the chain with retrograd::create_token, before its first use}}
  %end = torch.operator "torch.retrograd.final_callbacks"(%t) : (!token) -> !token
  return
}

// -----

!tensor = !torch.vtensor<[2],f32>
!token = !torch.vtensor<[0],si8>

func.func @a_number_known_only_later(%x: !tensor, %n: !torch.int) {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  // expected-error @below {{convert-torch-operator-to-bwd: 'torch.operator' op: operand 2 of torch.retrograd.accumulate_grad is no constant; kinds and numbers are known when the hook is traced}}
  %end = torch.operator "torch.retrograd.accumulate_grad"(%x, %start, %n) : (!tensor, !token, !torch.int) -> !token
  return
}

// -----

!token = !torch.vtensor<[0],si8>

func.func @a_list_from_nowhere(%list: !torch.list<vtensor>) {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  %zero = torch.constant.int 0
  // expected-error @below {{convert-torch-operator-to-bwd: 'torch.operator' op: the values of torch.retrograd.call_backward are no torch.prim.ListConstruct; pass the tensors one by one}}
  %h:2 = torch.operator "torch.retrograd.call_backward"(%list, %start, %zero) : (!torch.list<vtensor>, !token, !torch.int) -> (!torch.list<vtensor>, !token)
  return
}

// -----

!tensor = !torch.vtensor<[2],f32>
!token = !torch.vtensor<[0],si8>

func.func @a_list_of_results(%x: !tensor) -> !torch.list<vtensor> {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  %list = torch.prim.ListConstruct %x : (!tensor) -> !torch.list<vtensor>
  %zero = torch.constant.int 0
  // expected-error @below {{convert-torch-operator-to-bwd: 'torch.operator' op: the results of torch.retrograd.call_backward are used as a list; take them apart with one torch.prim.ListUnpack}}
  %h:2 = torch.operator "torch.retrograd.call_backward"(%list, %start, %zero) : (!torch.list<vtensor>, !token, !torch.int) -> (!torch.list<vtensor>, !token)
  return %h#0 : !torch.list<vtensor>
}

// -----

!token = !torch.vtensor<[0],si8>

func.func @gives_a_token() -> !token {
  %start = torch.operator "torch.retrograd.create_token"() : () -> !token
  // expected-error @below {{convert-torch-operator-to-bwd: 'func.return' op: takes a token, which only effects can; leave the token out of what the graph computes and returns}}
  return %start : !token
}
