# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Classifies the ops of the torch dialect by the work that they do, as far as saving or recomputing their results is
concerned.

One table by name. An op that is not in it is OPAQUE, which is never recomputed: the safe answer. The classes are those
of ``torch._functorch.partitioners.get_default_op_list``, for the ops that reach MLIR after decomposition.
"""

from __future__ import annotations

from enum import Enum

from retrograd.contract.attention import BACKWARD, DROPPED, DROPPED_BACKWARD, FORWARD, MASKED_BACKWARD
from retrograd.contract.convolution import CONVOLUTION, FILTERS, IMAGES

_PREFIX = "torch.aten."


class OpKind(Enum):
    """Kinds of ops, from free to never recomputed."""

    CONSTANT = "constant"  # literals, lists, scalars: copied wherever they are needed
    VIEW = "view"  # no bytes moved
    POINTWISE = "pointwise"  # fuses with its neighbours
    DATA_MOVEMENT = "data-movement"  # gathers, concatenations, pads: memory traffic, no arithmetic
    REDUCTION = "reduction"
    SCATTER = "scatter"  # writes into a destination, duplicates may add up
    COMPUTE = "compute"  # matrix products, convolutions
    RANDOM = "random"  # a second run gives other values
    OPAQUE = "opaque"  # effects, hooks, or simply unknown


_TABLE: dict[OpKind, str] = {
    OpKind.VIEW: """alias as_strided detach diagonal expand expand_as narrow permute reshape _reshape_alias select.int
        slice.Tensor squeeze squeeze.dim t transpose.int unsqueeze view _unsafe_view unflatten.int flatten.using_ints
        broadcast_to lift_fresh_copy view_as_real view_as_complex split.Tensor split_with_sizes chunk unbind.int""",
    OpKind.POINTWISE: """abs acos acosh add.Scalar add.Tensor addcdiv addcmul asin asinh atan atan2 atanh
        bitwise_and.Tensor bitwise_and.Scalar bitwise_not bitwise_or.Tensor bitwise_xor.Tensor
        bitwise_left_shift.Tensor bitwise_right_shift.Tensor ceil celu clamp clamp.Tensor clamp_max clamp_min
        contiguous clone copy copysign.Tensor cos cosh deg2rad div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode
        elu elu_backward eq.Scalar eq.Tensor erf erfinv exp exp2 expm1 fill.Scalar fill.Tensor floor floor_divide
        fmod.Scalar fmod.Tensor frac full full_like ge.Scalar ge.Tensor gelu gelu_backward gt.Scalar gt.Tensor
        hardshrink hardsigmoid hardswish hardtanh hardtanh_backward isfinite isinf isnan le.Scalar le.Tensor
        leaky_relu leaky_relu_backward lerp.Scalar lerp.Tensor log log10 log1p log2 log_sigmoid_forward
        log_sigmoid_backward logical_and logical_not logical_or logical_xor lt.Scalar lt.Tensor masked_fill.Scalar
        masked_fill.Tensor maximum minimum mish mul.Scalar mul.Tensor ne.Scalar ne.Tensor neg new_full new_ones
        new_zeros ones ones_like pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor rad2deg reciprocal relu relu6
        remainder.Scalar remainder.Tensor round rsqrt rsub.Scalar sgn sigmoid sigmoid_backward sign signbit silu sin
        sinh softplus softplus_backward softshrink sqrt square sub.Scalar sub.Tensor tan tanh tanh_backward threshold
        threshold_backward tril triu trunc type_as where.ScalarOther where.ScalarSelf where.self xlogy.Tensor zeros
        zeros_like empty.memory_format empty_like empty_strided new_empty new_empty_strided scalar_tensor arange
        arange.start arange.start_step _to_copy to.dtype eye""",
    OpKind.DATA_MOVEMENT: """cat constant_pad_nd embedding flip gather im2col index.Tensor index.Tensor_hacked_twin
        index_select pixel_shuffle reflection_pad1d reflection_pad2d repeat replication_pad2d roll stack unfold
        upsample_nearest2d select_scatter slice_scatter diagonal_scatter tile""",
    OpKind.REDUCTION: """all all.dim amax amin any any.dim argmax argmin count_nonzero cumprod cumsum
        linalg_vector_norm log_softmax.int _log_softmax _log_softmax_backward_data logsumexp max max.dim mean mean.dim
        min min.dim norm.ScalarOpt_dim prod prod.dim_int _softmax softmax.int _softmax_backward_data std.correction
        sum sum.dim_IntList var var.correction var_mean.correction native_layer_norm native_group_norm
        native_batch_norm avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d adaptive_avg_pool1d max_pool2d
        max_pool2d_with_indices max_pool3d_with_indices nll_loss_forward nll_loss_backward""",
    OpKind.SCATTER: """col2im embedding_dense_backward index_put index_put.hacked_twin _index_put_impl
        max_pool2d_with_indices_backward scatter.src scatter.value scatter_add scatter_reduce.two
        _unsafe_index_put.hacked_twin""",
    OpKind.COMPUTE: """addbmm addmm baddbmm bmm convolution convolution_backward dot einsum linear matmul mm mv outer
        scaled_dot_product_attention sort topk kthvalue linalg_det""",
    OpKind.RANDOM: """bernoulli bernoulli.p dropout multinomial native_dropout normal_functional rand rand_like
        randint randint.low randn randn_like uniform""",
}

KINDS: dict[str, OpKind] = (
    {_PREFIX + name: kind for kind, names in _TABLE.items() for name in names.split()}
    | {
        "torch.prims.squeeze": OpKind.VIEW,
        "torch.prims.split_dim": OpKind.VIEW,
        "torch.prims.collapse": OpKind.VIEW,
        "torch.prims.convert_element_type": OpKind.POINTWISE,
        "torch.prims.iota": OpKind.POINTWISE,
        "torch.prims.var": OpKind.REDUCTION,
        "torch.prims.sqrt": OpKind.POINTWISE,
        "torch.vtensor.literal": OpKind.CONSTANT,
        # Library ops, with no op of their own in the torch dialect.
        "torch.retrograd.uniform": OpKind.POINTWISE,
        CONVOLUTION: OpKind.COMPUTE,
        IMAGES: OpKind.COMPUTE,
        FILTERS: OpKind.COMPUTE,
        "torch.retrograd.max_pool_last": OpKind.REDUCTION,
        "torch.retrograd.max_pool_last_backward": OpKind.SCATTER,
        "torch.prim.NumToTensor.Scalar": OpKind.CONSTANT,
        "torch.prim.max.int": OpKind.CONSTANT,
        "torch.prim.min.int": OpKind.CONSTANT,
    }
    | {
        f"torch.retrograd.{layer}{half}": OpKind.COMPUTE
        for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for half in ("", "_backward")
    }
    | dict.fromkeys((FORWARD, BACKWARD, DROPPED, DROPPED_BACKWARD, MASKED_BACKWARD), OpKind.COMPUTE)
    | {
        # Arithmetic on sizes.
        _PREFIX + name: OpKind.CONSTANT
        for name in [
            "add.int",
            "sub.int",
            "mul.int",
            "neg.int",
            "floordiv.int",
            "div.int",
            "div",
            "div.float",
            "add",
            "mul",
            "sub",
            "size.int",
        ]
    }
)


FILLS = frozenset(_PREFIX + name for name in ("full", "full_like", "new_full", "new_ones", "new_zeros", "ones"))
FILLS |= {_PREFIX + name for name in ("ones_like", "zeros", "zeros_like")}
"""Ops that give a tensor of one number all over."""

_INDEX_PUTS = ("index_put", "index_put.hacked_twin", "_index_put_impl", "_unsafe_index_put.hacked_twin")
_SCATTERS = ("scatter.src", "scatter_add", "scatter_reduce.two")
INDEX_OPERANDS = {_PREFIX + name: 1 for name in _INDEX_PUTS} | {_PREFIX + name: 2 for name in _SCATTERS}
"""Ops that write to places that tensors say, with the number of the operand that these are."""

_RESHAPES = """alias detach lift_fresh_copy _reshape_alias reshape squeeze squeeze.dim unsqueeze view _unsafe_view
    unflatten.int flatten.using_ints"""
RESHAPES = frozenset(_PREFIX + name for name in _RESHAPES.split())
RESHAPES |= {"torch.prims.squeeze", "torch.prims.split_dim", "torch.prims.collapse"}
"""Views of all that a tensor holds, in the order in which it holds it: the shape says which one it is."""

REORDERS = frozenset(_PREFIX + name for name in ("permute", "t", "transpose.int"))
"""Views that change the order of axes."""


def op_kind(name: str, *, has_tensor_result: bool) -> OpKind:
    """The kind of the op named ``name`` (``torch.aten.mm``); scalars and lists are CONSTANT unless known."""
    if name in KINDS:
        return KINDS[name]
    if not has_tensor_result and name.startswith(("torch.constant.", "torch.prim.")):
        return OpKind.CONSTANT
    return OpKind.OPAQUE
