# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards that are hard to capture: under PyTorch's own compiled autograd and under `retrograd.enable()`.

    python examples/beside_compiled_autograd.py
    python examples/beside_compiled_autograd.py --cases "reentrant checkpoint" "two threads"

Each case trains the same few tensors for some steps, eagerly and captured, and compares what it saw: gradients, and the
order in which Python was called. Both run in processes of their own. Ends with exit code 1 if retrograd differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# PyTorch's compiles the captured graph with Dynamo, which may break it up or, in one graph, refuses to.
ENGINES = ("retrograd", "compiled autograd", "in one graph")
Scope = Callable[[], AbstractContextManager[Any]]
# What a case saw: names of what was called, and tensors.
Seen = list[str | Tensor]
STEPS = 3
SECONDS = 600


def leaf(seed: int) -> Tensor:
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()


def reentrant_checkpoint(scope: Scope) -> Seen:
    """A parameter is used in a block, whose backward runs inside the backward, and before it."""
    x, w = leaf(0), leaf(1)
    seen: Seen = []
    for _ in range(STEPS):
        h = checkpoint(lambda h: (h @ w).tanh(), x @ w, use_reentrant=True)
        with scope():
            h.sum().backward()
        seen += [gradient_of(x), gradient_of(w)]
    return seen


def queue_callback(scope: Scope) -> Seen:
    """A hook has a function called when the backward is done."""
    x = leaf(0)
    seen: Seen = []

    def hook(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: seen.append("callback"))

    for _ in range(STEPS):
        y = x.sin()
        y.register_hook(hook)
        with scope():
            y.sum().backward()
        seen += ["done", gradient_of(x)]
    return seen


def two_threads(scope: Scope) -> Seen:
    """Two threads are in a backward at the same time."""
    results: dict[int, Seen] = {}
    errors: list[Exception] = []
    together = threading.Barrier(2)

    def train(number: int) -> None:
        x = leaf(number)
        seen: Seen = []
        try:
            for _ in range(STEPS):
                y = x.cos()
                y.register_hook(lambda gradient: time.sleep(0.05))
                together.wait(timeout=SECONDS / 10)
                with scope():
                    y.sum().backward()
                seen.append(gradient_of(x))
        except Exception as error:  # noqa: BLE001 (raised below, in the main thread)
            together.abort()
            errors.append(error)
        results[number] = seen

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [*results[0], *results[1]]


def unpack_after_prehook(scope: Scope) -> Seen:
    """Eager calls a node's pre-hook, then unpacks what the node saved."""
    x = leaf(0)
    seen: Seen = []

    def unpack(tensor: Tensor) -> Tensor:
        seen.append("unpack")
        return tensor

    for _ in range(STEPS):
        with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
            y = x.sin()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda gradients: seen.append("prehook"))
        with scope():
            y.sum().backward()
        seen.append(gradient_of(x))
    return seen


def backward_in_a_hook(scope: Scope) -> Seen:
    """A hook runs a backward of its own."""
    x, other = leaf(0), leaf(1)
    seen: Seen = []

    def hook(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            (other * gradient.detach()).sum().backward()
        return gradient * 2

    for _ in range(STEPS):
        y = x.tanh()
        y.register_hook(hook)
        with scope():
            y.sum().backward()
        seen += [gradient_of(x), gradient_of(other)]
    return seen


def gradients_of_gradients(scope: Scope) -> Seen:
    """``create_graph=True``: a backward that is differentiated in turn."""
    x = leaf(0)
    seen: Seen = []
    for _ in range(STEPS):
        with scope():
            (first,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
            first.square().sum().backward()
        seen += [first.detach(), gradient_of(x)]
    return seen


def an_error_in_a_hook(scope: Scope) -> Seen:
    """A hook raises at one step; the next is as if nothing had been."""
    x = leaf(0)
    seen: Seen = []
    for step in range(STEPS):

        def hook(gradient: Tensor, step: int = step) -> None:
            if step == 1:
                raise ZeroDivisionError("in a hook")

        y = x.exp()
        y.register_hook(hook)
        try:
            with scope():
                y.sum().backward()
        except ZeroDivisionError as error:
            seen.append(f"{type(error).__name__}: {error}")
        seen.append(gradient_of(x))
    return seen


CASES: dict[str, Callable[[Scope], Seen]] = {
    case.__name__.replace("_", " "): case
    for case in (
        reentrant_checkpoint,
        queue_callback,
        two_threads,
        unpack_after_prehook,
        backward_in_a_hook,
        gradients_of_gradients,
        an_error_in_a_hook,
    )
}


def judge(case: Callable[[Scope], Seen], scope: Scope) -> str:
    """What a case under ``scope`` has other than in eager."""
    eager = case(nullcontext)
    try:
        found = case(scope)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the verdict)
        return f"raises {type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    calls = [[part for part in seen if isinstance(part, str)] for seen in (found, eager)]
    if calls[0] != calls[1]:
        return f"wrong calls: {' '.join(calls[0][:4])} instead of {' '.join(calls[1][:4])}"
    pairs = zip(found, eager, strict=True)
    off = [float((a - b).norm() / b.norm()) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return "right" if max(off) < 2e-5 else f"wrong gradients, off by {max(off):.0%}"


def scope_of(engine: str) -> Scope:
    if engine == "retrograd":
        import retrograd

        return retrograd.enable
    from torch._dynamo import compiled_autograd

    compiler = torch.compile(backend="eager", fullgraph=engine == "in one graph")
    return lambda: compiled_autograd._enable(compiler)


def compare(cases: Sequence[str], engines: Sequence[str] = ENGINES) -> dict[str, dict[str, str]]:
    """The verdicts on cases, by engine; each runs them in a process of its own."""
    verdicts: dict[str, dict[str, str]] = {}
    for engine in engines:
        command = [sys.executable, __file__, "--engine", engine, "--cases", *cases]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
        lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("[")]
        verdicts[engine] = dict.fromkeys(cases, f"the process ended with {child.returncode}") | dict(lines)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--engine", choices=ENGINES, help="run the cases here, under this one")
    arguments = parser.parse_args()
    if arguments.engine:
        warnings.simplefilter("ignore")
        for case in arguments.cases:
            print(json.dumps([case, judge(CASES[case], scope_of(arguments.engine))]), flush=True)
        return 0
    verdicts = compare(arguments.cases)
    for engine in ENGINES:
        print(f"{engine}, torch {torch.__version__}")
        for case in arguments.cases:
            print(f"    {case:24} {verdicts[engine][case]}")
    return int(any(verdict != "right" for verdict in verdicts["retrograd"].values()))


if __name__ == "__main__":
    sys.exit(main())
