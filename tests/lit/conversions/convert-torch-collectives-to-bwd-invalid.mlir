// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-torch-collectives-to-bwd'

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t, %group: !torch.str) -> !t {
  %sum = torch.constant.str "sum"
  // expected-error @below {{convert-torch-collectives-to-bwd: 'torch.operator' op: operand 2 of torch._c10d_functional.all_reduce is no constant; groups, their sizes and reductions are known when the graph is traced}}
  %a = torch.operator "torch._c10d_functional.all_reduce"(%g, %sum, %group) : (!t, !torch.str, !torch.str) -> !t
  %r = torch.operator "torch._c10d_functional.wait_tensor"(%a) : (!t) -> !t
  return %r : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  %sum = torch.constant.str "sum"
  // expected-error @below {{convert-torch-collectives-to-bwd: 'torch.operator' op: torch._c10d_functional.all_reduce takes 2 operands, not 3; trace it with a release of PyTorch that this project is for}}
  %a = torch.operator "torch._c10d_functional.all_reduce"(%g, %sum) : (!t, !torch.str) -> !t
  %r = torch.operator "torch._c10d_functional.wait_tensor"(%a) : (!t) -> !t
  return %r : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  %group = torch.constant.str "0"
  // expected-error @below {{convert-torch-collectives-to-bwd: 'torch.operator' op: an operand of torch._c10d_functional.all_gather_into_tensor is no number; name the size of the group as an integer}}
  %a = torch.operator "torch._c10d_functional.all_gather_into_tensor"(%g, %group, %group) : (!t, !torch.str, !torch.str) -> !t
  %r = torch.operator "torch._c10d_functional.wait_tensor"(%a) : (!t) -> !t
  return %r : !t
}
