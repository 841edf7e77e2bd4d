# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Islands: which nodes go together, what their graphs are, and how one is called."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.islands.island_choice import find_uncompiled, plan_islands, refuse_uncompiled
from retrograd.frontend.islands.island_graphs import ISLAND, extract_islands, outline_islands
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.pipelines.analysis.hooks.hook_graph import ISLAND as ISLAND_KIND
from retrograd.pipelines.analysis.hooks.hook_graph import Effect, HookGraph, Task
from retrograd.pipelines.analysis.hooks.hook_schedule import find_fewest_stages_order, find_stages
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.failing_ops import Part, isolate
from retrograd.runtime.steps.islands import EagerIsland, IslandTimes, Layout


def trace(function: Callable[..., object], *arguments: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*arguments)


def diamond(x: Tensor) -> Tensor:
    """``sin`` leads to ``cos`` in one step, and around it through ``exp``."""
    first = torch.sin(x)
    return torch.cos(first) * torch.exp(first) + torch.cos(first)


def test_neighbours_are_one_island_unless_something_lies_between() -> None:
    graph = trace(diamond, torch.ones(3))
    reasons = dict.fromkeys(("sin", "cos", "mul", "cos_1"), "why")
    # exp comes after sin and before mul, which can therefore not be one.
    assert [island.nodes for island in plan_islands(graph, reasons)] == [("sin", "cos", "cos_1"), ("mul",)]
    assert [island.nodes for island in plan_islands(graph, {"cos": "why", "mul": "why"})] == [("cos", "mul")]


def test_two_islands_never_wait_for_each_other() -> None:
    def crossed(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.sin(x), torch.cos(x)
        # Merged, {sin, tan} and {cos, tanh} would each need the other.
        return torch.tan(a + b.exp()), torch.tanh(b + a.exp())

    graph = trace(crossed, torch.ones(3))
    reasons = dict.fromkeys(("sin", "add", "tan", "cos", "add_1", "tanh"), "why")
    islands = plan_islands(graph, reasons)
    outlined = outline_islands(graph, islands)
    outlined.graph.lint()
    assert sum(n.target is ISLAND for n in outlined.graph.nodes) == len(islands) > 1


@pytest.mark.parametrize("names", [("sin",), ("cos", "exp"), ("sin", "cos", "exp", "mul", "cos_1", "add")])
def test_graph_and_islands_together_do_what_the_graph_did(names: Sequence[str]) -> None:
    graph = trace(diamond, torch.ones(3))
    islands = plan_islands(graph, dict.fromkeys(names, "why"))
    outlined, programs = outline_islands(graph, islands), extract_islands(graph, islands)
    names_left = {n.name for n in outlined.graph.nodes}
    assert names_left.isdisjoint(name for name in names if name != "add" and name not in names_left)

    class Runner(torch.fx.Interpreter):
        def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            if target is ISLAND:
                sizes, values, number, _ = args
                return programs[number].module(*sizes, *values)  # type: ignore[call-overload,misc]
            return super().call_function(target, args, kwargs)  # type: ignore[arg-type]

    x = torch.randn(3)
    assert torch.equal(Runner(outlined).run(x), diamond(x))


def test_complex_and_random_ops_are_known_at_once() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, x)).sum() * torch.multinomial(x, 1)

    reasons = find_uncompiled(trace(function, torch.ones(3)))
    assert reasons["complex_1"] == "it computes with complex64, which executables do not have"
    assert reasons["multinomial"] == "it draws random numbers in torch's own way"
    assert set(reasons) == {"complex_1", "multinomial"}, "complex numbers as pairs are compiled"
    with pytest.raises(CaptureError, match="complex64"):
        refuse_uncompiled(trace(function, torch.ones(3)))


def test_functions_of_float64_are_known_at_once() -> None:
    """On a CPU, where a compilation that fails would tell."""
    graph = trace(lambda x: x.sin() + x.float().cos() + x.tanh(), torch.ones(3, dtype=torch.float64))
    reason = "IREE's code for a CPU has no such function of float64"
    assert find_uncompiled(graph, ("cpu",)) == {"sin": reason}
    assert not find_uncompiled(graph, ("cuda",))
    with pytest.raises(CaptureError, match="no such function of float64"):
        refuse_uncompiled(graph, ("cpu", "cuda"))


def test_what_reads_a_librarys_notes_is_known_at_once() -> None:
    """The backward of an LSTM that ran in eager."""
    graph, val = torch.fx.Graph(), torch.ones(3)
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.mkldnn_rnn_layer_backward.default, (x,))
    x.meta["val"], node.meta["val"] = val, (val,)
    graph.output(node)
    reasons = find_uncompiled(torch.fx.GraphModule({}, graph))
    assert reasons == {node.name: "it reads what oneDNN's forward left for it"}
    (island,) = plan_islands(torch.fx.GraphModule({}, graph), reasons)
    assert island.by_values and not island.is_library


@pytest.mark.parametrize("rows", [2, 1 << 16])
def test_what_lies_between_layers_of_a_library_goes_with_them(rows: int) -> None:
    """Parts of tensors always, and sums that are small: what an island takes it has until its end."""
    graph, layer = torch.fx.Graph(), torch.ops.aten.mkldnn_rnn_layer_backward.default
    whole, part = torch.empty(rows, 8, device="meta"), torch.empty(rows, 4, device="meta")

    def add(target: Any, *arguments: Any, val: Any) -> torch.fx.Node:
        node = graph.call_function(target, arguments)
        node.meta["val"] = val
        return node

    def halves(x: torch.fx.Node) -> list[torch.fx.Node]:
        parts = [add(torch.ops.aten.slice.Tensor, x, 1, start, start + 4, val=part) for start in (0, 4)]
        return [add(operator.getitem, add(layer, p, val=(whole,)), 0, val=whole) for p in parts]

    x = graph.placeholder("x")
    x.meta["val"] = whole
    total = add(torch.ops.aten.add.Tensor, *halves(x), val=whole)
    graph.output(tuple(halves(total)))
    graph_module = torch.fx.GraphModule({}, graph)
    islands = plan_islands(graph_module, find_uncompiled(graph_module))
    assert all(island.by_values and island.ops == ("aten.mkldnn_rnn_layer_backward",) for island in islands)
    held = [name for island in islands for name in island.nodes]
    assert sum(name.startswith("slice") for name in held) == 4
    assert (len(islands), total.name in held) == ((1, True) if rows == 2 else (4, False))


def test_a_view_of_part_of_a_tensor_by_strides_is_no_island() -> None:
    graph = trace(lambda x: torch.as_strided(x[1:3], (4,), (1,), 0), torch.ones(4))
    with pytest.raises(CaptureError, match="reads memory outside of its argument"):
        plan_islands(graph, {"as_strided": "why"})


def test_results_have_memory_of_their_own_and_arguments_their_traced_strides() -> None:
    seen: list[tuple[int, ...]] = []

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        seen.append(x.stride())
        return x, y[1:], torch.complex(y, y).conj()

    layouts = [Layout((2, 3), (1, 2), 0), Layout((2, 3), (0, 1), 0)]
    x, y = torch.randn(2, 3), torch.ones(2, 3)
    island = EagerIsland(run, layouts, "ops")
    times = IslandTimes([island])
    results = times.timed(island)([x, y])
    assert seen == [(1, 2)]
    assert torch.equal(results[0], x)
    assert torch.equal(results[1], y[1:])
    assert not results[2].is_conj()
    x.zero_()
    assert results[0].any()
    assert times.describe() == [{"what": "ops", "share": pytest.approx(1.0, abs=0.5)}]
    assert IslandTimes([EagerIsland(run, layouts, "ops")]).describe() == [{"what": "ops", "share": None}]


@pytest.mark.parametrize(("traced", "given", "is_copied"), [(6, 0, False), (6, 6, False), (6, 3, True), (0, 3, True)])
def test_a_part_of_a_tensor_may_have_memory_of_its_own(traced: int, given: int, is_copied: bool) -> None:
    """As what compiled code gives has, for which a copy was made at each step."""
    seen: list[int] = []

    def run(x: Tensor) -> tuple[Tensor, ...]:
        seen.append(x.data_ptr())
        return (x + 1,)

    x = torch.arange(12.0)[given : given + 3]
    (result,) = EagerIsland(run, [Layout((3,), (1,), traced)], "ops")([x])
    assert torch.equal(result, x + 1)
    assert (seen[0] != x.data_ptr()) == is_copied


def test_ops_that_go_by_values_take_tensors_as_they_come() -> None:
    """Of a part of a tensor no copy is made, and what is no row of elements is made one; results that are one tensor
    are two."""
    seen: list[Tensor] = []

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        seen.extend((x, y))
        total = x + y
        return total, total

    rows, y = torch.arange(12.0).reshape(4, 3), torch.ones(3, 2).t()
    layouts = [Layout((2, 3), (1, 2), 0), Layout((2, 3), (1, 2), 0)]
    first, second = EagerIsland(run, layouts, "ops", by_values=True)([rows[2:], y])
    assert seen[0].data_ptr() == rows[2:].data_ptr() and seen[1].is_contiguous()
    assert torch.equal(first, rows[2:] + 1) and torch.equal(second, first)
    assert first.data_ptr() != second.data_ptr()


def test_layouts_follow_the_sizes() -> None:
    layout = Layout(("rows", 3), (1, "rows"), ("*", 2, "rows"))
    strides: list[tuple[int, ...]] = []

    def run(rows: int, x: Tensor) -> tuple[Tensor, ...]:
        strides.append((*x.stride(), int(x.storage_offset())))
        return (x.new_ones(rows),)

    island = EagerIsland(run, [layout], "ops", ("rows",))
    for rows in (2, 5):
        (result,) = island([rows, torch.ones(rows, 3)])
        assert result.shape == (rows,)
    assert strides == [(1, 2, 4), (1, 5, 10)]


def test_islands_are_ordered_by_what_they_take_unless_they_draw() -> None:
    def graph(random: bool) -> HookGraph:
        island = [Effect(ISLAND_KIND, n, random=random) for n in range(2)]
        # The second island needs nothing; the first needs compute of what a third gives.
        tasks = (Task((), (0,), Effect(ISLAND_KIND, 2)), Task((0,), (1,)), Task((1,), (2,), island[0]))
        return HookGraph((*tasks, Task((), (3,), island[1]), Task((2, 3), (4,))), (4,))

    free, ordered = (find_fewest_stages_order(graph(random)) for random in (False, True))
    assert free.index(3) < free.index(2)
    assert ordered.index(3) > ordered.index(2)
    assert len(find_stages(graph(False), free)) == 2


@pytest.mark.parametrize("located", [True, False])
def test_ops_that_do_not_compile_are_isolated(located: bool) -> None:
    parts = [Part(f"torch.aten.op{i}", f"func.func @f() {{\n  op{i}\n}}", (f"v{i}",)) for i in range(9)]
    tried = []

    def attempt(text: str) -> str:
        tried.append(text)
        lines = text.splitlines()
        bad = [n for n, line in enumerate(lines, 1) if line.strip() in ("op2", "op7")]
        if bad:
            where = f"/tmp/x.mlir:{bad[0]}:3: error: " if located else ""
            raise CompileError("lower", f"{where}failed to legalize operation 'x'", "", "")
        return text

    found = list(isolate(parts, attempt))
    assert [(part.values, message) for part, message in found] == [
        (("v2",), "torch-mlir does not lower aten.op2"),
        (("v7",), "torch-mlir does not lower aten.op7"),
    ]
    assert len(tried) <= (3 if located else 2 * 2 * 4 + 1)
