# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the contract says, nobody says again."""

import ast
import builtins
import contextlib
import dataclasses
import json
import typing
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import retrograd
from retrograd.contract import attributes, environment, hooks, partitions, roles
from retrograd.contract.errors import RetrogradError
from retrograd.contract.indices import IndexBound
from retrograd.contract.manifest import Manifest
from retrograd.contract.plan import StagePlan
from retrograd.contract.reading import ManifestError
from retrograd.contract.signature import (
    CONSTANT,
    VIEW_OF_INPUT,
    InputSpec,
    OutputSpec,
    Signature,
    StateSpec,
    TensorType,
)
from retrograd.contract.sizes import DynamicSize
from retrograd.contract.tensors import TensorSpec

ROOT = Path(__file__).parents[2]
FOLDERS = ("dialects", "frontend", "pipelines", "retrograd", "runtime", "tools")
# Names that mean nothing else, but for the places below; the other roles ("input", say) are words of PyTorch's too.
DISTINCT = {roles.JOINT, roles.FORWARD, roles.BACKWARD, roles.INTO}
DISTINCT |= {hooks.TENSOR_PRE, hooks.POST_ACCUMULATE, hooks.CPP_TENSOR_PRE}
DISTINCT |= {roles.TANGENT, roles.SAVED, roles.SEED, roles.MUTATION, roles.GRAD}
ATTRIBUTES = {text for name, text in vars(attributes).items() if name.startswith("BWD_")}
DISTINCT |= {*ATTRIBUTES, attributes.ISLAND_OP, environment.CACHE_FOLDER, partitions.MIN_CUT}
OTHER_MEANINGS = {
    # Methods of the user's classes.
    ("frontend/autograd/engine/custom_functions.py", roles.FORWARD),
    ("frontend/autograd/engine/custom_functions.py", roles.BACKWARD),
    ("frontend/python/trace_errors.py", roles.FORWARD),
    ("frontend/python/python_search.py", roles.FORWARD),
}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """The files of the package but for the contract's own, with their trees."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    paths = {file.relative_to(ROOT).as_posix(): file for file in files}
    return [
        (path, ast.parse(file.read_text(encoding="utf-8"), path))
        for path, file in paths.items()
        if not path.startswith("retrograd/contract/")
    ]


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


# With which the names of tensors begin.
PREFIXES = tuple(f"{role}." for role in (*roles.ARGUMENT_ROLES, *roles.RESULT_ROLES, roles.BASE))


def find_said_again(path: str, tree: ast.Module) -> Iterator[str]:
    """Names of the contract as literals: those of `DISTINCT` anywhere, all roles and policies where they are compared
    or given."""
    known = {*roles.ARGUMENT_ROLES, *roles.RESULT_ROLES, *partitions.PARTITIONS}
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in (DISTINCT | {*PREFIXES}) and (path, node.value) not in OTHER_MEANINGS:
                yield f"{path}:{node.lineno}: {node.value!r}"
            continue
        values: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(
            part in ast.unparse(node.left) for part in (".role", "BWD_ROLE", "partition")
        ):
            values = node.comparators
        elif isinstance(node, ast.keyword) and node.arg in ("role", "partition"):
            values = [node.value]
        elif isinstance(node, ast.Dict):
            values = [v for k, v in zip(node.keys, node.values, strict=True) if k and "BWD_ROLE" in ast.unparse(k)]
        for value in values:
            for literal in ast.walk(value):
                if isinstance(literal, ast.Constant) and literal.value in known - DISTINCT:
                    yield f"{path}:{literal.lineno}: {literal.value!r}"


def test_names_of_the_contract_are_said_once() -> None:
    assert [again for path, tree in sources() for again in find_said_again(path, tree)] == []


@pytest.mark.parametrize(
    "source",
    [
        'find_function(module, "backward")',
        'FORWARD, BACKWARD = "forward", x',
        'kept = [a for a in arguments if a.role != "param"]',
        'kept = [a for a in arguments if a.role in ("buffer", INPUT)]',
        'port = replace(port, role="output")',
        'attributes = {BWD_ROLE: "input", BWD_NAME: name}',
        'attributes = {BWD_ROLE: role, "bwd.name": name}',
        'is_inlined = "bwd.inline" in op.attributes',
        'known = entry.get(BWD_ROLE) == "size"',
        'names = [f"tangent.{name}" for name in given]',
        'cuttable = self.partition != "budget"',
        'here = replace(options, partition="default")',
    ],
)
def test_what_is_said_again_is_found(source: str) -> None:
    assert len(list(find_said_again("pipelines/planted.py", ast.parse(source)))) == 1


def test_other_meanings_are_still_there() -> None:
    said = {
        (path, node.value)
        for path, tree in sources()
        for node in nodes_of(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert said >= OTHER_MEANINGS


def find_records(tree: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    """The classes of a file with their annotated fields, three or more."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef):
            fields = {f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)}
            if len(fields) > 2:
                yield node.name, frozenset(fields)


def find_tables(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """The constants at the top of a file that hold several things, written out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Dict, ast.Tuple, ast.Set, ast.List)):
            with contextlib.suppress(ValueError):
                value = ast.literal_eval(node.value)
                table = value if isinstance(value, dict) else set(value)
                yield ast.unparse(node.targets[0]), table if len(table) > 2 else None


@cache
def contract_files() -> list[ast.Module]:
    return [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "retrograd" / "contract").glob("*.py")]


@cache
def contract_records() -> dict[str, frozenset[str]]:
    return dict(record for file in contract_files() for record in find_records(file))


def find_records_said_again(path: str, tree: ast.Module) -> Iterator[str]:
    """Classes whose fields are all a class's of the contract, or hold all of them where these are four or more."""
    known = contract_records()
    assert {"TensorSpec", "FunctionSpec", "Signature", "IndexBound", "RunIsland", "DynamicSize"} <= known.keys()
    for name, fields in find_records(tree):
        yield from (
            f"{path}: {name} is {other}"
            for other, its in known.items()
            if fields <= its or (its <= fields and len(its) > 3)
        )


def test_no_class_has_the_fields_of_one_of_the_contract() -> None:
    assert [again for path, tree in sources() for again in find_records_said_again(path, tree)] == []


def test_a_class_with_the_fields_of_the_contract_is_found() -> None:
    planted = "class Port:\n    name: str\n    role: str\n    shape: object\n    dtype: str"
    assert list(find_records_said_again("x.py", ast.parse(planted))) == ["x.py: Port is TensorSpec"]


def test_no_table_of_the_contract_is_written_again() -> None:
    tables = [value for file in contract_files() for _, value in find_tables(file) if value]
    tables += [set(roles.ARGUMENT_ROLES), set(roles.RESULT_ROLES), set(hooks.HOOK_KINDS)]
    again = [f"{path}: {name}" for path, tree in sources() for name, value in find_tables(tree) if value in tables]
    assert again == []


def find_baseless_errors(path: str, tree: ast.Module) -> Iterator[str]:
    """Errors of Python's kinds that are not `RetrogradError`, and such as have no kind but are called errors."""
    for node in nodes_of(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(base) for base in node.bases}
        kinds = {base for base in bases if isinstance(getattr(builtins, base, None), type) and base.endswith("Error")}
        if kinds and "RetrogradError" not in bases:
            yield f"{path}: {node.name}"
        if "Exception" in bases and node.name.endswith("Error"):
            yield f"{path}: {node.name}"


def test_all_errors_have_one_base() -> None:
    assert [error for path, tree in sources() for error in find_baseless_errors(path, tree)] == []


def test_an_error_without_the_base_is_found() -> None:
    planted = "class A(ValueError): pass\nclass BError(Exception): pass\nclass C(RetrogradError, TypeError): pass"
    assert list(find_baseless_errors("x.py", ast.parse(planted))) == ["x.py: A", "x.py: BError"]


def test_public_errors_have_the_base_and_a_kind_of_python() -> None:
    public = [getattr(retrograd, name) for name in retrograd.__all__]
    errors = [e for e in public if isinstance(e, type) and issubclass(e, Exception) and not issubclass(e, Warning)]
    assert len(errors) > 10
    for error in errors:
        assert issubclass(error, RetrogradError)
        assert error is RetrogradError or issubclass(error, (RuntimeError, ValueError, TypeError))


TYPE = TensorType((("*", 2, "batch"), 3), "float32", (3, 1), "cpu", requires_grad=True)
SIGNATURE = Signature(
    params=(StateSpec("weight", TYPE),),
    buffers=(StateSpec("mean", replace(TYPE, requires_grad=False)),),
    inputs=(InputSpec("args[0]", TYPE), InputSpec("args[1]", None, "mean")),
    outputs=(
        OutputSpec("output[0]", VIEW_OF_INPUT, TYPE, base=1, offset=("+", "batch", 1)),
        OutputSpec("output[1]", CONSTANT, constant=None),
    ),
    in_tree="[1, {}]",
    mutated=(1,),
    autocast={"cpu": "bfloat16"},
    training={"": True},
    sizes=(DynamicSize("batch", 4, 1, None, 0, 0),),
    conditions=(("!=", ("%", "batch", 2), 1),),
    partly_written=(1,),
    indices=(IndexBound(2, -3, 2, exempt=-100, slices=((0, 1, 9, 1),)),),
)


def test_a_signature_survives_json() -> None:
    data = SIGNATURE.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert Signature.from_dict(data) == SIGNATURE
    assert Signature.from_dict(data).to_dict() == data
    assert [s.name for s in SIGNATURE.primals] == ["weight", "mean", "args[0]"]


def test_constants_that_json_has_no_form_for_are_kept_as_text() -> None:
    leaves = tuple(InputSpec(f"args[{n}]", None, c) for n, c in enumerate((1, 2.5, "x", True, None, 1j, slice(1))))
    found = Signature.from_dict(replace(SIGNATURE, inputs=leaves).to_dict())
    assert [i.constant for i in found.inputs[:-2]] == [1, 2.5, "x", True, None]
    assert [repr(i.constant) for i in found.inputs[-2:]] == ["1j", "slice(None, 1, None)"]
    # Written once more, as when a program that was loaded is saved.
    assert Signature.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [{}]}, r"signature.sizes\[0\] lacks the field 'argument'"),
        ({"mutated": [True]}, r"signature.mutated\[0\] must be int, not bool"),
        ({"training": {"": 1}}, "signature.training. must be bool, not int"),
        ({"conditions": [["near", "batch", 1]]}, r"signature.conditions\[0\] must be a condition: .* starts with none"),
        ({"inputs": [{"name": "x", "type": {"shape": []}, "constant": None}]}, r"inputs\[0\].type lacks the field"),
        ({"hints": {}}, "signature has the unknown field 'hints'"),
    ],
)
def test_what_is_no_signature_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Signature.from_dict(SIGNATURE.to_dict() | change)


def find_reachable(kind: Any) -> Iterator[type]:
    """The dataclasses that an object of a dataclass may hold, at any depth, and itself."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from find_reachable(hint)
    for argument in typing.get_args(kind):
        yield from find_reachable(argument)


def test_no_file_holds_a_stage_plan() -> None:
    """As ``contract/plan.py`` says: what is saved has its functions in one piece."""
    found = set(find_reachable(Manifest))
    assert {Signature, IndexBound, TensorSpec} <= found
    assert StagePlan not in found
