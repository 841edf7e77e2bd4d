# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The least programs that show a fault of iree-compile or torch-mlir."""

OUTER = """
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
#column = affine_map<(m, n) -> (n)>
func.func @main(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %zero = arith.constant 0.0 : f32
  %rows = tensor.empty() : tensor<4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%rows : tensor<4xf32>) -> tensor<4xf32>
  %sums = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<4x4xf32>) outs(%zeros : tensor<4xf32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %empty = tensor.empty() : tensor<4x4xf32>
  %outer = linalg.generic {indexing_maps = [#row, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%sums, %sums : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4x4xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.mulf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  return %outer : tensor<4x4xf32>
}
"""
"""A row's sum beside a column's, which release 3.13 gets wrong with any flags."""

ONE_WINDOW = """
#window = affine_map<(i, j, k) -> (j * 2 + k, i)>
#id = affine_map<(i, j, k) -> (i, j, k)>
func.func @main(%x: tensor<3x5xf32>) -> tensor<5x1x2xf32> {
  %empty = tensor.empty() : tensor<5x1x2xf32>
  %r = linalg.generic {indexing_maps = [#window, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<3x5xf32>) outs(%empty : tensor<5x1x2xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<5x1x2xf32>
  return %r : tensor<5x1x2xf32>
}
"""
"""The first two of three rows, by a loop of one step, which is dropped: the other runs over two rows, not three."""

WEIGHTED_SUM = """
#matrix = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (j)>
#number = affine_map<(i, j) -> ()>
func.func @main(%a: tensor<64x32xf32>, %b: tensor<32xf32>) -> tensor<f32> {
  %zero = arith.constant 0.0 : f32
  %one = tensor.empty() : tensor<f32>
  %start = linalg.fill ins(%zero : f32) outs(%one : tensor<f32>) -> tensor<f32>
  %empty = tensor.empty() : tensor<64x32xf32>
  %product = linalg.generic {indexing_maps = [#matrix, #row, #matrix], iterator_types = ["parallel", "parallel"]}
      ins(%a, %b : tensor<64x32xf32>, tensor<32xf32>) outs(%empty : tensor<64x32xf32>) {
  ^bb0(%x: f32, %y: f32, %out: f32):
    %s = arith.mulf %x, %y : f32
    linalg.yield %s : f32
  } -> tensor<64x32xf32>
  %sum = linalg.generic {indexing_maps = [#matrix, #number], iterator_types = ["reduction", "reduction"]}
      ins(%product : tensor<64x32xf32>) outs(%start : tensor<f32>) {
  ^bb0(%x: f32, %out: f32):
    %s = arith.addf %x, %out : f32
    linalg.yield %s : f32
  } -> tensor<f32>
  return %sum : tensor<f32>
}
"""
"""The sum of a product with a row, which code for a CPU makes a contraction that its verifier refuses."""

INDEX_PUT = """
func.func @main(%x: !torch.vtensor<[8],f32>, %i: !torch.vtensor<[4],si64>, %v: !torch.vtensor<[4],f32>)
    -> !torch.vtensor<[8],f32> {
  %false = torch.constant.bool false
  %list = torch.prim.ListConstruct %i : (!torch.vtensor<[4],si64>) -> !torch.list<vtensor>
  %r = torch.aten.index_put.hacked_twin %x, %list, %v, %false : !torch.vtensor<[8],f32>, !torch.list<vtensor>,
      !torch.vtensor<[4],f32>, !torch.bool -> !torch.vtensor<[8],f32>
  return %r : !torch.vtensor<[8],f32>
}
"""
"""Numbers written to places that nobody says are all different."""

TURNED = """
#id = affine_map<(i, j) -> (i, j)>
func.func @main(%x: tensor<3x5xf32>) -> (tensor<5x3xf32>, tensor<3x5xf32>) {
  %empty = tensor.empty() : tensor<3x5xf32>
  %both:2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<3x5xf32>) outs(%empty, %empty : tensor<3x5xf32>, tensor<3x5xf32>) {
  ^bb0(%a: f32, %b: f32, %c: f32):
    %d = arith.addf %a, %a : f32
    linalg.yield %a, %d : f32, f32
  } -> (tensor<3x5xf32>, tensor<3x5xf32>)
  %turned = tensor.empty() : tensor<5x3xf32>
  %t = linalg.transpose ins(%both#0 : tensor<3x5xf32>) outs(%turned : tensor<5x3xf32>) permutation = [1, 0]
  return %t, %both#1 : tensor<5x3xf32>, tensor<3x5xf32>
}
"""
"""An op of two results, of which one is turned round."""

SUM_OF_ROWS = """
#matrix = affine_map<(i, j) -> (i, j)>
#number = affine_map<(i, j) -> ()>
func.func @main(%x: tensor<4096x512xf32>) -> tensor<f32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<f32>
  %start = linalg.fill ins(%zero : f32) outs(%empty : tensor<f32>) -> tensor<f32>
  %r = linalg.generic {indexing_maps = [#matrix, #number], iterator_types = ["reduction", "reduction"]}
      ins(%x : tensor<4096x512xf32>) outs(%start : tensor<f32>) {
  ^bb0(%a: f32, %out: f32):
    %s = arith.addf %a, %out : f32
    linalg.yield %s : f32
  } -> tensor<f32>
  return %r : tensor<f32>
}
"""
"""A sum of all numbers of a matrix, which is split among workgroups."""

NUMBERED = """
#id = affine_map<(i) -> (i)>
func.func @main(%x: tensor<25165824xf32>) -> tensor<25165824xf32> {
  %c512 = arith.constant 512 : index
  %c12 = arith.constant 12 : index
  %n12 = arith.constant 12 : i32
  %n512 = arith.constant 512 : i32
  %empty = tensor.empty() : tensor<25165824xf32>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<25165824xf32>) outs(%empty : tensor<25165824xf32>) {
  ^bb0(%a: f32, %out: f32):
    %place = linalg.index 0 : index
    %column = arith.remsi %place, %c512 : index
    %rows = arith.divsi %place, %c512 : index
    %row = arith.remsi %rows, %c512 : index
    %matrices = arith.divsi %rows, %c512 : index
    %head = arith.remsi %matrices, %c12 : index
    %batch = arith.divsi %matrices, %c12 : index
    %b = arith.index_cast %batch : index to i32
    %h = arith.index_cast %head : index to i32
    %w = arith.index_cast %row : index to i32
    %c = arith.index_cast %column : index to i32
    %0 = arith.muli %b, %n12 : i32
    %1 = arith.addi %0, %h : i32
    %2 = arith.muli %1, %n512 : i32
    %3 = arith.addi %2, %w : i32
    %4 = arith.muli %3, %n512 : i32
    %5 = arith.addi %4, %c : i32
    %6 = arith.sitofp %5 : i32 to f32
    %7 = arith.mulf %a, %6 : f32
    linalg.yield %7 : f32
  } -> tensor<25165824xf32>
  return %r : tensor<25165824xf32>
}
"""
"""A number's place, taken apart as where IREE makes one loop of four, and put together again."""

NEGATIVE_SCALAR = """
func.func @main() -> !torch.vtensor<[2],f32> {
  %ones = torch.vtensor.literal(dense<1.0> : tensor<2xf32>) : !torch.vtensor<[2],f32>
  %number = torch.constant.int -1
  %product = torch.aten.mul.Scalar %ones, %number : !torch.vtensor<[2],f32>, !torch.int -> !torch.vtensor<[2],f32>
  return %product : !torch.vtensor<[2],f32>
}
"""
"""Minus one times ones, which torch-mlir folds to 2^64 - 1."""

SUM_OF_CONDITIONS = """
func.func @main() -> !torch.vtensor<[2],i1> {
  %true = torch.vtensor.literal(dense<true> : tensor<2xi1>) : !torch.vtensor<[2],i1>
  %one = torch.constant.int 1
  %sum = torch.aten.add.Tensor %true, %true, %one
      : !torch.vtensor<[2],i1>, !torch.vtensor<[2],i1>, !torch.int -> !torch.vtensor<[2],i1>
  return %sum : !torch.vtensor<[2],i1>
}
"""
"""True and true, which is true in PyTorch."""

NEGATIVE_REMAINDER = """
func.func @main() -> !torch.vtensor<[2],f32> {
  %values = torch.vtensor.literal(dense<-2.5> : tensor<2xf32>) : !torch.vtensor<[2],f32>
  %number = torch.constant.float 2.0
  %rest = torch.aten.remainder.Scalar %values, %number
      : !torch.vtensor<[2],f32>, !torch.float -> !torch.vtensor<[2],f32>
  return %rest : !torch.vtensor<[2],f32>
}
"""
"""A remainder that has the sign of the divisor in PyTorch: 1.5."""

WITH_ITSELF = """
func.func @main(%x: !torch.vtensor<[2],f32>) -> !torch.vtensor<[2],i1> {
  %r = torch.aten.eq.Tensor %x, %x : !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32> -> !torch.vtensor<[2],i1>
  return %r : !torch.vtensor<[2],i1>
}
"""
"""A comparison that is false where a number is none."""

CLAMP_AND_MAXIMUM = """
func.func @main(%x: !torch.vtensor<[2],f32>, %y: !torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32> {
  %least = torch.constant.float -1.0
  %most = torch.constant.float 1.0
  %held = torch.aten.clamp %x, %least, %most
      : !torch.vtensor<[2],f32>, !torch.float, !torch.float -> !torch.vtensor<[2],f32>
  %larger = torch.aten.maximum %held, %y
      : !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32> -> !torch.vtensor<[2],f32>
  return %larger : !torch.vtensor<[2],f32>
}
"""
"""Two ops that give NaN for NaN in PyTorch."""

LARGEST_AND_PLACE = """
func.func @main(%x: !torch.vtensor<[2],f32>) -> !torch.vtensor<[],si64> {
  %axis = torch.constant.int 0
  %keep = torch.constant.bool false
  %most, %place = torch.aten.max.dim %x, %axis, %keep
      : !torch.vtensor<[2],f32>, !torch.int, !torch.bool -> !torch.vtensor<[],f32>, !torch.vtensor<[],si64>
  return %place : !torch.vtensor<[],si64>
}
"""
"""The place of the largest number, of NaN in PyTorch."""

WHOLE_QUOTIENT = """
func.func @main(%x: !torch.vtensor<[2],f32>, %y: !torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32> {
  %down = torch.constant.str "floor"
  %quotient = torch.aten.div.Tensor_mode %x, %y, %down
      : !torch.vtensor<[2],f32>, !torch.vtensor<[2],f32>, !torch.str -> !torch.vtensor<[2],f32>
  return %quotient : !torch.vtensor<[2],f32>
}
"""
"""A quotient that is rounded once, down, in PyTorch."""

HALF_NUMBER = """
#id = affine_map<(i) -> (i)>
func.func @main(%x: tensor<4xbf16>) -> tensor<4xbf16> {
  %zero = arith.constant -0.000000e+00 : bf16
  %hidden = util.optimization_barrier %zero : bf16
  %e = tensor.empty() : tensor<4xbf16>
  %r = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<4xbf16>) outs(%e : tensor<4xbf16>) {
  ^bb0(%a: bf16, %c: bf16):
    %s = arith.addf %a, %hidden : bf16
    linalg.yield %s : bf16
  } -> tensor<4xbf16>
  return %r : tensor<4xbf16>
}
"""
