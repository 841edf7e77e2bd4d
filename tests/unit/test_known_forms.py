# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which tensors are of forms that were found right."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from retrograd.runtime.programs.known_forms import KnownForms


class Subclass(torch.Tensor):
    pass


def known(*tensors: Any, note: tuple[int, ...] = ()) -> KnownForms:
    forms = KnownForms()
    forms.learn(tensors, note)
    return forms


def test_others_of_the_same_forms_are_known_with_what_was_noted() -> None:
    forms = known(nn.Parameter(torch.ones(2, 3)), torch.ones(6)[::2], note=(1,))
    assert forms.find([nn.Parameter(torch.zeros(2, 3)), torch.zeros(8)[1:7:2]]) == (1,)
    assert KnownForms().find([torch.ones(2)]) is None


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(8),
        torch.ones(2, 4).t(),
        torch.ones(4).expand(2, 4).t(),
        torch.ones(4, 2, dtype=torch.float64),
        torch.ones(4, 2, dtype=torch.complex64),
        torch.ones(4, 2, device="meta"),
        torch.ones(4, 2, requires_grad=True),
        nn.Parameter(torch.ones(4, 2)),
        torch._neg_view(torch.ones(4, 2)),
        torch._efficientzerotensor((4, 2)),
        torch.ones(4, 2).to_sparse(),
        torch.ones(4, 2).as_subclass(Subclass),
        3,
    ],
    ids=str,
)
def test_another_form_is_not_known(other: Any) -> None:
    forms = known(torch.zeros(4, 2))
    assert forms.find([other]) is None
    assert forms.find([torch.ones(4, 2)]) == ()


def test_conjugates_and_transforms_are_not_known() -> None:
    complex_ = torch.ones(3, dtype=torch.complex64)
    assert known(complex_).find([complex_.conj()]) is None
    forms, found = known(torch.ones(3)), list[Any]()

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(forms.find([tensor]))
        return tensor

    torch.func.vmap(look)(torch.ones(2, 3))
    assert found == [None]


def test_another_number_of_tensors_is_not_known() -> None:
    a, b = torch.ones(2), torch.ones(2)
    forms = known(a, b)
    assert forms.find([a]) is None and forms.find([a, b, torch.ones(2)]) is None
    assert forms.find([b, a]) == ()


def test_one_that_stands_in_two_places_is_known_where_it_did_before() -> None:
    """As tied weights do."""
    a, b, c = torch.ones(2), torch.ones(3), torch.ones(2)
    forms = known(a, b, a, note=(1,))
    assert forms.find([a, b, a]) == forms.find([c, b, c]) == (1,)
    assert forms.find([a, b, c]) is None
    assert known(a, b, c).find([a, b, a]) is None


def test_no_tensor_is_kept() -> None:
    tensor = torch.ones(2)
    forms, reference = known(tensor), weakref.ref(tensor)
    del tensor
    assert reference() is None and forms.find([torch.ones(2)]) == ()


def test_what_is_no_tensor_is_not_learned_and_what_changes_each_time_not_for_ever() -> None:
    assert known(torch.ones(2), 3).find([torch.ones(2), 3]) is None
    assert known().find([]) is None
    forms = KnownForms()
    for size in range(1, 20):
        forms.learn([torch.ones(size)], (size,))
    found = [size for size in range(1, 20) if forms.find([torch.ones(size)]) is not None]
    assert len(found) == 1 and forms.find([torch.ones(found[0])]) == (found[0],)
