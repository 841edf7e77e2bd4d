# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ctrl-C is not lost where Python drops the exception."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from retrograd.tools.console import show_progress
from retrograd.tools.interrupts import raise_if_interrupted, remember_interrupts


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    remember_interrupts()
    yield
    remember_interrupts()
    signal.signal(signal.SIGINT, before)


class Dying:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_destructor_ends_the_command_at_its_next_phase() -> None:
    with show_progress() as announce:
        announce("first")
        dying = Dying()
        del dying
        with pytest.raises(KeyboardInterrupt):
            announce("second")


def test_without_an_interrupt_nothing_is_raised() -> None:
    raise_if_interrupted()


def test_an_interrupt_is_raised_at_once_too() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
