// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect --verify-diagnostics -p 'bwd-isolate-scatters'

func.func @nothing_to_scatter(%table: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{bwd-isolate-scatters: 'tm_tensor.scatter' op: a scatter of fewer than three operands; give updates, places and tensor}}
  %r = "tm_tensor.scatter"(%table) : (tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}
