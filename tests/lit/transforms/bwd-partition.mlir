// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition{policy=default}' | FileCheck %s --check-prefix=DEFAULT
// RUN: retrograd-opt %s --split-input-file -p 'bwd-partition,bwd-verify-legality{level=imported}' | FileCheck %s

!square = !torch.vtensor<[4,4],f32>

// A matrix product never runs again, a pointwise op does: in place of the exponential, what it was computed from is kept.
// CHECK-LABEL: module @products attributes {bwd.partition = {
// CHECK-SAME: policy = "min-cut", recomputed = ["exp"], recomputed_flops = 16 : i64, recomputed_ops = 1 : i64, saved_bytes = 64 : i64
// CHECK: func.func @forward(%[[X:.*]]: !torch.vtensor<[4,4],f32> {bwd.name = "x", bwd.role = "input", bwd.value = "primals_1"}, %[[W:.*]]: {{.*}}"primals_2"}) -> (!torch.vtensor<[4,4],f32> {bwd.name = "out", bwd.role = "output"}) {
// CHECK-NEXT: %[[Y:.*]] = torch.aten.mm %[[X]], %[[W]]
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp %[[Y]]
// CHECK-NEXT: %[[OUT:.*]] = torch.aten.neg %[[E]]
// CHECK-NEXT: "bwd.save"(%[[Y]]) {name = "mm"}
// CHECK-NEXT: return %[[OUT]]
// CHECK: func.func @backward(%[[Y:.*]]: !torch.vtensor<[4,4],f32> {bwd.name = "saved.mm", bwd.role = "saved", bwd.value = "mm"}, %[[T:.*]]: {{.*}}bwd.role = "tangent"{{.*}}) -> (!torch.vtensor<[4,4],f32> {bwd.name = "grad.x", bwd.role = "grad"}) {
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp %[[Y]]
// CHECK-NEXT: %[[GRAD:.*]] = torch.aten.mul.Tensor %[[T]], %[[E]]
// CHECK-NEXT: return %[[GRAD]]
// CHECK-NOT: @joint

// As eager does, the value that the backward uses is kept itself, and nothing runs again.
// DEFAULT-LABEL: module @products attributes {bwd.partition = {
// DEFAULT-SAME: policy = "default", recomputed = [], recomputed_flops = 0 : i64, recomputed_ops = 0 : i64, saved_bytes = 64 : i64
// DEFAULT: func.func @forward(
// DEFAULT: %[[E:.*]] = torch.aten.exp
// DEFAULT: "bwd.save"(%[[E]]) {name = "exp"}
// DEFAULT: func.func @backward(%[[E:.*]]: {{.*}}bwd.value = "exp"}, %[[T:.*]]: {{.*}}) ->
// DEFAULT-NEXT: torch.aten.mul.Tensor %[[T]], %[[E]]
// DEFAULT-NEXT: return
module @products {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x", bwd.value = "primals_1"},
                   %w: !square {bwd.role = "param", bwd.name = "w", bwd.value = "primals_2"},
                   %t: !square {bwd.role = "tangent", bwd.name = "t", bwd.value = "tangents_1"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %y = torch.aten.mm %x, %w {bwd.values = ["mm"]} : !square, !square -> !square
    %e = torch.aten.exp %y {bwd.values = ["exp"]} : !square -> !square
    %out = torch.aten.neg %e {bwd.values = ["neg"]} : !square -> !square
    %grad = torch.aten.mul.Tensor %t, %e {bwd.values = ["mul"]} : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// What can be computed from arguments alone, by fusible ops, is computed again: nothing is kept.
// CHECK-LABEL: module @pointwise
// CHECK-SAME: saved_bytes = 0 : i64
// CHECK-NOT: bwd.save
// CHECK: func.func @backward(%[[X:.*]]: {{.*}}bwd.role = "input"}, %[[T:.*]]: {{.*}}bwd.role = "tangent"}) ->
// CHECK-NEXT: %[[E:.*]] = torch.aten.exp %[[X]]
// CHECK-NEXT: torch.aten.mul.Tensor %[[T]], %[[E]]
// DEFAULT-LABEL: module @pointwise
// DEFAULT: "bwd.save"
// DEFAULT: func.func @backward(
// DEFAULT-NOT: torch.aten.exp
module @pointwise {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x : !square -> !square
    %out = torch.aten.neg %e : !square -> !square
    %grad = torch.aten.mul.Tensor %t, %e : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!rows = !torch.vtensor<[4,5],f32>
!column = !torch.vtensor<[4,1],f32>

// A reduction to less than a quarter is kept: that costs little, and a second run would read all of its operand.
// CHECK-LABEL: module @shrinking_reduction
// CHECK-SAME: saved_bytes = 16 : i64
// CHECK: %[[MAX:.*]] = torch.aten.amax
// CHECK: "bwd.save"(%[[MAX]])
// CHECK: func.func @backward(
// CHECK-NOT: torch.aten.amax
// CHECK: return
module @shrinking_reduction {
  func.func @joint(%x: !rows {bwd.role = "input", bwd.name = "x"}, %t: !rows {bwd.role = "tangent", bwd.name = "t"})
      -> (!rows {bwd.role = "output", bwd.name = "out"}, !rows {bwd.role = "grad", bwd.name = "grad.x"}) {
    %one = torch.constant.int 1
    %true = torch.constant.bool true
    %dims = torch.prim.ListConstruct %one : (!torch.int) -> !torch.list<int>
    %max = torch.aten.amax %x, %dims, %true : !rows, !torch.list<int>, !torch.bool -> !column
    %out = torch.aten.mul.Tensor %x, %max : !rows, !column -> !rows
    %grad = torch.aten.mul.Tensor %t, %max : !rows, !column -> !rows
    return %out, %grad : !rows, !rows
  }
}

// -----

!rows = !torch.vtensor<[4,4],f32>
!column = !torch.vtensor<[4,1],f32>

// To a quarter it would run again; where that is when most is in memory, it is kept, as with `default`.
// CHECK-LABEL: module @reduction
// CHECK-SAME: policy = "min-cut", recomputed = [], recomputed_flops = 0 : i64, recomputed_ops = 0 : i64, saved_bytes = 16 : i64
// CHECK: "bwd.save"
// CHECK: func.func @backward(
// CHECK-NOT: torch.aten.amax
// CHECK: return
// DEFAULT-LABEL: module @reduction
// DEFAULT: "bwd.save"
// DEFAULT: func.func @backward(
// DEFAULT-NOT: torch.aten.amax
// DEFAULT: return
module @reduction {
  func.func @joint(%x: !rows {bwd.role = "input", bwd.name = "x"}, %t: !rows {bwd.role = "tangent", bwd.name = "t"})
      -> (!rows {bwd.role = "output", bwd.name = "out"}, !rows {bwd.role = "grad", bwd.name = "grad.x"}) {
    %one = torch.constant.int 1
    %true = torch.constant.bool true
    %dims = torch.prim.ListConstruct %one : (!torch.int) -> !torch.list<int>
    %max = torch.aten.amax %x, %dims, %true : !rows, !torch.list<int>, !torch.bool -> !column
    %out = torch.aten.mul.Tensor %x, %max : !rows, !column -> !rows
    %grad = torch.aten.mul.Tensor %t, %max : !rows, !column -> !rows
    return %out, %grad : !rows, !rows
  }
}

// -----

!tall = !torch.vtensor<[8,4],f32>
!wide = !torch.vtensor<[4,8],f32>
!square = !torch.vtensor<[8,8],f32>

// A view of an argument is taken again; constants come along.
// CHECK-LABEL: module @view_of_argument
// CHECK-SAME: recomputed = []
// CHECK-SAME: saved_bytes = 0 : i64
// CHECK-NOT: bwd.save
// CHECK: func.func @backward(%[[W:.*]]: {{.*}}bwd.name = "w"{{.*}}, %[[T:.*]]: {{.*}}bwd.role = "tangent"}) ->
// CHECK-NEXT: %[[ZERO:.*]] = torch.constant.int 0
// CHECK-NEXT: %[[ONE:.*]] = torch.constant.int 1
// CHECK-NEXT: %[[V:.*]] = torch.aten.transpose.int %[[W]], %[[ZERO]], %[[ONE]]
// CHECK-NEXT: torch.aten.mm %[[T]], %[[V]]
// CHECK-NEXT: return
// DEFAULT-LABEL: module @view_of_argument
// DEFAULT-SAME: saved_bytes = 0 : i64
// DEFAULT-NOT: bwd.save
// DEFAULT: func.func @backward(%{{.*}}: {{.*}}bwd.name = "w"
// DEFAULT: torch.aten.transpose.int
module @view_of_argument {
  func.func @joint(%x: !tall {bwd.role = "input", bwd.name = "x"}, %w: !tall {bwd.role = "param", bwd.name = "w"},
                   %t: !tall {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %zero = torch.constant.int 0
    %one = torch.constant.int 1
    %v = torch.aten.transpose.int %w, %zero, %one : !tall, !torch.int, !torch.int -> !wide
    %out = torch.aten.mm %x, %v : !tall, !wide -> !square
    %grad = torch.aten.mm %t, %v : !tall, !wide -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// An output that the backward needs is not saved a second time: the backward takes it by its name.
// CHECK-LABEL: module @saved_output
// CHECK: %[[Y:.*]] = torch.aten.mm
// CHECK-NEXT: return %[[Y]]
// CHECK: func.func @backward(%{{.*}}: {{.*}}bwd.name = "out", bwd.role = "saved", bwd.value = "mm"}
// DEFAULT-LABEL: module @saved_output
// DEFAULT: %[[Y:.*]] = torch.aten.mm
// DEFAULT-NEXT: return %[[Y]]
module @saved_output {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %y = torch.aten.mm %x, %x {bwd.values = ["mm"]} : !square, !square -> !square
    %grad = torch.aten.mul.Tensor %t, %y : !square, !square -> !square
    return %y, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// What the step overwrites is saved as a copy, also where it is an output as well.
// CHECK-LABEL: module @saved_and_overwritten
// CHECK: func.func @forward(%[[X:.*]]: !torch.vtensor<[4,4],f32> {bwd.name = "x"{{.*}}}, %[[OLD:.*]]: !torch.vtensor<[4,4],f32> {bwd.name = "state"
// CHECK: "bwd.save"(%[[OLD]])
// CHECK: func.func @backward({{.*}}bwd.name = "saved.state", bwd.role = "saved"
module @saved_and_overwritten {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x", bwd.value = "x"},
                   %state: !square {bwd.role = "buffer", bwd.name = "state", bwd.value = "state"},
                   %t: !square {bwd.role = "tangent", bwd.name = "t", bwd.value = "t"})
      -> (!square {bwd.role = "mutation", bwd.name = "state"}, !square {bwd.role = "output", bwd.name = "out"},
          !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %new = torch.aten.mul.Tensor %x, %state {bwd.values = ["mul"]} : !square, !square -> !square
    %grad = torch.aten.mul.Tensor %t, %state : !square, !square -> !square
    return %new, %state, %grad : !square, !square, !square
  }
}

// -----

!rows = !torch.vtensor<[4,64],f32>
!values = !torch.vtensor<[4,1],f32>
!places = !torch.vtensor<[4,1],si64>

// Of two results the one that the backward uses.
// CHECK-LABEL: module @two_results
// CHECK-SAME: saved_bytes = 32 : i64
// CHECK: %[[VALUES:.*]], %[[PLACES:.*]] = torch.aten.max.dim
// CHECK-NEXT: "bwd.save"(%[[PLACES]]) {name = "places"} : (!torch.vtensor<[4,1],si64>) -> ()
// CHECK-NEXT: return %[[VALUES]]
// CHECK: func.func @backward(%[[PLACES:.*]]: !torch.vtensor<[4,1],si64> {{.*}}, %[[T:.*]]: {{.*}}) ->
// CHECK-NEXT: %[[ONE:.*]] = torch.constant.int 1
// CHECK-NEXT: %[[FALSE:.*]] = torch.constant.bool false
// CHECK-NEXT: torch.aten.gather %[[T]], %[[ONE]], %[[PLACES]], %[[FALSE]]
// CHECK-NEXT: return
// DEFAULT-LABEL: module @two_results
// DEFAULT-SAME: saved_bytes = 32 : i64
// DEFAULT: %[[VALUES:.*]], %[[PLACES:.*]] = torch.aten.max.dim
// DEFAULT-NEXT: "bwd.save"(%[[PLACES]]) {name = "places"}
// DEFAULT-NEXT: return %[[VALUES]]
module @two_results {
  func.func @joint(%x: !rows {bwd.role = "input", bwd.name = "x"}, %t: !rows {bwd.role = "tangent", bwd.name = "t"})
      -> (!values {bwd.role = "output", bwd.name = "out"}, !values {bwd.role = "grad", bwd.name = "grad.x"}) {
    %one = torch.constant.int 1
    %true = torch.constant.bool true
    %false = torch.constant.bool false
    %values, %places = torch.aten.max.dim %x, %one, %true {bwd.values = ["values", "places"]} : !rows, !torch.int, !torch.bool -> !values, !places
    %grad = torch.aten.gather %t, %one, %places, %false : !rows, !torch.int, !places, !torch.bool -> !values
    return %values, %grad : !values, !values
  }
}

// -----

!one = !torch.vtensor<[4],f32>

// A gradient that is an argument is handed through; a tangent that no gradient uses is not taken.
// CHECK-LABEL: module @handed_through
// CHECK: func.func @forward(%[[X:.*]]: {{.*}}bwd.name = "x"{{.*}}, %[[Y:.*]]: {{.*}}bwd.name = "y", bwd.role = "input"}) ->
// CHECK-NEXT: %[[OUT:.*]] = torch.aten.mul.Tensor %[[X]], %[[Y]]
// CHECK-NEXT: return %[[OUT]], %[[X]]
// CHECK: func.func @backward(%[[Y:.*]]: !torch.vtensor<[4],f32> {bwd.name = "y", bwd.role = "input"}, %[[T:.*]]: !torch.vtensor<[4],f32> {bwd.name = "t0", bwd.role = "tangent"}) ->
// CHECK-NEXT: return %[[T]], %[[Y]], %[[T]]
// DEFAULT-LABEL: module @handed_through
// DEFAULT: func.func @backward(%[[Y:.*]]: {{.*}}"y", {{.*}}, %[[T:.*]]: {{.*}}"t0", {{.*}}) ->
// DEFAULT-NEXT: return %[[T]], %[[Y]], %[[T]]
module @handed_through {
  func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %y: !one {bwd.role = "input", bwd.name = "y"},
                   %t0: !one {bwd.role = "tangent", bwd.name = "t0"}, %t1: !one {bwd.role = "tangent", bwd.name = "t1"})
      -> (!one {bwd.role = "output", bwd.name = "a"}, !one {bwd.role = "output", bwd.name = "b"},
          !one {bwd.role = "grad", bwd.name = "grad.x"}, !one {bwd.role = "grad", bwd.name = "grad.y"},
          !one {bwd.role = "grad", bwd.name = "grad.z"}) {
    %out = torch.aten.mul.Tensor %x, %y : !one, !one -> !one
    return %out, %x, %t0, %y, %t0 : !one, !one, !one, !one, !one
  }
}

// -----

!one = !torch.vtensor<[4],f32>

// A second run would give other values.
// CHECK-LABEL: module @random
// CHECK-SAME: recomputed = []
// CHECK: %[[MASK:.*]] = torch.aten.bernoulli
// CHECK: "bwd.save"(%[[MASK]])
// CHECK: func.func @backward(
// CHECK-NOT: torch.aten.bernoulli
// CHECK: return
// DEFAULT-LABEL: module @random
// DEFAULT: %[[MASK:.*]] = torch.aten.bernoulli
// DEFAULT: "bwd.save"(%[[MASK]])
// DEFAULT: func.func @backward(
// DEFAULT-NOT: torch.aten.bernoulli
// DEFAULT: return
module @random {
  func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x"}, %t: !one {bwd.role = "tangent", bwd.name = "t"})
      -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "grad", bwd.name = "grad.x"}) {
    %none = torch.constant.none
    %mask = torch.aten.bernoulli %x, %none : !one, !torch.none -> !one
    %out = torch.aten.mul.Tensor %x, %mask : !one, !one -> !one
    %grad = torch.aten.mul.Tensor %t, %mask : !one, !one -> !one
    return %out, %grad : !one, !one
  }
}

// -----

!one = !torch.vtensor<[4],f32>

// What the step overwrites is gone by the time of the backward: the old value is kept.
// CHECK-LABEL: module @overwritten
// CHECK-SAME: saved_bytes = 16 : i64
// CHECK: func.func @forward(%[[X:.*]]: {{.*}}"x", {{.*}}, %[[COUNT:.*]]: {{.*}}"count", {{.*}}) ->
// CHECK: "bwd.save"(%[[COUNT]]) {name = "primals_2"}
// CHECK: func.func @backward(%[[COUNT:.*]]: !torch.vtensor<[4],f32> {bwd.name = "saved.primals_2", bwd.role = "saved", bwd.value = "primals_2"}, %[[T:.*]]: {{.*}}bwd.role = "tangent"}) ->
// CHECK-NEXT: torch.aten.mul.Tensor %[[T]], %[[COUNT]]
// DEFAULT-LABEL: module @overwritten
// DEFAULT: "bwd.save"(%{{.*}}) {name = "primals_2"}
// DEFAULT: func.func @backward(%[[COUNT:.*]]: !torch.vtensor<[4],f32> {bwd.name = "saved.primals_2", {{.*}}}, %[[T:.*]]: {{.*}}bwd.role = "tangent"}) ->
// DEFAULT-NEXT: torch.aten.mul.Tensor %[[T]], %[[COUNT]]
module @overwritten {
  func.func @joint(%x: !one {bwd.role = "input", bwd.name = "x", bwd.value = "primals_1"},
                   %count: !one {bwd.role = "buffer", bwd.name = "count", bwd.value = "primals_2"},
                   %t: !one {bwd.role = "tangent", bwd.name = "t"})
      -> (!one {bwd.role = "output", bwd.name = "out"}, !one {bwd.role = "mutation", bwd.name = "count"},
          !one {bwd.role = "grad", bwd.name = "grad.x"}) {
    %out = torch.aten.mul.Tensor %x, %count : !one, !one -> !one
    %next = torch.aten.neg %count : !one -> !one
    %grad = torch.aten.mul.Tensor %t, %count : !one, !one -> !one
    return %out, %next, %grad : !one, !one, !one
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// What a matrix product of the backward reads stands in memory there anyway: it is kept, though it could run again.
// CHECK-LABEL: module @materialized
// CHECK-SAME: saved_bytes = 64 : i64
// CHECK: %[[E:.*]] = torch.aten.exp
// CHECK: "bwd.save"(%[[E]])
// CHECK: func.func @backward(
// CHECK-NOT: torch.aten.exp
// CHECK: return
module @materialized {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %e = torch.aten.exp %x : !square -> !square
    %out = torch.aten.neg %e : !square -> !square
    %grad = torch.aten.mm %t, %e : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>
!places = !torch.vtensor<[4,4],si64>

// CHECK-LABEL: module @scatter
// CHECK: %[[S:.*]] = torch.aten.scatter_add
// CHECK: "bwd.save"(%[[S]])
// CHECK: func.func @backward(
// CHECK-NOT: torch.aten.scatter_add
// CHECK: return
module @scatter {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %i: !places {bwd.role = "input", bwd.name = "i"},
                   %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %zero = torch.constant.int 0
    %s = torch.aten.scatter_add %x, %zero, %i, %x : !square, !torch.int, !places, !square -> !square
    %out = torch.aten.neg %s : !square -> !square
    %grad = torch.aten.mul.Tensor %t, %s : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}

// -----

!square = !torch.vtensor<[4,4],f32>

// What neither half uses, neither takes: a call hands over nothing for the layers that a model has and does not run.
// CHECK-LABEL: module @unused
// CHECK: func.func @forward(%[[X:.*]]: !torch.vtensor<[4,4],f32> {bwd.name = "x", bwd.role = "input"}) ->
// CHECK-NEXT: torch.aten.exp %[[X]]
// CHECK: func.func @backward(%{{[^,]*}}: {{[^%]*}}bwd.name = "v"{{[^%]*}}, %{{[^,]*}}: {{[^%]*}}bwd.role = "tangent"{{[^%]*}}) ->
module @unused {
  func.func @joint(%x: !square {bwd.role = "input", bwd.name = "x"}, %w: !square {bwd.role = "param", bwd.name = "w"},
                   %v: !square {bwd.role = "param", bwd.name = "v"}, %t: !square {bwd.role = "tangent", bwd.name = "t"})
      -> (!square {bwd.role = "output", bwd.name = "out"}, !square {bwd.role = "grad", bwd.name = "grad.x"}) {
    %out = torch.aten.exp %x {bwd.values = ["exp"]} : !square -> !square
    %grad = torch.aten.mul.Tensor %t, %v {bwd.values = ["mul"]} : !square, !square -> !square
    return %out, %grad : !square, !square
  }
}
