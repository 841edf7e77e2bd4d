// RUN: retrograd-opt --list-passes | FileCheck %s
// RUN: retrograd-opt --show-dialects | FileCheck %s --check-prefix=DIALECTS
// RUN: retrograd-opt --version | FileCheck %s --check-prefix=VERSION
// RUN: retrograd-opt --help | FileCheck %s --check-prefix=HELP
// CHECK: Passes of retrograd:
// CHECK: {{^}}  bwd-partition {{ *}}Split @joint into @forward and @backward
// CHECK-NEXT: {{^}}      policy=<default|min-cut{{.*}}(default: min-cut)
// DIALECTS: Available Dialects: {{.*}}builtin, bwd, {{.*}}torch
// VERSION: {{^}}retrograd-opt {{[0-9]+\.[0-9]+}}{{.*}}, torch-mlir {{[0-9]+$}}
// HELP: usage: retrograd-opt
