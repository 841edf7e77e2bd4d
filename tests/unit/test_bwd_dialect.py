# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Builders of bwd ops, what MLIR may do with these ops, and roles."""

import importlib.abc
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from retrograd.dialects import builders, bwd, ir
from retrograd.dialects.context import dialect_names, make_context
from retrograd.pipelines.transforms.torch.bwd_verify_legality import find_role_problems

TENSOR = "!torch.vtensor<[2,?],f32>"
OTHER = "!torch.vtensor<[3],si64>"


@pytest.fixture
def context() -> Iterator[Any]:
    with make_context() as context, ir.Location.unknown():
        yield context


def parse_function(signature: str) -> tuple[Any, Any, Any]:
    """A module with one function of that signature, the function's block, and a place before its terminator."""
    module = ir.Module.parse(f"func.func @f({signature}) {{ return }}")
    block = module.body.operations[0].regions[0].blocks[0]
    return module, block, ir.InsertionPoint(block.operations[0])


def op_names(block: Any) -> list[str]:
    return [op.operation.name for op in block.operations]


def run(module: Any, pipeline: str) -> None:
    manager = ir.PassManager("builtin.module")
    manager.add(pipeline)
    manager.run(module.operation)


class CountingFinder(importlib.abc.MetaPathFinder):
    """Finds nothing, and counts what is looked for."""

    def __init__(self) -> None:
        self.searched: list[str] = []

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        self.searched.append(fullname)


def test_no_files_are_searched_for_when_ops_are_met(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings look for a Python module of an op's dialect, each time, until there is one."""
    _, block, place = parse_function(f"%a: {TENSOR}")
    with place:
        builders.accumulate_grad(block.arguments[0], builders.create_token(), param=0)
    finder = CountingFinder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert op_names(block) == ["bwd.create_token", "bwd.accumulate_grad", "func.return"]
    assert not [name for name in finder.searched if name.startswith("torch_mlir.dialects.bwd")]


def test_builders_make_one_chain(context: Any) -> None:
    module, block, place = parse_function(f"%a: {TENSOR}, %b: {OTHER}")
    first, second = block.arguments
    with place:
        token = builders.create_token()
        both, token = builders.call_hook(builders.bundle([first, second]), token, kind="pre", hook=3)
        a, b = builders.unbundle(both)
        token = builders.accumulate_grad(a, token, param=0)
        c, token = builders.call_backward(b, token, function=1, result_type=a.type)
        last = builders.final_callbacks(token)
        saved = builders.save(builders.recompute_barrier(c), name="c")
    assert module.operation.verify()
    assert bwd.is_token(last)
    assert [value.type for value in (a, b, c)] == [first.type, second.type, first.type]
    assert saved.name == "bwd.save"
    assert saved.attributes["name"].value == "c"
    assert [name for name in op_names(block) if name.startswith("bwd.")] == [
        *["bwd.create_token", "bwd.call_hook", "bwd.accumulate_grad", "bwd.call_backward", "bwd.final_callbacks"],
        *["bwd.recompute_barrier", "bwd.save"],
    ]


def test_bytecode_holds_all(context: Any) -> None:
    module, block, place = parse_function(f"%a: {TENSOR}")
    with place:
        _, token = builders.call_hook(block.arguments[0], builders.create_token(), kind="post", hook=0)
        builders.final_callbacks(token)
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    assert str(ir.Module.parse(buffer.getvalue())) == str(module)


def test_a_bundle_of_one_is_the_value_itself(context: Any) -> None:
    _, block, place = parse_function(f"%a: {TENSOR}")
    with place:
        assert builders.bundle([block.arguments[0]]) == block.arguments[0]
        assert builders.unbundle(block.arguments[0]) == [block.arguments[0]]


def test_a_bundle_of_nothing_is_none(context: Any) -> None:
    module, _, place = parse_function("")
    with place:
        nothing = builders.bundle([])
        assert str(nothing.type) == "!torch.none"
        assert builders.unbundle(nothing) == []
    assert module.operation.verify()


def test_bundled_types(context: Any) -> None:
    elements = [TENSOR, "!torch.tuple<vtensor<[1,2],bf16>, none>", "!torch.list<int>", "!torch.optional<vtensor>"]
    inner = ", ".join(element.removeprefix("!torch.") for element in elements)
    types = [ir.Type.parse(element) for element in elements]
    assert builders.bundle_type(types) == ir.Type.parse(f"!torch.tuple<{inner}>")
    for bundled in (types, types[:1], []):
        assert builders.bundled_types(builders.bundle_type(bundled)) == bundled


# How to build each op from a value and a token.
OBSERVED: dict[str, Callable[[Any, Any], Any]] = {
    "bwd.call_hook": lambda value, token: builders.call_hook(value, token, kind="pre", hook=0),
    "bwd.accumulate_grad": lambda value, token: builders.accumulate_grad(value, token, param=0),
    "bwd.call_backward": lambda value, token: builders.call_backward(value, token, function=0),
    "bwd.final_callbacks": lambda _, token: builders.final_callbacks(token),
    "bwd.update_input": lambda value, token: builders.update_input(value, token, hook=0),
    "bwd.save": lambda value, _: builders.save(value, name="x"),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_what_users_observe_is_neither_merged_nor_deleted(context: Any, name: str) -> None:
    module, block, place = parse_function(f"%a: {TENSOR}, %t: !bwd.token")
    with place:
        for _ in range(2):
            OBSERVED[name](*block.arguments)
    run(module, "cse,canonicalize,func.func(cse,canonicalize),symbol-dce")
    block = module.body.operations[0].regions[0].blocks[0]
    assert op_names(block) == [name, name, "func.return"]


def test_barriers_are_deleted_when_unused_but_never_merged(context: Any) -> None:
    module, block, place = parse_function(f"%a: {TENSOR}")
    with place:
        builders.save(builders.recompute_barrier(block.arguments[0]), name="one")
        builders.save(builders.recompute_barrier(block.arguments[0]), name="two")
        builders.recompute_barrier(block.arguments[0])
    run(module, "cse,canonicalize")
    block = module.body.operations[0].regions[0].blocks[0]
    assert sorted(op_names(block)) == ["bwd.recompute_barrier"] * 2 + ["bwd.save"] * 2 + ["func.return"]


def test_a_barrier_keeps_a_recomputation_from_being_undone(context: Any) -> None:
    def count(with_barrier: bool) -> int:
        module = ir.Module.parse("func.func @f(%a: i32) { return }")
        block = module.body.operations[0].regions[0].blocks[0]
        with ir.InsertionPoint(block.operations[0]):
            for name in ("first", "again"):
                value = block.arguments[0]
                value = builders.recompute_barrier(value) if with_barrier and name == "again" else value
                builders.save(ir.Operation.create("arith.muli", [value.type], [value, value]).result, name=name)
        run(module, "cse")
        return str(module).count("arith.muli")

    assert count(with_barrier=True) == 2
    assert count(with_barrier=False) == 1


@pytest.mark.parametrize("hook", [-1, -(2**40)])
def test_a_built_op_is_verified_too(context: Any, hook: int) -> None:
    module, block, place = parse_function(f"%a: {TENSOR}, %t: !bwd.token")
    with place:
        builders.call_hook(*block.arguments, kind="pre", hook=hook)
    with pytest.raises(ir.MLIRError, match=f"expects attribute 'hook' to be an i64 of 0 or more, found {hook}"):
        module.operation.verify()


def test_contexts_do_not_disturb_each_other() -> None:
    modules = []
    for _ in range(3):
        with make_context(), ir.Location.unknown():
            module, block, place = parse_function(f"%a: {TENSOR}, %t: !bwd.token")
            modules.append((module, block, place))
    for module, block, place in modules:
        with module.context, ir.Location.unknown(), place:
            builders.call_hook(*block.arguments, kind="pre", hook=0)
        assert module.operation.verify()
        assert op_names(block) == ["bwd.call_hook", "func.return"]


def test_roles(context: Any) -> None:
    module = ir.Module.parse(
        'func.func private @f(i32 {bwd.role = "param", bwd.name = "w"}, i32 {bwd.role = "grad", bwd.name = "x"}, i32)'
        ' -> (i32 {bwd.role = "saved", bwd.name = ""}, i32 {bwd.role = "grad", bwd.name = "grad.w"})'
    )
    roles = "param, buffer, input, tangent, saved, seed, size"
    assert find_role_problems(module.body.operations[0]) == [
        f'argument 1 expects bwd.role to be one of {roles}, found "grad"',
        f"argument 2 expects bwd.role to be one of {roles}, found none",
        "argument 2 expects bwd.name to be a string that is not empty, found none",
        'result 0 expects bwd.name to be a string that is not empty, found ""',
    ]


def test_a_function_without_arguments_or_results_has_no_role_problems(context: Any) -> None:
    module = ir.Module.parse("func.func private @f()")
    assert find_role_problems(module.body.operations[0]) == []


def test_roles_are_asked_for_where_no_attribute_is_given(context: Any) -> None:
    module = ir.Module.parse("func.func private @f(i32) -> i32")
    assert len(find_role_problems(module.body.operations[0])) == 4


def test_names_of_dialects_and_native_passes(context: Any) -> None:
    assert {"builtin", "bwd", "func", "torch"} <= set(dialect_names(context))
    assert "nothing" not in dialect_names(context)
    assert {"cse", "canonicalize", "torch-decompose-complex-ops"} <= set(ir.native_pass_names())
    # Longer than the column that the tool prints them in.
    assert "torch-backend-to-linalg-on-tensors-backend-pipeline" in ir.native_pass_names()


def test_the_bindings_names_are_names_of_ir() -> None:
    assert ir.StringAttr.__name__ == "StringAttr"
    assert ir.arith.ConstantOp.OPERATION_NAME == "arith.constant"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ir.no_such_name
