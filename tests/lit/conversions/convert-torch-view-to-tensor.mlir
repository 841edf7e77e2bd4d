// RUN: retrograd-opt %s --split-input-file -p 'convert-torch-view-to-tensor' | FileCheck %s

// By its types alone this view could also be one where an axis of the source is 1.
// CHECK-LABEL: func.func @collapse(
// CHECK-SAME: %[[X:[a-z0-9]*]]: !torch.vtensor<[?,?,2,8],f32>
// CHECK: %[[B:.*]] = torch_c.to_builtin_tensor %[[X]] : !torch.vtensor<[?,?,2,8],f32> -> tensor<?x?x2x8xf32>
// CHECK: %[[C:.*]] = tensor.collapse_shape %[[B]] {{\[\[}}0, 1], [2, 3]] : tensor<?x?x2x8xf32> into tensor<?x16xf32>
// CHECK: %[[R:.*]] = torch_c.from_builtin_tensor %[[C]]
// CHECK-NOT: torch.aten.view
// CHECK: return %[[R]]
module attributes {bwd.sizes = {batch = 6 : i64, tokens = 7 : i64}} {
  func.func @collapse(%x: !torch.vtensor<[?,?,2,8],f32> {bwd.shape = "tokens, batch, 2, 8"}, %batch: !torch.int, %tokens: !torch.int) -> !torch.vtensor<[?,16],f32> {
    %int16 = torch.constant.int 16
    %rows = torch.aten.mul.int %batch, %tokens : !torch.int, !torch.int -> !torch.int
    %sizes = torch.prim.ListConstruct %rows, %int16 : (!torch.int, !torch.int) -> !torch.list<int>
    %y = torch.aten.view %x, %sizes {bwd.shapes = ["batch * tokens, 16"]} : !torch.vtensor<[?,?,2,8],f32>, !torch.list<int> -> !torch.vtensor<[?,16],f32>
    return %y : !torch.vtensor<[?,16],f32>
  }
}

// -----

// Axes in between that are neither one's of the other: all of a group become one and then the new ones.
// CHECK-LABEL: func.func @regroup(
// CHECK: tensor.collapse_shape %{{.*}} {{\[\[}}0], [1, 2]] : tensor<?x?x16xi64> into tensor<?x?xi64>
// CHECK: %[[N:.*]] = torch_c.to_i64 %{{.*}}
// CHECK: %[[I:.*]] = arith.index_cast %[[N]] : i64 to index
// CHECK: tensor.expand_shape %{{.*}} {{\[\[}}0], [1, 2]] output_shape [%{{.*}}, %{{.*}}, 8] : tensor<?x?xi64> into tensor<?x?x8xi64>
module attributes {bwd.sizes = {batch = 6 : i64, tokens = 7 : i64}} {
  func.func @regroup(%x: !torch.vtensor<[?,?,16],si64> {bwd.shape = "tokens, batch, 16"}, %batch: !torch.int, %tokens: !torch.int) -> !torch.vtensor<[?,?,8],si64> {
    %int2 = torch.constant.int 2
    %int8 = torch.constant.int 8
    %heads = torch.aten.mul.int %batch, %int2 : !torch.int, !torch.int -> !torch.int
    %sizes = torch.prim.ListConstruct %tokens, %heads, %int8 : (!torch.int, !torch.int, !torch.int) -> !torch.list<int>
    %y = torch.aten.view %x, %sizes {bwd.shapes = ["tokens, batch * 2, 8"]} : !torch.vtensor<[?,?,16],si64>, !torch.list<int> -> !torch.vtensor<[?,?,8],si64>
    return %y : !torch.vtensor<[?,?,8],si64>
  }
}

// -----

// A size that is left to be worked out is what the others leave; a view of a view knows its shape.
// CHECK-LABEL: func.func @remainder(
// CHECK: %[[D:.*]] = tensor.dim %[[X:.*]], %{{.*}} : tensor<?xf32>
// CHECK: %[[TWO:.*]] = arith.constant 2 : index
// CHECK: %[[Q:.*]] = arith.divui %[[D]], %[[TWO]] : index
// CHECK: tensor.expand_shape %[[X]] {{\[\[}}0, 1]] output_shape [%[[Q]], 2]
// CHECK: tensor.collapse_shape
module attributes {bwd.sizes = {batch = 6 : i64}} {
  func.func @remainder(%x: !torch.vtensor<[?],f32> {bwd.shape = "batch"}) -> !torch.vtensor<[?],f32> {
    %int-1 = torch.constant.int -1
    %int2 = torch.constant.int 2
    %pairs = torch.prim.ListConstruct %int-1, %int2 : (!torch.int, !torch.int) -> !torch.list<int>
    %flat = torch.prim.ListConstruct %int-1 : (!torch.int) -> !torch.list<int>
    %y = torch.aten.view %x, %pairs {bwd.shapes = ["batch // 2, 2"]} : !torch.vtensor<[?],f32>, !torch.list<int> -> !torch.vtensor<[?,2],f32>
    %z = torch.aten.view %y, %flat {bwd.shapes = ["(batch // 2) * 2"]} : !torch.vtensor<[?,2],f32>, !torch.list<int> -> !torch.vtensor<[?],f32>
    return %z : !torch.vtensor<[?],f32>
  }
}

// -----

// What is known at compile time stays torch-mlir's.
// CHECK-LABEL: func.func @fixed(
// CHECK: torch.aten.view
func.func @fixed(%x: !torch.vtensor<[4,2],f32>) -> !torch.vtensor<[8],f32> {
  %int8 = torch.constant.int 8
  %sizes = torch.prim.ListConstruct %int8 : (!torch.int) -> !torch.list<int>
  %y = torch.aten.view %x, %sizes : !torch.vtensor<[4,2],f32>, !torch.list<int> -> !torch.vtensor<[8],f32>
  return %y : !torch.vtensor<[8],f32>
}
