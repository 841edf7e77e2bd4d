# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# mypy: allow-subclassing-any, disable-error-code="call-arg"
"""The bwd dialect: what a backward pass has that torch ops cannot say.

Order is carried by values: every op that the user can observe takes a ``!bwd.token`` and gives the next one, so that
any topological order of a function is a legal schedule. The exception is ``bwd.save``, which only marks a value.

Each op with an effect takes and gives one value. Where PyTorch passes several (a node's pre-hook takes all its
gradients), they travel as one ``!torch.tuple``, as in PyTorch; ``dialects/builders.py`` makes tuples and takes them
apart.
"""

# Annotations of op classes are read when the classes are made: `from __future__ import annotations` would hide them.

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from retrograd.contract.collectives import ALL_GATHER, COLLECTIVES
from retrograd.contract.convolution import count_windows
from retrograd.contract.hooks import HOOK_KINDS
from retrograd.dialects import ir
from retrograd.dialects.ir import ext

TOKEN = "!bwd.token"

_Same = TypeVar("_Same")


class Bwd(ext.Dialect, name="bwd"):
    """The dialect; ``Bwd.load()`` puts it into the current context."""

    Type: Any
    Operation: Any


class TokenType(Bwd.Type, name="token"):
    """``!bwd.token``: what has happened so far."""


class Effects(ir.MemoryEffectsOpInterface):
    """Reads and writes memory that no value stands for: neither deleted, nor merged, nor duplicated."""

    @staticmethod
    def get_effects(op: Any, effects: Any) -> None:
        """Add the effects of `op` to `effects`; called by MLIR."""
        effects.append(ir.MemoryEffect.Read)
        effects.append(ir.MemoryEffect.Write)


class FreshResults(ir.MemoryEffectsOpInterface):
    """Gives something new each time: deleted where nobody uses it, but two of them are never taken for one."""

    @staticmethod
    def get_effects(op: Any, effects: Any) -> None:
        """Add the effects of `op` to `effects`; called by MLIR."""
        for result in op.results:
            effects.append(ir.MemoryEffect.Allocate, result)


def _new_token() -> Any:
    return TokenType.get()


# The classes give each op its name, its fields and its checks. MLIR calls verify_invariants before it checks the
# fields, on ops that may lack operands and attributes, and it must not raise.


class CreateTokenOp(Bwd.Operation, name="create_token", traits=[ext.Pure]):
    """Start of a chain: nothing has happened yet."""

    token: ext.Result[TokenType] = ext.result(default_factory=_new_token)

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, [], ["token"]))


class CallHookOp(Bwd.Operation, name="call_hook", traits=[Effects]):
    """A call of the user's hook number `hook` in the hook table, of one of `HOOK_KINDS`."""

    value: ext.Operand[Any]
    token: ext.Operand[TokenType]
    kind: ir.StringAttr
    hook: ir.IntegerAttr
    replacement: ext.Result[Any]
    next_token: ext.Result[TokenType] = ext.result(default_factory=_new_token)

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(
            op,
            _find_shape_problem(op, ["value", "token"], ["value", "token"])
            or _find_kind_problem(op)
            or _find_index_problem(op, "hook"),
        )


class AccumulateGradOp(Bwd.Operation, name="accumulate_grad", traits=[Effects]):
    """The gradient is added to parameter number `param`; post_acc_grad hooks take the token that comes out."""

    gradient: ext.Operand[Any]
    token: ext.Operand[TokenType]
    param: ir.IntegerAttr
    next_token: ext.Result[TokenType] = ext.result(default_factory=_new_token)

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["value", "token"], ["token"]) or _find_index_problem(op, "param"))


class CallBackwardOp(Bwd.Operation, name="call_backward", traits=[Effects]):
    """The backward of custom ``autograd.Function`` number `function`: gradients in, gradients out."""

    value: ext.Operand[Any]
    token: ext.Operand[TokenType]
    function: ir.IntegerAttr
    gradient: ext.Result[Any]
    next_token: ext.Result[TokenType] = ext.result(default_factory=_new_token)

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(
            op, _find_shape_problem(op, ["value", "token"], ["value", "token"]) or _find_index_problem(op, "function")
        )


class UpdateInputOp(Bwd.Operation, name="update_input", traits=[Effects]):
    """Gives what inlined hook number `hook` writes to an argument of the function. The value is a tuple of the
    argument, what is written to it, and the other arguments that share its memory: all that reads these does so before.
    """

    value: ext.Operand[Any]
    token: ext.Operand[TokenType]
    hook: ir.IntegerAttr
    next_token: ext.Result[TokenType] = ext.result(default_factory=_new_token)

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["value", "token"], ["token"]) or _find_index_problem(op, "hook"))


class FinalCallbacksOp(Bwd.Operation, name="final_callbacks", traits=[Effects]):
    """The callbacks that were queued on the engine, after all else."""

    token: ext.Operand[TokenType]
    next_token: ext.Result[TokenType] = ext.result(default_factory=_new_token)

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["token"], ["token"]))


class CollectiveOp(Bwd.Operation, name="collective", traits=[Effects]):
    """The result that the processes of `group`, `size` of them (0 where it does not matter), make together of what each
    has: of a `kind` of ``COLLECTIVES``, with a `reduction` where it reduces. It is there when the op is over."""

    value: ext.Operand[Any]
    kind: ir.StringAttr
    reduction: ir.StringAttr
    size: ir.IntegerAttr
    group: ir.StringAttr
    result: ext.Result[Any]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["value"], ["value"]) or _find_collective_problem(op))


# As of `SaveOp.name` below: every op has a result.
del CollectiveOp.result


class StartCollectiveOp(Bwd.Operation, name="start_collective", traits=[Effects]):
    """Starts a collective on a value, or on each of a tuple. What it gives is in the making: only
    `bwd.wait_collective` takes it."""

    value: ext.Operand[Any]
    token: ext.Operand[TokenType]
    kind: ir.StringAttr
    reduction: ir.StringAttr
    size: ir.IntegerAttr
    group: ir.StringAttr
    started: ext.Result[Any]
    next_token: ext.Result[TokenType] = ext.result(default_factory=_new_token)

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(
            op,
            _find_shape_problem(op, ["value", "token"], ["value", "token"])
            or _find_collective_problem(op)
            or _find_reader(op),
        )


class WaitCollectiveOp(Bwd.Operation, name="wait_collective", traits=[FreshResults]):
    """The result of a started collective, once it is there."""

    started: ext.Operand[_Same]
    value: ext.Result[_Same]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["value"], ["value"]) or _find_type_change(op))


class SaveOp(Bwd.Operation, name="save", traits=[Effects]):
    """Marks a residual: the forward keeps the value for the backward, under the name in ``attributes["name"]``."""

    value: ext.Operand[Any]
    name: ir.StringAttr

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["value"], []) or _find_name_problem(op))


# A field named `name` would hide what every op has under that name: the op's own, here "bwd.save".
del SaveOp.name


class RecomputeBarrierOp(Bwd.Operation, name="recompute_barrier", traits=[FreshResults]):
    """The same value again, which CSE does not know to be the same: what is computed from it stays a recomputation."""

    value: ext.Operand[_Same]
    fresh: ext.Result[_Same]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["value"], ["value"]) or _find_type_change(op))


# The ops below are of tensors, and stand for what a kernel of ours computes until it takes their place.


class AttentionOp(Bwd.Operation, name="attention", traits=[ext.Pure]):
    """Attention of queries ``B x H x L x D`` and keys and values ``B x H / repeats x S x D``, with the log-sum-exps of
    the scores, ``B x H x L``. Scores are times `scale`; with `causal` a row has those of the columns up to its own
    number. `mask` is added to them, and is of a shape that is broadcast to ``B x H x L x S``; of no axes it is none."""

    query: ext.Operand[Any]
    key: ext.Operand[Any]
    value: ext.Operand[Any]
    mask: ext.Operand[Any]
    causal: ir.IntegerAttr
    scale: ir.FloatAttr
    output: ext.Result[Any]
    logsumexp: ext.Result[Any]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        operands, results = ["value"] * 4, ["value"] * 2
        return _report(
            op,
            _find_shape_problem(op, operands, results)
            or _find_attention_problem(op, list(op.operands), [op.operands[0], None], op.results[1]),
        )


class AttentionBackwardOp(Bwd.Operation, name="attention_backward", traits=[ext.Pure]):
    """The gradients of queries, keys and values; `gradient` is that of `output`."""

    gradient: ext.Operand[Any]
    query: ext.Operand[Any]
    key: ext.Operand[Any]
    value: ext.Operand[Any]
    output: ext.Operand[Any]
    logsumexp: ext.Operand[Any]
    mask: ext.Operand[Any]
    causal: ir.IntegerAttr
    scale: ir.FloatAttr
    query_gradient: ext.Result[Any]
    key_gradient: ext.Result[Any]
    value_gradient: ext.Result[Any]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _report(op, _find_shape_problem(op, ["value"] * 7, ["value"] * 3) or _find_gradient_problem(op))


class DroppedAttentionOp(AttentionOp, name="dropped_attention"):
    """Attention that leaves out weights with the chance `dropout`, those whose numbers are less in
    ``retrograd.uniform(seed, stream, B x H x L x S)``, and divides the others by one less the chance. Log-sum-exps are
    of all scores."""

    seed: ext.Operand[Any]
    dropout: ir.FloatAttr
    stream: ir.IntegerAttr

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        operands, results = ["value"] * 5, ["value"] * 2
        return _report(
            op,
            _find_shape_problem(op, operands, results)
            or _find_attention_problem(op, list(op.operands)[:4], [op.operands[0], None], op.results[1])
            or _find_dropout_problem(op),
        )


class DroppedAttentionBackwardOp(AttentionBackwardOp, name="dropped_attention_backward"):
    """The gradients of `dropped_attention`, as `attention_backward` has them."""

    seed: ext.Operand[Any]
    dropout: ir.FloatAttr
    stream: ir.IntegerAttr

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        problem = _find_shape_problem(op, ["value"] * 8, ["value"] * 3) or _find_gradient_problem(op)
        return _report(op, problem or _find_dropout_problem(op))


class DroppedAttentionBackwardWithMaskOp(DroppedAttentionBackwardOp, name="dropped_attention_backward_with_mask"):
    """The gradients of `dropped_attention` and that of its scores, ``B x H x L x S`` of the mask's type, whose sums are
    the mask's."""

    score_gradient: ext.Result[Any]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        problem = _find_shape_problem(op, ["value"] * 8, ["value"] * 4) or _find_gradient_problem(op)
        return _report(op, problem or _find_score_problem(op) or _find_dropout_problem(op))


class ConvolutionOp(Bwd.Operation, name="convolution", traits=[ext.Pure]):
    """A convolution of images ``N x H x W x G C`` with filters ``G O x R x S x C``, for G groups of channels: results
    ``N x P x Q x G O``. A window has a `stride`, a `padding` and a `dilation` for each axis."""

    images: ext.Operand[Any]
    filters: ext.Operand[Any]
    stride: ir.ArrayAttr
    padding: ir.ArrayAttr
    dilation: ir.ArrayAttr
    output: ext.Result[Any]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _verify_convolution(op, lambda images, filters, results: (images, filters, results))


class ConvolutionInputGradientOp(Bwd.Operation, name="convolution_input_gradient", traits=[ext.Pure]):
    """The gradient of the images, `gradient` being that of a convolution's results; or what a transposed convolution
    gives. Images may end behind the last window."""

    gradient: ext.Operand[Any]
    filters: ext.Operand[Any]
    stride: ir.ArrayAttr
    padding: ir.ArrayAttr
    dilation: ir.ArrayAttr
    images: ext.Result[Any]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _verify_convolution(op, lambda gradient, filters, images: (images, filters, gradient))


class ConvolutionFilterGradientOp(Bwd.Operation, name="convolution_filter_gradient", traits=[ext.Pure]):
    """The gradient of the filters, `gradient` being that of a convolution's results."""

    gradient: ext.Operand[Any]
    images: ext.Operand[Any]
    stride: ir.ArrayAttr
    padding: ir.ArrayAttr
    dilation: ir.ArrayAttr
    filters: ext.Result[Any]

    @staticmethod
    def verify_invariants(op: Any) -> bool:
        """Check operands, results and attributes."""
        return _verify_convolution(op, lambda gradient, images, filters: (images, filters, gradient))


def _report(op: Any, problem: str | None) -> bool:
    if problem is not None:
        op.location.emit_error(f"'{op.operation.name}' op {problem}")
    return problem is None


def _find_shape_problem(op: Any, operands: Sequence[str], results: Sequence[str]) -> str | None:
    """Says what is wrong with the number of operands and results, or with where a "token" and where a "value"
    stands."""
    for what, values, expected in (("operand", op.operands, operands), ("result", op.results, results)):
        if len(values) != len(expected):
            listed = ", ".join(expected) if expected else "none"
            return f"expects {_count(len(expected), what)} ({listed}), found {len(values)}"
        for index, (value, sort) in enumerate(zip(values, expected, strict=True)):
            if sort == "token" and not is_token(value):
                return f"expects a {TOKEN} as {what} {index}, found {value.type}"
            if sort == "value" and is_token(value):
                return f"expects a value as {what} {index}, found {TOKEN}: the token comes last"
    return None


def _find_kind_problem(op: Any) -> str | None:
    kind = _attribute(op, "kind")
    if isinstance(kind, ir.StringAttr) and kind.value in HOOK_KINDS:
        return None
    return f"expects attribute 'kind' to be one of {', '.join(HOOK_KINDS)}, found {show_attribute(kind)}"


def _find_index_problem(op: Any, name: str) -> str | None:
    index = _attribute(op, name)
    if isinstance(index, ir.IntegerAttr) and str(index.type) == "i64" and index.value >= 0:
        return None
    return f"expects attribute '{name}' to be an i64 of 0 or more, found {show_attribute(index)}"


def _find_collective_problem(op: Any) -> str | None:
    kind, reduction, group = (_attribute(op, name) for name in ("kind", "reduction", "group"))
    if not isinstance(kind, ir.StringAttr) or kind.value not in COLLECTIVES:
        return f"expects attribute 'kind' to be one of {', '.join(COLLECTIVES)}, found {show_attribute(kind)}"
    if not isinstance(reduction, ir.StringAttr) or bool(reduction.value) == (kind.value == ALL_GATHER):
        wanted = "an empty string" if kind.value == ALL_GATHER else "a string that is not empty"
        return f"expects attribute 'reduction' to be {wanted}, found {show_attribute(reduction)}"
    if not isinstance(group, ir.StringAttr) or not group.value:
        return f"expects attribute 'group' to be a string that is not empty, found {show_attribute(group)}"
    return _find_index_problem(op, "size")


def _find_reader(op: Any) -> str | None:
    """Says who looks at what is in the making."""
    pending = [op.results[0]]
    while pending:
        for use in pending.pop().uses:
            user = use.owner.operation
            if user.name == "torch.prim.TupleUnpack":
                pending += user.results
            elif user.name != "bwd.wait_collective":
                return f"gives what {user.name} takes, before it is there: wait for it"
    return None


def _find_name_problem(op: Any) -> str | None:
    name = _attribute(op, "name")
    if isinstance(name, ir.StringAttr) and name.value:
        return None
    return f"expects attribute 'name' to be a string that is not empty, found {show_attribute(name)}"


def _find_attention_problem(
    op: Any, attended: Sequence[ir.Value], results: Sequence[ir.Value | None], logsumexp: ir.Value
) -> str | None:
    """Says what is wrong with attention to ``attended``, a query, key, value and mask; results are of the types of
    ``results``."""
    types = [value.type for value in [*attended, logsumexp]]
    if not all(isinstance(type_, ir.RankedTensorType) and type_.has_static_shape for type_ in types):
        return "expects tensors of fixed sizes"
    query, key, value, mask, sums = (list(type_.shape) for type_ in types)
    if len(query) != 4 or len(key) != 4 or value != key or query[::3] != key[::3] or query[1] % key[1]:
        shown = ", ".join(str(type_) for type_ in types[:3])
        return f"expects a query B x H x L x D, a key and a value B x H / repeats x S x D, found {shown}"
    scores = [*query[:3], key[2]]
    if len(mask) > 4 or any(own not in (1, size) for own, size in zip(mask[::-1], scores[::-1], strict=False)):
        return f"expects a mask for {' x '.join(map(str, scores))} scores, or one of no axes, found {types[3]}"
    if sums != query[:3] or str(types[4].element_type) != "f32":
        return f"expects log-sum-exps {' x '.join(map(str, query[:3]))} of f32, found {types[4]}"
    for number, (taken, given) in enumerate(zip(results, op.results, strict=False)):
        if taken is not None and taken.type != given.type:
            return f"expects result {number} of type {taken.type}, found {given.type}"
    causal = _attribute(op, "causal")
    if not isinstance(causal, ir.BoolAttr):
        return f"expects attribute 'causal' to be a bool, found {show_attribute(causal)}"
    scale = _attribute(op, "scale")
    if not isinstance(scale, ir.FloatAttr) or str(scale.type) != "f32":
        return f"expects attribute 'scale' to be an f32, found {show_attribute(scale)}"
    if not scale.value > 0:
        return f"expects attribute 'scale' to be positive, found {scale}"
    return None


def _find_gradient_problem(op: Any) -> str | None:
    """Says what is wrong with the gradients of attention."""
    gradient, query, key, value, output, logsumexp, mask = list(op.operands)[:7]
    problem = _find_attention_problem(op, [query, key, value, mask], [query, key, value], logsumexp)
    for number, other in ((0, gradient), (4, output)):
        if problem is None and other.type != query.type:
            problem = f"expects operand {number} of the query's type {query.type}, found {other.type}"
    return problem


def _find_score_problem(op: Any) -> str | None:
    """Says what is wrong with the gradient of scores."""
    _, query, key, _, _, _, mask = (ir.RankedTensorType(value.type) for value in list(op.operands)[:7])
    if not mask.rank:
        return "expects a mask, found none"
    wanted = ir.RankedTensorType.get([*query.shape[:3], key.shape[2]], mask.element_type, loc=op.location)
    given = op.results[3].type
    return None if given == wanted else f"expects result 3 of type {wanted}, found {given}"


def _find_dropout_problem(op: Any) -> str | None:
    """Says what is wrong with the seed, which is the last operand, and with what is dropped."""
    *_, seed = op.operands
    if str(seed.type) != "tensor<2xi64>":
        return f"expects a seed tensor<2xi64>, found {seed.type}"
    dropout, stream = _attribute(op, "dropout"), _attribute(op, "stream")
    if not isinstance(dropout, ir.FloatAttr) or str(dropout.type) != "f32" or not 0 < dropout.value < 1:
        return f"expects attribute 'dropout' to be an f32 between 0 and 1, found {show_attribute(dropout)}"
    if not isinstance(stream, ir.IntegerAttr) or str(stream.type) != "i64" or stream.value < 0:
        return f"expects attribute 'stream' to be an i64 of 0 or more, found {show_attribute(stream)}"
    return None


def _verify_convolution(op: Any, order: Callable[..., tuple[ir.Value, ir.Value, ir.Value]]) -> bool:
    """Whether operands and results are a convolution's; ``order`` gives images, filters and results of these."""
    problem = _find_shape_problem(op, ["value"] * 2, ["value"])
    if problem is None:
        problem = _find_convolution_problem(op, [value.type for value in order(*op.operands, *op.results)])
    return _report(op, problem)


def _find_convolution_problem(op: Any, types: Sequence[Any]) -> str | None:
    """Says what is wrong with a convolution of images, filters and results of these types."""
    if not all(isinstance(type_, ir.RankedTensorType) and type_.has_static_shape for type_ in types):
        return "expects tensors of fixed sizes"
    images, filters, results = (list(type_.shape) for type_ in types)
    shown = ", ".join(str(type_) for type_ in types)
    if not len(images) == len(filters) == len(results) == 4 or len({str(type_.element_type) for type_ in types}) > 1:
        return f"expects images N x H x W x G C, filters G O x R x S x C, results N x P x Q x G O, found {shown}"
    groups, rest = divmod(images[3], filters[3])
    if images[0] != results[0] or filters[0] != results[3] or rest or filters[0] % groups:
        return f"expects images N x H x W x G C, filters G O x R x S x C, results N x P x Q x G O, found {shown}"
    window: list[list[int]] = []
    for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
        attribute = _attribute(op, name)
        numbers = list(attribute) if isinstance(attribute, ir.ArrayAttr) else []
        known = [ir.IntegerAttr(number).value for number in numbers if str(getattr(number, "type", "")) == "i64"]
        if len(numbers) != 2 or len(known) != 2 or min(known) < least:
            found = show_attribute(attribute)
            return f"expects attribute '{name}' to be two i64 of {least} or more in an array, found {found}"
        window.append(known)
    for axis, (stride, padding, dilation) in enumerate(zip(*window, strict=True)):
        most = count_windows(images[1 + axis], filters[1 + axis], stride, padding, dilation)
        if results[1 + axis] > most:
            return f"expects {most} windows along axis {axis} at the most, found {results[1 + axis]}"
    return None


def _find_type_change(op: Any) -> str | None:
    taken, given = op.operands[0].type, op.results[0].type
    return None if taken == given else f"expects a result of its operand's type {taken}, found {given}"


def _attribute(op: Any, name: str) -> Any:
    return op.attributes.get(name, None)


def show_attribute(attribute: ir.Attribute | None) -> str:
    """An attribute as an error message shows it."""
    return "none" if attribute is None else str(attribute)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def is_token(value: ir.Value) -> bool:
    """Whether a value is a ``!bwd.token``."""
    return str(value.type) == TOKEN
