// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-mark-products' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-mark-products{avoid-tails=true}' \
// RUN:   | FileCheck %s --check-prefix=TAILS

// Large products repay packing their operands, small ones do not.
// CHECK-LABEL: func.func @large_and_small(
// CHECK: linalg.matmul {iree.opt.data_tiling} ins(%{{.*}}, %{{.*}} : tensor<512x256xf32>, tensor<256x512xf32>)
// CHECK: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<512x512xf32>, tensor<512x16xf32>)
// CHECK-NOT: iree.opt.data_tiling
func.func @large_and_small(%a: tensor<512x256xf32>, %b: tensor<256x512xf32>, %c: tensor<512x16xf32>,
                           %y: tensor<512x512xf32>, %z: tensor<512x16xf32>) -> tensor<512x16xf32> {
  %0 = linalg.matmul ins(%a, %b : tensor<512x256xf32>, tensor<256x512xf32>) outs(%y : tensor<512x512xf32>)
      -> tensor<512x512xf32>
  %1 = linalg.matmul ins(%0, %c : tensor<512x512xf32>, tensor<512x16xf32>) outs(%z : tensor<512x16xf32>)
      -> tensor<512x16xf32>
  return %1 : tensor<512x16xf32>
}

// -----

// Of a batch each product counts by itself. Unmarked functions are packed whole: where another one packs, barriers are
// marked.
// CHECK-LABEL: func.func @batch(
// CHECK: linalg.batch_matmul ins(
// CHECK: "util.optimization_barrier"(%{{.*}}) {iree.opt.data_tiling}
func.func @batch(%a: tensor<64x128x64xf32>, %b: tensor<64x64x128xf32>, %y: tensor<64x128x128xf32>)
    -> tensor<64x128x128xf32> {
  %0 = linalg.batch_matmul ins(%a, %b : tensor<64x128x64xf32>, tensor<64x64x128xf32>)
      outs(%y : tensor<64x128x128xf32>) -> tensor<64x128x128xf32>
  %1 = "util.optimization_barrier"(%a) : (tensor<64x128x64xf32>) -> tensor<64x128x64xf32>
  return %0 : tensor<64x128x128xf32>
}

func.func @other(%a: tensor<512x512xf32>) -> tensor<512x512xf32> {
  %0 = linalg.matmul ins(%a, %a : tensor<512x512xf32>, tensor<512x512xf32>) outs(%a : tensor<512x512xf32>)
      -> tensor<512x512xf32>
  return %0 : tensor<512x512xf32>
}

// -----

// Where nothing is packed nothing has to be marked.
// CHECK-LABEL: func.func @small(
// CHECK-NOT: iree.opt.data_tiling
func.func @small(%a: tensor<4x4xf32>, %y: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = linalg.matmul ins(%a, %a : tensor<4x4xf32>, tensor<4x4xf32>) outs(%y : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}

// -----

// Open sizes may be large, and of other types than f32 plain products are slow at any size.
// CHECK-LABEL: func.func @open_and_half(
// CHECK: linalg.matmul {iree.opt.data_tiling} ins(%{{.*}}, %{{.*}} : tensor<?x8xf32>, tensor<8x8xf32>)
// CHECK: linalg.matmul {iree.opt.data_tiling} ins(%{{.*}}, %{{.*}} : tensor<8x8xbf16>, tensor<8x8xbf16>)
func.func @open_and_half(%a: tensor<?x8xf32>, %b: tensor<8x8xf32>, %y: tensor<?x8xf32>, %c: tensor<8x8xbf16>,
                         %z: tensor<8x8xbf16>) -> (tensor<?x8xf32>, tensor<8x8xbf16>) {
  %0 = linalg.matmul ins(%a, %b : tensor<?x8xf32>, tensor<8x8xf32>) outs(%y : tensor<?x8xf32>) -> tensor<?x8xf32>
  %1 = linalg.matmul ins(%c, %c : tensor<8x8xbf16>, tensor<8x8xbf16>) outs(%z : tensor<8x8xbf16>) -> tensor<8x8xbf16>
  return %0, %1 : tensor<?x8xf32>, tensor<8x8xbf16>
}

// -----

// What IREE would split into hundreds of partial sums is split into sums of 4096 terms, and not packed as well.
// CHECK-LABEL: func.func @split(
// CHECK: linalg.matmul {iree_linalg_ext.split_reduction = [4096 : index]} ins(
// CHECK: linalg.matmul {iree_linalg_ext.split_reduction = [2048 : index]} ins(
// CHECK-NOT: iree.opt.data_tiling
func.func @split(%a: tensor<64x32768xf32>, %b: tensor<32768x64xf32>, %y: tensor<64x64xf32>, %c: tensor<16x2048xf32>,
                 %d: tensor<2048x16xf32>, %z: tensor<16x16xf32>) -> (tensor<64x64xf32>, tensor<16x16xf32>) {
  %0 = linalg.matmul ins(%a, %b : tensor<64x32768xf32>, tensor<32768x64xf32>) outs(%y : tensor<64x64xf32>)
      -> tensor<64x64xf32>
  %1 = linalg.matmul ins(%c, %d : tensor<16x2048xf32>, tensor<2048x16xf32>) outs(%z : tensor<16x16xf32>)
      -> tensor<16x16xf32>
  return %0, %1 : tensor<64x64xf32>, tensor<16x16xf32>
}

// -----

// Of 21 columns that lie transposed in memory a tile of 16 leaves a tail of five; 48 columns have none, and of a matrix
// that is not transposed it is no trouble.
// CHECK-LABEL: func.func @tail(
// CHECK-NOT: compilation_info
// TAILS-LABEL: func.func @tail(
// TAILS: linalg.matmul {compilation_info = #iree_codegen.compilation_info<
// TAILS-SAME: distribution = [8, 21, 0], vector_common_parallel = [8, 7, 0], vector_reduction = [0, 0, 16]
// TAILS-NOT: compilation_info
func.func @tail(%a: tensor<16x8192xf32>, %b: tensor<1x21x8192xf32>, %c: tensor<48x8192xf32>, %d: tensor<8192x21xf32>,
                %y: tensor<16x21xf32>, %z: tensor<16x48xf32>)
    -> (tensor<16x21xf32>, tensor<16x48xf32>, tensor<16x21xf32>) {
  %e = tensor.empty() : tensor<1x8192x21xf32>
  %t = linalg.transpose ins(%b : tensor<1x21x8192xf32>) outs(%e : tensor<1x8192x21xf32>) permutation = [0, 2, 1]
  %m = tensor.collapse_shape %t [[0, 1], [2]] : tensor<1x8192x21xf32> into tensor<8192x21xf32>
  %0 = linalg.matmul ins(%a, %m : tensor<16x8192xf32>, tensor<8192x21xf32>) outs(%y : tensor<16x21xf32>)
      -> tensor<16x21xf32>
  %f = tensor.empty() : tensor<8192x48xf32>
  %u = linalg.transpose ins(%c : tensor<48x8192xf32>) outs(%f : tensor<8192x48xf32>) permutation = [1, 0]
  %1 = linalg.matmul ins(%a, %u : tensor<16x8192xf32>, tensor<8192x48xf32>) outs(%z : tensor<16x48xf32>)
      -> tensor<16x48xf32>
  %2 = linalg.matmul ins(%a, %d : tensor<16x8192xf32>, tensor<8192x21xf32>) outs(%y : tensor<16x21xf32>)
      -> tensor<16x21xf32>
  return %0, %1, %2 : tensor<16x21xf32>, tensor<16x48xf32>, tensor<16x21xf32>
}

// -----

// Of sides that no tile of IREE's divides, as of 401 tokens, the rest is a loop of its own; 49 columns are three tiles
// of 16 and one more.
// CHECK-LABEL: func.func @peeled(
// CHECK-NOT: compilation_info
// TAILS-LABEL: func.func @peeled(
// TAILS: linalg.batch_matmul {compilation_info = #iree_codegen.compilation_info<
// TAILS-SAME: cache_parallel = [1, 64, 64, 0], distribution = [1, 64, 64, 0],
// TAILS-SAME: vector_common_parallel = [1, 8, 32, 0], vector_reduction = [0, 0, 0, 4]
// TAILS-SAME: enable_loop_peeling
// TAILS-SAME: tensor<6x401x32xf32>
// TAILS: linalg.matmul {compilation_info = #iree_codegen.compilation_info<
// TAILS-SAME: cache_parallel = [64, 64, 0], distribution = [64, 64, 0],
// TAILS-SAME: vector_common_parallel = [8, 16, 0], vector_reduction = [0, 0, 8]
// TAILS-SAME: enable_loop_peeling
// TAILS-SAME: tensor<49x64xf32>
func.func @peeled(%a: tensor<6x401x32xf32>, %b: tensor<6x32x401xf32>, %y: tensor<6x401x401xf32>, %c: tensor<49x64xf32>,
                  %d: tensor<64x49xf32>, %z: tensor<49x49xf32>) -> (tensor<6x401x401xf32>, tensor<49x49xf32>) {
  %0 = linalg.batch_matmul ins(%a, %b : tensor<6x401x32xf32>, tensor<6x32x401xf32>) outs(%y : tensor<6x401x401xf32>)
      -> tensor<6x401x401xf32>
  %1 = linalg.matmul ins(%c, %d : tensor<49x64xf32>, tensor<64x49xf32>) outs(%z : tensor<49x49xf32>)
      -> tensor<49x49xf32>
  return %0, %1 : tensor<6x401x401xf32>, tensor<49x49xf32>
}

// -----

// No tile: an axis of one element, which IREE takes out; fewer rows than a tile; other types; packed operands.
// TAILS-LABEL: func.func @unpeeled(
// TAILS-NOT: compilation_info
func.func @unpeeled(%a: tensor<1x401x32xf32>, %b: tensor<1x32x401xf32>, %y: tensor<1x401x401xf32>,
                    %c: tensor<6x7x32xf32>, %d: tensor<6x32x64xf32>, %z: tensor<6x7x64xf32>,
                    %e: tensor<6x40x32xf64>, %f: tensor<6x32x64xf64>, %x: tensor<6x40x64xf64>,
                    %g: tensor<512x512xf32>)
    -> (tensor<1x401x401xf32>, tensor<6x7x64xf32>, tensor<6x40x64xf64>, tensor<512x512xf32>) {
  %0 = linalg.batch_matmul ins(%a, %b : tensor<1x401x32xf32>, tensor<1x32x401xf32>) outs(%y : tensor<1x401x401xf32>)
      -> tensor<1x401x401xf32>
  %1 = linalg.batch_matmul ins(%c, %d : tensor<6x7x32xf32>, tensor<6x32x64xf32>) outs(%z : tensor<6x7x64xf32>)
      -> tensor<6x7x64xf32>
  %2 = linalg.batch_matmul ins(%e, %f : tensor<6x40x32xf64>, tensor<6x32x64xf64>) outs(%x : tensor<6x40x64xf64>)
      -> tensor<6x40x64xf64>
  %3 = linalg.matmul ins(%g, %g : tensor<512x512xf32>, tensor<512x512xf32>) outs(%g : tensor<512x512xf32>)
      -> tensor<512x512xf32>
  return %0, %1, %2, %3 : tensor<1x401x401xf32>, tensor<6x7x64xf32>, tensor<6x40x64xf64>, tensor<512x512xf32>
}

// -----

#row = affine_map<(t, m, n) -> (m, n)>
#all = affine_map<(t, m, n) -> (t, m, n)>
#id = affine_map<(m, n) -> (m, n)>
// Each element is in 32 places of what is computed with it: no tile. Where it is in one, there is one.
// TAILS-LABEL: func.func @repeated(
// TAILS: linalg.matmul ins(%{{.*}}, %{{.*}} : tensor<16x5xf32>, tensor<5x64xf32>)
// TAILS-LABEL: func.func @not_repeated(
// TAILS: linalg.matmul {compilation_info = #iree_codegen.compilation_info<
func.func @repeated(%a: tensor<16x5xf32>, %b: tensor<5x64xf32>, %y: tensor<16x64xf32>, %z: tensor<32x16x64xf32>)
    -> tensor<32x16x64xf32> {
  %0 = linalg.matmul ins(%a, %b : tensor<16x5xf32>, tensor<5x64xf32>) outs(%y : tensor<16x64xf32>) -> tensor<16x64xf32>
  %1 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%0 : tensor<16x64xf32>) outs(%y : tensor<16x64xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = math.exp %x : f32
    linalg.yield %s : f32
  } -> tensor<16x64xf32>
  %2 = linalg.generic {indexing_maps = [#row, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%1 : tensor<16x64xf32>) outs(%z : tensor<32x16x64xf32>) {
  ^bb0(%x: f32, %out: f32):
    linalg.yield %x : f32
  } -> tensor<32x16x64xf32>
  return %2 : tensor<32x16x64xf32>
}

func.func @not_repeated(%a: tensor<16x5xf32>, %b: tensor<5x64xf32>, %y: tensor<16x64xf32>) -> tensor<16x64xf32> {
  %0 = linalg.matmul ins(%a, %b : tensor<16x5xf32>, tensor<5x64xf32>) outs(%y : tensor<16x64xf32>) -> tensor<16x64xf32>
  %1 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%0 : tensor<16x64xf32>) outs(%y : tensor<16x64xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = math.exp %x : f32
    linalg.yield %s : f32
  } -> tensor<16x64xf32>
  return %1 : tensor<16x64xf32>
}

// -----

#same = affine_map<(d0, d1) -> (d0, d1)>

// What both operands were widened from is what IREE multiplies; one alone is not.
// CHECK-LABEL: func.func @widened(
// CHECK: linalg.matmul {iree.opt.data_tiling}
// CHECK-NOT: iree.opt.data_tiling
func.func @widened(%a: tensor<8x8xbf16>, %b: tensor<8x8xf32>, %y: tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
  %empty = tensor.empty() : tensor<8x8xf32>
  %wide = linalg.generic {indexing_maps = [#same, #same], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<8x8xbf16>) outs(%empty : tensor<8x8xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %w = arith.extf %in : bf16 to f32
    linalg.yield %w : f32
  } -> tensor<8x8xf32>
  %turned = linalg.transpose ins(%wide : tensor<8x8xf32>) outs(%empty : tensor<8x8xf32>) permutation = [1, 0]
  %0 = linalg.matmul ins(%wide, %turned : tensor<8x8xf32>, tensor<8x8xf32>) outs(%y : tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = linalg.matmul ins(%wide, %b : tensor<8x8xf32>, tensor<8x8xf32>) outs(%y : tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0, %1 : tensor<8x8xf32>, tensor<8x8xf32>
}
