// RUN: retrograd-opt %s --split-input-file -p 'bwd-bucket-reductions' | FileCheck %s
// RUN: retrograd-opt %s --split-input-file -p 'bwd-bucket-reductions{first-bucket-bytes=16 bucket-bytes=64}' | FileCheck %s --check-prefix=SMALL
// RUN: retrograd-opt %s --split-input-file -p 'bwd-bucket-reductions{first-bucket-bytes=0 bucket-bytes=0}' | FileCheck %s --check-prefix=NONE

!t = !torch.vtensor<[4],f32>

// Both gradients are sent at once, when the second is there; the accumulation of the first comes behind.
// CHECK: bwd.collective_notes = ["joined: 2 times all_reduce (avg), 32 bytes in one bucket"]
// CHECK-LABEL: @backward
// CHECK: %[[A:.*]] = torch.aten.neg
// CHECK-NEXT: %[[B:.*]] = torch.aten.exp
// CHECK: %[[PAIR:.*]] = torch.prim.TupleConstruct %[[A]], %[[B]]
// CHECK-NEXT: %[[S:.*]]:2 = "bwd.start_collective"(%[[PAIR]], %{{.*}}) {group = "0", kind = "all_reduce", reduction = "avg", size = 0 : i64}
// CHECK-NEXT: %[[PARTS:.*]]:2 = torch.prim.TupleUnpack %[[S]]#0 {bwd.values = ["a.started", "b.started"]}
// CHECK-NEXT: %[[WA:.*]] = "bwd.wait_collective"(%[[PARTS]]#0) {bwd.values = ["a"]}
// CHECK-NEXT: %[[ACC:.*]] = "bwd.accumulate_grad"(%[[WA]], %[[S]]#1) {param = 0
// CHECK-NEXT: %[[WB:.*]] = "bwd.wait_collective"(%[[PARTS]]#1) {bwd.values = ["b"]}
// CHECK-NEXT: "bwd.accumulate_grad"(%[[WB]], %[[ACC]]) {param = 1
// SMALL: "bwd.start_collective"(%{{.*}}) {bwd.values = ["a.started", ""]
// SMALL: "bwd.start_collective"(%{{.*}}) {bwd.values = ["b.started", ""]
// NONE: "bwd.start_collective"(%{{.*}}) {bwd.values = ["a.started", ""]
// NONE: "bwd.start_collective"(%{{.*}}) {bwd.values = ["b.started", ""]
func.func @backward(%g: !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %x = torch.aten.neg %g : !t -> !t
  %s:2 = "bwd.start_collective"(%x, %t0) {bwd.values = ["a.started", ""], kind = "all_reduce", reduction = "avg", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %a = "bwd.wait_collective"(%s#0) {bwd.values = ["a"]} : (!t) -> !t
  %t1 = "bwd.accumulate_grad"(%a, %s#1) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
  %y = torch.aten.exp %g : !t -> !t
  %r:2 = "bwd.start_collective"(%y, %t1) {bwd.values = ["b.started", ""], kind = "all_reduce", reduction = "avg", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %b = "bwd.wait_collective"(%r#0) {bwd.values = ["b"]} : (!t) -> !t
  %t2 = "bwd.accumulate_grad"(%b, %r#1) {param = 1 : i64} : (!t, !bwd.token) -> !bwd.token
  return
}

// -----

!t = !torch.vtensor<[4],f32>

// The second depends on what the first gives: it is not joined with it, but with the third, which does not.
// CHECK-LABEL: @backward
// CHECK: %[[S:.*]]:2 = "bwd.start_collective"(%{{.*}}, %{{.*}}) {bwd.values = ["a.started", ""]
// CHECK: %[[A:.*]] = "bwd.wait_collective"(%[[S]]#0)
// CHECK: %[[N:.*]] = torch.aten.neg %[[A]]
// CHECK: %[[PAIR:.*]] = torch.prim.TupleConstruct %[[N]], %{{.*}}
// CHECK-NEXT: "bwd.start_collective"(%[[PAIR]], %[[S]]#1)
// CHECK-NOT: bwd.start_collective
// CHECK: return
func.func @backward(%g: !t) -> (!t, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %s:2 = "bwd.start_collective"(%g, %t0) {bwd.values = ["a.started", ""], kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %a = "bwd.wait_collective"(%s#0) : (!t) -> !t
  %n = torch.aten.neg %a : !t -> !t
  %r:2 = "bwd.start_collective"(%n, %s#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %b = "bwd.wait_collective"(%r#0) : (!t) -> !t
  %q:2 = "bwd.start_collective"(%g, %r#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %c = "bwd.wait_collective"(%q#0) : (!t) -> !t
  return %b, %c : !t, !t
}

// -----

!t = !torch.vtensor<[4],f32>
!h = !torch.vtensor<[4],bf16>

// Other groups, other reductions, other types of elements and gatherings are kept apart, though they stand between two
// that are joined.
// CHECK-LABEL: @backward
// CHECK: "bwd.start_collective"(%{{.*}}) {group = "1"
// CHECK: "bwd.start_collective"(%{{.*}}) {group = "0", kind = "all_reduce", reduction = "max"
// CHECK: "bwd.start_collective"(%{{.*}}) {group = "0", kind = "all_reduce", reduction = "sum", size = 0 : i64} : (!torch.vtensor<[4],bf16>
// CHECK: "bwd.start_collective"(%{{.*}}) {group = "0", kind = "all_gather"
// CHECK: torch.prim.TupleConstruct
// CHECK-NEXT: "bwd.start_collective"(%{{.*}}) {group = "0", kind = "all_reduce", reduction = "sum", size = 0 : i64} : (!torch.tuple<vtensor<[4],f32>, vtensor<[4],f32>>
// CHECK-NOT: bwd.start_collective
// CHECK: return
func.func @backward(%g: !t, %f: !h) -> (!t, !t, !t, !h, !torch.vtensor<[8],f32>, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %a:2 = "bwd.start_collective"(%g, %t0) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %b:2 = "bwd.start_collective"(%g, %a#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "1"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %c:2 = "bwd.start_collective"(%g, %b#1) {kind = "all_reduce", reduction = "max", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %d:2 = "bwd.start_collective"(%f, %c#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!h, !bwd.token) -> (!h, !bwd.token)
  %e:2 = "bwd.start_collective"(%g, %d#1) {kind = "all_gather", reduction = "", size = 2 : i64, group = "0"} : (!t, !bwd.token) -> (!torch.vtensor<[8],f32>, !bwd.token)
  %i:2 = "bwd.start_collective"(%g, %e#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %1 = "bwd.wait_collective"(%a#0) : (!t) -> !t
  %2 = "bwd.wait_collective"(%b#0) : (!t) -> !t
  %3 = "bwd.wait_collective"(%c#0) : (!t) -> !t
  %4 = "bwd.wait_collective"(%d#0) : (!h) -> !h
  %5 = "bwd.wait_collective"(%e#0) : (!torch.vtensor<[8],f32>) -> !torch.vtensor<[8],f32>
  %6 = "bwd.wait_collective"(%i#0) : (!t) -> !t
  return %1, %2, %3, %4, %5, %6 : !t, !t, !t, !h, !torch.vtensor<[8],f32>, !t
}

// -----

!t = !torch.vtensor<[4],f32>

// A hook that communicates by itself keeps its place among them: what is before it is not joined with what is behind.
// CHECK-LABEL: @backward
// CHECK: "bwd.start_collective"
// CHECK: "bwd.call_hook"
// CHECK: "bwd.start_collective"
// CHECK-NOT: torch.prim.TupleConstruct
// CHECK: return
func.func @backward(%g: !t) -> (!t, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %a:2 = "bwd.start_collective"(%g, %t0) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %h:2 = "bwd.call_hook"(%g, %a#1) {kind = "tensor_pre", hook = 0 : i64, bwd.communication} : (!t, !bwd.token) -> (!t, !bwd.token)
  %b:2 = "bwd.start_collective"(%h#0, %h#1) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %1 = "bwd.wait_collective"(%a#0) : (!t) -> !t
  %2 = "bwd.wait_collective"(%b#0) : (!t) -> !t
  return %1, %2 : !t, !t
}

// -----

!t = !torch.vtensor<[4],f32>

// The first bucket is small, and full with one; the next takes four, and one is left. Then they need one wait each.
// SMALL: bwd.collective_notes = ["joined: 4 times reduce_scatter (sum), 64 bytes in one bucket"]
// SMALL: func.func @backward
// SMALL: "bwd.start_collective"(%{{.*}}) {bwd.values = ["a", ""]
// SMALL: "bwd.start_collective"(%{{.*}}) {group = "0", kind = "reduce_scatter", reduction = "sum", size = 2 : i64}
// SMALL-NEXT: torch.prim.TupleUnpack
// SMALL: "bwd.start_collective"(%{{.*}}) {bwd.values = ["f", ""]
func.func @backward(%g: !torch.vtensor<[8],f32>) -> (!t, !t, !t, !t, !t, !t) {
  %t0 = "bwd.create_token"() : () -> !bwd.token
  %a:2 = "bwd.start_collective"(%g, %t0) {bwd.values = ["a", ""], kind = "reduce_scatter", reduction = "sum", size = 2 : i64, group = "0"} : (!torch.vtensor<[8],f32>, !bwd.token) -> (!t, !bwd.token)
  %b:2 = "bwd.start_collective"(%g, %a#1) {bwd.values = ["b", ""], kind = "reduce_scatter", reduction = "sum", size = 2 : i64, group = "0"} : (!torch.vtensor<[8],f32>, !bwd.token) -> (!t, !bwd.token)
  %c:2 = "bwd.start_collective"(%g, %b#1) {bwd.values = ["c", ""], kind = "reduce_scatter", reduction = "sum", size = 2 : i64, group = "0"} : (!torch.vtensor<[8],f32>, !bwd.token) -> (!t, !bwd.token)
  %d:2 = "bwd.start_collective"(%g, %c#1) {bwd.values = ["d", ""], kind = "reduce_scatter", reduction = "sum", size = 2 : i64, group = "0"} : (!torch.vtensor<[8],f32>, !bwd.token) -> (!t, !bwd.token)
  %e:2 = "bwd.start_collective"(%g, %d#1) {bwd.values = ["e", ""], kind = "reduce_scatter", reduction = "sum", size = 2 : i64, group = "0"} : (!torch.vtensor<[8],f32>, !bwd.token) -> (!t, !bwd.token)
  %f:2 = "bwd.start_collective"(%g, %e#1) {bwd.values = ["f", ""], kind = "reduce_scatter", reduction = "sum", size = 2 : i64, group = "0"} : (!torch.vtensor<[8],f32>, !bwd.token) -> (!t, !bwd.token)
  %1 = "bwd.wait_collective"(%a#0) : (!t) -> !t
  %2 = "bwd.wait_collective"(%b#0) : (!t) -> !t
  %3 = "bwd.wait_collective"(%c#0) : (!t) -> !t
  %4 = "bwd.wait_collective"(%d#0) : (!t) -> !t
  %5 = "bwd.wait_collective"(%e#0) : (!t) -> !t
  %6 = "bwd.wait_collective"(%f#0) : (!t) -> !t
  return %1, %2, %3, %4, %5, %6 : !t, !t, !t, !t, !t, !t
}
