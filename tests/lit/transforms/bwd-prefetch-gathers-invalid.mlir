// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-prefetch-gathers'

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %s:2 = "bwd.start_collective"(%g, %t0) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %1 = "bwd.wait_collective"(%s#0) : (!t) -> !t
  // expected-error @below {{bwd-prefetch-gathers: 'bwd.save' op: a backward saves nothing; run bwd-partition on the joint graph first}}
  "bwd.save"(%1) {name = "x"} : (!t) -> ()
  return %1 : !t
}
