// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect --verify-diagnostics -p 'bwd-mark-products'

// expected-error @below {{bwd-mark-products: 'func.func' op: a function with products that repay no packing, and no barrier to mark; run bwd-isolate-arguments first}}
func.func @nothing_to_mark(%a: tensor<4x4xf32>, %y: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = linalg.matmul ins(%a, %a : tensor<4x4xf32>, tensor<4x4xf32>) outs(%y : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}

func.func @large(%a: tensor<512x512xf32>) -> tensor<512x512xf32> {
  %0 = linalg.matmul ins(%a, %a : tensor<512x512xf32>, tensor<512x512xf32>) outs(%a : tensor<512x512xf32>)
      -> tensor<512x512xf32>
  return %0 : tensor<512x512xf32>
}
