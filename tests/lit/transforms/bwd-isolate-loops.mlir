// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-loops' | FileCheck %s

// Two tensors that are empty at first have storage of their own each.
// CHECK: stream.topology = #hal.device.topology<
// CHECK-LABEL: func.func @two(
// CHECK: %[[N:.*]] = "util.optimization_barrier"(%{{.*}}) : (index) -> index
// CHECK: %[[A:.*]] = tensor.empty(%[[N]]) : tensor<?x2xf32>
// CHECK: %[[M:.*]] = "util.optimization_barrier"(%{{.*}}) : (index) -> index
// CHECK: %[[B:.*]] = tensor.empty(%[[M]]) : tensor<?x2xf32>
// CHECK: scf.for {{.*}} iter_args(%{{.*}} = %{{.*}}, %{{.*}} = %[[A]], %{{.*}} = %[[B]])
// CHECK-COUNT-2: tensor.cast %{{.*}} : tensor<?x2xf32> to tensor<4x2xf32>
func.func @two(%x: tensor<2xf32>) -> (tensor<4x2xf32>, tensor<4x2xf32>) {
  %begin = arith.constant 0 : index
  %step = arith.constant 1 : index
  %end = arith.constant 4 : index
  %e = tensor.empty() : tensor<4x2xf32>
  %r:3 = scf.for %t = %begin to %end step %step iter_args(%h = %x, %a = %e, %b = %e) -> (tensor<2xf32>, tensor<4x2xf32>, tensor<4x2xf32>) {
    %c = tensor.insert_slice %h into %a[%t, 0] [1, 2] [1, 1] : tensor<2xf32> into tensor<4x2xf32>
    %d = tensor.insert_slice %x into %b[%t, 0] [1, 2] [1, 1] : tensor<2xf32> into tensor<4x2xf32>
    scf.yield %x, %c, %d : tensor<2xf32>, tensor<4x2xf32>, tensor<4x2xf32>
  }
  return %r#1, %r#2 : tensor<4x2xf32>, tensor<4x2xf32>
}

// -----

// Without a loop there is nothing to say of the device.
// CHECK-LABEL: func.func @none(
// CHECK-NOT: optimization_barrier
func.func @none(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
