# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles by measurement: which win, what is kept, what files are taken, without a device."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from retrograd import api, tuning
from retrograd.api import compile_backward, options_of
from retrograd.contract.environment import CACHE_FOLDER
from retrograd.contract.reading import read_plain, to_json
from retrograd.contract.trials import Buffer, Ending, Work
from retrograd.options import Request
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.kernels import questions
from retrograd.pipelines.kernels.attention_tiles import ATTEND, KEYS, QUERIES, AttentionTile, choose_tile, count_shared
from retrograd.pipelines.kernels.attention_tiles import list_tiles as list_attention_tiles
from retrograd.pipelines.kernels.column_text import choose_tiles
from retrograd.pipelines.kernels.column_text import list_tiles as list_column_tiles
from retrograd.pipelines.kernels.convolution_tiles import CONVOLVE, CORRELATE, SPREAD
from retrograd.pipelines.kernels.convolution_tiles import Work as Convolution
from retrograd.pipelines.kernels.convolution_tiles import choose_tile as choose_convolution_tile
from retrograd.pipelines.kernels.convolution_tiles import list_tiles as list_convolution_tiles
from retrograd.pipelines.kernels.dispatch import NO_PTX
from retrograd.pipelines.kernels.kernel import Kernel, KernelError
from retrograd.pipelines.kernels.ptx import find_triton
from retrograd.pipelines.kernels.questions import (
    MOST,
    Launch,
    Question,
    Run,
    TilesError,
    Trial,
    pick,
    read_chosen,
    read_question,
    write_chosen,
)
from retrograd.pipelines.kernels.scatters import RANK
from retrograd.pipelines.kernels.shipped_tiles import SHIPPED
from retrograd.pipelines.kernels.tile_table import Entry, TableError, keep, kept_table, read_kept, read_table
from retrograd.pipelines.kernels.tiles import ARCHITECTURES, Shape, choose_tiling, list_tilings
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline
from retrograd.tools.cli import main
from retrograd.tools.measure import find_tolerance, is_faster, measure

needs_triton = pytest.mark.skipif(find_triton() is None, reason="Triton is not installed")


@dataclass
class FakeTimer:
    """Says what tiles take, with some noise; ``faults`` by number."""

    microseconds: Sequence[float]
    faults: Mapping[int, str] = field(default_factory=dict)
    noise: float = 0.01
    asked: list[tuple[list[int], int]] = field(default_factory=list)

    def find_fault(self, number: int) -> str | None:
        return self.faults.get(number)

    def time(self, numbers: Sequence[int], rounds: int) -> list[list[float]]:
        self.asked.append((list(numbers), rounds))
        jitter = [1 + self.noise * (turn % 5 - 2) / 2 for turn in range(rounds)]
        return [[self.microseconds[number] * share for share in jitter] for number in numbers]


def test_the_fastest_wins() -> None:
    timer = FakeTimer([100, 90, 80, 99])
    found = measure(4, timer)
    assert (found.fastest, found.microseconds, found.unasked) == (2, 80, 100)
    # All are looked at, and the hopeful for longer, beside those that are taken unasked.
    (first, few), (second, many) = timer.asked
    assert first == [0, 1, 2, 3] and second == [0, 2, 1, 3] and few < many


def test_what_is_faster_by_noise_alone_does_not_win() -> None:
    assert measure(2, FakeTimer([100, 98])).fastest == 0
    assert measure(2, FakeTimer([100, 90], noise=0.3)).fastest == 0
    assert is_faster([90, 91, 90, 92], [100, 101, 99, 102]) and not is_faster([97.5] * 4, [100] * 4)


def test_what_is_wrong_does_not_win_however_fast() -> None:
    found = measure(3, FakeTimer([100, 10, 90], faults={1: "what it gives differs by 1e-1"}))
    assert found.fastest == 2 and found.faults == {1: "what it gives differs by 1e-1"}


def test_nothing_is_known_where_what_is_taken_unasked_fails() -> None:
    timer = FakeTimer([100, 10], faults={0: "it does not load"})
    assert measure(2, timer).fastest == 0 and not timer.asked


def test_what_is_hopeless_is_looked_at_once() -> None:
    timer = FakeTimer([100, 140, 1000])
    assert measure(3, timer).fastest == 0 and len(timer.asked) == 1


def test_results_may_differ_by_rounding() -> None:
    assert find_tolerance(["f32"], "f32") < find_tolerance(["bf16"], "f32") < find_tolerance(["bf16"], "bf16")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_measured_is_bounded_and_begins_with_what_is_taken_unasked(architecture: str) -> None:
    for element in ("f32", "bf16"):
        for shape in (
            Shape(1, 768, 3072, 4096, element),
            Shape(12, 512, 512, 64, element),
            Shape(1, 17, 99, 5000, element),
        ):
            tilings = list_tilings(shape, architecture, MOST)
            assert tilings[0] == choose_tiling(shape, architecture)
            assert 1 < len(tilings) == len(set(map(str, tilings))) <= MOST
        for kind in (ATTEND, KEYS, QUERIES):
            for width in (16, 64, 128):
                tiles = list_attention_tiles(kind, element, width, architecture, MOST)
                assert tiles[0] == choose_tile(kind, element, width, architecture)
                assert 1 < len(tiles) == len(set(map(str, tiles))) <= MOST
        for work in (
            Convolution(CONVOLVE, 1, 50176, 128, 9, 128, element),
            Convolution(SPREAD, 4, 50176, 64, 3, 64, element),
            Convolution(CORRELATE, 9, 512, 512, 1, 3136, element),
        ):
            found = list_convolution_tiles(work, architecture, MOST)
            assert found[0] == choose_convolution_tile(work, architecture)
            assert 1 < len(found) == len(set(map(str, found))) <= MOST


@pytest.mark.parametrize(
    ("kind", "tile", "size", "taken"),
    # What Triton's kernels were seen to take, or somewhat less.
    [
        (ATTEND, AttentionTile(128, 64, 8, 3), 512, 262_144),
        (KEYS, AttentionTile(128, 128, 8, 3), 256, 262_144),
        (QUERIES, AttentionTile(128, 64, 8, 3), 128, 81_920),
        (ATTEND, AttentionTile(64, 64, 4, 3), 128, 57_344),
    ],
)
def test_shared_memory_of_attention(kind: str, tile: AttentionTile, size: int, taken: int) -> None:
    assert count_shared(kind, tile, size) == taken


def test_tiles_of_more_shared_memory_than_there_is_are_not_measured() -> None:
    wide = list_attention_tiles(ATTEND, "bf16", 256, "sm_90", MOST)
    assert AttentionTile(128, 64, 8, 3) not in wide and AttentionTile(64, 64, 8, 2) in wide


@pytest.mark.parametrize(("rows", "columns"), [(802_816, 64), (300, 1024), (70_001, 48), (16_384, 16)])
def test_columns_are_all_of_them_in_some_part(rows: int, columns: int) -> None:
    tiles = list_column_tiles(rows, columns, 2, MOST)
    assert tiles[0] == choose_tiles(rows, columns, 2) and 1 < len(tiles) == len(set(map(str, tiles))) <= MOST
    assert all((t.parts - 1) * t.span < rows <= t.parts * t.span and t.span % t.rows == 0 for t in tiles)


def make_question(text: str = "scatters 30 of 4", count: int = 2) -> Question:
    """A question about a kernel, with so many tiles."""
    run = Run(Launch(RANK, (3, 1, 1), (30,)), (0,), (Buffer("i32", (30,)),))
    trial = Trial((Buffer("i64", (30, 1), below=7),), (run,), Ending("f32", bias=None))
    return Question(text, {f"{number} warps": trial for number in range(count)})


def test_questions_are_text() -> None:
    question = make_question()
    assert read_question(question.to_json()) == question
    assert question.family == "scatters" and question.unasked == "0 warps"


def test_a_trial_with_code_is_work() -> None:
    (trial, _) = make_question().trials.values()
    work = tuning.make_work(trial, {RANK: replace(NO_PTX, ptx="code", scratch=8)})
    assert read_plain(Work, to_json(work), "work") == work
    (call,) = work.calls
    assert (call.code.ptx, call.code.scratch, call.buffers, work.results, work.element) == (
        "code",
        8,
        (0, 1),
        (1,),
        "f32",
    )


def test_what_is_updated_in_place_is_the_result() -> None:
    inputs = (Buffer("i32", (3,)), Buffer("f32", (5,)))
    trial = Trial(inputs, (Run(Launch(RANK, (1, 1, 1), (), written=1), (0, 1), ()),))
    work = tuning.make_work(trial, {RANK: NO_PTX})
    assert (work.updated, work.results, work.calls[0].buffers) == (1, (1,), (0, 1))


def test_tiles_are_text_in_a_pipeline() -> None:
    chosen = {"products 3x4x5 nt f32": "64x64x32 4 warps 2 stages", "rows 2x513 rows_sum_1": "512 4 warps"}
    assert read_chosen(write_chosen(chosen)) == chosen and read_chosen("") == {}
    with pytest.raises(ValueError, match="expected QUESTION:TILES"):
        read_chosen("products")
    target = replace(find_target("cuda:sm_90"), kernels=("products", "rows"))
    plain, tiled = (lowering_pipeline(replace(target, tiles=tuple(c.items()))) for c in ({}, chosen))
    assert "tiles=" not in plain
    assert 'families=rows tiles="rows 2x513 rows_sum_1:512 4 warps"' in tiled
    assert 'families=products tiles="products 3x4x5 nt f32:64x64x32 4 warps 2 stages"' in tiled
    assert lowering_pipeline(target, asking=True).count("ask=true ptx=none") == 2


def test_what_the_package_has_is_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "SHIPPED", {"sm_90": {"rows": "b", "columns": "z"}})
    assert questions.put_first("rows", ("a", "b", "c"), "sm_90") == ("b", "a", "c")
    # Of another architecture, question, or release of the kernel.
    assert questions.put_first("rows", ("a", "b"), "sm_80") == ("a", "b")
    assert questions.put_first("products", ("a", "b"), "sm_90") == ("a", "b")
    assert questions.put_first("columns", ("a", "b"), "sm_90") == ("a", "b")


def test_what_the_package_has_is_for_kernels_that_have_it() -> None:
    """Products and attention of sizes that are in the text; tiles that some list has."""
    for architecture, shipped in SHIPPED.items():
        for text, tiles in shipped.items():
            found = re.fullmatch(r"products (?:(\d+) of )?(\d+)x(\d+)x(\d+) [nt]{2} (\w+).*", text)
            if found is not None:
                batch, m, n, k = (int(size or 1) for size in found.groups()[:4])
                listed = map(str, list_tilings(Shape(batch, m, n, k, found[5]), architecture, MOST))
            else:
                kind, width, element = re.findall(r"^attention (\w+) of \d+x\d+x\d+x(\d+).* (\w+)$", text)[0]
                listed = map(str, list_attention_tiles(kind, element, int(width), architecture, MOST))
            assert tiles in listed, text


def test_tiles_that_there_are_none_of_are_refused() -> None:
    assert pick("rows", ("a", "b"), {}) == "a" and pick("rows", ("a", "b"), {"rows": "b"}) == "b"
    with pytest.raises(TilesError, match="the tiles 'c' are none of those for 'rows': a, b"):
        pick("rows", ("a", "b"), {"rows": "c"})


# -- Tables -----------------------------------------------------------------------------------------------------------

ENTRY = Entry("rows 2x513", "sm_90", "3.6.0", "512 4 warps", "a device", 1.5, 2.0)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    return tmp_path


def test_what_is_measured_is_kept(folder: Path) -> None:
    assert not read_kept()
    other = replace(ENTRY, architecture="sm_80")
    keep([ENTRY])
    keep([other, replace(ENTRY, tiles="1024 8 warps")])
    assert read_kept() == {ENTRY.key: replace(ENTRY, tiles="1024 8 warps"), other.key: other}
    kept_table().write_text("{")
    assert not read_kept()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no table of tiles"),
        ('{"format": 1, "tiles": [{"question": "rows"}]}', "no table of tiles"),
        ('{"format": 9, "tiles": []}', "of format 9, and this release reads 1"),
        (None, "No such file or directory; write one with `retrograd tiles FILE`"),
    ],
)
def test_files_that_are_no_tables_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TableError, match=message):
        read_table(path)


def test_the_command_lists_what_is_kept_and_writes_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiles"]) == 1
    assert "compile with tiles='measure' where there is a CUDA device" in capsys.readouterr().err
    keep([ENTRY, replace(ENTRY, architecture="sm_80")])
    assert main(["tiles"]) == 0
    assert "512 4 warps" in (said := capsys.readouterr().out) and "1.33" in said
    path = folder / "h100.json"
    assert main(["tiles", str(path), "--arch", "sm_90"]) == 0
    assert read_table(path) == {ENTRY.key: ENTRY}


# -- Compilations -----------------------------------------------------------------------------------------------------


def test_options_are_refused_that_make_no_sense(tmp_path: Path) -> None:
    x = torch.randn(3, 3)
    with pytest.raises(
        ValueError, match="tiles='measure' is about kernels of retrograd's own, of which there are none"
    ):
        Request(tiles="measure").on([x])
    with pytest.raises(ValueError, match="No such file or directory"):
        Request(tiles=tmp_path / "none.json", target="cuda:sm_90").on([x])


class OnDevice:
    """Stands for a tensor on a CUDA device."""

    is_cuda, device = True, torch.device("cuda", 1)


def test_modes_of_torch_compile_measure_on_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, there, target = torch.randn(3), OnDevice(), find_target("cuda:sm_90")
    assert options_of("max-autotune", [x], {}) == options_of(None, [x], {}) == {}
    assert options_of("reduce-overhead", [x], {}) == {"cuda_graphs": True}
    monkeypatch.setattr(api, "target_on", lambda device, *_: replace(target, kernels=("rows",)))
    assert options_of("max-autotune", [x, there], {}) == {"tiles": "measure"}  # type: ignore[list-item]
    assert options_of("max-autotune", [there], {"tiles": "auto"}) == {}  # type: ignore[list-item]
    monkeypatch.setattr(api, "target_on", lambda device, *_: find_target("cuda:sm_75"))
    with pytest.warns(
        UserWarning, match="mode='max-autotune-no-cudagraphs' has no kernels to measure: there are some for"
    ):
        assert options_of("max-autotune-no-cudagraphs", [there], {}) == {}  # type: ignore[list-item]
    assert options_of("max-autotune", [there], {"kernels": "off"}) == {}  # type: ignore[list-item]


class Devices:
    """Stands for a device that finds the last tiles to be the fastest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr(tuning, "_find_device", lambda device, architecture: 0)
        monkeypatch.setattr(tuning, "_ask_device", self._ask)
        monkeypatch.setattr(tuning, "try_kernels", self._compile)

    def _compile(self, kernels: Sequence[Kernel], architecture: str, tell: Any) -> dict[Kernel, Any]:
        tell(len(kernels), len(kernels))
        return dict.fromkeys(kernels, NO_PTX)

    def _ask(self, asked: Sequence[Sequence[Work]], index: int) -> Iterator[dict[str, Any] | None]:
        for works in asked:
            self.asked += 1
            yield {"fastest": len(works) - 1, "microseconds": 1.0, "unasked": 2.0, "faults": {}, "device": "one"}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


def compile_turned(**options: Any) -> Any:
    """Compile what has one kernel, and it a kernel of its own in the backward."""
    x = torch.randn(16, 3, 40, 41, requires_grad=True)
    return compile_backward(
        lambda x: x.permute(0, 2, 3, 1).contiguous(), (x,), target="cuda:sm_90", kernels=["transposes"], **options
    )


@needs_triton
def test_tiles_are_measured_once_and_told(folder: Path, devices: Devices, tmp_path: Path) -> None:
    said: list[str] = []
    compiled = compile_turned(tiles="measure", progress=said.append)
    lines = compiled.explain().to_dict()["kernels"]
    turned = [line for line in lines if line.startswith("transposes")]
    assert turned and all(line.endswith(", tiles by measurement") for line in turned)
    assert devices.asked == len(turned) and any(line.startswith("measure tiles: 1 of") for line in said)
    # Kept, and read from a file where there is no device.
    compile_turned(tiles="measure")
    assert devices.asked == len(turned)
    path = tmp_path / "tiles.json"
    assert main(["tiles", str(path)]) == 0
    from_file = compile_turned(tiles=path, cache=False)
    assert from_file.explain().to_dict()["kernels"] == lines


@pytest.mark.long
@needs_triton
def test_a_budget_has_them_too(folder: Path, devices: Devices) -> None:
    compiled = compile_turned(tiles="measure", partition="budget", memory_budget=1.0)
    lines = [line for line in compiled.explain().to_dict()["kernels"] if line.startswith("transposes")]
    assert lines and all(line.endswith(", tiles by measurement") for line in lines)


def test_a_file_of_another_device_is_told(folder: Path) -> None:
    keep([ENTRY])
    path, asked = kept_table(), [make_question("rows 2x513"), make_question("rows 2x514")]
    known = {question.text: replace(ENTRY, triton=str(find_triton()), tiles="1 warps") for question in asked[:1]}
    with pytest.warns(UserWarning, match="has no tiles for kernels of this program"):
        assert not tuning._known_tiles(asked, "sm_80", tuning.Tuning(path, torch.device("cpu")))
    keep(known.values())
    assert tuning._known_tiles(asked, "sm_90", tuning.Tuning(path, torch.device("cpu"))) == known
    # Tiles that this release's kernel does not have are as good as none.
    keep([replace(known["rows 2x513"], tiles="9 warps")])
    with pytest.warns(UserWarning, match="has no tiles"):
        assert not tuning._known_tiles(asked, "sm_90", tuning.Tuning(path, torch.device("cpu")))


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_remedy_is_told(folder: Path) -> None:
    with pytest.raises(KernelError, match=r"no CUDA device of sm_90 here.*compile with tiles=FILE"):
        compile_turned(tiles="measure")


def test_a_question_that_ends_the_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process goes on with the next one."""
    program = (
        "import sys, json; print(json.dumps('one'), flush=True)\n"
        "for line in sys.stdin:\n"
        "  if json.loads(line)[0]['results'] == [7]: sys.exit(3)\n"
        "  print(json.dumps({'fastest': 0, 'faults': {}}), flush=True)"
    )
    monkeypatch.setattr(tuning, "_command", lambda index: [sys.executable, "-c", program])
    sound, ends = Work((), (), (), (0,)), Work((), (), (), (7,))
    found = list(tuning._ask_device([[sound], [ends], [sound]], 0))
    assert [answer and answer["device"] for answer in found] == ["one", None, "one"]


def test_a_device_that_a_second_process_has_no_use_of_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_command", lambda index: [sys.executable, "-c", "raise SystemExit(5)"])
    with pytest.raises(KernelError, match=r"ended with status 5; compile with tiles='auto'"):
        list(tuning._ask_device([[Work((), (), (), (0,))]], 0))
