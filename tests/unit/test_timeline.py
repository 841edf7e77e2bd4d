# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Timelines of memory: read from IREE's IR, shown as pictures and traces."""

import json
from pathlib import Path
from typing import Any

import pytest

from retrograd.pipelines.toolchain.timeline import Step, read_timelines
from retrograd.runtime.reports.report import Report
from retrograd.runtime.reports.timeline import SERIES, MemoryTimeline, to_trace

ALLOCATED = """
#loc1 = loc("/home/someone/model.py":12:0)
module {
  util.func public @backward_into(%arg0: !hal.buffer_view loc(unknown)) attributes {iree.abi.stub} {
    %c64 = arith.constant 64 : index loc(#loc)
    %c256 = arith.constant 256 : index loc(#loc)
    %c1000 = arith.constant 1000 : index loc(#loc)
    %0:2 = stream.resource.pack on(#a) slices({
      [0, 9] = %c1000
    }) : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<external>{%0#0} => !stream.timepoint loc(#loc)
    %1:3 = stream.resource.pack on(#a) slices({
      [0, 4] = %c64,
      [4, 7] = %c256
    }) : index loc(#loc)
    %r_1, %t_1 = stream.resource.alloca on(#a) : !stream.resource<transient>{%1#0} => !stream.timepoint loc(#loc)
    %offset = arith.addi %1#2, %c64 : index loc(#loc)
    %2 = stream.cmd.execute on(#a) await(%t_1) => with(%r_1 as %arg1: !stream.resource<transient>{%1#0}) {
      stream.cmd.concurrent {
        stream.cmd.dispatch @_encoding_8::@_encoding_8_encode_8x4xf32_to_8x4xf32 {
          wo %arg1[%1#1 for %c64] : !stream.resource<transient>{%1#0}
        } loc(#loc)
        stream.cmd.dispatch @backward_dispatch_0::@backward_dispatch_0_reduction_4x8_f32 {
          ro %arg1[%1#1 for %c64] : !stream.resource<transient>{%1#0}
        } loc(#loc4)
      } loc(#loc)
      stream.cmd.dispatch @backward_dispatch_1::@backward_dispatch_1_matmul_8x16x4_f32 {
        ro %arg1[%1#1 for %c64] : !stream.resource<transient>{%1#0},
        wo %arg1[%1#2 for %c256] : !stream.resource<transient>{%1#0}
      } loc(#loc3)
      stream.cmd.fill %c0_i32, %arg1[%offset for %c64] : i32 -> !stream.resource<transient>{%1#0} loc(#loc)
    } => !stream.timepoint loc(#loc)
    %r_2, %t_2 = stream.resource.alloca on(#a) : !stream.resource<transient>{%c256} => !stream.timepoint loc(#loc)
    %3 = stream.resource.dealloca on(#a) await(%2) => %r_1 : !stream.resource<transient>{%1#0} => !stream.timepoint
    %4 = stream.cmd.execute on(#a) await(%t_2) => with(%r_2 as %arg1: !stream.resource<transient>{%c256}) {
      stream.cmd.copy %arg0[%c0], %arg1[%c0], %c64 : !stream.resource<external>{%c64} loc(#loc)
    } => !stream.timepoint loc(#loc)
    util.return loc(#loc)
  } loc(#loc)
  util.func public @nothing() {
    util.return
  }
  util.func private @helper() {
    util.return
  }
}
#loc = loc(unknown)
#loc3 = loc(fused[#loc, #loc4])
#loc4 = loc(callsite(#loc at #loc1))
"""


def report(**held: int) -> dict[str, Any]:
    """A report of a forward of one step, and a backward of two."""
    halves = {
        "forward": {"held": held, "scratch": 100, "steps": [["matmul", "model.py:3", 60]]},
        "backward": {"held": held, "scratch": 80, "steps": [["matmul", "", 80], ["reduction", "model.py:4", 20]]},
    }
    return {"name": "Net", "partition": "min-cut", "timeline": halves}


def test_buffers_are_counted_from_the_first_step_that_names_them_to_the_last() -> None:
    timelines = read_timelines(ALLOCATED)
    assert timelines == {
        "backward_into": (
            Step("encode_8x4xf32_to_8x4xf32, reduction_4x8_f32", "model.py:12", 64),
            Step("matmul_8x16x4_f32", "model.py:12", 64 + 256),
            Step("fill", "", 256),
            # A region of its own, in a block that is not packed; the first block was freed.
            Step("copy", "", 256),
        ),
        "nothing": (),
    }
    assert read_timelines("module {\n}\n") == {}


def test_moments_say_what_is_held_and_what_lies_idle() -> None:
    timeline = MemoryTimeline.from_report(report(outputs=10, residuals=30))
    assert [m.total for m in timeline.moments] == [140, 120, 120]
    assert timeline.peak == 140
    assert [m.bytes["scratch in use"] for m in timeline.moments] == [60, 80, 20]
    assert [m.bytes["scratch reserved"] for m in timeline.moments] == [40, 0, 60]
    assert str(timeline.fullest()) == "forward: matmul (model.py:3)"
    assert timeline.name == "Net, min-cut"


def test_a_half_without_steps_still_holds_its_results() -> None:
    data = report(outputs=10)
    data["timeline"]["forward"] = {"held": {"outputs": 500}, "scratch": 0, "steps": []}
    timeline = MemoryTimeline.from_report(data)
    assert next((m.half, m.kernels, m.total) for m in timeline.moments) == ("forward", "nothing", 500)
    assert timeline.peak == 500


def test_a_trace_has_slices_and_counters_for_each_timeline() -> None:
    timelines = [MemoryTimeline.from_report(report(residuals=n)) for n in (7, 3)]
    trace = to_trace(timelines)
    assert json.loads(json.dumps(trace)) == trace
    events = trace["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["Net, min-cut"] * 2
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in slices] == [
        ("matmul", "forward", 0, 1000),
        ("matmul", "backward", 1000, 1000),
        ("reduction", "backward", 2000, 1000),
    ]
    totals = [e["args"]["bytes"] for e in events if e["name"] == "bytes allocated" and e["pid"] == 2]
    assert totals == [103, 83, 83, 0]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"bytes allocated", *SERIES}


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.json", b"{")])
def test_the_ending_of_a_path_says_what_is_written(tmp_path: Path, name: str, start: bytes) -> None:
    path = tmp_path / name
    Report(report(outputs=1)).save_timeline(path)
    alone = path.read_bytes()
    assert alone.startswith(start)
    Report(report(outputs=1)).save_timeline(path, before=Report(report(outputs=2)))
    assert path.read_bytes() != alone


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Format 'xyz' is not supported"):
        Report(report()).save_timeline(tmp_path / "a.xyz")
    with pytest.raises(ValueError, match="no timeline of memory: compile the model again"):
        Report({"name": "old"}).timeline()
    with pytest.raises(ValueError, match="differs with the sizes: compile without dynamic_shapes"):
        Report({**report(), "sizes": ["batch = 6 (2 or more)"]}).timeline()
    with pytest.raises(FileNotFoundError):
        Report(report()).save_timeline(tmp_path / "no" / "a.json")
