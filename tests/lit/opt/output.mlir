// RUN: retrograd-opt %s -o %t.mlir && FileCheck %s < %t.mlir
// RUN: retrograd-opt %s --emit-bytecode -o %t.mlirbc && retrograd-opt %t.mlirbc | FileCheck %s
// RUN: retrograd-opt < %s | FileCheck %s
// RUN: retrograd-opt %s --mlir-print-op-generic | FileCheck %s --check-prefix=GENERIC
// RUN: retrograd-opt %s --mlir-print-debuginfo | FileCheck %s --check-prefix=LOCATIONS
// RUN: retrograd-opt %s -p cse --mlir-print-ir-after-all -o %t.none 2>&1 | FileCheck %s --check-prefix=AFTER
// RUN: retrograd-opt %s -p 'bwd-verify-legality{level=linalg}' --mlir-timing -o %t.none 2>&1 | FileCheck %s --check-prefix=TIMING

// CHECK: func.func @f()
// CHECK-NEXT: arith.constant 1
// GENERIC: "func.return"() : () -> ()
// LOCATIONS: loc("{{.*}}output.mlir":18:3)
// AFTER: IR Dump After CSE
// TIMING: Execution time report
// TIMING: bwd-verify-legality
func.func @f() {
  %0 = arith.constant 1 : i32
  return
}
