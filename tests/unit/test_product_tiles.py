# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles of matrix products: which a product gets, and the script that says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.pipelines.devices.product_tiles import Product, Tile, choose_tile, find_products, write_tile_script

LINALG = """
    %3 = linalg.matmul ins(%1, %2 : tensor<64x784xf32>, tensor<784x128xf32>) outs(%0 : tensor<64x128xf32>) -> tensor<64x128xf32>
    %4 = linalg.batch_matmul ins(%a, %b : tensor<8x32x16xf32>, tensor<8x16x48xf32>) outs(%c : tensor<8x32x48xf32>) -> tensor<8x32x48xf32>
    %5 = linalg.matmul ins(%1, %2 : tensor<64x784xf32>, tensor<784x128xf32>) outs(%9 : tensor<64x128xf32>) -> tensor<64x128xf32>
    %6 = linalg.matmul ins(%1, %2 : tensor<64x32xbf16>, tensor<32x64xbf16>) outs(%0 : tensor<64x64xbf16>) -> tensor<64x64xbf16>
    %7 = linalg.matmul ins(%1, %2 : tensor<?x32xf32>, tensor<32x64xf32>) outs(%0 : tensor<?x64xf32>) -> tensor<?x64xf32>
    %8 = linalg.matmul ins(%1, %2 : tensor<37x41xf32>, tensor<41x37xf32>) outs(%0 : tensor<37x37xf32>) -> tensor<37x37xf32>
"""  # noqa: E501


def test_products_of_float32_and_fixed_sizes_are_found_once() -> None:
    assert find_products(LINALG) == [Product(0, 37, 37, 41), Product(0, 64, 128, 784), Product(8, 32, 48, 16)]


@pytest.mark.parametrize(
    ("product", "tile"),
    [
        (Product(0, 1024, 1024, 1024), Tile(32, 32, 32, 4, 4)),
        (Product(32, 128, 128, 64), Tile(32, 32, 32, 4, 4)),
        # 32 x 32 would be 64 workgroups, and leave half of the device without work.
        (Product(0, 64, 1024, 256), Tile(16, 32, 32, 2, 4)),
        (Product(0, 64, 256, 1024), Tile(16, 16, 32, 2, 2)),
        (Product(0, 1024, 784, 256), Tile(32, 16, 32, 4, 2)),
        (Product(0, 256, 1024, 784), Tile(32, 32, 28, 4, 4)),
        (Product(0, 256, 10, 1024), Tile(32, 10, 32, 1, 2)),
        (Product(0, 10, 1024, 256), Tile(10, 32, 32, 2, 1)),
        (Product(0, 64, 256, 10), Tile(16, 16, 10, 2, 2)),
        (Product(0, 1, 1024, 1024), None),
        (Product(0, 10, 7, 64), None),
        # What no tile divides is padded: a vocabulary on either side and in the sum, 197 patches of an image.
        (Product(0, 256, 50257, 768), Tile(32, 32, 32, 4, 4, padded=True)),
        (Product(0, 256, 768, 50257), Tile(32, 32, 32, 4, 4, padded=True)),
        (Product(0, 788, 192, 768), Tile(32, 32, 32, 4, 4, padded=True)),
        (Product(0, 100, 64, 64), Tile(16, 16, 32, 2, 2, padded=True)),
        (Product(0, 768, 192, 788), Tile(32, 32, 32, 4, 4, padded=True)),
        (Product(0, 64, 64, 37), Tile(16, 16, 32, 2, 2, padded=True)),
        # 64 in place of 36 is more than what longer steps are worth.
        (Product(0, 64, 64, 36), Tile(16, 16, 12, 2, 2)),
        # iree-compile would write beyond the end: each thread has a row, or a column, of its own.
        (Product(0, 100, 10, 64), None),
        (Product(0, 16, 12, 8), None),
        (Product(0, 8, 16, 16), None),
        # iree-compile would read beyond the end of a batch.
        (Product(12, 197, 197, 64), None),
        (Product(12, 64, 37, 64), None),
    ],
)
def test_the_tile_of_a_product(product: Product, tile: Tile | None) -> None:
    assert choose_tile(product) == tile


SIZES = st.integers(1, 70) | st.integers(1, 40).map(lambda n: 16 * n)


@given(st.builds(Product, st.integers(0, 8), SIZES, SIZES, SIZES))
def test_a_tile_divides_its_product_into_whole_warps_or_is_padded(product: Product) -> None:
    tile = choose_tile(product)
    if tile is not None:
        divides = product.m % tile.m == product.n % tile.n == product.k % tile.k == 0
        assert tile.padded != divides
        assert divides or not product.batch
        assert product.m % tile.m == 0 or tile.thread_m > 1
        assert product.n % tile.n == 0 or tile.thread_n > 1
        assert tile.m % tile.thread_m == tile.n % tile.thread_n == 0
        assert tile.threads % 32 == 0 and tile.threads <= 1024
        assert tile.thread_m * tile.thread_n <= 16


def test_the_script_has_each_layout_of_each_product() -> None:
    script = write_tile_script(LINALG)
    assert script is not None
    assert script.count("transform.iree.match.contraction") == script.count("-> @annotate") == 3 * 3
    # The left operand transposed, of a product alone and of one in a batch.
    assert "affine_map<(d0, d1, d2) -> (d2, d0)>, affine_map<(d0, d1, d2) -> (d2, d1)>" in script
    assert "affine_map<(d0, d1, d2, d3) -> (d0, d3, d1)>" in script
    assert "workgroup = [1, 16, 16, 0], thread = [1, 2, 2, 0], reduction = [0, 0, 0, 16]" in script
    assert "workgroup_size = [64, 1, 1]" in script
    # 37 x 41 x 37.
    assert "padding = [16, 16, 32]" in script


def test_no_script_where_no_product_has_a_tile() -> None:
    assert write_tile_script("%5 = linalg.matmul ins(%a, %b : tensor<7x41xf32>, tensor<41x9xf32>) outs(%c : x)") is None
