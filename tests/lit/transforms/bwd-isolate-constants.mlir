// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-constants' | FileCheck %s

#id = affine_map<(d0) -> (d0)>
#none = affine_map<(d0) -> ()>

// One number all over is a fill, however it was spread.
// CHECK-LABEL: func.func @zeros(
// CHECK: %[[ZERO:.*]] = arith.constant 0.000000e+00 : f32
// CHECK: %[[Z:.*]] = linalg.fill ins(%[[ZERO]] : f32) outs(%{{.*}} : tensor<?xf32>) -> tensor<?xf32>
// CHECK-NOT: util.optimization_barrier
// CHECK: tensor.insert_slice %{{.*}} into %[[Z]][0]
// CHECK: tensor.insert_slice %{{.*}} into %[[Z]][1]
func.func @zeros(%x: tensor<2xf32>, %n: index) -> (tensor<?xf32>, tensor<?xf32>) {
  %zero = arith.constant dense<0.0> : tensor<f32>
  %empty = tensor.empty(%n) : tensor<?xf32>
  %z = linalg.generic {indexing_maps = [#none, #id], iterator_types = ["parallel"]}
      ins(%zero : tensor<f32>) outs(%empty : tensor<?xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<?xf32>
  %r = tensor.insert_slice %x into %z[0] [2] [1] : tensor<2xf32> into tensor<?xf32>
  %s = tensor.insert_slice %x into %z[1] [2] [1] : tensor<2xf32> into tensor<?xf32>
  return %r, %s : tensor<?xf32>, tensor<?xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// Numbers that differ are one tensor behind a barrier, with their size; sorts write into it. The zero added is its own.
// CHECK-LABEL: func.func @places(
// CHECK: %[[OWN:.*]] = "util.optimization_barrier"(%{{.*}}) : (i64) -> i64
// CHECK: %[[P:.*]] = linalg.generic
// CHECK: %[[SUM:.*]] = arith.addi %{{.*}}, %[[OWN]] : i64
// CHECK: linalg.yield %[[SUM]] : i64
// CHECK: %[[N:.*]] = tensor.dim %[[P]]
// CHECK: %[[B:.*]] = "util.optimization_barrier"(%[[P]]) : (tensor<?xi64>) -> tensor<?xi64>
// CHECK: %[[T:.*]] = "flow.tensor.tie_shape"(%[[B]], %[[N]])
// CHECK: "tm_tensor.sort"(%{{.*}}, %[[T]])
// CHECK: "tm_tensor.sort"(%{{.*}}, %[[T]])
func.func @places(%x: tensor<?xf32>, %y: tensor<?xf32>, %n: index) -> (tensor<?xi64>, tensor<?xi64>) {
  %empty = tensor.empty(%n) : tensor<?xi64>
  %p = linalg.generic {indexing_maps = [#id], iterator_types = ["parallel"]} outs(%empty : tensor<?xi64>) {
  ^bb0(%out: i64):
    %i = linalg.index 0 : index
    %j = arith.index_cast %i : index to i64
    linalg.yield %j : i64
  } -> tensor<?xi64>
  %a:2 = "tm_tensor.sort"(%x, %p) ({
  ^bb0(%l: f32, %r: f32, %k: i64, %m: i64):
    %c = arith.cmpf ole, %l, %r : f32
    "tm_tensor.yield"(%c) : (i1) -> ()
  }) {dimension = 0 : i64, operandSegmentSizes = array<i32: 0, 2>} : (tensor<?xf32>, tensor<?xi64>) -> (tensor<?xf32>, tensor<?xi64>)
  %b:2 = "tm_tensor.sort"(%y, %p) ({
  ^bb0(%l: f32, %r: f32, %k: i64, %m: i64):
    %c = arith.cmpf ole, %l, %r : f32
    "tm_tensor.yield"(%c) : (i1) -> ()
  }) {dimension = 0 : i64, operandSegmentSizes = array<i32: 0, 2>} : (tensor<?xf32>, tensor<?xi64>) -> (tensor<?xf32>, tensor<?xi64>)
  return %a#1, %b#1 : tensor<?xi64>, tensor<?xi64>
}

// -----

#id = affine_map<(d0) -> (d0)>

// What is computed from a tensor is copied by IREE as it should be, and what nothing writes into need not be.
// CHECK-LABEL: func.func @computed(
// CHECK-NOT: util.optimization_barrier
// CHECK: return
func.func @computed(%x: tensor<2xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %empty = tensor.empty() : tensor<4xf32>
  %z = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%y : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %n = arith.negf %in : f32
    linalg.yield %n : f32
  } -> tensor<4xf32>
  %places = linalg.generic {indexing_maps = [#id], iterator_types = ["parallel"]} outs(%empty : tensor<4xf32>) {
  ^bb0(%out: f32):
    %i = linalg.index 0 : index
    %j = arith.index_cast %i : index to i64
    %f = arith.sitofp %j : i64 to f32
    linalg.yield %f : f32
  } -> tensor<4xf32>
  %r = tensor.insert_slice %x into %z[0] [2] [1] : tensor<2xf32> into tensor<4xf32>
  return %r, %places : tensor<4xf32>, tensor<4xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// To a float the negative zero is added: with it, -0.0 stays what it is.
// CHECK-LABEL: func.func @ramp(
// CHECK: arith.constant -0.000000e+00 : f32
// CHECK: %[[OWN:.*]] = "util.optimization_barrier"(%{{.*}}) : (f32) -> f32
// CHECK: arith.addf %{{.*}}, %[[OWN]] : f32
// CHECK: "util.optimization_barrier"(%{{.*}}) : (tensor<8xf32>) -> tensor<8xf32>
func.func @ramp(%x: tensor<2xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %empty = tensor.empty() : tensor<8xf32>
  %p = linalg.generic {indexing_maps = [#id], iterator_types = ["parallel"]} outs(%empty : tensor<8xf32>) {
  ^bb0(%out: f32):
    %i = linalg.index 0 : index
    %k = arith.index_cast %i : index to i64
    %f = arith.sitofp %k : i64 to f32
    linalg.yield %f : f32
  } -> tensor<8xf32>
  %r = tensor.insert_slice %x into %p[0] [2] [1] : tensor<2xf32> into tensor<8xf32>
  return %r, %p : tensor<8xf32>, tensor<8xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>
#both = affine_map<(d0, d1) -> (d0, d1)>
#last = affine_map<(d0, d1) -> (d1)>
#none = affine_map<(d0, d1) -> ()>
#first = affine_map<(d0, d1) -> (d0)>

// Numbers that are spread along an axis and summed with all else are one tensor in memory.
// CHECK-LABEL: func.func @expected_place(
// CHECK: %[[P:.*]] = linalg.generic
// CHECK: arith.index_cast
// CHECK: %[[B:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[P]])
// CHECK: linalg.generic {{.*}} ins(%{{.*}}, %[[B]] :
func.func @expected_place(%x: tensor<4x8xf32>, %zero: tensor<f32>) -> tensor<f32> {
  %ints = tensor.empty() : tensor<8xi64>
  %p = linalg.generic {indexing_maps = [#id], iterator_types = ["parallel"]} outs(%ints : tensor<8xi64>) {
  ^bb0(%out: i64):
    %i = linalg.index 0 : index
    %j = arith.index_cast %i : index to i64
    linalg.yield %j : i64
  } -> tensor<8xi64>
  %floats = tensor.empty() : tensor<4x8xf32>
  %m = linalg.generic {indexing_maps = [#both, #last, #both], iterator_types = ["parallel", "parallel"]}
      ins(%x, %p : tensor<4x8xf32>, tensor<8xi64>) outs(%floats : tensor<4x8xf32>) {
  ^bb0(%a: f32, %b: i64, %out: f32):
    %c = arith.sitofp %b : i64 to f32
    %d = arith.mulf %a, %c : f32
    linalg.yield %d : f32
  } -> tensor<4x8xf32>
  %s = linalg.generic {indexing_maps = [#both, #none], iterator_types = ["reduction", "reduction"]}
      ins(%m : tensor<4x8xf32>) outs(%zero : tensor<f32>) {
  ^bb0(%a: f32, %out: f32):
    %c = arith.addf %a, %out : f32
    linalg.yield %c : f32
  } -> tensor<f32>
  return %s : tensor<f32>
}

// Of sums along one axis nothing is known to go wrong.
// CHECK-LABEL: func.func @expected_places(
// CHECK-NOT: compute_barrier
func.func @expected_places(%x: tensor<4x8xf32>, %zero: tensor<4xf32>) -> tensor<4xf32> {
  %ints = tensor.empty() : tensor<8xi64>
  %p = linalg.generic {indexing_maps = [#id], iterator_types = ["parallel"]} outs(%ints : tensor<8xi64>) {
  ^bb0(%out: i64):
    %i = linalg.index 0 : index
    %j = arith.index_cast %i : index to i64
    linalg.yield %j : i64
  } -> tensor<8xi64>
  %floats = tensor.empty() : tensor<4x8xf32>
  %m = linalg.generic {indexing_maps = [#both, #last, #both], iterator_types = ["parallel", "parallel"]}
      ins(%x, %p : tensor<4x8xf32>, tensor<8xi64>) outs(%floats : tensor<4x8xf32>) {
  ^bb0(%a: f32, %b: i64, %out: f32):
    %c = arith.sitofp %b : i64 to f32
    %d = arith.mulf %a, %c : f32
    linalg.yield %d : f32
  } -> tensor<4x8xf32>
  %s = linalg.generic {indexing_maps = [#both, #first], iterator_types = ["parallel", "reduction"]}
      ins(%m : tensor<4x8xf32>) outs(%zero : tensor<4xf32>) {
  ^bb0(%a: f32, %out: f32):
    %c = arith.addf %a, %out : f32
    linalg.yield %c : f32
  } -> tensor<4xf32>
  return %s : tensor<4xf32>
}

// A constant that is inserted into another is no kernel: IREE would compute it once, into memory that is read-only, and
// not see through the barrier that it is a constant. The one that is inserted comes from behind a barrier.
// CHECK-LABEL: func.func @inserted_constants(
// CHECK-SAME: %[[X:.*]]: tensor<2x1xf32>)
// CHECK-DAG: %[[PART:.*]] = arith.constant dense<5.000000e-01>
// CHECK-DAG: %[[WHOLE:.*]] = arith.constant dense<-3.000000e+00>
// CHECK: %[[HIDDEN:.*]] = "util.optimization_barrier"(%[[PART]])
// CHECK: %[[ONE:.*]] = tensor.insert_slice %[[HIDDEN]] into %[[WHOLE]]
// CHECK: %[[OWN:.*]] = "util.optimization_barrier"(%[[ONE]])
// CHECK: tensor.insert_slice %[[X]] into %[[OWN]]
func.func @inserted_constants(%x: tensor<2x1xf32>) -> tensor<4x1xf32> {
  %part = arith.constant dense<5.000000e-01> : tensor<2x1xf32>
  %whole = arith.constant dense<-3.000000e+00> : tensor<4x1xf32>
  %one = tensor.insert_slice %part into %whole[0, 0] [2, 1] [1, 1] : tensor<2x1xf32> into tensor<4x1xf32>
  %two = tensor.insert_slice %x into %one[2, 0] [2, 1] [1, 1] : tensor<2x1xf32> into tensor<4x1xf32>
  return %two : tensor<4x1xf32>
}
