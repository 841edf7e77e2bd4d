# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How CUDA code computes the sums of ``bwd-combine-scatters``, as rules for iree-compile.

Each is the product of a matrix of comparisons, which is not in memory, with that of the updates, and has a product's
tiles. iree-compile by itself gives a warp to each number of the result, which reads a column of the updates.
"""

from __future__ import annotations

import re

from retrograd.pipelines.devices.kernel_rules import Rule, write_action, write_matcher
from retrograd.pipelines.devices.product_tiles import Product, choose_tile, write_lowering, write_translation

_SUMS = re.compile(r"ins\([^:]*: ((?:tensor<(\d+)xi\d+>, )+)tensor<\2x(\d+)xf32>\) outs\([^:]*: tensor<\2x\3xf32>\)")


def scatter_rules(linalg: str) -> list[Rule]:
    """The rules for sums of float32 updates in a module's text, as far as tiles divide them."""
    found = {(int(count), int(width), places.count("tensor")) for places, count, width in _SUMS.findall(linalg)}
    rules = []
    for count, width, places in sorted(found):
        tile = choose_tile(Product(0, count, width, count))
        if tile is None or tile.padded:
            continue
        name = f"{count}_{width}_{places}"
        matcher = write_matcher(
            f"combines_{name}", [("parallel", count), ("parallel", width), ("reduction", count)], places + 1
        )
        promoted = [*range(1, places, 2), places]
        action = write_action(f"tile_{name}", write_lowering(tile, promoted), write_translation(tile))
        rules.append(Rule(f"combines_{name}", f"tile_{name}", f"{matcher}\n{action}"))
    return rules
