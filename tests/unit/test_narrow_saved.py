# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where ``bwd-narrow-saved`` packs and unpacks: found once, and true while operands change."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.transforms.torch.bwd_narrow_saved import find_first_uses, find_last_places

FORWARD = """
!t = !torch.vtensor<[4],f32>
func.func @forward(%x: !t, %unused: !t) -> !t {
  %a = torch.aten.sin %x : !t -> !t
  %b = torch.aten.cos %a : !t -> !t
  %c = torch.aten.mul.Tensor %b, %a : !t, !t -> !t
  "bwd.save"(%a) {name = "a"} : (!t) -> ()
  "bwd.save"(%x) {name = "x"} : (!t) -> ()
  return %c : !t
}
"""


def test_places_stay_while_operands_change() -> None:
    module = ir.Module.parse(FORWARD, make_context())
    block = module.operation.regions[0].blocks[0].operations[0].operation.regions[0].blocks[0]
    ops = [view.operation for view in block.operations]
    x, unused = block.arguments
    a, b, c = (op.results[0] for op in ops[:3])
    last, first = find_last_places(ops), find_first_uses(ops)
    hashes = [hash(op) for op in ops]
    x.replace_all_uses_with(unused)
    # An op is hashed with its operands, so that it is no key while they change.
    assert [hash(op) for op in ops] != hashes
    # Neither a save nor a return is a use after which a value may be packed; both need what was unpacked.
    assert [last[v] for v in (x, a, b, c)] == [0, 2, 2, 2]
    assert [first[v] for v in (x, a, b, c)] == [0, 1, 2, 5]
    assert unused not in first
