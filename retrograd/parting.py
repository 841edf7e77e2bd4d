# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Says that what was compiled is not what the model computes in eager."""

from __future__ import annotations

from retrograd.runtime.arguments.calling import OtherProgramError

PARTS_REMEDY = (
    "retrograd.enable() compiles the backward of the model as it runs in eager; verify=False compiles what the model "
    "computes while it is compiled, as torch.compile does"
)


class PartsFromEagerError(OtherProgramError):
    """The model computes something else in eager than what was compiled; nothing has run, as can be seen afterwards.
    ``parting`` says what; ``is_last`` that to compile it as it runs in eager does not help; ``remedy`` what does."""

    def __init__(self, parting: str, is_last: bool, remedy: str = PARTS_REMEDY) -> None:
        super().__init__(f"{parting}; {remedy}")
        self.parting, self.is_last, self.remedy = parting, is_last, remedy
