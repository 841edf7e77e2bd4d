# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kinds of hooks: ``kind`` of ``bwd.call_hook``, of a step of a plan, and of what Python is asked to call."""

TENSOR_PRE = "tensor_pre"
"""Of a tensor: what takes the place of its gradient."""

PRE = "pre"
"""Of a node of autograd's, before it runs."""

POST = "post"
"""Of a node, after it has run."""

POST_ACCUMULATE = "post_acc_grad"
"""Of a parameter, after its gradient was added up."""

UNPACK = "unpack"
"""Of a saved tensor, in the backward."""

PACK = "pack"
"""Of a saved tensor, in the forward."""

CPP_TENSOR_PRE = "cpp_tensor_pre"
"""As the first, in C++: ``retain_grad``."""

HOOK_KINDS = (TENSOR_PRE, PRE, POST, POST_ACCUMULATE, UNPACK, PACK, CPP_TENSOR_PRE)
