// RUN: retrograd-opt %s --split-input-file | FileCheck %s

// CHECK: func.func private @f()
func.func private @f()

// -----

// CHECK: // -----
// CHECK: func.func private @f()
func.func private @f()
