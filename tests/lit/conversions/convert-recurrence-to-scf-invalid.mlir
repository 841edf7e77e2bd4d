// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-recurrence-to-scf'

func.func @open(%g: !torch.vtensor<[?,2,12],f32>, %h: !torch.vtensor<[2,3],f32>, %w: !torch.vtensor<[12,3],f32>) -> !torch.vtensor<[?,2,3],f32> {
  // expected-error @below {{convert-recurrence-to-scf: 'torch.operator' op: expected f32, steps x batch x 4 * width, found !torch.vtensor<[?,2,12],f32>; leave other recurrent layers to be written out step by step}}
  %r:4 = torch.operator "torch.retrograd.lstm"(%g, %h, %h, %w) : (!torch.vtensor<[?,2,12],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[12,3],f32>) -> (!torch.vtensor<[?,2,3],f32>, !torch.vtensor<[2,3],f32>, !torch.vtensor<[?,2,3],f32>, !torch.vtensor<[?,2,12],f32>)
  return %r#0 : !torch.vtensor<[?,2,3],f32>
}
