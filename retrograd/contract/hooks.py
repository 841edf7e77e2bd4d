# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kinds of hooks: ``kind`` of ``bwd.call_hook``, of a step of a plan, and of what Python is asked to call; and the
names of the functions that such calls are in MLIR."""

from typing import NamedTuple

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

CUSTOM_BACKWARD = "backward"
"""Of no hook: the kind that the backward of a custom function is called as, which is numbered by itself."""


class Communicating(NamedTuple):
    """A call that starts communication, by its kind and number. ``bucket`` is the number of the bucket that the call
    says a gradient of is there, where nothing is sent before all of them are; None where that is not known."""

    kind: str
    number: int
    bucket: int | None = None


def name_of_hook(number: int) -> str:
    """Names the function of hook number ``number``: its body, where that takes the place of its calls, else what is
    called in Python."""
    return f"hook_{number}"


def number_of_hook(name: str) -> int:
    """Returns what `name_of_hook` was given."""
    return int(name.removeprefix("hook_"))


def name_of_custom_backward(number: int) -> str:
    """Names the function of the backward of custom function number ``number``, which is called in Python."""
    return f"{CUSTOM_BACKWARD}_{number}"
