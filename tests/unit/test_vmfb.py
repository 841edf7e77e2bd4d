# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is read back from a vmfb, on files made here."""

import io
import zipfile

from ptx_modules import Ptx, read_ptx

from retrograd.contract.archive import part_members
from retrograd.pipelines.toolchain.vmfb import add_parts, read_formats

PTX = b"""CDA1....
.version 8.0
.target sm_90
.visible .entry first(
	.param .u64 .ptr .global first_param_0
)
.maxntid 32, 1, 1
{
	.local .align 16 .b8 	__local_depot0[48];
	.reg .b64 	%SPL;
	ld.local.u32 %r1, [%rd1];
}
.visible .entry second()
.maxntid 16, 4, 1
{
	.shared .align 4 .b8 tile[512];
	.local .align 8 .b8 	__local_depot1[8];
	ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2];
	st.shared.f32 [%rd3], %f1;
}
"""


def vmfb(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.fb", data)
    return stream.getvalue()


def test_ptx_is_read_kernel_by_kernel() -> None:
    assert read_ptx(vmfb(module=PTX, cuda=PTX)) == (Ptx("sm_90", ("first", "second"), (32, 64), 56, 1),)


def test_a_file_without_code_for_cuda_has_no_ptx() -> None:
    assert read_ptx(vmfb(module=b"", cpu=b"\x7fELF....")) == ()


def test_formats_are_told_by_their_first_bytes() -> None:
    file = vmfb(module=b"", cuda=PTX, cpu=b"\x7fELF....", other=b"NEW1....")
    assert read_formats(file) == {"cuda-nvptx-fb": 1, "embedded-elf": 1, "4e455731": 1}


def test_constants_in_files_of_their_own_are_no_executables() -> None:
    stream = io.BytesIO(vmfb(module=b"", cuda=PTX))
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("_const.bin", bytes(64))
    assert read_formats(stream.getvalue()) == {"cuda-nvptx-fb": 1}


def test_other_parts_lie_behind_the_first() -> None:
    first, others = vmfb(module=b"", cpu=b"\x7fELF...."), [vmfb(module=bytes([n])) for n in range(11)]
    whole = add_parts(first, others)
    assert whole.startswith(first)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert [archive.read(name) for name in part_members(archive.namelist())] == others
    assert read_formats(whole) == {"embedded-elf": 1}
    assert add_parts(first, []) == first
