# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a compilation is asked for, and the device that follows from where its tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from retrograd.pipelines.analysis.hook_schedule import POLICIES
from retrograd.pipelines.analysis.memory_size import parse_memory_size
from retrograd.pipelines.device_targets import KINDS
from retrograd.pipelines.kernels.choice import AUTO, OFF, check_kernels, with_kernels
from retrograd.pipelines.save_policy import SavePolicy
from retrograd.pipelines.targets import Target, UnknownTarget, cuda_architecture, find_target
from retrograd.runtime.placement import choose_device, choose_uri

FALLBACKS = ("island", "error")
# Of ``verify``: the first call of each compiled function checks itself.
FIRST = "first"
PARTITIONS = ("default", "min-cut", "budget")
# What people write for True and False.
_FLAGS = {"yes": True, "on": True, "true": True, "1": True, "no": False, "off": False, "false": False, "0": False}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """What a compilation is asked for; refused where there is no such thing. ``device`` is where its tensors are."""

    target: str | Sequence[str] | None = None
    partition: str = "min-cut"
    cache: bool = True
    memory_budget: int | float | str | None = None
    save_policy: SavePolicy | None = None
    fallback: str = "island"
    kernels: str | Sequence[str] = AUTO
    verify: bool | str = FIRST
    device: torch.device = _CPU

    @property
    def policy(self) -> SavePolicy:
        """The rules on what to save; none where none were given."""
        return self.save_policy or SavePolicy()

    def __post_init__(self) -> None:
        # Which kernels there are for it is seen when the device is known.
        target_on(self.device, self.target, OFF)
        check_kernels(self.kernels)
        check_flag("cache", self.cache)
        if self.verify != FIRST:
            check_flag("verify", self.verify, FIRST)
        if not isinstance(self.save_policy, SavePolicy | None):
            raise ValueError(f"save_policy {self.save_policy!r} is no SavePolicy; make one as retrograd.must_save(...)")
        check_choice("fallback", self.fallback, FALLBACKS)
        check_choice("partition", self.partition, PARTITIONS)
        if self.partition == "budget":
            parse_memory_size(self.memory_budget)
        elif self.memory_budget is not None:
            raise ValueError(f"partition '{self.partition}' takes no memory_budget; use partition='budget'")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """The options that ``torch.compile`` was given.

        Raises:
            ValueError: there is no such option; names those that there are.
        """
        known = [field.name for field in fields(cls) if field.name != "device"]
        for name in given:
            check_choice("option", name, known)
        return cls(**given)

    def on(self, tensors: Sequence[torch.Tensor]) -> Options:
        """The same for a model of these parameters and arguments: CUDA where any of them is."""
        return replace(self, device=next((t.device for t in tensors if t.is_cuda), self.device))

    def find_target(self) -> Target:
        """The target asked for, else that of the tensors' device."""
        return target_on(self.device, self.target, self.kernels)

    def allowed_fallback(self) -> str:
        """The fallback, where there can be islands: code for HIP does not run here, and no file holds an island."""
        runs = all(name.partition(":")[0] != "hip" for name in self.find_target().names)
        return self.fallback if runs else "error"

    def uri(self) -> str:
        """IREE's name of the device to run on: that of the tensors, if there is code for it."""
        names = self.find_target().names
        return choose_uri(names, choose_device(names, [self.device]))


@dataclass(frozen=True)
class BackwardOptions:
    """What `retrograd.enable` was asked for."""

    target: str | None
    hook_schedule: str
    cache: bool
    background: bool = False
    fallback: str = "island"
    kernels: str | Sequence[str] = AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.target, str | None) or len(target_on(_CPU, self.target).devices) > 1:
            raise UnknownTarget(
                f"target {self.target!r}: a backward runs on one device; write one of {', '.join(KINDS)}"
            )
        check_kernels(self.kernels)
        # Options are compared and hashed.
        object.__setattr__(self, "kernels", self.kernels if isinstance(self.kernels, str) else tuple(self.kernels))
        check_flag("cache", self.cache)
        check_flag("background", self.background)
        check_choice("fallback", self.fallback, FALLBACKS)
        check_choice("hook_schedule", self.hook_schedule, [*POLICIES])


def check_choice(what: str, given: object, known: Sequence[str]) -> None:
    """Raise ``ValueError`` where ``given`` is none of ``known``; names those, and the one that is most alike."""
    if given not in known:
        similar = "".join(f"; did you mean '{other}'?" for other in get_close_matches(str(given), known, 1))
        raise ValueError(f"{what} {given!r} is not one of {', '.join(known)}{similar}")


def check_flag(what: str, given: object, *others: str) -> None:
    """Raise ``TypeError`` where ``given`` is neither True nor False: any text, ``"no"`` too, would count as True.
    ``others`` is what it may be besides."""
    if not isinstance(given, bool):
        meant = _FLAGS.get(str(given).lower())
        hint = "" if meant is None else f"; did you mean {what}={meant}?"
        choices = ", ".join([*map(repr, others), "True"])
        raise TypeError(f"{what} is {choices} or False, got {given!r}{hint}")


def target_on(device: torch.device, target: str | Sequence[str] | None, kernels: str | Sequence[str] = AUTO) -> Target:
    """The target asked for, else that of tensors on ``device``, with the ``kernels`` asked for; ``cuda`` is the kind of
    card that it is."""
    if device.type != "cuda":
        return with_kernels(find_target("cpu" if target is None else target), kernels)
    architecture = cuda_architecture(*torch.cuda.get_device_capability(device))
    return with_kernels(find_target("cuda" if target is None else target, cuda_architecture=architecture), kernels)


def tensors_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[torch.Tensor]:
    """Parameters, buffers and arguments."""
    owner = getattr(model, "__self__", model)
    state = [*owner.parameters(), *owner.buffers()] if isinstance(owner, torch.nn.Module) else [model]
    return [t for t in tree_leaves((state, args, kwargs)) if isinstance(t, torch.Tensor)]
