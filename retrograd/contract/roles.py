# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The names of the functions that the parts hand on, and the roles of their arguments and results. The functions' names
stand in MLIR, in the executable and in the manifest; roles are ``bwd.role`` in MLIR and ``role`` in the manifest."""

JOINT = "joint"
"""The function that holds a forward and its backward, before ``bwd-partition`` splits it."""

FORWARD = "forward"
"""The function that computes the outputs, and what the backward keeps of them."""

BACKWARD = "backward"
"""The function that computes the gradients."""

INTO = "_into"
"""Ends the name of a function that takes storage for its results."""

PARAM = "param"
BUFFER = "buffer"
INPUT = "input"
TANGENT = "tangent"
"""The gradient of an output, which the backward takes."""
SAVED = "saved"
"""A residual: the forward's result, and the backward's argument."""
SEED = "seed"
"""Names the argument that the random numbers of a call are a function of."""
SIZE = "size"
"""A size that differs from call to call: a number, and no tensor."""

OUTPUT = "output"
MUTATION = "mutation"
"""The new value of an argument that the model writes to."""
GRAD = "grad"

BASE = "base"
"""Begins the name of an output that is returned for its views alone."""

NEW = "new"
"""Begins the name of an output that a call sets an attribute of the model to."""

ARGUMENT_ROLES = (PARAM, BUFFER, INPUT, TANGENT, SAVED, SEED, SIZE)
RESULT_ROLES = (OUTPUT, MUTATION, SAVED, GRAD)


def name_in_role(role: str, name: str) -> str:
    """Names what belongs to ``name`` in a role: ``grad.weight`` to ``weight``."""
    return f"{role}.{name}"


def has_role(role: str, name: str) -> bool:
    """Whether `name_in_role` made ``name`` for this role."""
    return name.startswith(f"{role}.")


def is_own_residual(role: str, name: str) -> bool:
    """Whether an argument of the backward is a residual and nothing else: one that is an output of the forward too is
    called as that, and stays with whoever called."""
    return role == SAVED and has_role(SAVED, name)


def name_without_role(role: str, name: str) -> str:
    """Returns what `name_in_role` was given; ``name`` itself, if it is none of its names."""
    return name.removeprefix(f"{role}.")
