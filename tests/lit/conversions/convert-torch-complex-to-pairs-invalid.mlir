// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-torch-complex-to-pairs'

func.func @computes(%x: !torch.vtensor<[3],complex<f32>>) -> !torch.vtensor<[3],complex<f32>> {
  // expected-error @below {{convert-torch-complex-to-pairs: 'torch.aten.sin' op: it computes with complex numbers; leave it to torch: as an eager island, or outside of the compiled function}}
  %s = torch.aten.sin %x : !torch.vtensor<[3],complex<f32>> -> !torch.vtensor<[3],complex<f32>>
  return %s : !torch.vtensor<[3],complex<f32>>
}

// -----

func.func @shapes(%x: !torch.vtensor<[3],complex<f32>>) -> !torch.vtensor<[2,3],f32> {
  // expected-error @below {{convert-torch-complex-to-pairs: 'torch.aten.view_as_real' op: !torch.vtensor<[2,3],f32> are not the pairs of !torch.vtensor<[3],complex<f32>>; give both types as PyTorch does: pairs are along one more axis, the last}}
  %a = torch.aten.view_as_real %x : !torch.vtensor<[3],complex<f32>> -> !torch.vtensor<[2,3],f32>
  return %a : !torch.vtensor<[2,3],f32>
}

// -----

// expected-error @below {{convert-torch-complex-to-pairs: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}
