// RUN: retrograd-opt %s --split-input-file -p 'bwd-fold-elementwise' | FileCheck %s

// A product with a weight, which a sum along rows and an elementwise op read: both compute it, and nothing else does.
// CHECK-LABEL: func.func @two_readers(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<128x64xf32>, %[[W:[a-z0-9]+]]: tensor<64xf32>
// CHECK-NOT: ins(%[[X]], %[[W]] : {{.*}} outs({{.*}} : tensor<128x64xf32>)
// CHECK: linalg.generic {{.*}}"reduction"]} ins(%[[X]], %[[W]] :
// CHECK: arith.mulf
// CHECK: arith.addf
// CHECK: linalg.generic {{.*}} ins(%[[X]], %[[W]], %{{.*}} :
// CHECK: arith.mulf
// CHECK: arith.subf
#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#column = affine_map<(i, j) -> (j)>
func.func @two_readers(%x: tensor<128x64xf32>, %w: tensor<64xf32>) -> tensor<128x64xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x64xf32>
  %few = tensor.empty() : tensor<128xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%few : tensor<128xf32>) -> tensor<128xf32>
  %scaled = linalg.generic {indexing_maps = [#id, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %w : tensor<128x64xf32>, tensor<64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.mulf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %sum = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%scaled : tensor<128x64xf32>) outs(%zeros : tensor<128xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.addf %a, %out : f32
    linalg.yield %s : f32
  } -> tensor<128xf32>
  %less = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%scaled, %sum : tensor<128x64xf32>, tensor<128xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.subf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  return %less : tensor<128x64xf32>
}

// -----

// What an op alone reads of such ops is part of it: the input less its mean, times a factor. A reader that takes it
// twice, once transposed, computes it at both places.
// CHECK-LABEL: func.func @chain(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<64x64xf32>, %[[MEAN:[a-z0-9]+]]: tensor<64xf32>, %[[FACTOR:[a-z0-9]+]]: tensor<64xf32>
// CHECK: linalg.generic {{.*}} ins(%[[X]], %[[MEAN]], %[[FACTOR]], %[[X]], %[[MEAN]], %[[FACTOR]] :
// CHECK: arith.subf
// CHECK: arith.mulf
// CHECK: arith.subf
// CHECK: arith.mulf
// CHECK: arith.addf
// CHECK-NOT: linalg.generic
#id = affine_map<(i, j) -> (i, j)>
#turned = affine_map<(i, j) -> (j, i)>
#row = affine_map<(i, j) -> (i)>
func.func @chain(%x: tensor<64x64xf32>, %mean: tensor<64xf32>, %factor: tensor<64xf32>) -> tensor<64x64xf32> {
  %empty = tensor.empty() : tensor<64x64xf32>
  %less = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %mean : tensor<64x64xf32>, tensor<64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.subf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %normal = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%less, %factor : tensor<64x64xf32>, tensor<64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.mulf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %both = linalg.generic {indexing_maps = [#id, #turned, #id], iterator_types = ["parallel", "parallel"]}
      ins(%normal, %normal : tensor<64x64xf32>, tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  return %both : tensor<64x64xf32>
}

// -----

// A function that takes long is computed once. So is what has a rounding that its readers do not have, what a product
// reads, and what is small.
// CHECK-LABEL: func.func @left(
// CHECK-COUNT-1: math.exp
// CHECK-COUNT-1: arith.truncf
// CHECK-COUNT-1: arith.mulf
// CHECK: linalg.matmul
// CHECK-COUNT-1: arith.maximumf
// CHECK-NOT: math.exp
// CHECK-NOT: arith.truncf
// CHECK-NOT: arith.mulf
// CHECK-NOT: arith.maximumf
#id = affine_map<(i, j) -> (i, j)>
func.func @left(%x: tensor<64x64xf32>, %few: tensor<8x8xf32>)
    -> (tensor<64x64xf32>, tensor<64x64xbf16>, tensor<64x64xf32>, tensor<64x64xf32>, tensor<8x8xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64x64xf32>
  %narrow = tensor.empty() : tensor<64x64xbf16>
  %small = tensor.empty() : tensor<8x8xf32>
  %grown = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.exp %a : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %sum = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%grown, %grown : tensor<64x64xf32>, tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %rounded = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<64x64xf32>) outs(%narrow : tensor<64x64xbf16>) {
  ^bb0(%a: f32, %out: bf16):
    %s = arith.truncf %a : f32 to bf16
    linalg.yield %s : bf16
  } -> tensor<64x64xbf16>
  %more = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%rounded, %rounded : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%narrow : tensor<64x64xbf16>) {
  ^bb0(%a: bf16, %b: bf16, %out: bf16):
    %s = arith.addf %a, %b : bf16
    linalg.yield %s : bf16
  } -> tensor<64x64xbf16>
  %square = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.mulf %a, %a : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
  %product = linalg.matmul ins(%square, %x : tensor<64x64xf32>, tensor<64x64xf32>) outs(%zeros : tensor<64x64xf32>)
      -> tensor<64x64xf32>
  %again = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%square : tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.negf %a : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %cut = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%few : tensor<8x8xf32>) outs(%small : tensor<8x8xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.maximumf %a, %zero : f32
    linalg.yield %s : f32
  } -> tensor<8x8xf32>
  %twice = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%cut, %cut : tensor<8x8xf32>, tensor<8x8xf32>) outs(%small : tensor<8x8xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<8x8xf32>
  return %sum, %more, %product, %again, %twice
      : tensor<64x64xf32>, tensor<64x64xbf16>, tensor<64x64xf32>, tensor<64x64xf32>, tensor<8x8xf32>
}

// -----

// The sum of a product and a vector is part of the product's kernel. And of two tensors that nothing else reads, both
// would have to stay for what is made of them.
// CHECK-LABEL: func.func @memory(
// CHECK: linalg.matmul
// CHECK-COUNT-1: arith.subf
// CHECK-COUNT-1: arith.minimumf
// CHECK-NOT: arith.subf
// CHECK-NOT: arith.minimumf
#id = affine_map<(i, j) -> (i, j)>
#column = affine_map<(i, j) -> (j)>
func.func @memory(%x: tensor<64x64xf32>, %y: tensor<64x64xf32>, %bias: tensor<64xf32>)
    -> (tensor<64x64xf32>, tensor<64x64xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
  %product = linalg.matmul ins(%x, %y : tensor<64x64xf32>, tensor<64x64xf32>) outs(%zeros : tensor<64x64xf32>)
      -> tensor<64x64xf32>
  %less = linalg.generic {indexing_maps = [#id, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%product, %bias : tensor<64x64xf32>, tensor<64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.subf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %square = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%less, %less : tensor<64x64xf32>, tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.mulf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %least = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %y : tensor<64x64xf32>, tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.minimumf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %twice = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%least, %least : tensor<64x64xf32>, tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  return %square, %twice : tensor<64x64xf32>, tensor<64x64xf32>
}

// -----

// What is written to later is not read later than it was: the slice that is scaled is one of a tensor that is updated.
// CHECK-LABEL: func.func @updated(
// CHECK-COUNT-1: arith.mulf
// CHECK-NOT: arith.mulf
#id = affine_map<(i, j) -> (i, j)>
func.func @updated(%x: tensor<64x64xf32>, %w: tensor<64x64xf32>) -> (tensor<128x64xf32>, tensor<64x64xf32>, tensor<64x64xf32>) {
  %empty = tensor.empty() : tensor<64x64xf32>
  %whole = tensor.pad %x low[0, 0] high[64, 0] {
  ^bb0(%i: index, %j: index):
    %zero = arith.constant 0.0 : f32
    tensor.yield %zero : f32
  } : tensor<64x64xf32> to tensor<128x64xf32>
  %slice = tensor.extract_slice %whole[64, 0] [64, 64] [1, 1] : tensor<128x64xf32> to tensor<64x64xf32>
  %scaled = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%slice : tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.mulf %a, %a : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %other = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%slice : tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.sin %a : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %one = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%scaled : tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.exp %a : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %two = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%scaled : tensor<64x64xf32>) outs(%empty : tensor<64x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.cos %a : f32
    linalg.yield %s : f32
  } -> tensor<64x64xf32>
  %new = tensor.insert_slice %one into %whole[0, 0] [64, 64] [1, 1] : tensor<64x64xf32> into tensor<128x64xf32>
  return %new, %two, %other : tensor<128x64xf32>, tensor<64x64xf32>, tensor<64x64xf32>
}
