// RUN: not retrograd-opt %s 2>&1 | FileCheck %s
// RUN: not retrograd-opt %t.missing 2>&1 | FileCheck %s --check-prefix=MISSING
// RUN: not retrograd-opt --no-such-flag 2>&1 | FileCheck %s --check-prefix=FLAG
// RUN: not retrograd-opt %s --split-input-file --emit-bytecode 2>&1 | FileCheck %s --check-prefix=BOTH
// RUN: not retrograd-opt < %s 2>&1 | FileCheck %s --check-prefix=STDIN

// CHECK: bad_input.mlir:15:3: error: Dialect `no' not found for custom op 'no.such_op'
// CHECK-NOT: Traceback
// STDIN: <stdin>:15:3: error: Dialect `no' not found
// MISSING: retrograd-opt: error: {{.*}}.missing: No such file or directory
// MISSING-NOT: Traceback
// FLAG: retrograd-opt: error: unrecognized arguments: --no-such-flag
// BOTH: retrograd-opt: error: --split-input-file and --emit-bytecode do not go together
func.func @f() {
  no.such_op
  return
}
