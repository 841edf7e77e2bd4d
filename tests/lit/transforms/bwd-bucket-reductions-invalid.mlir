// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-bucket-reductions'

!t = !torch.vtensor<[4],f32>

func.func @backward(%pair: !torch.tuple<vtensor<[4],f32>, vtensor<[4],f32>>) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{bwd-bucket-reductions: 'bwd.start_collective' op: takes a !torch.tuple<vtensor<[4],f32>, vtensor<[4],f32>> that is no bundle of tensors; bundle the tensors with torch.prim.TupleConstruct}}
  %s:2 = "bwd.start_collective"(%pair, %t0) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!torch.tuple<vtensor<[4],f32>, vtensor<[4],f32>>, !bwd.token) -> (!torch.tuple<vtensor<[4],f32>, vtensor<[4],f32>>, !bwd.token)
  return
}
