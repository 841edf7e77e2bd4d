// RUN: retrograd-opt %s -p 'bwd-partition{policy=budget budget=1GiB}' | FileCheck %s --check-prefix=AMPLE
// RUN: retrograd-opt %s -p 'bwd-partition{policy=budget budget=1.0}' | FileCheck %s --check-prefix=AMPLE
// RUN: retrograd-opt %s -p 'bwd-partition{policy=budget budget=3072}' | FileCheck %s --check-prefix=TIGHT
// RUN: retrograd-opt %s -p 'bwd-partition{policy=budget budget=3KiB}' | FileCheck %s --check-prefix=TIGHT
// RUN: retrograd-opt %s -p 'bwd-partition{policy=budget budget=2KiB}' | FileCheck %s --check-prefix=LEAST
// RUN: not retrograd-opt %s -p 'bwd-partition{policy=budget budget=64}' 2>&1 | FileCheck %s --check-prefix=LITTLE
// RUN: not retrograd-opt %s -p 'bwd-partition{policy=budget}' 2>&1 | FileCheck %s --check-prefix=NONE
// RUN: not retrograd-opt %s -p 'bwd-partition{policy=budget budget=lots}' 2>&1 | FileCheck %s --check-prefix=WORD
// RUN: not retrograd-opt %s -p 'bwd-partition{policy=budget budget=0}' 2>&1 | FileCheck %s --check-prefix=ZERO
// RUN: not retrograd-opt %s -p 'bwd-partition{policy=budget budget=-5}' 2>&1 | FileCheck %s --check-prefix=NEGATIVE
// RUN: not retrograd-opt %s -p 'bwd-partition{policy=default budget=64}' 2>&1 | FileCheck %s --check-prefix=OTHER

!wide = !torch.vtensor<[16,16],f32>

// With memory enough nothing runs again: the exponential and its sine are kept.
// AMPLE: bwd.partition = {
// AMPLE-SAME: pareto = {{\[}}[{{[0-9]+}}, 0.000000e+00]
// AMPLE-SAME: policy = "budget", recompute_seconds = 0.000000e+00 : f64
// AMPLE-SAME: recomputed = [], recomputed_flops = 0 : i64, recomputed_ops = 0 : i64, saved_bytes = {{[1-9]}}
// AMPLE: func.func @backward
// AMPLE-NOT: torch.aten.sin
// AMPLE: return

// With less the sine runs again, inside the op that uses it.
// TIGHT: bwd.partition = {
// TIGHT-SAME: peak_bytes_planned = 3072 : i64, policy = "budget"
// TIGHT-SAME: recomputed_ops = 1 : i64, saved_bytes = 1024 : i64
// TIGHT: func.func @backward(%[[E:.*]]: {{.*}}bwd.role = "saved"{{.*}}, %[[T:.*]]: {{.*}}"tangent"})
// TIGHT-NEXT: %[[S:.*]] = torch.aten.sin %[[E]]
// TIGHT-NEXT: torch.aten.mul.Tensor %[[T]], %[[S]]
// TIGHT-NOT: torch.aten.exp
// TIGHT: return

// With the least both do: all that uses the exponential is one kernel, so that it is never written to memory.
// LEAST: bwd.partition = {
// LEAST-SAME: peak_bytes_planned = 2048 : i64, policy = "budget"
// LEAST-SAME: recomputed_ops = 2 : i64, saved_bytes = 0 : i64
// LEAST: func.func @backward
// LEAST: torch.aten.exp
// LEAST: torch.aten.sin

// LITTLE: bwd-partition: 'func.func' op: a memory budget of 64 bytes is infeasible; the least feasible one is 2048 bytes; set budget=2048 or more
// NONE: bwd-partition: 'func.func' op: unreadable memory budget None; give bytes (67108864, '64MiB') or a fraction of a peak (0.5)
// WORD: bwd-partition: 'func.func' op: unreadable memory budget 'lots'; give bytes
// ZERO: bwd-partition: 'func.func' op: memory budget '0' is not above zero; give bytes
// NEGATIVE: bwd-partition: 'func.func' op: memory budget '-5' is not above zero; give bytes
// OTHER: bwd-partition: 'func.func' op: a budget means nothing to policy=default; set policy=budget, or leave the budget out
func.func @joint(%x: !wide {bwd.role = "input", bwd.name = "x"}, %t: !wide {bwd.role = "tangent", bwd.name = "t"})
    -> (!wide {bwd.role = "output", bwd.name = "out"}, !wide {bwd.role = "grad", bwd.name = "grad.x"}) {
  %e = torch.aten.exp %x : !wide -> !wide
  %s = torch.aten.sin %e : !wide -> !wide
  %out = torch.aten.neg %s : !wide -> !wide
  %a = torch.aten.mul.Tensor %t, %s : !wide, !wide -> !wide
  %grad = torch.aten.mul.Tensor %a, %e : !wide, !wide -> !wide
  return %out, %grad : !wide, !wide
}
