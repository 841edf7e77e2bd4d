// RUN: not retrograd-opt %s --split-input-file 2>&1 | FileCheck %s --check-prefix=ERROR
// RUN: not retrograd-opt %s 2>&1 | FileCheck %s --check-prefix=WHOLE
// ERROR: split_input.mlir:21:3: error: redefinition of symbol named 'f'
// ERROR-NOT: error
// WHOLE: error: redefinition of symbol named 'f'

func.func @f() {
  return
}

// -----

func.func @f() {
  return
}

// ----- text may follow

module {
  func.func private @f()
  func.func private @f()
}
