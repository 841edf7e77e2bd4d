// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-bound-indices' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// Out of range, the first element is read and NaN given. What loop counters alone lead to is in range.
// CHECK-LABEL: func.func @gather(
// CHECK: %[[AT:.*]] = arith.index_cast
// CHECK: %[[FITS:.*]] = arith.cmpi ult, %[[AT]], %{{.*}} : index
// CHECK: %[[SAFE:.*]] = arith.select %[[FITS]], %[[AT]], %{{.*}} : index
// CHECK: %[[NAN:.*]] = arith.constant 0x7FC00000 : f32
// CHECK: %[[READ:.*]] = tensor.extract %arg1[%[[SAFE]], %[[COLUMN:.*]]] : tensor<9x4xf32>
// CHECK: %[[VALUE:.*]] = arith.select %[[FITS]], %[[READ]], %[[NAN]] : f32
// CHECK: %[[OTHER:.*]] = tensor.extract %arg1[%{{.*}}, %[[COLUMN]]] : tensor<9x4xf32>
// CHECK-NOT: arith.select
// CHECK: arith.addf %[[VALUE]], %[[OTHER]]
func.func @gather(%places: tensor<4xi64>, %table: tensor<9x4xf32>) -> tensor<4xf32> {
  %three = arith.constant 3 : index
  %empty = tensor.empty() : tensor<4xf32>
  %first = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: i64, %out: f32):
    %at = arith.index_cast %in : i64 to index
    %counter = linalg.index 0 : index
    %flipped = arith.subi %three, %counter : index
    %value = tensor.extract %table[%at, %flipped] : tensor<9x4xf32>
    %other = tensor.extract %table[%counter, %flipped] : tensor<9x4xf32>
    %sum = arith.addf %value, %other : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  return %first : tensor<4xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// The size of an open axis is read; both indices have to fit. Of integers the least one is the mark.
// CHECK-LABEL: func.func @open(
// CHECK: %[[SIZE:.*]] = tensor.dim %arg1,
// CHECK: linalg.generic
// CHECK: %[[ONE:.*]] = arith.cmpi ult, %{{.*}}, %[[SIZE]] : index
// CHECK: %[[TWO:.*]] = arith.cmpi ult
// CHECK: %[[BOTH:.*]] = arith.andi %[[ONE]], %[[TWO]] : i1
// CHECK: %[[LEAST:.*]] = arith.constant -32768 : i16
// CHECK: arith.select %[[BOTH]], %{{.*}}, %[[LEAST]] : i16
func.func @open(%places: tensor<4xi64>, %table: tensor<?x5xi16>) -> tensor<4xi16> {
  %empty = tensor.empty() : tensor<4xi16>
  %first = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4xi64>) outs(%empty : tensor<4xi16>) {
  ^bb0(%in: i64, %out: i16):
    %at = arith.index_cast %in : i64 to index
    %value = tensor.extract %table[%at, %at] : tensor<?x5xi16>
    linalg.yield %value : i16
  } -> tensor<4xi16>
  return %first : tensor<4xi16>
}

// -----

#id = affine_map<(d0, d1) -> (d0, d1)>

// Computed places: zero for what is out of range, and an update of NaN. The second column has a bound of its own.
// CHECK-LABEL: func.func @scatter(
// CHECK: %[[PLACES:.*]] = linalg.generic
// CHECK: arith.muli
// CHECK: %[[SAFE:.*]] = linalg.generic
// CHECK: linalg.index 1
// CHECK: arith.cmpi ult
// CHECK: %[[MARKED:.*]] = linalg.generic {{.*}} ins(%arg2, %[[PLACES]], %[[PLACES]] : tensor<3x4xf32>, tensor<3x2xi64>, tensor<3x2xi64>)
// CHECK: arith.andi
// CHECK: "tm_tensor.scatter"(%[[MARKED]], %[[SAFE]], %arg0)
func.func @scatter(%x: tensor<9x7x4xf32>, %rows: tensor<3x2xi64>, %values: tensor<3x4xf32>) -> tensor<9x7x4xf32> {
  %empty = tensor.empty() : tensor<3x2xi64>
  %places = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%rows : tensor<3x2xi64>) outs(%empty : tensor<3x2xi64>) {
  ^bb0(%in: i64, %out: i64):
    %twice = arith.muli %in, %in : i64
    linalg.yield %twice : i64
  } -> tensor<3x2xi64>
  %0 = "tm_tensor.scatter"(%values, %places, %x) ({
  ^bb0(%new: f32, %old: f32):
    "tm_tensor.yield"(%new) : (f32) -> ()
  }) {dimension_map = array<i64: 0, 1>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = true}
    : (tensor<3x4xf32>, tensor<3x2xi64>, tensor<9x7x4xf32>) -> tensor<9x7x4xf32>
  return %0 : tensor<9x7x4xf32>
}

// -----

// Places that are an argument's were looked at before: updates stay as they are.
// CHECK-LABEL: func.func @argument(
// CHECK: %[[SAFE:.*]] = linalg.generic
// CHECK: "tm_tensor.scatter"(%arg2, %[[SAFE]], %arg0)
func.func @argument(%x: tensor<?x4xf32>, %rows: tensor<?xi64>, %values: tensor<?x1x4xf32>, %n: index) -> tensor<?x4xf32> {
  %places = tensor.expand_shape %rows [[0, 1]] output_shape [%n, 1] : tensor<?xi64> into tensor<?x1xi64>
  %0 = "tm_tensor.scatter"(%values, %places, %x) ({
  ^bb0(%new: f32, %old: f32):
    "tm_tensor.yield"(%new) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, operandSegmentSizes = array<i32: 2, 1>, unique_indices = true}
    : (tensor<?x1x4xf32>, tensor<?x1xi64>, tensor<?x4xf32>) -> tensor<?x4xf32>
  return %0 : tensor<?x4xf32>
}
