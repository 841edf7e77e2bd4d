// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p convert-torch-attention-to-bwd

!heads = !torch.vtensor<[2,4,5,8],f32>
!sums = !torch.vtensor<[2,4,5],f32>

func.func @dropout(%q: !heads) -> (!heads, !sums) {
  %dropout = torch.constant.float 0.1
  %causal = torch.constant.bool true
  %none = torch.constant.none
  // expected-error @below {{convert-torch-attention-to-bwd: 'torch.operator' op: no kernel of ours takes this attention: it has dropout of 0.1; decompose attention where it is traced, for a target without kernels of ours that take it}}
  %0:2 = torch.operator "torch.aten._scaled_dot_product_flash_attention_for_cpu"(%q, %q, %q, %dropout, %causal, %none, %none) : (!heads, !heads, !heads, !torch.float, !torch.bool, !torch.none, !torch.none) -> (!heads, !sums)
  return %0#0, %0#1 : !heads, !sums
}

// -----

!heads = !torch.vtensor<[2,4,?,8],f32>
!sums = !torch.vtensor<[2,4,?],f32>

func.func @open(%q: !heads) -> (!heads, !sums) {
  %dropout = torch.constant.float 0.0
  %causal = torch.constant.bool true
  %none = torch.constant.none
  // expected-error @below {{no kernel of ours takes this attention: sizes are open}}
  %0:2 = torch.operator "torch.aten._scaled_dot_product_flash_attention_for_cpu"(%q, %q, %q, %dropout, %causal, %none, %none) : (!heads, !heads, !heads, !torch.float, !torch.bool, !torch.none, !torch.none) -> (!heads, !sums)
  return %0#0, %0#1 : !heads, !sums
}

// -----

!heads = !torch.vtensor<[2,4,5,8],f32>
!sums = !torch.vtensor<[2,4,5],f32>

func.func @causal(%q: !heads, %causal: !torch.bool) -> (!heads, !sums) {
  %dropout = torch.constant.float 0.0
  %none = torch.constant.none
  // expected-error @below {{convert-torch-attention-to-bwd: 'torch.operator' op: a number among the operands is no constant}}
  %0:2 = torch.operator "torch.aten._scaled_dot_product_flash_attention_for_cpu"(%q, %q, %q, %dropout, %causal, %none, %none) : (!heads, !heads, !heads, !torch.float, !torch.bool, !torch.none, !torch.none) -> (!heads, !sums)
  return %0#0, %0#1 : !heads, !sums
}

// -----

!heads = !torch.vtensor<[2,4,5,8],f32>
!sums = !torch.vtensor<[2,4,5],f32>

func.func @all_dropped(%q: !heads, %seed: !torch.vtensor<[2],si64>) -> (!heads, !sums) {
  %dropout = torch.constant.float 1.0
  %causal = torch.constant.bool true
  %none = torch.constant.none
  %stream = torch.constant.int 0
  // expected-error @below {{no kernel of ours takes this attention: it has dropout of 1; decompose attention where it is traced}}
  %0:2 = torch.operator "torch.retrograd.attention"(%q, %q, %q, %dropout, %causal, %none, %none, %seed, %stream) : (!heads, !heads, !heads, !torch.float, !torch.bool, !torch.none, !torch.none, !torch.vtensor<[2],si64>, !torch.int) -> (!heads, !sums)
  return %0#0, %0#1 : !heads, !sums
}
