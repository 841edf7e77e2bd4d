# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The bytes of constants out of a module's text, beside numpy's of the same numbers."""

import ml_dtypes
import numpy as np
import pytest

from retrograd.pipelines.toolchain.constant_data import ConstantData

TEXT = """\
#pair = #util.composite<20xi8, [
    dense_resource<table> : tensor<2x2xi32>,
    dense<0> : vector<4xi8>,
]>
#alone = dense<[1, -2]> : tensor<2xi16>
module {
}
{-#
  dialect_resources: {
    builtin: {
      "a table": "0x0100000007",
      table: "0x0400000001000000FEFFFFFF0300000004000000",
    }
  }
#-}
"""


def test_parts_of_a_composite_follow_one_another() -> None:
    expected = np.array([1, -2, 3, 4], "<i4").tobytes() + bytes(4)
    assert ConstantData(TEXT).find("#pair") == expected
    assert ConstantData(TEXT).find("#alone") == np.array([1, -2], "<i2").tobytes()
    assert ConstantData(TEXT).find('dense_resource<"a table"> : tensor<3xi8>') == b"\7\7\7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dense<[[1.5, -2.0], [3.0, 1.0e+2]]> : tensor<2x2xf32>", np.array([1.5, -2, 3, 100], "<f4")),
        ("dense<0x7FC0> : tensor<3xbf16>", np.array([np.nan] * 3).astype(ml_dtypes.bfloat16)),
        ("dense<1.100000e+00> : tensor<bf16>", np.array(1.1).astype(ml_dtypes.bfloat16)),
        (
            "dense<[1.00390625, 1.01171875, -3.0e-40, 3.4e38]> : tensor<4xbf16>",
            np.array([1.00390625, 1.01171875, -3.0e-40, 3.4e38]).astype(ml_dtypes.bfloat16),
        ),
        ('dense<"0x0100000002000000"> : vector<2xi32>', np.array([1, 2], "<i4")),
        ("dense<[0.1, 0xFFEFFFFFFFFFFFFF]> : tensor<2xf64>", np.array([0.1, -np.finfo(np.float64).max])),
        ("dense<-9223372036854775808> : tensor<2xi64>", np.array([-(2**63)] * 2, "<i8")),
    ],
)
def test_numbers_have_the_bits_of_their_types(
    text: str, expected: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"
) -> None:
    assert ConstantData("").find(text) == expected.tobytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#util.byte_pattern<1> : tensor<4xi8>", "a constant that is written as"),
        ("dense_resource<gone> : tensor<4xi8>", "leaves out the resource gone"),
        ("dense<[1, 2]> : tensor<3xi8>", "3 numbers of i8 of which 2 bytes are written"),
        ("dense<1> : tensor<3xi1>", "a constant of i1"),
        ("#util.composite<9xi8, [dense<0> : vector<8xi8>]>", "9 bytes of which 8 are written"),
        ("#util.composite<9xi8, [other, dense<0> : vector<8xi8>]>", "a constant that is written as"),
    ],
)
def test_other_forms_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConstantData("").find(text)
