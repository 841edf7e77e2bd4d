// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect --verify-diagnostics -p 'bwd-combine-scatters'

// expected-error @below {{bwd-combine-scatters: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}

// -----

func.func @two_operands(%x: tensor<5x1x4xf32>, %rows: tensor<5x1xi64>) -> tensor<9x4xf32> {
  // expected-error @below {{bwd-combine-scatters: 'tm_tensor.scatter' op: a scatter of fewer than three operands; give updates, places and tensor}}
  %0 = "tm_tensor.scatter"(%x, %rows) ({
  ^bb0(%new: f32, %old: f32):
    "tm_tensor.yield"(%new) : (f32) -> ()
  }) {unique_indices = false} : (tensor<5x1x4xf32>, tensor<5x1xi64>) -> tensor<9x4xf32>
  return %0 : tensor<9x4xf32>
}
