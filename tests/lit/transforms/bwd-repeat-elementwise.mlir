// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-repeat-elementwise' | FileCheck %s

// An argument less its mean is used before a reduction, and after it: there it is computed again, from behind a barrier.
// The two ops behind the reduction share it.
// CHECK-LABEL: func.func @late(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<128x64xf32>, %[[MEAN:[a-z0-9]+]]: tensor<64xf32>
// CHECK: %[[HIDDEN:.*]] = "util.optimization_barrier"(%[[X]])
// CHECK: %[[LESS:.*]] = linalg.generic {{.*}} ins(%[[X]], %[[MEAN]] :
// CHECK: arith.subf
// CHECK: linalg.generic {{.*}} ins(%[[LESS]] :
// CHECK: arith.addf
// CHECK: %[[AGAIN:.*]] = linalg.generic {{.*}} ins(%[[HIDDEN]], %[[MEAN]] :
// CHECK: arith.subf
// CHECK: linalg.generic {{.*}} ins(%[[AGAIN]] :
// CHECK: linalg.generic {{.*}} ins(%[[AGAIN]] :
#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (j)>
func.func @late(%x: tensor<128x64xf32>, %mean: tensor<64xf32>)
    -> (tensor<64xf32>, tensor<128x64xf32>, tensor<128x64xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x64xf32>
  %few = tensor.empty() : tensor<64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%few : tensor<64xf32>) -> tensor<64xf32>
  %less = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %mean : tensor<128x64xf32>, tensor<64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.subf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %sum = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["reduction", "parallel"]}
      ins(%less : tensor<128x64xf32>) outs(%zeros : tensor<64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.addf %a, %out : f32
    linalg.yield %s : f32
  } -> tensor<64xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%less : tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.sin %a : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %z = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%less : tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.cos %a : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  return %sum, %y, %z : tensor<64xf32>, tensor<128x64xf32>, tensor<128x64xf32>
}

// -----

// Through a view, and of several ops: all are copied. What is no generic takes the first result.
// CHECK-LABEL: func.func @chain(
// CHECK: %[[HIDDEN:.*]] = "util.optimization_barrier"(%{{.*}})
// CHECK: tensor.pad
// CHECK: %[[VIEW:.*]] = tensor.expand_shape %[[HIDDEN]]
// CHECK: %[[DOUBLE:.*]] = linalg.generic {{.*}} ins(%[[VIEW]] :
// CHECK: %[[AGAIN:.*]] = linalg.generic {{.*}} ins(%[[DOUBLE]] :
// CHECK: arith.maximumf
// CHECK: linalg.generic {{.*}} ins(%[[AGAIN]] :
// CHECK: math.sin
#id = affine_map<(i, j) -> (i, j)>
func.func @chain(%x: tensor<8192xf32>) -> (tensor<130x64xf32>, tensor<128x64xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x64xf32>
  %view = tensor.expand_shape %x [[0, 1]] output_shape [128, 64] : tensor<8192xf32> into tensor<128x64xf32>
  %double = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%view : tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.addf %a, %a : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %relu = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%double : tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.maximumf %a, %zero : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %pad = tensor.pad %relu low[1, 0] high[1, 0] {
  ^bb0(%i: index, %j: index):
    tensor.yield %zero : f32
  } : tensor<128x64xf32> to tensor<130x64xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%relu : tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.sin %a : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  return %pad, %y : tensor<130x64xf32>, tensor<128x64xf32>
}

// -----

// Left alone: a function such as exp costs more than reading, two arguments are more to read than one tensor, of a small
// tensor there is too little to gain, and with no kernel in between nothing is.
// CHECK-LABEL: func.func @left(
// CHECK-NOT: util.optimization_barrier
// CHECK: return
#id = affine_map<(i, j) -> (i, j)>
func.func @left(%x: tensor<128x64xf32>, %w: tensor<128x64xf32>, %few: tensor<8x8xf32>) -> (tensor<130x64xf32>,
    tensor<130x64xf32>, tensor<130x64xf32>, tensor<10x8xf32>, tensor<128x64xf32>, tensor<128x64xf32>, tensor<8x8xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x64xf32>
  %little = tensor.empty() : tensor<8x8xf32>
  %exp = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.exp %a : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %two = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %w : tensor<128x64xf32>, tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.mulf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %small = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%few : tensor<8x8xf32>) outs(%little : tensor<8x8xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.addf %a, %a : f32
    linalg.yield %s : f32
  } -> tensor<8x8xf32>
  %pads:3 = "some.kernel"(%exp, %two, %small)
      : (tensor<128x64xf32>, tensor<128x64xf32>, tensor<8x8xf32>)
      -> (tensor<130x64xf32>, tensor<130x64xf32>, tensor<10x8xf32>)
  %near = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%w : tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.addf %a, %a : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %sum = linalg.generic {indexing_maps = [#id, #id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%exp, %two, %near : tensor<128x64xf32>, tensor<128x64xf32>, tensor<128x64xf32>)
      outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %b: f32, %c: f32, %out: f32):
    %r = arith.addf %a, %b : f32
    %s = arith.addf %r, %c : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %less = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%near, %sum : tensor<128x64xf32>, tensor<128x64xf32>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %s = arith.subf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<128x64xf32>
  %again = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%small : tensor<8x8xf32>) outs(%little : tensor<8x8xf32>) {
  ^bb0(%a: f32, %out: f32):
    %s = math.sin %a : f32
    linalg.yield %s : f32
  } -> tensor<8x8xf32>
  return %pads#0, %pads#1, %pads#1, %pads#2, %sum, %less, %again : tensor<130x64xf32>, tensor<130x64xf32>,
      tensor<130x64xf32>, tensor<10x8xf32>, tensor<128x64xf32>, tensor<128x64xf32>, tensor<8x8xf32>
}
