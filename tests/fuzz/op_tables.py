# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Expressions that random programs are made of, by the operands that they take.

Arguments are brought to where a function is smooth and its value small (``{x}.abs() + 1`` under a logarithm): a
gradient that overflows says nothing.
"""

# Of a value of any shape.
ELEMENTWISE = (
    *(f"torch.{op}({{x}})" for op in ("tanh", "sigmoid", "sin", "cos", "relu", "abs", "neg", "atan", "square", "erf")),
    *(f"F.{op}({{x}})" for op in ("gelu", "silu", "softplus", "elu", "hardswish", "hardtanh", "logsigmoid", "mish")),
    *(f"F.{op}({{x}})" for op in ("softsign", "tanhshrink", "hardsigmoid", "selu", "celu", "relu6", "softshrink")),
    "F.gelu({x}, approximate='tanh')",
    "F.leaky_relu({x}, 0.1)",
    "torch.exp(-{x}.abs())",
    "torch.log({x}.abs() + 1)",
    "torch.log1p({x}.abs())",
    "torch.expm1(-{x}.abs())",
    "torch.sqrt({x}.abs() + 0.5)",
    "torch.rsqrt({x} * {x} + 1)",
    "torch.reciprocal({x}.abs() + 1)",
    "torch.clamp({x}, -0.5, 0.75)",
    "{x}.clamp(min=0.1)",
    "torch.floor({x}) + {x}",
    "torch.sign({x}) * {x}",
    "{x}.detach() * {x}",
    "{x} ** 3 * 0.1",
    "({x}.abs() + 0.1) ** 1.5",
    "2 - {x} / 3",
    "torch.where({x} > 0, {x}, 0.3)",
    "torch.asinh({x})",
    "{x}.clone()",
)

# Of two values that broadcast.
BINARY = (
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{a} / ({b}.abs() + 1)",
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})",
    "torch.where({a} > {b}, {a}, {b} * 0.5)",
    "torch.atan2({a}, {b}.abs() + 1)",
    "torch.lerp({a}, {b}, 0.3)",
    "torch.add({a}, {b}, alpha=0.5)",
    "torch.addcmul({a}, {a}, {b}, value=0.3)",
    "({a} + {b} * 0).masked_fill({b} > 0, 0.25)",
    "F.smooth_l1_loss(*torch.broadcast_tensors({a}, {b}), reduction='none')",
    "torch.logaddexp({a}, {b})",
)

# Of one axis: {d}, kept or not: {k}.
REDUCTIONS = (
    "torch.sum({x}, {d}, keepdim={k})",
    "torch.mean({x}, {d}, keepdim={k})",
    "torch.amax({x}, {d}, keepdim={k})",
    "torch.amin({x}, {d}, keepdim={k})",
    "torch.max({x}, {d}, keepdim={k}).values",
    "torch.logsumexp({x}, {d}, keepdim={k})",
    "torch.var({x}, {d}, correction=0, keepdim={k})",
    "torch.prod({x}, {d}, keepdim={k})",
    "torch.linalg.vector_norm({x} + 2, dim={d}, keepdim={k})",
    "torch.linalg.vector_norm({x}, float('inf'), dim={d}, keepdim={k})",
)

WHOLE = (
    "{x}.sum()",
    "{x}.mean()",
    "{x}.max()",
    "{x}.reshape(-1)[-1]",
    "({x} + 2).norm()",
    "F.mse_loss({x}, {x} * 0.5)",
)

# Along one axis, to the same shape.
PER_AXIS = (
    "F.softmax({x}, {d})",
    "F.log_softmax({x}, {d})",
    "torch.cumsum({x}, {d})",
    "F.normalize({x} + 2, dim={d})",
    "{x} - {x}.mean({d}, keepdim=True)",
    "{x} * torch.argmax({x}, {d}, keepdim=True)",
    "torch.where({x} == {x}.amax({d}, keepdim=True), {x}, {x} * 0.5)",
    "F.relu({x} - {x}.amin({d}, keepdim=True))",
    "F.glu(torch.cat([{x}, {x} * 0.5], {d}), {d})",
)

# Statements: {x} is written to, {y} broadcasts to it.
IN_PLACE = (
    "{x}.add_({y})",
    "{x}.mul_({y})",
    "{x}.copy_({y})",
    "{x}.sub_({y}, alpha=0.5)",
    "{x}.mul_(0.5)",
    "{x}.zero_()",
    "{x}.fill_(0.25)",
    "{x}.tanh_()",
    "{x}.clamp_(-0.5, 0.5)",
    "{x}.masked_fill_({x} > 0, 0.125)",
    "F.relu_({x})",
    "{x}.addcmul_({y}, {y}, value=0.1)",
    "{x}.index_add_(0, ids[:1], {x}[:1] * 0.5)",
)

# Of a value whose last two axes are as long, {n} each: it again, its elements at other places.
REARRANGED = (
    "{x}.transpose(-1, -2)",
    "torch.flip({x}, [-1])",
    "torch.flip({x}, [-2]).transpose(-1, -2)",
    "torch.roll({x}, (1, 2), (-2, -1))",
    "F.pad({x}[..., 1:, :], (0, 0, 0, 1))",
    "{x}[..., torch.arange({n}, device={x}.device).flip(0), :]",
    "({x}[..., :, :1] + {x}[..., :, 0].unsqueeze(-2))",
    "{x}.sum(-1, keepdim=True) - {x}.sum(-1).unsqueeze(-2)",
    "({x}.unsqueeze(-2) - {x}.unsqueeze(-3)).pow(2).mean(-1)",
    "{x}.diagonal(0, -2, -1).unsqueeze(-1)",
    "torch.tril({x}).transpose(-1, -2)",
    "{x}.transpose(-1, -2).reshape({x}.shape)",
)
