// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-verify-legality'
// RUN: not retrograd-opt %s --split-input-file -p 'bwd-verify-legality{level=imported}' 2>&1 | FileCheck %s --check-prefix=IMPORTED
// RUN: not retrograd-opt %s --split-input-file -p 'bwd-verify-legality{level=linalg}' 2>&1 | FileCheck %s --check-prefix=LINALG

// IMPORTED: bwd-verify-legality-invalid.mlir:{{[0-9]+}}:8: error: bwd-verify-legality: 'arith.addi' op: arith.addi is not legal at level 'imported'; a captured graph holds torch and bwd ops only; raise or lower this op first
// LINALG: bwd-verify-legality-invalid.mlir:{{[0-9]+}}:3: error: bwd-verify-legality: 'bwd.save' op: bwd.save is not legal at level 'linalg'
// LINALG: bwd-verify-legality-invalid.mlir:{{[0-9]+}}:8: error: bwd-verify-legality: 'torch.aten.exp' op: torch.aten.exp is not legal at level 'linalg'; torch-mlir does not lower this op: add a decomposition for it, or compute it outside the compiled model
// Roles are no matter of that level.
// LINALG-NOT: bwd.role

func.func @arithmetic(%x: i32 {bwd.role = "input", bwd.name = "x"})
    -> (i32 {bwd.role = "output", bwd.name = "out"}) {
  // expected-error @below {{bwd-verify-legality: 'arith.addi' op: arith.addi is not legal at level 'staged'; run convert-bwd-to-func}}
  %0 = arith.addi %x, %x : i32
  return %0 : i32
}

// -----

func.func @save(%x: i32 {bwd.role = "input", bwd.name = "x"}) {
  // expected-error @below {{bwd-verify-legality: 'bwd.save' op: bwd.save is not legal at level 'staged'; run convert-bwd-to-func}}
  "bwd.save"(%x) {name = "x"} : (i32) -> ()
  return
}

// -----

// Illegal at the level of linalg alone.
func.func @exponential(%x: !torch.vtensor<[2],f32> {bwd.role = "input", bwd.name = "x"}) {
  // Its result is not used.
  %0 = torch.aten.exp %x : !torch.vtensor<[2],f32> -> !torch.vtensor<[2],f32>
  return
}

// -----

// expected-error @below {{bwd-verify-legality: 'func.func' op: argument 0 expects bwd.role to be one of param, buffer, input, tangent, saved, seed, size, found none; set bwd.role and bwd.name when the function is built}}
func.func @argument_without_role(%x: i32) {
  return
}

// -----

// expected-error @below {{bwd-verify-legality: 'func.func' op: result 0 expects bwd.name to be a string that is not empty, found none; set bwd.role and bwd.name when the function is built}}
func.func @result_without_name(%x: i32 {bwd.role = "input", bwd.name = "x"}) -> (i32 {bwd.role = "output"}) {
  return %x : i32
}

// -----

// expected-error @below {{bwd-verify-legality: in the plan, step 0 calls @stage_0, which does not fit or is not there; run bwd-outline-stages again}}
module attributes {bwd.plan = {arguments = [], results = [], steps = [{arguments = [], function = "stage_0", results = [], step = "run_stage"}]}} {
}
