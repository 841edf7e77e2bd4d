// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-functionalize-rng'

func.func @dynamic(%seed: !torch.vtensor<[2],si64>) -> !torch.vtensor<[4,?],f32> {
  %stream = torch.constant.int 0
  // expected-error @below {{bwd-functionalize-rng: 'torch.operator' op: size 1 of !torch.vtensor<[4,?],f32> is in no list of sizes; give the op its sizes as its third operand, a torch.prim.ListConstruct}}
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream) : (!torch.vtensor<[2],si64>, !torch.int) -> !torch.vtensor<[4,?],f32>
  return %u : !torch.vtensor<[4,?],f32>
}

// -----

func.func @too_many(%seed: !torch.vtensor<[2],si64>) -> !torch.vtensor<[65537,65536],f32> {
  %stream = torch.constant.int 0
  // expected-error @below {{expected a result of f32, of at most 2**32 elements, found !torch.vtensor<[65537,65536],f32>; draw f32, and fewer numbers at a time}}
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream) : (!torch.vtensor<[2],si64>, !torch.int) -> !torch.vtensor<[65537,65536],f32>
  return %u : !torch.vtensor<[65537,65536],f32>
}

// -----

func.func @other_type(%seed: !torch.vtensor<[2],si64>) -> !torch.vtensor<[4],f64> {
  %stream = torch.constant.int 0
  // expected-error @below {{found !torch.vtensor<[4],f64>}}
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream) : (!torch.vtensor<[2],si64>, !torch.int) -> !torch.vtensor<[4],f64>
  return %u : !torch.vtensor<[4],f64>
}

// -----

func.func @stream(%seed: !torch.vtensor<[2],si64>, %stream: !torch.int) -> !torch.vtensor<[4],f32> {
  // expected-error @below {{bwd-functionalize-rng: 'torch.operator' op: the number of the stream is no constant; give each random op a constant number of its own}}
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream) : (!torch.vtensor<[2],si64>, !torch.int) -> !torch.vtensor<[4],f32>
  return %u : !torch.vtensor<[4],f32>
}
