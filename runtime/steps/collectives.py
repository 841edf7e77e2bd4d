# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Collectives at run time: started as PyTorch's functional ops, and waited for; and whether all processes run the same
of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from retrograd.contract.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from retrograd.runtime.programs.errors import ExecutionError

_AGREED = "agreed"
# How often processes were asked, by what they were asked about.
counts: Counter[str] = Counter()
_OPS = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather_into_tensor", REDUCE_SCATTER: "reduce_scatter_tensor"}


def make_start(what: Collective) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """Makes the function that starts a collective on tensors, several of them as one; it gives a tensor for each, which
    holds nothing before it was waited for."""
    rest: list[Any] = [what.reduction] if what.reduction else []
    if what.collective != ALL_REDUCE:
        rest.append(what.size)
    rest.append(what.group)

    def start(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        name = _OPS[what.collective]
        with torch.no_grad(), _named_rank():
            if len(given) == 1:
                return [_find(name)(*given, *rest)]
            return list(_find(f"{name}_coalesced")(given, *rest))

    return start


def wait(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensor that was started, when its numbers are there: on a CUDA device for what is queued from here on."""
    with torch.no_grad(), _named_rank():
        return [_find("wait_tensor")(tensor) for tensor in tensors]


def find_disagreement(key: str, groups: Iterable[str], seconds: float, *, is_right: bool) -> str | None:
    """Ask all processes of these groups whether they run the same from here on, and tell them whether this one does;
    says which one does not, which is the same in all of them. They have to ask under the same ``key`` as often."""
    c10d: Any = torch.distributed.distributed_c10d
    members = {tuple(c10d.get_process_group_ranks(c10d._resolve_process_group(group))) for group in groups}
    if len(members) > 1:
        # Of a process that two groups share, each could hear something else.
        return "its collectives are of groups of other processes, which do not agree together"
    (ranks,) = members
    counts[key] += 1
    store, place = c10d._get_default_store(), f"retrograd/{key}/{counts[key]}/{'-'.join(map(str, ranks))}"
    store.set(f"{place}/{c10d.get_rank()}", str(int(is_right)))
    found = next(filter(None, (_hear(store, f"{place}/{rank}", rank, seconds) for rank in ranks)), _AGREED)
    # The first to know says it for all: one that came too late for another may have heard of no trouble.
    said = store.compare_set(f"{place}/said", "", found).decode()
    return None if said == _AGREED else said


def _hear(store: Any, place: str, rank: int, seconds: float) -> str | None:
    """Why a process does not run the same."""
    try:
        store.wait([place], timedelta(seconds=seconds))
    except RuntimeError:
        return f"process {rank} compiled nothing alike within {seconds:.0f} seconds"
    return None if store.get(place) == b"1" else f"process {rank} does not run it compiled"


@contextmanager
def _named_rank() -> Iterator[None]:
    """Says on an error which process it was raised in: all write to one terminal, and those that wait for one that
    failed fail as well."""
    try:
        yield
    except RuntimeError as error:
        if torch.distributed.is_initialized():
            rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
            error.add_note(f"in a collective of compiled code, in the process of rank {rank} of {count}")
        raise


def _find(name: str) -> Any:
    try:
        return getattr(torch.ops._c10d_functional, name)
    except AttributeError as error:
        raise ExecutionError(f"this PyTorch has no {name} of torch.distributed; install one that has") from error
