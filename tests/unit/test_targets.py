# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Targets by name, and what code for the host depends on."""

import pytest

from retrograd.pipelines import targets
from retrograd.pipelines.targets import CPU, TARGETS, UnknownTarget, find_target, host_cpu


@pytest.mark.parametrize("name", TARGETS)
def test_each_target_has_a_name_flags_and_a_ladder_that_ends_plainly(name: str) -> None:
    target = find_target(name)
    assert target.name == name
    assert all(flag.startswith("--iree-") for flag in target.flags)
    assert len(set(target.ladder)) == len(target.ladder)
    assert target.ladder[-1] == ()


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


def test_data_tiling_is_for_matrix_products() -> None:
    assert CPU.find_rungs("%0 = linalg.matmul ins(%a, %b : tensor<4x4xf32>, tensor<4x4xf32>)") == CPU.ladder
    without = CPU.find_rungs('%0 = linalg.generic {iterator_types = ["parallel", "reduction"]}')
    assert without and without[-1] == ()
    assert all("--iree-opt-data-tiling" not in flags for flags in without)
    assert set(without) < set(CPU.ladder)
