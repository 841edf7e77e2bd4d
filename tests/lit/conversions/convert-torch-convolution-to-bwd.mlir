// RUN: retrograd-opt %s -p convert-torch-convolution-to-bwd --split-input-file | FileCheck %s

!images = !torch.vtensor<[8,28,30,64],bf16>
!filters = !torch.vtensor<[128,3,2,16],bf16>
!results = !torch.vtensor<[8,14,30,128],bf16>

// Of four groups; the window's six numbers are two of stride, padding and dilation each.

// CHECK-LABEL: func.func @groups(
// CHECK-DAG: %[[X:.*]] = torch_c.to_builtin_tensor %arg0
// CHECK-DAG: %[[W:.*]] = torch_c.to_builtin_tensor %arg1
// CHECK: %[[Y:.*]] = "bwd.convolution"(%[[X]], %[[W]]) {dilation = [1, 3], padding = [1, 2], stride = [2, 1]} : (tensor<8x28x30x64xbf16>, tensor<128x3x2x16xbf16>) -> tensor<8x14x30x128xbf16>
// CHECK: %[[R:.*]] = torch_c.from_builtin_tensor %[[Y]]
// CHECK: "bwd.convolution_input_gradient"(%{{.*}}, %{{.*}}) {dilation = [1, 3], padding = [1, 2], stride = [2, 1]} : (tensor<8x14x30x128xbf16>, tensor<128x3x2x16xbf16>) -> tensor<8x28x30x64xbf16>
// CHECK: "bwd.convolution_filter_gradient"(%{{.*}}, %{{.*}}) {dilation = [1, 3], padding = [1, 2], stride = [2, 1]} : (tensor<8x14x30x128xbf16>, tensor<8x28x30x64xbf16>) -> tensor<128x3x2x16xbf16>
// CHECK: return %[[R]],
func.func @groups(%x: !images, %w: !filters, %g: !results) -> (!results, !images, !filters) {
  %1 = torch.constant.int 1
  %2 = torch.constant.int 2
  %3 = torch.constant.int 3
  %14 = torch.constant.int 14
  %16 = torch.constant.int 16
  %28 = torch.constant.int 28
  %30 = torch.constant.int 30
  %64 = torch.constant.int 64
  %window = torch.prim.ListConstruct %2, %1, %1, %2, %1, %3 : (!torch.int, !torch.int, !torch.int, !torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %out = torch.prim.ListConstruct %14, %30 : (!torch.int, !torch.int) -> !torch.list<int>
  %size = torch.prim.ListConstruct %28, %30, %64 : (!torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %taps = torch.prim.ListConstruct %3, %2, %16 : (!torch.int, !torch.int, !torch.int) -> !torch.list<int>
  %y = torch.operator "torch.retrograd.convolution_last"(%x, %w, %window, %out) : (!images, !filters, !torch.list<int>, !torch.list<int>) -> !results
  %dx = torch.operator "torch.retrograd.convolution_last_images"(%g, %w, %window, %size) : (!results, !filters, !torch.list<int>, !torch.list<int>) -> !images
  %dw = torch.operator "torch.retrograd.convolution_last_filters"(%g, %x, %window, %taps) : (!results, !images, !torch.list<int>, !torch.list<int>) -> !filters
  return %y, %dx, %dw : !results, !images, !filters
}
