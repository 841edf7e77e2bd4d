# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scratch memory, read off IREE's IR."""

from retrograd.pipelines.toolchain.pool import Pool
from retrograd.pipelines.toolchain.scratch import read_transients

STREAM = """
module {
  util.func public @forward(%arg0: !hal.buffer_view) -> !hal.buffer_view attributes {iree.abi.stub} {
    %c64 = arith.constant 64 : index
    %c100 = arith.constant 100 : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<external>{%c100} => !stream.timepoint
    %r_0, %t_0 = stream.resource.alloca on(#a) : !stream.resource<transient>{%c64} => !stream.timepoint
    %r_1, %t_1 = stream.resource.alloca on(#a) : !stream.resource<transient>{%c100} => !stream.timepoint
    %t_2 = stream.resource.dealloca on(#a) await(%t_1) => %r_0 : !stream.resource<transient>{%c64} => !stream.timepoint
    scf.if %flag {
    }
    %r_3, %t_3 = stream.resource.alloca on(#a) : !stream.resource<transient>{%c64} => !stream.timepoint
    util.return %v : !hal.buffer_view
  }
  util.func public @backward_into(%arg0: !hal.buffer_view) attributes {iree.abi.stub} {
    %c64 = arith.constant 8 : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<transient>{%c64} => !stream.timepoint
    util.return
  }
  util.func public @twice_into(%arg0: !hal.buffer_view, %arg1: !hal.buffer_view) attributes {iree.abi.stub} {
    %c64 = arith.constant 64 : index
    %c8 = arith.constant 8 : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<external>{%c64} => !stream.timepoint
    %r_0, %t_0 = stream.resource.alloca on(#a) : !stream.resource<transient>{%c8} => !stream.timepoint
    util.return
  }
  util.func private @helper() {
    %c64 = arith.constant 64 : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<transient>{%c64} => !stream.timepoint
    util.return
  }
  util.func public @nothing() {
    util.return
  }
}
"""
# What IREE writes for open sizes: dimensions, sizes that are arguments, and arithmetic on both.
OPEN = """
module attributes {bwd.partition = {policy = "default"}, bwd.sizes = {b = 5 : i64, t = 3 : i64}} {
  util.func public @rows(%arg0: !hal.buffer_view {bwd.name = "x", bwd.shape = "b, 2 * t, 8"}, %arg1: i64 {bwd.name = "t", bwd.role = "size", bwd.value = "s"}) -> !hal.buffer_view {
    %c64 = arith.constant 64 : index loc(#loc8)
    %c16 = arith.constant 16 : index
    %0 = hal.buffer_view.dim<%arg0 : !hal.buffer_view>[0] : index loc(#loc8)
    %1 = hal.buffer_view.dim<%arg0 : !hal.buffer_view>[1] : index
    %2 = arith.muli %0, %1 overflow<nsw> : index
    %3 = arith.ceildivsi %2, %c16 : index
    %4 = arith.index_cast %arg1 : i64 to index
    %5 = util.align %4, %c64 : index
    %6 = arith.cmpi slt, %4, %c16 : index
    %7 = arith.select %6, %5, %c16 : index
    %8 = arith.addi %7, %3 : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<transient>{%8} => !stream.timepoint
    util.return %v : !hal.buffer_view
  }
  util.func public @data(%arg0: !hal.buffer_view {bwd.name = "x"}, %arg1: i64 {bwd.name = "t", bwd.role = "size"}) {
    %0 = hal.buffer_view.dim<%arg0 : !hal.buffer_view>[0] : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<transient>{%0} => !stream.timepoint
    util.return
  }
}
"""  # noqa: E501

FREES = """
  util.func public @{name}() {{
    %c64 = arith.constant 64 : index
    %c100 = arith.constant 100 : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<transient>{{%c64}} => !stream.timepoint
    %0 = stream.cmd.execute on(#a) await(%t) => with(%r as %arg0: !stream.resource<transient>{{%c64}}) {{
    }} => !stream.timepoint
    %1 = stream.resource.dealloca on(#a) await(%0) => %r : !stream.resource<transient>{{%c64}} => !stream.timepoint
    %2 = stream.timepoint.join max(%0, %1) => !stream.timepoint
    {wait}
    %r_0, %t_0 = stream.resource.alloca on(#a) await(%2) : !stream.resource<transient>{{%c100}} => !stream.timepoint
    %3 = stream.resource.dealloca on(#a) await(%t_0) => %r_0 : !stream.resource<transient>{{%c100}} => !stream.timepoint
    util.return
  }}
"""
WAITS = {
    "ahead": "",
    "waits": "%9 = stream.timepoint.await %2 => %v : !stream.resource<external>{%c64}",
    # For a timepoint that the freeing comes after.
    "elsewhere": "%9 = stream.timepoint.await %0 => %v : !stream.resource<external>{%c64}",
}
AHEAD = f"module {{{''.join(FREES.format(name=name, wait=wait) for name, wait in WAITS.items())}}}"


def test_scratch_bytes_are_the_peak_of_each_exported_function() -> None:
    # 64 and 100 together are more than 100 and 64 after the first 64 are freed; constants are each function's own.
    assert read_transients(STREAM) == {"forward": 164, "backward_into": 8, "twice_into": 64 + 8, "nothing": 0}
    assert read_transients("module {\n}\n") == {}


def test_open_sizes_are_those_of_the_trace() -> None:
    """5 x 6 rows in blocks of 16 are 2, and 3 is aligned to 64; of a size that nothing tells, nothing is said."""
    assert read_transients(OPEN) == {"rows": 66}


def test_a_driver_that_runs_ahead_frees_where_the_host_waits() -> None:
    """Of 64 that are freed before 100 are allocated, both are there until the host has waited for the freeing."""
    assert read_transients(AHEAD) == {"ahead": 100, "waits": 100, "elsewhere": 100}
    assert read_transients(AHEAD, frees_late=True) == {"ahead": 164, "waits": 100, "elsewhere": 164}


def test_a_number_behind_a_barrier_is_that_number() -> None:
    """Storage that a loop carries has such a size."""
    stream = """module {
  util.func public @forward(%arg0: !hal.buffer_view) -> !hal.buffer_view attributes {} {
    %c64 = arith.constant 64 : index
    %0 = util.optimization_barrier %c64 : index
    %1 = arith.muli %0, %c64 : index
    %2, %3 = stream.resource.alloca uninitialized : !stream.resource<transient>{%1} => !stream.timepoint
  }
}
"""
    assert read_transients(stream) == {"forward": 64 * 64}


# Each round's state is allocated while the one before is there: 100 at the first, 10 later; and 3 is freed by name.
LOOP = """module {
  util.func public @rounds(%arg0: !hal.buffer_view, %arg1: i1) -> !hal.buffer_view attributes {} {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c3 = arith.constant 3 : index
    %c10 = arith.constant 10 : index
    %c100 = arith.constant 100 : index
    %r, %t = stream.resource.alloca on(#a) : !stream.resource<transient>{%c100} => !stream.timepoint
    cf.br ^bb1(%c0, %r, %c100, %t : index, !stream.resource<transient>, index, !stream.timepoint) loc(#loc)
  ^bb1(%0: index loc(callsite(#loc3 at #loc1)), %1: !stream.resource<transient>, %2: index, %3: !stream.timepoint):
    %4 = arith.cmpi slt, %0, %c{rounds} : index
    cf.cond_br %{condition}, ^bb2, ^bb3 loc(#loc)
  ^bb2:  // pred: ^bb1
    %r_0, %t_0 = stream.resource.alloca on(#a) await(%3) => !stream.resource<transient>{%c10} => !stream.timepoint
    %r_1, %t_1 = stream.resource.alloca on(#a) await(%3) => !stream.resource<transient>{%c3} => !stream.timepoint
    %5 = stream.cmd.execute on(#a) await(%t_1) => with(%1 as %arg2: !stream.resource<transient>{%2}) {
    } => !stream.timepoint
    %6 = stream.resource.dealloca on(#a) await(%5) => %r_1 : !stream.resource<transient>{%c3} => !stream.timepoint
    %7 = arith.addi %0, %c1 : index
    cf.br ^bb1(%7, %r_0, %c10, %6 : index, !stream.resource<transient>, index, !stream.timepoint) loc(#loc)
  ^bb3:  // pred: ^bb1
    %r_2, %t_2 = stream.resource.alloca on(#a) await(%3) => !stream.resource<transient>{%{last}} => !stream.timepoint
    %8 = stream.cmd.execute on(#a) await(%t_2) => with(%r_2 as %arg2: !stream.resource<transient>{%{last}}) {
    } => !stream.timepoint
    util.return %arg0 : !hal.buffer_view
  }
}
"""


def _rounds(*, rounds: str = "10", condition: str = "4", last: str = "c100") -> str:
    parts = {"{rounds}": rounds, "{condition}": condition, "{last}": last}
    text = LOOP
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def test_what_a_loop_carries_lives_until_nothing_refers_to_it() -> None:
    assert read_transients(_rounds(last="c3")) == {"rounds": 100 + 10 + 3}
    # Behind the loop there are the last state, which nothing reads any longer, and what is allocated then.
    assert read_transients(_rounds()) == {"rounds": 100 + 10 + 3}
    assert read_transients(_rounds(last="c3").replace("<transient>", "<constant>")) == {"rounds": 100 + 10 + 3}
    assert read_transients(_rounds(rounds="0")) == {"rounds": 100}
    assert read_transients(_rounds(rounds="1", last="2")) == {"rounds": 100 + 10 + 3}


def test_a_driver_that_runs_ahead_holds_all_rounds() -> None:
    assert read_transients(_rounds(rounds="3"), frees_late=True) == {"rounds": 100 + 3 * (10 + 3) + 100}


def test_a_loop_that_depends_on_data_is_run_once() -> None:
    assert read_transients(_rounds(condition="arg1")) == {"rounds": 100 + 10 + 100}


def test_a_launch_plan_has_one_piece_of_memory() -> None:
    """What is freed is given out again in units of 256 bytes, as the plan does that is read off IREE's HAL phase."""
    assert read_transients(AHEAD, frees_late=True, is_launched=True) == {"ahead": 256, "waits": 256, "elsewhere": 256}
    found = read_transients(STREAM, is_launched=True)
    assert found == {"forward": 2 * 256, "backward_into": 256, "twice_into": 2 * 256, "nothing": 0}


def test_functions_with_open_sizes_or_jumps_have_no_launch_plan() -> None:
    assert read_transients(OPEN, is_launched=True) == read_transients(OPEN)
    rounds = _rounds(last="c3")
    assert read_transients(rounds, frees_late=True, is_launched=True) == read_transients(rounds, frees_late=True)


def test_a_place_is_the_first_gap_that_fits() -> None:
    pool = Pool()
    offsets = [pool.allocate(size) for size in (256, 300, 1, 0)]
    assert (offsets, pool.size) == ([0, 256, 768, 1024], 1280)
    assert pool.free(256)
    assert not pool.free(256)
    assert not pool.free(300)
    assert [pool.allocate(size) for size in (513, 200, 257, 256)] == [1280, 256, 2048, 512]
    assert pool.size == 2048 + 512
