# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-export-results``: each function gets a twin that writes its results to storage that the caller gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Literal, TypeAlias

from retrograd.contract.attributes import BWD_DONATED, BWD_JOINED, BWD_NAME, BWD_ROLE
from retrograd.contract.plan import find_given_up
from retrograd.contract.roles import BACKWARD, FORWARD, INTO, TANGENT, is_own_residual
from retrograd.dialects import ir
from retrograd.pipelines.analysis.partition.read_graph import attribute_dicts, function_type, set_function_type
from retrograd.pipelines.infra.functions import find_function, functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.stages.stage_plan import PLAN_ATTRIBUTE, read_island_plans, read_plan
from retrograd.pipelines.transforms.helpers.barriers import hide_zero, read_zero
from retrograd.pipelines.transforms.helpers.fills import SCATTER, TENSOR, create_fill, read_number
from retrograd.pipelines.transforms.helpers.folding import create_generic
from retrograd.pipelines.transforms.helpers.generics import ITERATORS, MAPS, SEGMENTS, iterators_of, map_of_loops
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.views import view_root

# An op of IREE's, unknown here: modules that hold it are read with unregistered dialects allowed.
ALIAS = "hal.tensor.alias"
Results: TypeAlias = Literal["joined", "several", "one", "none"]
_JOINING = ("tensor.concat", "tensor.insert_slice")


class BwdExportResults(ModulePass):
    """``@f(a) -> r`` stays, for callers that want results (``iree-run-module``); its twin is ``@f_into(a, storage)``.

    In the twin each result is aliased to its storage where it is computed, and later ops read it from there. Aliased
    only where it is returned (as ``iree.abi.output`` does), a result that the function itself uses is computed in
    scratch memory first and then copied: twice the residuals of a forward. What is scattered into one number all over
    is aliased before, where it is filled with that.

    Whoever calls the twin of the backward may give up what is its own, residuals and tangents, so that scratch memory
    and results lie there after their last use; as a plan does with what it frees after a stage, for scratch memory and
    one result of that size: another would keep more than itself. :data:`BWD_DONATED` marks these, for
    ``bwd-pack-scratch``: residuals that the whole forward of the module gives, as such that may lie one behind
    another. Who captures a step as a CUDA graph has the residuals of the graph's forward, and keeps them.

    What is put together from pieces IREE writes to the storage, and gives a copy of it in memory of its own if the
    function reads it too. With ``writes_joined`` a kernel takes the pieces to the storage, by adding a zero that IREE
    does not know for one.

    Where IREE is only asked for scratch memory, the twins alone take it half as long; to compile them alone, which does
    for what is never written to a file, takes an eighth less.
    """

    description = "Add to each function a twin whose results go to storage that the caller gives"

    twins_alone: bool = field(
        default=False,
        metadata={"help": "leave out the functions themselves, for callers that give storage, as the runtime does"},
    )

    donates: bool = field(
        default=False,
        metadata={"help": "mark the arguments of twins that their callers give up: residuals, and what plans free"},
    )

    keeps_residuals: bool = field(
        default=False, metadata={"help": "with donates, mark alone what stages give one another"}
    )

    writes_joined: bool = field(
        default=False, metadata={"help": "have a kernel write results that are put together from pieces"}
    )

    def apply(self, module: ir.Operation) -> None:
        donates = self.donates
        if BWD_JOINED in module.attributes:
            donates = False
            del module.attributes[BWD_JOINED]
        given = find_freed(module, from_stages=True) if donates else {}
        freed = find_freed(module, from_stages=False) if donates and not self.keeps_residuals else {}
        results: Results = "joined" if is_whole(module) else "several"
        for func in functions(module):
            kind = function_type(func)
            if not all(isinstance(t, ir.RankedTensorType) for t in kind.results):
                raise PassFailure(
                    func,
                    f"bwd-export-results: a result of {kind} is no ranked tensor",
                    "run it after torch-backend-to-linalg-on-tensors-backend-pipeline",
                )
            twin = add_twin(func)
            if self.writes_joined:
                write_joined(twin)
            alias_results(twin)
            name = ir.StringAttr(func.attributes["sym_name"]).value
            if name in given:
                numbers = given[name] | (freed.get(name, frozenset()) & find_own(twin))
                mark_donated(twin, numbers, results="none" if self.keeps_residuals else "one")
            elif donates and name == BACKWARD and not self.keeps_residuals:
                mark_donated(twin, results=results)
            if self.twins_alone:
                func.erase()


def is_whole(module: ir.Operation) -> bool:
    """Whether one function gives the residuals that another takes, which may then lie as the latter likes: of several
    outputs a loss may leave out some, and another backward then takes them."""
    has_plans = PLAN_ATTRIBUTE in module.attributes or bool(read_island_plans(module))
    backward = find_function(module, BACKWARD)
    if has_plans or backward is None or find_function(module, FORWARD) is None:
        return False
    return sum(own.get(BWD_ROLE) == TANGENT for own in attribute_dicts(backward, "arg_attrs")) <= 1


def add_twin(func: ir.Operation) -> ir.Operation:
    """Clone ``func`` behind itself with one more argument per result, the storage of that result."""
    kind = function_type(func)
    storage = ir.Type.parse("!hal.buffer_view")
    twin = func.clone(ip=ir.InsertionPoint.after(func)).operation
    twin.attributes["sym_name"] = ir.StringAttr.get(ir.StringAttr(func.attributes["sym_name"]).value + INTO)
    set_function_type(twin, [*kind.inputs, *[storage] * len(kind.results)], kind.results)
    for _ in kind.results:
        twin.regions[0].blocks[0].add_argument(storage, func.location)
    if "arg_attrs" in func.attributes:
        empty = [ir.DictAttr.get({})] * len(kind.results)
        twin.attributes["arg_attrs"] = ir.ArrayAttr.get([*func.attributes["arg_attrs"], *empty])
    return twin


def write_joined(twin: ir.Operation) -> None:
    """Have a kernel write each result of real numbers that is put together from pieces and read besides."""
    block = twin.regions[0].blocks[0]
    terminator = list(block.operations)[-1].operation
    for value in dict.fromkeys(terminator.operands):
        type_ = ir.RankedTensorType(value.type)
        root = view_root(value)
        is_joined = isinstance(root, ir.OpResult) and root.owner.name in _JOINING
        if is_joined and isinstance(type_.element_type, ir.FloatType) and len(list(value.uses)) > 1:
            _add_nothing(value, type_)


def _add_nothing(value: ir.OpResult, type_: ir.RankedTensorType) -> None:
    """Have all that uses ``value`` take its sum with -0, which is each number as it is."""
    uses = [(use.owner, use.operand_number) for use in value.uses]
    make = Maker.after(value.owner)
    element = type_.element_type
    zero = hide_zero(element, make)
    whole, scalar = map_of_loops(range(type_.rank), type_.rank), map_of_loops((), type_.rank)
    attributes = {
        MAPS: ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in (whole, scalar, whole)]),
        ITERATORS: iterators_of(type_.rank),
        SEGMENTS: ir.DenseI32ArrayAttr.get([2, 1]),
    }
    operands = [value, zero, make.empty(type_, make.open_sizes(value))]
    op, body = create_generic([type_], operands, attributes, [element, zero.type, element], make)
    inside = Maker(ir.InsertionPoint(body), make.location)
    number, nothing, _ = body.arguments
    whole_number = inside.value("arith.addf", [number, read_zero(nothing, element, inside)], element)
    inside.op("linalg.yield", [whole_number])
    for owner, number in uses:
        owner.operands[number] = op.result


def alias_results(twin: ir.Operation) -> None:
    """Alias each returned value to the storage argument that is its own, from where it is computed."""
    block = twin.regions[0].blocks[0]
    terminator = list(block.operations)[-1].operation
    storages = list(block.arguments)[-len(terminator.operands) :] if len(terminator.operands) else []
    computed = _computed_values(block)
    for i, storage in enumerate(storages):
        value = terminator.operands[i]
        if value in computed and place_scatter(value, storage):
            continue
        if isinstance(value, ir.OpResult) and value.owner.name != ALIAS and value not in computed:
            # A constant: IREE takes it for one value wherever it stands, its storage included, and would write an
            # update of it (an insertion into zeros) over the result. Only what is returned is put there.
            terminator.operands[i], _ = _alias(value, storage, ir.InsertionPoint(terminator))
            continue
        at_start = not isinstance(value, ir.OpResult)
        ip = ir.InsertionPoint.at_block_begin(block) if at_start else ir.InsertionPoint.after(value.owner)
        alias, sizes = _alias(value, storage, ip)
        if isinstance(value, ir.OpResult) and value.owner.name != ALIAS:
            value.replace_all_uses_except(alias, [made.owner.operation for made in (alias, *sizes)])
        else:
            # An argument, or a value returned before: a copy of its own.
            terminator.operands[i] = alias


def find_freed(module: ir.Operation, *, from_stages: bool) -> dict[str, frozenset[int]]:
    """The arguments of the functions that the plans of a module run, by number, that are freed after them; those alone
    that other functions gave, ``from_stages``."""
    plans = [*read_island_plans(module).values()]
    if PLAN_ATTRIBUTE in module.attributes:
        plans.append(read_plan(module))
    given_up = (find_given_up(plan, from_stages=from_stages) for plan in plans)
    return {name: numbers for found in given_up for name, numbers in found.items()}


def mark_donated(twin: ir.Operation, numbers: Collection[int] | None = None, *, results: Results) -> None:
    """Mark the arguments of these numbers, with how many results may lie there; without numbers all residuals that are
    no output of the forward, and the tangents, which are never joined."""
    arguments = twin.regions[0].blocks[0].arguments
    given = (
        [*twin.attributes["arg_attrs"]] if "arg_attrs" in twin.attributes else [ir.DictAttr.get({})] * len(arguments)
    )
    marked = []
    for number, (attributes, own) in enumerate(zip(given, attribute_dicts(twin, "arg_attrs"), strict=True)):
        if _is_own(own) if numbers is None else number in numbers:
            is_given = results == "joined" and own.get(BWD_ROLE) == TANGENT
            more = {BWD_DONATED: ir.StringAttr.get("several" if is_given else results)}
            attributes = ir.DictAttr.get({a.name: a.attr for a in ir.DictAttr(attributes)} | more)
        marked.append(attributes)
    twin.attributes["arg_attrs"] = ir.ArrayAttr.get(marked)


def find_own(twin: ir.Operation) -> set[int]:
    """The arguments, by number, that are a backward's alone, or have no role: what a stage gives another."""
    told = enumerate(attribute_dicts(twin, "arg_attrs"))
    return {number for number, own in told if _is_own(own) or not own.get(BWD_ROLE)}


def _is_own(attributes: Mapping[str, str]) -> bool:
    role = attributes.get(BWD_ROLE, "")
    return role == TANGENT or is_own_residual(role, attributes.get(BWD_NAME, ""))


def place_scatter(value: ir.Value, storage: ir.Value) -> bool:
    """Where ``value`` is a scatter into a tensor of one number all over, and only returned, have it scatter into
    ``storage``, filled with that number: as nothing else reads what it writes into, it writes in place. Whether it is
    one.

    Aliased where it is computed, it would be computed in scratch memory and then copied: twice the gradient of an
    embedding.
    """
    if not isinstance(value, ir.OpResult) or value.owner.name != SCATTER or len(list(value.uses)) > 1:
        return False
    scatter, type_ = value.owner, ir.RankedTensorType(value.type)
    number = read_number(scatter.operands[TENSOR])
    if number is None or not type_.has_static_shape:
        return False
    make = Maker.before(scatter)
    filled = create_fill(number, make.empty(type_), make, hidden=True)
    scatter.operands[TENSOR], _ = _alias(filled, storage, ir.InsertionPoint(scatter))
    return True


def _computed_values(block: ir.Block) -> set[ir.Value]:
    """The values of a block that depend on one of its arguments, in regions of their ops too."""
    computed = set(block.arguments)
    for view in block.operations:
        op = view.operation
        if any(operand in computed for operand in _operands(op)):
            computed.update(op.results)
    return computed


def _operands(op: ir.Operation) -> Iterator[ir.Value]:
    yield from op.operands
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operands(inner.operation)


def _alias(value: ir.Value, storage: ir.Value, ip: ir.InsertionPoint) -> tuple[ir.Value, list[ir.Value]]:
    """``value`` aliased to ``storage``, and the sizes of it that are read for that."""
    make = Maker(ip, value.owner.location if isinstance(value, ir.OpResult) else storage.location)
    sizes = make.open_sizes(value)
    segments = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, len(sizes), 1, 0])}
    return make.value(ALIAS, [value, *sizes, storage], value.type, segments), sizes
