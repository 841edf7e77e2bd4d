# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A Hypothesis strategy of programs: each statement is drawn among those that the values so far allow."""

from __future__ import annotations

from builder import Builder, NoOperand
from hypothesis import reject
from hypothesis import strategies as st
from programs import LAYOUTS, Input, Program, turned
from statements import EXPRESSIONS, in_place


@st.composite
def programs(draw: st.DrawFn, *, least: int = 10, most: int = 20) -> Program:
    """Programs of ``least`` to ``most`` statements, finite in eager."""
    dtype = draw(st.sampled_from((*["float32"] * 5, "float64", *["bfloat16"] * 2)))
    inputs = tuple(draw(_inputs(dtype)))
    seed = draw(st.integers(0, 2**31))
    program = Program(inputs, (), (), (), seed)
    # What is written to in place must not be a leaf that requires grad.
    builder = Builder(draw, inputs, [a * 1 if a.requires_grad else a for a in program.arguments()])
    count = draw(st.integers(least, most))
    for _ in range(4 * count):
        if len(builder.statements) >= count:
            break
        try:
            if draw(st.integers(0, 9)) == 0:
                in_place(builder)
            else:
                builder.assign(draw(st.sampled_from(EXPRESSIONS))(builder))
        except NoOperand:
            continue
        except (RuntimeError, ValueError, IndexError):
            # What eager refuses (a write to a leaf, an axis of padding) is no program.
            continue
    made = [name for name in builder.values if name.startswith("v")]
    # All that nothing else takes, so that little of the program is dead, and now and then what something does take.
    ends = [name for name in made if builder.uses(name) == 1]
    kept = [*dict.fromkeys([*ends[-6:], *draw(st.lists(st.sampled_from(made), max_size=1))])] if made else []
    if not any(builder.values[name].requires_grad for name in kept):
        reject()
    used = [builder.values[name].requires_grad and draw(st.integers(0, 5)) > 0 for name in kept]
    if not any(used):
        used = [builder.values[name].requires_grad for name in kept]
    partition = draw(st.sampled_from(("min-cut", "min-cut", "default")))
    program = Program(inputs, tuple(builder.statements), tuple(kept), tuple(used), seed, partition)
    return turned(program) if draw(st.integers(0, 3)) == 0 else program


def _inputs(dtype: str) -> st.SearchStrategy[list[Input]]:
    sizes = st.integers(1, 5)
    shapes = st.sampled_from((1, 2, 2, 3, 3, 4)).flatmap(lambda n: st.tuples(*[sizes] * n))

    def name(specs: list[tuple[tuple[int, ...], str, bool]]) -> list[Input]:
        tensors = [Input(f"x{i}", s, dtype, layout, grad) for i, (s, layout, grad) in enumerate(specs)]
        # Square and deep enough that every kind of op finds an operand; the first one requires grad.
        first = Input("x", (3, 4, 5), dtype, specs[0][1], True)
        return [first, *tensors, Input("ids", (3,), "int64", indices=True)]

    spec = st.tuples(shapes, st.sampled_from(LAYOUTS), st.booleans())
    return st.lists(spec, min_size=1, max_size=4).map(name)
