// RUN: not retrograd-opt %s -p 'cse,func.func(bwd-partiton)' 2>&1 | FileCheck %s --check-prefix=NEAR
// RUN: not retrograd-opt %s -p 'torch-restructure-non-constant-axis' 2>&1 | FileCheck %s --check-prefix=NATIVE
// RUN: not retrograd-opt %s -p 'zzzzzz' 2>&1 | FileCheck %s --check-prefix=FAR
// RUN: not retrograd-opt %s -p 'bwd-partition{polcy=default}' 2>&1 | FileCheck %s --check-prefix=OPTION
// RUN: not retrograd-opt %s -p 'bwd-partition{policy=bad}' 2>&1 | FileCheck %s --check-prefix=VALUE
// RUN: not retrograd-opt %s -p 'cse{level=3}' 2>&1 | FileCheck %s --check-prefix=NATIVE-OPTION
// RUN: not retrograd-opt %s -p 'func.func(cse,bwd-partition)' 2>&1 | FileCheck %s --check-prefix=NESTED
// RUN: not retrograd-opt %s -p 'torch-decompose-complex-ops' 2>&1 | FileCheck %s --check-prefix=ANCHOR
// RUN: not retrograd-opt %s --pass-pipeline='builtin.module(cse' 2>&1 | FileCheck %s --check-prefix=OPEN
// RUN: not retrograd-opt %s --pass-pipeline='cse' 2>&1 | FileCheck %s --check-prefix=BARE
// RUN: not retrograd-opt %s -p 'cse,,cse' 2>&1 | FileCheck %s --check-prefix=EMPTY

// NEAR: <pipeline>:1:30: error: there is no pass 'bwd-partiton'; did you mean bwd-partition
// NEAR-NEXT: builtin.module(cse,func.func(bwd-partiton))
// NEAR-NEXT: {{^ {31}\^$}}
// NATIVE: <pipeline>:1:16: error: there is no pass 'torch-restructure-non-constant-axis'; did you mean torch-restructure-non-constant-axes
// FAR: error: there is no pass 'zzzzzz'; retrograd-opt --list-passes lists those of this project
// OPTION: <pipeline>:1:16: error: bwd-partition has no option 'polcy'; its options are policy=<
// VALUE: error: option 'policy' of bwd-partition: expected one of default, min-cut, {{.*}}found 'bad'
// NATIVE-OPTION: <pipeline>:1:16: error: {{.*}}no such option level
// NESTED: <pipeline>:1:30: error: pass 'bwd-partition' runs on builtin.module and cannot stand inside func.func(...); put it directly into builtin.module(...)
// ANCHOR: <pipeline>:1:16: error: Can't add pass {{.*}} restricted to 'func.func'
// OPEN: <pipeline>:1:15: error: this '(' is never closed
// BARE: <pipeline>:1:1: error: expected one anchor around all passes: builtin.module(...)
// EMPTY: <pipeline>:1:20: error: expected the name of a pass, found ','
func.func @f() {
  return
}
