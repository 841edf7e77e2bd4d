// RUN: retrograd-opt %s --split-input-file -p 'bwd-verify-legality{level=imported}' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'convert-bwd-to-func,bwd-verify-legality' | FileCheck %s --check-prefix=STAGED
// RUN: retrograd-opt %s --split-input-file -p 'convert-bwd-to-func,func.func(torch-match-quantized-custom-ops),torchdynamo-export-to-torch-backend-pipeline{extra-library=},torch-backend-to-linalg-on-tensors-backend-pipeline,bwd-verify-legality{level=linalg}' | FileCheck %s --check-prefix=LINALG

// The same function at each level: with bwd ops, without, and on linalg.
// CHECK-LABEL: func.func @forward(
// CHECK: torch.aten.exp
// CHECK: "bwd.save"
// STAGED-LABEL: func.func @forward(
// STAGED: torch.aten.exp
// LINALG-LABEL: func.func @forward(
// LINALG: linalg.generic
// LINALG: math.exp
func.func @forward(%x: !torch.vtensor<[2],f32> {bwd.role = "input", bwd.name = "x"})
    -> (!torch.vtensor<[2],f32> {bwd.role = "output", bwd.name = "out"}) {
  %e = torch.aten.exp %x : !torch.vtensor<[2],f32> -> !torch.vtensor<[2],f32>
  "bwd.save"(%e) {name = "e"} : (!torch.vtensor<[2],f32>) -> ()
  return %e : !torch.vtensor<[2],f32>
}

// -----

// A function without a body is somebody else's: no roles are asked for.
// CHECK-LABEL: func.func private @elsewhere(
// STAGED-LABEL: func.func private @elsewhere(
// LINALG-LABEL: func.func private @elsewhere(
func.func private @elsewhere(i32)
