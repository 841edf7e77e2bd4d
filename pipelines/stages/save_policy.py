# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads what the user wants saved, recomputed, saved in a narrower type or kept on the host: rules over ops, names and
dtypes, as a value.

A rule matches values of the forward. Rules are combined with ``|``; of those about recomputation the first that matches
a value holds, and so of those about its type.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

from retrograd.contract.attributes import Tag
from retrograd.contract.formats import FORMATS

ACTIONS = {"must-save": Tag.NEVER, "prefer-save": Tag.AVOID, "prefer-recompute": Tag.PREFER, "must-recompute": Tag.MUST}
# What goes to the host, and what does where a memory budget's plan asks for it.
OFFLOAD, MAY_OFFLOAD = "offload", "may-offload"
# A copy of less takes longer to start than it takes.
_LEAST_OFFLOADED = 1 << 20
_RESERVED = set(" \t\n;=\"'{}()[]<>,")


@dataclass(frozen=True)
class SaveRule:
    """One rule: what is done with values that match every pattern (``*`` and ``?`` as in file names).

    Attributes:
        action: one of ``ACTIONS``, a type of ``FORMATS`` to save in, ``OFFLOAD`` or ``MAY_OFFLOAD``.
        op: the op that gives the value, with or without namespace and overload: ``mm``, ``aten.sum*``.
        name: what ``retrograd.save`` called it, or the name of its node in the captured graph.
        dtype: ``float32`` or ``f32``, and so on.
        min_bytes: values of fewer bytes do not match.
    """

    action: str
    op: str = "*"
    name: str = "*"
    dtype: str = "*"
    min_bytes: int = 0

    def __post_init__(self) -> None:
        known = (*ACTIONS, *FORMATS, OFFLOAD, MAY_OFFLOAD)
        if self.action not in known:
            raise ValueError(f"save policy: {self.action!r} is none of {', '.join(known)}")
        for pattern in (self.op, self.name, self.dtype):
            if not isinstance(pattern, str) or not pattern or not _RESERVED.isdisjoint(pattern):
                raise ValueError(f"save policy: {pattern!r} is no pattern; write a name, with * for any characters")
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int) or self.min_bytes < 0:
            raise ValueError(f"save policy: min_bytes is {self.min_bytes!r}, expected a number of bytes from 0 on")

    def matches(self, op: str, names: tuple[str, ...], dtypes: tuple[str, ...], size: int) -> bool:
        """Whether the rule is about a value of ``size`` bytes that ``op`` (``torch.aten.mm``) gives."""
        full = op.removeprefix("torch.")
        short = full.partition(".")[2] or full
        spellings = (full, short, full.rpartition(".")[0], short.partition(".")[0])
        return (
            size >= self.min_bytes
            and any(fnmatchcase(s, self.op) for s in spellings)
            and any(fnmatchcase(n, self.name) for n in names)
            and any(fnmatchcase(d, self.dtype) for d in dtypes)
        )

    def __str__(self) -> str:
        given = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.action, *(f"{f.name.replace('_', '-')}={getattr(self, f.name)}" for f in given)])


@dataclass(frozen=True)
class SavePolicy:
    """Rules, in order of precedence; ``str()`` is what ``parse`` reads and ``bwd-apply-save-policy`` takes."""

    rules: tuple[SaveRule, ...] = ()

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return SavePolicy(self.rules + other.rules)

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules))

    @property
    def offloads(self) -> bool:
        """Whether a rule keeps residuals on the host, or lets a budget's plan do so."""
        return self.may_offload or any(rule.action == OFFLOAD for rule in self.rules)

    @property
    def may_offload(self) -> bool:
        """Whether a rule lets a budget's plan keep residuals on the host."""
        return any(rule.action == MAY_OFFLOAD for rule in self.rules)

    @classmethod
    def parse(cls, text: str) -> SavePolicy:
        """The policy that ``text`` says: ``must-save op=mm; bf16 min-bytes=1024``.

        Raises:
            ValueError: no rule; says which, and what is wrong with it.
        """
        return cls(tuple(_parse_rule(rule.split()) for rule in text.split(";") if rule.strip()))


def _parse_rule(words: list[str]) -> SaveRule:
    known = {f.name.replace("_", "-"): f.name for f in fields(SaveRule)[1:]}
    options: dict[str, str | int] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise ValueError(f"save policy: {word!r} is not one of {', '.join(f'{k}=...' for k in known)}")
        if key == "min-bytes" and not value.isdecimal():
            raise ValueError(f"save policy: min-bytes is {value!r}, expected a number of bytes from 0 on")
        options[known[key]] = int(value) if key == "min-bytes" else value
    return SaveRule(words[0], **options)  # type: ignore[arg-type]


def must_save(*, op: str = "*", name: str = "*", dtype: str = "*", min_bytes: int = 0) -> SavePolicy:
    """Save such values if the backward uses them, under every partition."""
    return SavePolicy((SaveRule("must-save", op, name, dtype, min_bytes),))


def must_recompute(*, op: str = "*", name: str = "*", dtype: str = "*", min_bytes: int = 0) -> SavePolicy:
    """Never save such values."""
    return SavePolicy((SaveRule("must-recompute", op, name, dtype, min_bytes),))


def prefer_save(*, op: str = "*", name: str = "*", dtype: str = "*", min_bytes: int = 0) -> SavePolicy:
    """Do not recompute such values, unless a memory budget cannot be met otherwise."""
    return SavePolicy((SaveRule("prefer-save", op, name, dtype, min_bytes),))


def prefer_recompute(*, op: str = "*", name: str = "*", dtype: str = "*", min_bytes: int = 0) -> SavePolicy:
    """Recompute such values; to a memory budget that costs nothing."""
    return SavePolicy((SaveRule("prefer-recompute", op, name, dtype, min_bytes),))


def saved_dtype(format: str, *, op: str = "*", name: str = "*", dtype: str = "*", min_bytes: int = 1024) -> SavePolicy:
    """Save such values, where they are saved, in a narrower type: the backward works with rounded ones.

    Args:
        format: ``bf16``, ``float8_e4m3`` with one scale for each tensor, or ``int8-block`` with one for every 64
            elements.
        op, name, dtype, min_bytes: which values, see :class:`SaveRule`.

    Raises:
        ValueError: no such type.
    """
    if format not in FORMATS:
        raise ValueError(f"saved_dtype: {format!r} is none of {', '.join(FORMATS)}")
    return SavePolicy((SaveRule(format, op, name, dtype, min_bytes),))


def offload(
    *,
    op: str = "*",
    name: str = "*",
    dtype: str = "*",
    min_bytes: int = _LEAST_OFFLOADED,
    within_budget: bool = False,
) -> SavePolicy:
    """Keep such values, where they are saved, in pinned memory of the host from the forward to the backward: they are
    copied there and back on a stream of their own, beside what is computed. For CUDA.

    What a model returns, its arguments and its parameters stay where they are: somebody else holds them. With
    ``within_budget`` a memory budget decides: they go where no plan that leaves them stays within it, or where they are
    expected to be moved in less time than it takes to compute as much again.
    """
    if not isinstance(within_budget, bool):
        raise TypeError(f"offload: within_budget is {within_budget!r}, expected True or False")
    return SavePolicy((SaveRule(MAY_OFFLOAD if within_budget else OFFLOAD, op, name, dtype, min_bytes),))
