# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads the options of a compilation, and the device that follows from where its tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from retrograd.contract.collectives import Collectives
from retrograd.contract.errors import did_you_mean
from retrograd.contract.partitions import BUDGET, FREE, MIN_CUT, PARTITIONS
from retrograd.frontend.libraries.ops import NO_LIBRARIES, WORTH, WORTH_ON_CPU, Libraries
from retrograd.frontend.preparation.graph_memory import available_bytes
from retrograd.pipelines.analysis.hooks.hook_schedule import POLICIES, HookSchedule
from retrograd.pipelines.analysis.partition.memory_size import parse_budget
from retrograd.pipelines.devices.device_targets import KINDS
from retrograd.pipelines.devices.targets import Target, UnknownTarget, cuda_architecture, find_target, is_intel
from retrograd.pipelines.kernels.choice import AUTO, LIBRARY, OFF, check_kernels, with_kernels
from retrograd.pipelines.stages.save_policy import SavePolicy
from retrograd.runtime.programs.placement import choose_device, choose_uri
from retrograd.tuning import Tiles, Tuning, read_tiles

FALLBACKS = ("island", "error")
# Of ``verify``: the first call of each compiled function checks itself.
FIRST = "first"
# What people write for True and False.
_FLAGS = {"yes": True, "on": True, "true": True, "1": True, "no": False, "off": False, "false": False, "0": False}
_CPU = torch.device("cpu")
_NO_RULES = SavePolicy()
# The devices whose residuals can be on the host meanwhile, by the kinds of the target.
_OFFLOADING = (("cuda",),)
# Bytes that cutting functions into stages has to save: where it is asked for, and where nothing is said. Each stage
# costs some 10 us, and what its border holds apart is written and read.
_ASKED_GAIN, _AUTO_GAIN = 1 << 20, 32 << 20


@dataclass(frozen=True)
class Options:
    """How one graph is compiled, for tensors on ``device``: read from what the user gave, which is not read again.

    ``budget`` is bytes (int) or a fraction (float) of eager's peak, for ``partition="budget"``; ``policy``
    are the rules on what to save, and ``fallback`` is ``error`` where there can be no islands. ``needs_device`` says
    that the device has to be there when the program is loaded; ``cut_gain`` how many bytes it has to save to cut
    functions into stages, and None that they stay whole, and ``budget_cut_gains`` those of a budget's plans, of any and
    of that of lowest peak; ``cuda_graphs`` that each half is replayed as a CUDA graph, or
    with ``auto`` that it is where the host holds the device back; ``tuning`` where tiles of kernels come from, where it
    is not the table that comes with them; ``collectives`` how those of the graph are joined and moved, if they are.
    """

    target: Target
    device: torch.device
    partition: str = MIN_CUT
    budget: int | float | None = None
    policy: SavePolicy = _NO_RULES
    fallback: str = "island"
    cache: bool = True
    verify: bool | str = FIRST
    hook_schedule: HookSchedule = "eager-order"
    cut_gain: int | None = None
    budget_cut_gains: tuple[int, int] | None = None
    libraries: Libraries = NO_LIBRARIES
    cuda_graphs: bool | str = False
    tuning: Tuning | None = None
    collectives: Collectives | None = None
    # Compiled for a device that is not here, a program can be saved; one that nobody saves can do nothing.
    needs_device: bool = False

    @property
    def loops(self) -> bool:
        """Whether recurrent layers become loops: in code for a CPU alone, and not under a budget, which chooses of the
        values of each step what to keep, and finds one value of all steps in a loop."""
        return self.target.kinds == ("cpu",) and self.partition != BUDGET

    @property
    def uri(self) -> str:
        """IREE's name of the device to run on: that of the tensors, if there is code for it."""
        return choose_uri(self.target.names, choose_device(self.target.names, [self.device]))


@dataclass(frozen=True)
class Request:
    """Holds the options given to `compile_backward` or `torch.compile`; refuses those that there are none of."""

    target: str | Sequence[str] | None = None
    partition: str = MIN_CUT
    cache: bool = True
    memory_budget: int | float | str | None = None
    save_policy: SavePolicy | None = None
    fallback: str = "island"
    kernels: str | Sequence[str] = AUTO
    tiles: Tiles = AUTO
    verify: bool | str = FIRST
    free_early: bool | str = AUTO
    cuda_graphs: bool | str = False
    collectives: Collectives | None = None
    budget: int | float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # Which kernels there are for it is seen when the device is known.
        target_on(_CPU, self.target, OFF)
        check_kernels(self.kernels)
        check_flag("cache", self.cache)
        if self.free_early != AUTO:
            check_flag("free_early", self.free_early, AUTO)
        if self.cuda_graphs != AUTO:
            check_flag("cuda_graphs", self.cuda_graphs, AUTO)
        if self.verify != FIRST:
            check_flag("verify", self.verify, FIRST)
        check_collectives(self.collectives)
        if not isinstance(self.save_policy, SavePolicy | None):
            raise ValueError(f"save_policy {self.save_policy!r} is no SavePolicy; make one as retrograd.must_save(...)")
        if self.offloads and self.cuda_graphs is True:
            raise ValueError(
                "cuda_graphs: a graph keeps the memory of its residuals, so that retrograd.offload frees none; "
                "leave out one of the two"
            )
        check_choice("fallback", self.fallback, FALLBACKS)
        check_choice("partition", self.partition, PARTITIONS)
        if self.save_policy is not None and self.save_policy.may_offload and self.partition != BUDGET:
            raise ValueError(
                "offload(within_budget=True) is for partition='budget', whose plan decides; give that, or leave "
                "within_budget out"
            )
        if self.partition == BUDGET:
            object.__setattr__(self, "budget", parse_budget(self.memory_budget))
        elif self.memory_budget is not None:
            raise ValueError(f"partition '{self.partition}' takes no memory_budget; use partition='budget'")

    @property
    def offloads(self) -> bool:
        """Whether residuals are to go to the host."""
        return self.save_policy is not None and self.save_policy.offloads

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Request:
        """The options that ``torch.compile`` was given.

        Raises:
            ValueError: there is no such option; names those that there are.
        """
        known = [field.name for field in fields(cls) if field.init]
        for name in given:
            check_choice("option", name, known)
        return cls(**given)

    def on(self, tensors: Sequence[torch.Tensor]) -> Options:
        """The options for a model of these parameters and arguments: on CUDA where any of them is.

        Raises:
            UnknownTarget, ValueError: the target, or kernels asked for by name, cannot be had on their device; or not
                with ``free_early``.
        """
        device = next((t.device for t in tensors if t.is_cuda), _CPU)
        target = replace(target_on(device, self.target, self.kernels), is_compared=self.verify is not False)
        if self.free_early is True and "vulkan" in target.kinds:
            raise ValueError(
                "free_early: stages hand tensors over in torch's memory, which Vulkan does not reach; leave it out"
            )
        if self.offloads and target.kinds not in _OFFLOADING:
            raise ValueError(
                f"save_policy: retrograd.offload keeps residuals of a CUDA device on its host, and the target is "
                f"'{target.name}'; leave it out, or compile for 'cuda' alone"
            )
        # Code for HIP does not run here, and no file holds an island.
        runs = "hip" not in target.kinds
        return Options(
            target,
            device,
            partition=self.partition,
            budget=_free_on(device) if self.memory_budget == FREE else self.budget,
            policy=self.save_policy or _NO_RULES,
            fallback=self.fallback if runs else "error",
            cache=self.cache,
            verify=self.verify,
            cut_gain=self._cut_gain(target) if self.partition != BUDGET else None,
            budget_cut_gains=self._budget_cut_gains(target),
            libraries=self._libraries(target),
            # A graph keeps the memory of its residuals.
            cuda_graphs=False if self.offloads else self.cuda_graphs,
            tuning=read_tiles(self.tiles, target, device, is_kept=self.cache),
            collectives=self.collectives,
        )

    def _cut_gain(self, target: Target) -> int | None:
        # A function in one piece holds all residuals, wherever they go then and come from.
        if self.free_early is True or (self.free_early == AUTO and self.offloads):
            return _ASKED_GAIN
        # On a GPU what a border parts from a product can be a kernel that takes longer than all the product: it is for
        # those to ask who want the memory.
        return _AUTO_GAIN if self.free_early == AUTO and target.kinds == ("cpu",) else None

    def _budget_cut_gains(self, target: Target) -> tuple[int, int] | None:
        """Bytes that it has to save to cut functions of a budget's plans: of any, and of that of lowest peak."""
        gain = self._cut_gain(target) if self.partition == BUDGET else None
        return None if gain is None else (gain, _ASKED_GAIN)

    def _libraries(self, target: Target) -> Libraries:
        """Says what libraries compute, and which kernels of our own there are. Nobody knows beforehand how much memory
        libraries work in: a budget has them where they are asked for by name alone."""
        is_kept = self.partition == BUDGET and self.kernels == AUTO
        found = NO_LIBRARIES if is_kept else find_libraries(target, self.kernels)
        # Sums of a batch norm go down columns there, for which IREE's code takes longer than what cuDNN spares.
        has_convolutions = found.cuda is not None or "convolutions" in target.kernels
        channels_last = has_convolutions and "columns" in target.kernels
        return replace(found, kernels=target.kernels, channels_last=channels_last)


@dataclass(frozen=True)
class BackwardRequest:
    """Holds the options given to `retrograd.enable`; refuses those that there are none of."""

    target: str | None
    hook_schedule: HookSchedule
    cache: bool
    background: bool = False
    fallback: str = "island"
    kernels: str | Sequence[str] = AUTO
    collectives: Collectives | None = None
    # Not what is compiled.
    only_if_faster: bool = field(default=False, compare=False)

    @property
    def leaves_slow(self) -> bool:
        """Whether what takes longer compiled is left to PyTorch's engine, which calls hooks in eager's order alone."""
        return self.only_if_faster and self.hook_schedule == "eager-order" and self.collectives is None

    # Asked for by each backward.
    @cached_property
    def libraries(self) -> Libraries:
        """Says what PyTorch's libraries compute, on any device."""
        kinds = ["cpu", "cuda"] if self.target is None else [self.target]
        found = [find_libraries(find_target(kind), self.kernels) for kind in kinds]
        on_cpu = found[0].cpu
        return Libraries(on_cpu, found[-1].cuda, found[0].products, eager_forward=on_cpu is not None)

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
        check_flag("only_if_faster", self.only_if_faster)
        check_collectives(self.collectives)
        check_choice("fallback", self.fallback, FALLBACKS)
        check_choice("hook_schedule", self.hook_schedule, [*POLICIES])
        if self.background and self.collectives is not None:
            message = "collectives: processes that compile in the background do not run the same at a step"
            raise ValueError(f"{message}; leave out background, or collectives")

    def on(self, device: torch.device) -> Options:
        """The options for a backward of tensors on ``device``. What is compiled beside the training is the same
        program, and nothing is compared at a first call: a backward is rehearsed when it is compiled.

        Raises:
            ValueError: kernels asked for by name cannot be had there.
        """
        return Options(
            replace(target_on(device, self.target, self.kernels), is_compared=True),
            device,
            fallback=self.fallback,
            cache=self.cache,
            verify=False,
            hook_schedule=self.hook_schedule,
            collectives=self.collectives,
            needs_device=True,
        )


def _free_on(device: torch.device) -> int:
    free = available_bytes(device)
    if free is None:
        raise ValueError(f"memory_budget 'free': how much memory is free on {device} is not known; give bytes")
    return free


def check_choice(what: str, given: object, known: Sequence[str]) -> None:
    """Raise ``ValueError`` where ``given`` is none of ``known``; names those, and the one that is most alike."""
    if given not in known:
        raise ValueError(f"{what} {given!r} is not one of {', '.join(known)}{did_you_mean(given, known)}")


def check_collectives(given: object) -> None:
    """Raise ``TypeError`` where ``given`` says nothing about collectives."""
    if not isinstance(given, Collectives | None):
        raise TypeError(f"collectives is a retrograd.Collectives or None, got {given!r}")


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


def find_libraries(target: Target, kernels: str | Sequence[str]) -> Libraries:
    """Says what PyTorch's libraries compute of a program for a target: what they are faster at where that repays the
    call, unless ``kernels`` says otherwise. Code for several devices is compiled whole."""
    is_asked = LIBRARY in check_kernels(kernels)
    if not is_asked and kernels != AUTO:
        return NO_LIBRARIES
    if target.kinds == ("cuda",):
        return Libraries(cuda=0 if is_asked else WORTH)
    if target.kinds != ("cpu",):
        return NO_LIBRARIES
    return (
        Libraries(cpu=0)
        if is_asked
        else Libraries(cpu=WORTH_ON_CPU, products=is_intel() and torch.backends.mkl.is_available())
    )


def tensors_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[torch.Tensor]:
    """Parameters, buffers and arguments."""
    owner = getattr(model, "__self__", model)
    state = [*owner.parameters(), *owner.buffers()] if isinstance(owner, torch.nn.Module) else [model]
    return [t for t in tree_leaves((state, args, kwargs)) if isinstance(t, torch.Tensor)]
