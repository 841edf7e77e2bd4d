// RUN: not retrograd-opt %s --verify-diagnostics 2>&1 | FileCheck %s

// CHECK: verify_diagnostics_mismatch.mlir:11:3: error: unexpected error: 'bwd.save' op expects 1 operand (value), found 0
// CHECK-NEXT: verify_diagnostics_mismatch.mlir:11:1: error: expected error "another text" was not produced
// CHECK-NEXT: verify_diagnostics_mismatch.mlir:11:1: error: expected warning "expects 1 operand" was not produced
// CHECK-NEXT: verify_diagnostics_mismatch.mlir:13:1: error: expected error "expects 1 operand" was not produced
func.func @f() {
  // expected-error @below {{another text}}
  // expected-warning @below {{expects 1 operand}}
  // expected-error @+3 {{expects 1 operand}}
  "bwd.save"() {name = "x"} : () -> ()
  return
}
