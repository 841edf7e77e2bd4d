# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Python values that a model goes by, of each kind: found where they are, and seen to be others."""

from __future__ import annotations

import argparse
import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrograd.frontend.python.python_calls_seen import PythonSeen, run_watched
from retrograd.frontend.python.python_contents import is_same_value
from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.python.python_values import find_values

AnyModel = TypeVar("AnyModel", bound=nn.Module)
WEIGHTS = np.array([1.0, 2.0])
KEPT = [torch.ones(2)]


def helper(x: Tensor) -> Tensor:
    return x.sin()


GAIN = {"value": 2.0}


def gain(x: Tensor) -> Tensor:
    return x * GAIN["value"]


class Holder:
    def __init__(self) -> None:
        self.functions = {"gain": [gain]}

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self.functions["gain"][0](x)
        return result


class Base(nn.Module):
    kind = 2.0


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.array, self.scalar, self.zero = np.ones(3), np.float32(2), 0.0
        self.function: Callable[[Tensor], Tensor] = torch.relu
        self.table: dict[str, Any] = {"act": F.silu, "at": np.ones(1)}
        self.bias = torch.ones(2)
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(self.layer(x)) * float(self.array[0]) * float(self.scalar) * math.copysign(1, self.zero)
        y = F.relu(helper(y)) * self.kind * float(WEIGHTS[0]) + self.table["act"](KEPT[0])
        result: Tensor = self.holder(y) * 2 if hasattr(self, "doubled") else self.holder(y)
        return result


class Settings:
    def __init__(self) -> None:
        self.factor = 2.0


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


class Scaled:
    """An object whose method reads a global, by a function in an attribute."""

    def __init__(self) -> None:
        self.function = functools.partial(times, factor=2.0)

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x) * FACTORS["of an object's method"]


FACTORS = {"of an object's method": 2.0}
OF_A_FUNCTION, OF_A_DEFAULT = SimpleNamespace(factor=2.0), argparse.Namespace(factor=2.0)


def times(x: Tensor, factor: float) -> Tensor:
    return x * (factor * float(OF_A_FUNCTION.factor))


def doubled(x: Tensor) -> Tensor:
    return x * float(OF_A_DEFAULT.factor)


class Holding(nn.Module):
    """Reads values through objects that it holds, and functions that no name in its code leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.slotted, self.object, self.factors = Settings(), Slotted(), Scaled(), deque([2.0])
        self.tables = [{"factor": 2.0}, {"factor": 3.0}]
        self.closed = [closed_over(table) for table in self.tables]

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor] = doubled) -> Tensor:
        y = function(self.object(x)) * self.settings.factor * self.slotted.factor * self.factors[0]
        return self.closed[1](self.closed[0](y))


def closed_over(table: dict[str, float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * table["factor"]


@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: patch.setitem(FACTORS, "of an object's method", 3.0),
        lambda model, patch: patch.setattr(OF_A_FUNCTION, "factor", 3.0),
        lambda model, patch: patch.setattr(OF_A_DEFAULT, "factor", 3.0),
        lambda model, patch: patch.setattr(model, "settings", Settings()),
        lambda model, patch: patch.setattr(model.slotted, "factor", 3.0),
        lambda model, patch: model.factors.appendleft(3.0),
        lambda model, patch: patch.setitem(model.tables[0], "factor", 4.0),
        lambda model, patch: patch.setitem(model.tables[1], "factor", 4.0),
    ],
    ids=["method", "function", "default", "another object", "slot", "deque", "first closure", "second closure"],
)
def test_values_behind_what_a_model_holds_are_seen(change: Callable[[Holding, pytest.MonkeyPatch], Any]) -> None:
    check_it_is_seen(Holding(), change)


def check_it_is_seen(model: AnyModel, change: Callable[[AnyModel, pytest.MonkeyPatch], Any]) -> None:
    values = values_of(model)
    assert values.are_as_before()
    with pytest.MonkeyPatch.context() as patch:
        change(model, patch)
        assert not values.are_as_before()
        assert values.find_changed()


def values_of(model: nn.Module) -> PythonValues:
    seen, modules = PythonSeen(), dict(model.named_modules())
    run_watched(lambda: model(torch.ones(1, 2)), seen, {})
    return find_values(model, modules, seen, set())


@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: patch.setattr(model, "array", np.ones(4)),
        lambda model, patch: model.array.__imul__(2),
        lambda model, patch: patch.setattr(model, "scalar", np.float64(2)),
        lambda model, patch: patch.setattr(model, "zero", -0.0),
        lambda model, patch: patch.setattr(model, "function", torch.tanh),
        lambda model, patch: patch.setattr(model, "function", lambda x: x * 3),
        lambda model, patch: patch.setitem(model.table, "act", F.gelu),
        lambda model, patch: model.table["at"].__imul__(2),
        lambda model, patch: patch.setattr(model.layer, "forward", torch.sin),
        lambda model, patch: patch.setattr(model, "doubled", True, raising=False),
        lambda model, patch: patch.setattr(Model, "kind", 3.0),
        lambda model, patch: patch.setitem(globals(), "helper", torch.cos),
        lambda model, patch: patch.setitem(globals(), "WEIGHTS", WEIGHTS * 2),
        lambda model, patch: patch.setattr(F, "relu", torch.cos),
        lambda model, patch: patch.setitem(GAIN, "value", 3.0),
    ],
    ids=[
        "array",
        "in an array",
        "scalar",
        "sign of zero",
        "function",
        "lambda",
        "function in a dict",
        "array in a dict",
        "forward",
        "asked for",
        "class between",
        "global function",
        "global array",
        "function of torch",
        "global of a function that an object holds",
    ],
)
def test_other_values_are_seen(change: Callable[[Model, pytest.MonkeyPatch], Any]) -> None:
    check_it_is_seen(Model(), change)


class Sharing(nn.Module):
    """Has one object under fifty names."""

    def __init__(self) -> None:
        super().__init__()
        shared = SimpleNamespace(factor=2.0)
        for number in range(50):
            setattr(self, f"part_{number}", shared)

    def forward(self, x: Tensor) -> Tensor:
        return x * float(sum(getattr(self, f"part_{number}").factor for number in range(50)))


def test_paths_do_not_hang_on_the_order_of_sets() -> None:
    """Two records of one model were taken for those of two at times."""
    model, found = Sharing(), []
    modules = dict(model.named_modules())
    for step in (1, -1):
        seen = PythonSeen()
        run_watched(lambda: model(torch.ones(1, 2)), seen, {})
        # Where names have one place in the table of a set, the order is that in which they came.
        seen.read = set([f"part_{number}" for number in range(50)][::step])
        found.append([place.path for place in find_values(model, modules, seen, set()).places])
    assert found[0] == found[1]


def test_settings_of_pytorch_are_seen() -> None:
    values = values_of(Model())
    torch.set_default_dtype(torch.float64)
    try:
        assert not values.are_as_before()
    finally:
        torch.set_default_dtype(torch.float32)
    assert values.are_as_before()


def test_tensors_that_a_model_may_read_are_found_and_not_held() -> None:
    model = Model()
    found = {place.path: place.value() for place in values_of(model).tensors}
    assert found["model.bias"] is model.bias
    assert next(value for path, value in found.items() if path.endswith("KEPT[0]")) is KEPT[0]


def scaled(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


def recursive(depth: int) -> Callable[[int], int]:
    def call(x: int) -> int:
        return call(x - 1) if x > depth else x

    return call


def test_which_values_are_the_same() -> None:
    same = [
        (math.nan, math.nan),
        (complex(0, math.nan), complex(0, math.nan)),
        (scaled(2.0), scaled(2.0)),
        (functools.partial(max, 1), functools.partial(max, 1)),
        (np.array([math.nan]), np.array([math.nan])),
        ([np.float32(1)], [np.float32(1)]),
    ]
    other = [
        (0.0, -0.0),
        (0j, complex(0, -0.0)),
        (1, True),
        (scaled(2.0), scaled(3.0)),
        (scaled(2.0), scaled(2)),
        (recursive(1), recursive(1)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros((2, 1))),
        (torch.ones(2), torch.ones(2)),
    ]
    assert all(is_same_value(a, b) for a, b in same)
    assert not any(is_same_value(a, b) for a, b in other)


@dataclass
class Parsed:
    text: str


def test_generated_code_counts_where_the_model_calls_it() -> None:
    """What PyTorch parses once, into dataclasses of its own, made the first of several traces go by more than the next:
    a model that was compiled first was not known again."""
    codes: dict[str, Any] = {}
    exec(compile("def parse(kind):\n    return kind('text')", torch.__file__, "exec"), codes)
    exec(compile("def made(text):\n    return text", "<string>", "exec"), codes)
    by_pytorch, by_model = PythonSeen(), PythonSeen()
    run_watched(lambda: (codes["parse"](codes["made"]), codes["parse"](Parsed), Parsed("text")), by_pytorch, {})
    run_watched(lambda: (codes["parse"](codes["made"]), codes["made"]("text")), by_model, {})
    assert codes["made"].__code__ not in by_pytorch.codes
    assert codes["made"].__code__ in by_model.codes
    # What fills a dataclass reads nothing, whoever calls it.
    assert Parsed.__init__.__code__ not in by_pytorch.codes


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift: Any = None
        self.names = ["first"]

    def forward(self, x: Tensor) -> Tensor:
        return x if self.shift is None else x + self.shift + len(self.names)


def test_what_changed_is_told_in_a_line() -> None:
    model = Shifting()
    values = values_of(model)
    model.shift = torch.ones(100, 2)
    assert values.find_changed() == ["model.shift (None, now a tensor of float32 and shape (100, 2))"]
    values = values_of(model)
    model.names += [f"name {i}" * 40 for i in range(100)]
    model.shift = [torch.ones(100, 2)] * 20
    (told,) = [text for text in values.find_changed() if "names" in text]
    assert len(told) < 400
    assert "\n" not in told


class Labels(tuple[Any, ...]):
    """Has neither a length nor its items to give, as a library's class of irreducible representations has not."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.labels = Labels((1, Labels((2, "a"))))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.labels[0]
        return result


def test_containers_of_classes_of_their_own() -> None:
    model = Labelled()
    values = values_of(model)
    model.labels = Labels((1, Labels((2, "a"))))
    assert values.are_as_before()
    model.labels = Labels((1, Labels((2, "b"))))
    assert not values.are_as_before()
    assert is_same_value(Labels((1,)), Labels((1,)))
    assert not is_same_value(Labels((1,)), Labels((1, 2)))
