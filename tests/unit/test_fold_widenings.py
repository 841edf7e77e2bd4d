# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Chains of ops that read narrow tensors: ``bwd-fold-widenings`` keeps each body of a bounded size."""

from collections.abc import Callable

import pytest

from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.infra.runner import run_pipeline
from retrograd.pipelines.transforms.device.bwd_fold_widenings import MAX_OPS
from retrograd.pipelines.transforms.helpers.folding import MAX_INPUTS
from retrograd.pipelines.transforms.helpers.generics import count_inputs

# Without a bound the bodies of `narrow` double with each step: few enough to count them then.
STEPS = 14
OP = """
  %{result} = linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel"]}}
      ins({values} : {types}) outs(%empty : tensor<4xf32>) {{
  ^bb0({arguments}, %out: f32):
    {body}
    linalg.yield %r : f32
  }} -> tensor<4xf32>"""


def elementwise(result: str, inputs: dict[str, str], body: str) -> str:
    """An op over tensors of four elements: ``inputs`` are their names and element types, ``%a0``... in the body."""
    return OP.format(
        result=result,
        maps=", ".join(["#id"] * (len(inputs) + 1)),
        values=", ".join(f"%{name}" for name in inputs),
        types=", ".join(f"tensor<4x{type_}>" for type_ in inputs.values()),
        arguments=", ".join(f"%a{i}: {type_}" for i, type_ in enumerate(inputs.values())),
        body=body,
    )


def masked(step: int) -> str:
    """Gradients of a recurrent cell's steps: a mask stands at the beginning."""
    if step == 0:
        return elementwise(
            "h0", {"mask": "i1", "x0": "f32"}, "%z = arith.constant 0.0 : f32\n    %r = arith.select %a0, %a1, %z : f32"
        )
    return elementwise(f"h{step}", {f"h{step - 1}": "f32", f"x{step}": "f32"}, "%r = arith.mulf %a0, %a1 : f32")


def narrow(step: int) -> str:
    """Each op widens an argument of its own, and reads the one before it in two ways."""
    wide = elementwise(f"w{step}", {f"n{step}": "bf16"}, "%r = arith.extf %a0 : bf16 to f32")
    if step == 0:
        return wide.replace("%w0", "%h0")
    squared = elementwise(f"s{step}", {f"h{step - 1}": "f32", f"w{step}": "f32"}, "%r = arith.mulf %a0, %a1 : f32")
    both = elementwise(f"h{step}", {f"h{step - 1}": "f32", f"s{step}": "f32"}, "%r = arith.addf %a0, %a1 : f32")
    return wide + squared + both


@pytest.mark.parametrize(("chain", "most_inputs"), [(masked, 2), (narrow, MAX_INPUTS)])
def test_bodies_stay_of_a_bounded_size(chain: Callable[[int], str], most_inputs: int) -> None:
    arguments = ["%mask: tensor<4xi1>"]
    arguments += [f"%x{i}: tensor<4xf32>, %n{i}: tensor<4xbf16>" for i in range(STEPS)]
    text = "#id = affine_map<(d0) -> (d0)>\n" + f"func.func @f({', '.join(arguments)}) -> tensor<4xf32> {{\n"
    text += "  %empty = tensor.empty() : tensor<4xf32>" + "".join(chain(i) for i in range(STEPS))
    text += f"\n  return %h{STEPS - 1} : tensor<4xf32>\n}}"
    with make_context(allow_unregistered_dialects=True):
        module = ir.Module.parse(text)
        run_pipeline(module, "builtin.module(bwd-fold-widenings)")
        (function,) = module.body.operations
        ops = [view.operation for view in function.regions[0].blocks[0].operations]
        generics = [op for op in ops if op.name == "linalg.generic"]
        assert max(map(count_inputs, generics)) <= most_inputs
        # What a body held before, and two inputs that were folded into it.
        assert max(len(op.regions[0].blocks[0].operations) for op in generics) <= 2 * MAX_OPS + 2
