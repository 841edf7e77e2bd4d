# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The environment variables that more than one part reads."""

CACHE_FOLDER = "RETROGRAD_CACHE_DIR"
"""Names the folder of all that retrograd keeps between runs; without it, the user's cache folder of the platform."""
