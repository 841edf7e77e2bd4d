# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The names of the policies of what is saved: users give them, ``bwd-partition`` takes them, reports say them."""

from typing import Literal, get_args

Partition = Literal["default", "min-cut", "budget"]
"""What eager saves; the fewest bytes; what keeps a peak within a budget."""

PARTITIONS: tuple[Partition, ...] = get_args(Partition)
DEFAULT, MIN_CUT, BUDGET = PARTITIONS

FREE = "free"
"""The memory budget that is what is free on the device when a model is compiled."""
