// RUN: retrograd-opt %s -p 'bwd-partition{policy=default}' | FileCheck %s --check-prefix=SIDE
// RUN: retrograd-opt %s -p 'bwd-partition{policy=default in-order=true}' | FileCheck %s --check-prefix=ORDER

// Two wide products of 4 KiB, each read by one kernel: one kernel at a time, the second is written where the first was.
// Output and gradients have 256 bytes each; in order, what the second product's kernel gives is the most besides it.
// SIDE: peak_bytes_planned = 8960
// ORDER: peak_bytes_planned = 5120
!x = !torch.vtensor<[8,8],f32>
!wide = !torch.vtensor<[8,128],f32>
func.func @joint(%x: !x {bwd.role = "input", bwd.name = "x"}, %w: !wide {bwd.role = "input", bwd.name = "w"},
                 %t: !x {bwd.role = "tangent", bwd.name = "t"})
    -> (!x {bwd.role = "output", bwd.name = "out"}, !x {bwd.role = "grad", bwd.name = "grad.x"},
        !x {bwd.role = "grad", bwd.name = "grad.w"}) {
  %out = torch.aten.mm %x, %x : !x, !x -> !x
  %int0 = torch.constant.int 0
  %int1 = torch.constant.int 1
  %a = torch.aten.mm %t, %w : !x, !wide -> !wide
  %at = torch.aten.transpose.int %a, %int0, %int1 : !wide, !torch.int, !torch.int -> !torch.vtensor<[128,8],f32>
  %ga = torch.aten.mm %w, %at : !wide, !torch.vtensor<[128,8],f32> -> !x
  %b = torch.aten.mm %x, %w : !x, !wide -> !wide
  %bt = torch.aten.transpose.int %b, %int0, %int1 : !wide, !torch.int, !torch.int -> !torch.vtensor<[128,8],f32>
  %gb = torch.aten.mm %w, %bt : !wide, !torch.vtensor<[128,8],f32> -> !x
  %gt = torch.aten.mm %gb, %t : !x, !x -> !x
  return %out, %ga, %gt : !x, !x, !x
}
