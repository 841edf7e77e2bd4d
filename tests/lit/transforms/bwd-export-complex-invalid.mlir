// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-export-complex'

// expected-error @below {{bwd-export-complex: 'func.func' op: tensor<3xf32> is marked with bwd.complex, and has no pairs along its last axis; run it after torch-backend-to-linalg-on-tensors-backend-pipeline}}
func.func @single(%x: tensor<3xf32> {bwd.complex}) -> tensor<3xf32> {
  return %x : tensor<3xf32>
}

// -----

// expected-error @below {{bwd-export-complex: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}
