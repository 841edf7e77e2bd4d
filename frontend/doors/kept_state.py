# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The attributes that a model sets at each call, as results of the traced function, and as arguments where it reads
what is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.contract.roles import NEW, name_in_role
from retrograd.contract.signature import KeptSpec
from retrograd.frontend.doors.own_gradients import refuse_own_gradients
from retrograd.frontend.doors.plain_state import PlainState
from retrograd.frontend.doors.signature import dump_tree
from retrograd.frontend.python.kept_attributes import (
    Containment,
    KeptAttribute,
    is_of_type,
    is_read_again,
    tensors_in,
    tensors_of_attributes,
)
from retrograd.frontend.python.python_contents import is_plain
from retrograd.frontend.python.python_places import Place
from retrograd.frontend.python.python_tables import ABSENT
from retrograd.frontend.python.side_effects import KEPT_REMEDY, WHERE_KEPT, shown
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.traceable.masked_selections import settled

HOLDER = "taken_state"
"""The submodule of the flat module that has the tensors of attributes which are no buffers."""
# No name of a buffer has a point.
_POINT = "/"


@dataclass(frozen=True)
class Choice:
    """Says what a trace takes beside parameters and buffers: the tensors in the attributes ``taken``, and none of the
    buffers ``left_out``, by qualified name, which the model sets without reading them."""

    taken: tuple[KeptAttribute, ...] = ()
    left_out: frozenset[str] = frozenset()


class OtherChoiceError(CaptureError):
    """A trace met in attributes what only another one takes, by ``choice``."""

    def __init__(self, error: CaptureError, choice: Choice) -> None:
        super().__init__(error.message, error.remedy)
        self.choice = choice


NOTHING_KEPT = Choice()
"""The choice for a model of which nothing is known."""


class KeptState:
    """The attributes that a model sets while it is traced, and again where it runs."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.attributes: list[KeptAttribute] = []
        # Those of them that had no tensor before, with what they had.
        self.first_set: list[tuple[KeptAttribute, Any]] = []
        # How what they are set to differs from what the program takes, by qualified name.
        self.retyped: dict[str, str] = {}
        # Those that have numbers or texts beside tensors.
        self.mixed: list[KeptAttribute] = []
        # Those that are set to values without tensors.
        self.plain = PlainState()
        # What is set in checkpointed blocks, by the identity of the module, and name.
        self.set_in_blocks: set[tuple[int, str]] = set()
        self._before: list[tuple[KeptAttribute, Any]] = []
        # Tensors of attributes that require grad and that the trace does not take, by identity, with the refusal.
        self._awaited: dict[int, CaptureError] = {}
        self._of_attributes: list[torch.Tensor] = []
        self._values: list[Any] = []
        self._specs: list[KeptSpec] = []
        self.holder = torch.nn.Module()
        self._taken = [(attribute, *pytree.tree_flatten(attribute.value)) for attribute in choice.taken]
        for attribute, leaves, spec in self._taken:
            if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                raise CaptureError(
                    f"the model sets its attribute {attribute.qualified!r}, of tensors and other values, and reads it",
                    f"keep tensors alone in it, and the rest in another attribute; or use {WHERE_KEPT} sets it",
                )
            self.holder._buffers.update(zip(_names_of(attribute, spec), leaves, strict=True))

    def set_taken(self) -> None:
        """Set what the program takes to the tensors in its place."""
        for attribute, _, spec in self._taken:
            attribute.put(pytree.tree_unflatten([self.holder._buffers[n] for n in _names_of(attribute, spec)], spec))

    def watch(self, model: torch.nn.Module | None) -> None:
        """Note what is in the attributes of the modules before the model runs."""
        self._of_attributes, self._awaited = tensors_of_attributes(model), {}

    def is_awaited(self, tensor: torch.Tensor, error: CaptureError) -> bool:
        """Whether a tensor that requires grad, for which this is the refusal, may be in what the model sets."""
        if not any(tensor is known for known in self._of_attributes):
            return False
        self._awaited.setdefault(id(tensor), error)
        return True

    def settle_awaited(self) -> None:
        """Have the attributes taken that the model sets, and whose tensors it read that require grad.

        Raises:
            OtherChoiceError: there are such.
            CaptureError: it read one that is elsewhere.
        """
        before = [(k, {id(tensor) for tensor in tensors_in(value)}) for k, value in self._before if not k.is_buffer]
        for tensor, error in self._awaited.items():
            if not any(tensor in had for _, had in before):
                raise error
        if self._awaited:
            found = [k for k, had in before if not had.isdisjoint(self._awaited)]
            error = next(iter(self._awaited.values()))
            raise OtherChoiceError(error, Choice((*self.choice.taken, *found), self.choice.left_out))

    def note(self, containment: Containment, inputs: Collection[int], place_of: Callable[[torch.Tensor], str]) -> None:
        """Note what the model has set, before it is put back; ``inputs`` are what it has been given, by identity.

        Raises:
            CaptureError: it has set an attribute to what is made for a gradient of its own.
        """
        found = containment.take()
        self.first_set, self.retyped = [], {}
        taken = {id(a.module): {b.name for b in self.choice.taken if b.module is a.module} for a in self.choice.taken}
        for attribute, before in found:
            value, is_taken = settled(attribute.value), attribute.name in taken.get(id(attribute.module), ())
            refuse_own_gradients(attribute, [t for t in tensors_in(value) if id(t) not in inputs], place_of)
            self._note_type(attribute, before, value, place_of)
            if not is_taken and not tensors_in(before):
                self.first_set.append((attribute, before))
        self.mixed = [a for a, _ in found if any(is_plain(leaf) for leaf in pytree.tree_leaves(a.value))]
        self._note_results([*found, *self.plain.take(containment)])

    def _note_results(self, found: Sequence[tuple[KeptAttribute, Any]]) -> None:
        """Have the attributes set by the program, each of which was what it was."""
        self._before, self.attributes = list(found), [attribute for attribute, _ in found]
        self._values = [settled(attribute.value) for attribute in self.attributes]
        self._specs = []
        for (attribute, before), value in zip(found, self._values, strict=True):
            tree = dump_tree(pytree.tree_structure(value))
            if tree is None:
                raise CaptureError(
                    f"the model keeps a {type(value).__name__} in its attribute {attribute.qualified!r}, where a "
                    "compiled program puts none",
                    KEPT_REMEDY,
                )
            given = dump_tree(pytree.tree_structure(before)) if attribute in self.choice.taken else None
            self._specs.append(KeptSpec(attribute.path, attribute.name, attribute.is_buffer, tree, given))

    def settle_plain(self, call: Callable[[], Any], given: Sequence[torch.Tensor]) -> None:
        """Run the model twice, by ``call``, and leave out what it sets to another plain value each time."""

        def put_back() -> None:
            self.plain.compare()
            self.forget_others()

        reads = is_read_again(call, [kept for kept, _ in self.first_set], given, put_back)
        left = self.plain.settle(reads)
        pairs = zip(self._before, self._values, self._specs, strict=True)
        remaining = [(pair, value, spec) for pair, value, spec in pairs if pair[0] not in left]
        self._before = [pair for pair, _, _ in remaining]
        self.attributes = [pair[0] for pair in self._before]
        self._values, self._specs = [value for _, value, _ in remaining], [spec for _, _, spec in remaining]

    def _note_type(
        self, attribute: KeptAttribute, before: Any, value: Any, place_of: Callable[[torch.Tensor], str]
    ) -> None:
        had, has = tensors_in(before), tensors_in(value)
        if not (had and has):
            return
        same_tree = pytree.tree_structure(before) == pytree.tree_structure(value) and len(had) == len(has)
        other = next((pair for pair in zip(had, has, strict=False) if not is_of_type(pair[1], pair[0])), None)
        if same_tree and other is None:
            return
        text = "to what has other tensors in it"
        if same_tree and other is not None:
            known, found = other
            text = f"to a tensor {_describe(found, known)} where it was {_describe(known, found)}{place_of(found)}"
        self.retyped[attribute.qualified] = text

    def gather(self) -> None:
        """Note what the attributes are set to now, after a run that is no trace."""
        self._values = [attribute.value for attribute in self.attributes]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put the attributes back after the block, as they were before it."""
        attributes = [*self.attributes, *self.choice.taken]
        before = [attribute.value for attribute in attributes]
        try:
            yield
        finally:
            for attribute, value in zip(attributes, before, strict=True):
                attribute.put(value)

    def forget_others(self) -> None:
        """Have the attributes that had tensors be what they were when they were noted."""
        first = [attribute for attribute, _ in (*self.first_set, *self.plain.found)]
        for attribute, value in self._before:
            if attribute not in first:
                attribute.put(value)
        self.set_taken()

    def forget_tensors(self) -> None:
        """Have the attributes be what they were when they were noted, but for numbers and texts beside tensors, of
        which the program has one value each."""
        for attribute, value in self._before:
            attribute.put(_with_numbers(value, attribute.value) if attribute in self.mixed else value)
        self.set_taken()

    def shown(self) -> dict[str, Any]:
        """The numbers and texts that are in the attributes beside tensors, and how these are put together, by name."""
        trees = [(attribute.qualified, *pytree.tree_flatten(attribute.value)) for attribute in self.mixed]
        return {name: (str(spec), shown([n for n in leaves if is_plain(n)])) for name, leaves, spec in trees}

    def hand_over(self) -> tuple[list[Any], list[str]]:
        """The leaves of what the attributes are set to, and a name for each; a tensor of a trace is not to outlive
        it."""
        leaves, names = [], []
        for attribute, value in zip(self.attributes, self._values, strict=True):
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                leaves.append(leaf)
                names.append(name_in_role(NEW, f"{attribute.qualified}{pytree.keystr(path)}"))
        self._values, self._before = [], []
        return leaves, names

    def specs(self) -> tuple[KeptSpec, ...]:
        """The attributes for a signature, in the order of their leaves."""
        return tuple(self._specs)

    def guards(self) -> list[Place]:
        """The attributes that had no tensor, as what the model goes by: once they are set, it does something else.

        Raises:
            CaptureError: what an attribute had is no number, text or ``None``; or it is set in a checkpointed block.
        """
        for attribute, before in self.first_set:
            self._refuse_set_in_block(attribute)
            if before is not ABSENT and not isinstance(before, bool | int | float | str | None):
                raise CaptureError(
                    f"the model keeps a tensor in its attribute {attribute.qualified!r}, and goes by whether it has "
                    "one",
                    KEPT_REMEDY,
                )
        return [Place(k.qualified, k.table, k.name, before) for k, before in self.first_set]

    def refuse_plain_in_blocks(self) -> None:
        """Refuse those that are set to plain values in a checkpointed block and read."""
        for attribute in self.plain.read:
            self._refuse_set_in_block(attribute)

    def _refuse_set_in_block(self, attribute: KeptAttribute) -> None:
        """Refuse an attribute that the model reads and sets in a checkpointed block, which eager sets once more where
        it runs the block again."""
        if (id(attribute.module), attribute.name) in self.set_in_blocks:
            raise CaptureError(
                f"the model sets {attribute.qualified!r}, which it reads, in a checkpointed block, by which eager sets "
                "it again in the backward",
                f"return from the block what it is set to, and set it outside; or use {WHERE_KEPT} does so as in eager",
            )

    def reconsider(self, constants: Collection[int], unread: Collection[str]) -> Choice | None:
        """Say what another trace has to take, of attributes whose tensors are ``constants`` of this one, by identity,
        and of buffers, of which this one has not read ``unread``; ``None`` where this one will do.

        Raises:
            CaptureError: the model reads what it sets to a tensor of another type, or in a checkpointed block.
        """
        others = [k for k in self.attributes if not k.is_buffer and k not in self.choice.taken]
        read = [k for k in others if any(id(tensor) in constants for tensor in k.tensors())]
        taken, left_out = {k.qualified for k in self.choice.taken}, set(self.choice.left_out)
        for attribute in self.attributes:
            name = attribute.qualified
            is_read_buffer = attribute.is_buffer and name not in unread and name not in left_out
            if is_read_buffer or name in taken or attribute in read:
                self._refuse_set_in_block(attribute)
            if name not in self.retyped or name in left_out or (attribute in others and attribute not in read):
                continue
            if attribute.is_buffer and name in unread:
                left_out.add(name)
            elif attribute.is_buffer or name in taken or attribute in read:
                kind = "buffer" if attribute.is_buffer else "attribute"
                raise CaptureError(
                    f"the model sets its {kind} {name!r}, which it reads, {self.retyped[name]}",
                    "give it the same shape and dtype each time (of a queue that grows, its last n rows); if it has "
                    "the same from the second call on, call the model once before compiling it; or use "
                    f"{WHERE_KEPT} sets it",
                )
        if not read and left_out == self.choice.left_out:
            return None
        return Choice((*self.choice.taken, *read), frozenset(left_out))


def user_name(holder_name: str) -> str:
    """Give the name that the user has for a tensor of the holder: ``rnn.hidden[0]``."""
    return holder_name.removeprefix(f"{HOLDER}.").replace(_POINT, ".")


def _with_numbers(before: Any, now: Any) -> Any:
    """Give what an attribute has now, with the tensors of before where these are at the same places."""
    leaves, spec = pytree.tree_flatten(before)
    others, other_spec = pytree.tree_flatten(now)
    pairs = list(zip(leaves, others, strict=False))
    if spec != other_spec or any(isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor) for a, b in pairs):
        return now
    return pytree.tree_unflatten([a if isinstance(a, torch.Tensor) else b for a, b in pairs], spec)


def _names_of(attribute: KeptAttribute, spec: pytree.TreeSpec) -> list[str]:
    """The names in the holder of the tensors of an attribute, which are put together so."""
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * spec.num_leaves, spec))
    return [(attribute.qualified + pytree.keystr(path)).replace(".", _POINT) for path, _ in paths]


def _describe(tensor: torch.Tensor, beside: torch.Tensor) -> str:
    """Describe a tensor: its shape, and its dtype and device where these are not those of the other."""
    parts = [f"of shape {tuple(tensor.shape)}"]
    parts += [str(tensor.dtype)] if tensor.dtype != beside.dtype else []
    return " ".join([*parts, *([f"on {tensor.device}"] if tensor.device != beside.device else [])])
