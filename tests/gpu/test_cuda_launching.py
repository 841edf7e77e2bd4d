# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that the runtime queues itself on torch's stream: the same bits as IREE's runtime, order, memory, capture."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models.case import Case
from steps import gradients, on_device, relative_error, require_device
from torch import Tensor

import retrograd
from retrograd.runtime.cuda.queued_call import QueuedCall
from retrograd.runtime.steps.compiled import CompiledBackward

MODELS = ("mlp", "transformer", "language_model")


def setup_module() -> None:
    require_device()


@contextmanager
def through_iree(compiled: CompiledBackward) -> Iterator[None]:
    """Have IREE's runtime queue the kernels during the block."""
    program = compiled._parts.program
    loaded = program._current()
    launcher, loaded.launcher = loaded.launcher, None
    queued, program.short_calls = program.short_calls, {}
    try:
        yield
    finally:
        loaded.launcher, program.short_calls = launcher, queued


def compiled_and_launched(name: str) -> tuple[Case, CompiledBackward]:
    case = on_device(name)
    compiled = retrograd.compile_backward(case.model, case.args, verify=False)
    launcher = compiled._parts.program._current().launcher
    assert launcher is not None
    assert launcher.takes("forward_into")
    assert launcher.takes("backward_into")
    return case, compiled


def copies(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.clone() for name, gradient in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_through_iree(name: str) -> None:
    case, compiled = compiled_and_launched(name)
    with through_iree(compiled):
        expected = copies(gradients(case, compiled))
    found = gradients(case, compiled)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert torch.equal(gradient, expected[key]), key


def test_functions_without_a_plan_go_through_iree() -> None:
    case = on_device("mlp")
    (x,) = case.args
    sizes = ({0: torch.export.Dim("batch")},)
    compiled = retrograd.compile_backward(case.model, (x,), dynamic_shapes=sizes, verify=False)
    launcher = compiled._parts.program._current().launcher
    assert launcher is not None
    assert not launcher.takes("forward_into")
    assert any(line.startswith("backward waits for the device") for line in compiled.manifest.report["kernels"])
    expected = copies(gradients(case, case.model))
    for key, gradient in gradients(case, compiled).items():
        assert relative_error(gradient, expected[key]) < 1e-3, key


def test_tables_that_a_program_holds_are_in_its_plans() -> None:
    """A mask that is worked out when it is compiled, a table of the user's, and one in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(70, 700, generator=generator).to("cuda")
    half = torch.randn(700, generator=generator).to("cuda", torch.bfloat16)

    def function(x: Tensor) -> Tensor:
        place = torch.arange(700, device=x.device)
        is_masked = (place[:, None] // 7 > place[None, :] // 7) | (place[:, None] % 7 == 3)
        return (x @ table * half).masked_fill(is_masked[: x.shape[0]], -100.0).tanh()

    x = torch.randn(50, 70, generator=generator).to("cuda").requires_grad_()
    compiled = retrograd.compile_backward(function, (x,), verify=False)
    launcher = compiled._parts.program._current().launcher
    assert launcher is not None and launcher.takes("forward_into") and launcher.takes("backward_into")
    for call in range(5):
        found, expected = compiled(x), function(x)
        assert relative_error(found, expected) < 1e-5
        ours, theirs = (torch.autograd.grad(output.square().sum(), x)[0] for output in (found, expected))
        assert relative_error(ours, theirs) < 1e-5, call


def test_a_network_of_convolutions_has_plans() -> None:
    """Its indices of windows and counts are worked out on the device when it is loaded."""
    case, compiled = compiled_and_launched("cnn")
    expected = copies(gradients(case, case.model))
    for key, gradient in gradients(case, compiled).items():
        assert relative_error(gradient, expected[key]) < 1e-3, key


def test_nobody_waits_for_the_device() -> None:
    case, compiled = compiled_and_launched("mlp")
    gradients(case, compiled)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    gradients(case, compiled)
    assert not torch.cuda.current_stream().query(), "the step returned when the device was through with it"
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", MODELS)
def test_steps_at_the_same_addresses_are_graphs_with_the_same_bits(name: str) -> None:
    case, compiled = compiled_and_launched(name)
    leaves = [leaf for leaf in case.leaves().values() if leaf.is_floating_point()]
    for step in range(6):
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(1 - 0.01 * step)
        with through_iree(compiled):
            expected = copies(gradients(case, compiled))
        found = gradients(case, compiled)
        for key, gradient in found.items():
            assert torch.equal(gradient, expected[key]), key
        del expected, found, gradient
    for half in ("forward_into", "backward_into"):
        queued = compiled._parts.program.short_calls[half]
        assert isinstance(queued, QueuedCall)
        assert queued.plan.replays > 0, queued.plan.reason


def test_graphs_are_changed_where_tensors_lie_elsewhere() -> None:
    case, compiled = compiled_and_launched("transformer")
    expected = copies(gradients(case, compiled))
    kept = []
    for _ in range(6):
        found = gradients(case, compiled)
        # Nothing that is held lies where the next step's can.
        kept.append(found)
        for key, gradient in found.items():
            assert torch.equal(gradient, expected[key]), key
    for half in ("forward_into", "backward_into"):
        queued = compiled._parts.program.short_calls[half]
        assert isinstance(queued, QueuedCall)
        assert queued.plan.replays > 0 and queued.plan.changes > 0, queued.plan.reason


def test_a_step_on_another_stream() -> None:
    case, compiled = compiled_and_launched("mlp")
    expected = copies(gradients(case, compiled))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        found = gradients(case, compiled)
    torch.cuda.current_stream().wait_stream(stream)
    for key, gradient in found.items():
        assert torch.equal(gradient, expected[key]), key


def test_memory_stays_the_same_over_many_steps() -> None:
    case, compiled = compiled_and_launched("mlp")
    for _ in range(10):
        gradients(case, compiled)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(1000):
        gradients(case, compiled)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_a_step_is_captured_in_a_graph_of_cuda() -> None:
    case, compiled = compiled_and_launched("mlp")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = copies(gradients(case, compiled))
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in case.leaves().values():
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.loss(compiled(*case.args)).backward()
    graph.replay()
    torch.cuda.synchronize()
    for key, leaf in case.leaves().items():
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, expected[key]), key
