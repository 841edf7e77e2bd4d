# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds which values are written to memory when the ops of a function run: an approximation of the kernels that IREE
forms.

Views are free, but for those that ``kernel_inputs`` says are copies; one that is returned is written by the kernel that
makes what it looks at, unless that is more. Pointwise ops run in the kernel of their users, where these have one in
common (``kernel_roots``): what they give takes no memory. One that takes no tensor (a fill, a range) is repeated in
each. A reduction over the outermost axis is split (see ``op_parts``): all its parts are written first. A matrix product
gives a plain result; one that is large (see ``repays_packing``) reads packed copies of its operands, each written by a
kernel of its own. Pointwise ops that alone use a product run in its kernel, on packed copies of their other operands if
its own are packed, unless these are products themselves; if they come later, all that they need runs before what else
stands behind the product. So it is with reductions. A product that is split (see ``find_parts``) reads its operands as
they are. Batches of products that are added up are in one place (see ``find_product_sums``). What is joined or padded
is written piece by piece. Where ops that take a product read much else, it runs in a kernel of its own right before
theirs (see ``find_isolated_products``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from retrograd.pipelines.analysis.kernels.kernel_inputs import KernelInputs, find_inputs
from retrograd.pipelines.analysis.kernels.kernel_roots import JOIN, PAD, KernelRoots, takes_producer
from retrograd.pipelines.analysis.kernels.kernel_steps import StepList, Steps, find_listed
from retrograd.pipelines.analysis.layout.cpu_products import PRODUCTS
from retrograd.pipelines.analysis.layout.product_kernels import find_isolated_products, find_product_sums
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import INDEX_OPERANDS, OpKind

# A product's kernel takes no more operands than this (IREE's ``kIreeMaxOperandCount``).
_MOST_OPERANDS = 16


def find_steps(
    graph: JointGraph,
    ops: tuple[int, ...],
    available: Collection[int],
    kept: Collection[int],
    taken: KernelInputs | None = None,
) -> Steps:
    """The kernels that run ``ops`` in this order on ``available`` values; ``kept`` ones are written to storage of the
    caller's. ``taken`` is what ``find_inputs`` says of these ops, where that is known."""
    return _Former(graph, taken or find_inputs(graph, ops, available), frozenset(available), frozenset(kept)).form()


class _Former:
    def __init__(self, graph: JointGraph, taken: KernelInputs, available: frozenset[int], kept: frozenset[int]) -> None:
        self.graph, self.available = graph, available
        self.work, self.sources, self.inputs, self.users = [*taken.work], taken.sources, taken.reads, taken.users
        # A view that is returned is written to its storage by the kernel that makes what it looks at; of what is at
        # hand, of several values or of a part of one, it is a copy.
        looks = {v: self.sources[v] for v in sorted(kept) if v not in available and self.sources[v] != (v,)}
        self.copied = [v for v, found in looks.items() if not (available.isdisjoint(found) and self.is_whole(v, found))]
        self.returned = kept
        self.kept = kept.union(*(found for v, found in looks.items() if v not in self.copied))
        self.steps = StepList(graph)
        # What is computed inside of its user's kernel, by which op; ops that ran before their turn.
        self.inside: dict[int, int] = {}
        self.done: set[int] = set()
        # By the op in whose kernel it runs, a product or reduction that waits for what else that takes.
        self.delayed: dict[int, tuple[Op, tuple[int, ...] | None]] = {}
        self.places = {number: place for place, number in enumerate(self.work)}
        self.kernels = KernelRoots(graph, taken, self.kept | available)
        self.roots = self.kernels.roots
        self.sums = find_product_sums(graph, self.work, self.inputs, self.users, self.kept | available)
        # By the op in whose kernel they would run, products that run right before that.
        self.isolated = find_isolated_products(graph, taken, self.kernels)
        self.done.update(product for products in self.isolated.values() for product in products)

    def is_whole(self, view: int, sources: tuple[int, ...]) -> bool:
        """Whether a view of ``sources`` has all the data of the one value that they are."""
        return len(sources) == 1 and self.graph.values[view].bytes == self.graph.values[sources[0]].bytes

    def only_user(self, value: int) -> int | None:
        """The op that alone reads ``value``, all of it, if nobody else keeps it."""
        users = self.users.get(value, ())
        is_whole = value not in self.graph.read_in_parts
        return users[0] if len(users) == 1 and is_whole and not self.is_held(value) else None

    def is_held(self, value: int) -> bool:
        return value in self.kept or value in self.available

    def is_fused(self, number: int) -> bool:
        """Whether an op runs in another one's kernel."""
        return self.roots[number] != number or self.kernels.is_repeated(number)

    def form(self) -> Steps:
        for place, number in enumerate(self.work):
            op = self.graph.ops[number]
            if number in self.done:
                continue
            for product in self.isolated.get(number, ()):
                self.add_isolated(self.graph.ops[product])
            if number in self.delayed:
                self.add_delayed(*self.delayed[number], op)
            elif op.name in PRODUCTS:
                self.add_product(place, op, self.flat(self.inputs[number]))
            elif self.is_fused(number):
                self.inside.update((r, number) for r in op.results if r not in self.available)
            elif op.name in (JOIN, PAD):
                self.add_pieces(op)
            else:
                self.add_kernel(op, place)
        for view in self.copied:
            self.steps.append(self.sources[view], ())
        return self.steps.finish()

    def flat(self, values: Iterable[int]) -> tuple[int, ...]:
        """``values``, and in place of those that are computed inside of the kernel what that reads."""
        seen: dict[int, None] = {}
        pending = list(values)[::-1]
        while pending:
            value = pending.pop()
            if value not in seen and value in self.inside:
                pending.extend(reversed(self.inputs[self.inside[value]]))
            seen[value] = None
        return tuple(v for v in seen if v not in self.inside)

    def add_kernel(self, op: Op, place: int | None = None) -> None:
        """An op, with the pointwise ops in front of it that run in its kernel; first all parts of its result, if it is
        split."""
        reads = self.flat(self.inputs[op.id])
        if op.name in INDEX_OPERANDS and op.parts > 1:
            reads = (*reads, self.steps.add_coordinates(op, self.sources))
        elif op.parts > 1:
            reads = (self.add_parts(op, reads),)
        if op.name in INDEX_OPERANDS and not self.kept.isdisjoint(op.results) and not self.is_placed(op):
            # It writes into a tensor that is filled before, not into storage of the caller's.
            filled = self.steps.copy(op.results[0])
            self.steps.append(reads, (filled,))
            reads = (filled,)
        if place is not None and op.kind is OpKind.REDUCTION:
            self.add_reduction(place, op, reads)
        else:
            self.add(reads, op.results)

    def add_pieces(self, op: Op) -> None:
        """Add a kernel for each piece that is joined, or for a padded tensor and its filling; each waits for the one
        before."""
        reads = self.inputs[op.id]
        if op.name == JOIN:
            pieces = find_listed(self.graph, op.operands[0]) or op.operands
            parts = [part for piece in pieces if (part := self.flat(self.sources[piece]))]
        else:
            parts = [(), self.flat(reads)]
        self.add(parts[0] if parts else (), op.results)
        for part in parts[1:]:
            self.steps.append((*part, *op.results), op.results)

    def is_placed(self, op: Op) -> bool:
        """Whether a scatter that is returned writes right into its storage, filled before (``bwd-export-results``)."""
        into, result = op.operands[0], op.results[0]
        return self.graph.is_fill(into) and result in self.returned and not self.users.get(result)

    def add_reduction(self, place: int, op: Op, reads: tuple[int, ...]) -> None:
        """A kernel that adds up, with the pointwise ops behind it if these take what comes later and give as much."""
        kernel = self.find_later_kernel(place, op) if len(op.results) == 1 else None
        if kernel is not None and self.graph.count_bytes(kernel) == self.graph.count_bytes(op.id):
            self.delay(place, op, kernel, reads)
        else:
            self.add(reads, op.results)

    def add_parts(self, op: Op, reads: tuple[int, ...]) -> int:
        """The partial sums of a product or reduction that is split."""
        parts = self.steps.copy(op.results[0], op.parts)
        self.steps.append(reads, (parts,))
        return parts

    def add_product(self, place: int, op: Op, reads: tuple[int, ...]) -> None:
        """A matrix product, with the pointwise ops behind it that nothing else feeds and whose other operands are
        there."""
        if op.parts > 1:
            self.add_reduction(place, op, (self.add_parts(op, reads),))
            return
        if op.id not in self.sums.terms and (kernel := self.find_later_kernel(place, op)) is not None:
            self.delay(place, op, kernel)
            return
        take = self.pack if op.packed else self.write
        packed = [take(v) for v in reads]
        results = op.results
        if op.id in self.sums.into:
            packed, results = self.accumulate(op, packed)
        while (user := self.only_user(results[0])) is not None and self.graph.ops[user].kind is OpKind.POINTWISE:
            ahead = {user}
            others = [self.find_reads(v, place, ahead) for v in self.inputs[user] if v != results[0]]
            found = list(dict.fromkeys(v for other in others if other is not None for v in other))
            if None in others or len(packed) + len(found) >= _MOST_OPERANDS or any(map(self.is_product, found)):
                break
            packed += self.take_others(op, found)
            self.done |= ahead
            results = self.graph.ops[user].results
        self.add(tuple(dict.fromkeys(packed)), results)

    def accumulate(self, op: Op, reads: list[int]) -> tuple[list[int], tuple[int, ...]]:
        """Add up into another value's place: returns what a product reads that starts at that value, and the sum."""
        into, added = self.sums.into[op.id]
        self.done.add(added)
        (result,) = self.graph.ops[added].results
        if not self.is_held(result):
            self.steps.replace(result, into)
        return [*reads, into], (result,)

    def delay(self, place: int, op: Op, kernel: int, reads: tuple[int, ...] | None = None) -> None:
        """Have ``op`` run with the op ``kernel``, at ``place``, where it stands: behind all that ``kernel`` needs,
        which IREE moves there, and before what else stood in between. ``reads`` are not to be packed."""
        self.delayed[kernel] = (op, reads)
        place, end = place + 1, self.places[kernel] + 1
        wanted, needed = set[int](), {kernel}
        for number in reversed(self.work[place:end]):
            if number in needed or not wanted.isdisjoint(self.graph.ops[number].results):
                needed.add(number)
                wanted.update(self.inputs[number])
        self.work[place:end] = sorted(self.work[place:end], key=lambda number: number not in needed)
        self.places.update((number, at) for at, number in enumerate(self.work[place:end], place))

    def take_others(self, op: Op, values: Iterable[int]) -> list[int]:
        """Return what the kernel of a product reads for ``values``, which the ops behind it take: if its operands are
        packed, packed copies of those that are no smaller; a mask has an eighth of the bytes, what is broadcast
        less."""
        take = self.pack if op.packed else self.write
        whole = self.graph.values[op.results[0]].bytes // 8
        return [take(v) if self.graph.values[v].bytes >= whole else v for v in values]

    def find_later_kernel(self, place: int, op: Op) -> int | None:
        """The op, in whose kernel of pointwise ops the product or reduction at ``place`` runs, though that takes what
        comes later.

        Where products are added up, the first of them runs with the additions, unless it reads packed operands.
        """
        users = self.users.get(op.results[0], ())
        roots = {self.roots[u] if takes_producer(self.graph.ops[u], op) else u for u in users}
        if len(roots) != 1 or self.is_held(op.results[0]) or op.results[0] in self.graph.read_in_parts:
            return None
        (kernel,) = roots
        if kernel in self.delayed or self.graph.ops[kernel].kind is not OpKind.POINTWISE:
            return None
        others = self.kernels.find_reads(kernel) - {op.results[0]}
        is_packed = op.packed and op.name in PRODUCTS and op.parts == 1
        if len(others) + len(self.inputs[op.id]) >= _MOST_OPERANDS or (is_packed and any(map(self.is_product, others))):
            return None
        return kernel if any(self.is_made_after(v, place) for v in others) else None

    def is_made_after(self, value: int, place: int) -> bool:
        producer = self.graph.values[value].producer
        return producer is not None and value not in self.available and self.places[producer] > place

    def add_delayed(self, op: Op, reads: Iterable[int] | None, kernel: Op) -> None:
        """A product or a reduction in the kernel of pointwise ops that takes it."""
        others = [v for v in self.flat(self.inputs[kernel.id]) if v not in op.results]
        if reads is None:
            take = self.pack if op.packed else self.write
            reads = [take(v) for v in self.flat(self.inputs[op.id])]
            others = self.take_others(op, others)
        self.add(tuple(dict.fromkeys((*reads, *others))), kernel.results)

    def add_isolated(self, op: Op) -> None:
        """A product on packed operands, in a kernel of its own."""
        self.add(tuple(dict.fromkeys(self.pack(v) for v in self.flat(self.inputs[op.id]))), op.results)

    def is_product(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        return producer is not None and self.graph.ops[producer].name in PRODUCTS and value not in self.available

    def find_reads(self, value: int, place: int, ahead: set[int]) -> tuple[int, ...] | None:
        """Find the values that a kernel at ``place`` reads for ``value``; adds to ``ahead`` the ops that it runs for it
        before their turn. ``None`` if it is made of something that comes later."""
        producer = self.graph.values[value].producer
        if value in self.available or producer is None or self.places[producer] < place:
            return self.flat((value,))
        if self.graph.ops[producer].kind is not OpKind.POINTWISE or self.only_user(value) is None:
            return None
        ahead.add(producer)
        parts = [self.find_reads(v, place, ahead) for v in self.inputs[producer]]
        return None if None in parts else tuple(v for part in parts if part is not None for v in part)

    def add(self, reads: tuple[int, ...], results: tuple[int, ...]) -> None:
        for result in results:
            if result not in self.kept and result not in self.available:
                self.steps.bytes[result] = self.graph.values[result].bytes
        self.steps.append(reads, tuple(r for r in results if r not in self.available))

    def write(self, value: int) -> int:
        """``value``, in memory, where packing and products take it from."""
        if value in self.inside:
            self.add_kernel(self.graph.ops[self.inside.pop(value)])
        return value

    def pack(self, value: int) -> int:
        packed = self.steps.copy(self.write(value))
        self.steps.append((value,), (packed,))
        return packed
