// RUN: retrograd-opt %s --split-input-file --allow-unregistered-dialect -p 'bwd-split-long-products' | FileCheck %s

// Sums of 6144 terms in pieces of 1024, each added to the one before; slices are made apart from the products.
// CHECK-LABEL: func.func @long(
// CHECK-SAME: %[[X:.*]]: tensor<300x6144xf32>, %[[W:.*]]: tensor<6144x300xf32>, %[[INTO:.*]]: tensor<300x300xf32>
// CHECK-DAG: %[[ROWS:.*]] = tensor.extract_slice %[[X]][0, 0] [300, 1024] [1, 1]
// CHECK-DAG: %[[COLUMNS:.*]] = tensor.extract_slice %[[W]][0, 0] [1024, 300] [1, 1]
// CHECK-DAG: %[[OWN_ROWS:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[ROWS]])
// CHECK-DAG: %[[OWN_COLUMNS:.*]] = "iree_tensor_ext.compute_barrier.start"(%[[COLUMNS]])
// CHECK: %[[FIRST:.*]] = linalg.matmul ins(%[[OWN_ROWS]], %[[OWN_COLUMNS]] : {{.*}}) outs(%[[INTO]] :
// CHECK: tensor.extract_slice %[[X]][0, 1024] [300, 1024] [1, 1]
// CHECK: tensor.extract_slice %[[W]][1024, 0] [1024, 300] [1, 1]
// CHECK: linalg.matmul ins({{.*}}) outs(%[[FIRST]] :
// CHECK-COUNT-4: linalg.matmul
// CHECK-NOT: linalg.matmul
func.func @long(%x: tensor<300x6144xf32>, %w: tensor<6144x300xf32>, %into: tensor<300x300xf32>) -> tensor<300x300xf32> {
  %0 = linalg.matmul ins(%x, %w : tensor<300x6144xf32>, tensor<6144x300xf32>)
      outs(%into : tensor<300x300xf32>) -> tensor<300x300xf32>
  return %0 : tensor<300x300xf32>
}

// -----

// A prime number of terms: the last piece is shorter.
// CHECK-LABEL: func.func @prime(
// CHECK: tensor.extract_slice %{{.*}}[0, 5130] [300, 1021] [1, 1]
func.func @prime(%x: tensor<300x6151xf32>, %w: tensor<6151x300xf32>, %into: tensor<300x300xf32>) -> tensor<300x300xf32> {
  %0 = linalg.matmul ins(%x, %w : tensor<300x6151xf32>, tensor<6151x300xf32>)
      outs(%into : tensor<300x300xf32>) -> tensor<300x300xf32>
  return %0 : tensor<300x300xf32>
}

// -----

// What stays: shorter sums, few columns, another type, open sizes, an operand that is read transposed.
// CHECK-LABEL: func.func @whole(
// CHECK-NOT: tensor.extract_slice
#row_term = affine_map<(m, n, k) -> (m, k)>
#column_term = affine_map<(m, n, k) -> (n, k)>
#result = affine_map<(m, n, k) -> (m, n)>
func.func @whole(%a: tensor<1000x6000xf32>, %b: tensor<6000x1000xf32>, %ab: tensor<1000x1000xf32>,
                 %c: tensor<1000x8192xf32>, %d: tensor<8192x255xf32>, %cd: tensor<1000x255xf32>,
                 %e: tensor<512x8192xf64>, %f: tensor<8192x512xf64>, %ef: tensor<512x512xf64>,
                 %g: tensor<?x8192xf32>, %h: tensor<8192x512xf32>, %gh: tensor<?x512xf32>,
                 %i: tensor<512x8192xf32>, %j: tensor<512x8192xf32>, %ij: tensor<512x512xf32>)
    -> (tensor<1000x1000xf32>, tensor<1000x255xf32>, tensor<512x512xf64>, tensor<?x512xf32>, tensor<512x512xf32>) {
  %0 = linalg.matmul ins(%a, %b : tensor<1000x6000xf32>, tensor<6000x1000xf32>)
      outs(%ab : tensor<1000x1000xf32>) -> tensor<1000x1000xf32>
  %1 = linalg.matmul ins(%c, %d : tensor<1000x8192xf32>, tensor<8192x255xf32>)
      outs(%cd : tensor<1000x255xf32>) -> tensor<1000x255xf32>
  %2 = linalg.matmul ins(%e, %f : tensor<512x8192xf64>, tensor<8192x512xf64>)
      outs(%ef : tensor<512x512xf64>) -> tensor<512x512xf64>
  %3 = linalg.matmul ins(%g, %h : tensor<?x8192xf32>, tensor<8192x512xf32>)
      outs(%gh : tensor<?x512xf32>) -> tensor<?x512xf32>
  %4 = linalg.matmul indexing_maps = [#row_term, #column_term, #result]
      ins(%i, %j : tensor<512x8192xf32>, tensor<512x8192xf32>) outs(%ij : tensor<512x512xf32>) -> tensor<512x512xf32>
  return %0, %1, %2, %3, %4
      : tensor<1000x1000xf32>, tensor<1000x255xf32>, tensor<512x512xf64>, tensor<?x512xf32>, tensor<512x512xf32>
}
