// RUN: %repeat 340 %s | retrograd-opt -p 'bwd-partition{policy=min-cut}' | FileCheck %s
// RUN: %repeat 330 %s | retrograd-opt -p 'bwd-partition{policy=min-cut}' | FileCheck %s --check-prefix=NEAR

// max_backward_distance: what is more than a thousand ops in front of the backward does not run again: of a chain of
// 1,021 ops the end is kept, one of 991 runs again from its beginning. `%repeat N` writes the line with [i] N times. (A
// concatenation fuses with nothing that takes it: no chain of fusible ops is long.)

!t = !torch.vtensor<[4,4],f32>

// CHECK-LABEL: module @max_backward_distance
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "c340"}
// NEAR-LABEL: module @max_backward_distance
// NEAR-SAME: saved_bytes = 0 : i64

module @max_backward_distance {
  func.func @joint(%c0: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %dim = torch.constant.int 0
    %s[i] = torch.aten.sin %c[i-1] : !t -> !t %l[i] = torch.prim.ListConstruct %s[i] : (!t) -> !torch.list<vtensor<[4,4],f32>> %c[i] = torch.aten.cat %l[i], %dim {bwd.values = ["c[i]"]} : !torch.list<vtensor<[4,4],f32>>, !torch.int -> !t
    %e = torch.aten.sin %c[N] {bwd.values = ["e"]} : !t -> !t
    %out = torch.aten.neg %e {bwd.values = ["out"]} : !t -> !t
    %g = torch.aten.mul.Tensor %t, %e {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}
