# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Why a backward was compiled again: what is other than in the most alike of those compiled before, in words."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from retrograd.frontend.autograd.steps.step_key import StepKey
from retrograd.frontend.python.live_objects import find_alive
from retrograd.frontend.python.user_lines import find_user_line

# Names of parameters, by identity and while their memory is there; None for those that were part of no module when they
# were looked for, which takes a look at every object there is. Nothing refers to the parameters themselves, not weakly
# either: torch.utils.swap_tensors would refuse them.
_NAMES: dict[int, tuple[weakref.ref[torch.UntypedStorage], str | None]] = {}
# Of many tensors that changed, the first few tell it.
MOST_NAMED = 3


@dataclass(frozen=True)
class Situation:
    """Describes what a backward was compiled for, to explain compilations.

    ``line`` is that of the user's code that ran it. ``nodes`` are in the order of execution, ``hooks`` as their authors
    know them, and ``inlined`` identifies those that are part of it. ``tensors`` have a name, a shape and a dtype;
    ``gradients`` of them are gradients that are there already. ``returned`` gradients are results, as of
    ``torch.autograd.grad``. ``numbers`` say of which node they are.
    """

    line: str
    nodes: tuple[str, ...]
    hooks: tuple[str, ...]
    inlined: Hashable
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    gradients: int
    returned: int
    sizes: tuple[int, ...]
    numbers: tuple[tuple[str, int | float], ...]
    options: Hashable
    shared: Hashable = ()


def describe_situation(
    nodes: Sequence[str],
    hooks: Sequence[str],
    returned: int,
    numbers: Sequence[tuple[str, int | float]],
    inputs: Sequence[torch.Tensor],
    key: StepKey,
) -> Situation:
    """Describe what a capture is compiled for at a step of this key."""
    names = name_tensors(inputs)
    gradients = {id(t.grad) for t in inputs if t.is_leaf and t.requires_grad}
    return Situation(
        find_user_line(),
        tuple(nodes),
        tuple(hooks),
        key.inlined,
        tuple([(name, tuple(t.shape), t.dtype) for name, t in zip(names, inputs, strict=True)]),
        sum(id(t) in gradients for t in inputs),
        returned,
        key.sizes,
        (*[("a function in C++", scalar) for scalar in key.scalars], *numbers),
        key.options,
        key.shared,
    )


def explain_difference(now: Situation, earlier: Sequence[Situation]) -> tuple[str, ...]:
    """Explain how ``now`` differs from the most alike of the earlier ones, of the same line if there are any."""
    if not earlier:
        return ("it is the first",)
    same_line = [before for before in earlier if before.line == now.line]
    closest = max(same_line or earlier, key=lambda before: _likeness(before, now))
    differences = tuple(_differences(closest, now))
    if not differences:
        where = "one before" if same_line or not closest.line else f"that at {closest.line}"
        return (f"it is like {where}, and PyTorch traced it anew",)
    if not same_line:
        return ("it is the first at this line",)
    if _likeness(closest, now)[0] < 0.5:
        return ("nothing like it ran at this line before",)
    return differences


def _likeness(before: Situation, now: Situation) -> tuple[float, int, int, int, int]:
    """The nodes first, then hooks, options, tensors and numbers."""
    alike = SequenceMatcher(None, before.nodes, now.nodes, autojunk=False).ratio()
    tensors = sum(a == b for a, b in zip(before.tensors, now.tensors, strict=False))
    return alike, before.hooks == now.hooks, before.options == now.options, tensors, before.numbers == now.numbers


def _differences(before: Situation, now: Situation) -> Iterator[str]:
    if before.options != now.options:
        yield f"options are {now.options}"
    if before.nodes != now.nodes:
        # The tensors and numbers of other nodes are others.
        yield from _sequence_differences("node", before.nodes, now.nodes)
        return
    yield from _sequence_differences("hook", before.hooks, now.hooks)
    if before.hooks == now.hooks and before.inlined != now.inlined:
        yield "an inlined hook is another one, or reads another number or tensor than before"
    if before.returned != now.returned:
        yield f"it returns {_count(now.returned)} ({before.returned or 'none'} before)"
    elif before.gradients != now.gradients:
        there = f"{_count(now.gradients)} that {_are(now.gradients)} there"
        yield f"it adds to {there} ({before.gradients or 'none'} before)"
    if before.tensors != now.tensors and len(before.tensors) == len(now.tensors):
        # Sizes and numbers follow.
        yield from _tensor_differences(before, now)
        return
    sizes = [("a size", a, b) for a, b in zip(before.sizes, now.sizes, strict=False)]
    numbers = [(f"a number of {n}", a, b) for (_, a), (n, b) in zip(before.numbers, now.numbers, strict=False)]
    changed = dict.fromkeys(f"{what} is {b} instead of {a}" for what, a, b in (*sizes, *numbers) if a != b)
    yield from list(changed)[:MOST_NAMED]
    if not changed and before.gradients == now.gradients and before.shared != now.shared:
        yield "tensors share or repeat memory that did not, or the other way round"


def _count(gradients: int) -> str:
    return f"{gradients or 'no'} gradient{'' if gradients == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _sequence_differences(what: str, before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    changes = [c for c in SequenceMatcher(None, before, now, autojunk=False).get_opcodes() if c[0] != "equal"]
    for tag, a, b, c, d in changes[:MOST_NAMED]:
        named = _name_some(what, before[a:b] if tag == "delete" else now[c:d])
        if tag == "replace":
            yield f"{named} {_are(d - c)} where {_join(before[a:b])} {'was' if b - a == 1 else 'were'}"
        else:
            yield f"{named} {_are(b - a)} gone" if tag == "delete" else f"{named} {_are(d - c)} new"
    if len(changes) > MOST_NAMED:
        yield f"and {len(changes) - MOST_NAMED} more such changes"


def _name_some(what: str, names: Sequence[str]) -> str:
    return f"{what}{'s' if len(names) > 1 else ''} {_join(names)}"


def _join(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _tensor_differences(before: Situation, now: Situation) -> Iterator[str]:
    found = []
    for (_, shape, dtype), (name, new_shape, new_dtype) in zip(before.tensors, now.tensors, strict=True):
        if shape != new_shape:
            found.append(f"{name} has shape {list(new_shape)} instead of {list(shape)}")
        elif dtype != new_dtype:
            found.append(f"{name} is {new_dtype} instead of {dtype}")
    yield from found[:MOST_NAMED]


def name_tensors(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Parameters by the path in the outermost module that they are part of, other tensors by their place."""
    leaves = {id(t): t for t in tensors if t.is_leaf and t.requires_grad}
    names = {key: _NAMES[key][1] for key, t in leaves.items() if _is_known(t)}
    if new := leaves.keys() - names.keys():
        found = _parameter_names(new)
        names |= {key: found.get(key) for key in new}
        for key in list(_NAMES):
            if _NAMES[key][0]() is None:
                del _NAMES[key]
        kept = {key: t.untyped_storage() for key, t in leaves.items() if key in new and torch._C._has_storage(t)}
        _NAMES.update({key: (weakref.ref(storage), names[key]) for key, storage in kept.items()})
    return [names.get(id(t)) or f"saved tensor {number}" for number, t in enumerate(tensors)]


def _is_known(tensor: torch.Tensor) -> bool:
    known = _NAMES.get(id(tensor))
    return known is not None and torch._C._has_storage(tensor) and known[0]() is tensor.untyped_storage()


def _parameter_names(wanted: Set[int]) -> Mapping[int, str]:
    names: dict[int, str] = {}
    depths: dict[int, int] = {}
    for module in find_alive(torch.nn.Module):
        if "_parameters" not in vars(module):
            continue
        for path, parameter in module.named_parameters():
            depth = path.count(".")
            if id(parameter) in wanted and depth >= depths.get(id(parameter), 0):
                names[id(parameter)] = f"parameter {path} of {type(module).__name__}"
                depths[id(parameter)] = depth
    return names
