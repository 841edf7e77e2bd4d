// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-outline-islands'

!t = !torch.vtensor<[2],f32>

func.func @backward(%x: !t) -> !t {
  %start = "bwd.create_token"() : () -> !bwd.token
  %a = torch.operator "torch.retrograd.island"(%x) {bwd.island = 0 : i64} : (!t) -> !t
  // expected-error @below {{bwd-outline-islands: 'bwd.final_callbacks' op: bwd.final_callbacks beside an island; cut a backward with hooks by bwd-outline-stages}}
  %end = "bwd.final_callbacks"(%start) : (!bwd.token) -> !bwd.token
  return %a : !t
}

// -----

!t = !torch.vtensor<[2],f32>

// expected-error @below {{bwd-outline-islands: 'func.func' op: returns a !torch.int, which no stage can give; return tensors only}}
func.func @forward(%x: !t) -> (!t, !torch.int) {
  %a = torch.operator "torch.retrograd.island"(%x) {bwd.island = 0 : i64} : (!t) -> !t
  %zero = torch.constant.int 0
  return %a, %zero : !t, !torch.int
}
