# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The reducer of ``DistributedDataParallel``, whose hooks are in C++ and stop compiled autograd from capturing.

The hooks hang on the ``AccumulateGrad`` nodes of the parameters, one each, and tell the reducer that a gradient is
there. The same said from Python is a hook like any other: captured, called in its place, buckets reduced while the rest
of the backward runs. The reducer itself, its buckets and communication hooks, stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from retrograd.frontend.autograd.engine.engine_order import find_edge
from retrograd.frontend.hooks.hook_marks import filling
from retrograd.frontend.python.live_objects import find_alive

# The nodes that have our hooks, which nothing else keeps alive between two steps.
_taken_over: WeakKeyDictionary[DistributedDataParallel, list[Any]] = WeakKeyDictionary()


def take_over_reducers(error: Exception, roots: Sequence[Any]) -> Exception | None:
    """Where PyTorch refused to capture a backward from ``roots`` for the hooks of reducers, put hooks in Python in
    their place, for good. Returns None if it did; else the error to be told, which says what keeps a reducer."""
    if "DDP Reducer" not in str(error):
        return error
    leaves = {id(leaf) for leaf in _find_leaves(roots)}
    found = [model for model in _models() if any(id(p) in leaves for p in model.parameters())]
    obstacles = [_take_over(model) for model in found]
    if None in obstacles:
        return None
    return RuntimeError(f"{error}; {'; '.join(str(obstacle) for obstacle in obstacles)}") if obstacles else error


def _models() -> list[DistributedDataParallel]:
    # A parameter does not know who reduces its gradient.
    return find_alive(DistributedDataParallel)


def _find_leaves(roots: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The leaves that a backward from ``roots``, tensors or gradient edges, accumulates into."""
    pending: list[Any] = [find_edge(root).node for root in roots]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        following = {n for n, _ in node.next_functions if n is not None} - seen
        pending.extend(following)
        seen |= following


def _take_over(model: DistributedDataParallel) -> str | None:
    """Have the model's reducer told from Python, if it was not before; returns what stands in the way."""
    reducer: Any = getattr(model, "reducer", None)
    if model in _taken_over or reducer is None:
        return "these are not hooks of DistributedDataParallel's"
    if model.mixed_precision is not None:
        return "with mixed_precision they copy gradients too, and stay in C++: use autocast, or FSDP's mixed precision"
    # As the constructor did: the reducer knows parameters by their place among these.
    parameters, _ = model._build_params_for_reducer()
    if len(parameters) != model._get_ddp_logging_data()["num_parameter_tensors"]:
        return "parameters were frozen since the model was wrapped, which changes their places: wrap it anew"
    nodes: list[Any] = [get_gradient_edge(parameter).node for parameter in parameters]
    reducer._remove_autograd_hooks()
    told = _Told(
        reducer,
        len(parameters),
        knows_last=not (model.find_unused_parameters or model.static_graph),
        assign=partial(_assign_buckets, weakref.ref(model)),
    )
    for place, node in enumerate(nodes):
        node.register_hook(filling(partial(told.tell, place), partial(told.bucket_of, place)))
    _taken_over[model] = nodes
    return None


def _assign_buckets(model: weakref.ref[DistributedDataParallel], order: Sequence[int]) -> dict[int, int]:
    """The bucket of each parameter, by its place, as the reducer divides them after a first step, in which they had
    their gradients in this ``order``.

    Source: ``Reducer::rebuild_buckets``, ``torch/csrc/distributed/c10d/reducer.cpp``.
    """
    owner: Any = model()
    if owner is None:
        return {}
    parameters, expect_sparse = owner._build_params_for_reducer()
    config, whole = getattr(owner, "_bucket_config", None), owner.bucket_bytes_cap
    if config is not None:
        limits = [*config.per_bucket_bytes_caps] or [config.first_bucket_bytes_cap, whole]
    else:
        first = dist._DEFAULT_FIRST_BUCKET_BYTES if owner.bucket_bytes_cap_default else whole
        limits = owner.bucket_bytes_cap_list or [first, whole]
    ready = [parameters[place] for place in order]
    buckets, _ = dist._compute_bucket_assignment_by_size(ready, limits, expect_sparse, list(order))
    return {place: number for number, places in enumerate(buckets) for place in places}


class _Told:
    """The gradients that a reducer was told of in the backward that runs.

    It queues its callback when the last of its ``count`` parameters has a gradient. Where it counts those as well that
    none is computed for, or only counts in a first step, it is not known which one that is (``knows_last``).
    ``assign`` gives the buckets that follow from the order of a first step.
    """

    def __init__(
        self, reducer: Any, count: int, *, knows_last: bool, assign: Callable[[Sequence[int]], dict[int, int]]
    ) -> None:
        self._reducer, self._count, self._knows_last, self._assign = reducer, count, knows_last, assign
        self._task = -1
        # In order.
        self._places: dict[int, None] = {}
        self._buckets: dict[int, int] | None = None

    def bucket_of(self, place: int) -> int | None:
        """The bucket of a parameter; None before all had their gradients once, and where that is not known."""
        return None if self._buckets is None else self._buckets.get(place)

    def tell(self, place: int, *_gradients: Any) -> None:
        """Tell that a parameter has its gradient."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._places = task, {}
        self._places[place] = None
        is_full = len(self._places) == self._count
        if is_full and self._knows_last and self._buckets is None:
            self._buckets = self._assign(list(self._places))
        is_last = is_full or not self._knows_last
        tell = partial(self._reducer._autograd_hook, place)
        if compiled_autograd.in_compiled_autograd_region and is_last:
            _run_in_backward(tell)
        else:
            tell()


def _run_in_backward(function: Callable[[], None]) -> None:
    """With its last bucket the reducer queues a callback on the engine, which runs at the end of the backward that the
    engine knows of: of this one, since a captured backward has none that it would run."""
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True, device="cpu").clone()
    # Of a node: hooks that are put on tensors while a backward runs are taken for the user's.
    root.grad_fn.register_prehook(lambda _gradients: function())  # type: ignore[union-attr]
    # PyTorch's engine itself: that it runs inside of another backward is nothing to tell the user.
    nothing: tuple[torch.Tensor, ...] = ()
    torch._C._ImperativeEngine().run_backward(
        (root,), (torch.ones((), device="cpu"),), False, False, nothing, allow_unreachable=True, accumulate_grad=True
    )
