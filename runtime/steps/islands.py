# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Islands at run time: ops that are not compiled, run by torch between compiled functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from retrograd.contract.sizes import Size, evaluate_shape, evaluate_size, numbers_of
from retrograd.runtime.steps.island_code import shorten


@dataclass(frozen=True)
class Layout:
    """Shape, strides (in elements) and offset of a tensor in its storage: numbers, or expressions over sizes that are
    known at each call."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """That of a tensor, in numbers."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def at(self, sizes: Mapping[str, int]) -> Layout:
        """The layout in numbers."""
        if not sizes:
            return self
        shape, stride = (evaluate_shape(numbers, sizes) for numbers in (self.shape, self.stride))
        return Layout(shape, stride, evaluate_size(self.offset, sizes))


_CALLS_BEFORE = 2
_transform = torch._C._functorch.peek_interpreter_stack


@dataclass
class EagerIsland:
    """Ops in torch, called as a compiled function is: results have memory of their own.

    ``layouts`` are those that the ops were traced with: an op may go by the strides of its arguments, and compiled code
    gives contiguous tensors. ``sizes`` are the names of the numbers that come before the tensors. Ops of a library,
    ``is_library``, could be compiled; those and others that are ``by_values`` go by no strides, and give no views.
    """

    function: Callable[..., Sequence[torch.Tensor]]
    layouts: Sequence[Layout]
    text: str
    sizes: Sequence[str] = ()
    is_library: bool = False
    by_values: bool = False
    seconds: float = field(default=0.0)
    _calls: int = field(default=0, init=False, repr=False)
    # What is called from the third time on.
    _run: Callable[..., Sequence[torch.Tensor]] | None = field(default=None, init=False, repr=False)

    def __call__(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The results, of numbers and then tensors; arguments are not changed. A step has tens of such calls, so that
        nothing is made here for each tensor that most do not need."""
        start = time.perf_counter()
        # Mostly called from an autograd function, where gradients are off.
        if torch.is_grad_enabled():
            with torch.no_grad():
                results = self._compute(values)
        else:
            results = self._compute(values)
        self.seconds += time.perf_counter() - start
        return results

    def _compute(self, values: Sequence[Any]) -> list[torch.Tensor]:
        numbers, tensors = values[: len(self.sizes)], values[len(self.sizes) :]
        if self.by_values:
            arguments = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        else:
            layouts = self._layouts_at(numbers) if numbers else self.layouts
            arguments = [_laid_out(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
        run = self._run or self._find_run(arguments)
        # Inside of a transform of torch.func a tensor has other strides than it says.
        given = (run if _transform() is None else self.function)(*numbers, *arguments)
        # What a library computes has memory of its own, which its several results may share.
        if self.by_values:
            return list(given) if len(given) == 1 else _separate(given, ())
        return _separate(given, {*tensors, *arguments})

    def _find_run(self, arguments: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
        """The function as it is, twice; then a shorter one, where sizes are fixed. What is called once or twice is not
        worth writing one."""
        self._calls += 1
        if self._calls > _CALLS_BEFORE and _transform() is None:
            graph = getattr(self.function, "graph", None)
            short = shorten(graph, arguments) if isinstance(graph, torch.fx.Graph) and not self.sizes else None
            # Nobody hooks the modules of islands.
            plain = self.function.forward if isinstance(self.function, torch.nn.Module) else self.function
            self._run = short or plain
        return self._run or self.function

    def _layouts_at(self, numbers: Sequence[int]) -> list[Layout]:
        sizes = dict(zip(self.sizes, numbers, strict=True))
        return [layout.at(sizes) for layout in self.layouts]


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``tensor`` with the strides and offset of ``layout``; itself, if it has them, or has memory of its own."""
    # What was traced as part of a larger tensor may begin anywhere: no op of an island looks at the rest of it.
    lies_so = tensor.stride() == layout.stride and tensor.storage_offset() in (0, layout.offset)
    if (lies_so and tensor.shape == layout.shape) or tensor.numel() <= 1:
        return tensor
    extent, (shape, stride, offset), once = _memory_of(layout)
    memory = torch.empty(extent, dtype=tensor.dtype, device=tensor.device)
    laid_out = memory.as_strided(shape, stride, offset)
    if once is None:
        laid_out.copy_(tensor)
    else:
        laid_out[once].copy_(tensor[once])
    return laid_out


@lru_cache(maxsize=1024)
def _memory_of(layout: Layout) -> tuple[int, tuple[tuple[int, ...], tuple[int, ...], int], tuple[slice, ...] | None]:
    """How many elements of memory a tensor of a layout takes, its shape, strides and offset, and the part of it that
    holds each element once, if it has axes that are expanded."""
    shape, stride, (offset,) = (numbers_of(sizes) for sizes in (layout.shape, layout.stride, (layout.offset,)))
    extent = 1 + offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    once = tuple(slice(None) if step else slice(1) for step in stride) if 0 in stride else None
    return extent, (shape, stride, offset), once


def _separate(results: Sequence[torch.Tensor], arguments: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The results, copied where they look at an argument or at one another: a later write to one must not show in
    what is kept of another."""
    taken = {t.untyped_storage().data_ptr() for t in arguments}
    separate = []
    for result in results:
        # A lazy conjugate or negative is no values yet.
        plain = result.resolve_conj().resolve_neg() if result.is_conj() or result.is_neg() else result
        storage = plain.untyped_storage().data_ptr()
        if storage in taken and plain.numel():
            plain = plain.clone()
            storage = plain.untyped_storage().data_ptr()
        taken.add(storage)
        separate.append(plain)
    return separate


@dataclass
class IslandTimes:
    """How long the functions of a program took, islands included, to tell each island's share."""

    islands: Sequence[EagerIsland]
    seconds: float = 0.0

    def timed(self, call: Callable[[Sequence[torch.Tensor]], Any]) -> Callable[[Sequence[torch.Tensor]], Any]:
        """``call``, whose time counts."""

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            start = time.perf_counter()
            try:
                return call(tensors)
            finally:
                self.seconds += time.perf_counter() - start

        return run

    def describe(self) -> list[dict[str, Any]]:
        """Lists what each island is and why, and its share of the time so far: None where nothing has run."""
        return [
            {"what": i.text, "share": round(i.seconds / self.seconds, 4) if self.seconds else None}
            for i in self.islands
        ]
