// RUN: retrograd-opt %s -p 'convert-linalg-to-kernels{ptx=none}' --allow-unregistered-dialect --split-input-file \
// RUN:   | FileCheck %s

// A product of f32: both matrices are split into three of bf16, filled up with zeros to whole tiles. What splits one is
// compiled once, and a matrix that two products read is split once.

// CHECK: bwd.kernels = ["matmul of tensor<300x1000xf32> and tensor<1000x256xf32>: product_nt_f32_64x128x32
// CHECK-DAG: sym_name = "split_f32_odd_cuda"
// CHECK-LABEL: func.func @split(
// CHECK-SAME: %[[X:.*]]: tensor<300x1000xf32>, %[[W:.*]]: tensor<256x1000xf32>
// CHECK-NOT: linalg.matmul
// CHECK: %[[SX:.*]] = "flow.dispatch"({{.*}}, %[[X]], {{.*}}entry_points = [@split_f32_odd_cuda::@split_f32_odd]{{.*}}tensor<3x384x1024xbf16>
// CHECK: %[[SW:.*]] = "flow.dispatch"({{.*}}, %[[W]], {{.*}}tensor<3x256x1024xbf16>
// CHECK: %[[PARTS:.*]] = "flow.dispatch"({{.*}}, %[[SX]], %[[SW]], {{.*}}@product_nt_f32_64x128x32{{.*}} -> tensor<{{[0-9]+}}x300x256xf32>
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "parallel", "reduction"]} ins(%[[PARTS]]
// CHECK: "flow.dispatch"({{.*}}, %[[SX]], {{.*}}@product_tn_f32_
func.func @split(%x: tensor<300x1000xf32>, %w: tensor<256x1000xf32>, %y: tensor<300x1000xf32>)
    -> (tensor<300x256xf32>, tensor<1000x1000xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<1000x256xf32>
  %t = linalg.transpose ins(%w : tensor<256x1000xf32>) outs(%e : tensor<1000x256xf32>) permutation = [1, 0]
  %f = tensor.empty() : tensor<300x256xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%f : tensor<300x256xf32>) -> tensor<300x256xf32>
  %r = linalg.matmul ins(%x, %t : tensor<300x1000xf32>, tensor<1000x256xf32>)
      outs(%fill : tensor<300x256xf32>) -> tensor<300x256xf32>
  %g = tensor.empty() : tensor<1000x300xf32>
  %u = linalg.transpose ins(%x : tensor<300x1000xf32>) outs(%g : tensor<1000x300xf32>) permutation = [1, 0]
  %h = tensor.empty() : tensor<1000x1000xf32>
  %other = linalg.fill ins(%zero : f32) outs(%h : tensor<1000x1000xf32>) -> tensor<1000x1000xf32>
  %s = linalg.matmul ins(%u, %y : tensor<1000x300xf32>, tensor<300x1000xf32>)
      outs(%other : tensor<1000x1000xf32>) -> tensor<1000x1000xf32>
  return %r, %s : tensor<300x256xf32>, tensor<1000x1000xf32>
}

// -----

// A product of bf16 is read as it is; the bias, and rounding, are the kernel's.

#id = affine_map<(d0, d1) -> (d0, d1)>
#column = affine_map<(d0, d1) -> (d1)>
// CHECK-LABEL: func.func @epilogue(
// CHECK-SAME: %[[X:.*]]: tensor<4096x768xbf16>, %[[W:.*]]: tensor<768x3072xbf16>, %[[B:.*]]: tensor<3072xbf16>
// CHECK: %[[R:.*]] = "flow.dispatch"({{.*}}, %[[X]], %[[W]], %[[B]], {{.*}}@product_nn_bf16_128x256x64x8x4_specialized_bf16_bias_bf16{{.*}} -> tensor<4096x3072xbf16>
// CHECK-NEXT: return %[[R]]
func.func @epilogue(%x: tensor<4096x768xbf16>, %w: tensor<768x3072xbf16>, %b: tensor<3072xbf16>)
    -> tensor<4096x3072xbf16> {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4096x3072xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%e : tensor<4096x3072xf32>) -> tensor<4096x3072xf32>
  %p = linalg.matmul ins(%x, %w : tensor<4096x768xbf16>, tensor<768x3072xbf16>)
      outs(%fill : tensor<4096x3072xf32>) -> tensor<4096x3072xf32>
  %sum = linalg.generic {indexing_maps = [#id, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%p, %b : tensor<4096x3072xf32>, tensor<3072xbf16>) outs(%e : tensor<4096x3072xf32>) {
  ^bb0(%a: f32, %c: bf16, %o: f32):
    %1 = arith.extf %c : bf16 to f32
    %2 = arith.addf %a, %1 : f32
    linalg.yield %2 : f32
  } -> tensor<4096x3072xf32>
  %n = tensor.empty() : tensor<4096x3072xbf16>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%sum : tensor<4096x3072xf32>) outs(%n : tensor<4096x3072xbf16>) {
  ^bb0(%a: f32, %o: bf16):
    %1 = arith.truncf %a : f32 to bf16
    linalg.yield %1 : bf16
  } -> tensor<4096x3072xbf16>
  return %r : tensor<4096x3072xbf16>
}

// -----

// A batch whose axes were collapsed after its matrices were transposed; what begins within another tensor is copied.

// CHECK-LABEL: func.func @batch(
// CHECK-SAME: %[[Q:.*]]: tensor<2x16x128x64xbf16>, %[[K:.*]]: tensor<2x16x128x64xbf16>
// CHECK: %[[KS:.*]] = tensor.collapse_shape %[[K]] {{.*}} into tensor<32x128x64xbf16>
// CHECK: "flow.dispatch"({{.*}}, %[[KS]], {{.*}}@product_nt_bf16_
// CHECK: %[[PADDED:.*]] = "flow.dispatch"({{.*}}@pad_bf16_unaligned
// CHECK: "flow.dispatch"({{.*}}, %[[PADDED]],
func.func @batch(%q: tensor<2x16x128x64xbf16>, %k: tensor<2x16x128x64xbf16>, %w: tensor<1025x512xbf16>)
    -> (tensor<32x128x128xf32>, tensor<1024x512xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<2x16x64x128xbf16>
  %t = linalg.transpose ins(%k : tensor<2x16x128x64xbf16>) outs(%e : tensor<2x16x64x128xbf16>) permutation = [0, 1, 3, 2]
  %a = tensor.collapse_shape %q [[0, 1], [2], [3]] : tensor<2x16x128x64xbf16> into tensor<32x128x64xbf16>
  %b = tensor.collapse_shape %t [[0, 1], [2], [3]] : tensor<2x16x64x128xbf16> into tensor<32x64x128xbf16>
  %f = tensor.empty() : tensor<32x128x128xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%f : tensor<32x128x128xf32>) -> tensor<32x128x128xf32>
  %r = linalg.batch_matmul ins(%a, %b : tensor<32x128x64xbf16>, tensor<32x64x128xbf16>)
      outs(%fill : tensor<32x128x128xf32>) -> tensor<32x128x128xf32>
  %slice = tensor.extract_slice %w[1, 0] [1024, 512] [1, 1] : tensor<1025x512xbf16> to tensor<1024x512xbf16>
  %square = tensor.extract_slice %w[0, 0] [512, 512] [1, 1] : tensor<1025x512xbf16> to tensor<512x512xbf16>
  %g = tensor.empty() : tensor<1024x512xf32>
  %start = linalg.fill ins(%zero : f32) outs(%g : tensor<1024x512xf32>) -> tensor<1024x512xf32>
  %s = linalg.matmul ins(%slice, %square : tensor<1024x512xbf16>, tensor<512x512xbf16>)
      outs(%start : tensor<1024x512xf32>) -> tensor<1024x512xf32>
  return %r, %s : tensor<32x128x128xf32>, tensor<1024x512xf32>
}

// -----

// What stays: sums onto something, sizes that are open, small products, of integers.

// CHECK: bwd.kernels = [
// CHECK-SAME: IREE's code, it adds to what is there
// CHECK-SAME: IREE's code, sizes are open
// CHECK-SAME: 4 x 8 x 4, it is too small
// CHECK-LABEL: func.func @stays(
// CHECK-COUNT-3: linalg.matmul
// CHECK-NOT: flow.dispatch
func.func @stays(%x: tensor<512x512xf32>, %o: tensor<?x512xf32>, %s: tensor<4x4xf32>, %w: tensor<4x8xf32>)
    -> (tensor<512x512xf32>, tensor<?x512xf32>, tensor<4x8xf32>) {
  %zero = arith.constant 0.0 : f32
  %p = linalg.matmul ins(%x, %x : tensor<512x512xf32>, tensor<512x512xf32>)
      outs(%x : tensor<512x512xf32>) -> tensor<512x512xf32>
  %q = linalg.matmul ins(%o, %x : tensor<?x512xf32>, tensor<512x512xf32>)
      outs(%o : tensor<?x512xf32>) -> tensor<?x512xf32>
  %e = tensor.empty() : tensor<4x8xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%e : tensor<4x8xf32>) -> tensor<4x8xf32>
  %r = linalg.matmul ins(%s, %w : tensor<4x4xf32>, tensor<4x8xf32>) outs(%fill : tensor<4x8xf32>) -> tensor<4x8xf32>
  return %p, %q, %r : tensor<512x512xf32>, tensor<?x512xf32>, tensor<4x8xf32>
}

// -----

// Rows that are added up where they go: places are ranked, and the table is updated in place.

// CHECK-LABEL: func.func @rows(
// CHECK-SAME: %[[U:.*]]: tensor<777x1x33xf32>, %[[P:.*]]: tensor<777x1xi64>, %[[T:.*]]: tensor<1000x33xf32>
// CHECK: %[[ORDER:.*]] = "flow.dispatch"({{.*}}, %[[P]], {{.*}}@rank_places{{.*}} -> tensor<777xi32>
// CHECK: %[[R:.*]] = "flow.dispatch"({{.*}}, %[[ORDER]], %[[P]], %[[U]], %[[T]], {{.*}}@add_rows{{.*}}tied_operands = [3 : index]
// CHECK: return %[[R]]
func.func @rows(%u: tensor<777x1x33xf32>, %p: tensor<777x1xi64>, %t: tensor<1000x33xf32>) -> tensor<1000x33xf32> {
  %r = "tm_tensor.scatter"(%u, %p, %t) ({
  ^bb0(%new: f32, %old: f32):
    %s = arith.addf %old, %new : f32
    "tm_tensor.yield"(%s) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, unique_indices = false, operandSegmentSizes = array<i32: 2, 1>}
      : (tensor<777x1x33xf32>, tensor<777x1xi64>, tensor<1000x33xf32>) -> tensor<1000x33xf32>
  return %r : tensor<1000x33xf32>
}

// -----

// The parts of a matrix as large as a vocabulary's logits are not written to memory: the products that read it as their
// first divide it themselves.

// CHECK: bwd.kernels = ["matmul of tensor<2048x20001xf32> and tensor<20001x96xf32>: product_nn_f32_{{[0-9x]*}}_pitch_b_divided in {{[0-9]+}} parts", "matmul of tensor<20001x2048xf32> and tensor<2048x96xf32>: product_tn_f32_{{[0-9x]*}}_pitch_b_divided in {{[0-9]+}} parts"]
// CHECK-LABEL: func.func @logits(
// CHECK-SAME: %[[G:.*]]: tensor<2048x20001xf32>, %[[W:.*]]: tensor<20001x96xf32>, %[[X:.*]]: tensor<2048x96xf32>
// CHECK: %[[WP:.*]] = "flow.dispatch"({{.*}}, %[[W]], {{.*}}@split_f32{{.*}} -> tensor<3x20096x128xbf16>
// CHECK: "flow.dispatch"({{.*}}, %[[G]], %[[WP]], {{.*}}@product_nn_f32_
// CHECK: %[[XP:.*]] = "flow.dispatch"({{.*}}, %[[X]], {{.*}}@split_f32{{.*}} -> tensor<3x2048x128xbf16>
// CHECK: "flow.dispatch"({{.*}}, %[[G]], %[[XP]], {{.*}}@product_tn_f32_
func.func @logits(%g: tensor<2048x20001xf32>, %w: tensor<20001x96xf32>, %x: tensor<2048x96xf32>) -> (tensor<2048x96xf32>, tensor<20001x96xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<2048x96xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<2048x96xf32>) -> tensor<2048x96xf32>
  %dx = linalg.matmul ins(%g, %w : tensor<2048x20001xf32>, tensor<20001x96xf32>) outs(%f : tensor<2048x96xf32>) -> tensor<2048x96xf32>
  %t = tensor.empty() : tensor<20001x2048xf32>
  %gt = linalg.transpose ins(%g : tensor<2048x20001xf32>) outs(%t : tensor<20001x2048xf32>) permutation = [1, 0]
  %e2 = tensor.empty() : tensor<20001x96xf32>
  %f2 = linalg.fill ins(%zero : f32) outs(%e2 : tensor<20001x96xf32>) -> tensor<20001x96xf32>
  %dw = linalg.matmul ins(%gt, %x : tensor<20001x2048xf32>, tensor<2048x96xf32>) outs(%f2 : tensor<20001x96xf32>) -> tensor<20001x96xf32>
  return %dx, %dw : tensor<2048x96xf32>, tensor<20001x96xf32>
}

// -----

// A matrix times itself: only as the first is it divided where it is read.

// CHECK: bwd.kernels = ["matmul of tensor<5120x5120xf32> and tensor<5120x5120xf32>: product_nn_f32_{{[0-9x]*}}_divided
// CHECK-LABEL: func.func @square(
// CHECK-SAME: %[[X:.*]]: tensor<5120x5120xf32>
// CHECK: %[[P:.*]] = "flow.dispatch"({{.*}}, %[[X]], {{.*}}@split_f32{{.*}} -> tensor<3x5120x5120xbf16>
// CHECK: "flow.dispatch"({{.*}}, %[[X]], %[[P]], {{.*}}@product_nn_f32_
func.func @square(%x: tensor<5120x5120xf32>) -> tensor<5120x5120xf32> {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<5120x5120xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<5120x5120xf32>) -> tensor<5120x5120xf32>
  %r = linalg.matmul ins(%x, %x : tensor<5120x5120xf32>, tensor<5120x5120xf32>) outs(%f : tensor<5120x5120xf32>) -> tensor<5120x5120xf32>
  return %r : tensor<5120x5120xf32>
}

// -----

// Many places are sorted by eight bits at a time, and rows of which many are added up are so by parts.

// CHECK-LABEL: func.func @many_rows(
// CHECK-SAME: %[[U:.*]]: tensor<262144x1x12xf32>, %[[P:.*]]: tensor<262144x1xi64>, %[[T:.*]]: tensor<1000x12xf32>
// CHECK: %[[C1:.*]] = "flow.dispatch"({{.*}}, %[[P]], {{.*}}@tally_places_first{{.*}} -> tensor<131072xi32>
// CHECK: %[[B1:.*]] = "flow.dispatch"({{.*}}, %[[C1]], {{.*}}@sum_tallies{{.*}} -> tensor<131072xi32>
// CHECK: %[[O1:.*]] = "flow.dispatch"({{.*}}, %[[P]], %[[B1]], {{.*}}@sort_places_first{{.*}} -> tensor<262144xi32>
// CHECK: %[[C2:.*]] = "flow.dispatch"({{.*}}, %[[P]], %[[O1]], {{.*}}@tally_places{{.*}} -> tensor<131072xi32>
// CHECK: %[[B2:.*]] = "flow.dispatch"({{.*}}, %[[C2]], {{.*}}@sum_tallies{{.*}} -> tensor<131072xi32>
// CHECK: %[[O2:.*]] = "flow.dispatch"({{.*}}, %[[P]], %[[O1]], %[[B2]], {{.*}}@sort_places{{.*}} -> tensor<262144xi32>
// CHECK: %[[S:.*]] = "flow.dispatch"({{.*}}, %[[O2]], %[[P]], %[[U]], {{.*}}@add_parts_16{{.*}} -> tensor<512x12xf32>
// CHECK: %[[R:.*]] = "flow.dispatch"({{.*}}, %[[O2]], %[[P]], %[[U]], %[[S]], %[[T]], {{.*}}@add_rows_16_of_parts{{.*}}tied_operands = [4 : index]
// CHECK: return %[[R]]
func.func @many_rows(%u: tensor<262144x1x12xf32>, %p: tensor<262144x1xi64>, %t: tensor<1000x12xf32>) -> tensor<1000x12xf32> {
  %r = "tm_tensor.scatter"(%u, %p, %t) ({
  ^bb0(%new: f32, %old: f32):
    %s = arith.addf %old, %new : f32
    "tm_tensor.yield"(%s) : (f32) -> ()
  }) {dimension_map = array<i64: 0>, unique_indices = false, operandSegmentSizes = array<i32: 2, 1>}
      : (tensor<262144x1x12xf32>, tensor<262144x1xi64>, tensor<1000x12xf32>) -> tensor<1000x12xf32>
  return %r : tensor<1000x12xf32>
}

// -----

// Along rows of an odd length: a sum takes in what is computed element by element before it, and so does what is given.
// Whoever reads rows in between computes them, so that they are not written; a maximum may come with its place.

#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
#one = affine_map<(d0, d1) -> (d0, 0)>
// CHECK: bwd.kernels = ["reduction along rows of 512 x 9001: rows_maximum_
// CHECK-SAME: reduction along rows of 512 x 9001: rows_sum_
// CHECK-SAME: map along rows of 512 x 9001: rows_map_
// CHECK-LABEL: func.func @softmax(
// CHECK-SAME: %[[X:.*]]: tensor<512x9001xbf16>
// CHECK-NOT: linalg.generic
// CHECK: %[[M:.*]] = "flow.dispatch"({{.*}}, %[[X]], {{.*}}@rows_maximum_{{.*}} -> tensor<512xf32>
// CHECK: %[[COLUMN:.*]] = tensor.expand_shape %[[M]]
// CHECK: %[[S:.*]] = "flow.dispatch"({{.*}}, %[[X]], %[[COLUMN]], {{.*}}@rows_sum_{{.*}} -> tensor<512xf32>
// CHECK: %[[R:.*]] = "flow.dispatch"({{.*}}, %[[X]], %[[COLUMN]], %[[S]], {{.*}}@rows_map_{{.*}} -> tensor<512x9001xf32>
// CHECK: return %[[R]]
func.func @softmax(%x: tensor<512x9001xbf16>) -> tensor<512x9001xf32> {
  %zero = arith.constant 0.0 : f32
  %least = arith.constant 0xFF800000 : f32
  %none = arith.constant 0 : i64
  %e = tensor.empty() : tensor<512xf32>
  %p = tensor.empty() : tensor<512xi64>
  %w = tensor.empty() : tensor<512x9001xf32>
  %start = linalg.fill ins(%least : f32) outs(%e : tensor<512xf32>) -> tensor<512xf32>
  %places = linalg.fill ins(%none : i64) outs(%p : tensor<512xi64>) -> tensor<512xi64>
  %max:2 = linalg.generic {indexing_maps = [#id, #row, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<512x9001xbf16>) outs(%start, %places : tensor<512xf32>, tensor<512xi64>) {
  ^bb0(%a: bf16, %most: f32, %at: i64):
    %1 = arith.extf %a : bf16 to f32
    %2 = arith.maximumf %1, %most : f32
    linalg.yield %2, %at : f32, i64
  } -> (tensor<512xf32>, tensor<512xi64>)
  %column = tensor.expand_shape %max#0 [[0, 1]] output_shape [512, 1] : tensor<512xf32> into tensor<512x1xf32>
  %exp = linalg.generic {indexing_maps = [#id, #one, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %column : tensor<512x9001xbf16>, tensor<512x1xf32>) outs(%w : tensor<512x9001xf32>) {
  ^bb0(%a: bf16, %b: f32, %o: f32):
    %1 = arith.extf %a : bf16 to f32
    %2 = arith.subf %1, %b : f32
    %3 = math.exp %2 : f32
    linalg.yield %3 : f32
  } -> tensor<512x9001xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<512xf32>) -> tensor<512xf32>
  %sum = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%exp : tensor<512x9001xf32>) outs(%f : tensor<512xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<512xf32>
  %r = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%exp, %sum : tensor<512x9001xf32>, tensor<512xf32>) outs(%w : tensor<512x9001xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.divf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<512x9001xf32>
  return %r : tensor<512x9001xf32>
}

// -----

// What no kernel is written for stays, and so do rows that warps divide.

#id = affine_map<(d0, d1) -> (d0, d1)>
// CHECK: bwd.kernels = ["map along rows of 512 x 9001: IREE's code, it computes what kernels are not written for"]
// CHECK-LABEL: func.func @other_rows(
// CHECK-COUNT-2: linalg.generic
// CHECK-NOT: flow.dispatch
func.func @other_rows(%x: tensor<512x9001xf32>, %y: tensor<512x1024xf32>)
    -> (tensor<512x9001xf32>, tensor<512x1024xf32>) {
  %e = tensor.empty() : tensor<512x9001xf32>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<512x9001xf32>) outs(%e : tensor<512x9001xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = math.erf %a : f32
    linalg.yield %1 : f32
  } -> tensor<512x9001xf32>
  %f = tensor.empty() : tensor<512x1024xf32>
  %s = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<512x1024xf32>) outs(%f : tensor<512x1024xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = math.exp %a : f32
    linalg.yield %1 : f32
  } -> tensor<512x1024xf32>
  return %r, %s : tensor<512x9001xf32>, tensor<512x1024xf32>
}

// -----

// Truths of rows and columns, here whether a column is the class of its row, are not read but computed where they are
// needed; such as no kernel is written for are read.

#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0, 0)>
#column = affine_map<(d0, d1) -> (0, d1)>
// CHECK-LABEL: func.func @hits(
// CHECK-SAME: %[[X:.*]]: tensor<512x9001xf32>, %[[C:.*]]: tensor<1x9001xi32>, %[[T:.*]]: tensor<512x1xi32>, %[[N:.*]]: tensor<512x9001xf32>
// CHECK: %[[ODD:.*]] = linalg.generic
// CHECK: math.isnan
// CHECK-NOT: linalg.generic
// CHECK-DAG: "flow.dispatch"({{.*}}, %[[C]], %[[T]], %[[X]], {{.*}}@rows_map_{{.*}} -> tensor<512x9001xf32>
// CHECK-DAG: "flow.dispatch"({{.*}}, %[[ODD]], %[[X]], {{.*}}@rows_map_{{.*}} -> tensor<512x9001xf32>
func.func @hits(%x: tensor<512x9001xf32>, %c: tensor<1x9001xi32>, %t: tensor<512x1xi32>, %n: tensor<512x9001xf32>)
    -> (tensor<512x9001xf32>, tensor<512x9001xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<512x9001xf32>
  %b = tensor.empty() : tensor<512x9001xi1>
  %hit = linalg.generic {indexing_maps = [#column, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%c, %t : tensor<1x9001xi32>, tensor<512x1xi32>) outs(%b : tensor<512x9001xi1>) {
  ^bb0(%a: i32, %d: i32, %o: i1):
    %1 = arith.cmpi eq, %a, %d : i32
    linalg.yield %1 : i1
  } -> tensor<512x9001xi1>
  %odd = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%n : tensor<512x9001xf32>) outs(%b : tensor<512x9001xi1>) {
  ^bb0(%a: f32, %o: i1):
    %1 = math.isnan %a : f32
    linalg.yield %1 : i1
  } -> tensor<512x9001xi1>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%hit, %x : tensor<512x9001xi1>, tensor<512x9001xf32>) outs(%e : tensor<512x9001xf32>) {
  ^bb0(%h: i1, %a: f32, %o: f32):
    %1 = arith.select %h, %a, %zero : f32
    linalg.yield %1 : f32
  } -> tensor<512x9001xf32>
  %s = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%odd, %x : tensor<512x9001xi1>, tensor<512x9001xf32>) outs(%e : tensor<512x9001xf32>) {
  ^bb0(%h: i1, %a: f32, %o: f32):
    %1 = arith.select %h, %a, %zero : f32
    linalg.yield %1 : f32
  } -> tensor<512x9001xf32>
  return %r, %s : tensor<512x9001xf32>, tensor<512x9001xf32>
}

// -----

// Attention is one kernel, which reads heads through the transposition that a projection's have, and writes them as all
// that reads them transposes them to. Numbers are sizes and strides.

// CHECK: bwd.kernels = ["attention of tensor<2x4x256x64xbf16> and tensor<2x2x256x64xbf16>: attention_bf16_64_{{.*}}_causal_shared_2"]
// CHECK: bindings = [#hal.pipeline.binding<storage_buffer, ReadOnly>, #hal.pipeline.binding<storage_buffer, ReadOnly>, #hal.pipeline.binding<storage_buffer, ReadOnly>, #hal.pipeline.binding<storage_buffer>, #hal.pipeline.binding<storage_buffer>]
// CHECK-LABEL: func.func @attention(
// CHECK-SAME: %[[Q:.*]]: tensor<2x256x4x64xbf16>, %[[K:.*]]: tensor<2x2x256x64xbf16>
// CHECK-DAG: %[[SCALE:.*]] = arith.constant 1040187392 : i32
// CHECK-DAG: %[[ROW:.*]] = arith.constant 256 : i32
// CHECK: %[[R:.*]]:2 = "flow.dispatch"({{.*}}, %[[Q]], %[[K]], %[[K]], %[[SCALE]], {{.*}}) {entry_points = [@attention_{{.*}}} : {{.*}} -> (tensor<2x256x4x64xbf16>, tensor<2x4x256xf32>)
// CHECK-NEXT: return %[[R]]#0, %[[R]]#1
func.func @attention(%q: tensor<2x256x4x64xbf16>, %k: tensor<2x2x256x64xbf16>) -> (tensor<2x256x4x64xbf16>, tensor<2x4x256xf32>) {
  %none = arith.constant dense<0.0> : tensor<bf16>
  %e = tensor.empty() : tensor<2x4x256x64xbf16>
  %t = linalg.transpose ins(%q : tensor<2x256x4x64xbf16>) outs(%e : tensor<2x4x256x64xbf16>) permutation = [0, 2, 1, 3]
  %o, %l = "bwd.attention"(%t, %k, %k, %none) {causal = true, scale = 0.125 : f32}
      : (tensor<2x4x256x64xbf16>, tensor<2x2x256x64xbf16>, tensor<2x2x256x64xbf16>, tensor<bf16>) -> (tensor<2x4x256x64xbf16>, tensor<2x4x256xf32>)
  %f = tensor.empty() : tensor<2x256x4x64xbf16>
  %u = linalg.transpose ins(%o : tensor<2x4x256x64xbf16>) outs(%f : tensor<2x256x4x64xbf16>) permutation = [0, 2, 1, 3]
  return %u, %l : tensor<2x256x4x64xbf16>, tensor<2x4x256xf32>
}

// -----

// Gradients are three kernels, of sizes that no tile divides, and a mask that is the same for all columns of a row; what
// nobody reads is not computed.

// CHECK: attention_delta_f32_40_{{.*}}_unaligned, attention_key_gradients_f32_40_{{.*}}_odd_mask_f32_row_unaligned_apart, attention_query_gradients_f32_40_
// CHECK: gradients of attention of tensor<1x2x33x40xf32> and tensor<1x2x65x40xf32>: attention_delta_f32_40_{{[0-9x]*}}_unaligned, attention_query_gradients_f32_40_{{[0-9a-z_]*}}"]
// CHECK-LABEL: func.func @gradients(
// CHECK-SAME: %[[G:.*]]: tensor<1x2x33x40xf32>, %[[Q:.*]]: tensor<1x2x33x40xf32>, %[[K:.*]]: tensor<1x2x65x40xf32>, %[[L:.*]]: tensor<1x2x33xf32>, %[[M:.*]]: tensor<33x1xf32>
// CHECK: %[[SUMS:.*]] = "flow.dispatch"({{.*}}, %[[G]], %[[Q]], {{.*}}@attention_delta_{{.*}} -> tensor<1x2x33xf32>
// CHECK: %[[KV:.*]]:2 = "flow.dispatch"({{.*}}, %[[G]], %[[Q]], %[[K]], %[[K]], %[[M]], %[[L]], %[[SUMS]], {{.*}}@attention_key_gradients_{{.*}} -> (tensor<1x2x65x40xf32>, tensor<1x2x65x40xf32>)
// CHECK: %[[DQ:.*]] = "flow.dispatch"({{.*}}, %[[G]], %[[Q]], %[[K]], %[[K]], %[[M]], %[[L]], %[[SUMS]], {{.*}}@attention_query_gradients_{{.*}} -> tensor<1x2x33x40xf32>
// CHECK-NEXT: return %[[DQ]], %[[KV]]#0, %[[KV]]#1
func.func @gradients(%g: tensor<1x2x33x40xf32>, %q: tensor<1x2x33x40xf32>, %k: tensor<1x2x65x40xf32>, %l: tensor<1x2x33xf32>, %m: tensor<33x1xf32>)
    -> (tensor<1x2x33x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x65x40xf32>) {
  %d:3 = "bwd.attention_backward"(%g, %q, %k, %k, %q, %l, %m) {causal = false, scale = 0.125 : f32}
      : (tensor<1x2x33x40xf32>, tensor<1x2x33x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x33x40xf32>, tensor<1x2x33xf32>, tensor<33x1xf32>)
      -> (tensor<1x2x33x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x65x40xf32>)
  return %d#0, %d#1, %d#2 : tensor<1x2x33x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x65x40xf32>
}

// CHECK-LABEL: func.func @one(
// CHECK-COUNT-2: "flow.dispatch"
// CHECK-NOT: "flow.dispatch"
func.func @one(%g: tensor<1x2x33x40xf32>, %q: tensor<1x2x33x40xf32>, %k: tensor<1x2x65x40xf32>, %l: tensor<1x2x33xf32>, %m: tensor<33x1xf32>)
    -> tensor<1x2x33x40xf32> {
  %d:3 = "bwd.attention_backward"(%g, %q, %k, %k, %q, %l, %m) {causal = false, scale = 0.125 : f32}
      : (tensor<1x2x33x40xf32>, tensor<1x2x33x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x33x40xf32>, tensor<1x2x33xf32>, tensor<33x1xf32>)
      -> (tensor<1x2x33x40xf32>, tensor<1x2x65x40xf32>, tensor<1x2x65x40xf32>)
  return %d#0 : tensor<1x2x33x40xf32>
}

// -----

// Parts of a product are read where they are in it.

// CHECK-LABEL: func.func @parts(
// CHECK-SAME: %[[X:.*]]: tensor<2x256x512xbf16>
// CHECK-DAG: %[[START:.*]] = arith.constant 256 : i32
// CHECK-DAG: %[[BATCH:.*]] = arith.constant 131072 : i32
// CHECK: "flow.dispatch"({{.*}}, %[[X]], %[[X]], %[[X]], {{.*}}@attention_bf16_64_
func.func @parts(%x: tensor<2x256x512xbf16>) -> (tensor<2x4x256x64xbf16>, tensor<2x4x256xf32>) {
  %none = arith.constant dense<0.0> : tensor<bf16>
  %s = tensor.extract_slice %x[0, 0, 256] [2, 256, 256] [1, 1, 1] : tensor<2x256x512xbf16> to tensor<2x256x256xbf16>
  %h = tensor.expand_shape %s [[0], [1], [2, 3]] output_shape [2, 256, 4, 64] : tensor<2x256x256xbf16> into tensor<2x256x4x64xbf16>
  %e = tensor.empty() : tensor<2x4x256x64xbf16>
  %t = linalg.transpose ins(%h : tensor<2x256x4x64xbf16>) outs(%e : tensor<2x4x256x64xbf16>) permutation = [0, 2, 1, 3]
  %o, %l = "bwd.attention"(%t, %t, %t, %none) {causal = true, scale = 0.125 : f32}
      : (tensor<2x4x256x64xbf16>, tensor<2x4x256x64xbf16>, tensor<2x4x256x64xbf16>, tensor<bf16>) -> (tensor<2x4x256x64xbf16>, tensor<2x4x256xf32>)
  return %o, %l : tensor<2x4x256x64xbf16>, tensor<2x4x256xf32>
}

// -----

// Two sums over the same rows are one kernel, which reads what both are of once, and a second one adds up the parts. What
// is computed element by element is computed there; what the second sum is less by moves in front of the first.

#image = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>
#channel = affine_map<(d0, d1, d2, d3) -> (d3)>
#line = affine_map<(d0) -> (d0)>
// CHECK: bwd.kernels = ["2 times sum of 12544 rows of 64: columns_2_
// CHECK-LABEL: func.func @columns(
// CHECK-SAME: %[[G:.*]]: tensor<64x14x14x64xbf16>, %[[X:.*]]: tensor<64x14x14x64xbf16>, %[[M:.*]]: tensor<64xbf16>
// CHECK: %[[W:.*]] = linalg.generic {{.*}} ins(%[[M]] : tensor<64xbf16>)
// CHECK: %[[P:.*]]:2 = "flow.dispatch"({{.*}}, %[[G]], %[[X]], %[[W]], {{.*}}@columns_2_{{.*}} -> (tensor<98x64xf32>, tensor<98x64xf32>)
// CHECK: %[[R:.*]]:2 = "flow.dispatch"({{.*}}, %[[P]]#0, %[[P]]#1, {{.*}}@columns_2_{{.*}} -> (tensor<64xf32>, tensor<64xf32>)
// CHECK-NOT: linalg.generic
// CHECK: return %[[R]]#0, %[[R]]#1
func.func @columns(%g: tensor<64x14x14x64xbf16>, %x: tensor<64x14x14x64xbf16>, %m: tensor<64xbf16>)
    -> (tensor<64xf32>, tensor<64xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<64xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%e : tensor<64xf32>) -> tensor<64xf32>
  %s = linalg.generic {indexing_maps = [#image, #channel],
      iterator_types = ["reduction", "reduction", "reduction", "parallel"]}
      ins(%g : tensor<64x14x14x64xbf16>) outs(%fill : tensor<64xf32>) {
  ^bb0(%a: bf16, %o: f32):
    %1 = arith.extf %a : bf16 to f32
    %2 = arith.addf %1, %o : f32
    linalg.yield %2 : f32
  } -> tensor<64xf32>
  %w = linalg.generic {indexing_maps = [#line, #line], iterator_types = ["parallel"]}
      ins(%m : tensor<64xbf16>) outs(%e : tensor<64xf32>) {
  ^bb0(%a: bf16, %o: f32):
    %1 = arith.extf %a : bf16 to f32
    linalg.yield %1 : f32
  } -> tensor<64xf32>
  %f = tensor.empty() : tensor<64x14x14x64xf32>
  %d = linalg.generic {indexing_maps = [#image, #image, #channel, #image],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%g, %x, %w : tensor<64x14x14x64xbf16>, tensor<64x14x14x64xbf16>, tensor<64xf32>)
      outs(%f : tensor<64x14x14x64xf32>) {
  ^bb0(%a: bf16, %b: bf16, %c: f32, %o: f32):
    %1 = arith.extf %a : bf16 to f32
    %2 = arith.extf %b : bf16 to f32
    %3 = arith.subf %2, %c : f32
    %4 = arith.mulf %1, %3 : f32
    linalg.yield %4 : f32
  } -> tensor<64x14x14x64xf32>
  %t = linalg.generic {indexing_maps = [#image, #channel],
      iterator_types = ["reduction", "reduction", "reduction", "parallel"]}
      ins(%d : tensor<64x14x14x64xf32>) outs(%fill : tensor<64xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<64xf32>
  return %s, %t : tensor<64xf32>, tensor<64xf32>
}

// -----

// A sum that reads the one before is a kernel of its own. One of what kernels are not written for stays, as does one of
// few elements, of which nothing is said.

#row = affine_map<(d0, d1) -> (d0, d1)>
#last = affine_map<(d0, d1) -> (d1)>
// CHECK: bwd.kernels = ["sum of 4096 rows of 96: columns_1_{{.*}}", "sum of 4096 rows of 96: columns_1_{{.*}}", "sum of 4096 rows of 96: IREE's code, it computes what kernels are not written for"]
// CHECK-LABEL: func.func @one_after_the_other(
// CHECK: %[[A:.*]] = "flow.dispatch"({{.*}} -> tensor<96xf32>
// CHECK: "flow.dispatch"({{.*}}, %[[A]], {{.*}}
// CHECK-COUNT-2: linalg.generic {{.*}}iterator_types = ["reduction", "parallel"]}
func.func @one_after_the_other(%x: tensor<4096x96xf32>, %y: tensor<256x96xf32>)
    -> (tensor<96xf32>, tensor<96xf32>, tensor<96xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<96xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%e : tensor<96xf32>) -> tensor<96xf32>
  %s = linalg.generic {indexing_maps = [#row, #last], iterator_types = ["reduction", "parallel"]}
      ins(%x : tensor<4096x96xf32>) outs(%fill : tensor<96xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<96xf32>
  %t = linalg.generic {indexing_maps = [#row, #last, #last], iterator_types = ["reduction", "parallel"]}
      ins(%x, %s : tensor<4096x96xf32>, tensor<96xf32>) outs(%fill : tensor<96xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.subf %a, %b : f32
    %2 = arith.mulf %1, %1 : f32
    %3 = arith.addf %2, %o : f32
    linalg.yield %3 : f32
  } -> tensor<96xf32>
  %u = linalg.generic {indexing_maps = [#row, #last], iterator_types = ["reduction", "parallel"]}
      ins(%x : tensor<4096x96xf32>) outs(%fill : tensor<96xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = math.tanh %a : f32
    %2 = arith.addf %1, %o : f32
    linalg.yield %2 : f32
  } -> tensor<96xf32>
  %v = linalg.generic {indexing_maps = [#row, #last], iterator_types = ["reduction", "parallel"]}
      ins(%y : tensor<256x96xf32>) outs(%fill : tensor<96xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<96xf32>
  return %t, %u, %v : tensor<96xf32>, tensor<96xf32>, tensor<96xf32>
}

// -----

// Filters of nine taps are turned around, and rounded, by one kernel; what has no short side, or few elements, stays.

#filters = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>
// CHECK: bwd.kernels = ["transposes of 256 x 128 x 9: transpose_f32_bf16_128x16x4_rows_x16_y16"]
// CHECK-LABEL: func.func @filters(
// CHECK-SAME: %[[W:.*]]: tensor<256x128x3x3xf32>
// CHECK: %[[R:.*]] = "flow.dispatch"({{.*}}, %[[W]], {{.*}}@transpose_f32_bf16_128x16x4_rows_x16_y16{{.*}} -> tensor<256x3x3x128xbf16>
// CHECK: linalg.transpose {{.*}}64x96x128
// CHECK: linalg.transpose {{.*}}8x16x9
// CHECK: return %[[R]]
func.func @filters(%w: tensor<256x128x3x3xf32>, %x: tensor<64x96x128xf32>, %y: tensor<8x16x9xf32>)
    -> (tensor<256x3x3x128xbf16>, tensor<64x128x96xf32>, tensor<8x9x16xf32>) {
  %e = tensor.empty() : tensor<256x3x3x128xf32>
  %t = linalg.transpose ins(%w : tensor<256x128x3x3xf32>) outs(%e : tensor<256x3x3x128xf32>) permutation = [0, 2, 3, 1]
  %f = tensor.empty() : tensor<256x3x3x128xbf16>
  %r = linalg.generic {indexing_maps = [#filters, #filters],
      iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%t : tensor<256x3x3x128xf32>) outs(%f : tensor<256x3x3x128xbf16>) {
  ^bb0(%a: f32, %o: bf16):
    %1 = arith.truncf %a : f32 to bf16
    linalg.yield %1 : bf16
  } -> tensor<256x3x3x128xbf16>
  %g = tensor.empty() : tensor<64x128x96xf32>
  %s = linalg.transpose ins(%x : tensor<64x96x128xf32>) outs(%g : tensor<64x128x96xf32>) permutation = [0, 2, 1]
  %h = tensor.empty() : tensor<8x9x16xf32>
  %u = linalg.transpose ins(%y : tensor<8x16x9xf32>) outs(%h : tensor<8x9x16xf32>) permutation = [0, 2, 1]
  return %r, %s, %u : tensor<256x3x3x128xbf16>, tensor<64x128x96xf32>, tensor<8x9x16xf32>
}

// -----

// A variance is computed with its mean, which reads the rows once: the sum of squares does not wait for the mean.

#row = affine_map<(d0, d1) -> (d0, d1)>
#last = affine_map<(d0, d1) -> (d1)>
#line = affine_map<(d0) -> (d0)>
// CHECK: bwd.kernels = ["sum of 4096 rows of 96, and of the squares of their distances from the mean: columns_2_
// CHECK-LABEL: func.func @moments(
// CHECK: %[[P:.*]]:2 = "flow.dispatch"({{.*}}@columns_2_{{.*}} -> (tensor<32x96xf32>, tensor<32x96xf32>)
// CHECK: %[[R:.*]]:2 = "flow.dispatch"({{.*}}, %[[P]]#0, %[[P]]#1, {{.*}} -> (tensor<96xf32>, tensor<96xf32>)
// CHECK: %[[M:.*]] = linalg.generic {{.*}} ins(%[[R]]#0 : tensor<96xf32>)
// CHECK: return %[[M]], %[[R]]#1
func.func @moments(%x: tensor<4096x96xf32>) -> (tensor<96xf32>, tensor<96xf32>) {
  %zero = arith.constant 0.0 : f32
  %count = arith.constant 4096.0 : f32
  %e = tensor.empty() : tensor<96xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%e : tensor<96xf32>) -> tensor<96xf32>
  %s = linalg.generic {indexing_maps = [#row, #last], iterator_types = ["reduction", "parallel"]}
      ins(%x : tensor<4096x96xf32>) outs(%fill : tensor<96xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.addf %a, %o : f32
    linalg.yield %1 : f32
  } -> tensor<96xf32>
  %m = linalg.generic {indexing_maps = [#line, #line], iterator_types = ["parallel"]}
      ins(%s : tensor<96xf32>) outs(%e : tensor<96xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.divf %a, %count : f32
    linalg.yield %1 : f32
  } -> tensor<96xf32>
  %t = linalg.generic {indexing_maps = [#row, #last, #last], iterator_types = ["reduction", "parallel"]}
      ins(%x, %m : tensor<4096x96xf32>, tensor<96xf32>) outs(%fill : tensor<96xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.subf %a, %b : f32
    %2 = arith.mulf %1, %1 : f32
    %3 = arith.addf %2, %o : f32
    linalg.yield %3 : f32
  } -> tensor<96xf32>
  return %m, %t : tensor<96xf32>, tensor<96xf32>
}

// -----

// Attention with dropout reads the seed; the stream and the chance, as bits of an f32, are numbers of the kernels.

// CHECK: bwd.kernels = ["attention with dropout of tensor<1x2x64x64xf32> and tensor<1x2x64x64xf32>: attention_f32_64_{{[0-9x]*}}_dropped", "gradients of attention with dropout of {{.*}}attention_key_gradients_f32_64_{{[0-9x]*}}_dropped, attention_query_gradients_f32_64_{{[0-9x]*}}_dropped"]
// CHECK-LABEL: func.func @dropped(
// CHECK-SAME: %[[Q:.*]]: tensor<1x2x64x64xf32>, %[[SEED:.*]]: tensor<2xi64>
// CHECK-DAG: %[[STREAM:.*]] = arith.constant 5 : i32
// CHECK-DAG: %[[HALF:.*]] = arith.constant 1056964608 : i32
// CHECK: "flow.dispatch"({{.*}}, %[[Q]], %[[Q]], %[[Q]], %[[SEED]], {{.*}}) {entry_points = [@attention_f32_64
// CHECK: "flow.dispatch"({{.*}}, %[[Q]], %[[Q]], %[[Q]], %[[Q]], %[[SEED]], {{.*}}@attention_key_gradients_
func.func @dropped(%q: tensor<1x2x64x64xf32>, %seed: tensor<2xi64>) -> (tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>) {
  %none = arith.constant dense<0.0> : tensor<f32>
  %o, %l = "bwd.dropped_attention"(%q, %q, %q, %none, %seed) {causal = false, scale = 0.125 : f32, dropout = 0.5 : f32, stream = 5 : i64}
      : (tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<f32>, tensor<2xi64>) -> (tensor<1x2x64x64xf32>, tensor<1x2x64xf32>)
  %d:3 = "bwd.dropped_attention_backward"(%q, %q, %q, %q, %o, %l, %none, %seed) {causal = false, scale = 0.125 : f32, dropout = 0.5 : f32, stream = 5 : i64}
      : (tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64xf32>, tensor<f32>, tensor<2xi64>) -> (tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>)
  return %o, %d#0, %d#1 : tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>, tensor<1x2x64x64xf32>
}

// -----

// The kernel of queries gives the gradient of the scores too, whether or not that of queries is read.

// CHECK: bwd.kernels = ["gradients of attention and its mask with dropout of {{.*}}: attention_delta_{{.*}}, attention_query_gradients_bf16_64_{{[0-9x]*}}_dropped_scores_mask_f32_even"]
// CHECK-LABEL: func.func @learned_mask(
// CHECK-SAME: %[[Q:.*]]: tensor<1x2x64x64xbf16>, %[[L:.*]]: tensor<1x2x64xf32>, %[[M:.*]]: tensor<2x64x64xf32>, %[[SEED:.*]]: tensor<2xi64>
// CHECK: %[[SUMS:.*]] = "flow.dispatch"({{.*}}@attention_delta_
// CHECK: %[[D:.*]]:2 = "flow.dispatch"({{.*}}, %[[Q]], %[[Q]], %[[Q]], %[[Q]], %[[M]], %[[SEED]], %[[L]], %[[SUMS]], {{.*}}@attention_query_gradients_{{.*}} -> (tensor<1x2x64x64xbf16>, tensor<1x2x64x64xf32>)
// CHECK: return %[[D]]#1
func.func @learned_mask(%q: tensor<1x2x64x64xbf16>, %l: tensor<1x2x64xf32>, %m: tensor<2x64x64xf32>, %seed: tensor<2xi64>) -> tensor<1x2x64x64xf32> {
  %d:4 = "bwd.dropped_attention_backward_with_mask"(%q, %q, %q, %q, %q, %l, %m, %seed) {causal = false, scale = 0.125 : f32, dropout = 0.5 : f32, stream = 5 : i64}
      : (tensor<1x2x64x64xbf16>, tensor<1x2x64x64xbf16>, tensor<1x2x64x64xbf16>, tensor<1x2x64x64xbf16>, tensor<1x2x64x64xbf16>, tensor<1x2x64xf32>, tensor<2x64x64xf32>, tensor<2xi64>) -> (tensor<1x2x64x64xbf16>, tensor<1x2x64x64xbf16>, tensor<1x2x64x64xbf16>, tensor<1x2x64x64xf32>)
  return %d#3 : tensor<1x2x64x64xf32>
}

// -----

// A convolution and the gradient of its images are one dispatch each; the gradient of filters is computed in parts,
// which are added up and rounded. Three channels are read by runs.

// CHECK: bwd.kernels = ["convolution of tensor<8x56x56x64xbf16> and tensor<64x3x3x64xbf16>: convolve_bf16_
// CHECK-SAME: gradient of images of tensor<8x28x28x64xbf16> and tensor<64x3x3x64xbf16>: spread_bf16_
// CHECK-SAME: gradient of filters of tensor<8x28x28x64xbf16> and tensor<8x56x56x64xbf16>: correlate_bf16_{{.*}}_parts in {{[0-9]+}} parts
// CHECK-SAME: convolution of tensor<8x56x56x3xbf16> and tensor<64x3x3x3xbf16>: convolve_bf16_{{.*}}_runs_
// CHECK-LABEL: func.func @convolutions(
// CHECK-SAME: %[[X:.*]]: tensor<8x56x56x64xbf16>, %[[W:.*]]: tensor<64x3x3x64xbf16>, %[[G:.*]]: tensor<8x28x28x64xbf16>
// CHECK: %[[Y:.*]] = "flow.dispatch"({{.*}}, %[[X]], %[[W]], {{.*}}@convolve_bf16_{{.*}} -> tensor<8x28x28x64xbf16>
// CHECK: %[[DX:.*]] = "flow.dispatch"({{.*}}, %[[G]], %[[W]], {{.*}}@spread_bf16_{{.*}} -> tensor<8x56x56x64xbf16>
// CHECK: %[[PARTS:.*]] = "flow.dispatch"({{.*}}, %[[G]], %[[X]], {{.*}}@correlate_bf16_{{.*}} -> tensor<{{[0-9]+}}x64x3x3x64xf32>
// CHECK: %[[DW:.*]] = "flow.dispatch"({{.*}}, %[[PARTS]], {{.*}}@add_parts_bf16{{.*}} -> tensor<64x3x3x64xbf16>
// CHECK: return %[[Y]], %[[DX]], %[[DW]],
func.func @convolutions(%x: tensor<8x56x56x64xbf16>, %w: tensor<64x3x3x64xbf16>, %g: tensor<8x28x28x64xbf16>,
    %colors: tensor<8x56x56x3xbf16>, %v: tensor<64x3x3x3xbf16>)
    -> (tensor<8x28x28x64xbf16>, tensor<8x56x56x64xbf16>, tensor<64x3x3x64xbf16>, tensor<8x28x28x64xbf16>) {
  %y = "bwd.convolution"(%x, %w) {stride = [2, 2], padding = [1, 1], dilation = [1, 1]}
      : (tensor<8x56x56x64xbf16>, tensor<64x3x3x64xbf16>) -> tensor<8x28x28x64xbf16>
  %dx = "bwd.convolution_input_gradient"(%g, %w) {stride = [2, 2], padding = [1, 1], dilation = [1, 1]}
      : (tensor<8x28x28x64xbf16>, tensor<64x3x3x64xbf16>) -> tensor<8x56x56x64xbf16>
  %dw = "bwd.convolution_filter_gradient"(%g, %x) {stride = [2, 2], padding = [1, 1], dilation = [1, 1]}
      : (tensor<8x28x28x64xbf16>, tensor<8x56x56x64xbf16>) -> tensor<64x3x3x64xbf16>
  %z = "bwd.convolution"(%colors, %v) {stride = [2, 2], padding = [1, 1], dilation = [1, 1]}
      : (tensor<8x56x56x3xbf16>, tensor<64x3x3x3xbf16>) -> tensor<8x28x28x64xbf16>
  return %y, %dx, %dw, %z
      : tensor<8x28x28x64xbf16>, tensor<8x56x56x64xbf16>, tensor<64x3x3x64xbf16>, tensor<8x28x28x64xbf16>
}

// -----

// The gradient of a vocabulary's logits under autocast: in bfloat16 for a product, and added up in f32 for a bias. The
// sum reads what is written for the product; what it is computed of, twice as wide, is written for nobody.

// CHECK: bwd.kernels = ["sum of 1024 rows of 1001: columns_1_{{.*}}", "map along rows of 1024 x 1001: rows_map_{{.*}}", "matmul of tensor<1024x1001xbf16>
// CHECK-LABEL: func.func @read_narrow(
// CHECK: %[[G:.*]] = "flow.dispatch"({{.*}}@rows_map_{{.*}} -> tensor<1024x1001xbf16>
// CHECK-NOT: @rows_map_
// CHECK: "flow.dispatch"({{.*}}, %[[G]], {{.*}}@columns_1_
func.func @read_narrow(%x: tensor<1024x1001xf32>, %s: tensor<1024x1xf32>, %w: tensor<1001x256xbf16>)
    -> (tensor<1024x256xf32>, tensor<1001xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<1024x1001xf32>
  %p = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, 0)>,
      affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]}
      ins(%x, %s : tensor<1024x1001xf32>, tensor<1024x1xf32>) outs(%e : tensor<1024x1001xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %d = arith.subf %a, %b : f32
    %q = math.exp %d : f32
    linalg.yield %q : f32
  } -> tensor<1024x1001xf32>
  %h = tensor.empty() : tensor<1024x1001xbf16>
  %g = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>],
      iterator_types = ["parallel", "parallel"]} ins(%p : tensor<1024x1001xf32>) outs(%h : tensor<1024x1001xbf16>) {
  ^bb0(%a: f32, %o: bf16):
    %t = arith.truncf %a : f32 to bf16
    linalg.yield %t : bf16
  } -> tensor<1024x1001xbf16>
  %f = tensor.empty() : tensor<1024x256xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%f : tensor<1024x256xf32>) -> tensor<1024x256xf32>
  %r = linalg.matmul ins(%g, %w : tensor<1024x1001xbf16>, tensor<1001x256xbf16>)
      outs(%fill : tensor<1024x256xf32>) -> tensor<1024x256xf32>
  %v = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>],
      iterator_types = ["parallel", "parallel"]} ins(%g : tensor<1024x1001xbf16>) outs(%e : tensor<1024x1001xf32>) {
  ^bb0(%a: bf16, %o: f32):
    %u = arith.extf %a : bf16 to f32
    linalg.yield %u : f32
  } -> tensor<1024x1001xf32>
  %c = tensor.empty() : tensor<1001xf32>
  %none = linalg.fill ins(%zero : f32) outs(%c : tensor<1001xf32>) -> tensor<1001xf32>
  %b = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>],
      iterator_types = ["reduction", "parallel"]} ins(%v : tensor<1024x1001xf32>) outs(%none : tensor<1001xf32>) {
  ^bb0(%a: f32, %o: f32):
    %t = arith.addf %a, %o : f32
    linalg.yield %t : f32
  } -> tensor<1001xf32>
  return %r, %b : tensor<1024x256xf32>, tensor<1001xf32>
}

// -----

// A sum reads what a product's kernel gives: families are taken one after the other, as in the pipeline.

// CHECK: bwd.kernels = ["sum of 4096 rows of 1024: columns_1_{{.*}}", "matmul of tensor<4096x1024xf32>
// CHECK-LABEL: func.func @sum_of_product(
// CHECK: %[[PARTS:.*]] = "flow.dispatch"({{.*}}@product_nn_f32
// CHECK-NOT: linalg.matmul
// CHECK: @columns_1_
#id = affine_map<(d0, d1) -> (d0, d1)>
#col = affine_map<(d0, d1) -> (d1)>
func.func @sum_of_product(%a: tensor<4096x1024xf32>, %b: tensor<1024x1024xf32>) -> (tensor<1024xf32>, tensor<4096x1024xf32>) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4096x1024xf32>
  %f = linalg.fill ins(%z : f32) outs(%e : tensor<4096x1024xf32>) -> tensor<4096x1024xf32>
  %p = linalg.matmul ins(%a, %b : tensor<4096x1024xf32>, tensor<1024x1024xf32>)
      outs(%f : tensor<4096x1024xf32>) -> tensor<4096x1024xf32>
  %e1 = tensor.empty() : tensor<1024xf32>
  %f1 = linalg.fill ins(%z : f32) outs(%e1 : tensor<1024xf32>) -> tensor<1024xf32>
  %s = linalg.generic {indexing_maps = [#id, #col], iterator_types = ["reduction", "parallel"]}
      ins(%p : tensor<4096x1024xf32>) outs(%f1 : tensor<1024xf32>) {
  ^bb0(%x: f32, %t: f32):
    %q = arith.addf %x, %t : f32
    linalg.yield %q : f32
  } -> tensor<1024xf32>
  return %s, %p : tensor<1024xf32>, tensor<4096x1024xf32>
}

// -----

// What reads a number that is in no tensor stays with IREE, maps and sums along rows and sums down columns alike.

#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
#column = affine_map<(d0, d1) -> (d1)>
#none = affine_map<(d0, d1) -> ()>
// CHECK-LABEL: func.func @numbers(
// CHECK-COUNT-3: linalg.generic
// CHECK-NOT: flow.dispatch
// CHECK: return
func.func @numbers(%x: tensor<1024x1001xf32>, %y: tensor<4096x96xf32>, %s: f32)
    -> (tensor<1024x1001xf32>, tensor<1024xf32>, tensor<96xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<1024x1001xf32>
  %f = tensor.empty() : tensor<1024xf32>
  %g = tensor.empty() : tensor<96xf32>
  %fs = linalg.fill ins(%zero : f32) outs(%f : tensor<1024xf32>) -> tensor<1024xf32>
  %gs = linalg.fill ins(%zero : f32) outs(%g : tensor<96xf32>) -> tensor<96xf32>
  %map = linalg.generic {indexing_maps = [#id, #none, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %s : tensor<1024x1001xf32>, f32) outs(%e : tensor<1024x1001xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    linalg.yield %1 : f32
  } -> tensor<1024x1001xf32>
  %along = linalg.generic {indexing_maps = [#id, #none, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x, %s : tensor<1024x1001xf32>, f32) outs(%fs : tensor<1024xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    %2 = arith.addf %o, %1 : f32
    linalg.yield %2 : f32
  } -> tensor<1024xf32>
  %down = linalg.generic {indexing_maps = [#id, #none, #column], iterator_types = ["reduction", "parallel"]}
      ins(%y, %s : tensor<4096x96xf32>, f32) outs(%gs : tensor<96xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %1 = arith.mulf %a, %b : f32
    %2 = arith.addf %o, %1 : f32
    linalg.yield %2 : f32
  } -> tensor<96xf32>
  return %map, %along, %down : tensor<1024x1001xf32>, tensor<1024xf32>, tensor<96xf32>
}

// -----

// A sum down columns reads what others read too, where what that is computed of is more than twice as much; what is read
// for one more alone is computed on the way.

#id = affine_map<(d0, d1) -> (d0, d1)>
#column = affine_map<(d0, d1) -> (d1)>
// CHECK-LABEL: func.func @far(
// CHECK-SAME: %[[A:[a-z0-9]*]]: tensor<4096x96xf32>, %[[B:[a-z0-9]*]]: tensor<4096x96xf32>, %[[C:[a-z0-9]*]]: tensor<4096x96xf32>
// CHECK: %[[FIRST:.*]] = linalg.generic {{.*}} ins(%[[A]], %[[B]]
// CHECK: %[[FAR:.*]] = linalg.generic {{.*}} ins(%[[FIRST]], %[[C]]
// CHECK: "flow.dispatch"({{.*}}, %[[FAR]], {{.*}}@columns_1_
// CHECK: "flow.dispatch"({{.*}}, %[[A]], %[[B]], {{.*}}@columns_1_
func.func @far(%a: tensor<4096x96xf32>, %b: tensor<4096x96xf32>, %c: tensor<4096x96xf32>)
    -> (tensor<96xf32>, tensor<4096x96xf32>, tensor<96xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4096x96xf32>
  %f = tensor.empty() : tensor<96xf32>
  %start = linalg.fill ins(%zero : f32) outs(%f : tensor<96xf32>) -> tensor<96xf32>
  %first = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a, %b : tensor<4096x96xf32>, tensor<4096x96xf32>) outs(%e : tensor<4096x96xf32>) {
  ^bb0(%x: f32, %y: f32, %o: f32):
    %1 = arith.addf %x, %y : f32
    linalg.yield %1 : f32
  } -> tensor<4096x96xf32>
  %far = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%first, %c : tensor<4096x96xf32>, tensor<4096x96xf32>) outs(%e : tensor<4096x96xf32>) {
  ^bb0(%x: f32, %y: f32, %o: f32):
    %1 = arith.addf %x, %y : f32
    linalg.yield %1 : f32
  } -> tensor<4096x96xf32>
  %sum = linalg.generic {indexing_maps = [#id, #column], iterator_types = ["reduction", "parallel"]}
      ins(%far : tensor<4096x96xf32>) outs(%start : tensor<96xf32>) {
  ^bb0(%x: f32, %o: f32):
    %1 = arith.addf %o, %x : f32
    linalg.yield %1 : f32
  } -> tensor<96xf32>
  %other = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%far : tensor<4096x96xf32>) outs(%e : tensor<4096x96xf32>) {
  ^bb0(%x: f32, %o: f32):
    %1 = math.exp %x : f32
    linalg.yield %1 : f32
  } -> tensor<4096x96xf32>
  %near = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a, %b : tensor<4096x96xf32>, tensor<4096x96xf32>) outs(%e : tensor<4096x96xf32>) {
  ^bb0(%x: f32, %y: f32, %o: f32):
    %1 = arith.mulf %x, %y : f32
    linalg.yield %1 : f32
  } -> tensor<4096x96xf32>
  %rest = linalg.generic {indexing_maps = [#id, #column], iterator_types = ["reduction", "parallel"]}
      ins(%near : tensor<4096x96xf32>) outs(%start : tensor<96xf32>) {
  ^bb0(%x: f32, %o: f32):
    %1 = arith.addf %o, %x : f32
    linalg.yield %1 : f32
  } -> tensor<96xf32>
  return %sum, %other, %rest : tensor<96xf32>, tensor<4096x96xf32>, tensor<96xf32>
}

// -----

// The gradient of a weight under autocast is rounded and widened again in the product's kernel.

#id = affine_map<(d0, d1) -> (d0, d1)>
// CHECK-LABEL: func.func @widened(
// CHECK: %[[R:.*]] = "flow.dispatch"({{.*}}@product_tn_bf16_{{.*}}_rounded{{.*}} -> tensor<768x3072xf32>
// CHECK-NEXT: return %[[R]]
func.func @widened(%x: tensor<4096x768xbf16>, %g: tensor<4096x3072xbf16>) -> tensor<768x3072xf32> {
  %zero = arith.constant 0.0 : f32
  %t = tensor.empty() : tensor<768x4096xbf16>
  %turned = linalg.transpose ins(%x : tensor<4096x768xbf16>) outs(%t : tensor<768x4096xbf16>) permutation = [1, 0]
  %e = tensor.empty() : tensor<768x3072xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%e : tensor<768x3072xf32>) -> tensor<768x3072xf32>
  %p = linalg.matmul ins(%turned, %g : tensor<768x4096xbf16>, tensor<4096x3072xbf16>)
      outs(%fill : tensor<768x3072xf32>) -> tensor<768x3072xf32>
  %n = tensor.empty() : tensor<768x3072xbf16>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%p : tensor<768x3072xf32>) outs(%n : tensor<768x3072xbf16>) {
  ^bb0(%a: f32, %o: bf16):
    %1 = arith.truncf %a : f32 to bf16
    linalg.yield %1 : bf16
  } -> tensor<768x3072xbf16>
  %w = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%r : tensor<768x3072xbf16>) outs(%e : tensor<768x3072xf32>) {
  ^bb0(%a: bf16, %o: f32):
    %1 = arith.extf %a : bf16 to f32
    linalg.yield %1 : f32
  } -> tensor<768x3072xf32>
  return %w : tensor<768x3072xf32>
}
