# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pools over images with channels last, as text of functions on torch's tensors: pure data. Each is one elementwise op
that reads from where it likes, so that it is one kernel on every device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from retrograd.pipelines.transforms.helpers.barriers import BARRIER

_HALF = ("bf16", "f16")


@dataclass(frozen=True)
class Pool:
    """A pool: how many images and channels of which elements, the ``size`` of its planes, how many windows there are
    along each axis, and kernel, stride, padding and dilation of these."""

    images: int
    channels: int
    element: str
    size: tuple[int, int]
    out: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def shape(self, plane: Sequence[int]) -> tuple[int, ...]:
        """The shape of images with planes of this size."""
        return (self.images, *plane, self.channels)

    def covers(self) -> list[int]:
        """How many windows in a row may hold one element, along each axis."""
        return [
            -(-(dilation * (kernel - 1) + 1) // stride)
            for kernel, stride, dilation in zip(self.kernel, self.stride, self.dilation, strict=True)
        ]


def max_pool_form(pool: Pool) -> str:
    """``retrograd.max_pool_last``: images to maxima and the numbers of their taps. Of equal elements it is the first,
    and what is no number is a maximum, as in PyTorch.

    The maxima stand behind a barrier: IREE would move a transposition of them into the op, and leave it one result.
    """
    given, out, taps = (_tensor(pool.shape(pool.size), pool.element), *_results(pool))
    lines = ["%most_0 = arith.constant 0.0 : T", "%tap_0 = arith.constant 0 : i8", "%seen_0 = arith.constant false"]
    last = 0
    for number, tap in enumerate(itertools.product(*map(range, pool.kernel))):
        lines += [*_reach(pool, 0, tap[0], number), *_reach(pool, 1, tap[1], number)]
        last = number + 1
        lines += [
            f"%inside_{number} = arith.andi %inside0_{number}, %inside1_{number} : i1",
            f"%value_{number} = tensor.extract %images[%n, %place0_{number}, %place1_{number}, %c] : {given}",
            f"%more_{number} = arith.cmpf ogt, %value_{number}, %most_{number} : T",
            f"%none_{number} = arith.cmpf uno, %value_{number}, %value_{number} : T",
            f"%wins_{number} = arith.ori %more_{number}, %none_{number} : i1",
            f"%first_{number} = arith.cmpi eq, %seen_{number}, %seen_0 : i1",
            f"%taken_{number} = arith.ori %wins_{number}, %first_{number} : i1",
            f"%takes_{number} = arith.andi %taken_{number}, %inside_{number} : i1",
            f"%number_{number} = arith.constant {number} : i8",
            f"%most_{last} = arith.select %takes_{number}, %value_{number}, %most_{number} : T",
            f"%tap_{last} = arith.select %takes_{number}, %number_{number}, %tap_{number} : i8",
            f"%seen_{last} = arith.ori %seen_{number}, %inside_{number} : i1",
        ]
    lines.append(f"linalg.yield %most_{last}, %tap_{last} : T, i8")
    body = "\n".join(f"      {line}" for line in [*_starts(pool), *lines]).replace(": T", f": {pool.element}")
    return f"""
func.func @pool(%given: {_torch(pool.shape(pool.size), pool.element)})
    -> ({_torch(pool.shape(pool.out), pool.element)}, {_torch(pool.shape(pool.out), "si8")}) {{
  %images = torch_c.to_builtin_tensor %given : {_torch(pool.shape(pool.size), pool.element)} -> {given}
  %empty = tensor.empty() : {out}
  %blank = tensor.empty() : {taps}
  %found:2 = linalg.generic {{indexing_maps = [{_MAP}, {_MAP}], iterator_types = [{_LOOPS}]}}
      outs(%empty, %blank : {out}, {taps}) {{
    ^bb0(%unread: {pool.element}, %unused: i8):
      {_INDICES}
{body}
  }} -> ({out}, {taps})
  %hidden = "{BARRIER}"(%found#0) : ({out}) -> {out}
  %most = torch_c.from_builtin_tensor %hidden : {out} -> {_torch(pool.shape(pool.out), pool.element)}
  %taps = torch_c.from_builtin_tensor %found#1 : {taps} -> {_torch(pool.shape(pool.out), "si8")}
  return %most, %taps : {_torch(pool.shape(pool.out), pool.element)}, {_torch(pool.shape(pool.out), "si8")}
}}
"""


def max_pool_backward_form(pool: Pool) -> str:
    """``retrograd.max_pool_last_backward``: gradients of maxima and the numbers of their taps to gradients of images;
    half types are added up in f32."""
    given, (out, taps) = _tensor(pool.shape(pool.size), pool.element), _results(pool)
    is_half = pool.element in _HALF
    wide = "f32" if is_half else pool.element
    lines = ["%nought = arith.constant 0.0 : W", "%total_0 = arith.constant 0.0 : W"]
    for axis in range(2):
        for offset in range(pool.covers()[axis]):
            lines += _cover(pool, axis, offset)
    last = 0
    for number, (row, column) in enumerate(itertools.product(*map(range, pool.covers()))):
        last = number + 1
        at = f"[%n, %window0_{row}, %window1_{column}, %c]"
        lines += [
            f"%tap_{number} = arith.addi %line0_{row}, %tap1_{column} : i32",
            f"%byte_{number} = tensor.extract %taps{at} : {taps}",
            f"%named_{number} = arith.extsi %byte_{number} : i8 to i32",
            f"%same_{number} = arith.cmpi eq, %tap_{number}, %named_{number} : i32",
            f"%both_{number} = arith.andi %holds0_{row}, %holds1_{column} : i1",
            f"%own_{number} = arith.andi %same_{number}, %both_{number} : i1",
            f"%narrow_{number} = tensor.extract %grads{at} : {out}",
            *[f"%wide_{number} = arith.extf %narrow_{number} : {pool.element} to {wide}"] * is_half,
            f"%part_{number} = arith.select %own_{number}, %{'wide' if is_half else 'narrow'}_{number}, %nought : W",
            f"%total_{last} = arith.addf %total_{number}, %part_{number} : W",
        ]
    lines += [f"%rounded = arith.truncf %total_{last} : {wide} to {pool.element}"] * is_half
    lines.append(f"linalg.yield {'%rounded' if is_half else f'%total_{last}'} : {pool.element}")
    body = "\n".join(f"      {line}" for line in lines).replace(": W", f": {wide}")
    images = _torch(pool.shape(pool.size), pool.element)
    grads, numbers = _torch(pool.shape(pool.out), pool.element), _torch(pool.shape(pool.out), "si8")
    return f"""
func.func @pool(%of_maxima: {grads}, %numbers: {numbers}) -> {images} {{
  %grads = torch_c.to_builtin_tensor %of_maxima : {grads} -> {out}
  %taps = torch_c.to_builtin_tensor %numbers : {numbers} -> {taps}
  %empty = tensor.empty() : {given}
  %found = linalg.generic {{indexing_maps = [{_MAP}], iterator_types = [{_LOOPS}]}} outs(%empty : {given}) {{
    ^bb0(%unread: {pool.element}):
      {_INDICES}
{body}
  }} -> {given}
  %result = torch_c.from_builtin_tensor %found : {given} -> {images}
  return %result : {images}
}}
"""


_MAP = "affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>"
_LOOPS = ", ".join(['"parallel"'] * 4)
_INDICES = "\n      ".join(f"%{name} = linalg.index {axis} : index" for axis, name in enumerate(("n", "i0", "i1", "c")))


def _tensor(shape: Sequence[int], element: str) -> str:
    return f"tensor<{'x'.join(map(str, shape))}x{element}>"


def _torch(shape: Sequence[int], element: str) -> str:
    return f"!torch.vtensor<[{','.join(map(str, shape))}],{element}>"


def _results(pool: Pool) -> tuple[str, str]:
    return _tensor(pool.shape(pool.out), pool.element), _tensor(pool.shape(pool.out), "i8")


def _starts(pool: Pool) -> list[str]:
    """Where the window at hand begins along each axis, in padded planes."""
    lines = []
    for axis in range(2):
        lines += [
            f"%stride{axis} = arith.constant {pool.stride[axis]} : index",
            f"%start{axis} = arith.muli %i{axis}, %stride{axis} : index",
        ]
    return lines


def _reach(pool: Pool, axis: int, tap: int, number: int) -> list[str]:
    """The place of a tap along an axis, and whether it is inside of the plane."""
    name = f"{axis}_{number}"
    return [
        f"%step{name} = arith.constant {tap * pool.dilation[axis] - pool.padding[axis]} : index",
        f"%at{name} = arith.addi %start{axis}, %step{name} : index",
        f"%least{name} = arith.constant 0 : index",
        f"%end{name} = arith.constant {pool.size[axis]} : index",
        f"%most{name} = arith.constant {pool.size[axis] - 1} : index",
        # In front of the plane it is a large number without a sign.
        f"%inside{name} = arith.cmpi ult, %at{name}, %end{name} : index",
        f"%low{name} = arith.maxsi %at{name}, %least{name} : index",
        f"%place{name} = arith.minsi %low{name}, %most{name} : index",
    ]


def _cover(pool: Pool, axis: int, offset: int) -> list[str]:
    """A window that may hold the element at hand, by its axis: its number, which of its taps the element is, and
    whether it is one."""
    name = f"{axis}_{offset}"
    lines = [
        f"%padding{name} = arith.constant {pool.padding[axis]} : index",
        f"%stride{name} = arith.constant {pool.stride[axis]} : index",
        f"%dilation{name} = arith.constant {pool.dilation[axis]} : index",
        f"%offset{name} = arith.constant {offset} : index",
        f"%zero{name} = arith.constant 0 : index",
        f"%count{name} = arith.constant {pool.out[axis]} : index",
        f"%top{name} = arith.constant {pool.out[axis] - 1} : index",
        f"%taps{name} = arith.constant {pool.kernel[axis]} : index",
        f"%padded{name} = arith.addi %i{axis}, %padding{name} : index",
        f"%nearest{name} = arith.divui %padded{name}, %stride{name} : index",
        f"%at{name} = arith.subi %nearest{name}, %offset{name} : index",
        f"%start{name} = arith.muli %at{name}, %stride{name} : index",
        f"%behind{name} = arith.subi %padded{name}, %start{name} : index",
        f"%step{name} = arith.divui %behind{name}, %dilation{name} : index",
        f"%whole{name} = arith.muli %step{name}, %dilation{name} : index",
        f"%exists{name} = arith.cmpi ult, %at{name}, %count{name} : index",
        f"%reaches{name} = arith.cmpi ult, %step{name}, %taps{name} : index",
        f"%meets{name} = arith.cmpi eq, %whole{name}, %behind{name} : index",
        f"%touches{name} = arith.andi %reaches{name}, %meets{name} : i1",
        f"%holds{name} = arith.andi %exists{name}, %touches{name} : i1",
        f"%low{name} = arith.maxsi %at{name}, %zero{name} : index",
        f"%window{name} = arith.minsi %low{name}, %top{name} : index",
        f"%tap{name} = arith.index_cast %step{name} : index to i32",
    ]
    if axis:
        return lines
    return [
        *lines,
        f"%width{name} = arith.constant {pool.kernel[1]} : i32",
        f"%line{name} = arith.muli %tap{name}, %width{name} : i32",
    ]
