# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-split-long-products``: a product of long sums is a product of each piece of them, added to the one before."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.cpu_products import find_pieces
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.copies import replace_by_forms
from retrograd.pipelines.transforms.helpers.generics import reads_by

_PRODUCT = "linalg.matmul"
# By loops: row, column, term.
_LOOPS = ((0, 2), (2, 1), (0, 1))
_FORM = """
func.func @pieces(%left: {left}, %right: {right}, %sum_0: {result}) -> {result} {{
{pieces}
  return %sum_{count} : {result}
}}
"""
# Without barriers a product's kernel would take its slices, and pack them each time it reads them.
_PIECE = """
  %rows_{n} = tensor.extract_slice %left[0, {start}] [{m}, {k}] [1, 1] : {left} to tensor<{m}x{k}xf32>
  %columns_{n} = tensor.extract_slice %right[{start}, 0] [{k}, {c}] [1, 1] : {right} to tensor<{k}x{c}xf32>
  %own_rows_{n} = "iree_tensor_ext.compute_barrier.start"(%rows_{n}) : (tensor<{m}x{k}xf32>) -> tensor<{m}x{k}xf32>
  %own_cols_{n} = "iree_tensor_ext.compute_barrier.start"(%columns_{n}) : (tensor<{k}x{c}xf32>) -> tensor<{k}x{c}xf32>
  %sum_{next} = linalg.matmul ins(%own_rows_{n}, %own_cols_{n} : tensor<{m}x{k}xf32>, tensor<{k}x{c}xf32>)
      outs(%sum_{n} : {result}) -> {result}
"""


class BwdSplitLongProducts(ModulePass):
    """Makes of a ``linalg.matmul`` in f32 of long sums one for each piece of them, which starts at what the one before
    gave; which products those are, and what it gains, says ``cpu_products.py``.

    Products that read an operand transposed by their maps, or have open sizes, stay as they are.
    """

    description = "Compute products of long sums in pieces that stay in a CPU's cache"

    def apply(self, module: ir.Operation) -> None:
        replace_by_forms(module, self.name, write_form)


def write_form(op: ir.Operation) -> str | None:
    """The text of what takes the place of ``op``; ``None`` for what stays."""
    if op.name != _PRODUCT or not reads_by(op, _LOOPS, 3):
        return None
    left, right, result = (ir.RankedTensorType(value.type) for value in op.operands)
    if not all(t.has_static_shape and isinstance(t.element_type, ir.F32Type) for t in (left, right, result)):
        return None
    (rows, inner), columns = left.shape, right.shape[1]
    types = {"left": left, "right": right, "result": result}
    pieces = [
        _PIECE.format(n=number, next=number + 1, m=rows, c=columns, start=start, k=terms, **types)
        for number, (start, terms) in enumerate(find_pieces(rows, inner, columns))
    ]
    return _FORM.format(pieces="".join(pieces), count=len(pieces), **types) if pieces else None
