# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which axes of a view come from which axes of what it looks at, where sizes are expressions.

Two lists of axes belong together if their products are one polynomial over the sizes, so that they are equal for every
number that a size may have, and not for those at hand only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TypeAlias

from retrograd.contract.sizes import Size, evaluate_size, format_size

# Coefficients of products of symbols; a product is its symbols in order, each as often as it occurs.
Polynomial: TypeAlias = "dict[tuple[str, ...], int]"


@dataclass(frozen=True)
class AxisGroup:
    """Axes ``source`` of a tensor, one after another, that become the axes ``result`` of its view."""

    source: tuple[int, ...]
    result: tuple[int, ...]


def find_axis_groups(source: Sequence[Size], result: Sequence[Size], hints: Mapping[str, int]) -> list[AxisGroup]:
    """The finest groups of axes of a view: as many elements in each, whatever the sizes are.

    Where none are found to be equal, all axes are one group: a view has as many elements as what it looks at. ``hints``
    only guide the search. Both shapes have an axis at least.
    """
    groups: list[AxisGroup] = []
    i = j = 0
    while i < len(source) and j < len(result):
        first = (i, j)
        i, j = i + 1, j + 1
        while not _is_equal(source[first[0] : i], result[first[1] : j]):
            ours, theirs = _count(source[first[0] : i], hints), _count(result[first[1] : j], hints)
            take_source, take_result = ours <= theirs and i < len(source), theirs <= ours and j < len(result)
            if not (take_source or take_result):
                return [_all(source, result)]
            i, j = i + take_source, j + take_result
        groups.append(AxisGroup(tuple(range(first[0], i)), tuple(range(first[1], j))))
    # What is left can only be axes of size 1.
    if any(size != 1 for size in (*source[i:], *result[j:])):
        return [_all(source, result)]
    last = groups[-1]
    rest = AxisGroup((*last.source, *range(i, len(source))), (*last.result, *range(j, len(result))))
    return [*groups[:-1], rest]


def to_polynomial(size: Size) -> Polynomial:
    """An expression as a polynomial; of operations other than sums and products, each is a symbol of its own."""
    if isinstance(size, int):
        return {(): size} if size else {}
    if isinstance(size, str):
        return {(size,): 1}
    operator, left, right = size
    if operator not in ("+", "-", "*"):
        return {(format_size(size),): 1}
    a, b = to_polynomial(left), to_polynomial(right)
    if operator == "*":
        return _multiply(a, b)
    total = Counter(a)
    for term, factor in b.items():
        total[term] += factor if operator == "+" else -factor
    return {term: factor for term, factor in total.items() if factor}


def _multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    total: Counter[tuple[str, ...]] = Counter()
    for left, m in a.items():
        for right, n in b.items():
            total[tuple(sorted((*left, *right)))] += m * n
    return {term: factor for term, factor in total.items() if factor}


def _is_equal(a: Sequence[Size], b: Sequence[Size]) -> bool:
    one: Polynomial = {(): 1}
    return reduce(_multiply, map(to_polynomial, a), one) == reduce(_multiply, map(to_polynomial, b), one)


def _count(shape: Sequence[Size], hints: Mapping[str, int]) -> int:
    return prod(evaluate_size(size, hints) for size in shape)


def _all(source: Sequence[Size], result: Sequence[Size]) -> AxisGroup:
    return AxisGroup(tuple(range(len(source))), tuple(range(len(result))))
