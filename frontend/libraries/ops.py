# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops PyTorch's libraries (cuDNN, oneDNN, its attention kernels) compute, and from which size on.

While :func:`library_ops` is open, a trace keeps these ops whole and marks them (:func:`mark_library_ops`). A marked op
becomes an island: it runs in torch, on torch's current stream, between compiled functions. No file holds one: see
``written_out.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from retrograd.contract.convolution import count_windows
from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.layers.biased_attention import BIASED_ATTENTION, BIASED_ATTENTION_BACKWARD, has_kernels
from retrograd.frontend.layers.convolution_ops import LAST
from retrograd.frontend.layers.cudnn_layers import CUDNN_LSTM, CUDNN_LSTM_BACKWARD, CUDNN_RNN, CUDNN_RNN_BACKWARD
from retrograd.frontend.layers.lstm_layers import LSTM_LAYER, LSTM_LAYER_BACKWARD
from retrograd.frontend.libraries.attention_calls import takes_backward, takes_forward
from retrograd.frontend.libraries.cpu_units import has_half_units, has_units_for
from retrograd.frontend.libraries.kernel_calls import refusing_calls

aten = torch.ops.aten

WORTH = 1 << 24
"""Multiplications from which on a step of its own is worth its call from the host, some 50 microseconds."""
WORTH_ON_CPU = 1 << 26
"""The same on a CPU, of a product; a step takes half a millisecond from there on: IREE's workers and OpenMP's have the
cores by turns, and what the step reads and writes is in memory between the two."""
LIBRARY = "retrograd_library"
"""In a node's ``meta``: the library that computes it, or the op that it is a view for."""
ROUNDING = "PyTorch's rounding"
"""The mark of ops that PyTorch computes because whole numbers hang on how they round, however long that takes."""
CHOICE = "PyTorch's choice"
"""The mark of ops that PyTorch computes because they choose among equal values, by no rule that others know."""
FLOPS = "retrograd_flops"
"""In a node's ``meta``: the FLOPs of an op that a library computes, at the sizes of the trace."""


@dataclass(frozen=True)
class Libraries:
    """From how many multiplications of an op on libraries compute it, on each type of device; ``None``: they do not.
    ``products`` says whether that is so of products on a CPU; those on CUDA are compiled where sizes are known, since
    kernels of our own take no others. ``kernels`` are families of
    kernels of our own that the target has: where they take attention or a convolution, and no library does, it is kept
    whole. ``channels_last`` says that convolutions take and give images with channels last, where that pays;
    ``eager_forward`` that PyTorch ran the forward of a backward that is compiled."""

    cpu: int | None = None
    cuda: int | None = None
    products: bool = True
    kernels: tuple[str, ...] = ()
    channels_last: bool = False
    eager_forward: bool = False

    def compiled(self) -> Libraries:
        """The same for what is compiled whole: no library computes anything."""
        return Libraries(kernels=self.kernels)

    def least(self, device: torch.device, excess: int) -> int | None:
        """The number for tensors on a device, of an op for which compiled code takes so much longer."""
        on_cpu = None if self.cpu is None else self.cpu // excess
        return {"cpu": on_cpu, "cuda": self.cuda}.get(device.type)


@dataclass(frozen=True)
class LibraryOp:
    """An op that a library computes: how many multiplications a call is, of numbers (``None``: a call that is not for
    it), and which library it is. ``excess`` says how much longer compiled code takes on a CPU for one of them than the
    library, to that of a product: so much sooner a call is worth its step. ``takes`` says whether kernels of our own
    compute a call; ``always`` that a library is to compute it, however small, and ``open`` whether, on a CPU, it is to
    for the sizes of a call that are open. The last ``notes`` tensors of a call are bytes of the library's own;
    ``by_index`` says that tensors of whole numbers are among the others."""

    count: Callable[..., int | None]
    library: str
    excess: Callable[..., int] = lambda *_, **__: 1
    takes: Callable[..., bool] | None = None
    always: bool = False
    open: Callable[..., bool] | None = None
    notes: int = 0
    by_index: bool = False


def _times(excess: int) -> Callable[..., int]:
    return lambda *_, **__: excess


def _behind_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the arguments behind the first, such as a forward's among those of its backward."""
    return lambda _grad, *given, **named: function(*given, **named)


def _convolution(x: Tensor, weight: Tensor, _bias: Any, *how: Any) -> int | None:
    if x.dtype is torch.float16 and x.device.type == "cpu":
        # oneDNN takes twice as long as for float32, and 500 times for the gradient of filters.
        return None
    stride, padding, dilation, transposed, _ = how[:5]
    if transposed:
        return x.numel() * weight[0].numel()
    windows = [
        count_windows(*along) for along in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False)
    ]
    return x.shape[0] * math.prod(windows) * weight.numel()


def _convolution_backward(_grad: Tensor, x: Tensor, weight: Tensor, _sizes: Any, *how: Any) -> int | None:
    *_, transposed, _, groups, mask = how
    if mask[1] and not transposed and has_many_own_taps(x, weight, groups):
        # Two convolutions are faster: see filters_of_planes.
        return None
    forward = _convolution(x, weight, None, *how)
    return None if forward is None else forward * sum(mask[:2])


def _has_open_images(*args: Any, **_: Any) -> bool:
    """Whether the planes of any image of a convolution are of open sizes: iree-compile refuses many such, by how they
    are joined with what is around them, and others are a slice for each tap."""
    images = [tensor for tensor in args[:2] if isinstance(tensor, Tensor)]
    return not all(isinstance(size, int) for tensor in images for size in tensor.shape[2:])


def _attention(query: Tensor, key: Tensor, _value: Tensor, dropout_p: float = 0.0, *_: Any, **__: Any) -> int | None:
    return None if dropout_p else query.numel() * key.shape[2]


def _attention_backward(_grad: Tensor, *given: Any, **__: Any) -> int | None:
    query, key, value, _out, _lse, dropout_p, *_ = given
    return _attention(query, key, value, dropout_p)


# Behind a forward of PyTorch's it is five products, one of them the forward's again. One core with AVX-512, by a call
# and compiled, ms: 2 x 4 x 64 x 32 causal, 2**20, 0.68 and 1.44; 2 x 4 x 128 x 32 causal, 2**22, 1.17 and 3.32;
# 2 x 4 x 128 x 64, 2**23, 1.77 and 1.96; 8 x 4 x 128 x 64, 2**25, 5.1 and 6.7; but 2 x 2 x 64 x 32, 2**19, 1.08 and
# 0.69. Where the forward is compiled too, and saves its softmax, a block of 2**25 takes as long either way.
_OF_ATTENTION_BACKWARDS = 16


def _attention_backward_excess(*_: Any, **__: Any) -> int:
    return _OF_ATTENTION_BACKWARDS if _LIBRARIES.get().eager_forward else 1


def _biased_attention(query: Tensor, key: Tensor, *_: Any) -> int | None:
    return query.numel() * key.shape[2] if has_kernels(query) else None


def _is_row(a: Tensor) -> bool:
    """Whether a product is of one row, at which MKL is ahead on any CPU: the matrix is read once, by whichever."""
    return a.shape[0] == 1 and a.dtype is torch.float32 and torch.backends.mkl.is_available()


# One core of an EPYC (Zen 4), float32, GFLOP/s packed, packing included, and by MKL. The two gradients of a layer with
# a vocabulary, whose larger matrix packing writes to memory that no cache holds: 8192 x 1024 x 384 78 and 94, 50257 x
# 1024 x 768 91 and 98, 1024 x 50257 x 768 81 and 96, 1024 x 30522 x 768 81 and 93, 8192 x 2048 x 1024 84 and 92; but of
# 4096 x 1024 x 384 95 and 93. Its forward, which reads the weight turned: 1024 x 384 x 8192 103 and 89.
_LEAST_UNCACHED = 1 << 23


def _is_too_large_to_pack(a: Tensor, b: Tensor) -> bool:
    """Whether a product reads a matrix that is no sooner packed than multiplied by MKL."""
    if a.dtype is not torch.float32 or not torch.backends.mkl.is_available():
        return False
    is_turned = b.dim() == a.dim() and b.stride(0) == 1 and b.stride(1) != 1
    return not is_turned and max(hint(a.numel()), hint(b.numel())) >= _LEAST_UNCACHED


def _product(a: Tensor, b: Tensor) -> int | None:
    if a.device.type == "cuda":
        return _open_product(a, b)
    if a.device.type != "cpu" or not (_LIBRARIES.get().products or _is_row(a) or _is_too_large_to_pack(a, b)):
        return None
    if a.dtype is torch.float16 and not has_half_units():
        # Of 512 x 1024 x 1024 oneDNN takes 1,700 ms then, of float32 10.
        return None
    return a.numel() * b.shape[-1]


def _are_open_on_cuda(*tensors: Tensor) -> bool:
    is_known = all(isinstance(size, int) for tensor in tensors for size in tensor.shape)
    return tensors[0].device.type == "cuda" and not is_known


def _open_product(a: Tensor, b: Tensor) -> int | None:
    """A product on CUDA, or a batch of them, of sizes that are open: IREE's code for such has no tiles."""
    return a.numel() * b.shape[-1] if _are_open_on_cuda(a, b) else None


def _open_embedding(grad: Tensor, indices: Tensor, *_: Any) -> int | None:
    """The gradient of an embedding on CUDA whose rows are of open number: IREE's code for it takes one place after the
    other. Of 19,200 places of 768 numbers in three tables it took 400 ms on an H200, a step of eager's 16."""
    return grad.numel() if _are_open_on_cuda(grad, indices) else None


def _recurrent(x: Tensor, w_ih: Tensor, w_hh: Tensor, *_: Any) -> int:
    return x.shape[0] * x.shape[1] * (w_ih.numel() + w_hh.numel())


def _recurrent_backward(*given: Any) -> int:
    return 2 * _recurrent(*given)


_CUDNN = "cuDNN's recurrent layers"

# One core with AVX-512, two layers of 64 and 32 steps, 2**24 each: 1.22 of eager's step by a call, 1.31 as a loop; of
# 32 numbers 1.41 and 1.43, of 128 1.16 and 1.30.
_OF_LSTMS = 4


def _softmax(x: Tensor, *_: Any) -> int | None:
    return x.numel() if x.device.type == "cpu" else None


# One core with AVX-512, rows of 196 and 192: compiled code takes 3 ns an element more.
_OF_SOFTMAXES = 256


# Axes of a batch of such.
_LINES = 3


def _norm_of_rows(x: Tensor, _weight: Any, _bias: Any, train: bool, *_: Any) -> int | None:
    """A batch norm of one line of numbers a channel, which is how weights are standardized. Not of planes, as an
    instance norm is one: compiled, it is part of the kernels around it."""
    return x.numel() if train and x.device.type == "cpu" and x.dim() == _LINES and x.shape[0] == 1 else None


def _norm_of_rows_backward(_grad: Tensor, x: Tensor, weight: Any, mean: Any, _: Any, *how: Any) -> int | None:
    *_, train, _, _ = how
    return None if mean is not None else _norm_of_rows(x, weight, None, train)


# One core with AVX-512, forward and backward: of 1536 x 1536 numbers 9.9 ms by two calls and 17.8 compiled, of 384 x
# 576 1.1 and 1.4.
_OF_NORMS = 1 << 10


def _running(x: Tensor, dim: int) -> int:
    # Written out, each element reads all before it.
    return x.numel() * (x.shape[dim] if x.dim() else 1)


# One core with AVX-512, 16 rows, a step: of 64 numbers 0.75 ms written out and 0.19 by a call, of 256 10 and 0.27, of
# 1024 254 and 0.63.
_OF_RUNNING = 1 << 11


def _choice(*_: Any, **__: Any) -> int:
    return 0


# A workgroup of IREE's has the widest part of the rows that divides them and is no wider than this, and computes it by
# vectors of 16 numbers and what is left over: by 8, or one by one.
_WIDEST_PART = 64
_VECTOR = 8
# One core with AVX-512, K = 192: 1536 rows of 192 numbers, whose part is 64, 150 GFLOP/s, of 208 (52) and 196 (49) 45,
# of 100 (50) 24; MKL 117 to 200.
_OF_UNEVEN_PRODUCTS = 4


def product_excess(width: int) -> int:
    """How much longer compiled code takes for a product whose result is so wide than for others, to MKL."""
    part = next(n for n in range(min(width, _WIDEST_PART), 0, -1) if width % n == 0)
    return _OF_UNEVEN_PRODUCTS if part % _VECTOR else 1


# One core with AMX, two linear layers around a GELU, of 2**25 multiplications each: compiled 3.2 of eager's step, by
# calls 1.3; of 2**22 1.9 and 1.5, of 2**19 1.1 and 1.7.
_OF_NARROW_PRODUCTS = 16


# One core with AVX-512, a row times a matrix, compiled and by MKL: 16384 x 2048, 2**25, 29.7 and 12.0 ms; 2048 x 2048
# 2.9 and 1.1; 16384 x 256, 2**22, 3.0 and 1.2. Of two rows, or a matrix times a column, they are near. On two cores of
# an EPYC the backward of a linear regression of these sizes took 3.95 of eager's inside of enable() compiled, and 1.08.
_OF_ROWS = 16


def _product_excess(a: Tensor, b: Tensor, **_: Any) -> int:
    if has_units_for(a.dtype):
        return _OF_NARROW_PRODUCTS
    if a.shape[0] == 1:
        return _OF_ROWS
    width = b.shape[-1]
    # An open width has no part that divides it.
    return product_excess(width) if isinstance(width, int) and width else 1


def _product_and_bias(_bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> int | None:
    """In bfloat16 and float16, where the CPU has units for them: PyTorch's decomposition widens a product that
    something is added to, and its matrices with it. Elsewhere the product in float32 is the faster one."""
    return _product(a, b) if a.device.type == "cpu" and has_units_for(a.dtype) else None


# One core of an EPYC with AVX2: of 4 x 64 x 14 x 14 and 3 x 3 taps oneDNN takes 1.2 ms and compiled code 3.9, and from
# some 2**23 multiplications on that is more than a step takes. Products are within a third of MKL's.
_OF_CONVOLUTIONS = 8


# One core with AVX-512, 3 x 3 taps, forward and backward: of 4 x 144 x 16 x 16 0.7 ms by two calls and 2.6 compiled. In
# a model what is around them is cut by each: MobileNetV3 on small images takes 0.67 of eager's step compiled, and 0.84
# where steps have a quarter as many multiplications. Of more taps, each is some fifteen kernels more to compile.
_OF_OWN_FILTERS = 1 << 6
_OF_MANY_TAPS = 1 << 8
# Up to so many taps oneDNN's gradient of one filter for each channel is as fast as its convolution.
_FEW_TAPS = 9


def _convolution_excess(x: Tensor, weight: Tensor, _bias: Any, *how: Any) -> int:
    if how[3] or not _has_own_filters(x, weight, how[5]):
        return _OF_CONVOLUTIONS
    return _OF_MANY_TAPS if has_many_own_taps(x, weight, how[5]) else _OF_OWN_FILTERS


def _has_own_filters(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether each channel of images has one filter of its own, of several taps."""
    is_own = 1 < groups == weight.shape[0] and weight.shape[1] == 1
    return is_own and x.dim() == len(LAST) and math.prod(weight.shape[2:]) > 1


def has_many_own_taps(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether each channel of images on a CPU has one filter of its own, of more taps than oneDNN's gradient of such
    filters is made for."""
    is_known = x.device.type == "cpu" and all(isinstance(size, int) for size in x.shape)
    return is_known and _has_own_filters(x, weight, groups) and math.prod(weight.shape[2:]) > _FEW_TAPS


LIBRARY_OPS: Mapping[OpOverload, LibraryOp] = {
    aten.mm.default: LibraryOp(_product, "PyTorch's product", _product_excess),
    aten.bmm.default: LibraryOp(_open_product, "PyTorch's product"),
    aten.addmm.default: LibraryOp(_product_and_bias, "PyTorch's product", _behind_first(_product_excess)),
    aten.convolution.default: LibraryOp(
        _convolution, "PyTorch's convolution", _convolution_excess, open=_has_open_images
    ),
    aten.convolution_backward.default: LibraryOp(
        _convolution_backward, "PyTorch's convolution", _behind_first(_convolution_excess), open=_has_open_images
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: LibraryOp(
        _attention, "PyTorch's attention", takes=takes_forward
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: LibraryOp(
        _attention_backward, "PyTorch's attention", _attention_backward_excess, takes=takes_backward
    ),
    BIASED_ATTENTION: LibraryOp(_biased_attention, "PyTorch's attention"),
    BIASED_ATTENTION_BACKWARD: LibraryOp(_behind_first(_biased_attention), "PyTorch's attention"),
    LSTM_LAYER: LibraryOp(_recurrent, "oneDNN's LSTM", _times(_OF_LSTMS)),
    LSTM_LAYER_BACKWARD: LibraryOp(_recurrent_backward, "oneDNN's LSTM", _times(_OF_LSTMS), notes=1),
    # Written out, each step is a dozen kernels, and a layer of a hundred takes minutes to compile.
    CUDNN_LSTM: LibraryOp(_recurrent, _CUDNN, always=True),
    CUDNN_RNN: LibraryOp(_recurrent, _CUDNN, always=True),
    CUDNN_LSTM_BACKWARD: LibraryOp(_recurrent_backward, _CUDNN, always=True, notes=1),
    CUDNN_RNN_BACKWARD: LibraryOp(_recurrent_backward, _CUDNN, always=True, notes=1),
    aten.embedding_dense_backward.default: LibraryOp(
        _open_embedding, "PyTorch's embedding", always=True, by_index=True
    ),
    aten._softmax.default: LibraryOp(_softmax, "PyTorch's softmax", _times(_OF_SOFTMAXES)),
    aten._softmax_backward_data.default: LibraryOp(_softmax, "PyTorch's softmax", _times(_OF_SOFTMAXES)),
    aten._native_batch_norm_legit.no_stats: LibraryOp(_norm_of_rows, "PyTorch's batch norm", _times(_OF_NORMS)),
    aten.native_batch_norm_backward.default: LibraryOp(
        _norm_of_rows_backward, "PyTorch's batch norm", _times(_OF_NORMS)
    ),
    aten.logcumsumexp.default: LibraryOp(_running, "PyTorch's running sums", _times(_OF_RUNNING)),
    # Of equal values, as of a gate that begins with zeros, eager's kernel takes some, by no rule of PyTorch's.
    aten.topk.default: LibraryOp(_choice, CHOICE, always=True),
    aten.sort.default: LibraryOp(_choice, CHOICE, always=True),
    aten.sort.stable: LibraryOp(_choice, "PyTorch's sorting", always=True),
}

POOLS: Mapping[OpOverload, int] = {
    aten.max_pool2d_with_indices.default: 0,
    aten.max_pool2d_with_indices_backward.default: 1,
}
"""Pools that are kept whole until it is known how their images lie, and which of their arguments these are."""

NO_LIBRARIES = Libraries()
_LIBRARIES: ContextVar[Libraries] = ContextVar("retrograd_libraries", default=NO_LIBRARIES)


@contextmanager
def library_ops(libraries: Libraries) -> Iterator[None]:
    """While this is open, traces keep ops whole that ``libraries`` are to compute."""
    token = _LIBRARIES.set(libraries)
    try:
        with refusing_calls(libraries.kernels):
            yield
    finally:
        _LIBRARIES.reset(token)


def uses_any_library() -> bool:
    """Whether libraries are to compute anything now."""
    libraries = _LIBRARIES.get()
    return libraries.cpu is not None or libraries.cuda is not None


def computes(op: OpOverload, *args: Any) -> bool:
    """Whether a library is to compute such a call of ``op`` now."""
    return _count_for_library(LIBRARY_OPS[op], args, {}) is not None


def lays_channels_last() -> bool:
    """Whether convolutions of libraries are to take and give images with channels last now."""
    return _LIBRARIES.get().channels_last


def keeping_library_ops(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` of decompositions, less those of ops that are to be kept whole now."""
    kept: dict[Any, Callable[..., Any]] = {
        op: partial(_decompose_rest, table[op], known) for op, known in LIBRARY_OPS.items()
    }
    pools = {op: partial(_decompose_pool, table[op], images) for op, images in POOLS.items()}
    return {**table, **kept, **pools}


def _decompose_rest(decompose: Callable[..., Any], known: LibraryOp, *args: Any, **kwargs: Any) -> Any:
    is_whole = _count_for_library(known, args, kwargs) is not None or _has_kernel(known, args, kwargs)
    return NotImplemented if is_whole else decompose(*args, **kwargs)


def _decompose_pool(decompose: Callable[..., Any], images: int, *args: Any, **kwargs: Any) -> Any:
    """Keep pools whole that have ops of their own where their images lie with channels last."""
    x = args[images]
    is_known = x.dim() == len(LAST) and x.is_floating_point() and all(isinstance(size, int) for size in x.shape)
    return NotImplemented if lays_channels_last() and is_known else decompose(*args, **kwargs)


def _has_kernel(known: LibraryOp, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether kernels of our own are to compute a call."""
    return known.takes is not None and known.takes(*args, **kwargs)


def _count_for_library(known: LibraryOp, args: Any, kwargs: Mapping[str, Any]) -> int | None:
    """The multiplications of a call that a library is to compute now, at the sizes of the trace; ``None`` of others."""
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    least = _LIBRARIES.get().least(tensors[0].device, known.excess(*args, **kwargs))
    numbers = tensors[: len(tensors) - known.notes]
    if known.by_index:
        numbers = [t for t in numbers if t.is_floating_point()]
    if least is None or not all(t.is_floating_point() and t.dtype.itemsize > 1 for t in numbers):
        return None
    count = known.count(*args, **kwargs)
    if count is not None and known.open and tensors[0].device.type == "cpu" and known.open(*args, **kwargs):
        return hint(count)
    # To compare open sizes would add a guard.
    return None if count is None or not (known.always or hint(count) >= least) else hint(count)


def mark_library_ops(graph: Graph) -> list[Node]:
    """Mark the ops of a graph that libraries are to compute now; gives them."""
    if _LIBRARIES.get() == NO_LIBRARIES:
        return []
    marked = []
    for op, known in LIBRARY_OPS.items():
        for node in graph.find_nodes(op="call_function", target=op):
            count = _count_for_library(known, *torch.fx.node.map_arg((node.args, node.kwargs), _value_of))
            if count is not None:
                node.meta |= {LIBRARY: known.library, FLOPS: 2 * count}
                marked.append(node)
    return marked


def _value_of(node: Node) -> Any:
    return node.meta["val"]
