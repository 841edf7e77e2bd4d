# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What was given up lies one behind another: what is larger than each of it lies there, after its last use."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.pipelines.analysis.kernels import arenas
from retrograd.pipelines.analysis.kernels.arenas import can_join, fill_arena, join
from retrograd.pipelines.analysis.kernels.hosted_buffers import Host, Place, place_largest
from retrograd.pipelines.analysis.kernels.scratch_layout import Slice
from retrograd.pipelines.stream.packings import plan_hosted
from retrograd.pipelines.stream.result_storage import JOINED, Scratch, Storage

KIB = 1024
HOSTS = st.builds(lambda size, last: Host(16 * KIB + 64 * size, -1, last), st.integers(0, 900), st.integers(0, 20))
RESULTS = st.builds(lambda first, size: Slice(first, 1 << 40, 64 * size), st.integers(0, 22), st.integers(1, 3000))


@settings(deadline=None)
@given(given_up=st.lists(HOSTS, max_size=12), written=st.lists(RESULTS, max_size=12))
def test_results_lie_where_all_is_dead_and_leave_little(given_up: list[Host], written: list[Slice]) -> None:
    hosts, results = dict(enumerate(given_up)), {100 + n: part for n, part in enumerate(written)}
    arena, offsets = fill_arena(results, hosts)
    assert [hosts[m].last for m in arena.members] == sorted(hosts[m].last for m in arena.members)
    assert [b - a for a, b in pairwise(arena.offsets)] == [hosts[m].size for m in arena.members]
    for number, offset in offsets.items():
        part = results[number]
        assert 0 <= offset <= offset + part.size <= arena.size
        for begin, (_, member) in zip(arena.offsets, arena.taken(hosts), strict=False):
            apart = offset + part.size <= begin or begin + member.size <= offset
            assert apart or member.last < part.first
    placed = sorted((offset, offset + results[n].size) for n, offset in offsets.items())
    assert all(one[1] <= other[0] for one, other in pairwise(placed))
    assert not arena.members or sum(results[n].size for n in offsets) >= 15 / 16 * arena.size


def test_the_dead_part_is_one_piece() -> None:
    hosts = {0: Host(16 * KIB, -1, 5), 1: Host(16 * KIB, -1, 2), 2: Host(16 * KIB, -1, 9)}
    assert join(hosts).members == (1, 0, 2)
    assert join(hosts, grows_down=True).members == (2, 0, 1)
    assert join({}).size == 0


def test_what_is_small_or_has_another_size_is_no_member() -> None:
    assert can_join(Host(16 * KIB, -1, 5))
    assert not can_join(Host(8 * KIB, -1, 5))
    assert not can_join(Host(16 * KIB + 4, -1, 5))


def test_no_arena_is_larger_than_its_offsets_may_be() -> None:
    half = arenas.MOST_BYTES // 2
    assert join({n: Host(half, -1, n) for n in range(3)}).members == (0, 1)


def _storages(sizes: list[int], results: list[tuple[int, int]], takes: str = JOINED) -> list[Storage]:
    """Storages given up that die one after another, from the last on, and results that are written at a step."""
    dead = [Storage(Host(s, -1, len(sizes) - n), None, None, (), n, True, takes) for n, s in enumerate(sizes)]
    return [*dead, *(Storage(Host(size, first, 1 << 40), None, None, (), n) for n, (first, size) in enumerate(results))]


def _scratch(storages: list[Storage], lives: list[tuple[int, int]]) -> Scratch:
    scratch = Scratch(None, storages=storages)
    scratch.__dict__["lives"] = dict(enumerate(lives))
    return scratch


def test_a_buffer_larger_than_each_residual_lies_in_two() -> None:
    slices, lives = [Slice(0, 9, 24 * KIB)], [(6, 9)]
    packing = plan_hosted(_scratch(_storages([16 * KIB] * 4, []), lives), slices, loose=False)
    assert packing.size == 0
    assert packing.choice.arenas[0].size == 64 * KIB
    alone = plan_hosted(_scratch(_storages([16 * KIB] * 4, [], "several"), lives), slices, loose=False)
    assert alone.size == 24 * KIB
    assert not alone.choice.arenas


def test_a_gradient_larger_than_each_residual_lies_in_those_that_it_fills() -> None:
    storages = _storages([16 * KIB] * 4, [(6, 32 * KIB)])
    packing = plan_hosted(_scratch(storages, []), [], loose=False)
    assert packing.size == -32 * KIB
    filled, rest = packing.choice.arenas
    assert packing.choice.placed == {4: Place(5, 0)}
    assert (filled.members, rest.members) == ((3, 2), (0, 1))


def test_arenas_that_save_next_to_nothing_are_left_alone() -> None:
    """One for 64 bytes of 1.6 MB: the forward had to know of it."""
    storages = _storages([16 * KIB] * 100, [])
    packing = plan_hosted(_scratch(storages, [(101, 102)]), [Slice(0, 9, 16 * KIB + 64)], loose=False)
    assert packing.size == 16 * KIB + 64
    assert not packing.choice.arenas


def test_a_small_result_is_copied_where_that_saves_what_it_takes() -> None:
    """A block of 64 KiB is there until the result is written; the memory that was given up is dead by then."""
    slices, lives = [Slice(0, 9, 64 * KIB)], [(0, 6)]
    storages = _storages([1024 * KIB], [(6, 32 * KIB)], "several")
    packing = plan_hosted(_scratch(storages, lives), slices, loose=False)
    assert packing.choice.placed == {1: Place(0, 0)}
    assert packing.choice.copied == {1}
    assert packing.size == 32 * KIB
    # It would be in memory twice when the function returns.
    without = plan_hosted(_scratch(storages, []), [], loose=False)
    assert not without.choice.placed
    # To copy more would take time.
    large = _storages([1024 * KIB], [(6, 80 * KIB)], "several")
    assert not plan_hosted(_scratch(large, [(0, 6)]), [Slice(0, 9, 128 * KIB)], loose=False).choice.copied


def test_the_largest_results_are_copied() -> None:
    hosts = {0: Host(64 * KIB, -1, 2), 3: Host(64 * KIB, -1, 4)}
    results = {n: Slice(n, 99, size * KIB) for n, size in ((3, 16), (5, 32), (7, 24), (9, 1))}
    # In what was free last, and no more than 60 KiB; what is smaller than a place is worth stays.
    assert place_largest(results, hosts, {}, 60 * KIB) == {5: Place(3, 0), 7: Place(3, 32 * KIB)}
    taken = {3: [(0, Slice(4, 99, 48 * KIB))]}
    assert place_largest(results, hosts, taken, 60 * KIB) == {5: Place(0, 0), 7: Place(0, 32 * KIB)}
