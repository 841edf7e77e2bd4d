// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition{policy=min-cut}' | FileCheck %s

// The heuristics of MinCutOptions, one by one, on the least that shows each. Reductions, arguments and constants are in
// bwd-partition.mlir.

!t = !torch.vtensor<[4,4],f32>

// ban_compute: a matrix product is kept, though its operand is at hand.
// CHECK-LABEL: module @ban_compute
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "y"}

module @ban_compute {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %y = torch.aten.mm %x, %x {bwd.values = ["y"]} : !t, !t -> !t
    %out = torch.aten.neg %y {bwd.values = ["out"]} : !t -> !t
    %g = torch.aten.mul.Tensor %t, %y {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>

// ban_materialized: the product of the backward would read the exponential from memory anyway.
// CHECK-LABEL: module @ban_materialized
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "e"}

module @ban_materialized {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.values = ["e"]} : !t -> !t
    %out = torch.aten.neg %e {bwd.values = ["out"]} : !t -> !t
    %g = torch.aten.mm %t, %e {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>

// What a pointwise op of the backward takes is computed in its kernel: nothing is kept.
// CHECK-LABEL: module @not_materialized
// CHECK-SAME: saved_bytes = 0 : i64
// CHECK-NOT: bwd.save

module @not_materialized {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.values = ["e"]} : !t -> !t
    %out = torch.aten.neg %e {bwd.values = ["out"]} : !t -> !t
    %g = torch.aten.mul.Tensor %t, %e {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>

// ban_far_apart: between the first use of the exponential and the sine stands a product: no one kernel would recompute
// both.
// CHECK-LABEL: module @ban_far_apart
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "s"}

module @ban_far_apart {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.values = ["e"]} : !t -> !t
    %c = torch.aten.cos %e {bwd.values = ["c"]} : !t -> !t
    %m = torch.aten.mm %c, %x {bwd.values = ["m"]} : !t, !t -> !t
    %s = torch.aten.sin %e {bwd.values = ["s"]} : !t -> !t
    %out = torch.aten.mm %s, %m {bwd.values = ["out"]} : !t, !t -> !t
    %g = torch.aten.mul.Tensor %t, %s {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>

// Where none stands between, it is.
// CHECK-LABEL: module @used_nearby
// CHECK-SAME: saved_bytes = 0 : i64
// CHECK-NOT: bwd.save

module @used_nearby {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x {bwd.values = ["e"]} : !t -> !t
    %c = torch.aten.cos %e {bwd.values = ["c"]} : !t -> !t
    %s = torch.aten.sin %e {bwd.values = ["s"]} : !t -> !t
    %m = torch.aten.mm %c, %x {bwd.values = ["m"]} : !t, !t -> !t
    %out = torch.aten.mm %s, %m {bwd.values = ["out"]} : !t, !t -> !t
    %g = torch.aten.mul.Tensor %t, %s {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>

// ban_long_chains: a chain of more than a hundred ops does not run again from its beginning.
// CHECK-LABEL: module @ban_long_chains
// CHECK-SAME: recomputed = []{{.*}} saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "v103"}

module @ban_long_chains {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %v0 = torch.aten.exp %x {bwd.values = ["v0"]} : !t -> !t
    %v1 = torch.aten.sin %v0 {bwd.values = ["v1"]} : !t -> !t
    %v2 = torch.aten.sin %v1 {bwd.values = ["v2"]} : !t -> !t
    %v3 = torch.aten.sin %v2 {bwd.values = ["v3"]} : !t -> !t
    %v4 = torch.aten.sin %v3 {bwd.values = ["v4"]} : !t -> !t
    %v5 = torch.aten.sin %v4 {bwd.values = ["v5"]} : !t -> !t
    %v6 = torch.aten.sin %v5 {bwd.values = ["v6"]} : !t -> !t
    %v7 = torch.aten.sin %v6 {bwd.values = ["v7"]} : !t -> !t
    %v8 = torch.aten.sin %v7 {bwd.values = ["v8"]} : !t -> !t
    %v9 = torch.aten.sin %v8 {bwd.values = ["v9"]} : !t -> !t
    %v10 = torch.aten.sin %v9 {bwd.values = ["v10"]} : !t -> !t
    %v11 = torch.aten.sin %v10 {bwd.values = ["v11"]} : !t -> !t
    %v12 = torch.aten.sin %v11 {bwd.values = ["v12"]} : !t -> !t
    %v13 = torch.aten.sin %v12 {bwd.values = ["v13"]} : !t -> !t
    %v14 = torch.aten.sin %v13 {bwd.values = ["v14"]} : !t -> !t
    %v15 = torch.aten.sin %v14 {bwd.values = ["v15"]} : !t -> !t
    %v16 = torch.aten.sin %v15 {bwd.values = ["v16"]} : !t -> !t
    %v17 = torch.aten.sin %v16 {bwd.values = ["v17"]} : !t -> !t
    %v18 = torch.aten.sin %v17 {bwd.values = ["v18"]} : !t -> !t
    %v19 = torch.aten.sin %v18 {bwd.values = ["v19"]} : !t -> !t
    %v20 = torch.aten.sin %v19 {bwd.values = ["v20"]} : !t -> !t
    %v21 = torch.aten.sin %v20 {bwd.values = ["v21"]} : !t -> !t
    %v22 = torch.aten.sin %v21 {bwd.values = ["v22"]} : !t -> !t
    %v23 = torch.aten.sin %v22 {bwd.values = ["v23"]} : !t -> !t
    %v24 = torch.aten.sin %v23 {bwd.values = ["v24"]} : !t -> !t
    %v25 = torch.aten.sin %v24 {bwd.values = ["v25"]} : !t -> !t
    %v26 = torch.aten.sin %v25 {bwd.values = ["v26"]} : !t -> !t
    %v27 = torch.aten.sin %v26 {bwd.values = ["v27"]} : !t -> !t
    %v28 = torch.aten.sin %v27 {bwd.values = ["v28"]} : !t -> !t
    %v29 = torch.aten.sin %v28 {bwd.values = ["v29"]} : !t -> !t
    %v30 = torch.aten.sin %v29 {bwd.values = ["v30"]} : !t -> !t
    %v31 = torch.aten.sin %v30 {bwd.values = ["v31"]} : !t -> !t
    %v32 = torch.aten.sin %v31 {bwd.values = ["v32"]} : !t -> !t
    %v33 = torch.aten.sin %v32 {bwd.values = ["v33"]} : !t -> !t
    %v34 = torch.aten.sin %v33 {bwd.values = ["v34"]} : !t -> !t
    %v35 = torch.aten.sin %v34 {bwd.values = ["v35"]} : !t -> !t
    %v36 = torch.aten.sin %v35 {bwd.values = ["v36"]} : !t -> !t
    %v37 = torch.aten.sin %v36 {bwd.values = ["v37"]} : !t -> !t
    %v38 = torch.aten.sin %v37 {bwd.values = ["v38"]} : !t -> !t
    %v39 = torch.aten.sin %v38 {bwd.values = ["v39"]} : !t -> !t
    %v40 = torch.aten.sin %v39 {bwd.values = ["v40"]} : !t -> !t
    %v41 = torch.aten.sin %v40 {bwd.values = ["v41"]} : !t -> !t
    %v42 = torch.aten.sin %v41 {bwd.values = ["v42"]} : !t -> !t
    %v43 = torch.aten.sin %v42 {bwd.values = ["v43"]} : !t -> !t
    %v44 = torch.aten.sin %v43 {bwd.values = ["v44"]} : !t -> !t
    %v45 = torch.aten.sin %v44 {bwd.values = ["v45"]} : !t -> !t
    %v46 = torch.aten.sin %v45 {bwd.values = ["v46"]} : !t -> !t
    %v47 = torch.aten.sin %v46 {bwd.values = ["v47"]} : !t -> !t
    %v48 = torch.aten.sin %v47 {bwd.values = ["v48"]} : !t -> !t
    %v49 = torch.aten.sin %v48 {bwd.values = ["v49"]} : !t -> !t
    %v50 = torch.aten.sin %v49 {bwd.values = ["v50"]} : !t -> !t
    %v51 = torch.aten.sin %v50 {bwd.values = ["v51"]} : !t -> !t
    %v52 = torch.aten.sin %v51 {bwd.values = ["v52"]} : !t -> !t
    %v53 = torch.aten.sin %v52 {bwd.values = ["v53"]} : !t -> !t
    %v54 = torch.aten.sin %v53 {bwd.values = ["v54"]} : !t -> !t
    %v55 = torch.aten.sin %v54 {bwd.values = ["v55"]} : !t -> !t
    %v56 = torch.aten.sin %v55 {bwd.values = ["v56"]} : !t -> !t
    %v57 = torch.aten.sin %v56 {bwd.values = ["v57"]} : !t -> !t
    %v58 = torch.aten.sin %v57 {bwd.values = ["v58"]} : !t -> !t
    %v59 = torch.aten.sin %v58 {bwd.values = ["v59"]} : !t -> !t
    %v60 = torch.aten.sin %v59 {bwd.values = ["v60"]} : !t -> !t
    %v61 = torch.aten.sin %v60 {bwd.values = ["v61"]} : !t -> !t
    %v62 = torch.aten.sin %v61 {bwd.values = ["v62"]} : !t -> !t
    %v63 = torch.aten.sin %v62 {bwd.values = ["v63"]} : !t -> !t
    %v64 = torch.aten.sin %v63 {bwd.values = ["v64"]} : !t -> !t
    %v65 = torch.aten.sin %v64 {bwd.values = ["v65"]} : !t -> !t
    %v66 = torch.aten.sin %v65 {bwd.values = ["v66"]} : !t -> !t
    %v67 = torch.aten.sin %v66 {bwd.values = ["v67"]} : !t -> !t
    %v68 = torch.aten.sin %v67 {bwd.values = ["v68"]} : !t -> !t
    %v69 = torch.aten.sin %v68 {bwd.values = ["v69"]} : !t -> !t
    %v70 = torch.aten.sin %v69 {bwd.values = ["v70"]} : !t -> !t
    %v71 = torch.aten.sin %v70 {bwd.values = ["v71"]} : !t -> !t
    %v72 = torch.aten.sin %v71 {bwd.values = ["v72"]} : !t -> !t
    %v73 = torch.aten.sin %v72 {bwd.values = ["v73"]} : !t -> !t
    %v74 = torch.aten.sin %v73 {bwd.values = ["v74"]} : !t -> !t
    %v75 = torch.aten.sin %v74 {bwd.values = ["v75"]} : !t -> !t
    %v76 = torch.aten.sin %v75 {bwd.values = ["v76"]} : !t -> !t
    %v77 = torch.aten.sin %v76 {bwd.values = ["v77"]} : !t -> !t
    %v78 = torch.aten.sin %v77 {bwd.values = ["v78"]} : !t -> !t
    %v79 = torch.aten.sin %v78 {bwd.values = ["v79"]} : !t -> !t
    %v80 = torch.aten.sin %v79 {bwd.values = ["v80"]} : !t -> !t
    %v81 = torch.aten.sin %v80 {bwd.values = ["v81"]} : !t -> !t
    %v82 = torch.aten.sin %v81 {bwd.values = ["v82"]} : !t -> !t
    %v83 = torch.aten.sin %v82 {bwd.values = ["v83"]} : !t -> !t
    %v84 = torch.aten.sin %v83 {bwd.values = ["v84"]} : !t -> !t
    %v85 = torch.aten.sin %v84 {bwd.values = ["v85"]} : !t -> !t
    %v86 = torch.aten.sin %v85 {bwd.values = ["v86"]} : !t -> !t
    %v87 = torch.aten.sin %v86 {bwd.values = ["v87"]} : !t -> !t
    %v88 = torch.aten.sin %v87 {bwd.values = ["v88"]} : !t -> !t
    %v89 = torch.aten.sin %v88 {bwd.values = ["v89"]} : !t -> !t
    %v90 = torch.aten.sin %v89 {bwd.values = ["v90"]} : !t -> !t
    %v91 = torch.aten.sin %v90 {bwd.values = ["v91"]} : !t -> !t
    %v92 = torch.aten.sin %v91 {bwd.values = ["v92"]} : !t -> !t
    %v93 = torch.aten.sin %v92 {bwd.values = ["v93"]} : !t -> !t
    %v94 = torch.aten.sin %v93 {bwd.values = ["v94"]} : !t -> !t
    %v95 = torch.aten.sin %v94 {bwd.values = ["v95"]} : !t -> !t
    %v96 = torch.aten.sin %v95 {bwd.values = ["v96"]} : !t -> !t
    %v97 = torch.aten.sin %v96 {bwd.values = ["v97"]} : !t -> !t
    %v98 = torch.aten.sin %v97 {bwd.values = ["v98"]} : !t -> !t
    %v99 = torch.aten.sin %v98 {bwd.values = ["v99"]} : !t -> !t
    %v100 = torch.aten.sin %v99 {bwd.values = ["v100"]} : !t -> !t
    %v101 = torch.aten.sin %v100 {bwd.values = ["v101"]} : !t -> !t
    %v102 = torch.aten.sin %v101 {bwd.values = ["v102"]} : !t -> !t
    %v103 = torch.aten.sin %v102 {bwd.values = ["v103"]} : !t -> !t
    %out = torch.aten.neg %v103 {bwd.values = ["out"]} : !t -> !t
    %g = torch.aten.mul.Tensor %t, %v103 {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>
!rows = !torch.vtensor<[4,1],f32>

// distance_base: of two values of one size, both written in any case, the one nearer to the backward is kept.
// CHECK-LABEL: module @distance
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "z"}
module @distance {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %y = torch.aten.mm %x, %x {bwd.values = ["y"]} : !t, !t -> !t
    %z = torch.aten.exp %y {bwd.values = ["z"]} : !t -> !t
    %out = torch.aten.mm %z, %x {bwd.values = ["out"]} : !t, !t -> !t
    %g = torch.aten.mul.Tensor %t, %z {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>

// fused_weight: nothing but the backward would have the exponential written, the product is written in any case.
// CHECK-LABEL: module @fused_weight
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "y"}

module @fused_weight {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %y = torch.aten.mm %x, %x {bwd.values = ["y"]} : !t, !t -> !t
    %e = torch.aten.exp %y {bwd.values = ["e"]} : !t -> !t
    %out = torch.aten.neg %e {bwd.values = ["out"]} : !t -> !t
    %g = torch.aten.mul.Tensor %t, %e {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>
!index = !torch.vtensor<[4,4],si64>

// ban_scatter: nor does a scatter run again.
// CHECK-LABEL: module @ban_scatter
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "s"}
module @ban_scatter {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %i: !index {bwd.role = "input", bwd.name = "i"},
                   %t: !t {bwd.role = "tangent", bwd.name = "t"})
      -> (!t {bwd.role = "output", bwd.name = "out"}, !t {bwd.role = "grad", bwd.name = "grad.x"}) {
    %dim = torch.constant.int 0
    %s = torch.aten.scatter_add %x, %dim, %i, %x {bwd.values = ["s"]} : !t, !torch.int, !index, !t -> !t
    %out = torch.aten.neg %s {bwd.values = ["out"]} : !t -> !t
    %g = torch.aten.mul.Tensor %t, %s {bwd.values = ["g"]} : !t, !t -> !t
    return %out, %g : !t, !t
  }
}

// -----

!t = !torch.vtensor<[4,4],f32>
!half = !torch.vtensor<[2,4],f32>

// Tuples are flattened and views free: of the two halves of a product the one that the backward uses is kept, by itself.
// CHECK-LABEL: module @parts
// CHECK-SAME: saved_bytes = 32 : i64
// CHECK: "bwd.save"(%{{.*}}) {name = "second"}
// CHECK-NOT: bwd.save
module @parts {
  func.func @joint(%x: !t {bwd.role = "input", bwd.name = "x"}, %t: !half {bwd.role = "tangent", bwd.name = "t"})
      -> (!half {bwd.role = "output", bwd.name = "out"}, !half {bwd.role = "grad", bwd.name = "grad.x"}) {
    %size = torch.constant.int 2
    %dim = torch.constant.int 0
    %y = torch.aten.mm %x, %x {bwd.values = ["y"]} : !t, !t -> !t
    %list = torch.aten.split.Tensor %y, %size, %dim : !t, !torch.int, !torch.int -> !torch.list<vtensor<[2,4],f32>>
    %first, %second = torch.prim.ListUnpack %list {bwd.values = ["first", "second"]} : !torch.list<vtensor<[2,4],f32>> -> !half, !half
    %out = torch.aten.mul.Tensor %first, %second {bwd.values = ["out"]} : !half, !half -> !half
    %g = torch.aten.mul.Tensor %t, %second {bwd.values = ["g"]} : !half, !half -> !half
    return %out, %g : !half, !half
  }
}
