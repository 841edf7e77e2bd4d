# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The cases of the sweep: every op and module of PyTorch's own test databases that has a gradient in f32.

The databases are those that PyTorch tests itself with: ``op_db`` and ``module_db`` in ``torch.testing._internal``,
part of the wheel. A sample is one call: arguments that the database thinks worth testing. They are imported when they
are first read: they load SciPy, and tests of the sweep's own parts need neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

SEED = 20240229


@dataclass(frozen=True)
class Sample:
    """One call of an op or of a module: ``finish(target(*args, **kwargs))`` is what is differentiated.

    ``finish`` takes from the result what is unique: of eigenvectors, say, what does not depend on their signs.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]

    def describe(self) -> str:
        """The arguments, tensors as ``f32[2, 3]``."""
        parts = [_short(a) for a in self.args] + [f"{k}={_short(v)}" for k, v in self.kwargs.items()]
        name = f"{self.target!r}: " if isinstance(self.target, torch.nn.Module) else ""
        return " ".join(f"{name}({', '.join(parts)})".split())


@dataclass(frozen=True)
class Case:
    """One entry of a database; ``samples`` makes its samples anew, the same ones each time, on the case's device.

    ``make`` can be pickled, for processes that are not forked.
    """

    name: str
    make: Callable[[], Iterator[Sample]]

    def samples(self, limit: int | None = None) -> list[Sample]:
        """At most ``limit`` samples, spread evenly over all that there are."""
        torch.manual_seed(SEED)
        every = list(self.make())
        if limit is None or len(every) <= limit:
            return every
        return [every[i * len(every) // limit] for i in range(limit)]


def _databases() -> tuple[Sequence[Any], Sequence[Any]]:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return op_db, module_db


def all_cases(device: str = "cpu") -> list[Case]:
    """Every case, ops before modules, each by name; their samples are on ``device`` (``cpu``, ``cuda``)."""
    kind = torch.device(device).type
    op_db, module_db = _databases()
    ops = [
        Case(_op_name(info), partial(_op_samples, index, device))
        for index, info in enumerate(op_db)
        if info.supports_autograd and torch.float32 in info.supported_backward_dtypes(kind)
    ]
    modules = [
        Case(f"nn.{info.name.removeprefix('nn.')}", partial(_module_samples, index, device))
        for index, info in enumerate(module_db)
        if torch.float32 in info.supported_dtypes(kind) and not info.is_lazy
    ]
    return sorted(ops, key=lambda case: case.name) + sorted(modules, key=lambda case: case.name)


def shuffle(cases: Sequence[Case], key: str) -> list[Case]:
    """The cases in an order that ``key`` selects, the same on every machine: of it, any part is a random share."""
    return sorted(cases, key=lambda case: hashlib.sha256(f"{key}:{case.name}".encode()).digest())


def rotate(cases: Sequence[Case], fraction: float, key: str) -> list[Case]:
    """A share of the cases that ``key`` (a date) selects: in 1 / fraction days each comes up about once."""
    chosen = {case.name for case in shuffle(cases, key)[: max(1, round(len(cases) * fraction))]}
    return [case for case in cases if case.name in chosen]


def _op_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def _op_samples(index: int, device: str) -> Iterator[Sample]:
    info = _databases()[0][index]
    for sample in info.sample_inputs(device, torch.float32, requires_grad=True):
        yield Sample(info.op, (sample.input, *sample.args), dict(sample.kwargs), sample.output_process_fn_grad)


def _module_samples(index: int, device: str) -> Iterator[Sample]:
    info = _databases()[1][index]
    for training in (True, False) if info.train_and_eval_differ else (True,):
        made = info.module_inputs_func(info, device=device, dtype=torch.float32, requires_grad=True, training=training)
        for sample in made:
            if sample.forward_input is None:
                continue
            module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            module.to(device).train(training)
            yield Sample(module, tuple(sample.forward_input.args), dict(sample.forward_input.kwargs), _unchanged)


def _unchanged(value: Any) -> Any:
    return value


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        strides = "" if value.layout != torch.strided or value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{kind}{list(value.shape)}{strides}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_short, value))})"
    return repr(value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to each tensor in it."""
    return pytree.tree_map_only(torch.Tensor, function, value)
