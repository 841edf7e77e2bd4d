// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-schedule-hooks'

// expected-error @below {{bwd-schedule-hooks: no function @backward in the module; import a backward first}}
module {
}

// -----

// expected-error @below {{bwd-schedule-hooks: 'func.func' op: a function of several blocks; capture the graph without control flow}}
func.func @backward() {
  cf.br ^next
^next:
  return
}

// -----

func.func @backward(%x: !torch.vtensor<[2],f32>) {
  // expected-error @below {{bwd-schedule-hooks: 'bwd.save' op: a backward saves nothing; run bwd-partition on the joint graph first}}
  "bwd.save"(%x) {name = "x"} : (!torch.vtensor<[2],f32>) -> ()
  return
}

// -----

func.func @backward() {
  %start = "bwd.create_token"() : () -> !bwd.token
  %none = torch.constant.none
  // expected-error @below {{bwd-schedule-hooks: 'bwd.call_hook' op: no accumulate_grad precedes a post_acc_grad hook; call such a hook after the accumulation that it belongs to}}
  %p:2 = "bwd.call_hook"(%none, %start) {kind = "post_acc_grad", hook = 1 : i64} : (!torch.none, !bwd.token) -> (!torch.none, !bwd.token)
  return
}

// -----

func.func @backward(%pair: !torch.tuple<vtensor, vtensor>) {
  %start = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{bwd-schedule-hooks: 'bwd.call_hook' op: takes a !torch.tuple<vtensor, vtensor> that is no bundle of tensors; bundle the tensors with torch.prim.TupleConstruct}}
  %p:2 = "bwd.call_hook"(%pair, %start) {kind = "pre", hook = 1 : i64} : (!torch.tuple<vtensor, vtensor>, !bwd.token) -> (!torch.none, !bwd.token)
  return
}
