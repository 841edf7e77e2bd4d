# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random numbers as a pure function of a seed, so that a backward can work them out again.

Two ops of a torch library. ``retrograd::draw_seed() -> int64[2]`` takes a seed from torch's default generator, and
``retrograd::uniform(seed, stream, sizes) -> float32`` gives numbers in [0, 1): multiples of 2**-24, a function of
(seed, stream, place) and nothing else. The kernel here and what ``bwd-functionalize-rng`` emits give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from retrograd.contract.seeds import BEHIND_MOST, LEAST, WORDS
from retrograd.frontend.layers.own_ops import define_op

_MASK = 0xFFFFFFFF
# The least of which no test of TestU01 finds anything (Salmon et al., table 2); PyTorch's attention draws with as many.
_ROUNDS, _WORDS = 7, 4
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, ...]


def draw_seed() -> Tensor:
    """A seed, int64 of shape (2,), from torch's default generator, which ``torch.manual_seed`` sets."""
    return torch.randint(LEAST, BEHIND_MOST, (WORDS,), dtype=torch.int64, device="cpu")


def uniform(seed: Tensor, stream: int, sizes: Sequence[int]) -> Tensor:
    """Numbers in [0, 1), float32 of shape ``sizes``: the upper 24 bits of words of Philox4x32-7 over 2**24. Element
    ``i`` in row-major order is word ``i % 4`` for the counter ``(i // 4, stream, seed[1])`` and the key ``seed[0]``."""
    return draw_part(seed, stream, 0, prod(sizes)).reshape(list(sizes))


def draw_part(seed: Tensor, stream: int, first: int, count: int) -> Tensor:
    """Draw some numbers of a stream, from element number ``first`` on."""
    start = first // _WORDS
    fours = torch.arange(start, -(-(first + count) // _WORDS), dtype=torch.int64, device=seed.device) & _MASK
    words = [w for number in seed for w in (number & _MASK, (number >> 32) & _MASK)]
    drawn = philox((fours, torch.tensor(stream, device=seed.device), words[2], words[3]), (words[0], words[1]))
    numbers = torch.stack([word.expand_as(fours) for word in drawn], -1).flatten()[first - _WORDS * start :][:count]
    return (numbers >> 8).to(torch.float32) * 2.0**-24


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-7: four words from a counter of four and a key of two, each in an int64 tensor, lowest word first.

    Source: Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011.
    """
    words, keys = counter, key
    for number in range(_ROUNDS):
        if number:
            keys = tuple((k + w) & _MASK for k, w in zip(keys, _INCREMENTS, strict=True))
        # A product of two words may pass 2**63 and wrap; its bits are right all the same.
        first, second = (m * w for m, w in zip(_MULTIPLIERS, (words[0], words[2]), strict=True))
        words = (
            (second >> 32 & _MASK) ^ words[1] ^ keys[0],
            second & _MASK,
            (first >> 32 & _MASK) ^ words[3] ^ keys[1],
            first & _MASK,
        )
    return words


def _fake_seed() -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


def _fake_uniform(seed: Tensor, stream: int, sizes: Sequence[int]) -> Tensor:
    return seed.new_empty(sizes, dtype=torch.float32)


DRAW_SEED = define_op("draw_seed() -> Tensor", draw_seed, _fake_seed, tags=[torch.Tag.nondeterministic_seeded])
UNIFORM = define_op("uniform(Tensor seed, int stream, SymInt[] sizes) -> Tensor", uniform, _fake_uniform)


def find_seed(graph: torch.fx.Graph) -> torch.fx.Node | None:
    """The node that draws the seed of a graph, if it has random ops."""
    nodes = graph.find_nodes(op="call_function", target=DRAW_SEED)
    return nodes[0] if nodes else None
