// RUN: retrograd-opt %s --allow-unregistered-dialect | FileCheck %s
// RUN: not retrograd-opt %s 2>&1 | FileCheck %s --check-prefix=REFUSED
// CHECK: "unknown.op"() : () -> ()
// REFUSED: unregistered_dialect.mlir:6:15: error: operation being parsed with an unregistered dialect
func.func @f() {
  "unknown.op"() : () -> ()
  return
}
