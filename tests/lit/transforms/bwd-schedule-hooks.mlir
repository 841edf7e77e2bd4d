// RUN: retrograd-opt %s --split-input-file -p 'bwd-schedule-hooks{policy=eager-order}' | FileCheck %s --check-prefix=EAGER
// RUN: retrograd-opt %s --split-input-file -p 'bwd-schedule-hooks{policy=asap}' | FileCheck %s --check-prefix=ASAP
// RUN: retrograd-opt %s --split-input-file -p 'bwd-schedule-hooks{policy=overlap}' | FileCheck %s --check-prefix=OVERLAP
// RUN: retrograd-opt %s --split-input-file -p 'bwd-schedule-hooks{policy=fewest-stages}' | FileCheck %s --check-prefix=FEWEST

!t = !torch.vtensor<[2],f32>

// Accumulation as soon as its gradient exists, the post-accumulate hook right after it; a tensor pre-hook right after
// its tensor. Captured at the end, as inlined backward graphs leave them. The fewest stages: one before the hooks.
// ASAP-LABEL: @backward
// ASAP: %[[W:.*]] = torch.aten.neg
// ASAP-NEXT: %[[START:.*]] = "bwd.create_token"
// ASAP-NEXT: %[[ACC:.*]] = "bwd.accumulate_grad"(%[[W]], %[[START]]) {param = 0
// ASAP-NEXT: torch.constant.none
// ASAP-NEXT: %[[POST:.*]]:2 = "bwd.call_hook"({{.*}}, %[[ACC]]) {hook = 1 : i64, kind = "post_acc_grad"}
// ASAP-NEXT: %[[X:.*]] = torch.aten.exp
// ASAP-NEXT: "bwd.call_hook"(%[[X]], %[[POST]]#1) {hook = 0 : i64, kind = "tensor_pre"}
// ASAP-NEXT: torch.aten.sin
// EAGER-LABEL: @backward
// EAGER: torch.aten.exp
// EAGER: kind = "tensor_pre"
// EAGER: torch.aten.neg
// EAGER: "bwd.accumulate_grad"
// EAGER: kind = "post_acc_grad"
// FEWEST-LABEL: @backward
// FEWEST: torch.aten.neg
// FEWEST: torch.aten.exp
// FEWEST: kind = "tensor_pre"
// FEWEST: "bwd.accumulate_grad"
// FEWEST: kind = "post_acc_grad"
// FEWEST: torch.aten.sin
func.func @backward(%g: !t) -> !t {
  %start = "bwd.create_token"() : () -> !bwd.token
  %w = torch.aten.neg %g : !t -> !t
  %x = torch.aten.exp %g : !t -> !t
  %h:2 = "bwd.call_hook"(%x, %start) {kind = "tensor_pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %y = torch.aten.sin %h#0 : !t -> !t
  %acc = "bwd.accumulate_grad"(%w, %h#1) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
  %none = torch.constant.none
  %p:2 = "bwd.call_hook"(%none, %acc) {kind = "post_acc_grad", hook = 1 : i64} : (!torch.none, !bwd.token) -> (!torch.none, !bwd.token)
  return %y : !t
}

// -----

!t = !torch.vtensor<[2],f32>

// Unpacking is delayed to the first use, behind the pre-hook of the node, which comes right before what the node
// computes. Two hooks on one node keep the order of their registration.
// EAGER-LABEL: @backward
// EAGER: hook = 1 : i64, kind = "pre"
// EAGER: hook = 2 : i64, kind = "pre"
// EAGER: torch.aten.exp
// EAGER: kind = "tensor_pre"
// EAGER: kind = "unpack"
// EAGER-NEXT: torch.aten.mul.Tensor
// ASAP-LABEL: @backward
// ASAP: hook = 1 : i64, kind = "pre"
// ASAP: hook = 2 : i64, kind = "pre"
// ASAP: kind = "tensor_pre"
// ASAP: kind = "unpack"
// ASAP-NEXT: torch.aten.mul.Tensor
// FEWEST-LABEL: @backward
// FEWEST: hook = 1 : i64, kind = "pre"
// FEWEST: hook = 2 : i64, kind = "pre"
// FEWEST: torch.aten.exp
// FEWEST: kind = "unpack"
// FEWEST: torch.aten.mul.Tensor
func.func @backward(%g: !t, %packed: !t) -> !t {
  %start = "bwd.create_token"() : () -> !bwd.token
  %s:2 = "bwd.call_hook"(%packed, %start) {kind = "unpack", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %p:2 = "bwd.call_hook"(%g, %s#1) {kind = "pre", hook = 1 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %q:2 = "bwd.call_hook"(%p#0, %p#1) {kind = "pre", hook = 2 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %e = torch.aten.exp %q#0 : !t -> !t
  %h:2 = "bwd.call_hook"(%e, %q#1) {kind = "tensor_pre", hook = 3 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
  %y = torch.aten.mul.Tensor %h#0, %s#0 : !t, !t -> !t
  return %y : !t
}

// -----

!t = !torch.vtensor<[2],f32>

// A post hook follows all that consumes what its node took: the accumulation, its hooks, and compute.
// EAGER-LABEL: @backward
// EAGER: "bwd.accumulate_grad"
// EAGER: kind = "post_acc_grad"
// EAGER: torch.aten.exp
// EAGER: kind = "post"}
// ASAP-LABEL: @backward
// ASAP: "bwd.accumulate_grad"
// ASAP: kind = "post_acc_grad"
// ASAP: torch.aten.exp
// ASAP: kind = "post"}
// FEWEST-LABEL: @backward
// FEWEST: "bwd.accumulate_grad"
// FEWEST: kind = "post_acc_grad"
// FEWEST: torch.aten.exp
// FEWEST: kind = "post"}
func.func @backward(%g: !t) -> !t {
  %start = "bwd.create_token"() : () -> !bwd.token
  %y = torch.aten.exp %g : !t -> !t
  %acc = "bwd.accumulate_grad"(%g, %start) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
  %none = torch.constant.none
  %a:2 = "bwd.call_hook"(%none, %acc) {kind = "post_acc_grad", hook = 1 : i64} : (!torch.none, !bwd.token) -> (!torch.none, !bwd.token)
  %p:2 = "bwd.call_hook"(%g, %a#1) {kind = "post", hook = 2 : i64} : (!t, !bwd.token) -> (!torch.none, !bwd.token)
  return %y : !t
}

// -----

!t = !torch.vtensor<[2],f32>
!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>

// Dead sizes go, and what takes unused results of a hook apart; the hook stays, and so does a call that gives nothing.
// EAGER-LABEL: @backward
// EAGER-NEXT: %[[PAIR:.*]] = torch.prim.TupleConstruct
// EAGER-NEXT: %[[START:.*]] = "bwd.create_token"
// EAGER-NEXT: %[[HOOK:.*]]:2 = "bwd.call_hook"(%[[PAIR]], %[[START]])
// EAGER-NEXT: "bwd.final_callbacks"(%[[HOOK]]#1)
// EAGER-NEXT: return
func.func @backward(%g: !t) {
  %start = "bwd.create_token"() : () -> !bwd.token
  %zero = torch.constant.int 0
  %size = torch.aten.size.int %g, %zero : !t, !torch.int -> !torch.int
  %dead = torch.aten.neg %g : !t -> !t
  %pair = torch.prim.TupleConstruct %g, %g : !t, !t -> !pair
  %h:2 = "bwd.call_hook"(%pair, %start) {kind = "pre", hook = 0 : i64} : (!pair, !bwd.token) -> (!pair, !bwd.token)
  %u:2 = torch.prim.TupleUnpack %h#0 : !pair -> !t, !t
  %late = torch.aten.neg %u#1 : !t -> !t
  %end = "bwd.final_callbacks"(%h#1) : (!bwd.token) -> !bwd.token
  return
}

// -----

!t = !torch.vtensor<[2],f32>

// Communication starts before anything that it does not need; the rest fills the time.
// OVERLAP-LABEL: module @ddp
// OVERLAP: torch.aten.neg
// OVERLAP: "bwd.accumulate_grad"
// OVERLAP: bwd.communication
// OVERLAP: torch.aten.exp
// OVERLAP: hook = 0 : i64, kind = "tensor_pre"
module @ddp {
  func.func @backward(%g: !t) -> !t {
    %start = "bwd.create_token"() : () -> !bwd.token
    %x = torch.aten.exp %g : !t -> !t
    %h:2 = "bwd.call_hook"(%x, %start) {kind = "tensor_pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
    %w = torch.aten.neg %g : !t -> !t
    %acc = "bwd.accumulate_grad"(%w, %h#1) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
    %none = torch.constant.none
    %p:2 = "bwd.call_hook"(%none, %acc) {bwd.communication, kind = "post_acc_grad", hook = 1 : i64} : (!torch.none, !bwd.token) -> (!torch.none, !bwd.token)
    return %h#0 : !t
  }
}

// -----

!t = !torch.vtensor<[2],f32>

// A custom function that communicates, as FSDP's does when a block has its gradients, sends what was accumulated before
// it, of which its operands say nothing. Communication keeps its order, the one of a process that runs eagerly: of hook
// 1, what it needs is there later than what hook 2 does.
// OVERLAP-LABEL: module @fsdp
// OVERLAP: torch.aten.sin
// OVERLAP: %[[ACC:.*]] = "bwd.accumulate_grad"
// OVERLAP-NEXT: torch.prim.TupleConstruct
// OVERLAP-NEXT: %[[SENT:.*]]:2 = "bwd.call_backward"({{.*}}, %[[ACC]])
// OVERLAP: torch.aten.neg
// OVERLAP: %[[FIRST:.*]]:2 = "bwd.call_hook"({{.*}}, %[[SENT]]#1) {bwd.communication, hook = 1
// OVERLAP: "bwd.call_hook"({{.*}}, %[[FIRST]]#1) {bwd.communication, hook = 2
// OVERLAP: torch.aten.exp
// OVERLAP: hook = 0 : i64, kind = "tensor_pre"
// FEWEST-LABEL: module @fsdp
// FEWEST: "bwd.accumulate_grad"
// FEWEST: "bwd.call_backward"
// FEWEST: bwd.communication, hook = 1
// FEWEST: bwd.communication, hook = 2
module @fsdp {
  func.func @backward(%g: !t, %k: !t) -> (!t, !t, !t, !t) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %x = torch.aten.exp %g : !t -> !t
    %h:2 = "bwd.call_hook"(%x, %start) {kind = "tensor_pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
    %w = torch.aten.sin %g : !t -> !t
    %acc = "bwd.accumulate_grad"(%w, %h#1) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
    %one = torch.prim.TupleConstruct %k : !t -> !torch.tuple<vtensor<[2],f32>>
    %sent:2 = "bwd.call_backward"(%one, %acc) {bwd.communication, function = 0 : i64} : (!torch.tuple<vtensor<[2],f32>>, !bwd.token) -> (!t, !bwd.token)
    %y = torch.aten.neg %g : !t -> !t
    %p:2 = "bwd.call_hook"(%y, %sent#1) {bwd.communication, kind = "tensor_pre", hook = 1 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
    %q:2 = "bwd.call_hook"(%k, %p#1) {bwd.communication, kind = "tensor_pre", hook = 2 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
    return %h#0, %sent#0, %p#0, %q#0 : !t, !t, !t, !t
  }
}

// -----

!t = !torch.vtensor<[2],f32>
!one = !torch.tuple<vtensor<[2],f32>>
!large = !torch.vtensor<[512,512],f32>
!large_one = !torch.tuple<vtensor<[512,512],f32>>

// Small gradients that are sent one after the other are worked out in one stage; a large one is sent before what follows
// it is worked out.
// OVERLAP-LABEL: module @buckets
// OVERLAP: torch.aten.neg
// OVERLAP-NEXT: torch.aten.exp
// OVERLAP-NEXT: torch.aten.sin
// OVERLAP: "bwd.accumulate_grad"{{.*}} {param = 0
// OVERLAP: hook = 0
// OVERLAP: "bwd.accumulate_grad"{{.*}} {param = 1
// OVERLAP: hook = 1
// OVERLAP: torch.aten.neg
// OVERLAP: "bwd.accumulate_grad"{{.*}} {param = 2
// OVERLAP: hook = 2
// OVERLAP: torch.aten.cos
// OVERLAP: "bwd.accumulate_grad"{{.*}} {param = 3
// OVERLAP: hook = 3
module @buckets {
  func.func @backward(%g: !t, %l: !large) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %w0 = torch.aten.neg %g : !t -> !t
    %acc0 = "bwd.accumulate_grad"(%w0, %start) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
    %one0 = torch.prim.TupleConstruct %w0 : !t -> !one
    %p0:2 = "bwd.call_hook"(%one0, %acc0) {bwd.communication, kind = "post", hook = 0 : i64} : (!one, !bwd.token) -> (!torch.none, !bwd.token)
    %g1 = torch.aten.exp %g : !t -> !t
    %w1 = torch.aten.sin %g1 : !t -> !t
    %acc1 = "bwd.accumulate_grad"(%w1, %p0#1) {param = 1 : i64} : (!t, !bwd.token) -> !bwd.token
    %one1 = torch.prim.TupleConstruct %w1 : !t -> !one
    %p1:2 = "bwd.call_hook"(%one1, %acc1) {bwd.communication, kind = "post", hook = 1 : i64} : (!one, !bwd.token) -> (!torch.none, !bwd.token)
    %w2 = torch.aten.neg %l : !large -> !large
    %acc2 = "bwd.accumulate_grad"(%w2, %p1#1) {param = 2 : i64} : (!large, !bwd.token) -> !bwd.token
    %one2 = torch.prim.TupleConstruct %w2 : !large -> !large_one
    %p2:2 = "bwd.call_hook"(%one2, %acc2) {bwd.communication, kind = "post", hook = 2 : i64} : (!large_one, !bwd.token) -> (!torch.none, !bwd.token)
    %w3 = torch.aten.cos %g1 : !t -> !t
    %acc3 = "bwd.accumulate_grad"(%w3, %p2#1) {param = 3 : i64} : (!t, !bwd.token) -> !bwd.token
    %one3 = torch.prim.TupleConstruct %w3 : !t -> !one
    %p3:2 = "bwd.call_hook"(%one3, %acc3) {bwd.communication, kind = "post", hook = 3 : i64} : (!one, !bwd.token) -> (!torch.none, !bwd.token)
    return
  }
}

// -----

!large = !torch.vtensor<[1024,1024],f32>
!one = !torch.tuple<vtensor<[1024,1024],f32>>

// Large gradients that fill one bucket are worked out in one stage, since nothing is sent before it is full; the next
// bucket's follow once that was told.
// EAGER-LABEL: module @full_buckets
// EAGER: torch.aten.neg
// EAGER: torch.aten.sin
// EAGER: "bwd.accumulate_grad"{{.*}} {param = 0
// EAGER: hook = 0
// EAGER: "bwd.accumulate_grad"{{.*}} {param = 1
// EAGER: hook = 1
// EAGER: torch.aten.cos
// EAGER: "bwd.accumulate_grad"{{.*}} {param = 2
// EAGER: hook = 2
module @full_buckets {
  func.func @backward(%g: !large) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %w0 = torch.aten.neg %g : !large -> !large
    %acc0 = "bwd.accumulate_grad"(%w0, %start) {param = 0 : i64} : (!large, !bwd.token) -> !bwd.token
    %one0 = torch.prim.TupleConstruct %w0 : !large -> !one
    %p0:2 = "bwd.call_hook"(%one0, %acc0) {bwd.communication, bwd.bucket = 0 : i64, kind = "post", hook = 0 : i64} : (!one, !bwd.token) -> (!torch.none, !bwd.token)
    %w1 = torch.aten.sin %g : !large -> !large
    %acc1 = "bwd.accumulate_grad"(%w1, %p0#1) {param = 1 : i64} : (!large, !bwd.token) -> !bwd.token
    %one1 = torch.prim.TupleConstruct %w1 : !large -> !one
    %p1:2 = "bwd.call_hook"(%one1, %acc1) {bwd.communication, bwd.bucket = 0 : i64, kind = "post", hook = 1 : i64} : (!one, !bwd.token) -> (!torch.none, !bwd.token)
    %w2 = torch.aten.cos %g : !large -> !large
    %acc2 = "bwd.accumulate_grad"(%w2, %p1#1) {param = 2 : i64} : (!large, !bwd.token) -> !bwd.token
    %one2 = torch.prim.TupleConstruct %w2 : !large -> !one
    %p2:2 = "bwd.call_hook"(%one2, %acc2) {bwd.communication, bwd.bucket = 1 : i64, kind = "post", hook = 2 : i64} : (!one, !bwd.token) -> (!torch.none, !bwd.token)
    return
  }
}

// -----

!t = !torch.vtensor<[2],f32>
!pair = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>>
!triple = !torch.tuple<vtensor<[2],f32>, vtensor<[2],f32>, vtensor<[2],f32>>

// What a hook writes to an argument is written once all that was captured before has read the argument, and the argument
// that is a view of it, however late its results are needed; and before another hook's update is worked out.
// EAGER-LABEL: module @updates
// EAGER-DAG: torch.aten.neg
// EAGER-DAG: torch.aten.sin %[[VIEW:.*]] :
// EAGER-DAG: torch.aten.mul.Tensor
// EAGER: "bwd.update_input"({{.*}}) {hook = 0 : i64}
// EAGER: torch.aten.cos
// EAGER: "bwd.update_input"({{.*}}) {hook = 1 : i64}
// EAGER: torch.aten.exp
module @updates {
  func.func @backward(%g: !t, %w: !t, %view: !t, %v: !t) -> !t {
    %start = "bwd.create_token"() : () -> !bwd.token
    %late = torch.aten.neg %w : !t -> !t
    %also = torch.aten.sin %view : !t -> !t
    %new = torch.aten.mul.Tensor %g, %w : !t, !t -> !t
    %update = torch.prim.TupleConstruct %w, %new, %view : !t, !t, !t -> !triple
    %u = "bwd.update_input"(%update, %start) {hook = 0 : i64} : (!triple, !bwd.token) -> !bwd.token
    %other = torch.aten.cos %g : !t -> !t
    %second = torch.prim.TupleConstruct %v, %other : !t, !t -> !pair
    %end = "bwd.update_input"(%second, %u) {hook = 1 : i64} : (!pair, !bwd.token) -> !bwd.token
    %sum = torch.aten.mul.Tensor %late, %also : !t, !t -> !t
    %result = torch.aten.exp %sum : !t -> !t
    return %result : !t
  }
}

// -----

!t = !torch.vtensor<[512,512],f32>
!pair = !torch.tuple<vtensor<[512,512],f32>, vtensor<[512,512],f32>>

// Large values that one hook writes are worked out one by one, each from what is written already.
// EAGER-LABEL: module @large_updates
// EAGER: torch.aten.mul.Tensor
// EAGER: "bwd.update_input"
// EAGER: torch.aten.cos
// EAGER: "bwd.update_input"
module @large_updates {
  func.func @backward(%g: !t, %m: !t, %w: !t) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %average = torch.aten.mul.Tensor %g, %m : !t, !t -> !t
    %new = torch.aten.cos %average : !t -> !t
    %first = torch.prim.TupleConstruct %m, %average : !t, !t -> !pair
    %written = "bwd.update_input"(%first, %start) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
    %second = torch.prim.TupleConstruct %w, %new : !t, !t -> !pair
    %end = "bwd.update_input"(%second, %written) {hook = 0 : i64} : (!pair, !bwd.token) -> !bwd.token
    return
  }
}

// -----

!t = !torch.vtensor<[512,512],f32>

// A large gradient is accumulated before anything else is worked out: what it took is free by then. Only where the
// fewest stages are wanted, it waits for the rest.
// EAGER-LABEL: module @large_gradients
// EAGER: torch.aten.sin
// EAGER-NEXT: "bwd.create_token"
// EAGER-NEXT: "bwd.accumulate_grad"{{.*}}{param = 0
// EAGER-NEXT: torch.aten.cos
// EAGER: "bwd.accumulate_grad"{{.*}}{param = 1
// ASAP-LABEL: module @large_gradients
// ASAP: torch.aten.sin
// ASAP-NEXT: "bwd.create_token"
// ASAP-NEXT: "bwd.accumulate_grad"{{.*}}{param = 0
// OVERLAP-LABEL: module @large_gradients
// OVERLAP: torch.aten.sin
// OVERLAP-NEXT: "bwd.create_token"
// OVERLAP-NEXT: "bwd.accumulate_grad"{{.*}}{param = 0
// FEWEST-LABEL: module @large_gradients
// FEWEST: torch.aten.sin
// FEWEST-NEXT: torch.aten.cos
module @large_gradients {
  func.func @backward(%g: !t) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %one = torch.aten.sin %g : !t -> !t
    %middle = "bwd.accumulate_grad"(%one, %start) {param = 0 : i64} : (!t, !bwd.token) -> !bwd.token
    %two = torch.aten.cos %g : !t -> !t
    %end = "bwd.accumulate_grad"(%two, %middle) {param = 1 : i64} : (!t, !bwd.token) -> !bwd.token
    return
  }
}

// -----

!t = !torch.vtensor<[2],f32>

// An op that gives a tensor and a list stays in front of what takes the list apart: where nobody needs the tensor, and
// where a hook comes between the two. cuDNN's recurrent layers give the weights' gradients so.
// ASAP-LABEL: module @lists
// ASAP: %[[USED:.*]]:2 = torch.operator "torch.aten.second"
// ASAP-NEXT: torch.prim.ListUnpack %[[USED]]#1
// ASAP: "bwd.call_hook"(%[[USED]]#0
// ASAP: %[[UNUSED:.*]]:2 = torch.operator "torch.aten.first"
// ASAP-NEXT: torch.prim.ListUnpack %[[UNUSED]]#1
// EAGER-LABEL: module @lists
// EAGER: %[[USED:.*]]:2 = torch.operator "torch.aten.second"
// EAGER-NEXT: torch.prim.ListUnpack %[[USED]]#1
// EAGER: "bwd.call_hook"(%[[USED]]#0
// EAGER: %[[UNUSED:.*]]:2 = torch.operator "torch.aten.first"
// EAGER-NEXT: torch.prim.ListUnpack %[[UNUSED]]#1
// OVERLAP-LABEL: module @lists
// OVERLAP: %[[UNUSED:.*]]:2 = torch.operator "torch.aten.first"
// OVERLAP-NEXT: torch.prim.ListUnpack %[[UNUSED]]#1
// FEWEST-LABEL: module @lists
// FEWEST: %[[UNUSED:.*]]:2 = torch.operator "torch.aten.first"
// FEWEST-NEXT: torch.prim.ListUnpack %[[UNUSED]]#1
module @lists {
  func.func @backward(%g: !t) -> (!t, !t, !t) {
    %start = "bwd.create_token"() : () -> !bwd.token
    %a:2 = torch.operator "torch.aten.first"(%g) : (!t) -> (!t, !torch.list<vtensor>)
    %b:2 = torch.operator "torch.aten.second"(%g) : (!t) -> (!t, !torch.list<vtensor>)
    %h:2 = "bwd.call_hook"(%b#0, %start) {kind = "tensor_pre", hook = 0 : i64} : (!t, !bwd.token) -> (!t, !bwd.token)
    %x:2 = torch.prim.ListUnpack %a#1 : !torch.list<vtensor> -> !t, !t
    %y:2 = torch.prim.ListUnpack %b#1 : !torch.list<vtensor> -> !t, !t
    %z = torch.aten.neg %y#1 : !t -> !t
    return %h#0, %x#0, %z : !t, !t, !t
  }
}
