// RUN: retrograd-opt %s -p 'convert-linalg-to-kernels{families=norms ptx=none}' --allow-unregistered-dialect --split-input-file \
// RUN:   | FileCheck %s

// Two sums along the same rows, with what is computed before, between and behind, as one kernel: it writes what others
// read, the mean's storage that is given among them, and of a sum down columns those of each workgroup.

#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0, 0)>
#column = affine_map<(d0, d1) -> (d1)>
// CHECK: bwd.kernels = ["9 ops along 1024 rows of 300: norms_4_
// CHECK-LABEL: func.func @norm(
// CHECK-SAME: %[[X:.*]]: tensor<1024x300xf32>, %[[H:.*]]: tensor<1024x300xbf16>, %[[W:.*]]: tensor<300xf32>
// CHECK-NOT: linalg.generic
// CHECK: %[[ALL:.*]]:4 = "flow.dispatch"({{.*}}, %[[X]], %[[H]], %[[W]], {{.*}}@norms_4_{{.*}} -> (tensor<1024x300xf32>, tensor<1024x1xf32>, tensor<1024x300xf32>, tensor<[[PARTS:.*]]x300xf32>)
// CHECK: %[[SUM:.*]] = "flow.dispatch"({{.*}}, %[[ALL]]#3, {{.*}}@columns_1_{{.*}} -> tensor<300xf32>
// CHECK: %[[MEAN:.*]] = "hal.tensor.alias"(%[[ALL]]#1
// CHECK-NOT: linalg.generic
// CHECK: return %[[ALL]]#0, %[[MEAN]], %[[ALL]]#2, %[[SUM]]
func.func @norm(%x: tensor<1024x300xf32>, %h: tensor<1024x300xbf16>, %w: tensor<300xf32>, %m: !hal.buffer_view)
    -> (tensor<1024x300xf32>, tensor<1024x1xf32>, tensor<1024x300xf32>, tensor<300xf32>) {
  %zero = arith.constant 0.0 : f32
  %count = arith.constant 300.0 : f32
  %e = tensor.empty() : tensor<1024x300xf32>
  %one = tensor.empty() : tensor<1024x1xf32>
  %line = tensor.empty() : tensor<300xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%one : tensor<1024x1xf32>) -> tensor<1024x1xf32>
  %none = linalg.fill ins(%zero : f32) outs(%line : tensor<300xf32>) -> tensor<300xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %h : tensor<1024x300xf32>, tensor<1024x300xbf16>) outs(%e : tensor<1024x300xf32>) {
  ^bb0(%a: f32, %b: bf16, %o: f32):
    %1 = arith.extf %b : bf16 to f32
    %2 = arith.addf %a, %1 : f32
    linalg.yield %2 : f32
  } -> tensor<1024x300xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%r : tensor<1024x300xf32>) outs(%zeros : tensor<1024x1xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<1024x1xf32>
  %d = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%s : tensor<1024x1xf32>) outs(%one : tensor<1024x1xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.divf %a, %count : f32
    linalg.yield %1 : f32
  } -> tensor<1024x1xf32>
  %mean = "hal.tensor.alias"(%d, %m) {operandSegmentSizes = array<i32: 1, 0, 1, 0>}
      : (tensor<1024x1xf32>, !hal.buffer_view) -> tensor<1024x1xf32>
  %c = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%r, %mean : tensor<1024x300xf32>, tensor<1024x1xf32>) outs(%e : tensor<1024x300xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.subf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<1024x300xf32>
  %q = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%c : tensor<1024x300xf32>) outs(%zeros : tensor<1024x1xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.mulf %a, %a : f32
    %2 = arith.addf %1, %o : f32
    linalg.yield %2 : f32
  } -> tensor<1024x1xf32>
  %v = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%q : tensor<1024x1xf32>) outs(%one : tensor<1024x1xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = math.rsqrt %a : f32
    linalg.yield %1 : f32
  } -> tensor<1024x1xf32>
  %y = linalg.generic {indexing_maps = [#id, #row, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%c, %v, %w : tensor<1024x300xf32>, tensor<1024x1xf32>, tensor<300xf32>) outs(%e : tensor<1024x300xf32>) {
  ^bb0(%a: f32, %b: f32, %g: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    %2 = arith.mulf %1, %g : f32
    linalg.yield %2 : f32
  } -> tensor<1024x300xf32>
  %t = linalg.generic {indexing_maps = [#id, #column], iterator_types = ["reduction", "parallel"]}
      ins(%y : tensor<1024x300xf32>) outs(%none : tensor<300xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<300xf32>
  return %r, %mean, %y, %t : tensor<1024x300xf32>, tensor<1024x1xf32>, tensor<1024x300xf32>, tensor<300xf32>
}

// -----

// What is made of the sum by an op that has no statement is not the kernel's, nor is what reads that; a tensor that is
// only widened for others is not written.

#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
#line = affine_map<(d0) -> (d0)>
// CHECK: bwd.kernels = ["2 ops along 1024 rows of 300: norms_2_
// CHECK-LABEL: func.func @outside(
// CHECK: %[[ALL:.*]]:2 = "flow.dispatch"({{.*}}@norms_2_{{.*}} -> (tensor<1024xf32>, tensor<1024x300xbf16>)
// CHECK: math.atan
// CHECK: arith.mulf
// CHECK: linalg.generic {{.*}} ins(%[[ALL]]#1
// CHECK: arith.extf
func.func @outside(%x: tensor<1024x300xf32>) -> (tensor<1024x300xf32>, tensor<1024x300xbf16>, tensor<1024x300xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<1024x300xf32>
  %eh = tensor.empty() : tensor<1024x300xbf16>
  %one = tensor.empty() : tensor<1024xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%one : tensor<1024xf32>) -> tensor<1024xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<1024x300xf32>) outs(%zeros : tensor<1024xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<1024xf32>
  %y = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %s : tensor<1024x300xf32>, tensor<1024xf32>) outs(%eh : tensor<1024x300xbf16>) {
  ^bb0(%a: f32, %b: f32, %o: bf16):
    %1 = arith.mulf %a, %b : f32
    %2 = arith.truncf %1 : f32 to bf16
    linalg.yield %2 : bf16
  } -> tensor<1024x300xbf16>
  %t = linalg.generic {indexing_maps = [#line, #line], iterator_types = ["parallel"]}
      ins(%s : tensor<1024xf32>) outs(%one : tensor<1024xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = math.atan %a : f32
    linalg.yield %1 : f32
  } -> tensor<1024xf32>
  %z = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %t : tensor<1024x300xf32>, tensor<1024xf32>) outs(%e : tensor<1024x300xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<1024x300xf32>
  %w = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<1024x300xbf16>) outs(%e : tensor<1024x300xf32>) {
  ^bb0(%a: bf16, %o: f32):
    %1 = arith.extf %a : bf16 to f32
    linalg.yield %1 : f32
  } -> tensor<1024x300xf32>
  return %z, %y, %w : tensor<1024x300xf32>, tensor<1024x300xbf16>, tensor<1024x300xf32>
}

// -----

// Left to IREE: a sum and nothing else, rows that are too long, and what is read turned around.

#id = affine_map<(d0, d1) -> (d0, d1)>
#turned = affine_map<(d0, d1) -> (d1, d0)>
#row = affine_map<(d0, d1) -> (d0)>
// CHECK-NOT: bwd.kernels
// CHECK-NOT: flow.dispatch
// CHECK-LABEL: func.func @left(
// CHECK-NOT: flow.dispatch
func.func @left(%x: tensor<1024x300xf32>, %long: tensor<64x9000xf32>, %u: tensor<512x512xf32>)
    -> (tensor<1024xf32>, tensor<64x9000xf32>, tensor<512x512xf32>) {
  %zero = arith.constant 0.0 : f32
  %one = tensor.empty() : tensor<1024xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%one : tensor<1024xf32>) -> tensor<1024xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<1024x300xf32>) outs(%zeros : tensor<1024xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<1024xf32>
  %few = tensor.empty() : tensor<64xf32>
  %start = linalg.fill ins(%zero : f32) outs(%few : tensor<64xf32>) -> tensor<64xf32>
  %t = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%long : tensor<64x9000xf32>) outs(%start : tensor<64xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<64xf32>
  %e = tensor.empty() : tensor<64x9000xf32>
  %y = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%long, %t : tensor<64x9000xf32>, tensor<64xf32>) outs(%e : tensor<64x9000xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<64x9000xf32>
  %p = tensor.empty() : tensor<512xf32>
  %q = linalg.fill ins(%zero : f32) outs(%p : tensor<512xf32>) -> tensor<512xf32>
  %v = linalg.generic {indexing_maps = [#turned, #row], iterator_types = ["parallel", "reduction"]}
      ins(%u : tensor<512x512xf32>) outs(%q : tensor<512xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<512xf32>
  %g = tensor.empty() : tensor<512x512xf32>
  %z = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%u, %v : tensor<512x512xf32>, tensor<512xf32>) outs(%g : tensor<512x512xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<512x512xf32>
  return %s, %y, %z : tensor<1024xf32>, tensor<64x9000xf32>, tensor<512x512xf32>
}

// -----

// The gradient of a mean: what a row is multiplied with is one number, computed by an op without loops, and read by
// another.

#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
#one = affine_map<(d0, d1) -> ()>
#none = affine_map<() -> ()>
// CHECK: bwd.kernels = ["3 ops along 1024 rows of 300: norms_
// CHECK-LABEL: func.func @one_number(
// CHECK: %[[ONE:.*]] = linalg.generic
// CHECK: "flow.dispatch"({{.*}}%[[ONE]]
func.func @one_number(%x: tensor<1024x300xf32>, %g: tensor<f32>) -> (tensor<1024x300xf32>, tensor<f32>) {
  %zero = arith.constant 0.0 : f32
  %count = arith.constant 1024.0 : f32
  %one = tensor.empty() : tensor<f32>
  %n = linalg.generic {indexing_maps = [#none, #none], iterator_types = []} ins(%g : tensor<f32>) outs(%one : tensor<f32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.divf %a, %count : f32
    linalg.yield %1 : f32
  } -> tensor<f32>
  %e = tensor.empty() : tensor<1024x300xf32>
  %y = linalg.generic {indexing_maps = [#id, #one, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %n : tensor<1024x300xf32>, tensor<f32>) outs(%e : tensor<1024x300xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<1024x300xf32>
  %line = tensor.empty() : tensor<1024xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%line : tensor<1024xf32>) -> tensor<1024xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%y : tensor<1024x300xf32>) outs(%zeros : tensor<1024xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<1024xf32>
  %z = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%y, %s : tensor<1024x300xf32>, tensor<1024xf32>) outs(%e : tensor<1024x300xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.subf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<1024x300xf32>
  %m = linalg.generic {indexing_maps = [#none, #none], iterator_types = []} ins(%n : tensor<f32>) outs(%one : tensor<f32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.negf %a : f32
    linalg.yield %1 : f32
  } -> tensor<f32>
  return %z, %m : tensor<1024x300xf32>, tensor<f32>
}
