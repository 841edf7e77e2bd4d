// RUN: retrograd-opt %s -p 'bwd-keep-itself' | FileCheck %s

// What is compared with itself is none where it is no number; what is compared with another stays.
// CHECK-LABEL: func.func @masks(
// CHECK-SAME: %[[X:.*]]: !torch.vtensor<[2],f32>, %[[Y:.*]]: !torch.vtensor<[2],f32>)
// CHECK: %[[KNOWN:.*]] = torch.aten.le.Tensor %[[X]], %[[X]]
// CHECK: %[[SAME:.*]] = torch.aten.eq.Tensor %[[X]], %[[Y]]
// CHECK: return %[[KNOWN]], %[[SAME]]
func.func @masks(%x: !torch.vtensor<[2],f32>, %y: !torch.vtensor<[2],f32>)
    -> (!torch.vtensor<[2],i1>, !torch.vtensor<[2],i1>) {
  %known = torch.aten.eq.Tensor %x, %x : !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32> -> !torch.vtensor<[2],i1>
  %same = torch.aten.eq.Tensor %x, %y : !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32> -> !torch.vtensor<[2],i1>
  return %known, %same : !torch.vtensor<[2],i1>, !torch.vtensor<[2],i1>
}
