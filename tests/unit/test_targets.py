# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Targets by name, and what code for the host depends on."""

from dataclasses import replace

import pytest

from retrograd.pipelines.devices import targets
from retrograd.pipelines.devices.device_targets import DATA_TILING, FEWER_FUSIONS, PLAIN_REDUCTIONS, SPLIT_REDUCTION
from retrograd.pipelines.devices.targets import CPU, UnknownTarget, cuda_architecture, find_target, host_cpu

NAMES = ("cpu", "cpu:x86-64-v3", "cuda:sm_75", "cuda:sm_90", "cuda:sm_120", "vulkan", "vulkan:rdna3", "hip:gfx942")


@pytest.mark.parametrize("name", [*NAMES, "cpu,cuda:sm_80,vulkan"])
def test_each_target_has_a_name_flags_and_a_ladder_that_ends_plainly(name: str) -> None:
    target = find_target(name)
    assert target.name == name
    assert all(flag.startswith("--iree-") for flag in target.flags)
    assert len(set(target.ladder)) == len(target.ladder)
    # What makes code faster and does not always compile is gone at the end.
    assert not {DATA_TILING, FEWER_FUSIONS, SPLIT_REDUCTION} & set(target.ladder[-1])


def test_an_unknown_target_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownTarget, match="target 'abacus' is not one of cpu") as error:
        find_target("abacus")
    assert "did you mean" not in str(error.value)
    with pytest.raises(UnknownTarget, match=r"target 'cpus' is not one of .*; did you mean 'cpu'\?"):
        find_target("cpus")


def test_host_cpu_names_model_and_features_once() -> None:
    lines = host_cpu().splitlines()
    assert lines
    assert len({line.partition(":")[0] for line in lines}) == len(lines)
    assert not any(line.startswith(("cpu MHz", "bogomips", "processor")) for line in lines)


def test_host_cpu_without_a_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(targets, "open", refuse, raising=False)
    assert host_cpu.__wrapped__()


def test_data_tiling_is_for_marked_products() -> None:
    product = "%0 = linalg.matmul {} ins(%a, %b : tensor<512x512xf32>, tensor<512x512xf32>)"
    assert CPU.find_rungs(product.format("{iree.opt.data_tiling}")) == CPU.ladder
    without = CPU.find_rungs(product.format(""))
    assert without and without[-1] == ()
    assert all("--iree-opt-data-tiling" not in flags for flags in without)
    assert set(without) < set(CPU.ladder)


def test_a_ladder_of_data_tiling_alone_leaves_its_other_flags_to_a_module_without_marks() -> None:
    tiled = replace(CPU, ladder=((DATA_TILING, FEWER_FUSIONS), (DATA_TILING,)))
    assert tiled.find_rungs("func.func @f() { return }") == ((FEWER_FUSIONS,), ())
    assert tiled.find_rungs("{iree.opt.data_tiling}") == tiled.ladder


def test_devices_without_a_model_have_one_of_their_own() -> None:
    assert find_target("cuda").names == ("cuda:sm_80",)
    assert find_target("cuda", cuda_architecture="sm_90").names == ("cuda:sm_90",)
    assert find_target(["cpu", "vulkan"]).names == ("cpu", "vulkan")
    assert find_target("hip").name == "hip:gfx942"


def test_several_devices_are_not_linked_and_share_their_sets_of_flags() -> None:
    both = find_target("cpu,cuda")
    assert "--iree-hal-link-executables=false" in both.flags
    assert "--iree-hal-link-executables=false" not in CPU.flags
    assert set(both.ladder[:-1]) == set(CPU.ladder) & set(find_target("cuda").ladder)
    # What a GPU needs to compile at all, with nothing that makes code of the CPU faster.
    assert both.ladder[-1] == (PLAIN_REDUCTIONS,)
    assert not find_target("cpu,vulkan").has_f64 and both.has_f64
    assert "--iree-input-demote-f64-to-f32=true" in find_target("cpu,vulkan").flags


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:sm_42", "cuda architecture 'sm_42' is not one of sm_75, "),
        ("vulkan:", "target 'vulkan:' names no model of vulkan; write 'vulkan' or 'vulkan:portable'"),
        ("cpu:a b", "names no model of cpu"),
        ("cuda:sm_80,cuda:sm_90", "names cuda twice"),
        ((), "no target is given"),
    ],
)
def test_refused_targets(name: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)


def test_cards_run_code_for_the_newest_architecture_that_is_not_newer() -> None:
    assert cuda_architecture(9, 0) == "sm_90"
    assert cuda_architecture(8, 7) == "sm_86"
    assert cuda_architecture(10, 0) == "sm_90"
    assert cuda_architecture(12, 1) == "sm_120"
    with pytest.raises(UnknownTarget, match=r"compute capability 7\.0 is older than sm_75"):
        cuda_architecture(7, 0)
