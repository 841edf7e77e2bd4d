# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keep the states of random generators that are not PyTorch's, and tell when one has drawn."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np


def generator_state(generator: Any) -> Any:
    """A generator's state, to be compared and given back."""
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def restore_generators(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give generators the states that they had, by name."""
    for name, generator in generators.items():
        if generator is random or isinstance(generator, random.Random):
            generator.setstate(states[name])
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = states[name]
        else:
            generator.set_state(states[name])


def save_generators(generators: Mapping[str, Any]) -> Callable[[], None]:
    """Gives what puts generators back to what they are now."""
    return partial(
        restore_generators, generators, {name: generator_state(generator) for name, generator in generators.items()}
    )


@contextlib.contextmanager
def generators_kept(generators: Mapping[str, Any]) -> Iterator[None]:
    """Give ``random``, ``numpy.random`` and these generators back as they were before the block."""
    undo = save_generators({"random": random, "numpy.random": np.random, **generators})
    try:
        yield
    finally:
        undo()


def is_same_state(a: Any, b: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same_state(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def is_generator(value: Any) -> bool:
    """Whether numbers are drawn from ``value``, and its state says so. (Those of ``SystemRandom`` have none.)"""
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


class Changes:
    """Tells when the states of generators change."""

    def __init__(self, generators: Mapping[str, Any]) -> None:
        self._generators = generators
        self._states = {name: generator_state(generator) for name, generator in generators.items()}

    def happened(self) -> bool:
        """Whether one has changed since this was last asked."""
        before, self._states = self._states, {name: generator_state(g) for name, g in self._generators.items()}
        return not all(is_same_state(self._states[name], before[name]) for name in before)
