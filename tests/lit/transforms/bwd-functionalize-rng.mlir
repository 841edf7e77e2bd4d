// RUN: retrograd-opt %s --split-input-file -p 'bwd-functionalize-rng' | FileCheck %s

// One elementwise op: the seed's words and the element's place, seven rounds of two products, the upper 24 bits of
// one word of four.
// CHECK-LABEL: func.func @vector(
// CHECK-SAME: %[[SEED:.*]]: !torch.vtensor<[2],si64>)
// CHECK: %[[T:.*]] = torch_c.to_builtin_tensor %[[SEED]] : !torch.vtensor<[2],si64> -> tensor<2xi64>
// CHECK: %[[E:.*]] = tensor.empty() : tensor<6xf32>
// CHECK: %[[U:.*]] = linalg.generic {{.*}} iterator_types = ["parallel"]} outs(%[[E]] : tensor<6xf32>) {
// CHECK: tensor.extract %[[T]][%{{.*}}] : tensor<2xi64>
// CHECK: tensor.extract %[[T]][%{{.*}}] : tensor<2xi64>
// CHECK: linalg.index 0 : index
// CHECK: %[[PLACE:.*]] = arith.index_cast
// CHECK: arith.shrui %[[PLACE]], %{{.*}} : i32
// CHECK: arith.constant 7 : i32
// CHECK-COUNT-14: arith.muli %{{.*}} : i64
// CHECK-NOT: arith.muli
// CHECK: %[[NUMBER:.*]] = arith.andi %[[PLACE]], %{{.*}} : i32
// CHECK: %[[ONE:.*]] = arith.andi %[[NUMBER]],
// CHECK: %[[TWO:.*]] = arith.shrui %[[NUMBER]],
// CHECK-DAG: %[[ODD:.*]] = arith.trunci %[[ONE]] : i32 to i1
// CHECK-DAG: %[[UPPER:.*]] = arith.trunci %[[TWO]] : i32 to i1
// CHECK: %[[LOW:.*]] = arith.select %[[ODD]], %{{.*}} : i32
// CHECK: %[[HIGH:.*]] = arith.select %[[ODD]], %{{.*}} : i32
// CHECK: %[[WORD:.*]] = arith.select %[[UPPER]], %[[HIGH]], %[[LOW]] : i32
// CHECK: arith.shrui %[[WORD]], %{{.*}} : i32
// CHECK: %[[N:.*]] = arith.sitofp %{{.*}} : i32 to f32
// CHECK: %[[UNIT:.*]] = arith.constant 5.96046448E-8 : f32
// CHECK: %[[F:.*]] = arith.mulf %[[N]], %[[UNIT]] : f32
// CHECK: linalg.yield %[[F]] : f32
// CHECK: %[[R:.*]] = torch_c.from_builtin_tensor %[[U]] : tensor<6xf32> -> !torch.vtensor<[6],f32>
// CHECK: return %[[R]]
func.func @vector(%seed: !torch.vtensor<[2],si64>) -> !torch.vtensor<[6],f32> {
  %stream = torch.constant.int 7
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream) : (!torch.vtensor<[2],si64>, !torch.int) -> !torch.vtensor<[6],f32>
  return %u : !torch.vtensor<[6],f32>
}

// -----

// The place is counted in row-major order, whatever the shape.
// CHECK-LABEL: func.func @matrix(
// CHECK: linalg.generic {{.*}} iterator_types = ["parallel", "parallel"]} outs(%{{.*}} : tensor<3x5xf32>) {
// CHECK: %[[I:.*]] = linalg.index 0 : index
// CHECK: %[[ROW:.*]] = arith.index_cast %[[I]] : index to i32
// CHECK: %[[J:.*]] = linalg.index 1 : index
// CHECK: %[[COLUMN:.*]] = arith.index_cast %[[J]] : index to i32
// CHECK: %[[WIDTH:.*]] = arith.constant 5 : i32
// CHECK: %[[FROM:.*]] = arith.muli %[[ROW]], %[[WIDTH]] : i32
// CHECK: arith.addi %[[FROM]], %[[COLUMN]] : i32
func.func @matrix(%seed: !torch.vtensor<[2],si64>) -> !torch.vtensor<[3,5],f32> {
  %stream = torch.constant.int 0
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream) : (!torch.vtensor<[2],si64>, !torch.int) -> !torch.vtensor<[3,5],f32>
  return %u : !torch.vtensor<[3,5],f32>
}

// -----

// A single number, and an op that is another library's.
// CHECK-LABEL: func.func @scalar(
// CHECK: linalg.generic {{.*}} iterator_types = []} outs(%{{.*}} : tensor<f32>) {
// CHECK-NOT: linalg.index
// CHECK: torch.operator "torch.other.op"
func.func @scalar(%seed: !torch.vtensor<[2],si64>) -> !torch.vtensor<[],f32> {
  %stream = torch.constant.int 0
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream) : (!torch.vtensor<[2],si64>, !torch.int) -> !torch.vtensor<[],f32>
  %r = torch.operator "torch.other.op"(%u) : (!torch.vtensor<[],f32>) -> !torch.vtensor<[],f32>
  return %r : !torch.vtensor<[],f32>
}

// -----

// An open size is an operand of the op: of the tensor, and of the place of an element.
// CHECK-LABEL: func.func @open(
// CHECK-SAME: %{{.*}}: !torch.vtensor<[2],si64>, %[[N:.*]]: !torch.int)
// CHECK: %[[I64:.*]] = torch_c.to_i64 %[[N]]
// CHECK: %[[INDEX:.*]] = arith.index_cast %[[I64]] : i64 to index
// CHECK: tensor.empty(%[[INDEX]]) : tensor<3x?xf32>
// CHECK: %[[WIDTH:.*]] = arith.trunci %[[I64]] : i64 to i32
// CHECK: arith.muli %{{.*}}, %[[WIDTH]] : i32
func.func @open(%seed: !torch.vtensor<[2],si64>, %n: !torch.int) -> !torch.vtensor<[3,?],f32> {
  %stream = torch.constant.int 0
  %three = torch.constant.int 3
  %sizes = torch.prim.ListConstruct %three, %n : (!torch.int, !torch.int) -> !torch.list<int>
  %u = torch.operator "torch.retrograd.uniform"(%seed, %stream, %sizes) : (!torch.vtensor<[2],si64>, !torch.int, !torch.list<int>) -> !torch.vtensor<[3,?],f32>
  return %u : !torch.vtensor<[3,?],f32>
}
