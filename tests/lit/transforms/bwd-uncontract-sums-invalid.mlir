// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect --verify-diagnostics -p 'bwd-uncontract-sums'

// expected-error @below {{bwd-uncontract-sums: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}
