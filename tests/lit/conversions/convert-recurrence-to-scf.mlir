// RUN: retrograd-opt %s --split-input-file -p 'convert-recurrence-to-scf' | FileCheck %s

// The products of all gates are one op a step, all else is another; what all steps give is inserted into carried tensors.
// CHECK-LABEL: func.func @forward(
// CHECK: %[[W:.*]] = linalg.transpose ins(%{{.*}} : tensor<4x3x3xf32>)
// CHECK: %[[R:.*]]:5 = scf.for %{{.*}} = %{{.*}} to %{{.*}} step %{{.*}} iter_args(%[[H:[a-z0-9]+]] = %{{[a-z0-9]+}}, %[[C:[a-z0-9]+]] = %{{.*}},
// CHECK: tensor.extract_slice %{{.*}} [1, 2, 12] [1, 1, 1] : tensor<5x2x12xf32> to tensor<2x12xf32>
// CHECK: linalg.generic {{.*}} ins(%[[H]], %[[W]] : tensor<2x3xf32>, tensor<4x3x3xf32>) outs(%{{.*}} : tensor<4x2x3xf32>)
// CHECK: linalg.generic {{.*}} ins({{.*}}, %[[C]] : tensor
// CHECK: math.tanh
// CHECK-COUNT-2: tensor.insert_slice {{.*}} : tensor<2x3xf32> into tensor<5x2x3xf32>
// CHECK-COUNT-4: tensor.insert_slice {{.*}} : tensor<2x3xf32> into tensor<5x4x2x3xf32>
// CHECK: scf.yield
// CHECK: torch_c.from_builtin_tensor %[[R]]#2 : tensor<5x2x3xf32>
// CHECK: torch_c.from_builtin_tensor %[[R]]#1 : tensor<2x3xf32>
func.func @forward(%g: !torch.vtensor<[5,2,12],f32>, %h: !torch.vtensor<[2,3],f32>, %c: !torch.vtensor<[2,3],f32>, %w: !torch.vtensor<[12,3],f32>) -> (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>) {
  %r:4 = torch.operator "torch.retrograd.lstm"(%g, %h, %c, %w) : (!torch.vtensor<[5,2,12],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[12,3],f32>) -> (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[5,2,3],f32>, !torch.vtensor<[5,4,2,3],f32>)
  return %r#0, %r#1 : !torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>
}

// -----

// The last step first; a step's cell state before it is the first one or that of the step before.
// CHECK-LABEL: func.func @backward(
// CHECK: tensor.concat dim(0)
// CHECK: scf.for
// CHECK: arith.subi
// CHECK: linalg.matmul ins(%{{.*}} : tensor<2x12xf32>, tensor<12x3xf32>)
// CHECK: tensor.insert_slice
func.func @backward(%y: !torch.vtensor<[5,2,3],f32>, %l: !torch.vtensor<[2,3],f32>, %c: !torch.vtensor<[2,3],f32>, %w: !torch.vtensor<[12,3],f32>, %cs: !torch.vtensor<[5,2,3],f32>, %a: !torch.vtensor<[5,4,2,3],f32>) -> !torch.vtensor<[5,2,12],f32> {
  %r:3 = torch.operator "torch.retrograd.lstm_backward"(%y, %l, %c, %w, %cs, %a) : (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[12,3],f32>, !torch.vtensor<[5,2,3],f32>, !torch.vtensor<[5,4,2,3],f32>) -> (!torch.vtensor<[5,2,12],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[2,3],f32>)
  return %r#0 : !torch.vtensor<[5,2,12],f32>
}

// -----

// The states' part of the gates has a bias of its own, in each step's product.
// CHECK-LABEL: func.func @gru(
// CHECK: %[[W:.*]] = linalg.transpose ins(%{{.*}} : tensor<3x3x3xf32>)
// CHECK: %[[B:.*]] = linalg.broadcast ins(%{{.*}} : tensor<3x3xf32>)
// CHECK: %[[R:.*]]:3 = scf.for {{.*}} iter_args(%[[H:[a-z0-9]+]] = %{{.*}},
// CHECK: linalg.generic {{.*}} ins(%[[H]], %[[W]] : tensor<2x3xf32>, tensor<3x3x3xf32>) outs(%[[B]] :
// CHECK: math.tanh
// CHECK-COUNT-4: tensor.insert_slice {{.*}} : tensor<2x3xf32> into tensor<5x4x2x3xf32>
// CHECK: scf.yield
// CHECK: torch_c.from_builtin_tensor %[[R]]#1 : tensor<5x2x3xf32>
func.func @gru(%g: !torch.vtensor<[5,2,9],f32>, %h: !torch.vtensor<[2,3],f32>, %w: !torch.vtensor<[9,3],f32>, %b: !torch.vtensor<[9],f32>) -> !torch.vtensor<[5,2,3],f32> {
  %r:2 = torch.operator "torch.retrograd.gru"(%g, %h, %w, %b) : (!torch.vtensor<[5,2,9],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[9,3],f32>, !torch.vtensor<[9],f32>) -> (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[5,4,2,3],f32>)
  return %r#0 : !torch.vtensor<[5,2,3],f32>
}

// -----

// What comes to a state by the gates is added to what comes by the update.
// CHECK-LABEL: func.func @gru_backward(
// CHECK: scf.for
// CHECK: arith.subi
// CHECK: %[[S:.*]]:5 = linalg.generic
// CHECK: linalg.matmul ins(%{{.*}} : tensor<2x9xf32>, tensor<9x3xf32>) outs(%[[S]]#0 :
// CHECK-COUNT-2: tensor.insert_slice
func.func @gru_backward(%y: !torch.vtensor<[5,2,3],f32>, %h: !torch.vtensor<[2,3],f32>, %w: !torch.vtensor<[9,3],f32>, %hs: !torch.vtensor<[5,2,3],f32>, %a: !torch.vtensor<[5,4,2,3],f32>) -> !torch.vtensor<[5,2,9],f32> {
  %r:3 = torch.operator "torch.retrograd.gru_backward"(%y, %h, %w, %hs, %a) : (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[9,3],f32>, !torch.vtensor<[5,2,3],f32>, !torch.vtensor<[5,4,2,3],f32>) -> (!torch.vtensor<[5,2,9],f32>, !torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>)
  return %r#0 : !torch.vtensor<[5,2,9],f32>
}

// -----

// CHECK-LABEL: func.func @rnn(
// CHECK: %[[R:.*]]:2 = scf.for
// CHECK: arith.maximumf
// CHECK: torch_c.from_builtin_tensor %[[R]]#1 : tensor<5x2x3xf32>
func.func @rnn(%s: !torch.vtensor<[5,2,3],f32>, %h: !torch.vtensor<[2,3],f32>, %w: !torch.vtensor<[3,3],f32>) -> !torch.vtensor<[5,2,3],f32> {
  %r = torch.operator "torch.retrograd.rnn_relu"(%s, %h, %w) : (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[3,3],f32>) -> !torch.vtensor<[5,2,3],f32>
  return %r : !torch.vtensor<[5,2,3],f32>
}

// -----

// CHECK-LABEL: func.func @rnn_backward(
// CHECK: scf.for
// CHECK: arith.subi
// CHECK: arith.subf
// CHECK: linalg.matmul ins(%{{.*}} : tensor<2x3xf32>, tensor<3x3xf32>)
func.func @rnn_backward(%y: !torch.vtensor<[5,2,3],f32>, %w: !torch.vtensor<[3,3],f32>, %hs: !torch.vtensor<[5,2,3],f32>) -> !torch.vtensor<[2,3],f32> {
  %r:2 = torch.operator "torch.retrograd.rnn_tanh_backward"(%y, %w, %hs) : (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[3,3],f32>, !torch.vtensor<[5,2,3],f32>) -> (!torch.vtensor<[5,2,3],f32>, !torch.vtensor<[2,3],f32>)
  return %r#1 : !torch.vtensor<[2,3],f32>
}
