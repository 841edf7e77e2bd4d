// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-arguments' | FileCheck %s

// Each tensor argument is used once more, after all else; other arguments are left alone.
// CHECK-LABEL: func.func @arguments(
// CHECK-SAME: %[[X:.*]]: tensor<4xf32>, %[[N:.*]]: index, %[[Y:.*]]: tensor<?xi64>)
// CHECK-NEXT: %{{.*}} = "util.optimization_barrier"(%[[X]]) : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: %{{.*}} = "util.optimization_barrier"(%[[Y]]) : (tensor<?xi64>) -> tensor<?xi64>
// CHECK-NEXT: return %[[N]]
func.func @arguments(%x: tensor<4xf32>, %n: index, %y: tensor<?xi64>) -> index {
  return %n : index
}

// -----

// An update that reads a view of its own destination reads a copy of it.
// CHECK-LABEL: func.func @insert_own_slice(
// CHECK-SAME: %[[X:.*]]: tensor<4xf32>)
// CHECK-NEXT: %[[PART:.*]] = tensor.extract_slice %[[X]][0] [2] [1]
// CHECK-NEXT: %[[COPY:.*]] = "util.optimization_barrier"(%[[PART]]) : (tensor<2xf32>) -> tensor<2xf32>
// CHECK-NEXT: %[[R:.*]] = tensor.insert_slice %[[COPY]] into %[[X]][2] [2] [1]
// CHECK-NEXT: "util.optimization_barrier"(%[[X]])
// CHECK-NEXT: return %[[R]]
func.func @insert_own_slice(%x: tensor<4xf32>) -> tensor<4xf32> {
  %part = tensor.extract_slice %x[0] [2] [1] : tensor<4xf32> to tensor<2xf32>
  %r = tensor.insert_slice %part into %x[2] [2] [1] : tensor<2xf32> into tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

// What only moves axes of size 1 is a view for IREE.
// CHECK-LABEL: func.func @insert_own_slice_moved(
// CHECK-SAME: %[[X:.*]]: tensor<4x1xf32>)
// CHECK: %[[MOVED:.*]] = linalg.transpose ins(%{{[a-z_0-9]+}} : tensor<1x2xf32>)
// CHECK-NEXT: %[[COPY:.*]] = "util.optimization_barrier"(%[[MOVED]]) : (tensor<2x1xf32>) -> tensor<2x1xf32>
// CHECK-NEXT: tensor.insert_slice %[[COPY]] into %[[X]][2, 0] [2, 1] [1, 1]
func.func @insert_own_slice_moved(%x: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %part = tensor.extract_slice %x[0, 0] [2, 1] [1, 1] : tensor<4x1xf32> to tensor<2x1xf32>
  %empty = tensor.empty() : tensor<1x2xf32>
  %row = linalg.transpose ins(%part : tensor<2x1xf32>) outs(%empty : tensor<1x2xf32>) permutation = [1, 0]
  %none = tensor.empty() : tensor<2x1xf32>
  %column = linalg.transpose ins(%row : tensor<1x2xf32>) outs(%none : tensor<2x1xf32>) permutation = [1, 0]
  %r = tensor.insert_slice %column into %x[2, 0] [2, 1] [1, 1] : tensor<2x1xf32> into tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

// Of something else it reads that itself.
// CHECK-LABEL: func.func @insert_other_slice(
// CHECK-SAME: %[[X:.*]]: tensor<4xf32>, %[[Y:.*]]: tensor<4xf32>)
// CHECK-NEXT: %[[PART:.*]] = tensor.extract_slice %[[Y]][0] [2] [1]
// CHECK-NEXT: tensor.insert_slice %[[PART]] into %[[X]][2] [2] [1]
func.func @insert_other_slice(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %part = tensor.extract_slice %y[0] [2] [1] : tensor<4xf32> to tensor<2xf32>
  %r = tensor.insert_slice %part into %x[2] [2] [1] : tensor<2xf32> into tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

// Both are views of one tensor, each through views of its own, and neither is an argument.
// CHECK-LABEL: func.func @scatter_through_views(
// CHECK: %[[BASE:.*]] = math.exp
// CHECK: %[[UPDATES:.*]] = tensor.extract_slice
// CHECK: %[[COPY:.*]] = "util.optimization_barrier"(%[[UPDATES]])
// CHECK-NEXT: "tm_tensor.scatter"(%[[COPY]], %{{.*}}, %{{.*}}) ({
func.func @scatter_through_views(%x: tensor<2x2xf32>, %places: tensor<2x1xi32>) -> tensor<4xf32> {
  %base = math.exp %x : tensor<2x2xf32>
  %flat = tensor.collapse_shape %base [[0, 1]] : tensor<2x2xf32> into tensor<4xf32>
  %loose = tensor.cast %base : tensor<2x2xf32> to tensor<?x2xf32>
  %updates = tensor.extract_slice %loose[0, 0] [1, 2] [1, 1] : tensor<?x2xf32> to tensor<2xf32>
  %r = "tm_tensor.scatter"(%updates, %places, %flat) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2xf32>, tensor<2x1xi32>, tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// Ops in a body that update nothing are left alone, and so are reads of what is not updated.
// CHECK-LABEL: func.func @generic(
// CHECK-SAME: %[[X:.*]]: tensor<4xf32>)
// CHECK: %[[COPY:.*]] = "util.optimization_barrier"(%[[X]])
// CHECK-NEXT: %[[R:.*]] = linalg.generic {{.*}} ins(%[[COPY]] : tensor<4xf32>) outs(%[[X]] : tensor<4xf32>) {
// CHECK-NOT: util.optimization_barrier
// CHECK: linalg.yield
// CHECK: %[[S:.*]] = linalg.generic {{.*}} ins(%[[X]] : tensor<4xf32>) outs(%[[R]] : tensor<4xf32>) {
// CHECK: linalg.yield
// CHECK-NEXT: } -> tensor<4xf32>
// CHECK-NEXT: "util.optimization_barrier"(%[[X]])
// CHECK-NEXT: return %[[S]]
func.func @generic(%x: tensor<4xf32>) -> tensor<4xf32> {
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%x : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %i = linalg.index 0 : index
    %n = arith.index_cast %i : index to i32
    %f = arith.sitofp %n : i32 to f32
    linalg.yield %f : f32
  } -> tensor<4xf32>
  %s = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%r : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %sum = arith.addf %in, %out : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  return %s : tensor<4xf32>
}

// -----

// IREE reads no sizes off a barrier: what is taken from behind one has them from in front of it.
// CHECK-LABEL: func.func @open(
// CHECK-SAME: %[[X:.*]]: tensor<?xf32>, %[[D:.*]]: tensor<?xf32>)
// CHECK: %[[PART:.*]] = tensor.extract_slice %[[D]]
// CHECK: %[[N:.*]] = tensor.dim %[[PART]], %{{.*}} : tensor<?xf32>
// CHECK: %[[B:.*]] = "util.optimization_barrier"(%[[PART]])
// CHECK: %[[COPY:.*]] = "flow.tensor.tie_shape"(%[[B]], %[[N]]) : (tensor<?xf32>, index) -> tensor<?xf32>
// CHECK: tensor.insert_slice %[[COPY]] into %[[D]]
func.func @open(%x: tensor<?xf32>, %d: tensor<?xf32>) -> tensor<?xf32> {
  %zero = arith.constant 0 : index
  %n = tensor.dim %x, %zero : tensor<?xf32>
  %part = tensor.extract_slice %d[0] [%n] [1] : tensor<?xf32> to tensor<?xf32>
  %r = tensor.insert_slice %part into %d[1] [%n] [1] : tensor<?xf32> into tensor<?xf32>
  return %r : tensor<?xf32>
}
