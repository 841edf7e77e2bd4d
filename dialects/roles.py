# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Says what a function's arguments and results are to the user: ``bwd.role`` and ``bwd.name`` on them."""

from collections.abc import Iterator, Sequence
from typing import Any

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE
from retrograd.contract.roles import ARGUMENT_ROLES, RESULT_ROLES
from retrograd.dialects import ir
from retrograd.dialects.bwd import show_attribute


def find_role_problems(function: ir.Operation) -> list[str]:
    """Says what is wrong with the roles and names of a ``func.func``'s arguments and results; empty if all is well.

    Each must have a role out of `ARGUMENT_ROLES` or `RESULT_ROLES` and a name that is not empty.
    """
    signature = function.attributes["function_type"].value
    problems: list[str] = []
    for what, key, number, roles in (
        ("argument", "arg_attrs", len(signature.inputs), ARGUMENT_ROLES),
        ("result", "res_attrs", len(signature.results), RESULT_ROLES),
    ):
        attributes = function.attributes[key] if key in function.attributes else [{}] * number
        for index, entry in enumerate(attributes):
            problems += [f"{what} {index} {problem}" for problem in _find_entry_problems(entry, roles)]
    return problems


def _find_entry_problems(entry: Any, roles: Sequence[str]) -> Iterator[str]:
    role, name = (_find(entry, key) for key in (BWD_ROLE, BWD_NAME))
    if not (isinstance(role, ir.StringAttr) and role.value in roles):
        yield f"expects bwd.role to be one of {', '.join(roles)}, found {show_attribute(role)}"
    if not (isinstance(name, ir.StringAttr) and name.value):
        yield f"expects bwd.name to be a string that is not empty, found {show_attribute(name)}"


def _find(entry: Any, key: str) -> Any:
    # A DictAttr's `get` makes a new one.
    return entry[key] if key in entry else None  # noqa: SIM401
