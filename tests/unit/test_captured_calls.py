# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""When a captured half is replayed, and when it must not be; with a recorder that does on a CPU what a CUDA graph
does: it reads and writes the memory that it was recorded with."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.runtime.cuda import captured_calls
from retrograd.runtime.cuda.captured_calls import CapturedCall, Recording
from retrograd.runtime.cuda.host_share import HostShare


class FakeRecorder:
    """Recorded work is run anew on the arguments' memory, into the results' memory."""

    def __init__(self) -> None:
        self.current, self.recorded, self.fails = 0, 0, False
        self.free, self.taken = 100, 10

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        if self.fails:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.recorded += 1
        results = list(run())
        # The results hold nothing until a replay.
        for result in results:
            result.fill_(float("nan"))

        def replay() -> None:
            for result, value in zip(results, run(), strict=True):
                result.copy_(value)

        return Recording(replay, results, self.taken)

    def stream(self) -> int:
        return self.current

    def is_recording(self) -> bool:
        return False

    def free_bytes(self) -> int:
        return self.free


class FakeClock:
    """Each call takes the share of the device's time that it is told; the device has done it when it is told."""

    def __init__(self, *shares: float, is_done: bool = True) -> None:
        self.shares, self.is_done, self.timed = list(shares), is_done, 0

    def time(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], float | None]]:
        share = self.shares[self.timed]
        self.timed += 1
        return run(), lambda: share if self.is_done else None


@pytest.fixture(autouse=True)
def _no_results() -> Iterator[None]:
    captured_calls._RESULTS.clear()
    yield
    captured_calls._RESULTS.clear()


def specs(roles: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"t{i}", role, (4,), "float32") for i, role in enumerate(roles.split()))


def make(
    call: Callable[..., Sequence[Tensor]],
    roles: str,
    results: str,
    recorder: FakeRecorder,
    clock: FakeClock | None = None,
) -> CapturedCall:
    function = FunctionSpec("forward", specs(roles), specs(results))
    share = None if clock is None else HostShare(clock)
    return CapturedCall(lambda tensors: call(*tensors), function, recorder, share)


def scale(weight: Tensor, x: Tensor) -> list[Tensor]:
    return [weight * x]


def run(call: CapturedCall, weight: Tensor, times: int) -> None:
    """Calls on new inputs, whose results are right and let go."""
    for _ in range(times):
        x = torch.randn(4)
        (result,) = call([weight, x])
        torch.testing.assert_close(result, weight * x)
        del result


def test_it_is_captured_after_some_calls_and_replayed() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    call = make(scale, "param input", "grad", recorder)
    run(call, weight, 3)
    assert (recorder.recorded, call.replays) == (0, 0)
    run(call, weight, 9)
    assert call.replays == 9
    assert recorder.recorded == 1


def test_what_is_held_is_not_overwritten() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    call = make(scale, "param input", "grad", recorder)
    run(call, weight, 8)
    x = torch.randn(4)
    (held,) = call([weight, x])
    view = held[1:]
    expected = view.clone()
    del held
    replays = call.replays
    run(call, weight, 5)
    assert call.replays == replays
    assert torch.equal(view, expected)
    del view
    run(call, weight, 1)
    assert call.replays == replays + 1


def test_outputs_may_be_held() -> None:
    """A loss is held until the next one is there."""
    recorder, weight = FakeRecorder(), torch.randn(4)
    call = make(scale, "param input", "output", recorder)
    losses: list[Tensor] = []
    expected = []
    for _ in range(10):
        x = torch.randn(4)
        losses += call([weight, x])
        expected.append(weight * x)
    assert call.replays >= 5
    torch.testing.assert_close(losses, expected)


def test_a_write_to_a_parameter_is_seen() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    call = make(scale, "param input", "grad", recorder)
    run(call, weight, 6)
    weight.mul_(3)
    run(call, weight, 2)
    assert recorder.recorded == 1


def test_a_parameter_in_other_memory() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    call = make(scale, "param input", "grad", recorder)
    run(call, weight, 6)
    other = torch.randn(4)
    run(call, other, 4)
    run(call, weight, 4)
    assert call.replays


def test_residuals_of_a_capture_are_not_copied() -> None:
    """A backward reads them where its forward's capture has them, and does not count as holding them."""
    recorder, weight = FakeRecorder(), torch.randn(4)
    forward = make(lambda w, x: [w * x, w + x], "param input", "output saved", recorder)
    backward = make(lambda saved, tangent: [saved * tangent], "saved tangent", "grad", recorder)
    for _ in range(16):
        x, tangent = torch.randn(4), torch.randn(4)
        _, saved = forward([weight, x])
        (grad,) = backward([saved, tangent])
        torch.testing.assert_close(grad, (weight + x) * tangent)
        del saved, grad
    assert (forward.replays, backward.replays) == (13, 13)
    assert backward._capture is not None
    assert set(backward._capture.copies) == {1}


def test_a_residual_that_is_an_argument_is_copied_in() -> None:
    recorder = FakeRecorder()
    backward = make(lambda saved, tangent: [saved * tangent], "saved tangent", "grad", recorder)
    kept = []
    for _ in range(12):
        x, tangent = torch.randn(4), torch.randn(4)
        kept.append(x)
        (grad,) = backward([x, tangent])
        torch.testing.assert_close(grad, x * tangent)
        del grad
    assert backward._capture is not None
    assert set(backward._capture.copies) == {0, 1}


def test_two_forwards_before_a_backward() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    forward = make(lambda w, x: [w * x, w + x], "param input", "output saved", recorder)
    for _ in range(8):
        inputs = [torch.randn(4) for _ in range(2)]
        saved = [forward([weight, x])[1] for x in inputs]
        torch.testing.assert_close(saved, [weight + x for x in inputs])


def test_another_stream_does_without() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    call = make(scale, "param input", "grad", recorder)
    run(call, weight, 6)
    replays = call.replays
    recorder.current = 7
    run(call, weight, 3)
    assert call.replays == replays


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    recorder.fails = True
    call = make(scale, "param input", "grad", recorder)
    run(call, weight, 6)
    assert call.describe() == "not captured: operation not permitted"


def test_results_that_are_arguments() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    call = make(lambda w, x: [w], "param input", "saved", recorder)
    for _ in range(6):
        (result,) = call([weight, torch.randn(4)])
        assert result is weight or torch.equal(result, weight)
    assert "as it is" in call.describe()


def test_what_always_moves_is_given_up() -> None:
    recorder = FakeRecorder()
    call = make(scale, "param input", "grad", recorder)
    kept = []
    for turn in range(40):
        weight, x = torch.randn(4), torch.randn(4)
        kept += [weight, x]
        (result,) = call([weight, x])
        torch.testing.assert_close(result, weight * x)
        del result
        assert turn < 39 or call.replays or call.reason


def test_it_is_captured_where_the_host_holds_the_device_back() -> None:
    recorder, clock, weight = FakeRecorder(), FakeClock(0.5, 1.0, 0.9), torch.randn(4)
    call = make(scale, "param input", "grad", recorder, clock)
    run(call, weight, 6)
    assert (recorder.recorded, clock.timed) == (0, 3)
    run(call, weight, 4)
    assert (recorder.recorded, call.replays) == (1, 4)


def test_it_is_not_captured_where_the_device_has_work_waiting() -> None:
    recorder, clock, weight = FakeRecorder(), FakeClock(0.5, 1.0, 0.6), torch.randn(4)
    call = make(scale, "param input", "grad", recorder, clock)
    run(call, weight, 10)
    assert (recorder.recorded, clock.timed) == (0, 3)
    assert call.describe() == "not captured: the device is busy: to queue a call takes 60% of its time there"


def test_nothing_is_decided_before_the_device_is_done() -> None:
    recorder, clock, weight = FakeRecorder(), FakeClock(1.0, 1.0, 1.0, is_done=False), torch.randn(4)
    call = make(scale, "param input", "grad", recorder, clock)
    run(call, weight, 10)
    assert (recorder.recorded, clock.timed, call.reason) == (0, 3, None)
    clock.is_done = True
    run(call, weight, 2)
    assert call.replays == 2


def test_a_capture_that_leaves_too_little_memory_is_given_back() -> None:
    recorder, weight = FakeRecorder(), torch.randn(4)
    recorder.taken, recorder.free = 3 << 20, 2 << 20
    call = make(scale, "param input", "grad", recorder, FakeClock(1.0, 1.0, 1.0))
    run(call, weight, 10)
    assert (recorder.recorded, call.replays) == (1, 0)
    assert call.describe() == "not captured: it would keep 3 MiB, and 2 are left"
