// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect --verify-diagnostics -p 'bwd-bound-indices'

// expected-error @below {{bwd-bound-indices: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}

// -----

func.func @no_tensor(%places: tensor<4x1xi64>, %updates: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{bwd-bound-indices: 'tm_tensor.scatter' op: a scatter of fewer than three operands; give updates, places and tensor}}
  %0 = "tm_tensor.scatter"(%updates, %places) {dimension_map = array<i64: 0>} : (tensor<4xf32>, tensor<4x1xi64>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
