# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a user can get wrong, and what they are told: before anything runs, and with nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd.runtime.cache import Cache


@pytest.fixture(scope="module")
def step() -> retrograd.CompiledBackward:
    return retrograd.compile_backward(nn.Linear(4, 2), (torch.randn(3, 4),))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.randn(5, 4),), {}, r"args\[0\]: expected torch.float32 of shape \(3, 4\).*found .*\(5, 4\)"),
        ((torch.randn(3, 4).double(),), {}, r"args\[0\]: expected torch.float32.*found torch.float64"),
        ((torch.randn(3, 4, device="meta"),), {}, r"args\[0\]: .* on cpu, found .* on meta"),
        ((torch.randn(3, 4).to_sparse(),), {}, r"args\[0\]: expected a dense tensor"),
        (
            (torch.nested.nested_tensor([torch.randn(3, 4)]),),
            {},
            r"args\[0\]: expected a dense tensor .*a nested one",
        ),
        ((3.0,), {}, r"args\[0\]: expected a tensor .*found float"),
        ((None,), {}, r"args\[0\]: expected a tensor .*found NoneType"),
        ((torch.randn(3, 4), torch.randn(3, 4)), {}, r"expected 1 positional arguments, found 2"),
        ((), {}, r"expected 1 positional arguments, found 0"),
        ((torch.randn(3, 4),), {"mask": None}, r"unexpected kwargs\['mask'\]"),
    ],
)
def test_wrong_arguments(
    step: retrograd.CompiledBackward, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(retrograd.ArgumentError, match=message):
        step(*args, **kwargs)


def test_wrong_constant() -> None:
    def scaled(x: Tensor, factor: float) -> Tensor:
        return x * factor

    compiled = retrograd.compile_backward(scaled, (torch.randn(2, requires_grad=True), 2.0))
    with pytest.raises(retrograd.ArgumentError, match=r"args\[1\]: compiled for the constant 2.0, found 3.0"):
        compiled(torch.randn(2, requires_grad=True), 3.0)


def test_changed_model() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm)
    x = torch.randn(3, 4)
    compiled = retrograd.compile_backward(model, (x,))
    model.eval()
    # Compiled once more, for validation; both are kept.
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    model.train()
    assert norm.running_mean is not None
    mean = norm.running_mean.clone()
    compiled(x)
    assert not torch.equal(norm.running_mean, mean)
    assert compiled.explain().to_dict()["specializations"] == ["compiled in train mode, and Sequential no longer is"]
    model[0].weight = nn.Parameter(torch.randn(5, 4))
    with pytest.raises(retrograd.ArgumentError, match=r"0.weight: expected .*\(4, 4\).*found .*\(5, 4\)"):
        compiled(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:  # the line that the error names
            return y
        return -y


def closure() -> Callable[[Tensor], Tensor]:
    weight = torch.randn(4, requires_grad=True)
    return lambda x: x * weight


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (
            Branching(),
            (torch.randn(3, 4),),
            rf"data-dependent control flow.*{__file__}\", line {line_of('error names')}",
        ),
        (
            lambda x: x.repeat_interleave(torch.fft.fft(x).abs().long(), 0),
            (torch.randn(3, requires_grad=True),),
            r"data-dependent shape.*pass output_size=",
        ),
        (
            closure(),
            (torch.randn(3, 4, requires_grad=True),),
            r"requires grad is neither an argument nor a parameter.*weight",
        ),
        (nn.Linear(4, 2), (torch.randn(3, 5),), r"linear.py.*F.linear"),
        (lambda x: x * 2, (torch.randn(3),), r"nothing to differentiate.*remedy: make it the forward of an nn.Module"),
        (lambda x: x.detach() * 2, (torch.randn(3, requires_grad=True),), r"nothing to differentiate"),
        (
            lambda x: torch.linalg.vector_norm(x, 0),
            (torch.randn(3, requires_grad=True),),
            r"nothing to differentiate.*is None",
        ),
        (
            lambda x: x[torch.randperm(3)],
            (torch.randn(3, requires_grad=True),),
            r"randperm.*test_bad_input.py:\d+ is not compiled: it draws random numbers",
        ),
        (
            lambda x: torch.linalg.eigvals(x).abs(),
            (torch.randn(3, 3, requires_grad=True),),
            r"aten.*test_bad_input.py:\d+ is not compiled: it computes with complex64",
        ),
        (
            lambda q: torch.ops.aten._efficient_attention_forward(
                q, q, q, None, None, None, None, None, 0.0, 1, True, scale=1.0
            )[0],
            (torch.randn(1, 2, 2, 8, requires_grad=True),),
            r"PyTorch cannot trace aten._efficient_attention_backward.default, .*TypeError: .*'scale'.*outside of the",
        ),
    ],
    ids=["branch", "repeats", "closure", "shape", "no-grad", "detached", "none", "random", "complex", "untraceable"],
)
def test_not_captured(model: Callable[..., Any], args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(retrograd.CaptureError, match=re.compile(message, re.DOTALL)) as caught:
        retrograd.compile_backward(model, args, fallback="error")
    assert "remedy" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((nn.Linear(4, 2), torch.randn(3, 4)), r"a tensor is given as the arguments .*\n.*write \(x,\)"),
        ((nn.Linear(4, 2), {"input": torch.randn(3, 4)}), r"are of type dict.*\n.*goes into kwargs"),
        ((nn.Linear(4, 2), None), r"are of type NoneType.*\n.*write \(x,\)"),
        ((nn.Linear(4, 2), "x"), r"are of type str.*\n.*write \(x,\)"),
        ((nn.Linear(4, 2), (), [torch.randn(3, 4)]), r"kwargs are no arguments by name"),
        ((nn.Linear(4, 2), (), {1: torch.randn(3, 4)}), r"kwargs are no arguments by name"),
        ((nn.Linear, (torch.randn(3, 4),)), r"the model is the class Linear, not a module"),
        ((None, (torch.randn(3, 4),)), r"the model is of type NoneType, not a module"),
        ((torch.jit.script(nn.Linear(4, 2)), (torch.randn(3, 4),)), r"TorchScript module.*\n.*scripted from"),
        (
            (torch.compile(nn.Linear(4, 2), backend="eager"), (torch.randn(3, 4),)),
            r"what torch.compile has made(?s:.*)backend=.retro",
        ),
    ],
)
def test_what_is_no_call(call: tuple[Any, ...], message: str) -> None:
    with pytest.raises(retrograd.CaptureError, match=message):
        retrograd.compile_backward(*call)


def test_what_was_compiled_is_no_model(step: retrograd.CompiledBackward) -> None:
    with pytest.raises(
        retrograd.CaptureError, match=r"what compile_backward has made\n.*the model that it was made from"
    ):
        retrograd.compile_backward(step, (torch.randn(3, 4),))


def test_compiling_while_gradients_are_off() -> None:
    with torch.no_grad(), pytest.raises(retrograd.CaptureError, match=r"gradients are off(?s:.*)compile outside of it"):
        retrograd.compile_backward(nn.Linear(4, 2), (torch.randn(3, 4),))


def test_a_report_is_no_wider_than_the_terminal(
    step: retrograd.CompiledBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns, width in (("80", 80), ("200", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert max(map(len, str(step.explain()).splitlines())) == width


def unsupported(x: Tensor) -> Tensor:
    return torch.nextafter(x.bfloat16(), x.bfloat16() + 1)  # the op without a lowering


def test_failed_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(retrograd.CompileError) as caught:
        retrograd.compile_backward(unsupported, (torch.randn(3, 4, requires_grad=True),), fallback="error")
    message = str(caught.value)
    assert "aten.nextafter.default at " in message
    assert "remedy: leave fallback=" in message
    assert f"{__file__}:{line_of('without a lowering')}" in message
    assert Cache().entries() == []
    replay = shlex.split(caught.value.replay)
    assert replay[0] == "retrograd-opt"
    again = subprocess.run(
        [sys.executable, "-m", "retrograd.tools.opt", *replay[1:]], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert "aten.nextafter" in again.stderr
    # The input of the replay command, and nothing else but the cache, which has locks and no entry. (PyTorch makes a
    # folder where it first decomposes an op.)
    left = [name for name in os.listdir(tmp_path) if name != "cache" and "inductor" not in name]
    assert left == [Path(replay[1]).name]


SLOW = """
import signal, sys, torch, retrograd
from torch import nn
# A shell has what it starts in the background ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
model = nn.Sequential(*[nn.Conv2d(4 + i, 5 + i, 3, padding=1) for i in range(2)])
print("ready", flush=True)
def report(phase):
    print(phase, flush=True)
retrograd.compile_backward(model, (torch.randn(2, 4, 16, 16),), cache=True, progress=report)
"""


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "RETROGRAD_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "iree-compile":
            break
    deadline = time.monotonic() + 60
    while not (children := _children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children, "no compiler was started"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr, f"ended with {process.returncode}: {stderr}"
    # Interrupted while it starts one, the process ends, and the system ends the child, a moment later.
    deadline = time.monotonic() + 10
    while (left := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
    assert not list(tmp_path.glob("retrograd-*"))
    assert Cache(tmp_path / "cache").entries() == []


def _children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(p) for p in found.split()]


def test_broken_files(step: retrograd.CompiledBackward, tmp_path: Path) -> None:
    path = tmp_path / "model.vmfb"
    step.save(path)
    whole = path.read_bytes()
    for name, data, message in (
        ("empty", b"", "not an artifact|truncated|empty"),
        ("text", b"hello" * 100, "not an artifact"),
        ("truncated", whole[: len(whole) // 2], "truncated"),
        ("altered", whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:], "altered"),
    ):
        broken = tmp_path / name
        broken.write_bytes(data)
        with pytest.raises(retrograd.ArtifactError, match=message):
            retrograd.load(broken)
    with pytest.raises(retrograd.ArtifactError, match="no such file"):
        retrograd.load(tmp_path / "nowhere.vmfb")
    with pytest.raises(retrograd.ArgumentError, match="no parameter or buffer 'weight'"):
        retrograd.load(path, nn.ReLU())
    with pytest.raises(retrograd.ArgumentError, match="load it with model="):
        retrograd.load(path)(torch.randn(3, 4))


def test_save_to_nowhere(step: retrograd.CompiledBackward, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        step.save(tmp_path / "no" / "such" / "folder.vmfb")


def test_nested_tensors() -> None:
    """They are refused by what they are, and, as arguments of what ``torch.compile`` is given, left to eager."""
    parts = [torch.ones(3, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)]

    def nests(x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = torch.nested.as_nested_tensor([x, y], layout=torch.jagged).sin().values()
        return made.sum()

    def sines(nested: Tensor) -> Tensor:
        return nested.sin().values().sum()

    with pytest.raises(retrograd.CaptureError, match=r"a nested tensor is made(?s:.*)test_bad_input(?s:.*)pad what"):
        retrograd.compile_backward(nests, parts)
    with pytest.raises(retrograd.CaptureError, match=r"args\[0\] is a nested tensor"):
        retrograd.compile_backward(lambda x: x, (torch.nested.as_nested_tensor(parts),))
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    found = torch.compile(sines, backend="retrograd")(jagged)
    torch.testing.assert_close(torch.autograd.grad(found, parts), torch.autograd.grad(nests(*parts), parts))
