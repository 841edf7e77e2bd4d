# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Custom functions in C++ under ``retrograd.enable()``: called from the compiled backward, of any size and number."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import retrograd

_FUNCTION = """
struct NAME : public torch::autograd::Function<NAME> {
  static constexpr bool is_traceable = TRACEABLE;
  static at::Tensor forward(torch::autograd::AutogradContext *ctx, const at::Tensor &x, double scale, int64_t n) {
    ctx->save_for_backward({x});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["n"] = n;
    return x.mul(x).mul(scale * static_cast<double>(n));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext *ctx,
                                                 torch::autograd::variable_list gradients) {
    auto x = ctx->get_saved_variables()[0];
    auto factor = ctx->saved_data["scale"].toDouble() * static_cast<double>(ctx->saved_data["n"].toInt());
    return {gradients[0].mul(x).mul(2 * factor), at::Tensor(), at::Tensor()};
  }
};
"""
_WRITES = """
struct Writes : public torch::autograd::Function<Writes> {
  static at::Tensor forward(torch::autograd::AutogradContext *ctx, at::Tensor x) {
    x.mul_(2);
    ctx->mark_dirty({x});
    return x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext *ctx,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0].mul(2).add(1)};
  }
};
"""
_SOURCE = (
    # Not torch/extension.h, nor bindings of Python's: all of PyTorch's headers take three times the seconds to compile.
    "#include <torch/csrc/autograd/custom_function.h>\n#include <torch/library.h>\n"
    + _FUNCTION.replace("NAME", "Opaque").replace("TRACEABLE", "false")
    + _FUNCTION.replace("NAME", "Traceable").replace("TRACEABLE", "true")
    + _WRITES
    + """
TORCH_LIBRARY(retrograd_test_functions, m) {
  m.def("opaque", [](const at::Tensor &x, double scale, int64_t n) -> at::Tensor {
    return Opaque::apply(x, scale, n);
  });
  m.def("traceable", [](const at::Tensor &x, double scale, int64_t n) -> at::Tensor {
    return Traceable::apply(x, scale, n);
  });
  m.def("writes(Tensor(a!) x) -> Tensor(a!)", [](at::Tensor x) -> at::Tensor { return Writes::apply(x); });
}
"""
)


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not (shutil.which("ninja") and shutil.which(os.environ.get("CXX", "c++"))):
        pytest.skip("no C++ compiler, or no ninja")
    place: Path = tmp_path_factory.mktemp("extension")
    source = place / "functions.cpp"
    source.write_text(_SOURCE)
    cpp_extension.load(
        "retrograd_test_functions",
        [str(source)],
        # Of an op's own header each, which these functions need none of: a fourth of the compiler's time.
        extra_cflags=["-O0", "-DAT_PER_OPERATOR_HEADERS"],
        build_directory=str(place),
        is_python_module=False,
    )
    return torch.ops.retrograd_test_functions


def gradients(function: Any, steps: Sequence[tuple[int, float, int]]) -> list[torch.Tensor | None]:
    found = []
    for rows, scale, n in steps:
        torch.manual_seed(0)
        w = torch.randn(rows, 3, requires_grad=True)
        function(w.cos(), scale, n).sin().sum().backward()
        found.append(w.grad)
    return found


@pytest.mark.parametrize("name", ["opaque", "traceable"])
def test_saved_numbers_and_sizes_differ_from_step_to_step(functions: Any, name: str) -> None:
    function = getattr(functions, name)
    steps = [(3 + i, 1.5 + i, 1 + i % 4) for i in range(12)]
    expected = gradients(function, steps)
    before = len(retrograd.explain_recompiles())
    with retrograd.enable():
        found = gradients(function, steps)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
    outcomes = [entry.outcome for entry in retrograd.explain_recompiles()[before:]]
    assert len(outcomes) == 2 and "runs eagerly" not in outcomes


class GivesNone(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


def test_a_write_to_a_view_without_a_gradient_is_not_told(functions: Any) -> None:
    """PyTorch captures no function in C++ that writes to what it is given: its engine runs the backward. Zeros in the
    place of None would give a gradient of ones."""

    def step() -> Any:
        w = torch.ones(4, requires_grad=True)
        first, second = w.sin(), w.cos()
        functions.writes(first[1:3])
        functions.writes(second[1:3])
        gives: Any = GivesNone.apply(first)  # type: ignore[no-untyped-call]
        (gives + second).sum().backward()
        return w.grad

    expected = step()
    before = len(retrograd.explain_recompiles())
    with retrograd.enable():
        torch.testing.assert_close([step() for _ in range(4)], [expected] * 4)
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == ["runs eagerly"]
