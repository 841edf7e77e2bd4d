// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-torch-pools-to-linalg'

func.func @open(%x: !torch.vtensor<[?,4,4,8],f32>, %w: !torch.list<int>) -> !torch.vtensor<[?,2,2,8],f32> {
  // expected-error @below {{convert-torch-pools-to-linalg: 'torch.operator' op: expected floats [images, height, width, channels], found !torch.vtensor<[?,4,4,8],f32>; leave other pools as ops of aten}}
  %r:2 = torch.operator "torch.retrograd.max_pool_last"(%x, %w, %w) : (!torch.vtensor<[?,4,4,8],f32>, !torch.list<int>, !torch.list<int>) -> (!torch.vtensor<[?,2,2,8],f32>, !torch.vtensor<[?,2,2,8],si8>)
  return %r#0 : !torch.vtensor<[?,2,2,8],f32>
}

// -----

func.func @unknown(%x: !torch.vtensor<[2,4,4,8],f32>, %w: !torch.list<int>) -> !torch.vtensor<[2,2,2,8],f32> {
  // expected-error @below {{numbers among the operands are no list}}
  %r:2 = torch.operator "torch.retrograd.max_pool_last"(%x, %w, %w) : (!torch.vtensor<[2,4,4,8],f32>, !torch.list<int>, !torch.list<int>) -> (!torch.vtensor<[2,2,2,8],f32>, !torch.vtensor<[2,2,2,8],si8>)
  return %r#0 : !torch.vtensor<[2,2,2,8],f32>
}

// -----

func.func @short(%x: !torch.vtensor<[2,4,4,8],f32>) -> !torch.vtensor<[2,2,2,8],f32> {
  %2 = torch.constant.int 2
  %w = torch.prim.ListConstruct %2, %2 : (!torch.int, !torch.int) -> !torch.list<int>
  // expected-error @below {{expected a window of 8 numbers and 2 sizes}}
  %r:2 = torch.operator "torch.retrograd.max_pool_last"(%x, %w, %w) : (!torch.vtensor<[2,4,4,8],f32>, !torch.list<int>, !torch.list<int>) -> (!torch.vtensor<[2,2,2,8],f32>, !torch.vtensor<[2,2,2,8],si8>)
  return %r#0 : !torch.vtensor<[2,2,2,8],f32>
}

// -----

func.func @open_number(%x: !torch.vtensor<[2,4,4,8],f32>, %n: !torch.int) -> !torch.vtensor<[2,2,2,8],f32> {
  %w = torch.prim.ListConstruct %n, %n : (!torch.int, !torch.int) -> !torch.list<int>
  // expected-error @below {{a number among the operands is no constant}}
  %r:2 = torch.operator "torch.retrograd.max_pool_last"(%x, %w, %w) : (!torch.vtensor<[2,4,4,8],f32>, !torch.list<int>, !torch.list<int>) -> (!torch.vtensor<[2,2,2,8],f32>, !torch.vtensor<[2,2,2,8],si8>)
  return %r#0 : !torch.vtensor<[2,2,2,8],f32>
}
