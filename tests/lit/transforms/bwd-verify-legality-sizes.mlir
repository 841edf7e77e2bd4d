// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-verify-legality{level=linalg}'

// A size may be forgotten, but not made up.
func.func @forgotten(%x: tensor<4x?xf32>) -> tensor<?x?xf32> {
  %y = tensor.cast %x : tensor<4x?xf32> to tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}

// -----

func.func @made_up(%x: tensor<?x?x8xf32>) -> tensor<1x?x8xf32> {
  // expected-error @below {{bwd-verify-legality: 'tensor.cast' op: a size of tensor<?x?x8xf32> is taken for a number, in tensor<1x?x8xf32>; torch-mlir cannot lower this op for sizes that differ: compile for fixed sizes along this axis}}
  %y = tensor.cast %x : tensor<?x?x8xf32> to tensor<1x?x8xf32>
  return %y : tensor<1x?x8xf32>
}
