// RUN: retrograd-opt %s --split-input-file --verify-diagnostics -p 'bwd-split-collectives'

// expected-error @below {{bwd-split-collectives: 'func.func' op: a function of several blocks; run it on structured code}}
func.func @backward() {
  cf.br ^next
^next:
  return
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  // expected-error @below {{'bwd.collective' op expects attribute 'kind' to be one of all_reduce, all_gather, reduce_scatter, found "scatter"}}
  %r = "bwd.collective"(%g) {kind = "scatter", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  return %r : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  // expected-error @below {{'bwd.collective' op expects attribute 'reduction' to be an empty string, found "sum"}}
  %r = "bwd.collective"(%g) {kind = "all_gather", reduction = "sum", size = 2 : i64, group = "0"} : (!t) -> !t
  return %r : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  // expected-error @below {{'bwd.collective' op expects attribute 'reduction' to be a string that is not empty, found ""}}
  %r = "bwd.collective"(%g) {kind = "all_reduce", reduction = "", size = 2 : i64, group = "0"} : (!t) -> !t
  return %r : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  // expected-error @below {{'bwd.collective' op expects attribute 'group' to be a string that is not empty, found ""}}
  %r = "bwd.collective"(%g) {kind = "all_reduce", reduction = "sum", size = 2 : i64, group = ""} : (!t) -> !t
  return %r : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  // expected-error @below {{'bwd.collective' op expects attribute 'size' to be an i64 of 0 or more, found -1 : i64}}
  %r = "bwd.collective"(%g) {kind = "all_reduce", reduction = "sum", size = -1 : i64, group = "0"} : (!t) -> !t
  return %r : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  %t = "bwd.create_token"() : () -> !bwd.token
  // expected-error @below {{'bwd.start_collective' op gives what torch.aten.neg takes, before it is there: wait for it}}
  %s:2 = "bwd.start_collective"(%g, %t) {kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t, !bwd.token) -> (!t, !bwd.token)
  %n = torch.aten.neg %s#0 : !t -> !t
  return %n : !t
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !torch.vtensor<[8],f32> {
  // expected-error @below {{'bwd.wait_collective' op expects a result of its operand's type !torch.vtensor<[4],f32>, found !torch.vtensor<[8],f32>}}
  %r = "bwd.wait_collective"(%g) : (!t) -> !torch.vtensor<[8],f32>
  return %r : !torch.vtensor<[8],f32>
}

// -----

!t = !torch.vtensor<[4],f32>

func.func @backward(%g: !t) -> !t {
  %r = "bwd.collective"(%g) {bwd.turn = 1 : i64, kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  // expected-error @below {{bwd-split-collectives: 'bwd.collective' op: a collective takes what one gives whose turn comes later; number collectives in the order of the captured graph}}
  %s = "bwd.collective"(%r) {bwd.turn = 0 : i64, kind = "all_reduce", reduction = "sum", size = 0 : i64, group = "0"} : (!t) -> !t
  return %s : !t
}
