// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-schedule-collectives'

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %s:2 = "bwd.start_collective"(%g, %t0) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %r = "bwd.wait_collective"(%s#0) : (!t) -> !t
  // expected-error @below {{bwd-schedule-collectives: 'bwd.accumulate_grad' op: bwd.accumulate_grad beside a collective; order a backward with hooks by bwd-schedule-hooks}}
  %t1 = "bwd.accumulate_grad"(%r, %s#1) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
  return
}
