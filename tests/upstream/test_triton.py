# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A fault of LLVM as Triton 3.6 has it, which later releases have not: once no such release is allowed, the mend
``drop_vector_flags`` (``pipelines/kernels/ptx.py``) can go."""

from __future__ import annotations

from importlib.metadata import version

from retrograd.pipelines.kernels.ptx import drop_vector_flags

RELEASE = tuple(int(part) for part in version("triton").split(".")[:2])

# The second number of %s is twice %a. Of the first, which nobody reads, it is said that no bit is lost.
PAIR = """
target triple = "nvptx64-nvidia-cuda"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @k(ptr addrspace(1) %out) {
  %t = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %a = and i32 %t, 3
  %v0 = insertelement <2 x i32> poison, i32 %t, i64 0
  %v = insertelement <2 x i32> %v0, i32 %a, i64 1
  %m = and <2 x i32> %v, <i32 31, i32 poison>
  %s = shl nuw nsw <2 x i32> %v, <i32 31, i32 1>
  %w = shufflevector <2 x i32> %m, <2 x i32> %s, <4 x i32> <i32 0, i32 3, i32 3, i32 3>
  %o = or <4 x i32> %w, <i32 32, i32 64, i32 8, i32 16>
  %e0 = extractelement <4 x i32> %o, i64 0
  %e1 = extractelement <4 x i32> %o, i64 1
  %e2 = extractelement <4 x i32> %o, i64 2
  %x = extractelement <2 x i32> %s, i64 1
  %y = mul i32 %e0, %e1
  %z = mul i32 %y, %e2
  %q = mul i32 %z, %x
  %p = getelementptr i32, ptr addrspace(1) %out, i32 %t
  store i32 %q, ptr addrspace(1) %p
  ret void
}
"""


def translate(text: str) -> str:
    """PTX by Triton's LLVM."""
    from triton._C.libtriton import llvm

    llvm.init_targets()
    more = [False] if RELEASE >= (3, 8) else []
    ptx: str = llvm.translate_to_asm(text, "nvptx64-nvidia-cuda", "sm_90a", "+ptx80", [], True, False, *more)
    return ptx


def test_bits_of_one_number_of_a_vector_get_into_the_next() -> None:
    """The thread's number times 2**31 in a register of 64 bits: half of it is where twice ``%a`` is read."""
    assert ("2147483648" in translate(PAIR)) == (RELEASE == (3, 6))
    assert "2147483648" not in translate(drop_vector_flags(PAIR))
