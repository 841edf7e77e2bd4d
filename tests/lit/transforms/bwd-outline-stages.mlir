// RUN: retrograd-opt %s --split-input-file -p 'bwd-outline-stages,bwd-verify-legality{level=staged}' | FileCheck %s

!t = !torch.vtensor<[2],f32>

// Cut at effects. A stage takes what it needs and gives what is needed; a size is in each stage that needs it; the
// caller's own arguments and results keep their roles.
// CHECK: module attributes {bwd.plan = {arguments = ["g", "x"], results = ["z"], steps = [
// CHECK-SAME: {arguments = ["g"], function = "stage_0", results = ["a", "b"], step = "run_stage"}, {step = "free", values = ["g"]},
// CHECK-SAME: {arguments = ["a"], hook = 3 : i64, kind = "tensor_pre", results = ["h"], step = "call_hook"}, {step = "free", values = ["a"]},
// CHECK-SAME: {gradient = "b", param = 5 : i64, step = "accumulate_grad"}, {step = "free", values = ["b"]},
// CHECK-SAME: {arguments = ["x", "h"], function = "stage_1", results = ["z"], step = "run_stage"}, {step = "free", values = ["x", "h"]},
// CHECK-SAME: {step = "final_callbacks"}]}}
// CHECK: func.func @stage_0(%[[G:.*]]: !torch.vtensor<[2],f32> {bwd.name = "gradient", bwd.role = "input", bwd.value = "g"}) -> (!torch.vtensor<[2],f32> {bwd.name = "a", bwd.role = "saved", bwd.value = "a"}, !torch.vtensor<[2],f32> {bwd.name = "b", bwd.role = "saved", bwd.value = "b"}) {
// CHECK-NEXT: %[[A:.*]] = torch.aten.exp %[[G]]
// CHECK-NEXT: %[[B:.*]] = torch.aten.neg %[[A]]
// CHECK-NEXT: return %[[A]], %[[B]]
// CHECK: func.func @stage_1(%[[X:.*]]: !torch.vtensor<[2],f32> {bwd.name = "x", bwd.role = "saved", bwd.value = "x"}, %[[H:.*]]: {{.*}}) -> (!torch.vtensor<[2],f32> {bwd.name = "grad.x", bwd.role = "grad", bwd.value = "z"}) {
// CHECK-NEXT: torch.constant.int 0
// CHECK-NEXT: %[[SIZE:.*]] = torch.aten.size.int %[[X]]
// CHECK-NEXT: %[[Z:.*]] = torch.aten.mul.Scalar %[[H]], %[[SIZE]]
// CHECK-NEXT: return %[[Z]]
func.func @backward(%g: !t {bwd.role = "input", bwd.name = "gradient", bwd.value = "g"},
                    %x: !t {bwd.role = "saved", bwd.name = "x", bwd.value = "x"}) -> (!t {bwd.role = "grad", bwd.name = "grad.x"}) {
  %zero = torch.constant.int 0
  %size = torch.aten.size.int %x, %zero : !t, !torch.int -> !torch.int
  %a = torch.aten.exp %g {bwd.values = ["a"]} : !t -> !t
  %b = torch.aten.neg %a {bwd.values = ["b"]} : !t -> !t
  %start = "bwd.create_token"() : () -> !bwd.token
  %h:2 = "bwd.call_hook"(%a, %start) {bwd.values = ["h", ""], kind = "tensor_pre", hook = 3 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %acc = "bwd.accumulate_grad"(%b, %h#1) {param = 5 : i64} : (!t, !bwd.token) -> !bwd.token
  %z = torch.aten.mul.Scalar %h#0, %size {bwd.values = ["z"]} : !t, !torch.int -> !t
  %end = "bwd.final_callbacks"(%acc) : (!bwd.token) -> !bwd.token
  return %z : !t
}

// -----

!t = !torch.vtensor<[2],f32>

// No effect, no cut.
// CHECK: bwd.plan = {arguments = ["g"], results = ["z"], steps = [{arguments = ["g"], function = "backward", results = ["z"], step = "run_stage"}, {step = "free", values = ["g"]}]}
// CHECK: func.func @backward
func.func @backward(%g: !t {bwd.role = "input", bwd.name = "g", bwd.value = "g"}) -> (!t {bwd.role = "grad", bwd.name = "grad.x"}) {
  %z = torch.aten.exp %g {bwd.values = ["z"]} : !t -> !t
  return %z : !t
}

// -----

!t = !torch.vtensor<[2],f32>
!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>

// An update of an argument is a step of the plan.
// CHECK: bwd.plan = {arguments = ["g", "w"], results = [], steps = [{arguments = ["g", "w"], function = "stage_0", results = ["new"], step = "run_stage"},
// CHECK-SAME: {step = "update_input", target = "w", value = "new"}
func.func @backward(%g: !t {bwd.role = "input", bwd.name = "g", bwd.value = "g"}, %w: !t {bwd.role = "param", bwd.name = "w", bwd.value = "w"}) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %new = torch.aten.mul.Tensor %g, %w {bwd.values = ["new"]} : !t, !t -> !t
  %pair = torch.prim.TupleConstruct %w, %new : !t, !t -> !pair
  %end = "bwd.update_input"(%pair, %start) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
  return
}

// -----

!t = !torch.vtensor<[512,512],f32>
!pair = !torch.tuple<vtensor<[512,512],f32>, vtensor<[512,512],f32>>

// What is worked out from a new value reads it from the argument that it was written to, and nothing holds it twice.
// CHECK: {arguments = ["g", "m"], function = "stage_0", results = ["average"], step = "run_stage"}
// CHECK-SAME: {step = "update_input", target = "m", value = "average"}, {step = "free", values = ["average"]}
// CHECK-SAME: {arguments = ["w", "m"], function = "stage_1", results = ["new"], step = "run_stage"}
// CHECK-SAME: {step = "update_input", target = "w", value = "new"}
func.func @backward(%g: !t {bwd.role = "input", bwd.name = "g", bwd.value = "g"}, %m: !t {bwd.role = "saved", bwd.name = "m", bwd.value = "m"}, %w: !t {bwd.role = "param", bwd.name = "w", bwd.value = "w"}) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %average = torch.aten.mul.Tensor %g, %m {bwd.values = ["average"]} : !t, !t -> !t
  %first = torch.prim.TupleConstruct %m, %average : !t, !t -> !pair
  %written = "bwd.update_input"(%first, %start) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
  %new = torch.aten.mul.Tensor %w, %average {bwd.values = ["new"]} : !t, !t -> !t
  %second = torch.prim.TupleConstruct %w, %new : !t, !t -> !pair
  %end = "bwd.update_input"(%second, %written) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
  return
}

// -----

!t = !torch.vtensor<[2],f32>
!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>

// A hook in Python may write to the argument: the value is kept.
// CHECK: {arguments = ["average"], function = "stage_1", results = ["new"], step = "run_stage"}
func.func @backward(%g: !t {bwd.role = "input", bwd.name = "g", bwd.value = "g"}, %m: !t {bwd.role = "saved", bwd.name = "m", bwd.value = "m"}) -> (!t {bwd.role = "grad", bwd.name = "grad.x"}) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %average = torch.aten.mul.Tensor %g, %m {bwd.values = ["average"]} : !t, !t -> !t
  %first = torch.prim.TupleConstruct %m, %average : !t, !t -> !pair
  %written = "bwd.update_input"(%first, %start) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
  %called, %end = "bwd.call_hook"(%g, %written) {kind = "tensor_pre", hook = 1 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %new = torch.aten.exp %average {bwd.values = ["new"]} : !t -> !t
  return %new : !t
}

// -----

!t = !torch.vtensor<[?],f32>

// Open sizes go with the tensors that have them: into a stage that computes with no number, and not into others.
// CHECK: steps = [{arguments = ["g", "size_s0"], function = "stage_0", results = ["a"], step = "run_stage"}
// CHECK-SAME: {arguments = ["w"], function = "stage_1", results = ["z"], step = "run_stage"}
// CHECK: func.func @stage_0(%{{.*}}: !torch.vtensor<[?],f32> {bwd.name = "g", bwd.role = "input", bwd.shape = "2 * s0", bwd.value = "g"}, %{{.*}}: !torch.int {bwd.name = "s0", bwd.role = "size", bwd.value = "size_s0"})
// CHECK-SAME: -> (!torch.vtensor<[?],f32> {bwd.name = "a", bwd.role = "saved", bwd.shape = "2 * s0", bwd.value = "a"})
// CHECK: func.func @stage_1(%{{.*}}: !torch.vtensor<[2],f32> {{.*}}) ->
module attributes {bwd.sizes = {s0 = 3 : i64}} {
  func.func @backward(%g: !t {bwd.role = "input", bwd.name = "g", bwd.value = "g", bwd.shape = "2 * s0"},
                      %w: !torch.vtensor<[2],f32> {bwd.role = "saved", bwd.name = "w", bwd.value = "w"},
                      %s0: !torch.int {bwd.role = "size", bwd.name = "s0", bwd.value = "size_s0"})
      -> (!torch.vtensor<[2],f32> {bwd.role = "output", bwd.name = "z"}) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %a = torch.aten.exp %g {bwd.values = ["a"], bwd.shapes = ["2 * s0"]} : !t -> !t
    %h:2 = "bwd.call_hook"(%a, %start) {bwd.values = ["h", ""], bwd.shapes = ["2 * s0", ""], kind = "tensor_pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
    %z = torch.aten.exp %w {bwd.values = ["z"]} : !torch.vtensor<[2],f32> -> !torch.vtensor<[2],f32>
    return %z : !torch.vtensor<[2],f32>
  }
}
