// RUN: retrograd-opt %s --split-input-file -p 'convert-torch-complex-to-pairs' | FileCheck %s

// Two views of one argument, a result that is complex, and one that is not.
// CHECK-LABEL: func.func @both(
// CHECK-SAME: %[[X:[a-z0-9]*]]: !torch.vtensor<[3,2],f32> {bwd.complex, bwd.name = "x"}
// CHECK-SAME: -> (!torch.vtensor<[3,2],f32> {bwd.complex}, !torch.vtensor<[3,2],f32>)
// CHECK: %[[S:.*]] = torch.aten.sin %[[X]]
// CHECK: %[[C:.*]] = torch.aten.cos %[[X]]
// CHECK-NOT: view_as
// CHECK: return %[[S]], %[[C]]
func.func @both(%x: !torch.vtensor<[3],complex<f32>> {bwd.name = "x"}) -> (!torch.vtensor<[3],complex<f32>>, !torch.vtensor<[3,2],f32>) {
  %a = torch.aten.view_as_real %x : !torch.vtensor<[3],complex<f32>> -> !torch.vtensor<[3,2],f32>
  %s = torch.aten.sin %a : !torch.vtensor<[3,2],f32> -> !torch.vtensor<[3,2],f32>
  %b = torch.aten.view_as_real %x : !torch.vtensor<[3],complex<f32>> -> !torch.vtensor<[3,2],f32>
  %c = torch.aten.cos %b : !torch.vtensor<[3,2],f32> -> !torch.vtensor<[3,2],f32>
  %z = torch.aten.view_as_complex %s : !torch.vtensor<[3,2],f32> -> !torch.vtensor<[3],complex<f32>>
  return %z, %c : !torch.vtensor<[3],complex<f32>>, !torch.vtensor<[3,2],f32>
}

// -----

// Open sizes; and one result twice.
// CHECK-LABEL: func.func @open(
// CHECK-SAME: %[[X:[a-z0-9]*]]: !torch.vtensor<[?,2],f64> {bwd.complex}
// CHECK: %[[S:.*]] = torch.aten.sin %[[X]]
// CHECK: return %[[S]], %[[S]] : !torch.vtensor<[?,2],f64>, !torch.vtensor<[?,2],f64>
func.func @open(%x: !torch.vtensor<[?],complex<f64>>) -> (!torch.vtensor<[?],complex<f64>>, !torch.vtensor<[?],complex<f64>>) {
  %a = torch.aten.view_as_real %x : !torch.vtensor<[?],complex<f64>> -> !torch.vtensor<[?,2],f64>
  %s = torch.aten.sin %a : !torch.vtensor<[?,2],f64> -> !torch.vtensor<[?,2],f64>
  %z = torch.aten.view_as_complex %s : !torch.vtensor<[?,2],f64> -> !torch.vtensor<[?],complex<f64>>
  return %z, %z : !torch.vtensor<[?],complex<f64>>, !torch.vtensor<[?],complex<f64>>
}

// -----

// An argument that is handed on stays what it is, as does a constant.
// CHECK-LABEL: func.func @through(
// CHECK-SAME: %[[X:[a-z0-9]*]]: !torch.vtensor<[3],complex<f32>>) -> (!torch.vtensor<[3],complex<f32>>, !torch.vtensor<[1],complex<f32>>)
// CHECK: return %[[X]]
func.func @through(%x: !torch.vtensor<[3],complex<f32>>) -> (!torch.vtensor<[3],complex<f32>>, !torch.vtensor<[1],complex<f32>>) {
  %c = torch.vtensor.literal(dense<(1.0, 2.0)> : tensor<1xcomplex<f32>>) : !torch.vtensor<[1],complex<f32>>
  return %x, %c : !torch.vtensor<[3],complex<f32>>, !torch.vtensor<[1],complex<f32>>
}
