// Native passes, native pipelines with options, nested native passes and passes of this project, in one pipeline.
// RUN: retrograd-opt %s --pass-pipeline='builtin.module( bwd-verify-legality{level=imported}, func.func(cse, canonicalize{max-iterations=2}), torchdynamo-export-to-torch-backend-pipeline{extra-library=} , bwd-verify-legality )' | FileCheck %s
// RUN: retrograd-opt %s -p 'func.func(cse),bwd-verify-legality{level=staged}' | FileCheck %s --check-prefix=SHORT

// CHECK-LABEL: func.func @norm(
// CHECK-NOT: torch.aten.square
// CHECK: torch.aten.mul.Tensor
// SHORT-LABEL: func.func @norm(
// SHORT: torch.aten.square
func.func @norm(%x: !torch.vtensor<[2],f32> {bwd.role = "input", bwd.name = "x"})
    -> (!torch.vtensor<[2],f32> {bwd.role = "output", bwd.name = "norm"}) {
  %0 = torch.aten.square %x : !torch.vtensor<[2],f32> -> !torch.vtensor<[2],f32>
  return %0 : !torch.vtensor<[2],f32>
}
