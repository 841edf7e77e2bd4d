// RUN: retrograd-opt %s --verify-diagnostics -p transform-interpreter
// RUN: retrograd-opt %s -p transform-interpreter -o %t.none 2>&1 | FileCheck %s

// A remark is no failure: the module is written all the same.
// CHECK: verify_diagnostics.mlir:10:3: remark: seen once
// CHECK: verify_diagnostics.mlir:10:3: remark: seen twice
module attributes {transform.with_named_sequence} {
  // expected-remark @below {{seen}}
  // expected-remark-re @+1 {{seen {{[a-z]+}}ce}}
  func.func @seen() {
  // expected-remark @above {{seen}}
  // expected-remark @-2 {{seen}}
    return
  }
  transform.named_sequence @__transform_main(%root: !transform.any_op) {
    %f = transform.structured.match ops{["func.func"]} in %root : (!transform.any_op) -> !transform.any_op
    transform.debug.emit_remark_at %f, "seen once" : !transform.any_op
    transform.debug.emit_remark_at %f, "seen twice" : !transform.any_op
    transform.debug.emit_remark_at %f, "seen thrice" : !transform.any_op
    transform.debug.emit_remark_at %f, "seen more" : !transform.any_op
    transform.yield
  }
}
