// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-pad-products'

// expected-error @below {{bwd-pad-products: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}

// -----

#x = affine_map<(d0, d1, d2, d3) -> (d0, d3, d1)>
#y = affine_map<(d0, d1, d2, d3) -> (d0, d3, d2)>
#r = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2)>
func.func @transposed(
    %x: tensor<3x10x24xbf16>, %y: tensor<3x10x12xbf16>, %into: tensor<3x24x12xf32>) -> tensor<3x24x12xf32> {
  // expected-error @below {{bwd-pad-products: 'linalg.batch_matmul' op: operands read transposed; run it before maps are folded}}
  %r = linalg.batch_matmul indexing_maps = [#x, #y, #r] ins(%x, %y : tensor<3x10x24xbf16>, tensor<3x10x12xbf16>)
      outs(%into : tensor<3x24x12xf32>) -> tensor<3x24x12xf32>
  return %r : tensor<3x24x12xf32>
}
