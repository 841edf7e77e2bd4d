// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p convert-torch-convolution-to-bwd

!images = !torch.vtensor<[8,28,28,64],f64>
!filters = !torch.vtensor<[64,1,1,64],f64>

func.func @doubles(%x: !images, %w: !filters) -> !images {
  %0 = torch.constant.int 0
  %1 = torch.constant.int 1
  %28 = torch.constant.int 28
  %window = torch.prim.ListConstruct %1, %1, %0, %0, %1, %1 : (!torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %out = torch.prim.ListConstruct %28, %28 : (!torch.int, !torch.int) -> !torch.list<int>
  // expected-error @below {{convert-torch-convolution-to-bwd: 'torch.operator' op: no kernel of ours takes this convolution: it is of f64; leave other convolutions as ops of aten}}
  %y = torch.operator "torch.retrograd.convolution_last"(%x, %w, %window, %out) : (!images, !filters, !torch.list<int>, !torch.list<int>) -> !images
  return %y : !images
}

// -----

!images = !torch.vtensor<[8,28,28,64],f32>
!filters = !torch.vtensor<[64,1,1,64],f32>

func.func @window(%x: !images, %w: !filters) -> !images {
  %1 = torch.constant.int 1
  %28 = torch.constant.int 28
  %pair = torch.prim.ListConstruct %1, %1 : (!torch.int, !torch.int) -> !torch.list<int>
  // expected-error @below {{convert-torch-convolution-to-bwd: 'torch.operator' op: expected a window of 6 numbers, found [1, 1]; leave other convolutions as ops of aten}}
  %y = torch.operator "torch.retrograd.convolution_last"(%x, %w, %pair, %pair) : (!images, !filters, !torch.list<int>, !torch.list<int>) -> !images
  return %y : !images
}

// -----

!images = !torch.vtensor<[8,28,28,64],f32>
!filters = !torch.vtensor<[64,1,1,64],f32>

func.func @open(%x: !images, %w: !filters, %list: !torch.list<int>) -> !images {
  // expected-error @below {{convert-torch-convolution-to-bwd: 'torch.operator' op: numbers among the operands are no list; leave other convolutions as ops of aten}}
  %y = torch.operator "torch.retrograd.convolution_last"(%x, %w, %list, %list) : (!images, !filters, !torch.list<int>, !torch.list<int>) -> !images
  return %y : !images
}
