# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How CUDA code computes elementwise ops, as rules for iree-compile: workgroups of about 256 threads.

By itself iree-compile gives a workgroup 32 threads and each four elements. An H100 starts about 1.4 such workgroups in
a nanosecond: 4096 x 768 elements take 16 us whether 19 or 31 MB are moved for them, half of the memory's rate.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from retrograd.pipelines.devices.kernel_rules import WARP, Rule, write_action, write_comparison, write_rank, write_sizes

# Elements of a workgroup along the last axis, and along the one before it where rows are short; the first that divides
# a tensor is taken. Those of 7 are of images of 224 x 224 and what convolutions halve them to.
_ROWS = (1024, 768, 512, 896, 256)
_BLOCKS = ((8, 128), (8, 112), (16, 64), (16, 56), (12, 64), (32, 28), (32, 32), (4, 128), (4, 64))
_MOST_LOOPS = 5
_SHORTEST_ROW = 32
# Elements of a thread; eight are no faster, of 16 bits either.
_VECTOR = 4
# Of an element of a result.
_BITS = (32, 16, 8)

_TRANSPOSE = re.compile(r"linalg\.transpose ins\([^:]*: tensor<([\dx]+)x\w+>\).*permutation = \[([\d, ]+)\]")


def elementwise_rules(linalg: str) -> list[Rule]:
    """The rule for a module's text. Transposes are iree-compile's, which reads and writes them by way of shared memory;
    what has the loops of one is taken for one."""
    kept = sorted({loops for shape, order in find_transposes(linalg) for loops in collapse(shape, order)})
    tiles = [_write_keeping(loops) for loops in kept if len(loops) <= _MOST_LOOPS]
    for bits, rank in itertools.product(_BITS, range(1, _MOST_LOOPS + 1)):
        tiles.extend(_write_tile(bits, rank, (size,)) for size in _ROWS)
        if rank > 1:
            tiles.extend(_write_tile(bits, rank, block) for block in _BLOCKS)
    pairs = ",\n          ".join(f"@{rule.matcher} -> @{rule.action}" for rule in tiles)
    return [Rule("maps", "spread_map", "\n".join([*(rule.text for rule in tiles), _MAPS.format(pairs=pairs)]))]


def find_transposes(linalg: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The transposes of a module's text: the shape that is read, and in what order its axes are written. Those that
    move rows as they are, such as heads, are none: they read and write line by line."""
    for sizes, axes in _TRANSPOSE.findall(linalg):
        shape, order = tuple(map(int, sizes.split("x"))), tuple(map(int, axes.split(",")))
        if order[-1] != len(shape) - 1 or shape[-1] < _SHORTEST_ROW:
            yield shape, order


def collapse(shape: Sequence[int], order: Sequence[int]) -> list[tuple[int, ...]]:
    """The loops that a transpose may be compiled to, outermost first: axes of size 1 are none, and axes that stay
    neighbours may be one."""
    axes = [axis for axis in order if shape[axis] != 1]
    known = sorted(axes)
    joins = [known.index(b) == known.index(a) + 1 for a, b in itertools.pairwise(axes)]
    found = set()
    for joined in itertools.product(*((False, True) if may else (False,) for may in joins)):
        loops = [shape[axis] for axis in axes[:1]]
        for axis, is_one in zip(axes[1:], joined, strict=True):
            loops[-1:] = [loops[-1] * shape[axis]] if is_one else [loops[-1], shape[axis]]
        if len(loops) > 1:
            found.add(tuple(loops))
    return sorted(found)


def _write_keeping(loops: Sequence[int]) -> Rule:
    """A rule that leaves elementwise ops of these loops as they are."""
    name = "_".join(map(str, loops))
    matcher = _write_matcher(f"transposes_{name}", len(loops), write_sizes(loops))
    action = f"""  transform.named_sequence @keep_{name}(%op: !transform.any_op {{transform.readonly}}) {{
    transform.yield
  }}"""
    return Rule(f"transposes_{name}", f"keep_{name}", f"{matcher}\n{action}")


def _write_tile(bits: int, rank: int, tile: Sequence[int]) -> Rule:
    """A rule for ops of ``rank`` loops whose result has elements of so many bits: a tile of the innermost loops."""
    name = f"{bits}_{rank}_{'x'.join(map(str, tile))}"
    first = rank - len(tile)
    divided = "\n".join(
        f"      transform.iree.match.dim_is_multiple_of %init[{first + axis}], {size} : !transform.any_value"
        for axis, size in enumerate(tile)
    )
    compared = f"""\
      %init = transform.match.structured.init %structured[0] : (!transform.any_op) -> !transform.any_value
      %bits = transform.match.structured.elemental_bitwidth %init : (!transform.any_value) -> !transform.param<i64>
{write_comparison("%bits", bits)}
{divided}"""
    outer, threads = [1] * first, math.prod(tile) // _VECTOR
    matcher = _write_matcher(f"maps_{name}", rank, compared)
    config = (
        f"thread = {[*outer, *[1] * (len(tile) - 1), _VECTOR]}, workgroup = {[*outer, *tile]}",
        f"pipeline = #iree_gpu.pipeline<TileAndFuse> workgroup_size = [{threads}, 1, 1] subgroup_size = {WARP}",
    )
    action = write_action(f"spread_{name}", *config)
    return Rule(f"maps_{name}", f"spread_{name}", f"{matcher}\n{action}")


def _write_matcher(name: str, rank: int, more: str) -> str:
    """A sequence that matches ops of as many loops, and that passes ``more`` comparisons."""
    return _MATCHER.format(name=name, rank=write_rank(rank), more=more)


_MATCHER = """  transform.named_sequence @{name}(%op: !transform.any_op {{transform.readonly}}) -> !transform.any_op {{
    %matched = transform.match.structured %op : (!transform.any_op) -> !transform.any_op {{
    ^bb0(%structured: !transform.any_op):
{rank}
{more}
      transform.match.structured.yield %structured : !transform.any_op
    }}
    transform.yield %matched : !transform.any_op
  }}"""

# Custom syntax has no place for the attribute `parallel`. A kernel of several ops is left as it is, such as a reduction
# and what is computed of it, and so is one that works on memory and stores no tensor, as copies of slices do: a
# sequence that stops at a comparison is within one that goes on.
_MAPS = """  transform.named_sequence @maps(%op: !transform.any_op {{transform.readonly}}) -> !transform.any_op {{
    transform.match.operation_name %op ["linalg.generic"] : !transform.any_op
    %matched = transform.match.structured %op : (!transform.any_op) -> !transform.any_op {{
    ^bb0(%structured: !transform.any_op):
      "transform.match.structured.dim"(%structured) <{{raw_dim_list = array<i64>, is_all, parallel}}> : (!transform.any_op) -> ()
      transform.match.structured.yield %structured : !transform.any_op
    }}
    transform.yield %matched : !transform.any_op
  }}
  transform.named_sequence @spread_map(%op: !transform.any_op {{transform.consumed}}) {{
    transform.sequence %op : !transform.any_op failures(suppress) {{
    ^bb0(%outer: !transform.any_op):
      transform.sequence %outer : !transform.any_op failures(propagate) {{
      ^bb1(%map: !transform.any_op):
        %kernel = "transform.get_parent_op"(%map) <{{op_name = "func.func"}}> : (!transform.any_op) -> !transform.any_op
        %ops = transform.structured.match interface{{LinalgOp}} in %kernel : (!transform.any_op) -> !transform.any_op
        %count = transform.num_associations %ops : (!transform.any_op) -> !transform.param<i64>
        %one = transform.param.constant 1 : i64 -> !transform.param<i64>
        transform.match.param.cmpi eq %count, %one : !transform.param<i64>
        %stores = transform.structured.match ops{{["iree_codegen.store_to_buffer"]}} in %kernel : (!transform.any_op) -> !transform.any_op
        %stored = transform.num_associations %stores : (!transform.any_op) -> !transform.param<i64>
        transform.match.param.cmpi ge %stored, %one : !transform.param<i64>
        %tiled = transform.foreach_match restrict_root in %map
          {pairs}
          : (!transform.any_op) -> !transform.any_op
      }}
    }}
    transform.yield
  }}"""  # noqa: E501
