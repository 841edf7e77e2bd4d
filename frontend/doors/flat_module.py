# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The user's model as a function of flat tensors: what is traced."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.utils import _pytree as pytree

from retrograd.contract.signature import Signature
from retrograd.frontend.doors.kept_state import HOLDER, NOTHING_KEPT, Choice, KeptState, user_name
from retrograd.frontend.doors.own_gradients import refuse_returned_leaves
from retrograd.frontend.doors.reached_inputs import Reached, find_reached
from retrograd.frontend.doors.unregistered_objects import take_apart
from retrograd.frontend.hooks.hook_calls import HookCalls
from retrograd.frontend.hooks.pack_hooks import HookTracker
from retrograd.frontend.python.argument_answers import Answer, Answers, ToldOfArgument, answering
from retrograd.frontend.python.argument_functions import is_small
from retrograd.frontend.python.coins import Coin, returned_coin
from retrograd.frontend.python.drawn_arrays import without_arrays
from retrograd.frontend.python.holders import MadeTensors
from retrograd.frontend.python.kept_attributes import contained, is_read_again
from retrograd.frontend.python.plain_attributes import noting_stores
from retrograd.frontend.python.python_calls_seen import BackwardWatch, PythonSeen, run_watched
from retrograd.frontend.python.python_functions import is_layer, is_programs, may_write, names_in
from retrograd.frontend.python.python_places import Place, PythonValues
from retrograd.frontend.python.python_tables import ABSENT, told_of
from retrograd.frontend.python.python_values import find_generators, find_values
from retrograd.frontend.python.requiring_arguments import RequiringArguments
from retrograd.frontend.python.sanity_checks import CheckRecorder, SanityCheck
from retrograd.frontend.python.side_effects import refuse_counting, unchanged
from retrograd.frontend.python.source_locations import SourceTracker
from retrograd.frontend.traceable.masked_selections import Selection, refusal, settled
from retrograd.frontend.traceable.module_hooks import OwnHooks

TENSOR = object()
"""Stands for a tensor in :attr:`FlatModule.out_leaves`."""


class FlatModule(torch.nn.Module):
    """The user's model as a function of its tensor leaves: constants are closed over, outputs flattened to tensors."""

    model: torch.nn.Module | None
    _call: Callable[..., Any]

    def __init__(
        self,
        model: Callable[..., Any],
        in_spec: pytree.TreeSpec,
        leaves: Sequence[Any],
        says_compiling: bool = True,
        choice: Choice = NOTHING_KEPT,
    ) -> None:
        super().__init__()
        self.says_compiling = says_compiling
        # Whether the model asked, while it was traced, if it compiles.
        self.asks_compiling = False
        # Whether Python of it runs in the backward (hooks on autograd's graph, custom functions), and which.
        self.hooks_graph = False
        self.backward = BackwardWatch()
        # Hooks that the program calls.
        self.hook_calls = HookCalls()
        # What the forward set its attributes to, which Python in the backward may read.
        self._set_in_forward: list[tuple[dict[str, Any], str, Any]] = []
        self._set_again = contextlib.ExitStack()
        # What the model ran when it was traced first, and the attributes that it sets.
        self._ran: tuple[PythonSeen, set[tuple[int, str]]] | None = None
        owner = getattr(model, "__self__", None)
        # A bound method (`model.loss`) differentiates the module it is bound to.
        self.model = (
            model if isinstance(model, torch.nn.Module) else owner if isinstance(owner, torch.nn.Module) else None
        )
        self.name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__qualname__", "")
        self.kept = KeptState(choice)
        self.add_module(HOLDER, self.kept.holder)
        # Around Module.__setattr__, which would register the model a second time under this name.
        self.__dict__["_call"] = model
        self.in_spec = in_spec
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.tracing = False
        # What is given in place of tensors, by the names of the arguments.
        self.constants: dict[str, Any] = {}
        self.own_hooks = OwnHooks()
        self.made = MadeTensors()
        # Tensors beside its state and its arguments whose contents it took.
        self.read: list[torch.Tensor] = []
        # Whether code of its own may leave something behind for its next run.
        self.may_write = False
        # Whether it is known to write to what it reads, and what that is, by a trace that was not the first.
        self.counts = False
        self.changes: set[str] = set()
        # The Python values that the first of several traces went by.
        self.python: PythonValues | None = None
        self.checks: tuple[SanityCheck, ...] = ()
        # The tensors that are compiled for, whose contents answer what the model asks of its arguments.
        self.examples: tuple[torch.Tensor, ...] | None = None
        # Of these, of parameters and of buffers, those that require no grad and have none, by number and name.
        self.gradless: frozenset[str] = frozenset()
        # Its buffers of few numbers, of which it may ask the same, by name.
        self.small_buffers: dict[str, torch.Tensor] = {}
        self.answers: tuple[Answer | ToldOfArgument, ...] = ()
        # The numbers of arguments that did not require grad until the model said so.
        self.requiring: set[int] = set()
        # From which outputs of a trace autograd comes to which of its inputs.
        self.reached: Reached = {}
        self.out_spec: pytree.TreeSpec | None = None
        self.out_leaves: list[Any] = []
        self.out_names: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = self._call_of(tensors)
        if self.tracing:
            self.end_backward()
            outputs = self._flattened(self._trace(call, tensors), tensors)
            if self.backward.is_watching:
                for attributes, name, value in self._set_in_forward:
                    self._set_again.callback(_put, attributes, name, attributes.get(name, ABSENT))
                    attributes[name] = value
            return outputs
        with self.kept.put_back():
            self.kept.set_taken()
            result = call()
            self.kept.gather()
        return self._flattened(result, tensors)

    def end_backward(self) -> None:
        """Put attributes back that the backward found as the forward before it had set them. While the tracer's
        tensors stand for parameters and buffers: it gives those back by itself."""
        self._set_again.close()
        self._set_in_forward.clear()

    def run_in_eager(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the model as it runs by itself, on what its attributes hold, which it sets."""
        result = self._call_of(tensors)()
        self.kept.gather()
        return self._flattened(result, tensors)

    def _call_of(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else leaf
            for leaf, is_tensor in zip(self._leaves, self._is_tensor, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        return partial(self._call, *args, **kwargs)

    def _flattened(self, result: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors that the model returns, then those that it sets its attributes to."""
        keyed, self.out_spec = pytree.tree_flatten_with_path(take_apart(result))
        set_leaves, set_names = self.kept.hand_over()
        out_leaves = [*(leaf for _, leaf in keyed), *set_leaves]
        if any(isinstance(leaf, Selection) for leaf in out_leaves):
            raise refusal("a result")
        if any(isinstance(leaf, Coin) for leaf in out_leaves):
            raise returned_coin()
        # Kept for the constants among them only: a tensor of the trace must not outlive it.
        self.out_names = ["output" + pytree.keystr(path) for path, _ in keyed] + set_names
        self.out_leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves]
        outputs = tuple(leaf for leaf in out_leaves if isinstance(leaf, torch.Tensor))
        if self.tracing:
            state = (*self.named_parameters(), *self.named_buffers())
            self.reached = find_reached(outputs, {**dict(state), **dict(enumerate(tensors))})
        return outputs

    def checked(
        self, call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]], signature: Signature
    ) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """``call`` of the model's parameters, buffers and arguments, behind the checks of these that the model itself
        has. What fails one is given to the model in eager, which raises as it does."""
        checks = [check for check in self.checks if check.steps is not None]
        if not checks:
            return call
        asked, state = self.asked(signature), len(signature.params + signature.buffers)

        def run(primals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            given = asked(primals)
            if not all(check.holds(given) for check in checks):
                outputs: Sequence[torch.Tensor] = self.run_in_eager(primals[state:])
                return outputs
            return call(primals)

        return run

    def keep_examples(self, tensors: tuple[torch.Tensor, ...], counts: bool) -> None:
        """Keep the arguments that are compiled for, and the buffers of few numbers; and whether the model is known to
        write to what it reads."""
        self.examples, self.counts = tensors, counts
        named = [*self.named_parameters(), *self.named_buffers()]
        known = [(state_name(name), tensor) for name, tensor in named] + [(str(n), t) for n, t in enumerate(tensors)]
        self.gradless = frozenset(name for name, t in known if not t.requires_grad and t.grad is None)
        self.small_buffers = {name: b for name, b in self.named_buffers() if is_small(b) and not b.is_meta}

    def asked(self, signature: Signature) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Return what gives, of a call's parameters, buffers and arguments, the tensors that may be asked of: the
        arguments, then the buffers of few numbers."""
        names = [state.name for state in (*signature.params, *signature.buffers)]
        places = [names.index(state_name(name)) for name in self.small_buffers]
        return lambda primals: [*primals[len(names) :], *(primals[place] for place in places)]

    def _trace(self, call: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
        here = sys._getframe().f_code
        noting, given, watched = (
            self.own_hooks.noting(self.model),
            unchanged(self.constants),
            self._watched(tensors, here),
        )
        self.made.note((tensors, list(self.parameters()), list(self.buffers())), None)
        seen, names = PythonSeen(), self._given_names(tensors)
        requiring = RequiringArguments(names)
        self.kept.watch(self.model)
        with (
            HookTracker(),
            SourceTracker(
                self.made.note,
                self.read.append,
                names,
                seen.asked,
                requiring.meet,
                self.kept.is_awaited,
                self.gradless,
            ),
            given,
            contained(self.model, self.made.place_of) as containment,
            noting,
            compiling(self.says_compiling),
            watched as of,
        ):
            self.kept.set_taken()
            if self.python is not None:
                result = settled(call())
                self.kept.note(containment, names, self.made.place_of)
                refuse_returned_leaves(result, names, self.made.place_of)
                # What the model writes to each time: a run of it that looks into this would be in the graph.
                plain = {(id(kept.table), kept.name) for kept, _ in self.kept.plain.found}
                changed_places = [p for p in self.python.changed_places() if (id(p.table), p.name) not in plain]
                self.changes |= {place.path for place in changed_places if not _is_tracers(place)}
                if self.hooks_graph:
                    self._set_in_forward.extend(containment.find_set())
                    self.backward.start()
                return result
            modules = {} if self.model is None else dict(self.model.named_modules())
            generators = find_generators(self.called, modules)
            with noting_stores() as self.kept.plain.stores:
                result = settled(run_watched(call, seen, generators))
            self.kept.note(containment, names, self.made.place_of)
            refuse_returned_leaves(result, names, self.made.place_of)
            self.kept.settle_awaited()
            self.requiring |= requiring.settle(tensors, self.examples, seen.asked)
        recorder, answers = of
        self.checks, self.answers = tuple(recorder.checks), (*answers.found, *self._told(seen.asked))
        # An answer from an attribute that is replaced, or that the model sets, is another one.
        self.read.extend(tensor for answer in answers.found for tensor in answer.steps.constants)
        plain = self._settle_plain(call, tensors, here)
        kept, changed = {(id(a.module), a.name) for a in self.kept.attributes}, containment.changed - plain
        self._ran = seen, changed | (kept - plain)
        python = find_values(self.called, modules, *self._ran)
        self.python = self.kept.plain.guarded(python, seen, bool(self.kept.first_set))
        self.kept.refuse_plain_in_blocks()
        known = {id(generator) for generator in generators.values()}
        if others := {name: value for name, value in self.python.generators.items() if id(value) not in known}:
            self._again(lambda: run_watched(call, PythonSeen(), others), tensors, here)
        self.asks_compiling, self.hooks_graph = seen.asks_compiling, seen.hooks_graph
        self.may_write = any(is_programs(code) and may_write(code) for code in seen.codes)
        if changed or self.python.steps or self.counts or self.kept.first_set or self.kept.mixed:
            refuse = partial(refuse_counting, self.model, call, self.python, self.kept.forget_tensors, self.kept.shown)
            self._again(refuse, tensors, here)
            self.python = self.python.without(self.python.changed_places())
        if self.kept.first_set:
            self._again(partial(self._guard_first_set, call, tensors), tensors, here)
        return result

    def _settle_plain(
        self, call: Callable[[], Any], tensors: Sequence[torch.Tensor], owner: CodeType
    ) -> set[tuple[int, str]]:
        """Give the attributes that each run of the model sets to the same plain value."""
        if self.kept.plain.found:
            given = [*tensors, *self.parameters(), *self.buffers()]
            self._again(partial(self.kept.settle_plain, call, given), tensors, owner)
        return self.kept.plain.keys()

    def note_backward(self) -> None:
        """After the backward was traced, go by what hooks on autograd's graph went by too."""
        codes = self.backward.codes
        if not codes or self.python is None or self._ran is None:
            return
        (seen, changed), modules = self._ran, {} if self.model is None else dict(self.model.named_modules())
        before = find_values(self.called, modules, seen, changed)
        known = {(id(place.table), place.name) for place in before.places}
        now = find_values(self.called, modules, replace(seen, codes=seen.codes | codes), changed)
        self.python = self.python.with_more([p for p in now.places if (id(p.table), p.name) not in known])

    def leave_to_hooks(self) -> None:
        """Go by nothing that hooks alone read, which are called, and may write there."""
        if self.python is None or self._ran is None:
            return
        # A hook whose code the model runs itself, too, has nothing for itself.
        ran = self._ran[0]
        called = self.hook_calls.codes() - ran.codes
        others = ran.read.union(*(names_in(code, called) for code in ran.codes))
        of_hooks = {name for code in called for name in names_in(code)} - others
        # Layers of PyTorch's read what they have by names that are not looked for.
        of_layers = {id(vars(module)) for module in self.modules() if is_layer(module)}
        self.python = self.python.without(
            [
                place
                for place in self.python.places
                if id(place.table) not in of_layers and not of_hooks.isdisjoint(re.split(r"[.\[]", place.path))
            ]
        )

    def _guard_first_set(self, call: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> None:
        """Where the model goes by what its attributes are set to for the first time, go by them."""
        given = [*tensors, *self.parameters(), *self.buffers()]
        if self.python is not None and is_read_again(
            call, [kept for kept, _ in self.kept.first_set], given, self.kept.forget_others
        ):
            self.python = self.python.with_more(self.kept.guards())

    def _given_names(self, tensors: Sequence[torch.Tensor]) -> dict[int, str]:
        """The names of parameters and buffers, and the numbers of arguments, by their identity in a trace."""
        named = {id(tensor): name for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        return {id(tensor): str(number) for number, tensor in enumerate(tensors)} | {
            tensor: state_name(name) for tensor, name in named.items()
        }

    def _told(self, asked: set[tuple[str, str]]) -> tuple[ToldOfArgument, ...]:
        """Give what the model asked of its arguments but for their contents."""
        given = [(name, int(number)) for name, number in sorted(asked) if number.isdecimal()]
        examples = self.examples or ()
        return tuple(ToldOfArgument(number, name, told_of(examples[number], name)) for name, number in given)

    def _again(self, run: Callable[[], Any], tensors: Sequence[torch.Tensor], owner: CodeType) -> None:
        """Run what runs the model once more."""
        names = self._given_names(tensors)
        with (
            HookTracker(),
            SourceTracker(
                self.made.note, self.read.append, names, None, RequiringArguments(names).meet, gradless=self.gradless
            ),
            contained(self.model, self.made.place_of) as containment,
            compiling(self.says_compiling),
            self._watched(tensors, owner),
        ):
            self.kept.set_taken()
            run()
            containment.take()

    @property
    def called(self) -> Callable[..., Any]:
        """The model or function that the user gave to be compiled."""
        return without_arrays(self._call)

    def parts(self) -> list[Any]:
        """The modules of the user's model, and what is called."""
        return [self.called, *(() if self.model is None else self.model.modules())]

    @contextlib.contextmanager
    def _watched(self, tensors: Sequence[torch.Tensor], owner: CodeType) -> Iterator[tuple[CheckRecorder, Answers]]:
        """While this is open, checks of the arguments pass, and questions about them are answered; the model is called
        by ``owner``."""
        traced = dict(self.named_buffers())
        with CheckRecorder((*tensors, *(traced[name] for name in self.small_buffers)), owner) as recorder:
            examples = None if self.examples is None else (*self.examples, *self.small_buffers.values())
            answers = Answers(recorder.functions, examples)
            with answering(answers):
                yield recorder, answers

    # The tracer swaps tensors in by name and puts the old ones back in the same order: of two names for one place (a
    # submodule that is used twice) the second would bring the tracer's tensor back for good. One name for each place.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Each parameter once for every module that holds it, whatever ``remove_duplicate`` says."""
        for path, module in self.named_modules(prefix=prefix):
            yield from ((f"{path}.{name}", p) for name, p in module._parameters.items() if p is not None)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each buffer once for every module that holds it, whatever ``remove_duplicate`` says."""
        for path, module in self.named_modules(prefix=prefix):
            named = [(f"{path}.{name}", b) for name, b in module._buffers.items() if b is not None]
            yield from ((name, b) for name, b in named if state_name(name) not in self.kept.choice.left_out)


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute, or, where it is to be absent, delete it."""
    if value is ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def _is_tracers(place: Place) -> bool:
    """Whether what is in a place now is of FX, which while it traces has calls and attributes of all modules go by
    functions of its own around PyTorch's."""
    found = place.table.get(place.name, ABSENT)
    return getattr(found, "__globals__", None) is vars(_symbolic_trace) and found.__wrapped__ is place.value


@contextlib.contextmanager
def compiling(says_so: bool) -> Iterator[None]:
    """While this is open, ``torch.compiler.is_compiling()`` is ``says_so``: where it is true libraries leave out what
    looks at the contents of tensors, such as a mask that is none where all of it is set."""
    before = torch.compiler._is_compiling_flag
    # What torch.compile has made inside of the model is traced as what it was made from. Without Dynamo there is none.
    inlined = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        with inlined:
            torch.compiler._is_compiling_flag = says_so
            yield
    finally:
        torch.compiler._is_compiling_flag = before


def state_name(qualified: str) -> str:
    """The name the user knows a parameter by: the flat module adds one level, which this takes off."""
    return user_name(qualified) if qualified.startswith(f"{HOLDER}.") else qualified.removeprefix("model.")
