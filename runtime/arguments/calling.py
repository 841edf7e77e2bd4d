# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The user's arguments to tensors and back, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.contract.errors import RetrogradError
from retrograd.contract.signature import CONSTANT, Signature, TensorType
from retrograd.contract.sizes import Size, format_size
from retrograd.runtime.arguments.index_bounds import IndexCheck
from retrograd.runtime.arguments.repeated_memory import repeats
from retrograd.runtime.arguments.size_checks import SizeChecks, SizeError
from retrograd.runtime.programs.known_forms import KnownForms


class ArgumentError(RetrogradError, TypeError):
    """An argument that the compiled program does not take; the message names it and what was expected."""


class OtherProgramError(ArgumentError):
    """The arguments need another program of the same model; nothing has run."""


class OtherAnswersError(OtherProgramError):
    """The model asks about its arguments' contents, and the answer is another one than when it was compiled."""


class OtherStateError(OtherProgramError):
    """An attribute that the model sets holds something else than when the program was compiled, or a module is in
    another mode."""


class MissingGradientError(OtherProgramError):
    """A tensor requires grad now, and did not when the program was compiled, which has no gradient of it."""


class UnaskedGradientError(OtherProgramError):
    """A tensor requires no grad now, and did when the program was compiled, whose hooks would see a gradient."""


@dataclass(frozen=True)
class ExpectedTensor:
    """Describes what an argument must be. ``requires_grad`` is what it was compiled with: a gradient that was not
    compiled is not given. Hooks see whether it is, where the program ``has_hooks``."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    has_hooks: bool = False

    @classmethod
    def of(
        cls, name: str, type_: TensorType, device: torch.device | None = None, has_hooks: bool = False
    ) -> ExpectedTensor:
        """A tensor of a signature; it is to be on ``device``, or where it was when compiled."""
        place = str(device) if device is not None else type_.device
        return cls(name, type_.shape, getattr(torch, type_.dtype), place, type_.requires_grad, has_hooks)

    def check(self, value: Any) -> None:
        """Raise :class:`ArgumentError` where ``value`` is not such a tensor."""
        # Most are, and a call asks for each of hundreds of parameters.
        if (
            (type(value) is torch.nn.Parameter or type(value) is torch.Tensor)
            and value.layout is torch.strided
            and not value.is_nested
            and value.dtype is self.dtype
            and value.shape == self.shape
            and self.device in _names_of(value.device)
            and (self.requires_grad or not value.requires_grad)
            and (not self.has_hooks or value.requires_grad is self.requires_grad)
        ):
            return
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{self.name}: expected a tensor ({self}), found {type(value).__name__}")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise ArgumentError(
                f"{self.name}: expected a plain tensor, found the subclass {type(value).__name__}; pass the tensor "
                "inside it; where it is a tracer's, trace the model itself, not what was compiled from it"
            )
        if value.is_nested:
            raise ArgumentError(f"{self.name}: expected a dense tensor ({self}), found a nested one; pad it")
        here = self.device in _names_of(value.device)
        if not self._fits(value.shape) or value.dtype != self.dtype or not here:
            found = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
            remedy = "compile again for other shapes, dtypes or devices"
            is_sized = here and value.dtype == self.dtype and len(value.shape) == len(self.shape)
            if is_sized and self.name.startswith(("args", "kwargs")):
                remedy = self._remedy_of_sizes(value.shape)
            raise ArgumentError(f"{self.name}: expected {self}, found {found}; {remedy}")
        if value.requires_grad and not self.requires_grad and torch.is_grad_enabled():
            raise MissingGradientError(
                f"{self.name}: requires grad now, but did not when compiled, so that its gradient would be missing; "
                "detach() it, or compile again"
            )
        if self.has_hooks and self.requires_grad and not value.requires_grad and torch.is_grad_enabled():
            raise UnaskedGradientError(
                f"{self.name}: requires no grad now, but did when compiled, and backward hooks would see a gradient "
                "that eager has not; compile again"
            )
        if value.layout is not torch.strided:
            raise ArgumentError(
                f"{self.name}: expected a dense tensor, found layout {value.layout}; pass to_dense() of it"
            )

    def _remedy_of_sizes(self, shape: Sequence[int]) -> str:
        """Says what to do about another size of some axes."""
        if 0 in shape:
            return "where nothing is to be computed, call the model itself, or compile again for that"
        axes = [str(axis) for axis, sizes in enumerate(zip(self.shape, shape, strict=True)) if len({*sizes}) > 1]
        which = f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(axes)}"
        return f"compile with dynamic_shapes that leave {which} open for sizes that differ, or again for these sizes"

    def _fits(self, shape: Sequence[int]) -> bool:
        """Whether a shape is the expected one, as far as this argument alone tells."""
        if shape == self.shape:
            return True
        wanted = zip(shape, self.shape, strict=True) if len(shape) == len(self.shape) else [(0, 1)]
        return all(not isinstance(size, int) or size == given for given, size in wanted)

    def __str__(self) -> str:
        sizes = ", ".join(format_size(size) for size in self.shape) + ("," if len(self.shape) == 1 else "")
        return f"{self.dtype} of shape ({sizes}) on {self.device}"


@lru_cache
def _names_of(device: torch.device) -> tuple[str, str]:
    """The name of a device: a call asks for each of hundreds of parameters, and a text takes a microsecond."""
    return str(device), device.type


class CallingConvention:
    """How a call's arguments become the tensors of the program, and its results what the call returns.

    Built from a signature; the two trees are taken from the live objects where these are at hand, so that types which
    no manifest can hold still work in the process that compiled. The program ``has_hooks`` where it calls some in its
    backward. ``device`` is where it takes tensors, wherever they were when it was compiled. Only where some were on the
    CPU and others were not, as PyTorch allows for numbers and indices, those stay there: a call copies them, and copies
    results of the CPU back.

    Raises:
        ArgumentError: the program writes to one that stays on the CPU.
    """

    def __init__(
        self,
        signature: Signature,
        *,
        in_spec: pytree.TreeSpec | None = None,
        out_spec: pytree.TreeSpec | None = None,
        device: torch.device | None = None,
        has_hooks: bool = False,
    ) -> None:
        states, tensors = (*signature.params, *signature.buffers), signature.primals
        on_cpu = [t.type.device == "cpu" for t in tensors]
        # Where to copy what is on the CPU beside tensors that are not.
        self._copies_to = device if device is not None and device.type != "cpu" and len(set(on_cpu)) == 2 else None
        self.inputs = [
            i.name if i.type is None else ExpectedTensor.of(i.name, i.type, self._place_of(i.type, device), has_hooks)
            for i in signature.inputs
        ]
        self.outputs = signature.outputs
        self.state = [ExpectedTensor.of(s.name, s.type, self._place_of(s.type, device), has_hooks) for s in states]
        self._known_state = KnownForms()
        self._constants = [i.constant for i in signature.inputs]
        expected = [i for i in self.inputs if isinstance(i, ExpectedTensor)]
        names, shapes = tuple(t.name for t in expected), tuple(t.shape for t in expected)
        sizes, conditions = signature.sizes, signature.conditions
        self._checks = SizeChecks(sizes, conditions, names, shapes) if sizes else None
        self._mutated = signature.mutated
        self._partly_written = frozenset(signature.partly_written)
        for i in self._mutated if self._copies_to is not None else ():
            if on_cpu[i]:
                raise ArgumentError(
                    f"{tensors[i].name} is written to, and is on the CPU beside tensors on {self._copies_to}; "
                    "move it there"
                )
        self._indices = [IndexCheck(bound) for bound in signature.indices]
        self._autocast = signature.autocast
        self._requiring = signature.requiring
        self._kept = [pytree.treespec_loads(kept.tree) for kept in signature.kept]
        # The last of the state are those in attributes that are no buffers: another program may take what is there.
        taken = [pytree.treespec_loads(kept.taken) for kept in signature.kept if kept.taken is not None]
        self._first_taken = len(states) - sum(tree.num_leaves for tree in taken)
        self._in_spec = in_spec or _load_tree(signature.in_tree)
        self._out_spec = out_spec or _load_tree(signature.out_tree)
        takes_tensors = all(isinstance(i, ExpectedTensor) for i in self.inputs)
        self._keywords = _find_keywords(self._in_spec) if takes_tensors else None

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments, in order.

        Raises:
            ArgumentError: other arguments than the program was compiled for; names the first.
        """
        self._check_autocast()
        leaves = self._leaves(args, kwargs)
        if len(leaves) != len(self.inputs):
            raise ArgumentError(
                f"expected {len(self.inputs)} values in the arguments ({self._names()}), found {len(leaves)}"
            )
        tensors = []
        for leaf, expected, constant in zip(leaves, self.inputs, self._constants, strict=True):
            if isinstance(expected, ExpectedTensor):
                expected.check(leaf)
                tensors.append(leaf)
            elif type(leaf) is not type(constant) or not _equal(leaf, constant):
                raise ArgumentError(
                    f"{expected}: compiled for the constant {constant!r}, found {leaf!r}; compile again for it"
                )
        if self._checks is not None:
            try:
                self._checks.read([tensor.shape for tensor in tensors])
            except SizeError as error:
                raise ArgumentError(str(error)) from error
        return self._brought(tensors)

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The values in the arguments, in order."""
        if tuple(kwargs) == self._keywords:
            values = (*args, *kwargs.values())
            if len(values) == len(self.inputs) and all(isinstance(value, torch.Tensor) for value in values):
                # To walk through trees takes longer than all the rest.
                return values
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        return leaves if self._in_spec is None or spec == self._in_spec else self._reorder(args, kwargs)

    def _brought(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors where the program takes them; gradients go back to where they were."""
        return tensors if self._copies_to is None else [tensor.to(self._copies_to) for tensor in tensors]

    def _place_of(self, type_: TensorType, device: torch.device | None) -> torch.device | None:
        """Where to expect a tensor of the signature: None for where it was when compiled."""
        return None if self._copies_to is not None and type_.device == "cpu" else device

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[Any]]:
        """Returns what the model returns, and what it sets its attributes to, from its tensor outputs in order."""
        given = iter(tensors if self._copies_to is None else self._returned(tensors))
        leaves = [output.constant if output.kind == CONSTANT else next(given) for output in self.outputs]
        kept: list[Any] = []
        for tree in reversed(self._kept):
            place = len(leaves) - tree.num_leaves
            kept.insert(0, _with_sizes(pytree.tree_unflatten(leaves[place:], tree), tree))
            del leaves[place:]
        if self._out_spec is None:
            return tuple(leaves), kept
        return pytree.tree_unflatten(leaves, self._out_spec), kept

    def _returned(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The results, those that were on the CPU when compiled there."""
        specs = [output for output in self.outputs if output.kind != CONSTANT]
        for spec, tensor in zip(specs, tensors, strict=True):
            yield tensor.cpu() if spec.type is not None and spec.type.device == "cpu" else tensor

    def check_state(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """The parameters and buffers, once each is known to be what the program was compiled for.

        Raises:
            ArgumentError: one is not; names it.
        """
        if self._known_state.find(tensors) is None:
            for expected, tensor in zip(self.state[: self._first_taken], tensors, strict=False):
                expected.check(tensor)
            self._check_taken(tensors)
            if torch.is_grad_enabled():
                # Otherwise one that requires grad may be right where it is not else.
                self._known_state.learn(tensors)
        return self._brought(list(tensors))

    def _check_taken(self, tensors: Sequence[Any]) -> None:
        for expected, tensor in zip(self.state[self._first_taken :], tensors[self._first_taken :], strict=True):
            try:
                expected.check(tensor)
            except OtherProgramError:
                raise
            except ArgumentError as error:
                raise OtherStateError(str(error)) from error

    def check_memory(self, primals: Sequence[torch.Tensor]) -> None:
        """Raise :class:`ArgumentError` where the program writes to a tensor whose memory an argument shares, or to a
        part of one whose own elements are one in memory.

        Eager sees the write in both of them, the program reads all its arguments before it writes. ``primals`` are
        parameters, buffers and arguments, in the program's order.
        """
        if not self._mutated:
            return
        first = len(self.state)
        for i in self._partly_written:
            if repeats(primals[i]):
                raise ArgumentError(
                    f"{self._name_of(i)} is expanded, so that elements of it are one in memory, and the model writes "
                    "to a part of it; pass a clone() of it"
                )
        given = {t.untyped_storage().data_ptr() for t in primals[first:]}
        for i in self._mutated:
            if i < first and primals[i].untyped_storage().data_ptr() not in given:
                continue
            start, end = _extent(primals[i])
            for j in range(0 if i >= first else first, len(primals)):
                other_start, other_end = _extent(primals[j])
                if i != j and start < other_end and other_start < end:
                    raise ArgumentError(
                        f"{self._name_of(j)} shares memory with {self._name_of(i)}, which the model writes to; "
                        "pass a clone() of it"
                    )

    def set_requiring(self, primals: Sequence[torch.Tensor]) -> None:
        """Have arguments require grad that the model itself has require it, as eager does to its caller's.

        Raises:
            ArgumentError: one of them is given a second time, as what requires none.
        """
        for i in self._requiring:
            for j, other in enumerate(primals):
                if i != j and other is primals[i]:
                    raise ArgumentError(
                        f"{self._name_of(j)} is the same tensor as {self._name_of(i)}, which the model has require "
                        "grad; pass a clone() of it"
                    )
        for i in self._requiring:
            primals[i].requires_grad_()

    def check_indices(self, primals: Sequence[torch.Tensor]) -> None:
        """Raise :class:`ArgumentError` where an index among ``primals`` is out of range, for which eager raises too."""
        for check in self._indices:
            problem = check.find_problem(primals[check.bound.argument])
            if problem is not None:
                raise ArgumentError(f"{self._name_of(check.bound.argument)}: {problem}")

    def _name_of(self, number: int) -> str:
        """The name of one of the primals, which are parameters, buffers and arguments."""
        return [e.name for e in (*self.state, *self.inputs) if isinstance(e, ExpectedTensor)][number]

    def _check_autocast(self) -> None:
        for device in ("cpu", "cuda"):
            compiled = self._autocast.get(device)
            enabled = torch.is_autocast_enabled(device)
            found = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if enabled else None
            if found != compiled:
                raise ArgumentError(
                    f"compiled with torch.autocast for {device} {compiled or 'off'}, and it is {found or 'off'} now; "
                    "call it as it was compiled, or compile it again here"
                )

    def _reorder(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves where only the order of keyword arguments differs; else an error that shows both structures."""
        assert self._in_spec is not None
        expected_args, expected_kwargs = pytree.tree_unflatten(list(range(self._in_spec.num_leaves)), self._in_spec)
        if set(kwargs) == set(expected_kwargs):
            leaves, spec = pytree.tree_flatten((tuple(args), {name: kwargs[name] for name in expected_kwargs}))
            if spec == self._in_spec:
                return leaves
        missing = [f"kwargs[{name!r}]" for name in expected_kwargs if name not in kwargs]
        extra = [f"kwargs[{name!r}]" for name in kwargs if name not in expected_kwargs]
        counts = (
            f"expected {len(expected_args)} positional arguments, found {len(args)}; "
            if len(args) != len(expected_args)
            else ""
        )
        details = "".join(
            [f"missing {', '.join(missing)}; " if missing else "", f"unexpected {', '.join(extra)}; " if extra else ""]
        )
        raise ArgumentError(
            f"arguments differ in structure from those compiled for: {counts}{details}expected {self._names()}; "
            "compile again for such a call: a step for each"
        )

    def _names(self) -> str:
        return ", ".join(i.name if isinstance(i, ExpectedTensor) else i for i in self.inputs)


def _find_keywords(spec: pytree.TreeSpec | None) -> tuple[str, ...] | None:
    """The names of the arguments by name, in order, of a call whose arguments are leaves, each by itself; ``None`` of
    others."""
    if spec is None:
        return None
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    is_flat = spec == pytree.tree_structure((tuple([0] * len(args)), dict.fromkeys(kwargs, 0)))
    return tuple(kwargs) if is_flat else None


def _equal(found: Any, constant: Any) -> bool:
    if found is constant:
        return True
    try:
        return bool(found == constant) or bool(found != found and constant != constant)
    except (RuntimeError, TypeError, ValueError):
        # Types that compare element by element give no one answer.
        return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of what follows its last; (0, 0) if it has none."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _with_sizes(value: Any, tree: pytree.TreeSpec) -> Any:
    """Give what was put together by a tree with a ``torch.Size`` where it has one, of which torch makes a tuple."""
    if tree.type is torch.Size:
        return torch.Size(value)
    children = tree.children()
    if tree.type in (tuple, list):
        return tree.type(map(_with_sizes, value, children))
    if tree.type is dict:
        return dict(zip(value, map(_with_sizes, value.values(), children), strict=True))
    return value


def _load_tree(text: str | None) -> pytree.TreeSpec | None:
    return None if text is None else pytree.treespec_loads(text)
