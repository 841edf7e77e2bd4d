// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-torch-view-to-tensor'

func.func @unknown(%x: !torch.vtensor<[?,2],f32>, %n: !torch.int) -> !torch.vtensor<[?],f32> {
  %sizes = torch.prim.ListConstruct %n : (!torch.int) -> !torch.list<int>
  // expected-error @below {{convert-torch-view-to-tensor: 'torch.aten.view' op: nothing says what the sizes of !torch.vtensor<[?,2],f32> are; keep bwd.shape on arguments and bwd.shapes on ops, which the import writes}}
  %y = torch.aten.view %x, %sizes {bwd.shapes = ["2 * batch"]} : !torch.vtensor<[?,2],f32>, !torch.list<int> -> !torch.vtensor<[?],f32>
  return %y : !torch.vtensor<[?],f32>
}

// -----

module attributes {bwd.sizes = {batch = 6 : i64}} {
  func.func @sizes(%x: !torch.vtensor<[?],f32> {bwd.shape = "2 * batch"}, %sizes: !torch.list<int>) -> !torch.vtensor<[?,2],f32> {
    // expected-error @below {{convert-torch-view-to-tensor: 'torch.aten.view' op: the sizes of a view are no list of numbers; build the list with torch.prim.ListConstruct}}
    %y = torch.aten.view %x, %sizes {bwd.shapes = ["batch, 2"]} : !torch.vtensor<[?],f32>, !torch.list<int> -> !torch.vtensor<[?,2],f32>
    return %y : !torch.vtensor<[?,2],f32>
  }
}

// -----

module attributes {bwd.sizes = {a = 6 : i64, b = 7 : i64}} {
  func.func @two(%x: !torch.vtensor<[?],f32> {bwd.shape = "a * b"}) -> !torch.vtensor<[?,?],f32> {
    %int-1 = torch.constant.int -1
    %sizes = torch.prim.ListConstruct %int-1, %int-1 : (!torch.int, !torch.int) -> !torch.list<int>
    // expected-error @below {{convert-torch-view-to-tensor: 'torch.aten.view' op: two sizes of a view are left to be worked out; give all sizes but one}}
    %y = torch.aten.view %x, %sizes {bwd.shapes = ["a, b"]} : !torch.vtensor<[?],f32>, !torch.list<int> -> !torch.vtensor<[?,?],f32>
    return %y : !torch.vtensor<[?,?],f32>
  }
}

// -----

module attributes {bwd.sizes = {a = 1 : i64}} {
  func.func @number(%x: !torch.vtensor<[?],f32> {bwd.shape = "a"}) -> !torch.vtensor<[],f32> {
    %sizes = torch.prim.ListConstruct : () -> !torch.list<int>
    // expected-error @below {{convert-torch-view-to-tensor: 'torch.aten.view' op: a view of open sizes to or from a number; select the element instead}}
    %y = torch.aten.view %x, %sizes : !torch.vtensor<[?],f32>, !torch.list<int> -> !torch.vtensor<[],f32>
    return %y : !torch.vtensor<[],f32>
  }
}
