# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Values that a model goes by behind its attributes: classes, functions, containers and what Python keeps of a thread
or a context. Each change is seen, and what is written to beside is not."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_python_places import values_of
from torch import Tensor, nn

from retrograd.frontend.python.python_places import PythonValues
from retrograd.frontend.python.written_memory import IS_KNOWN


def doubled(h: Tensor, factor: float = 2.0, *, shift: float = 0.0) -> Tensor:
    return h * factor + shift


def vars_of(function: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = function.__kwdefaults__
    return defaults


FACTORS = [2.0]


def listed(h: Tensor, factors: list[float] = FACTORS) -> Tensor:
    return h * factors[0]


def tripled(h: Tensor) -> Tensor:
    return h * 3


def marked(h: Tensor) -> Tensor:
    return h


vars(marked)["factor"] = 2.0


@contextlib.contextmanager
def managed() -> Iterator[float]:
    yield SETTINGS["of a context manager"]


@functools.lru_cache
def cached() -> float:
    return SETTINGS["cached"]


@functools.singledispatch
def dispatched(h: Any) -> Any:
    return h


@dispatched.register
def _of_tensor(h: Tensor) -> Tensor:
    return h * 2


SETTINGS = {"of a context manager": 2.0, "cached": 2.0, "of a backward": 2.0, "decorated": 2.0}
LOCAL = threading.local()
LOCAL.factor = 2.0
CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=2.0)


class Helper:
    factor = 2.0

    class Inner:
        factor = 2.0

    def __call__(self, h: Tensor) -> Tensor:
        return h * 2

    def __matmul__(self, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def static(h: Tensor) -> Tensor:
        return h * 2


class OtherHelper(Helper):
    def __call__(self, h: Tensor) -> Tensor:
        return h * 3


class Made:
    def __init__(self) -> None:
        self.factor = 2.0


class Descriptor:
    factor = 2.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.factor


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * of_backward()


def apply(h: Tensor) -> Any:
    return Scaled.apply(h)  # type: ignore[no-untyped-call]


def of_backward() -> float:
    return SETTINGS["of a backward"]


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args) * SETTINGS["decorated"]

    return call


@dataclass
class Config:
    factor: float = 2.0
    inner: Any = None


class Child(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 2


class OtherChild(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 3


class Parent(nn.Module):
    def inherited(self, h: Tensor) -> Tensor:
        return h * 2


class Model(Parent):
    table: Any
    added: Any
    weights: Any
    unnamed: Any
    listed: ClassVar = [2.0]
    held = SimpleNamespace(factor=2.0)
    described = Descriptor()

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.child = Child()
        self.helper, self.config = Helper(), Config(inner=Config(inner=Config()))
        self.tensors: Any = (torch.ones(2), 2.0)
        self.objects = [Config(), Config()]
        self.partial = functools.partial(doubled, factor=2.0)
        self.modules_beside = [nn.LeakyReLU(0.1)]
        self.scale_1 = 2.0
        self.proxy, self.chain = types.MappingProxyType({"factor": 2.0}), collections.ChainMap({"factor": 2.0})
        self.array = bytearray(b"a")
        self.kept: Any = Config()
        self.weak = weakref.ref(self.kept)
        self.get = operator.attrgetter("config.factor")
        self.kind = Helper

    def own(self, h: Tensor) -> Tensor:
        return h * 2

    @property
    def factor(self) -> float:
        return 2.0

    @decorated
    def wrapped(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def by_match(model: Any, h: Tensor) -> Tensor:
    match model.config:
        case Config(factor=2.0):
            return h * 2
        case _:
            return h * 3


def by_import(model: Any, h: Tensor) -> Tensor:
    import colorsys

    return h * colorsys.ONE_THIRD


def by_context(model: Any, h: Tensor) -> Tensor:
    with managed() as factor:
        return h * factor


def by_variables(model: Any, h: Tensor) -> Tensor:
    for name, value in vars(model.config).items():
        h = h * value if name.startswith("factor") else h
    return h


Body = Callable[[Any, Tensor], Any]
Change = Callable[[Any, pytest.MonkeyPatch], Any]
CASES: dict[str, tuple[Body, Change]] = {
    "method of the class": (lambda m, h: m.own(h), lambda m, p: p.setattr(Model, "own", tripled)),
    "method of a base": (lambda m, h: m.inherited(h), lambda m, p: p.setattr(Parent, "inherited", tripled)),
    "overridden": (lambda m, h: m.inherited(h), lambda m, p: p.setattr(Model, "inherited", tripled, raising=False)),
    "method on the object": (lambda m, h: m.own(h), lambda m, p: setattr(m, "own", tripled)),
    "forward of a child's class": (lambda m, h: m.child(h), lambda m, p: p.setattr(Child, "forward", tripled)),
    "class of a child": (lambda m, h: m.child(h), lambda m, p: setattr(m.child, "__class__", OtherChild)),
    "call of an object": (lambda m, h: m.helper(h), lambda m, p: p.setattr(Helper, "__call__", tripled)),
    "operator": (lambda m, h: m.helper @ h, lambda m, p: p.setattr(Helper, "__matmul__", tripled)),
    "class of an object": (lambda m, h: m.helper(h), lambda m, p: setattr(m.helper, "__class__", OtherHelper)),
    "property": (lambda m, h: h * m.factor, lambda m, p: p.setattr(Model, "factor", property(lambda self: 3.0))),
    "static method": (lambda m, h: Helper.static(h), lambda m, p: p.setattr(Helper, "static", staticmethod(tripled))),
    "global class": (lambda m, h: h * Helper.factor, lambda m, p: p.setattr(Helper, "factor", 3.0)),
    "class in a class": (lambda m, h: h * Helper.Inner.factor, lambda m, p: p.setattr(Helper.Inner, "factor", 3.0)),
    "class in an attribute": (lambda m, h: h * m.kind.factor, lambda m, p: p.setattr(Helper, "factor", 3.0)),
    "class of what is made": (
        lambda m, h: h * Made().factor,
        lambda m, p: p.setattr(Made, "__init__", lambda self: setattr(self, "factor", 3.0)),
    ),
    "list of the class": (lambda m, h: h * m.listed[0], lambda m, p: p.setattr(Model, "listed", [3.0])),
    "in a list of the class": (lambda m, h: h * m.listed[0], lambda m, p: Model.listed.append(3.0)),
    "object of the class": (lambda m, h: h * m.held.factor, lambda m, p: p.setattr(Model.held, "factor", 3.0)),
    "descriptor": (lambda m, h: h * m.described, lambda m, p: p.setattr(Descriptor, "factor", 3.0)),
    "default": (lambda m, h: doubled(h), lambda m, p: p.setattr(doubled, "__defaults__", (3.0,))),
    "default by name": (lambda m, h: doubled(h), lambda m, p: p.setitem(vars_of(doubled), "shift", 3.0)),
    "in a default": (lambda m, h: listed(h), lambda m, p: FACTORS.append(3.0)),
    "code": (lambda m, h: tripled(h), lambda m, p: p.setattr(tripled, "__code__", (lambda h: h).__code__)),
    "attribute of a function": (lambda m, h: h * marked.factor, lambda m, p: p.setattr(marked, "factor", 3.0)),  # type: ignore[attr-defined]
    "keyword of a partial": (lambda m, h: m.partial(h), lambda m, p: p.setitem(m.partial.keywords, "factor", 3.0)),
    "decorated": (lambda m, h: m.wrapped(h), lambda m, p: p.setitem(SETTINGS, "decorated", 3.0)),
    "context manager": (by_context, lambda m, p: p.setitem(SETTINGS, "of a context manager", 3.0)),
    "cached function": (lambda m, h: h * cached(), lambda m, p: p.setitem(SETTINGS, "cached", 3.0)),
    "dispatched": (lambda m, h: dispatched(h), lambda m, p: dispatched.register(Tensor)(tripled)),
    "backward": (lambda m, h: apply(h), lambda m, p: p.setitem(SETTINGS, "of a backward", 3.0)),
    "function of a backward": (lambda m, h: apply(h), lambda m, p: p.setattr(Scaled, "backward", tripled)),
    "through two modules": (lambda m, h: torch.nn.functional.relu(h), lambda m, p: p.setattr(F, "relu", tripled)),
    "in a layer": (lambda m, h: nn.ReLU()(h), lambda m, p: p.setattr(F, "relu", tripled)),
    "method of tensors": (lambda m, h: h.relu(), lambda m, p: p.setattr(Tensor, "relu", tripled)),
    "number of a library": (lambda m, h: h * math.pi, lambda m, p: p.setattr(math, "pi", 3.0)),
    "import": (by_import, lambda m, p: p.setattr("colorsys.ONE_THIRD", 3.0)),
    "function of Python's": (
        lambda m, h: h * max(1.0, 2.0),
        lambda m, p: p.setitem(globals(), "max", lambda a, b: 3.0),
    ),
    "number beside a tensor": (lambda m, h: h * m.tensors[1], lambda m, p: setattr(m, "tensors", (m.tensors[0], 3.0))),
    "one tensor more": (lambda m, h: h * m.tensors[0], lambda m, p: setattr(m, "tensors", (*m.tensors, torch.ones(1)))),
    "objects in a list": (lambda m, h: h * m.objects[0].factor, lambda m, p: setattr(m, "objects", [Config(3.0)])),
    "far inside": (
        lambda m, h: h * m.config.inner.inner.factor,
        lambda m, p: setattr(m.config.inner.inner, "factor", 3.0),
    ),
    "module in a list": (lambda m, h: m.modules_beside[0](h), lambda m, p: m.modules_beside.insert(0, nn.Tanh())),
    "setting of a module in a list": (
        lambda m, h: m.modules_beside[0](h),
        lambda m, p: setattr(m.modules_beside[0], "negative_slope", 0.9),
    ),
    "mode of a module in a list": (lambda m, h: m.modules_beside[0](h), lambda m, p: m.modules_beside[0].eval()),
    "name put together": (lambda m, h: h * getattr(m, f"scale_{1}"), lambda m, p: setattr(m, "scale_1", 3.0)),
    "all attributes": (by_variables, lambda m, p: setattr(m.config, "factor_too", 3.0)),
    "proxy": (
        lambda m, h: h * m.proxy["factor"],
        lambda m, p: setattr(m, "proxy", types.MappingProxyType({"factor": 3.0})),
    ),
    "chain of dicts": (lambda m, h: h * m.chain["factor"], lambda m, p: m.chain.maps[0].update(factor=3.0)),
    "bytes": (lambda m, h: h * m.array[0], lambda m, p: m.array.__setitem__(0, 3)),
    "weak reference": (lambda m, h: h * m.weak().factor, lambda m, p: setattr(m.weak(), "factor", 3.0)),
    "dead reference": (lambda m, h: h * (m.weak() is None), lambda m, p: delattr(m, "kept")),
    "names in a getter": (lambda m, h: h * m.get(m), lambda m, p: setattr(m.config, "factor", 3.0)),
    "pattern": (by_match, lambda m, p: setattr(m.config, "factor", 3.0)),
    "thread": (lambda m, h: h * LOCAL.factor, lambda m, p: p.setattr(LOCAL, "factor", 3.0)),
    "PyTorch's flag": (
        lambda m, h: h * torch.backends.cudnn.benchmark,
        lambda m, p: p.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_change_is_seen(name: str) -> None:
    body, change = CASES[name]
    model = Model(body)
    values = values_of(model)
    assert values.are_as_before(), values.find_changed()
    with pytest.MonkeyPatch.context() as patch:
        change(model, patch)
        assert not values.are_as_before()
        assert values.find_changed()


def test_variable_of_the_context_is_seen() -> None:
    values = values_of(Model(lambda m, h: h * CONTEXT.get()))
    token = CONTEXT.set(3.0)
    assert not values.are_as_before()
    CONTEXT.reset(token)
    assert values.are_as_before()


def test_what_is_beside_is_not_looked_at() -> None:
    """Other attributes, other globals and other entries of a class may be written to."""
    model = Model(lambda m, h: m.own(h) * m.config.factor)
    values = values_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "unnamed", 1, raising=False)
        patch.setitem(globals(), "UNNAMED", 1)
        model.unnamed, model.config.inner = 1, None
        assert values.are_as_before(), values.find_changed()


def test_equal_ones_in_the_place_of_others_are_looked_at() -> None:
    """A dict, or a function, that equals the one before is the same, until it is written to."""
    model = Model(lambda m, h: h * m.table["factor"] + m.added(h))
    model.table, model.added = {"factor": 2.0}, adding([1.0])
    values = values_of(model)
    table, shifts = {"factor": 2.0}, [1.0]
    model.table, model.added = table, adding(shifts)
    assert values.are_as_before() and values.are_as_before()
    table["factor"] = 3.0
    assert not values.are_as_before()
    table["factor"] = 2.0
    assert values.are_as_before()
    shifts[0] = 2.0
    assert not values.are_as_before()


@dataclass
class Named:
    """An object that is compared by its name alone."""

    name: str = "gain"
    factor: float = field(default=2.0, compare=False)


@pytest.mark.parametrize("kind", [dict, tuple])
def test_equal_objects_in_a_container_are_looked_at(kind: type) -> None:
    model, first, other = Model(lambda m, h: h * m.table[0].factor), *(SimpleNamespace(factor=2.0) for _ in range(2))
    model.table = {0: first} if kind is dict else (first,)
    values = values_of(model)
    if kind is dict:
        model.table[0] = other
    else:
        model.table = (other,)
    assert values.are_as_before() and values.are_as_before()
    other.factor = 3.0
    assert not values.are_as_before()


def test_objects_are_equal_by_all_that_they_hold() -> None:
    model: Any = Model(lambda m, h: h * m.config.factor)
    model.config = Named()
    values = values_of(model)
    model.config = Named()
    assert values.are_as_before()
    model.config = Named(factor=3.0)
    assert not values.are_as_before()


def test_another_value_at_the_address_of_one_that_is_gone() -> None:
    """Of a closure's variable no more than the address is looked at as long as it is the same."""
    scale = float("2.0")

    def times(factor: float) -> None:
        nonlocal scale
        scale = scale * factor

    values = values_of(Model(lambda _, h: h * scale))
    times(1.0)
    assert values.are_as_before()
    # The second comes to lie where the one was that was equal.
    times(0.5)
    times(0.5)
    assert not values.are_as_before()


def test_a_tuple_at_the_address_of_another() -> None:
    shape = (float("2.0"), float("3.0"))

    def use(*other: float) -> None:
        nonlocal shape
        shape = (other[0], other[1])

    values = values_of(Model(lambda _, h: h * shape[0]))
    use(5.0, 6.0)
    use(7.0, 8.0)
    assert not values.are_as_before()


def test_defaults_at_the_address_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubled, "__defaults__", (float("2.5"),))
    values = values_of(Model(lambda _, h: doubled(h)))
    for factor in ("3.5", "4.5"):
        doubled.__defaults__ = (float(factor),)
    assert not values.are_as_before()


@pytest.mark.parametrize("is_known", [True, False])
def test_another_dict_has_the_attributes(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.frontend.python.written_memory.IS_KNOWN", is_known)
    model = Model(lambda m, h: h * m.config.factor)
    values, own = values_of(model), vars(model.config)
    assert values.are_as_before(), values.find_changed()
    model.config.__dict__ = {**own, "factor": 3.0}
    assert not values.are_as_before()
    model.config.__dict__ = own
    assert values.are_as_before()
    model.__dict__ = {**vars(model), "config": SimpleNamespace(factor=2.0)}
    assert not values.are_as_before()


def adding(shifts: list[float]) -> Callable[[Tensor], Tensor]:
    return lambda h: h + shifts[0]


def test_values_are_found_without_memory_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another Python each value is looked up."""
    assert (sys.version_info < (3, 13)) == IS_KNOWN
    monkeypatch.setattr("retrograd.frontend.python.written_memory.IS_KNOWN", False)
    model = Model(lambda m, h: m.own(h) * m.config.factor)
    values = values_of(model)
    assert values.are_as_before(), values.find_changed()
    model.config.factor = 3.0
    assert not values.are_as_before()
    with pytest.MonkeyPatch.context() as patch:
        model.config.factor = 2.0
        patch.setattr(Model, "own", tripled)
        assert not values.are_as_before()
    assert values.are_as_before()


def test_what_is_looked_at_is_not_kept_alive() -> None:
    model = Model(lambda m, h: h * m.tensors[0] * m.weak().factor)
    values: PythonValues = values_of(model)
    tensor, weak = weakref.ref(model.tensors[0]), model.weak
    model.tensors, model.kept = (), None
    assert tensor() is None and weak() is None
    assert not values.are_as_before()


def test_arrays_of_other_contents_and_types() -> None:
    model = Model(lambda m, h: h * float(m.weights[0]))
    model.weights = np.ones(2)
    values = values_of(model)
    model.weights = np.ones(2)
    assert values.are_as_before()
    model.weights[1] = 2.0
    assert not values.are_as_before()
