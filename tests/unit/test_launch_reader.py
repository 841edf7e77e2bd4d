# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launch plans out of IREE's HAL phase: what each op becomes, and what is left without a plan."""

import pytest

from retrograd.contract.launches import (
    Copy,
    Expected,
    Fill,
    Kernel,
    Launches,
    LaunchPlan,
    Place,
    Write,
    parse_launches,
)
from retrograd.pipelines.toolchain.launch_reader import read_launches

PUT = "<%d : !hal.device> affinity(%a) wait(%0) signal(%fence)"
CONSTANTS = """
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c4 = arith.constant 4 : index
    %c64 = arith.constant 64 : index
    %c7_i32 = arith.constant -7 : i32
    %c0_i8 = arith.constant 0 : i8
    %cst = arith.constant 1.000000e+00 : f32
    %d = util.global.load immutable @d : !hal.device
    %0 = util.null : !hal.fence
"""
HEADER = """
  util.func public @f_into(%arg0: !hal.buffer_view {bwd.name = "x"}, %arg1: !hal.buffer_view) -> !hal.buffer_view attributes {iree.abi.stub} {
"""  # noqa: E501
ARGUMENTS = """
    %f32 = hal.element_type<f32> : i32
    %rows = hal.encoding_type<dense_row_major> : i32
    hal.buffer_view.assert<%arg0 : !hal.buffer_view> message("input0") shape([%c4, %c4]) type(%f32) encoding(%dense_row_major)
    %b0 = hal.buffer_view.buffer<%arg0 : !hal.buffer_view> : !hal.buffer loc(#loc3)
    %b1 = hal.buffer_view.buffer<%arg1 : !hal.buffer_view> : !hal.buffer loc("x.py":1:2)
    hal.buffer.assert<%b1 : !hal.buffer> message("tensor") allocator(%al : !hal.allocator) minimum_length(%c64) type(DeviceVisible) usage("Transfer")
"""  # noqa: E501
RESULT = """
    %status = hal.fence.await until([%fence]) timeout_millis(%c-1_i32) flags("None") : i32
    util.status.check_ok %status, "failed to wait on timepoint"
    %view = hal.buffer_view.create buffer(%b1 : !hal.buffer)[%c0, %c64] shape([%c4, %c4]) type(%f32) encoding(%dense_row_major) : !hal.buffer_view
    util.return %view : !hal.buffer_view
  }
"""  # noqa: E501
BEGIN = '%cmd = hal.command_buffer.create device(%d : !hal.device) mode("OneShot") : !hal.command_buffer\n'
EXECUTE = (
    "hal.command_buffer.finalize<%cmd : !hal.command_buffer>\n"
    f'hal.device.queue.execute{PUT} commands(%cmd) flags("None")\n'
)
KERNEL = """
    %id = hal.executable.lookup.function target(%e : !hal.executable) function(@m::@cuda_nvptx_fb::@k) : i64
    hal.command_buffer.dispatch<%cmd : !hal.command_buffer> target(%e : !hal.executable)[%id] workgroups([%c4, %c1, %c1]) constants([%c7_i32]) bindings([
      (BUFFER)[%c4, %c64],\x20
      (%b1 : !hal.buffer)[%c0, %c64]
    ]) flags("None")
    hal.command_buffer.execution_barrier<%cmd : !hal.command_buffer> source("Dispatch") target("Dispatch") flags("None")
"""  # noqa: E501
X, RESULT_PLACE = Place("argument", 0, 4), Place("argument", 1, 0)


def read(*statements: str, header: str = HEADER, result: str = RESULT, before: str = "") -> Launches:
    return read_launches("module {\n" + before + header + CONSTANTS + ARGUMENTS + "".join(statements) + result + "}\n")


def plan(*statements: str, before: str = "") -> LaunchPlan:
    launches = read(*statements, before=before)
    assert not launches.reasons
    return launches.functions["f_into"]


def reason(*statements: str, header: str = HEADER, result: str = RESULT, before: str = "") -> str:
    launches = read(*statements, header=header, result=result, before=before)
    assert not launches.functions
    return launches.reasons["f_into"]


def test_a_kernel_has_its_grid_buffers_and_constants() -> None:
    found = plan(BEGIN, KERNEL.replace("BUFFER", "%b0 : !hal.buffer"), EXECUTE)
    expected = Kernel("m_cuda_nvptx_fb", "k", (4, 1, 1), (X, RESULT_PLACE), (2**32 - 7,))
    assert found.steps == (expected,)
    assert found.arguments == (Expected((4, 4), "f32"), Expected(None, None, 64))


def test_fills_are_patterns_of_bytes() -> None:
    fill = "hal.command_buffer.fill_buffer<%cmd : !hal.command_buffer> target(%b1 : !hal.buffer)[%c4, %c64] "
    bits = "%one = arith.bitcast %cst : f32 to i32\n"
    found = plan(
        BEGIN,
        bits,
        f'{fill}pattern(%c0_i8 : i8) flags("None")\n',
        f'{fill}pattern(%one : i32) flags("None")\n',
        EXECUTE,
    )
    target = Place("argument", 1, 4)
    assert found.steps == (Fill(target, 64, 0, 1), Fill(target, 64, 0x3F800000, 4))


def test_a_fill_in_the_queue() -> None:
    fill = f"hal.device.queue.fill{PUT} target(%b1 : !hal.buffer)[%c4] length(%c64) pattern(%c0_i8 : i8)"
    assert plan(f'{fill} flags("None")\n').steps == (Fill(Place("argument", 1, 4), 64, 0, 1),)


def test_copies_in_commands_and_in_the_queue() -> None:
    where = "source(%b0 : !hal.buffer)[%c4] target(%b1 : !hal.buffer)[%c0] length(%c64) flags"
    found = plan(
        BEGIN,
        f'hal.command_buffer.copy_buffer<%cmd : !hal.command_buffer> {where}("None")\n',
        EXECUTE,
        f'hal.device.queue.copy{PUT} {where}("None")\n',
    )
    assert found.steps == (Copy(X, RESULT_PLACE, 64),) * 2


def allocate(name: str, size: str = "%c64") -> str:
    return (
        f"%{name} = hal.device.queue.alloca{PUT} pool(%c0_i64) type(%memory_type) usage(%usage) "
        f'flags("None") : !hal.buffer{{{size}}}\n'
    )


def free(name: str) -> str:
    return f'hal.device.queue.dealloca{PUT} buffer(%{name} : !hal.buffer) flags("None")\n'


def test_scratch_memory_that_was_given_back_is_given_out_again() -> None:
    copy = (
        f"hal.device.queue.copy{PUT} source(%b0 : !hal.buffer)[%c0] target(%NAME : !hal.buffer)[%c0] length(%c4) "
        'flags("None")\n'
    )
    names = ("t0", "t1", "t2")
    begin = [allocate("t0"), allocate("t1"), free("t0"), allocate("t2")]
    found = plan(*begin, *(copy.replace("NAME", name) for name in names))
    places = [step.target.offset for step in found.steps if isinstance(step, Copy)]
    assert places == [0, 256, 0]
    assert found.scratch == 512


def test_a_part_of_a_buffer_begins_later() -> None:
    part = "%part = hal.buffer.subspan<%b0 : !hal.buffer>[%c4, %c4] : !hal.buffer\n"
    same = "%same = util.optimization_barrier %part : !hal.buffer\n"
    copy = (
        f"hal.device.queue.copy{PUT} source(%same : !hal.buffer)[%c4] target(%b1 : !hal.buffer)[%c0] length(%c4) "
        'flags("None")\n'
    )
    assert plan(part, same, copy).steps == (Copy(Place("argument", 0, 8), RESULT_PLACE, 4),)


RECORDED = f"""
  util.func private @record() -> !hal.command_buffer attributes {{inlining_policy = #util.inline.never}} {{
{CONSTANTS}{BEGIN}{KERNEL.replace("BUFFER", "%c0 : index").replace("%b1 : !hal.buffer", "%c1 : index")}
    util.return %cmd : !hal.command_buffer
  }}
  util.global private @kept : !hal.command_buffer
  util.initializer {{
    %0 = util.call @record() : () -> !hal.command_buffer
    util.global.store %0, @kept : !hal.command_buffer
    util.return
  }}
"""
INDIRECT = f"""
    %cmd = util.global.load immutable @kept : !hal.command_buffer
    hal.device.queue.execute.indirect{PUT} commands(%cmd) bindings([
      (%b0 : !hal.buffer)[%c4, %c64],\x20
      (%b1 : !hal.buffer)[%c0, %c64]
    ]) flags("None")
"""


def test_commands_that_are_kept_get_their_buffers_when_they_are_queued() -> None:
    found = plan(INDIRECT, before=RECORDED)
    expected = Kernel("m_cuda_nvptx_fb", "k", (4, 1, 1), (Place("argument", 0, 8), RESULT_PLACE), (2**32 - 7,))
    assert found.steps == (expected,)


STORED = f"""
  util.initializer {{
{CONSTANTS}{allocate("t0")}
    util.global.store %t0, @table : !hal.buffer
    util.return
  }}
"""


def test_initializers_leave_buffers_for_functions() -> None:
    load = "%table = util.global.load immutable @table : !hal.buffer\n"
    copy = (
        f"hal.device.queue.copy{PUT} source(%table : !hal.buffer)[%c4] target(%b1 : !hal.buffer)[%c0] length(%c4) "
        'flags("None")\n'
    )
    launches = read(load, copy, before=STORED)
    assert launches.initializers == (LaunchPlan((), 256, (), {"table": 0}),)
    assert launches.functions["f_into"].steps == (Copy(Place("global", "table", 4), RESULT_PLACE, 4),)
    assert parse_launches(launches.to_json()) == launches


def test_what_an_initializer_without_a_plan_sets_is_not_known() -> None:
    before = STORED.replace("util.global.store", '%x = "hal.surprise"() : i32\n    util.global.store')
    why = reason("%table = util.global.load immutable @table : !hal.buffer\n", before=before)
    assert why == "'hal.surprise' has no plan in this form"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("%x = hal.device.queue.barrier somehow\n", "'hal.device.queue.barrier' has no plan in this form"),
        ("cf.br ^bb1(%c0 : index)\n", "it branches"),
        ("^bb1(%0: index):\n", "it branches"),
        (allocate("t0", "%size"), "it depends on sizes or values that only a call has"),
        (free("b0"), "it frees memory that it did not allocate"),
        ("util.global.store %b0, @g : !hal.buffer\n", "it changes a global"),
        ("%t = util.global.load @unset : !hal.buffer\n", "nothing that is known here sets unset"),
        (
            BEGIN
            + "hal.command_buffer.fill_buffer<%cmd : !hal.command_buffer> target(%b1 : !hal.buffer)[%c4, %c64] "
            + 'pattern(%c0 : i64) flags("None")\n',
            "a fill with patterns of 8 bytes",
        ),
    ],
)
def test_what_is_not_known_has_no_plan_and_a_reason(statement: str, message: str) -> None:
    assert reason(statement) == message


def test_sizes_among_the_arguments_have_no_plan() -> None:
    assert reason(header=HEADER.replace("%arg1: !hal.buffer_view", "%arg1: i64")) == "it takes sizes"


def test_results_are_in_the_callers_memory() -> None:
    wrong = RESULT.replace("buffer(%b1", "buffer(%b0")
    assert reason(result=wrong) == "it gives results in memory of its own"


def test_plans_of_another_format_are_not_read() -> None:
    assert parse_launches(Launches((), {}, {}).to_json().replace('"format":2', '"format":3')) is None


def test_damaged_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="damaged"):
        parse_launches('{"format": 1}')


TABLE = f"""
  util.initializer {{
    %c0 = arith.constant 0 : index
    %c0_i64 = arith.constant 0 : i64
    %c4 = arith.constant 4 : index
    %c8 = arith.constant 8 : index
    %0 = util.null : !hal.fence
    %buffer_cst = util.buffer.constant <alignment = 64> : !util.buffer = #table
    %allocator = hal.device.allocator<%d : !hal.device> affinity(%a) : !hal.allocator
    %did_import, %mapped = hal.allocator.import<%allocator : !hal.allocator> source(%buffer_cst : !util.buffer)[%c0, %c8] affinity(%a) type(%t) usage(%u) : i1, !hal.buffer
    cf.cond_br %did_import, ^bb2(%0, %mapped : !hal.fence, !hal.buffer), ^bb1
  ^bb1:  // pred: ^bb0
    %buffer = hal.allocator.allocate<%allocator : !hal.allocator> affinity(%a) type(%t) usage(%u) : !hal.buffer{{%c8}}
    %file = hal.ex.file.from_memory device(%d : !hal.device) affinity(%a) access(Read) buffer(%buffer_cst : !util.buffer)[%c0 for %c8] flags(%c0_i32) : !hal.file
    %fence = hal.fence.create device(%d : !hal.device) flags("None") : !hal.fence
    hal.device.queue.read{PUT} source(%file : !hal.file)[%c0_i64] target(%buffer : !hal.buffer)[%c0] length(%c8) flags("None")
    cf.br ^bb2(%fence, %buffer : !hal.fence, !hal.buffer)
  ^bb2(%1: !hal.fence, %2: !hal.buffer):  // 2 preds: ^bb0, ^bb1
    %kept = hal.device.queue.alloca{PUT} pool(%c-1_i64) type(%t) usage(%u) flags("None") : !hal.buffer{{%c4}}
    hal.device.queue.copy{PUT} source(%2 : !hal.buffer)[%c4] target(%kept : !hal.buffer)[%c0] length(%c4) flags("None")
    hal.device.queue.dealloca{PUT} buffer(%2 : !hal.buffer) flags(PreferOrigin)
    util.global.store %kept, @table : !hal.buffer
    util.return
  }}
"""  # noqa: E501


def test_constants_are_written_by_initializers() -> None:
    """What the text has for the device that reads the host's memory is left out, and the copy taken."""
    alias = "#table = dense<[1, 258]> : tensor<2xi32>\n"
    launches = read_launches(alias + "module {\n" + TABLE + "}\n")
    (initializer,) = launches.initializers
    contents = bytes([1, 0, 0, 0, 2, 1, 0, 0])
    written = Place("scratch", "", 0)
    kept = initializer.globals["table"]
    assert initializer.steps == (
        Write(written, contents),
        Copy(Place("scratch", "", 4), Place("scratch", "", kept), 4),
    )
    assert kept >= 8 and initializer.scratch >= kept + 4
    assert parse_launches(launches.to_json()) == launches


def test_a_constant_in_another_form_leaves_functions_that_read_it_without_a_plan() -> None:
    load = "%t = util.global.load immutable @table : !hal.buffer\n"
    found = reason(load, before="#table = dense<1> : tensor<8xi4>\n" + TABLE)
    assert found == "a constant of i4"
    inside = "%buffer_cst = util.buffer.constant <alignment = 64> : !util.buffer = dense<0> : tensor<8xi8>\n"
    assert reason(inside) == "it holds a constant"
