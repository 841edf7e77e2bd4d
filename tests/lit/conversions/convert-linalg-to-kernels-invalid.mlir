// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'convert-linalg-to-kernels{ptx=none}'
// RUN: not retrograd-opt %s -p 'convert-linalg-to-kernels{arch=sm_75 ptx=none}' 2>&1 | FileCheck %s --check-prefix=ARCH
// RUN: not retrograd-opt %s -p 'convert-linalg-to-kernels{families=product ptx=none}' 2>&1 | FileCheck %s --check-prefix=FAMILY

// ARCH: convert-linalg-to-kernels: no kernels for 'sm_75'; there are some for sm_80, sm_86, sm_89, sm_90, sm_120
// FAMILY: convert-linalg-to-kernels: no family of kernels 'product'; there are attention, columns, convolutions, norms, products, rows, scatters, transposes

// expected-error @below {{convert-linalg-to-kernels: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @blocks(%x: tensor<4xf32>) -> tensor<4xf32> {
  cf.br ^next
^next:
  return %x : tensor<4xf32>
}
