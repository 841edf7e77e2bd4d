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

// -----

func.func @attention(%q: tensor<1x2x3x4xf32>, %none: tensor<f32>) -> tensor<1x2x3x4xf32> {
  %0:2 = "bwd.attention"(%q, %q, %q, %none) {causal = true, scale = 1.0 : f32}
      : (tensor<1x2x3x4xf32>, tensor<1x2x3x4xf32>, tensor<1x2x3x4xf32>, tensor<f32>) -> (tensor<1x2x3x4xf32>, tensor<1x2x3xf32>)
  // expected-error @below {{bwd-verify-legality: 'bwd.save' op: bwd.save is not legal at level 'linalg'; torch-mlir does not lower this op}}
  "bwd.save"(%0#1) {name = "lse"} : (tensor<1x2x3xf32>) -> ()
  return %0#0 : tensor<1x2x3x4xf32>
}

// -----

func.func @cast(%x: tensor<2xf32>) -> i32 {
  // expected-error @below {{bwd-verify-legality: 'builtin.unrealized_conversion_cast' op: builtin.unrealized_conversion_cast is not legal at level 'linalg'}}
  %0 = builtin.unrealized_conversion_cast %x : tensor<2xf32> to i32
  return %0 : i32
}
