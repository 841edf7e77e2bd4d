// RUN: retrograd-opt %s --split-input-file --verify-diagnostics --allow-unregistered-dialect -p 'bwd-isolate-loops'

func.func @read(%x: tensor<2xf32>) -> tensor<4x2xf32> {
  %begin = arith.constant 0 : index
  %step = arith.constant 1 : index
  %end = arith.constant 4 : index
  %e = tensor.empty() : tensor<4x2xf32>
  // expected-error @below {{bwd-isolate-loops: 'scf.for' op: tensor<4x2xf32> that a loop starts with is empty, and is not only inserted into; start with values, such as zeros}}
  %r = scf.for %t = %begin to %end step %step iter_args(%a = %e) -> (tensor<4x2xf32>) {
    %p = tensor.extract_slice %a[0, 0] [1, 2] [1, 1] : tensor<4x2xf32> to tensor<2xf32>
    %c = tensor.insert_slice %p into %a[%t, 0] [1, 2] [1, 1] : tensor<2xf32> into tensor<4x2xf32>
    scf.yield %c : tensor<4x2xf32>
  }
  return %r : tensor<4x2xf32>
}

// -----

// expected-error @below {{bwd-isolate-loops: the module has a stream.topology already; run the pass once}}
module attributes {stream.topology = "known"} {
  func.func @again(%x: tensor<2xf32>) -> tensor<2xf32> {
    %begin = arith.constant 0 : index
    %step = arith.constant 1 : index
    %end = arith.constant 4 : index
    %r = scf.for %t = %begin to %end step %step iter_args(%a = %x) -> (tensor<2xf32>) {
      scf.yield %a : tensor<2xf32>
    }
    return %r : tensor<2xf32>
  }
}
