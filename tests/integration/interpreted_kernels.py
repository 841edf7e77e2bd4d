# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""All kernels that Triton's interpreter runs, in one process in which ``TRITON_INTERPRET`` is set: to import PyTorch,
Triton and the compiler takes longer than to interpret them."""

import interpreted_attention
import interpreted_columns
import interpreted_convolutions
import interpreted_norms
import interpreted_scatters
import interpreted_transposes

if __name__ == "__main__":
    for program in (
        interpreted_transposes,
        interpreted_columns,
        interpreted_norms,
        interpreted_convolutions,
        interpreted_scatters,
        interpreted_attention,
    ):
        print(program.__name__, flush=True)
        program.main()
