// RUN: retrograd-opt %s --split-input-file --verify-diagnostics

func.func @token_of_another_type() {
  // expected-error @below {{'bwd.create_token' op expects a !bwd.token as result 0, found i32}}
  %0 = "bwd.create_token"() : () -> i32
  return
}

// -----

func.func @token_from_something(%x: i32) {
  // expected-error @below {{'bwd.create_token' op expects 0 operands (none), found 1}}
  %0 = "bwd.create_token"(%x) : (i32) -> !bwd.token
  return
}

// -----

// expected-error @below {{expected 0 type arguments, but had 1}}
func.func private @token_with_argument(!bwd.token<i32>)

// -----

func.func @hook_without_token(%x: i32) {
  // expected-error @below {{'bwd.call_hook' op expects 2 operands (value, token), found 1}}
  %0:2 = "bwd.call_hook"(%x) {kind = "pre", hook = 0 : i64} : (i32) -> (i32, !bwd.token)
  return
}

// -----

func.func @hook_with_token_first(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.call_hook' op expects a value as operand 0, found !bwd.token: the token comes last}}
  %0:2 = "bwd.call_hook"(%t, %x) {kind = "pre", hook = 0 : i64} : (!bwd.token, i32) -> (i32, !bwd.token)
  return
}

// -----

func.func @hook_with_no_token_out(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.call_hook' op expects a !bwd.token as result 1, found i32}}
  %0:2 = "bwd.call_hook"(%x, %t) {kind = "pre", hook = 0 : i64} : (i32, !bwd.token) -> (i32, i32)
  return
}

// -----

func.func @hook_of_unknown_kind(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.call_hook' op expects attribute 'kind' to be one of tensor_pre, pre, post, post_acc_grad, unpack, pack, cpp_tensor_pre, found "prior"}}
  %0:2 = "bwd.call_hook"(%x, %t) {kind = "prior", hook = 0 : i64} : (i32, !bwd.token) -> (i32, !bwd.token)
  return
}

// -----

func.func @hook_of_no_kind(%x: i32, %t: !bwd.token) {
  // expected-error @below {{cpp_tensor_pre, found none}}
  %0:2 = "bwd.call_hook"(%x, %t) {hook = 0 : i64} : (i32, !bwd.token) -> (i32, !bwd.token)
  return
}

// -----

func.func @hook_of_negative_index(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.call_hook' op expects attribute 'hook' to be an i64 of 0 or more, found -1 : i64}}
  %0:2 = "bwd.call_hook"(%x, %t) {kind = "pre", hook = -1 : i64} : (i32, !bwd.token) -> (i32, !bwd.token)
  return
}

// -----

func.func @gradient_into_nothing(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.accumulate_grad' op expects attribute 'param' to be an i64 of 0 or more, found none}}
  %0 = "bwd.accumulate_grad"(%x, %t) : (i32, !bwd.token) -> !bwd.token
  return
}

// -----

func.func @gradient_with_result(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.accumulate_grad' op expects 1 result (token), found 2}}
  %0:2 = "bwd.accumulate_grad"(%x, %t) {param = 0 : i64} : (i32, !bwd.token) -> (i32, !bwd.token)
  return
}

// -----

func.func @update_by_nobody(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.update_input' op expects attribute 'hook' to be an i64 of 0 or more, found none}}
  %0 = "bwd.update_input"(%x, %t) : (i32, !bwd.token) -> !bwd.token
  return
}

// -----

func.func @function_of_wrong_width(%x: i32, %t: !bwd.token) {
  // expected-error @below {{'bwd.call_backward' op expects attribute 'function' to be an i64 of 0 or more, found 1 : i32}}
  %0:2 = "bwd.call_backward"(%x, %t) {function = 1 : i32} : (i32, !bwd.token) -> (i32, !bwd.token)
  return
}

// -----

func.func @callbacks_without_token() {
  // expected-error @below {{'bwd.final_callbacks' op expects 1 operand (token), found 0}}
  %0 = "bwd.final_callbacks"() : () -> !bwd.token
  return
}

// -----

func.func @save_of_no_name(%x: i32) {
  // expected-error @below {{'bwd.save' op expects attribute 'name' to be a string that is not empty, found ""}}
  "bwd.save"(%x) {name = ""} : (i32) -> ()
  return
}

// -----

func.func @save_of_token(%t: !bwd.token) {
  // expected-error @below {{'bwd.save' op expects a value as operand 0, found !bwd.token: the token comes last}}
  "bwd.save"(%t) {name = "t"} : (!bwd.token) -> ()
  return
}

// -----

func.func @barrier_that_converts(%x: i32) {
  // expected-error @below {{'bwd.recompute_barrier' op expects a result of its operand's type i32, found i64}}
  %0 = "bwd.recompute_barrier"(%x) : (i32) -> i64
  return
}

// -----

func.func @no_such_op() {
  // expected-error @below {{unregistered operation 'bwd.nothing' found in dialect ('bwd') that does not allow unknown operations}}
  "bwd.nothing"() : () -> ()
  return
}

// -----

// Ops of a dialect that is defined from Python have generic syntax alone.
func.func @custom_syntax(%x: i32) {
  bwd.save %x
  return
}

// expected-error @unknown {{write ops of the bwd dialect in generic form}}

// -----

func.func @attention_of_other_keys(%q: tensor<1x4x5x8xf32>, %k: tensor<1x3x7x8xf32>, %m: tensor<f32>) {
  // expected-error @below {{'bwd.attention' op expects a query B x H x L x D, a key and a value B x H / repeats x S x D, found tensor<1x4x5x8xf32>, tensor<1x3x7x8xf32>, tensor<1x3x7x8xf32>}}
  %0:2 = "bwd.attention"(%q, %k, %k, %m) {causal = true, scale = 1.0 : f32} : (tensor<1x4x5x8xf32>, tensor<1x3x7x8xf32>, tensor<1x3x7x8xf32>, tensor<f32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  return
}

// -----

func.func @attention_with_another_mask(%q: tensor<1x4x5x8xf32>, %m: tensor<5x4xf32>) {
  // expected-error @below {{'bwd.attention' op expects a mask for 1 x 4 x 5 x 5 scores, or one of no axes, found tensor<5x4xf32>}}
  %0:2 = "bwd.attention"(%q, %q, %q, %m) {causal = true, scale = 1.0 : f32} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<5x4xf32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  return
}

// -----

func.func @attention_of_no_scale(%q: tensor<1x4x5x8xf32>, %m: tensor<f32>) {
  // expected-error @below {{'bwd.attention' op expects attribute 'scale' to be an f32, found 1.000000e+00 : f64}}
  %0:2 = "bwd.attention"(%q, %q, %q, %m) {causal = true, scale = 1.0 : f64} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<f32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  return
}

// -----

func.func @attention_of_a_negative_scale(%q: tensor<1x4x5x8xf32>, %m: tensor<f32>) {
  // expected-error @below {{'bwd.attention' op expects attribute 'scale' to be positive, found -1.000000e+00 : f32}}
  %0:2 = "bwd.attention"(%q, %q, %q, %m) {causal = true, scale = -1.0 : f32} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<f32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  return
}

// -----

func.func @gradients_of_another_output(%q: tensor<1x4x5x8xf32>, %o: tensor<1x4x6x8xf32>, %l: tensor<1x4x5xf32>, %m: tensor<f32>) {
  // expected-error @below {{'bwd.attention_backward' op expects operand 4 of the query's type tensor<1x4x5x8xf32>, found tensor<1x4x6x8xf32>}}
  %0:3 = "bwd.attention_backward"(%q, %q, %q, %q, %o, %l, %m) {causal = true, scale = 1.0 : f32} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x6x8xf32>, tensor<1x4x5xf32>, tensor<f32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>)
  return
}

// -----

func.func @dropped_attention_without_a_seed(%q: tensor<1x4x5x8xf32>, %m: tensor<f32>, %s: tensor<2xi32>) {
  // expected-error @below {{'bwd.dropped_attention' op expects a seed tensor<2xi64>, found tensor<2xi32>}}
  %0:2 = "bwd.dropped_attention"(%q, %q, %q, %m, %s) {causal = true, scale = 1.0 : f32, dropout = 0.5 : f32, stream = 0 : i64} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<f32>, tensor<2xi32>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  return
}

// -----

func.func @attention_of_which_nothing_is_dropped(%q: tensor<1x4x5x8xf32>, %m: tensor<f32>, %s: tensor<2xi64>) {
  // expected-error @below {{'bwd.dropped_attention' op expects attribute 'dropout' to be an f32 between 0 and 1, found 0.000000e+00 : f32}}
  %0:2 = "bwd.dropped_attention"(%q, %q, %q, %m, %s) {causal = true, scale = 1.0 : f32, dropout = 0.0 : f32, stream = 0 : i64} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<f32>, tensor<2xi64>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5xf32>)
  return
}

// -----

func.func @gradients_of_no_mask(%q: tensor<1x4x5x8xf32>, %l: tensor<1x4x5xf32>, %m: tensor<f32>, %s: tensor<2xi64>) {
  // expected-error @below {{'bwd.dropped_attention_backward_with_mask' op expects a mask, found none}}
  %0:4 = "bwd.dropped_attention_backward_with_mask"(%q, %q, %q, %q, %q, %l, %m, %s) {causal = true, scale = 1.0 : f32, dropout = 0.5 : f32, stream = 0 : i64} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5xf32>, tensor<f32>, tensor<2xi64>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x5xf32>)
  return
}

// -----

func.func @gradients_of_other_scores(%q: tensor<1x4x5x8xf32>, %l: tensor<1x4x5xf32>, %m: tensor<5x5xf32>, %s: tensor<2xi64>) {
  // expected-error @below {{'bwd.dropped_attention_backward_with_mask' op expects result 3 of type tensor<1x4x5x5xf32>, found tensor<5x5xf32>}}
  %0:4 = "bwd.dropped_attention_backward_with_mask"(%q, %q, %q, %q, %q, %l, %m, %s) {causal = true, scale = 1.0 : f32, dropout = 0.5 : f32, stream = 0 : i64} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5xf32>, tensor<5x5xf32>, tensor<2xi64>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<5x5xf32>)
  return
}

// -----

func.func @gradients_of_no_stream(%q: tensor<1x4x5x8xf32>, %l: tensor<1x4x5xf32>, %m: tensor<f32>, %s: tensor<2xi64>) {
  // expected-error @below {{'bwd.dropped_attention_backward' op expects attribute 'stream' to be an i64 of 0 or more, found -1 : i64}}
  %0:3 = "bwd.dropped_attention_backward"(%q, %q, %q, %q, %q, %l, %m, %s) {causal = true, scale = 1.0 : f32, dropout = 0.5 : f32, stream = -1 : i64} : (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5xf32>, tensor<f32>, tensor<2xi64>) -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>)
  return
}

// -----

func.func @convolution_of_other_channels(%x: tensor<3x9x9x8xf32>, %w: tensor<6x3x3x5xf32>) {
  // expected-error @below {{'bwd.convolution' op expects images N x H x W x G C, filters G O x R x S x C, results N x P x Q x G O, found tensor<3x9x9x8xf32>, tensor<6x3x3x5xf32>, tensor<3x7x7x6xf32>}}
  %0 = "bwd.convolution"(%x, %w) {stride = [1, 1], padding = [0, 0], dilation = [1, 1]} : (tensor<3x9x9x8xf32>, tensor<6x3x3x5xf32>) -> tensor<3x7x7x6xf32>
  return
}

// -----

func.func @convolution_of_no_stride(%x: tensor<3x9x9x8xf32>, %w: tensor<6x3x3x8xf32>) {
  // expected-error @below {{'bwd.convolution' op expects attribute 'stride' to be two i64 of 1 or more in an array, found [0, 1]}}
  %0 = "bwd.convolution"(%x, %w) {stride = [0, 1], padding = [0, 0], dilation = [1, 1]} : (tensor<3x9x9x8xf32>, tensor<6x3x3x8xf32>) -> tensor<3x7x7x6xf32>
  return
}

// -----

func.func @gradient_of_more_windows(%g: tensor<3x8x7x6xf32>, %x: tensor<3x9x9x8xf32>) {
  // expected-error @below {{'bwd.convolution_filter_gradient' op expects 7 windows along axis 0 at the most, found 8}}
  %0 = "bwd.convolution_filter_gradient"(%g, %x) {stride = [1, 1], padding = [0, 0], dilation = [1, 1]} : (tensor<3x8x7x6xf32>, tensor<3x9x9x8xf32>) -> tensor<6x3x3x8xf32>
  return
}
