// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect --verify-diagnostics -p 'bwd-export-results'

// expected-error @below {{bwd-export-results: 'func.func' op: a result of (!torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32> is no ranked tensor; run it after torch-backend-to-linalg-on-tensors-backend-pipeline}}
func.func @not_lowered(%x: !torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32> {
  return %x : !torch.vtensor<[2],f32>
}

// -----

// expected-error @below {{bwd-export-results: 'func.func' op: a result of (tensor<2xf32>, i32) -> (tensor<2xf32>, i32) is no ranked tensor; run it after}}
func.func @number(%x: tensor<2xf32>, %n: i32) -> (tensor<2xf32>, i32) {
  return %x, %n : tensor<2xf32>, i32
}
