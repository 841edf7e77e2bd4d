# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Programs on torch tensors: what goes in place, what is copied, what is refused, threads, forks, memory."""

import multiprocessing
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.runtime.programs import copied_call, devices, executor, plain_call
from retrograd.runtime.programs.call_times import CallTimes
from retrograd.runtime.programs.copied_call import is_worth_copying
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.executor import ALIGNMENT, OutOfDeviceMemory, Program, allocate_results, is_importable
from retrograd.runtime.programs.tensors import as_it_is_read
from retrograd.runtime.reports.peak import track_peak
from retrograd.runtime.steps.bound_function import BoundFunction

COMPILE = [
    str(Path(sysconfig.get_path("scripts")) / "iree-compile"),
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-input-demote-f64-to-f32=false",
]
SIDE = 64
CHAIN_TRANSIENT_BYTES = 2 * SIDE * SIDE * 4
WAIT_SECONDS = 60

# Element types in MLIR's and torch's words, and the op that doubles a number of that type (or flips a bool).
ELEMENTS = {
    "bf16": (torch.bfloat16, "arith.addf %x, %x"),
    "f16": (torch.float16, "arith.addf %x, %x"),
    "f32": (torch.float32, "arith.addf %x, %x"),
    "f64": (torch.float64, "arith.addf %x, %x"),
    "i8": (torch.int8, "arith.addi %x, %x"),
    "i16": (torch.int16, "arith.addi %x, %x"),
    "i32": (torch.int32, "arith.addi %x, %x"),
    "i64": (torch.int64, "arith.addi %x, %x"),
    "i1": (torch.bool, "arith.xori %x, %ones"),
}


def unary(name: str, kind: str, op: str) -> str:
    ones = f"%ones = arith.constant dense<true> : {kind}" if "%ones" in op else ""
    return f"""
  util.func public @{name}(%x: {kind}, %out: {kind} {{iree.abi.output = 0 : index}}) -> {kind} {{
    {ones}
    %r = {op} : {kind}
    util.return %r : {kind}
  }}"""


def chain() -> str:
    """Three products in a row, of which two are scratch memory."""
    kind = f"tensor<{SIDE}x{SIDE}xf32>"
    product = "linalg.matmul ins(%{} , %{} : {k}, {k}) outs(%i : {k}) -> {k}"
    return f"""
  util.func public @chain_into(%a: {kind}, %b: {kind}, %out: {kind} {{iree.abi.output = 0 : index}}) -> {kind} {{
    %z = arith.constant 0.0 : f32
    %e = tensor.empty() : {kind}
    %i = linalg.fill ins(%z : f32) outs(%e : {kind}) -> {kind}
    %m = {product.format("a", "b", k=kind)}
    %n = {product.format("m", "m", k=kind)}
    %r = {product.format("n", "m", k=kind)}
    util.return %r : {kind}
  }}"""


def source() -> str:
    functions = [unary(f"double_{element}", f"tensor<4x{element}>", op) for element, (_, op) in ELEMENTS.items()]
    functions += [
        unary("scalar", "tensor<f32>", "arith.addf %x, %x"),
        unary("empty", "tensor<0x4xf32>", "arith.addf %x, %x"),
        unary("square", f"tensor<{SIDE}x{SIDE}xf32>", "arith.mulf %x, %x"),
        unary("square_into", f"tensor<{SIDE}x{SIDE}xf32>", "arith.mulf %x, %x"),
        chain(),
    ]
    return "module @programs {" + "\n".join(functions) + "\n}\n"


@pytest.fixture(scope="module")
def vmfb(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "programs.mlir").write_text(source())
    subprocess.run([*COMPILE, folder / "programs.mlir", "-o", folder / "programs.vmfb"], check=True)
    return (folder / "programs.vmfb").read_bytes()


@pytest.fixture(scope="module", params=["local-task", "local-sync"])
def program(vmfb: bytes, request: pytest.FixtureRequest) -> Program:
    return Program.load(vmfb, driver=request.param)


def result(shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    (tensor,) = allocate_results([TensorSpec("r", "output", shape, dtype)])
    return tensor


def chained(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a @ b
    return product @ product @ product


def square(program: Program, x: torch.Tensor) -> torch.Tensor:
    out = result((SIDE, SIDE))
    program.invoke("square", [x], [out])
    return out


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_element_type_is_computed(program: Program, element: str) -> None:
    dtype, _ = ELEMENTS[element]
    x = torch.tensor([True, False, False, True]) if dtype is torch.bool else torch.tensor([0, 1, -3, 7]).to(dtype)
    out = result((4,), str(dtype).removeprefix("torch."))
    program.invoke(f"double_{element}", [x], [out])
    assert out.dtype is dtype
    assert out.tolist() == ((~x).tolist() if dtype is torch.bool else (x + x).tolist())


def test_scalars_and_empty_tensors(program: Program) -> None:
    out = result(())
    program.invoke("scalar", [torch.tensor(1.5)], [out])
    assert out.item() == 3.0
    program.invoke("empty", [torch.empty(0, 4)], [result((0, 4))])


ODD = torch.arange(SIDE * SIDE + 1, dtype=torch.float32)
STRIDED = {
    "transposed": lambda: torch.randn(SIDE, SIDE).t(),
    "sliced": lambda: torch.randn(SIDE, 2 * SIDE)[:, ::2],
    "expanded": lambda: torch.randn(SIDE, 1).expand(SIDE, SIDE),
    "misaligned": lambda: ODD[1:].view(SIDE, SIDE),
    "negative": lambda: torch._neg_view(torch.randn(SIDE, SIDE)),
    "requires grad": lambda: torch.randn(SIDE, SIDE, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(SIDE, SIDE)),
    "not a leaf": lambda: torch.randn(SIDE, SIDE, requires_grad=True) * 2,
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_arguments_of_any_form(program: Program, make: Callable[[], torch.Tensor]) -> None:
    x = make()
    before = x.detach().clone()
    out = square(program, x)
    assert torch.equal(out, before * before)
    assert torch.equal(x, before)


def bound(program: Program, *shape: int) -> BoundFunction:
    given = TensorSpec("y", "output", shape, "float32")
    return BoundFunction(program, FunctionSpec("square", (TensorSpec("x", "input", shape, "float32"),), (given,), 0))


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_a_bound_function_gives_new_results_each_time(program: Program, make: Callable[[], torch.Tensor]) -> None:
    call, x = bound(program, SIDE, SIDE), make()
    before = x.detach().clone()
    results = [call([x])[0] for _ in range(3)]
    assert all(torch.equal(y, before * before) and not y.requires_grad for y in results) and torch.equal(x, before)
    assert len({y.data_ptr() for y in results}) == 3


def shorten(program: Program, name: str = "square", arguments: int = 1) -> BoundFunction:
    """A function that was found to be short, and is called the short way from now on."""
    times = program._current().function(f"{name}_into").times
    assert times is not None
    times._settle(True)
    spec = TensorSpec("x", "input", (SIDE, SIDE), "float32")
    call = BoundFunction(program, FunctionSpec(name, (spec,) * arguments, (spec,), 0))
    call([torch.ones(SIDE, SIDE)] * arguments)
    assert list(program.short_calls) == [f"{name}_into"]
    return call


@pytest.fixture(scope="module", params=["plain", "copied"])
def short(request: pytest.FixtureRequest, vmfb: bytes) -> Program:
    program, is_copied = Program.load(vmfb, driver="local-task"), request.param == "copied"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied_call, "MOST_BYTES", SIDE * SIDE * 4 if is_copied else 0)
        shorten(program)
    assert isinstance(program.short_calls["square_into"], copied_call.CopiedCall) is is_copied
    return program


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_a_short_function_takes_arguments_of_any_form(short: Program, make: Callable[[], torch.Tensor]) -> None:
    test_a_bound_function_gives_new_results_each_time(short, make)


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_arguments_of_any_form_need_no_long_way(short: Program, make: Callable[[], torch.Tensor]) -> None:
    x, result = make(), torch.empty(SIDE, SIDE)
    assert short.short_calls["square_into"]([x], [result])
    assert torch.equal(result, x * x)


def test_a_short_function_refuses_what_it_does_not_take(short: Program) -> None:
    test_a_bound_function_refuses_what_it_does_not_take(short, torch.zeros(SIDE))
    test_a_call_keeps_neither_arguments_nor_results(short)


def test_a_short_function_reads_what_tensors_hold_now(short: Program) -> None:
    call, x = bound(short, SIDE, SIDE), torch.ones(SIDE, SIDE)

    def squares(value: float) -> bool:
        return torch.equal(call([x])[0], torch.full((SIDE, SIDE), value * value))

    assert squares(1.0)
    x.data = torch.full((SIDE, SIDE), 2.0)
    assert squares(2.0)
    x.fill_(3.0)
    assert squares(3.0)
    x.resize_(2 * SIDE, SIDE).fill_(4.0)
    with pytest.raises(ExecutionError, match="square_into"):
        call([x])
    x.resize_(SIDE, SIDE)
    assert squares(4.0)
    x.data = torch.full((SIDE, SIDE), 5.0).t()
    assert squares(5.0)
    # Memory that is freed and used again.
    results = [call([torch.full((SIDE, SIDE), float(number))])[0] for number in range(32)]
    assert [result.unique().tolist() for result in results] == [[float(number) ** 2] for number in range(32)]


def test_short_calls_of_threads_do_not_meet(short: Program) -> None:
    call, wrong = bound(short, SIDE, SIDE), []

    def work(value: float) -> None:
        for _ in range(200):
            if call([torch.full((SIDE, SIDE), value)])[0].unique().tolist() != [value * value]:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(number),)) for number in (2, 3, 4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_memory_of_short_calls_is_counted(vmfb: bytes) -> None:
    program, x = Program.load(vmfb, driver="local-task"), torch.randn(SIDE, SIDE)
    call = shorten(program, "chain", 2)
    with track_peak(program) as measured:
        call([x, x])
    assert measured.peak_bytes - measured.resident_bytes == CHAIN_TRANSIENT_BYTES
    assert list(program.short_calls) == ["chain_into"]


def test_a_call_keeps_neither_arguments_nor_results(program: Program) -> None:
    call, x = bound(program, SIDE, SIDE), torch.ones(SIDE, SIDE)
    for _ in range(8):
        (y,) = call([x])
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, y)]
        x = torch.ones(SIDE, SIDE)
        del y
        assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize(
    "argument",
    [
        torch.sparse_coo_tensor(torch.empty(2, 0).long(), torch.empty(0), (SIDE, SIDE), check_invariants=True),
        torch.zeros(SIDE, SIDE, device="meta"),
        torch.zeros(SIDE, SIDE, dtype=torch.float64),
        torch.zeros(SIDE),
    ],
    ids=["sparse", "meta", "float64", "one axis"],
)
def test_a_bound_function_refuses_what_it_does_not_take(program: Program, argument: torch.Tensor) -> None:
    call = bound(program, SIDE, SIDE)
    for _ in range(2):
        with pytest.raises(ExecutionError, match="square_into"):
            call([argument])
        assert torch.equal(call([torch.ones(SIDE, SIDE)])[0], torch.ones(SIDE, SIDE))


def test_a_bound_function_whose_results_are_described_wrongly_is_refused(program: Program) -> None:
    with pytest.raises(ExecutionError, match=rf"result 0 is torch.float32 \[{SIDE}, 1\], but the function writes"):
        bound(program, SIDE, 1)([torch.ones(SIDE, SIDE)])


def test_results_land_in_the_storage_given(program: Program) -> None:
    out = result((SIDE, SIDE))
    address = out.data_ptr()
    program.invoke("square", [torch.full((SIDE, SIDE), 3.0)], [out])
    assert out.data_ptr() == address
    assert torch.equal(out, torch.full((SIDE, SIDE), 9.0))


def test_an_argument_that_shares_a_results_storage_is_copied(program: Program) -> None:
    # Written in place, the second product would read what the third has written.
    a, b = torch.randn(SIDE, SIDE) / 8, torch.randn(SIDE, SIDE) / 8
    expected = chained(a, b)
    program.invoke("chain_into", [a, b], [a])
    torch.testing.assert_close(a, expected, rtol=1e-4, atol=1e-4)


def overlapping() -> list[torch.Tensor]:
    whole = torch.zeros(2, SIDE, SIDE)
    return [whole[0], whole[1]]


REFUSED: dict[str, tuple[str, Callable[[], tuple[list[Any], list[torch.Tensor]]], str]] = {
    "unknown function": (
        "squares",
        lambda: ([torch.ones(SIDE, SIDE)], [result((SIDE, SIDE))]),
        "no function 'squares'",
    ),
    "argument shape": ("square", lambda: ([torch.ones(SIDE, 3)], [result((SIDE, SIDE))]), "shape dimension 1 mismatch"),
    "argument dtype": ("scalar", lambda: ([torch.tensor(1)], [result(())]), "element type mismatch"),
    "result dtype": ("scalar", lambda: ([torch.tensor(1.0)], [result((), "int32")]), "int32.*writes tensor<f32>"),
    "too few": ("square", lambda: ([torch.ones(SIDE, SIDE)], []), "expected 2 arguments but passed 1"),
    "no tensor": ("scalar", lambda: ([1.0], [result(())]), "argument 0 is float, not a tensor"),
    "meta": ("scalar", lambda: ([torch.ones((), device="meta")], [result(())]), "argument 0 is on meta"),
    "sparse": ("square", lambda: ([torch.eye(SIDE).to_sparse()], [result((SIDE, SIDE))]), "pass it dense"),
    "subclass": (
        "scalar",
        lambda: ([torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))], [result(())]),
        "argument 0 is the subclass MaskedTensor",
    ),
    "result shape": (
        "square",
        lambda: ([torch.ones(SIDE, SIDE)], [result((SIDE * SIDE,))]),
        r"writes tensor<64x64xf32>",
    ),
    "result rank": (
        "scalar",
        lambda: ([torch.tensor(1.0)], [result((1,))]),
        r"float32 \[1\], but .* writes tensor<f32>",
    ),
    "strided result": ("square", lambda: ([torch.ones(SIDE, SIDE)], [torch.ones(SIDE, SIDE).t()]), "not contiguous or"),
    "misaligned result": (
        "square",
        lambda: ([torch.ones(SIDE, SIDE)], [ODD[1:].view(SIDE, SIDE)]),
        "not contiguous or",
    ),
    "shared results": ("square", lambda: ([], overlapping()), "result 1 shares its storage"),
    "result with history": (
        "square",
        lambda: ([torch.ones(SIDE, SIDE)], [torch.ones(SIDE, SIDE, requires_grad=True)]),
        "requires grad",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize(("name", "make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_function_does_not_take_is_refused(
    program: Program, name: str, make: Callable[[], tuple[list[Any], list[torch.Tensor]]], message: str
) -> None:
    arguments, results = make()
    with pytest.raises(ExecutionError, match=message):
        program.invoke(name, arguments, results)
    # A refused call leaves the program as it was.
    assert torch.equal(square(program, torch.full((SIDE, SIDE), 2.0)), torch.full((SIDE, SIDE), 4.0))


def test_an_error_of_iree_gives_the_declaration(program: Program) -> None:
    with pytest.raises(ExecutionError, match=r"declared as: sync func @scalar\(%input0: tensor<f32>"):
        program.invoke("scalar", [torch.ones(3)], [result(())])


def test_load_refuses_what_is_no_executable() -> None:
    with pytest.raises(ExecutionError, match="IREE cannot load the executable"):
        Program.load(b"PK\x03\x04" + bytes(100))


def test_load_names_an_unknown_driver(vmfb: bytes) -> None:
    with pytest.raises(devices.DeviceError, match=r"cannot open driver 'abacus'.*local-sync, local-task"):
        Program.load(vmfb, driver="abacus")


def test_function_names_are_the_exports(program: Program) -> None:
    assert set(program.function_names) == {f"double_{element}" for element in ELEMENTS} | {
        "scalar", "empty", "square", "square_into", "chain_into"
    }  # fmt: skip


def test_allocated_results_are_importable() -> None:
    specs = [TensorSpec("a", "grad", (n,), dtype) for n in (0, 1, 3, 1000, 100_000) for dtype in ("bool", "float64")]
    results = allocate_results(specs)
    assert [tuple(tensor.shape) for tensor in results] == [spec.shape for spec in specs]
    assert all(is_importable(tensor) and tensor.data_ptr() % ALIGNMENT == 0 for tensor in results)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("g", "grad", (2,), "float31"), "result 'g' has dtype 'float31'"),
        (TensorSpec("g", "grad", (2,), "nn"), "result 'g' has dtype 'nn'"),
        (TensorSpec("g", "grad", (-1, 2), "float32"), r"result 'g' has shape \[-1, 2\]"),
    ],
)
def test_allocate_results_refuses(spec: TensorSpec, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        allocate_results([spec])


def test_two_threads_call_one_program(program: Program) -> None:
    inputs = [[torch.randn(SIDE, SIDE) / 8 for _ in range(2)] for _ in range(2)]
    errors: list[str] = []

    def work(a: torch.Tensor, b: torch.Tensor) -> None:
        expected = chained(a, b)
        for _ in range(200):
            out = result((SIDE, SIDE))
            program.invoke("chain_into", [a, b], [out])
            if not torch.allclose(out, expected, rtol=1e-4, atol=1e-4):
                errors.append(f"off by {(out - expected).abs().max()}")

    threads = [threading.Thread(target=work, args=pair) for pair in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_short_calls_run_in_the_calling_thread(vmfb: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside as many other tests as there are cores there is one, and nothing to find out.
    monkeypatch.setattr("retrograd.runtime.programs.loaded.has_one_worker", lambda: False)
    monkeypatch.setattr("retrograd.runtime.programs.call_times._SHORT_SECONDS", float("inf"))
    program, x = Program.load(vmfb, driver="local-task"), torch.randn(SIDE, SIDE)
    on_workers = [square(program, x) for _ in range(3)]

    def uris() -> list[str]:
        loaded = program._current()
        return [place.device.uri for place in (loaded, loaded.in_caller) if place is not None]

    assert uris() == ["local-task"]
    for y in on_workers:
        assert torch.equal(square(program, x), y)
    assert uris() == ["local-task", "local-sync"]


def test_torchs_threads_end_once_arguments_are_copied(vmfb: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        done.append("copied")
        return as_it_is_read(tensor)

    monkeypatch.setattr(plain_call, "as_it_is_read", copied)
    monkeypatch.setattr(executor, "release_threads", lambda: done.append("ended"))
    program = Program.load(vmfb)
    # As where there are several workers.
    program._current().function("square").times = CallTimes()
    transposed, squares = torch.randn(SIDE, SIDE).T, result((SIDE, SIDE))
    program.invoke_on_new("square", [transposed], [squares])
    assert torch.equal(squares, transposed * transposed)
    assert done == ["copied", "ended"]


def call_in_child(program: Program, queue: Any) -> None:
    # No torch arithmetic: torch's own threads do not survive a fork either.
    out = result((SIDE, SIDE))
    program.invoke("square", [torch.empty(SIDE, SIDE).fill_(3.0)], [out])
    with track_peak(program):
        program.invoke("square", [out], [out])
    queue.put(out[0, :2].tolist())


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
def test_a_forked_child_makes_no_short_call_of_its_parents(vmfb: bytes) -> None:
    program = Program.load(vmfb, driver="local-task")
    call, short = shorten(program), program.short_calls["square_into"]
    x, out = torch.full((SIDE, SIDE), 3.0), result((SIDE, SIDE))
    child = os.fork()
    if child == 0:
        # No assertion: what it raised would go on in here with pytest's own code.
        fine = not short([x], [out]) and call([x])[0][0, 0].item() == 9.0
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert short([x], [out]) and torch.equal(out, x * x)


@pytest.mark.usefixtures("one_torch_thread")
def test_a_forked_child_calls_the_same_program(program: Program) -> None:
    square(program, torch.ones(SIDE, SIDE))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=call_in_child, args=(program, queue))
    child.start()
    try:
        assert queue.get(timeout=WAIT_SECONDS) == [81.0, 81.0]
        child.join(WAIT_SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
    assert torch.equal(square(program, torch.full((SIDE, SIDE), 2.0)), torch.full((SIDE, SIDE), 4.0))


FORK_AND_FINALIZE = """
import gc, os, sys
import torch
from retrograd.runtime.programs.executor import Program
torch.set_num_threads(1)
program = Program.load(open(sys.argv[1], "rb").read())
def call():
    out = torch.empty(())
    program.invoke("scalar", [torch.tensor(1.5)], [out])
    return out.item()
assert call() == 3.0
child = os.fork()
if child == 0:
    assert call() == 3.0
    del program
    gc.collect()
    sys.exit(7)  # the interpreter winds down, destroying all it can
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_can_drop_the_program_and_exit(vmfb: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.vmfb").write_bytes(vmfb)
    done = subprocess.run(
        # From Python 3.12 on a fork beside other threads is warned of.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_AND_FINALIZE, tmp_path / "p.vmfb"],
        timeout=WAIT_SECONDS,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_one_device_for_each_driver() -> None:
    assert devices.get_device("local-sync") is devices.get_device("local-sync")
    assert devices.get_device("local-sync") is not devices.get_device("local-task")


def test_workers_are_as_many_as_torchs_threads() -> None:
    script = (
        "import os, torch; torch.set_num_threads(1)\n"
        "from retrograd.runtime.programs import devices\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = count(); device = devices.get_device('local-task'); print(count() - before)\n"
        "before = count(); other = devices.get_device('local-sync'); print(count() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    with_one_worker, with_none = map(int, done.stdout.split())
    assert with_one_worker - with_none == 1


def test_out_of_memory_is_torchs_exception_and_leaves_the_program_usable(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED; CUDA_ERROR_OUT_OF_MEMORY: out of memory\nand where")

    x = torch.full((SIDE, SIDE), 2.0)
    loaded = program._current()
    with monkeypatch.context() as patch:
        patch.setattr(loaded.function("square"), "times", None)
        patch.setattr(loaded, "_invoke", fail)
        with pytest.raises(torch.OutOfMemoryError, match="has no memory left: RESOURCE_EXHAUSTED") as error:
            square(program, x)
    assert isinstance(error.value, OutOfDeviceMemory) and "and where" not in str(error.value)
    assert torch.equal(square(program, x), torch.full((SIDE, SIDE), 4.0))


def test_list_devices_reports_what_is_missing() -> None:
    listed = devices.list_devices()
    usable = {info.driver for info in listed if info.error is None}
    assert {"local-sync", "local-task"} <= usable
    # Built into the wheel, with hardware or without.
    assert "cuda" in {info.driver for info in listed}
    assert all(info.error for info in listed if info.driver not in usable)


def test_track_peak_counts_scratch_memory(program: Program) -> None:
    x, out = torch.randn(SIDE, SIDE), result((SIDE, SIDE))
    with track_peak(program) as measured:
        for _ in range(3):
            program.invoke("chain_into", [x, x], [out])
    # Scratch memory is freed after each call: three calls take no more than one.
    assert measured.peak_bytes - measured.resident_bytes == CHAIN_TRANSIENT_BYTES
    assert torch.allclose(out, chained(x, x), rtol=1e-3, atol=1e-1)


def test_track_peak_of_nothing_is_nothing(program: Program) -> None:
    program.invoke("chain_into", [torch.ones(SIDE, SIDE)] * 2, [result((SIDE, SIDE))])
    with track_peak(program) as measured:
        program.invoke("scalar", [torch.tensor(1.0)], [result(())])
    assert measured.peak_bytes == measured.resident_bytes


def test_track_peak_gives_the_device_back(program: Program) -> None:
    with pytest.raises(ExecutionError, match="no function 'nothing'"), track_peak(program):
        program.invoke("nothing", [], [])
    assert torch.equal(square(program, torch.full((SIDE, SIDE), 2.0)), torch.full((SIDE, SIDE), 4.0))


def test_floats_of_eight_bits_are_not_copied_for_a_call() -> None:
    """dlpack has none: such a call failed from when it was found to be short."""
    wide = torch.ones(4)
    assert is_worth_copying([wide.to(torch.int8)], [wide])
    assert not is_worth_copying([wide.to(torch.float8_e4m3fn)], [wide])
