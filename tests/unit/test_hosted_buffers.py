# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Buffers in the caller's memory: never where that holds something, never two in one place, and no larger block."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.pipelines.analysis.kernels.hosted_buffers import Host, Place, find_hosts, place_results
from retrograd.pipelines.analysis.kernels.scratch_layout import Slice, lay_out
from retrograd.pipelines.stream.packings import Choice, place_in_storages, read_taken
from retrograd.pipelines.stream.result_storage import Storage

SLICES = st.builds(
    lambda first, length, size: Slice(first, first + length, 64 * size),
    st.integers(0, 12),
    st.integers(0, 6),
    st.integers(0, 9),
)
HOSTS = st.builds(
    lambda size, first, length: Host(size, first, first + length),
    st.integers(1, 1000),
    st.integers(-1, 12),
    st.integers(0, 20),
)


@settings(deadline=None)
@given(slices=st.lists(SLICES, max_size=16), hosts=st.lists(HOSTS, max_size=5))
def test_nothing_shares_memory_while_it_is_alive(slices: list[Slice], hosts: list[Host]) -> None:
    found = find_hosts(slices, hosts)
    for number, place in found.items():
        part, host = slices[number], hosts[place.host]
        assert 0 <= place.offset <= place.offset + part.size <= host.size
        assert place.offset % 64 == 0
        assert part.last < host.first or host.last < part.first
    for (i, one), (j, other) in combinations(found.items(), 2):
        a, b = slices[i], slices[j]
        together = one.host == other.host and a.first <= b.last and b.first <= a.last
        assert not together or one.offset + a.size <= other.offset or other.offset + b.size <= one.offset
    left = [part for number, part in enumerate(slices) if number not in found]
    assert lay_out(left, loose=False).size <= lay_out(slices, loose=False).size


def test_the_fullest_step_is_lowered_and_no_more() -> None:
    """Of the two at step 1 the larger is hosted; then the smaller is the fullest, and the room is taken."""
    slices = [Slice(0, 1, 256), Slice(1, 2, 512), Slice(4, 5, 64)]
    assert find_hosts(slices, [Host(512, 3, 9)]) == {1: Place(0, 0)}


def test_a_buffer_goes_where_the_smallest_gap_is() -> None:
    assert find_hosts([Slice(0, 1, 256)], [Host(1024, 5, 9), Host(256, 5, 9)]) == {0: Place(1, 0)}


def test_what_may_not_move_stays() -> None:
    assert find_hosts([Slice(0, 1, 256)], [Host(1024, 5, 9)], [False]) == {}


def test_two_that_are_not_alive_together_share_a_place() -> None:
    slices = [Slice(0, 1, 256), Slice(2, 3, 256)]
    assert find_hosts(slices, [Host(256, 5, 9)]) == {0: Place(0, 0), 1: Place(0, 0)}


@given(
    results=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=12),
    hosts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=6),
)
def test_results_lie_in_what_is_dead_and_fill_it(results: list[tuple[int, int]], hosts: list[tuple[int, int]]) -> None:
    page = 1 << 14
    parts = {10 + n: Slice(first, 99, size * page) for n, (first, size) in enumerate(results)}
    rooms = {n: Host(size * page, -1, last) for n, (size, last) in enumerate(hosts)}
    found = place_results(parts, rooms)
    spans: dict[int, list[tuple[int, int]]] = {}
    for number, place in found.items():
        assert rooms[place.host].last < parts[number].first
        spans.setdefault(place.host, []).append((place.offset, place.offset + parts[number].size))
    for host, taken in spans.items():
        assert max(end for _, end in taken) <= rooms[host].size
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(taken)))
    used, held = sum(parts[n].size for n in found), sum(rooms[host].size for host in spans)
    assert used >= 15 / 16 * held


def test_small_results_have_storage_of_their_own() -> None:
    assert place_results({0: Slice(5, 99, 8192)}, {0: Host(8192, -1, 2)}) == {}
    assert place_results({0: Slice(5, 99, 1 << 14)}, {3: Host(1 << 14, -1, 2)}) == {0: Place(3, 0)}
    # What is read when the result is written is not dead.
    assert place_results({0: Slice(5, 99, 1 << 14)}, {3: Host(1 << 14, -1, 5)}) == {}
    # Half of it would be left over.
    assert place_results({0: Slice(5, 99, 1 << 14)}, {3: Host(1 << 15, -1, 2)}) == {}


def test_alone_one_result_of_the_size_lies_there() -> None:
    half, whole = Slice(5, 99, 1 << 14), Slice(5, 99, 1 << 15)
    hosts = {0: Host(1 << 15, -1, 2)}
    assert place_results({0: half, 1: half}, hosts) == {0: Place(0, 0), 1: Place(0, 1 << 14)}
    assert place_results({0: half, 1: half}, hosts, [0]) == {}
    assert place_results({0: half, 1: whole}, hosts, [0]) == {1: Place(0, 0)}
    # However full the others are.
    full = {0: Host(1 << 15, -1, 2), 1: Host(1 << 20, -1, 2)}
    assert place_results({0: half, 1: Slice(5, 99, 1 << 20)}, full, [0, 1]) == {1: Place(1, 0)}
    # Sizes of slices are rounded up.
    assert place_results({0: Slice(5, 99, 1 << 15)}, {0: Host((1 << 15) - 60, -1, 2)}, [0]) == {}


def test_a_result_lies_in_what_was_free_last() -> None:
    hosts = {0: Host(1 << 14, -1, 0), 1: Host(1 << 14, -1, 2), 2: Host(1 << 14, -1, 4)}
    assert place_results({0: Slice(4, 99, 1 << 14)}, hosts) == {0: Place(1, 0)}


def test_nothing_lies_where_a_result_does() -> None:
    slices, host = [Slice(3, 4, 256), Slice(5, 6, 256)], Host(256, -1, 2)
    assert find_hosts(slices, [host]) == {0: Place(0, 0), 1: Place(0, 0)}
    assert find_hosts(slices, [host], taken={0: [(0, Slice(5, 99, 256))]}) == {0: Place(0, 0)}


def test_what_is_alive_long_is_not_kept_out_by_what_is_alive_for_a_step() -> None:
    """At step 5 three are alive, and two of them would take the one host that is free early enough for the third."""
    slices = [Slice(0, 4, 256), Slice(3, 7, 256), Slice(5, 6, 256), Slice(5, 6, 256)]
    hosts = [Host(256, -1, 0), Host(256, -1, 3), Host(256, -1, 3)]
    left = [part for number, part in enumerate(slices) if number not in find_hosts(slices, hosts)]
    assert lay_out(left).size == 256


def test_the_first_results_may_have_storage_of_their_own() -> None:
    size = 1 << 14
    results = [Storage(Host(size, first, 99), None, None, (), number) for number, first in enumerate((3, 9))]
    dead = [
        Storage(Host(size, -1, last), None, None, (), number, True, "several") for number, last in enumerate((2, 8))
    ]
    assert place_in_storages([*results, *dead], 0.0) == {0: Place(2, 0), 1: Place(3, 0)}
    assert place_in_storages([*results, *dead], 1 / 32) == {1: Place(3, 0)}


def test_what_lies_behind_a_result_of_any_size_is_aligned() -> None:
    """A kernel may load whole vectors from where a buffer begins."""
    size = (1 << 14) + 20
    storages = [
        Storage(Host(size, 3, 99), None, None, (), 0),
        Storage(Host(2 * size, -1, 2), None, None, (), 1, True, "several"),
    ]
    hosts = [Host(0, 0, 0), storages[1].host]
    found = find_hosts([Slice(4, 5, 256)], hosts, taken=read_taken(dict(enumerate(hosts)), Choice({0: Place(1, 0)})))
    assert found[0].host == 1
    assert found[0].offset % 64 == 0
