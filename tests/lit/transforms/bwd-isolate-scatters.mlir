// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-isolate-scatters' | FileCheck %s

#id = affine_map<(d0) -> (d0)>

// What is computed for a scatter, seen through views, is a tensor of its own before it.
// CHECK-LABEL: func.func @widened(
// CHECK: %[[WIDE:.*]] = linalg.generic
// CHECK: %[[ROWS:.*]] = tensor.expand_shape %[[WIDE]]
// CHECK-NEXT: %[[OWN:.*]] = "util.optimization_barrier"(%[[ROWS]]) : (tensor<2x1xf32>) -> tensor<2x1xf32>
// CHECK-NEXT: "tm_tensor.scatter"(%[[OWN]], %{{.*}}, %{{.*}}) ({
func.func @widened(%x: tensor<2xbf16>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<2xf32>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<2xbf16>) outs(%empty : tensor<2xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<2xf32>
  %rows = tensor.expand_shape %wide [[0, 1]] output_shape [2, 1] : tensor<2xf32> into tensor<2x1xf32>
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// So are places that are widened, where they are too many for a kernel's stack.
// CHECK-LABEL: func.func @widened_places(
// CHECK: %[[WIDE:.*]] = linalg.generic
// CHECK: %[[PLACES:.*]] = tensor.expand_shape %[[WIDE]]
// CHECK-NEXT: %[[OWN:.*]] = "util.optimization_barrier"(%[[PLACES]]) : (tensor<4096x1xi64>) -> tensor<4096x1xi64>
// CHECK-NEXT: "tm_tensor.scatter"(%{{.*}}, %[[OWN]], %{{.*}}) ({
func.func @widened_places(
    %rows: tensor<4096x1xf32>, %places: tensor<4096xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<4096xi64>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4096xi32>) outs(%empty : tensor<4096xi64>) {
  ^bb0(%in: i32, %out: i64):
    %i = arith.extsi %in : i32 to i64
    linalg.yield %i : i64
  } -> tensor<4096xi64>
  %column = tensor.expand_shape %wide [[0, 1]] output_shape [4096, 1] : tensor<4096xi64> into tensor<4096x1xi64>
  %r = "tm_tensor.scatter"(%rows, %column, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<4096x1xf32>, tensor<4096x1xi64>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

#id = affine_map<(d0) -> (d0)>

// Fewer places are part of the kernel.
// CHECK-LABEL: func.func @few_places(
// CHECK-NOT: util.optimization_barrier
// CHECK: return
func.func @few_places(
    %rows: tensor<4095x1xf32>, %places: tensor<4095xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<4095xi64>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%places : tensor<4095xi32>) outs(%empty : tensor<4095xi64>) {
  ^bb0(%in: i32, %out: i64):
    %i = arith.extsi %in : i32 to i64
    linalg.yield %i : i64
  } -> tensor<4095xi64>
  %column = tensor.expand_shape %wide [[0, 1]] output_shape [4095, 1] : tensor<4095xi64> into tensor<4095x1xi64>
  %r = "tm_tensor.scatter"(%rows, %column, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<4095x1xf32>, tensor<4095x1xi64>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

#id = affine_map<(d0, d1) -> (d0, d1)>

// A widening whose elements are put in another order is still one.
// CHECK-LABEL: func.func @widened_and_turned(
// CHECK: %[[TURNED:.*]] = linalg.transpose
// CHECK-NEXT: %[[OWN:.*]] = "util.optimization_barrier"(%[[TURNED]]) : (tensor<2x1xf32>) -> tensor<2x1xf32>
// CHECK-NEXT: "tm_tensor.scatter"(%[[OWN]], %{{.*}}, %{{.*}}) ({
func.func @widened_and_turned(%x: tensor<1x2xbf16>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<1x2xf32>
  %into = tensor.empty() : tensor<2x1xf32>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<1x2xbf16>) outs(%empty : tensor<1x2xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<1x2xf32>
  %turned = linalg.transpose ins(%wide : tensor<1x2xf32>) outs(%into : tensor<2x1xf32>) permutation = [1, 0]
  %r = "tm_tensor.scatter"(%turned, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

#id = affine_map<(d0, d1) -> (d0, d1)>

// What reads a widening takes it in later on.
// CHECK-LABEL: func.func @doubled(
// CHECK: %[[DOUBLE:.*]] = linalg.generic
// CHECK: %[[DOUBLE:.*]] = linalg.generic
// CHECK: "util.optimization_barrier"(%[[DOUBLE]]) : (tensor<2x1xf32>) -> tensor<2x1xf32>
func.func @doubled(%x: tensor<2x1xbf16>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<2x1xf32>
  %wide = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<2x1xbf16>) outs(%empty : tensor<2x1xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %f = arith.extf %in : bf16 to f32
    linalg.yield %f : f32
  } -> tensor<2x1xf32>
  %double = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%wide : tensor<2x1xf32>) outs(%empty : tensor<2x1xf32>) {
  ^bb0(%in: f32, %out: f32):
    %f = arith.addf %in, %in : f32
    linalg.yield %f : f32
  } -> tensor<2x1xf32>
  %r = "tm_tensor.scatter"(%double, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

// Nothing computes an argument, so that nothing can be fused.
// CHECK-LABEL: func.func @argument(
// CHECK-NOT: util.optimization_barrier
// CHECK: return
func.func @argument(%rows: tensor<2x1xf32>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

// The tensor written into is read as it was, too: what reads the result is no part of the scatter's kernel.
// CHECK-LABEL: func.func @read_before(
// CHECK: %[[NEW:.*]] = "tm_tensor.scatter"
// CHECK: %[[HIDDEN:.*]] = "util.optimization_barrier"(%[[NEW]]) : (tensor<4x1xf32>) -> tensor<4x1xf32>
// CHECK: tensor.extract %{{.*}}[
// CHECK: return %[[HIDDEN]], %{{.*}} : tensor<4x1xf32>, f32
func.func @read_before(%rows: tensor<2x1xf32>, %places: tensor<2x1xi32>, %flat: tensor<4xf32>) -> (tensor<4x1xf32>, f32) {
  %zero = arith.constant 0 : index
  %table = tensor.expand_shape %flat [[0, 1]] output_shape [4, 1] : tensor<4xf32> into tensor<4x1xf32>
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    "tm_tensor.yield"(%update) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  %first = tensor.extract %flat[%zero] : tensor<4xf32>
  return %r, %first : tensor<4x1xf32>, f32
}

// -----

// What is computed without widening or gathering stays in a kernel of its own anyway: a barrier would only cut what IREE
// runs, and lays out, in one piece.
// CHECK-LABEL: func.func @computed(
// CHECK-NOT: util.optimization_barrier
// CHECK: return
#id = affine_map<(d0) -> (d0)>
func.func @computed(%x: tensor<2xf32>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<2xf32>
  %sum = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<2xf32>) outs(%empty : tensor<2xf32>) {
  ^bb0(%in: f32, %out: f32):
    %f = arith.addf %in, %in : f32
    linalg.yield %f : f32
  } -> tensor<2xf32>
  %rows = tensor.expand_shape %sum [[0, 1]] output_shape [2, 1] : tensor<2xf32> into tensor<2x1xf32>
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    "tm_tensor.yield"(%update) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

// What gathers may be computed again in the scatter's kernel.
// CHECK-LABEL: func.func @gathered(
// CHECK: %[[OWN:.*]] = "util.optimization_barrier"
// CHECK-NEXT: "tm_tensor.scatter"(%[[OWN]],
#id = affine_map<(d0) -> (d0)>
func.func @gathered(%x: tensor<8xf32>, %at: tensor<2xindex>, %places: tensor<2x1xi32>, %table: tensor<4x1xf32>) -> tensor<4x1xf32> {
  %empty = tensor.empty() : tensor<2xf32>
  %some = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%at : tensor<2xindex>) outs(%empty : tensor<2xf32>) {
  ^bb0(%in: index, %out: f32):
    %f = tensor.extract %x[%in] : tensor<8xf32>
    linalg.yield %f : f32
  } -> tensor<2xf32>
  %rows = tensor.expand_shape %some [[0, 1]] output_shape [2, 1] : tensor<2xf32> into tensor<2x1xf32>
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    "tm_tensor.yield"(%update) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %r : tensor<4x1xf32>
}

// -----

// Zeros that two scatters start at are no tensor that is read as it was; but if something else reads them, they are.
// CHECK-LABEL: func.func @zeros(
// CHECK-NOT: util.optimization_barrier
// CHECK: return
func.func @zeros(%rows: tensor<2x1xf32>, %places: tensor<2x1xi32>) -> (tensor<4x1xf32>, tensor<4x1xf32>, tensor<4x1xf32>) {
  %flat = arith.constant dense<0.0> : tensor<4xf32>
  %table = tensor.expand_shape %flat [[0, 1]] output_shape [4, 1] : tensor<4xf32> into tensor<4x1xf32>
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x1xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x1xf32>) -> tensor<4x1xf32>
  %0 = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    "tm_tensor.yield"(%update) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  %1 = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    %sum = arith.addf %update, %old : f32
    "tm_tensor.yield"(%sum) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  %2 = "tm_tensor.scatter"(%0, %places, %filled) ({
  ^bb0(%update: f32, %old: f32):
    "tm_tensor.yield"(%update) : (f32) -> ()
  }) : (tensor<4x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  return %0, %1, %2 : tensor<4x1xf32>, tensor<4x1xf32>, tensor<4x1xf32>
}

// -----

// CHECK-LABEL: func.func @zeros_read(
// CHECK: "tm_tensor.scatter"
// CHECK: util.optimization_barrier
// CHECK: return
func.func @zeros_read(%rows: tensor<2x1xf32>, %places: tensor<2x1xi32>, %at: index) -> (tensor<4x1xf32>, f32) {
  %table = arith.constant dense<0.0> : tensor<4x1xf32>
  %r = "tm_tensor.scatter"(%rows, %places, %table) ({
  ^bb0(%update: f32, %old: f32):
    "tm_tensor.yield"(%update) : (f32) -> ()
  }) : (tensor<2x1xf32>, tensor<2x1xi32>, tensor<4x1xf32>) -> tensor<4x1xf32>
  %first = tensor.extract %table[%at, %at] : tensor<4x1xf32>
  return %r, %first : tensor<4x1xf32>, f32
}
