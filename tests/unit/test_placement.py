# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where a program runs, from what is asked for and what it was compiled for."""

import pytest
import torch

from retrograd.runtime.programs.devices import torch_device_of
from retrograd.runtime.programs.placement import PlacementError, choose_device, choose_uri

TARGETS = ("cpu:x86-64-v3", "cuda:sm_90", "vulkan")


@pytest.mark.parametrize(
    ("device", "uri"),
    [
        (None, "local-task"),
        ("cpu", "local-task"),
        ("cuda", "cuda"),
        ("cuda:0", "cuda"),
        (torch.device("cuda", 3), "cuda://3"),
        ("vulkan", "vulkan"),
        ("vulkan:1", "vulkan://1"),
    ],
)
def test_uris(device: str | torch.device | None, uri: str) -> None:
    assert choose_uri(TARGETS, device) == uri


def test_a_device_without_code_is_refused_with_those_there_are() -> None:
    message = (
        "no code for device 'hip:0': compiled for cpu:x86-64-v3, cuda:sm_90, vulkan; choose one of cpu, cuda, vulkan"
    )
    with pytest.raises(PlacementError, match=message):
        choose_uri(TARGETS, "hip:0")
    with pytest.raises(PlacementError, match="no code for device 'cuda:x'"):
        choose_uri(TARGETS, "cuda:x")


def test_tensors_choose_their_own_device() -> None:
    assert choose_device(TARGETS, [torch.device("cpu")]) == torch.device("cpu")
    assert choose_device(("vulkan",), [torch.device("cpu")]) is None
    assert choose_device(TARGETS, []) is None


def test_where_a_device_takes_tensors() -> None:
    assert torch_device_of("cuda://1") == torch.device("cuda", 1)
    assert torch_device_of("cuda") == torch.device("cuda", 0)
    assert torch_device_of("vulkan") == torch_device_of("local-task") == torch.device("cpu")
