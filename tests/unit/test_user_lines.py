# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The line that things are told of is the user's: not that of a trainer that is installed, unless there is no other."""

from __future__ import annotations

import sysconfig
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from retrograd.frontend.python.user_lines import find_user_line, warn_user

INSTALLED = f"{sysconfig.get_path('purelib')}/trainer/loop.py"


def made_in(filename: str, module: str) -> Callable[[Callable[[], Any]], Any]:
    """A function in line 2 of a file, which calls another."""
    scope: dict[str, Any] = {"__name__": module}
    exec(compile("def run(call):\n    return call()\n", filename, "exec"), scope)
    run: Callable[[Callable[[], Any]], Any] = scope["run"]
    return run


def test_a_trainer_that_is_installed_is_passed_over() -> None:
    train, trainer = made_in("/home/me/train.py", "train"), made_in(INSTALLED, "trainer.loop")
    torch, start = made_in("/elsewhere/torch/graph.py", "torch.autograd.graph"), made_in("<frozen runpy>", "runpy")
    assert train(partial(trainer, partial(torch, find_user_line))) == "train.py:2"
    assert train(partial(start, find_user_line)) == "train.py:2"
    assert trainer(partial(train, find_user_line)) == "train.py:2"


def test_a_warning_is_of_the_users_line() -> None:
    train, trainer = made_in("/home/me/train.py", "train"), made_in(INSTALLED, "trainer.loop")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(partial(trainer, partial(warn_user, "look at it", UserWarning)))
    assert [(w.filename, w.lineno, str(w.message)) for w in caught] == [("/home/me/train.py", 2, "look at it")]
