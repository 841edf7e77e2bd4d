// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'convert-torch-pools-to-linalg' | FileCheck %s

// One op compares the four taps of each window, which it reads from where they are; a tap outside of the plane is read
// at its border, and never taken. IREE is not to move a transposition of the maxima into it.
// CHECK-LABEL: func.func @forward(
// CHECK: %[[X:.*]] = torch_c.to_builtin_tensor %{{.*}} -> tensor<2x5x6x8xbf16>
// CHECK: linalg.generic {{.*}}["parallel", "parallel", "parallel", "parallel"]} outs(%{{.*}}, %{{.*}} : tensor<2x3x3x8xbf16>, tensor<2x3x3x8xi8>)
// CHECK-NOT: linalg.generic
// CHECK-COUNT-4: tensor.extract %[[X]]
// CHECK-NOT: tensor.extract
// CHECK: linalg.yield {{.*}} : bf16, i8
// CHECK: util.optimization_barrier
// CHECK: torch_c.from_builtin_tensor {{.*}} -> !torch.vtensor<[2,3,3,8],si8>
func.func @forward(%x: !torch.vtensor<[2,5,6,8],bf16>) -> (!torch.vtensor<[2,3,3,8],bf16>, !torch.vtensor<[2,3,3,8],si8>) {
  %0 = torch.constant.int 0
  %1 = torch.constant.int 1
  %2 = torch.constant.int 2
  %3 = torch.constant.int 3
  %window = torch.prim.ListConstruct %2, %2, %2, %2, %1, %0, %1, %1 : (!torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %out = torch.prim.ListConstruct %3, %3 : (!torch.int, !torch.int) -> !torch.list<int>
  %r:2 = torch.operator "torch.retrograd.max_pool_last"(%x, %window, %out) : (!torch.vtensor<[2,5,6,8],bf16>, !torch.list<int>, !torch.list<int>) -> (!torch.vtensor<[2,3,3,8],bf16>, !torch.vtensor<[2,3,3,8],si8>)
  return %r#0, %r#1 : !torch.vtensor<[2,3,3,8],bf16>, !torch.vtensor<[2,3,3,8],si8>
}

// -----

// Windows of 3 at a stride of 2 hold an element twice along an axis: four taps and four gradients are read for each, and
// added up in f32.
// CHECK-LABEL: func.func @backward(
// CHECK: %[[G:.*]] = torch_c.to_builtin_tensor %{{.*}} -> tensor<2x3x3x8xbf16>
// CHECK: %[[T:.*]] = torch_c.to_builtin_tensor %{{.*}} -> tensor<2x3x3x8xi8>
// CHECK: linalg.generic {{.*}} outs(%{{.*}} : tensor<2x5x6x8xbf16>)
// CHECK-COUNT-4: arith.addf {{.*}} : f32
// CHECK: arith.truncf {{.*}} : f32 to bf16
func.func @backward(%g: !torch.vtensor<[2,3,3,8],bf16>, %t: !torch.vtensor<[2,3,3,8],si8>) -> !torch.vtensor<[2,5,6,8],bf16> {
  %1 = torch.constant.int 1
  %2 = torch.constant.int 2
  %3 = torch.constant.int 3
  %5 = torch.constant.int 5
  %6 = torch.constant.int 6
  %window = torch.prim.ListConstruct %3, %3, %2, %2, %1, %1, %1, %1 : (!torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %size = torch.prim.ListConstruct %5, %6 : (!torch.int, !torch.int) -> !torch.list<int>
  %r = torch.operator "torch.retrograd.max_pool_last_backward"(%g, %t, %window, %size) : (!torch.vtensor<[2,3,3,8],bf16>, !torch.vtensor<[2,3,3,8],si8>, !torch.list<int>, !torch.list<int>) -> !torch.vtensor<[2,5,6,8],bf16>
  return %r : !torch.vtensor<[2,5,6,8],bf16>
}
