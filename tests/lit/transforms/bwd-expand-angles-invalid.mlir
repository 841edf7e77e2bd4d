// RUN: retrograd-opt %s --verify-diagnostics -p 'bwd-expand-angles'

// expected-error @below {{bwd-expand-angles: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}
