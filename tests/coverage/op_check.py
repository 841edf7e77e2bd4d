# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One case of the sweep, from samples to a verdict.

Compiling takes longest, so all samples of a case are one program, cut in two where it does not compile, until the
samples at fault are alone.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from op_cases import SEED, Case, Sample, map_tensors
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import retrograd
from retrograd import compile_backward

# Largest difference from the reference, over the reference's largest magnitude.
TOLERANCE = 2e-5
# An ill-conditioned op is far from f64 in eager too: so many times as far is still right, up to so much in all.
EAGER_ERRORS = 4.0
WORST_EAGER_ERROR = 1e-2
BUNDLE = 24

REFUSALS = (retrograd.CaptureError, retrograd.PipelineError, retrograd.CompileError)


@dataclass
class Verdict:
    """How one case came out. ``samples`` were differentiable in eager, ``native`` of them compiled and agree, and so do
    ``islands`` more with ops that run in torch.

    ``failures`` has, per outcome ("refused", "wrong", "crashed"), up to a few samples with their reasons; ``failed``
    how many there were.
    """

    name: str
    samples: int = 0
    native: int = 0
    islands: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """The worst that a sample of it came to."""
        if not self.samples and not self.failed:
            return "none"
        return next(
            (o for o in ("crashed", "wrong", "refused") if o in self.failed), "islands" if self.islands else "native"
        )

    def fail(self, outcome: str, sample: str, reason: str, count: int = 1) -> None:
        """Note that ``count`` samples came out like this."""
        self.failed[outcome] = self.failed.get(outcome, 0) + count
        if len(self.failures) < 12:
            self.failures.append((outcome, sample, reason))

    def note_islands(self, step: Any, sample: str) -> None:
        """Note that a sample agrees, with ops of it in eager islands."""
        self.islands += 1
        if self.islands == 1:
            what = "; ".join(dict.fromkeys(i["what"] for i in step.explain().to_dict()["islands"]))
            self.failures.append(("islands", sample, re.sub(r" \(\S+:\d+\)", "", what)[:200]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class _Reference:
    """A sample with what eager makes of it: leaves of the result and gradients, in f32 and, where it can, in f64."""

    sample: Sample
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    tangents: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]
    exact: tuple[list[torch.Tensor], list[torch.Tensor | None]] | None
    mutated: list[str]
    random: bool


class Bundle(torch.nn.Module):
    """All samples as one model, of a list of arguments to a list of results."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(s.target for s in samples if isinstance(s.target, torch.nn.Module))
        self._calls = [(None if isinstance(s.target, torch.nn.Module) else s.target, s.finish) for s in samples]

    def forward(self, arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Each sample's result, in order."""
        layers = iter(self.layers)
        return [
            _computed(finish((function or next(layers))(*args, **kwargs)))
            for (function, finish), (args, kwargs) in zip(self._calls, arguments, strict=True)
        ]


def _computed(result: Any) -> Any:
    """The result with views as values: what only looks at an argument is no work to compile, and nothing to
    differentiate."""
    return map_tensors(lambda t: t.clone() if t.layout == torch.strided else t, result)


def examine(case: Case, limit: int | None) -> Verdict:
    """Compile and compare the samples of a case, at most ``limit`` of them."""
    verdict = Verdict(case.name)
    references = [r for r in map(_run_eager, case.samples(limit)) if r is not None]
    verdict.samples = len(references)
    # One program for all: where one of them draws numbers, the trace is the reference of all.
    if any(r.random for r in references):
        references = [replace(r, random=True) for r in references]
    refused: list[_Reference] = []
    for start in range(0, len(references), BUNDLE):
        _settle(references[start : start + BUNDLE], verdict, refused)
    for start in range(0, len(refused), BUNDLE):
        _settle(refused[start : start + BUNDLE], verdict, None)
    return verdict


def examine_together(cases: Sequence[Case], limit: int | None) -> list[Verdict] | None:
    """The verdicts on cases that are all native, from one program for all their samples: most of the time that a
    program takes is not its ops'. None where anything is amiss, or draws random numbers: then each is for itself.
    """
    verdicts, references = [Verdict(case.name) for case in cases], []
    for case, verdict in zip(cases, verdicts, strict=True):
        found = [r for r in map(_run_eager, case.samples(limit)) if r is not None]
        if any(r.random for r in found):
            return None
        verdict.samples = verdict.native = len(found)
        references += found
    try:
        right = not references or not any(_compare(_compile(references, "error"), references))
    except Exception:  # noqa: BLE001  whatever it is, a case by itself will show it
        return None
    return verdicts if right else None


def _settle(references: Sequence[_Reference], verdict: Verdict, refused: list[_Reference] | None) -> None:
    """Compile these samples as one program; where that fails, each half of them by itself.

    Those that do not compile without islands go to ``refused``; without such a list, islands are allowed.
    """
    try:
        step = _compile(references, "island" if refused is None else "error")
    except REFUSALS as error:
        failed = len(refused) if refused is not None else sum(verdict.failed.values())
        if refused is not None and (len(references) == 1 or failed >= 6):
            # What fails in the rest would be no news.
            refused += references
        elif len(references) == 1:
            verdict.fail("refused", references[0].sample.describe(), reason_of(error))
        elif failed >= 6:
            verdict.fail("refused", f"{len(references)} more", reason_of(error), len(references))
        else:
            for half in (references[: len(references) // 2], references[len(references) // 2 :]):
                _settle(half, verdict, refused)
        return
    except Exception as error:  # noqa: BLE001  an error of no kind that the user is told of: a defect
        if len(references) == 1:
            verdict.fail("crashed", references[0].sample.describe(), _unexpected(error))
        elif "crashed" in verdict.failed:
            verdict.fail("crashed", f"{len(references)} more", _unexpected(error), len(references))
        else:
            for half in (references[: len(references) // 2], references[len(references) // 2 :]):
                _settle(half, verdict, refused)
        return
    try:
        problems = _compare(step, references)
    except retrograd.VerificationError as error:
        verdict.fail("wrong", references[0].sample.describe(), str(error), len(references))
        return
    except Exception as error:  # noqa: BLE001
        verdict.fail("crashed", references[0].sample.describe(), _unexpected(error), len(references))
        return
    for reference, problem in zip(references, problems, strict=True):
        if problem is None and refused is None:
            verdict.note_islands(step, reference.sample.describe())
        elif problem is None:
            verdict.native += 1
        else:
            verdict.fail("wrong", reference.sample.describe(), problem)


def _compile(references: Sequence[_Reference], fallback: Literal["error", "island"]) -> Any:
    bundle = Bundle([r.sample for r in references])
    arguments = [(r.sample.args, r.sample.kwargs) for r in references]
    # What random ops draw in eager is other than what they draw compiled: the trace itself is the reference.
    return compile_backward(bundle, (_leaves_of_own(arguments),), verify=references[0].random, fallback=fallback)


def _leaves_of_own(value: Any) -> Any:
    """The tensors as leaves of the autograd graph, in their own layout, on memory of their own."""
    seen: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in seen:
            if t.layout == torch.strided:
                # A copy of the whole storage keeps the strides, overlapping ones too.
                storage = t.detach().untyped_storage().clone()
                fresh = torch.empty(0, dtype=t.dtype, device=t.device).set_(
                    storage, t.storage_offset(), t.shape, t.stride()
                )
                fresh = fresh.conj() if t.is_conj() else fresh
                fresh = fresh._neg_view() if t.is_neg() else fresh
            else:
                fresh = t.detach().clone()
            seen[id(t)] = fresh.requires_grad_(t.requires_grad)
        return seen[id(t)]

    return map_tensors(copy, value)


def _run_eager(sample: Sample) -> _Reference | None:
    """What eager gives; None where it has no gradient or refuses the sample."""
    try:
        outputs, tensors, mutated = _forward(sample, torch.float32)
        tangents = [torch.randn_like(o) if o.requires_grad else None for o in outputs]
        random = _draws(sample)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    if not any(t is not None for t in tangents):
        return None
    try:
        gradients = _gradients(outputs, tensors, tangents)
    except (RuntimeError, NotImplementedError):
        return None
    if all(g is None for g in gradients):
        return None
    try:
        wide, inputs, _ = _forward(sample, torch.float64)
        exact = None if random else (wide, _gradients(wide, inputs, tangents))
    except (RuntimeError, NotImplementedError):
        exact = None
    detached = [o.detach() for o in outputs]
    return _Reference(sample, tensors, detached, tangents, gradients, exact, mutated, random)


class _RandomOps(TorchDispatchMode):
    """Notes whether a random op runs while this is on. The database seeds such ops itself, so that two runs agree."""

    found: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _draws(sample: Sample) -> bool:
    mode = _RandomOps()  # type: ignore[no-untyped-call]
    with mode:
        _forward(sample, torch.float32)
    return mode.found


def _forward(
    sample: Sample,
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Leaves of the result, the tensors to differentiate in, and digests of all tensors afterwards."""
    arguments = _leaves_of_own((sample.args, sample.kwargs))
    module = sample.target if isinstance(sample.target, torch.nn.Module) else None
    state: dict[str, torch.Tensor] = {}
    if module is not None:
        state = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in _state(module).items()}
    if dtype == torch.float64:
        # What is one tensor, given twice, stays one.
        wide: dict[int, torch.Tensor] = {}
        arguments, state = map_tensors(lambda t: wide.setdefault(id(t), _widen(t)), (arguments, state))
    torch.manual_seed(SEED)
    args, kwargs = arguments
    made = torch.func.functional_call(module, state, args, kwargs) if module else sample.target(*args, **kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(_computed(sample.finish(made))) if isinstance(leaf, torch.Tensor)]
    tensors = [*state.values(), *_tensors(arguments)]
    return outputs, tensors, [digest(t) for t in tensors]


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _tensors(value: Any) -> list[torch.Tensor]:
    return list({id(t): t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}.values())


def _widen(t: torch.Tensor) -> torch.Tensor:
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(t.dtype, t.dtype)
    return t.detach().to(wide).requires_grad_(t.requires_grad)


def _gradients(
    outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    pairs = [(o, t.to(o.dtype)) for o, t in zip(outputs, tangents, strict=True) if t is not None]
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True, retain_graph=False
    )
    return list(found)


def _compare(step: Any, references: Sequence[_Reference]) -> list[str | None]:
    """For each sample, what is wrong with it."""
    modules = [
        _leaves_of_own(_state(r.sample.target)) if isinstance(r.sample.target, torch.nn.Module) else {}
        for r in references
    ]
    arguments = [_leaves_of_own((r.sample.args, r.sample.kwargs)) for r in references]
    layers = [m for r, m in zip(references, modules, strict=True) if isinstance(r.sample.target, torch.nn.Module)]
    step = (
        step.bind({f"layers.{i}.{name}": t for i, state in enumerate(layers) for name, t in state.items()})
        if layers
        else step
    )
    torch.manual_seed(SEED)
    results = step(arguments)
    outputs = [[t for t in pytree.tree_leaves(r) if isinstance(t, torch.Tensor)] for r in results]
    tensors = [[*m.values(), *_tensors(a)] for m, a in zip(modules, arguments, strict=True)]
    tangents = [r.tangents for r in references]
    if references[0].random:
        return [None] * len(references)
    missing = [
        "an output has no gradient"
        if any(t is not None and not o.requires_grad for o, t in zip(os, ts, strict=True))
        else None
        for os, ts in zip(outputs, tangents, strict=True)
    ]
    if any(missing):
        return missing
    gradients = iter(_gradients(list(chain(*outputs)), list(chain(*tensors)), list(chain(*tangents))))
    problems = []
    for reference, outs, ins in zip(references, outputs, tensors, strict=True):
        grads = [next(gradients) for t in ins if t.requires_grad]
        problems.append(_find_problem(reference, outs, grads, ins))
    return problems


def _find_problem(
    reference: _Reference,
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor],
) -> str | None:
    exact: Sequence[torch.Tensor | None] = reference.exact[0] if reference.exact else [None] * len(outputs)
    exact_gradients = reference.exact[1] if reference.exact else [None] * len(gradients)
    for i, (ours, eager, wide) in enumerate(zip(outputs, reference.outputs, exact, strict=True)):
        problem = difference(ours, eager, wide)
        if problem:
            return f"output {i}: {problem}"
    for i, (mine, theirs, wide) in enumerate(zip(gradients, reference.gradients, exact_gradients, strict=True)):
        if mine is None and theirs is None:
            continue
        present = mine if mine is not None else theirs
        assert present is not None
        zero = torch.zeros_like(present)
        problem = difference(mine if mine is not None else zero, theirs if theirs is not None else zero, wide)
        if problem:
            return f"gradient {i}: {problem}"
    for i, (tensor, after) in enumerate(zip(tensors, reference.mutated, strict=True)):
        if digest(tensor) != after and not _only_rounded(tensor, reference.tensors[i]):
            return f"input {i} is changed other than by eager"
    return None


def _only_rounded(tensor: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether a tensor that the op writes to (running statistics) holds what eager has written there."""
    return difference(tensor, eager, None) is None


def difference(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None) -> str | None:
    """What sets a result apart from eager's, or from the ``exact`` one by much more than eager's; None if nothing."""
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} instead of {eager.dtype} {tuple(eager.shape)}"
    error = _distance(ours, eager)
    if error <= (TOLERANCE if eager.dtype.is_floating_point or eager.dtype.is_complex else 0):
        return None
    if exact is not None and eager.dtype.is_floating_point | eager.dtype.is_complex:
        theirs = min(_distance(eager, exact), WORST_EAGER_ERROR)
        mine = _distance(ours, exact)
        if mine <= max(TOLERANCE, EAGER_ERRORS * theirs):
            return None
        return f"off by {error:.1e} from eager, by {mine:.1e} from f64 (eager: {theirs:.1e})"
    return f"off by {error:.1e} from eager"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; infinite where only one has a NaN or an infinity."""
    left, right = _plain(a), _plain(b)
    if left.numel() == 0:
        return 0.0
    odd = ~torch.isfinite(left) | ~torch.isfinite(right)
    if not torch.equal(left[odd].nan_to_num(nan=12.5), right[odd].nan_to_num(nan=12.5)):
        return float("inf")
    left, right = left[~odd], right[~odd]
    if left.numel() == 0:
        return 0.0
    # A gradient that is zero but for rounding has no scale of its own.
    return float((left - right).abs().max()) / max(float(right.abs().max()), 1e-2)


def _plain(t: torch.Tensor) -> torch.Tensor:
    dense = t.detach().resolve_conj().resolve_neg()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    return torch.view_as_real(dense).double() if dense.is_complex() else dense.double()


def digest(t: torch.Tensor) -> str:
    """A hash of the bytes of a tensor."""
    dense = t.detach().resolve_conj().resolve_neg()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    return hashlib.sha256(dense.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def reason_of(error: BaseException) -> str:
    """What an error says, in a line: without places in files that are gone, or that differ from run to run."""
    message = getattr(error, "message", None) or str(error)
    line = message.strip().splitlines()[0]
    line = re.sub(r"^.*?error: ", "", line)
    line = re.sub(r'(, at| at)? File ".*', "", line)
    line = re.sub(r"/\S+/", "", line)
    line = re.sub(r"0x[0-9a-f]+", "0x...", line)
    return line[:300]


def _unexpected(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {reason_of(error)} ({last.name}, line {last.lineno})"
