# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors in files, and how results are compared with what was expected."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from retrograd.contract.tensors import TensorSpec
from retrograd.frontend.verification.first_comparison import relative_error
from retrograd.tools.console import CommandError, UsageError
from retrograd.tools.run_command import check_errors
from retrograd.tools.tensor_files import (
    Side,
    check_npy_can_hold,
    npy_names,
    read_expected,
    read_npy,
    read_safetensors,
    write_npy,
    write_safetensors,
)

WEIGHT = TensorSpec("weight", "param", (2, 3), "float32")
INDEX = TensorSpec("args[0]", "input", (), "int64")
HALF = TensorSpec("half", "input", (2,), "bfloat16")
SIDE = Side("forward", "argument", (WEIGHT, INDEX))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    """Write an array or a table of tensors; gives the path."""

    def write(name: str, value: np.ndarray | dict[str, torch.Tensor]) -> str:
        path = tmp_path / name
        if isinstance(value, dict):
            save_file(value, path)
        else:
            np.save(path, value)
        return str(path)

    return write


Save = Callable[..., str]


def test_npy_in_order(save: Save) -> None:
    weight = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    files = [save("w.npy", weight), save("i.npy", np.array(4))]
    read = read_npy(SIDE, files)
    assert torch.equal(read[0], torch.arange(6.0).reshape(2, 3))
    assert read[1].item() == 4
    assert read[1].shape == ()


def test_npy_count(save: Save) -> None:
    file = save("w.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(CommandError) as caught:
        read_npy(SIDE, [file])
    assert "forward has 2 arguments, but 1 .npy files are given" in str(caught.value)
    assert "nothing is given for argument 1, args[0] (input, int64 [])" in str(caught.value)
    with pytest.raises(CommandError, match=r"third.npy is one too many"):
        read_npy(SIDE, [file, file, "third.npy"])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 2), np.float32), "expected float32 [2, 3], found float32 [3, 2]"),
        (np.zeros((2, 3)), "expected float32 [2, 3], found float64 [2, 3]"),
        (np.zeros((2, 3), ">f4"), "numpy dtype >f4 is none of torch's; expected float32 [2, 3]"),
        (np.array([["a", "b", "c"]] * 2), "is none of torch's"),
        (np.array([{}], dtype=object), "not a whole .npy file"),
    ],
)
def test_npy_of_another_type(array: np.ndarray, message: str, save: Save) -> None:
    file = save("w.npy", array)
    with pytest.raises(CommandError) as caught:
        read_npy(SIDE, [file, file])
    assert str(caught.value).startswith("argument weight of forward: ")
    assert message in str(caught.value)
    assert file in str(caught.value)


def test_npy_that_is_not_whole(tmp_path: Path, save: Save) -> None:
    file = Path(save("w.npy", np.zeros((2, 3), np.float32)))
    whole = file.read_bytes()
    for data, message in (
        (whole[:-4], "not a whole .npy file"),
        (b"", "not a whole .npy file"),
        (b"text", "not a whole .npy file"),
        (whole + whole, "holds more than one array"),
    ):
        file.write_bytes(data)
        with pytest.raises(CommandError, match=message):
            read_npy(SIDE, [str(file), str(file)])
    with pytest.raises(FileNotFoundError):
        read_npy(SIDE, [str(tmp_path / "none.npy")] * 2)


def test_bfloat16_argument_from_npy(save: Save) -> None:
    file = save("h.npy", np.zeros(2, np.uint16))
    with pytest.raises(
        CommandError, match=r"expected bfloat16 \[2\], found uint16 \[2\].*give it in a .safetensors file"
    ):
        read_npy(Side("forward", "argument", (HALF,)), [file])


def test_safetensors_by_name_from_several_files(save: Save) -> None:
    first = save("a.safetensors", {"weight": torch.ones(2, 3), "unused": torch.zeros(1)})
    second = save("b.safetensors", {"args[0]": torch.tensor(4), "half": torch.tensor([1, 2], dtype=torch.bfloat16)})
    side = Side("forward", "argument", (HALF, WEIGHT, INDEX))
    half, weight, index = read_safetensors(side, [first, second])
    assert half.tolist() == [1, 2]
    assert half.dtype is torch.bfloat16
    assert torch.equal(weight, torch.ones(2, 3))
    assert index.item() == 4


def test_safetensors_that_do_not_fit(tmp_path: Path, save: Save) -> None:
    weight = save("a.safetensors", {"weight": torch.ones(2, 3)})
    with pytest.raises(
        CommandError, match=r"argument args\[0\] \(input, int64 \[\]\) of forward is not in .*a.safetensors"
    ):
        read_safetensors(SIDE, [weight])
    again = save("b.safetensors", {"weight": torch.ones(2, 3)})
    with pytest.raises(
        CommandError, match=r"argument weight of forward is in both .*a.safetensors and .*b.safetensors"
    ):
        read_safetensors(SIDE, [weight, again])
    half = save("c.safetensors", {"weight": torch.ones(2, 3).half()})
    with pytest.raises(CommandError, match=r"weight of forward: expected float32 \[2, 3\], found float16 \[2, 3\] in "):
        read_safetensors(SIDE, [half])
    (tmp_path / "cut.safetensors").write_bytes(Path(weight).read_bytes()[:-1])
    with pytest.raises(CommandError, match=r"not a whole \.safetensors file"):
        read_safetensors(SIDE, [str(tmp_path / "cut.safetensors")])
    with pytest.raises(FileNotFoundError):
        read_safetensors(SIDE, [str(tmp_path / "none.safetensors")])


def test_expected_results(save: Save) -> None:
    side = Side("forward", "result", (WEIGHT, INDEX))
    weight, index = save("w.npy", np.ones((2, 3), np.float32)), save("i.npy", np.array(4))
    assert set(read_expected(side, [weight, index])) == {"weight", "args[0]"}
    some = save("some.safetensors", {"args[0]": torch.tensor(4)})
    assert set(read_expected(side, [some])) == {"args[0]"}
    with pytest.raises(UsageError, match="give one kind"):
        read_expected(side, [weight, some])
    with pytest.raises(CommandError, match=r"forward has 2 results, but 1 \.npy files"):
        read_expected(side, [weight])
    typing_error = save("typo.safetensors", {"wieght": torch.ones(2, 3)})
    with pytest.raises(CommandError, match="wieght is no result of forward; it gives weight, args"):
        read_expected(side, [typing_error])


def test_file_names_are_safe_and_distinct() -> None:
    names = ["output['a/b']", "grad.0.weight", "output[a b]", "../x", "GRAD.0.weight", "['']"]
    files = npy_names([TensorSpec(name, "output", (), "float32") for name in names])
    assert files[:2] == ["output_a_b.npy", "grad.0.weight.npy"]
    assert len({file.lower() for file in files}) == len(names)
    assert all("/" not in file and file.endswith(".npy") and not file.startswith("/") for file in files)


def test_written_files_are_read_back(tmp_path: Path) -> None:
    specs = (TensorSpec("output", "output", (2,), "bool"), TensorSpec("saved.x", "saved", (2, 1), "float64"))
    tensors = [torch.tensor([True, False]), torch.tensor([[1.5], [2.5]], dtype=torch.float64)]
    folder = tmp_path / "new" / "folder"
    write_npy(folder, specs, tensors)
    read = read_npy(Side("f", "result", specs), [str(folder / "output.npy"), str(folder / "saved.x.npy")])
    assert all(torch.equal(a, b) for a, b in zip(read, tensors, strict=True))
    write_safetensors(tmp_path / "all.safetensors", specs, tensors)
    table = load_file(tmp_path / "all.safetensors")
    assert list(table) == ["output", "saved.x"] or set(table) == {"output", "saved.x"}
    assert torch.equal(table["saved.x"], tensors[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_npy_cannot_hold(dtype: str) -> None:
    side = Side("backward", "result", (TensorSpec("grad.x", "grad", (2,), dtype),))
    with pytest.raises(CommandError, match=rf"result grad.x of backward is {dtype}, which .npy files cannot hold"):
        check_npy_can_hold(side)
    check_npy_can_hold(Side("backward", "result", (WEIGHT, INDEX)))


def test_relative_error() -> None:
    nan, inf = math.nan, math.inf
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([nan, inf, 1.0]), torch.tensor([nan, inf, 1.0])) == 0
    assert relative_error(torch.tensor([nan, 1.0]), torch.tensor([0.0, 1.0])) == inf
    assert relative_error(torch.tensor([0.0, 1.0]), torch.tensor([nan, 1.0])) == inf
    assert relative_error(torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0])) == inf
    assert relative_error(torch.tensor([inf]), torch.tensor([1.0])) == inf
    assert relative_error(torch.tensor([nan]), torch.tensor([inf])) == inf
    assert relative_error(torch.tensor([True]), torch.tensor([False])) > 1
    assert relative_error(torch.empty(0), torch.empty(0)) == 0


def test_tolerance_is_that_of_the_dtype_unless_given() -> None:
    expected = {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64), "i": torch.zeros(1, dtype=torch.int64)}
    check_errors({"a": 5e-5, "b": 5e-10, "i": 0.0}, expected, None)
    with pytest.raises(CommandError, match=r"1 of 3 results differ .* first b by 5.00e-05 .* 1e-09 is allowed"):
        check_errors({"a": 5e-5, "b": 5e-5, "i": 0.0}, expected, None)
    with pytest.raises(CommandError, match=r"first i by 1.00e-06"):
        check_errors({"a": 0.0, "b": 0.0, "i": 1e-6}, expected, None)
    with pytest.raises(CommandError, match="first a by nan"):
        check_errors({"a": math.nan}, expected, None)
    check_errors({"a": 0.5, "b": 0.5, "i": 0.5}, expected, 0.6)
