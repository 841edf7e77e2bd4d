// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-stack-joins'

// expected-error @below {{bwd-stack-joins: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}
