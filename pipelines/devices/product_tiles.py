# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How CUDA code divides products of float32 matrices: tiles chosen here, and given to iree-compile as a script.

A product is computed tile by tile: a workgroup's tiles of both operands go to shared memory, a thread keeps its tile
of the result in registers, so that each number loaded is used as often as that tile is wide (Volkov and Demmel,
"Benchmarking GPUs to Tune Dense Linear Algebra", SC 2008). iree-compile does so by itself for what matrix units
multiply, which float32 is not: there its threads read the operands from global memory. Where a tile does not divide a
product (a vocabulary of 50,257), what is beyond the end is zero in shared memory, and cut off; not in a batch, of which
iree-compile masks columns there and not rows (``bwd-pad-products`` fills up those worth it).

The script is of MLIR's transform dialect and is applied before dispatches are formed, when transpositions have become
indexing maps of the products.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retrograd.pipelines.devices.kernel_rules import WARP, write_info


@dataclass(frozen=True, order=True)
class Product:
    """``batch`` products (0: one, of no batch) of an m x k by a k x n matrix of float32."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Tile:
    """The part of a product that a workgroup computes (m x n, in steps of k), and each of its threads (thread_m x
    thread_n). ``padded`` where these do not divide the product."""

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    padded: bool = False

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return (self.m // self.thread_m) * (self.n // self.thread_n)

    def count(self, product: Product) -> int:
        """Workgroups for ``product``."""
        return max(product.batch, 1) * -(-product.m // self.m) * -(-product.n // self.n)


WORKGROUPS = 128
"""The fewest that a product should have: about one for each multiprocessor of a large device (an H200 has 132)."""

# Sides of a workgroup's tile, and of a thread's. A tile of 32 x 32 with 4 x 4 for each thread is the fastest, or within
# 10% of it, for all products measured on an H200 that have enough of them; one of 64 x 64 or 128 x 128 uses each number
# more often and hides less of the time that loads take.
_SIDES = ((32, 4), (16, 2))
_SHORTEST_STEP, _LONGEST_STEP = 4, 32
# A side that no tile divides and that is this short, a classifier's ten classes, is one tile; the other then has a warp
# beside it.
_SHORT = 32
_BESIDE_SHORT = ((WARP, 1),)


def choose_tile(product: Product) -> Tile | None:
    """The largest tile that divides the product into enough workgroups, else the one that gives the most of them;
    ``None`` for vectors, where both sides are short and no tile divides them, and for a batch that none divides."""
    step = _find_step(product)
    if step < min(product.k, _SHORTEST_STEP) or 1 in (product.m, product.n):
        return None
    if _is_short(product.m) and _is_short(product.n):
        return None
    tiles = [
        Tile(m, n, step, thread_m, thread_n, any(map(int.__mod__, (product.m, product.n, product.k), (m, n, step))))
        for m, thread_m in _find_sides(product.m, _is_short(product.n))
        for n, thread_n in _find_sides(product.n, _is_short(product.m))
    ]
    if product.batch:
        tiles = [tile for tile in tiles if not tile.padded]
    enough = [tile for tile in tiles if tile.count(product) >= WORKGROUPS]
    if enough:
        return max(enough, key=lambda tile: (tile.m * tile.n, tile.n))
    return max(tiles, key=lambda tile: (tile.count(product), tile.n), default=None)


def _find_step(product: Product) -> int:
    """The longest step that divides the sum, of those that load four numbers at once, if there are any. Where that is
    short, and padding the sum adds little to it, the longest step there is; not in a batch."""
    k = product.k
    steps = [step for step in range(1, _LONGEST_STEP + 1) if k % step == 0]
    longest = max(steps, key=lambda step: (step % 4 == 0, step))
    is_long = k <= _LONGEST_STEP or (longest % 4 == 0 and 2 * longest >= _LONGEST_STEP)
    is_cheap = longest < _SHORTEST_STEP or 8 * (-k % _LONGEST_STEP) <= k
    return _LONGEST_STEP if is_cheap and not is_long and not product.batch else longest


def _is_short(size: int) -> bool:
    """Whether a tile is as long as ``size``, which no side divides."""
    return size <= _SHORT and all(size % side for side, _ in _SIDES)


def _find_sides(size: int, beside_short: bool) -> list[tuple[int, int]]:
    """Find the sizes that a tile may have along an axis of ``size``: of the workgroup's, and of a thread's. Those that
    divide it, else those to pad for: not with threads of one row, of which iree-compile forgets which rows there are,
    and writes on."""
    if _is_short(size):
        return [(size, max(side for side in (1, 2, 3, 4) if size % side == 0))]
    sides = _BESIDE_SHORT if beside_short else _SIDES
    fitting = [(side, thread) for side, thread in sides if size % side == 0]
    return fitting or [(side, thread) for side, thread in sides if thread > 1]


_PLAIN = re.compile(r"linalg\.matmul ins\([^:)]*: tensor<(\d+)x(\d+)xf32>, tensor<\d+x(\d+)xf32>\)")
_BATCHED = re.compile(r"linalg\.batch_matmul ins\([^:)]*: tensor<(\d+)x(\d+)x(\d+)xf32>, tensor<\d+x\d+x(\d+)xf32>\)")


def find_products(linalg: str) -> list[Product]:
    """The products of float32 matrices of fixed sizes in a module's text, each once."""
    plain = {Product(0, int(m), int(n), int(k)) for m, k, n in _PLAIN.findall(linalg)}
    batched = {Product(int(b), int(m), int(n), int(k)) for b, m, k, n in _BATCHED.findall(linalg)}
    return sorted(plain | batched)


def write_tile_script(linalg: str) -> str | None:
    """The transform script that gives each product in a module's text its tile; ``None`` where there are none."""
    tiled = [(product, tile) for product in find_products(linalg) if (tile := choose_tile(product)) is not None]
    sequences = [text for product, tile in tiled for text in _write_matchers(product, tile)]
    if not sequences:
        return None
    pairs = ",\n      ".join(f"@match_{i} -> @annotate" for i in range(len(sequences)))
    matchers = "\n".join(_MATCHER.format(i=i, body=text) for i, text in enumerate(sequences))
    return _SCRIPT.format(matchers=matchers, pairs=pairs)


_SCRIPT = """module attributes {{transform.with_named_sequence}} {{
  transform.named_sequence @annotate(%op: !transform.any_op {{transform.readonly}}, %config: !transform.any_param {{transform.readonly}}) {{
    transform.annotate %op "compilation_info" = %config : !transform.any_op, !transform.any_param
    transform.yield
  }}
{matchers}
  transform.named_sequence @__transform_main(%module: !transform.any_op {{transform.consumed}}) {{
    %matched = transform.foreach_match in %module
      {pairs}
      : (!transform.any_op) -> !transform.any_op
    transform.yield
  }}
}}
"""  # noqa: E501

_MATCHER = """  transform.named_sequence @match_{i}(%op: !transform.any_op {{transform.readonly}}) -> (!transform.any_op, !transform.any_param) {{
{body}
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }}"""  # noqa: E501

# What iree-compile numbers the dimensions of a product's operands by, as they are or transposed: m, n, k.
_LAYOUTS = (("m k", "k n"), ("m k", "n k"), ("k m", "k n"))


def _write_matchers(product: Product, tile: Tile) -> Iterator[str]:
    batch = ["b"] if product.batch else []
    names = [*batch, "m", "n", "k"]
    config = write_info(write_lowering(tile, len(batch)), write_translation(tile))
    for layout in _LAYOUTS:
        maps = ", ".join(_write_map(names, [*batch, *axes.split()]) for axes in (*layout, "m n"))
        yield f"""    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f32, rhs_type = f32, output_type = f32, indexing_maps = [{maps}] : !transform.any_op -> !transform.param<i64>
    transform.iree.match.dims_equal %m, [{product.m}] : !transform.param<i64>
    transform.iree.match.dims_equal %n, [{product.n}] : !transform.param<i64>
    transform.iree.match.dims_equal %k, [{product.k}] : !transform.param<i64>
    %config = transform.param.constant {config} -> !transform.any_param"""  # noqa: E501


def _write_map(names: Sequence[str], axes: Sequence[str]) -> str:
    every = ", ".join(f"d{i}" for i in range(len(names)))
    return f"affine_map<({every}) -> ({', '.join(f'd{names.index(axis)}' for axis in axes)})>"


def write_lowering(tile: Tile, batch: int) -> str:
    """The fields of ``#iree_gpu.lowering_config`` for a tile of an op of loops m, n, k, after as many for a ``batch``.
    Both operands go to shared memory."""
    ones, zeros = [1] * batch, [0] * batch
    lowering = (
        f"workgroup = {[*ones, tile.m, tile.n, 0]}, thread = {[*ones, tile.thread_m, tile.thread_n, 0]}, "
        f"reduction = {[*zeros, 0, 0, tile.k]}, promote_operands = [0, 1]"
    )
    return lowering + f", padding = {[*ones, tile.m, tile.n, tile.k]}" * tile.padded


def write_translation(tile: Tile) -> str:
    """The fields of ``#iree_codegen.translation_info`` for a kernel that works by a tile."""
    options = "prefetch_num_stages = 0, no_reduce_shared_memory_bank_conflicts = false, use_igemm_convolution = false"
    return (
        f"pipeline = #iree_gpu.pipeline<TileAndFuse> workgroup_size = [{tile.threads}, 1, 1] subgroup_size = {WARP}, "
        f"{{gpu_pipeline_options = #iree_gpu.pipeline_options<{options}>}}"
    )
