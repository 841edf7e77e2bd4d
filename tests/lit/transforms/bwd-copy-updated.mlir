// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-copy-updated' | FileCheck %s

#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
#first = affine_map<(d0, d1) -> (0, d1)>

// The whole tensor is read, too: what is updated is a copy, put together from two pieces.
// CHECK-LABEL: func.func @read_as_it_was(
// CHECK: %[[E:.*]] = math.exp
// CHECK-DAG: %[[A:.*]] = tensor.extract_slice %[[E]][0, 0] [1, 6] [1, 1]
// CHECK-DAG: %[[B:.*]] = tensor.extract_slice %[[E]][1, 0] [3, 6] [1, 1]
// CHECK: %[[COPY:.*]] = tensor.concat dim(0) %[[A]], %[[B]] : (tensor<1x6xf32>, tensor<3x6xf32>) -> tensor<4x6xf32>
// CHECK: tensor.insert_slice %{{.*}} into %[[COPY]][1, 0] [1, 6] [1, 1]
// CHECK: math.absf %[[E]]
func.func @read_as_it_was(%x: tensor<4x6xf32>, %y: tensor<1x6xf32>) -> (tensor<4x6xf32>, tensor<4x6xf32>) {
  %e = math.exp %x : tensor<4x6xf32>
  %new = tensor.insert_slice %y into %e[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  %a = math.absf %e : tensor<4x6xf32>
  return %new, %a : tensor<4x6xf32>, tensor<4x6xf32>
}

// -----

// Nothing else reads it, the result of one update the next one's tensor: both in place. So are tensors made to be
// filled, and arguments, of which bwd-isolate-arguments sees to it that they stay.
// CHECK-LABEL: func.func @alone(
// CHECK-NOT: tensor.concat
// CHECK: return
func.func @alone(%x: tensor<4x6xf32>, %y: tensor<1x6xf32>, %z: tensor<4x6xf32>)
    -> (tensor<4x6xf32>, tensor<4x6xf32>, tensor<4x6xf32>, tensor<4x6xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = math.exp %x : tensor<4x6xf32>
  %one = tensor.insert_slice %y into %e[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  %two = tensor.insert_slice %y into %one[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  %empty = tensor.empty() : tensor<4x6xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x6xf32>) -> tensor<4x6xf32>
  %p = tensor.insert_slice %y into %fill[0, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  %q = tensor.insert_slice %y into %fill[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  %s = tensor.insert_slice %y into %z[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  return %two, %p, %q, %s : tensor<4x6xf32>, tensor<4x6xf32>, tensor<4x6xf32>, tensor<4x6xf32>
}

// -----

#id = affine_map<(d0, d1) -> (d0, d1)>
#first = affine_map<(d0, d1) -> (0, d1)>

// x[1] += y: each element of the slice is read where it is written, also through views and an axis of size 1.
// CHECK-LABEL: func.func @added_to(
// CHECK-NOT: tensor.concat
// CHECK: return
func.func @added_to(%x: tensor<4x6xf32>, %y: tensor<1x6xf32>) -> tensor<4x6xf32> {
  %e = math.exp %x : tensor<4x6xf32>
  %s = tensor.extract_slice %e[1, 0] [1, 6] [1, 1] : tensor<4x6xf32> to tensor<1x6xf32>
  %empty = tensor.empty() : tensor<1x6xf32>
  %sum = linalg.generic {indexing_maps = [#first, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%s, %y : tensor<1x6xf32>, tensor<1x6xf32>) outs(%empty : tensor<1x6xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %c = arith.addf %a, %b : f32
    linalg.yield %c : f32
  } -> tensor<1x6xf32>
  %flat = tensor.collapse_shape %sum [[0, 1]] : tensor<1x6xf32> into tensor<6xf32>
  %new = tensor.insert_slice %flat into %e[1, 0] [1, 6] [1, 1] : tensor<6xf32> into tensor<4x6xf32>
  return %new : tensor<4x6xf32>
}

// -----

#id = affine_map<(d0, d1) -> (d0, d1)>
#turned = affine_map<(d0, d1) -> (d1, d0)>

// The slice is read in another order than it is written in.
// CHECK-LABEL: func.func @turned(
// CHECK: tensor.concat
// CHECK: tensor.insert_slice
func.func @turned(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
  %e = math.exp %x : tensor<4x6xf32>
  %s = tensor.extract_slice %e[0, 0] [3, 3] [1, 1] : tensor<4x6xf32> to tensor<3x3xf32>
  %empty = tensor.empty() : tensor<3x3xf32>
  %t = linalg.generic {indexing_maps = [#turned, #id], iterator_types = ["parallel", "parallel"]}
      ins(%s : tensor<3x3xf32>) outs(%empty : tensor<3x3xf32>) {
  ^bb0(%a: f32, %o: f32):
    linalg.yield %a : f32
  } -> tensor<3x3xf32>
  %new = tensor.insert_slice %t into %e[0, 0] [3, 3] [1, 1] : tensor<3x3xf32> into tensor<4x6xf32>
  return %new : tensor<4x6xf32>
}

// -----

// The slice as it was goes elsewhere, too.
// CHECK-LABEL: func.func @kept(
// CHECK: tensor.concat
// CHECK: tensor.insert_slice
func.func @kept(%x: tensor<4x6xf32>, %y: tensor<1x6xf32>) -> (tensor<4x6xf32>, tensor<1x6xf32>) {
  %e = math.exp %x : tensor<4x6xf32>
  %s = tensor.extract_slice %e[1, 0] [1, 6] [1, 1] : tensor<4x6xf32> to tensor<1x6xf32>
  %new = tensor.insert_slice %y into %e[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  return %new, %s : tensor<4x6xf32>, tensor<1x6xf32>
}

// -----

// What is read lies beside the slice, as where each row of a tensor is computed from the last one.
// CHECK-LABEL: func.func @row_by_row(
// CHECK-NOT: tensor.concat
// CHECK: return
func.func @row_by_row(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
  %e = math.exp %x : tensor<4x6xf32>
  %s = tensor.extract_slice %e[0, 0] [1, 6] [1, 1] : tensor<4x6xf32> to tensor<1x6xf32>
  %t = math.sin %s : tensor<1x6xf32>
  %new = tensor.insert_slice %t into %e[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  return %new : tensor<4x6xf32>
}

// -----

// A scatter writes anywhere. A tensor is read through views of it, and by what is inside of an op.
// CHECK-LABEL: func.func @scattered(
// CHECK: %[[E:.*]] = math.exp
// CHECK: %[[FLAT:.*]] = tensor.collapse_shape %[[E]]
// CHECK: %[[COPY:.*]] = tensor.concat dim(0)
// CHECK: "tm_tensor.scatter"(%{{.*}}, %{{.*}}, %[[COPY]])
func.func @scattered(%x: tensor<1x6xf32>, %u: tensor<2xf32>, %i: tensor<2x1xi32>) -> (tensor<6xf32>, f32) {
  %zero = arith.constant 0 : index
  %e = math.exp %x : tensor<1x6xf32>
  %flat = tensor.collapse_shape %e [[0, 1]] : tensor<1x6xf32> into tensor<6xf32>
  %r = "tm_tensor.scatter"(%u, %i, %flat) ({
  ^bb0(%update: f32, %old: f32):
    "tm_tensor.yield"(%update) : (f32) -> ()
  }) : (tensor<2xf32>, tensor<2x1xi32>, tensor<6xf32>) -> tensor<6xf32>
  %v = tensor.extract %e[%zero, %zero] : tensor<1x6xf32>
  return %r, %v : tensor<6xf32>, f32
}

// -----

// Two updates of one tensor have two copies, cut in different places: as one they would be the same trouble again.
// CHECK-LABEL: func.func @twice(
// CHECK: tensor.extract_slice %{{.*}}[0, 0] [1, 6] [1, 1]
// CHECK: tensor.concat
// CHECK: tensor.insert_slice
// CHECK: tensor.extract_slice %{{.*}}[0, 0] [2, 6] [1, 1]
// CHECK: tensor.concat
// CHECK: tensor.insert_slice
func.func @twice(%x: tensor<4x6xf32>, %y: tensor<1x6xf32>) -> (tensor<4x6xf32>, tensor<4x6xf32>) {
  %e = math.exp %x : tensor<4x6xf32>
  %one = tensor.insert_slice %y into %e[1, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  %two = tensor.insert_slice %y into %e[2, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<4x6xf32>
  return %one, %two : tensor<4x6xf32>, tensor<4x6xf32>
}

// -----

// Of an open size the pieces are halves; what a slice of open bounds covers is not known.
// CHECK-LABEL: func.func @open(
// CHECK: %[[SIZE:.*]] = tensor.dim
// CHECK: %[[HALF:.*]] = arith.divui %[[SIZE]]
// CHECK: %[[REST:.*]] = arith.subi %[[SIZE]], %[[HALF]]
// CHECK: tensor.extract_slice %{{.*}}[0, 0] [%[[HALF]], 6] [1, 1]
// CHECK: tensor.extract_slice %{{.*}}[%[[HALF]], 0] [%[[REST]], 6] [1, 1]
// CHECK: tensor.concat dim(0) {{.*}} -> tensor<?x6xf32>
func.func @open(%x: tensor<?x6xf32>, %at: index) -> tensor<?x6xf32> {
  %e = math.exp %x : tensor<?x6xf32>
  %s = tensor.extract_slice %e[%at, 0] [1, 6] [1, 1] : tensor<?x6xf32> to tensor<1x6xf32>
  %t = math.sin %s : tensor<1x6xf32>
  %new = tensor.insert_slice %t into %e[0, 0] [1, 6] [1, 1] : tensor<1x6xf32> into tensor<?x6xf32>
  return %new : tensor<?x6xf32>
}

// -----

// A single element is taken out and put back.
// CHECK-LABEL: func.func @single(
// CHECK: %[[V:.*]] = tensor.extract %{{.*}}[%{{.*}}, %{{.*}}] : tensor<1x1xf32>
// CHECK: %[[COPY:.*]] = tensor.from_elements %[[V]] : tensor<1x1xf32>
// CHECK: tensor.insert_slice %{{.*}} into %[[COPY]]
func.func @single(%x: tensor<1x1xf32>, %y: tensor<1x1xf32>) -> (tensor<1x1xf32>, tensor<1x1xf32>) {
  %e = math.exp %x : tensor<1x1xf32>
  %new = tensor.insert_slice %y into %e[0, 0] [1, 1] [1, 1] : tensor<1x1xf32> into tensor<1x1xf32>
  return %new, %e : tensor<1x1xf32>, tensor<1x1xf32>
}

// -----

#id = affine_map<(d0, d1, d2) -> (d0, d1, d2)>

// Axes of size 1 are moved by looking at the tensor otherwise.
// CHECK-LABEL: func.func @moved(
// CHECK: %[[E:.*]] = math.exp
// CHECK: %[[T:.*]] = linalg.transpose
// CHECK: %[[COPY:.*]] = tensor.concat dim(0)
// CHECK: tensor.insert_slice %{{.*}} into %[[COPY]]
// CHECK: linalg.generic
// CHECK: %[[OTHER:.*]] = tensor.concat dim(1)
// CHECK: tensor.insert_slice %{{.*}} into %[[OTHER]]
func.func @moved(%x: tensor<1x1x8xf32>, %y: tensor<2x1x1xf32>, %z: tensor<1x8x1xf32>, %w: tensor<1x2x1xf32>)
    -> (tensor<8x1x1xf32>, tensor<1x8x1xf32>, tensor<1x1x8xf32>, tensor<1x8x1xf32>) {
  %e = math.exp %x : tensor<1x1x8xf32>
  %empty = tensor.empty() : tensor<8x1x1xf32>
  %t = linalg.transpose ins(%e : tensor<1x1x8xf32>) outs(%empty : tensor<8x1x1xf32>) permutation = [2, 0, 1]
  %new = tensor.insert_slice %y into %t[0, 0, 0] [2, 1, 1] [1, 1, 1] : tensor<2x1x1xf32> into tensor<8x1x1xf32>
  %f = math.exp %z : tensor<1x8x1xf32>
  %none = tensor.empty() : tensor<1x8x1xf32>
  %c = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%f : tensor<1x8x1xf32>) outs(%none : tensor<1x8x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<1x8x1xf32>
  %next = tensor.insert_slice %w into %c[0, 0, 0] [1, 2, 1] [1, 1, 1] : tensor<1x2x1xf32> into tensor<1x8x1xf32>
  return %new, %next, %e, %f : tensor<8x1x1xf32>, tensor<1x8x1xf32>, tensor<1x1x8xf32>, tensor<1x8x1xf32>
}

// -----

// What is really put in another order is a tensor of its own.
// CHECK-LABEL: func.func @reordered(
// CHECK-NOT: tensor.concat
// CHECK: return
func.func @reordered(%x: tensor<2x8xf32>, %y: tensor<1x2xf32>) -> (tensor<8x2xf32>, tensor<2x8xf32>) {
  %e = math.exp %x : tensor<2x8xf32>
  %empty = tensor.empty() : tensor<8x2xf32>
  %t = linalg.transpose ins(%e : tensor<2x8xf32>) outs(%empty : tensor<8x2xf32>) permutation = [1, 0]
  %new = tensor.insert_slice %y into %t[0, 0] [1, 2] [1, 1] : tensor<1x2xf32> into tensor<8x2xf32>
  return %new, %e : tensor<8x2xf32>, tensor<2x8xf32>
}
