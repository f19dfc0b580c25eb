"""The layout of data and scales: shapes, 16-byte padding, and the symmetry of every block with its transpose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn.ops import reference
from fp8fn.ops.formats import FP8_DTYPES, SCALE_FORMATS
from fp8fn.ops.layout import (
    BLOCKS,
    Block,
    blocks_along,
    contracts_rows,
    empty_data,
    empty_scale,
    is_square,
    matrix_strides,
    scale_dtype,
    scale_shape,
    swap,
)  # fmt: skip

pytestmark = pytest.mark.every_case

SHAPES = [
    (128, 256), (77, 99), (3, 300), (1, 40), (40, 1), (1, 1), (2, 5, 130), (2, 3, 33, 65), (0, 48), (48, 0), (0, 8, 8),
]  # fmt: skip
EXPECTED_SCALE_SHAPE = {
    (1, 128): (300, 4),
    (128, 1): (3, 400),
    (128, 128): (3, 4),
    (1, -1): (300, 1),
    (-1, 1): (1, 400),
    (-1, -1): (1, 1),
    (1, 32): (300, 13),
    (32, 1): (10, 400),
}


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int32 if a.dtype == torch.float32 else torch.uint8
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def test_every_block_is_here() -> None:
    assert set(EXPECTED_SCALE_SHAPE) == set(BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scale_shape(block: Block) -> None:
    assert scale_shape((300, 400), block) == EXPECTED_SCALE_SHAPE[block]
    assert scale_shape((7, 2, 300, 400), block) == (7, 2, *EXPECTED_SCALE_SHAPE[block])


@pytest.mark.parametrize(
    ("size", "block", "count"), [(0, 128, 0), (0, -1, 1), (1, 128, 1), (128, 128, 1), (129, 128, 2)]
)
def test_blocks_along(size: int, block: int, count: int) -> None:
    assert blocks_along(size, block) == count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scale_is_ceil_of_data_over_block(block: Block, shape: tuple[int, ...]) -> None:
    q = fp8fn.quantize(torch.randn(shape), block)
    rows, columns = (1 if b == -1 else (n + b - 1) // b for n, b in zip(shape[-2:], block, strict=True))
    assert q.data.shape == shape
    assert q.scale.shape == (*shape[:-2], rows, columns)


@pytest.mark.parametrize("align", [4, 16])
@pytest.mark.parametrize(
    ("shape", "column_major", "lead"),
    [((5, 30), False, 30), ((5, 30), True, 5), ((5, 32), False, 32), ((0, 3), True, 0)],
)
def test_matrix_strides_pad_the_leading_dimension(
    shape: tuple[int, int], column_major: bool, lead: int, align: int
) -> None:
    padded = (lead + align - 1) // align * align
    assert matrix_strides(shape, column_major, align) == ((1, padded) if column_major else (padded, 1))
    step = padded * shape[1 if column_major else 0]
    assert matrix_strides((4, 6, *shape), column_major, align)[:2] == (6 * step, step)


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_layout_is_the_gemms(block: Block, shape: tuple[int, ...], scale: str) -> None:
    """Data contiguous along the contraction, scales of a one-sided block across it, leads multiples of 16 bytes."""
    for x in (torch.randn(shape), torch.randn(*shape[:-2], shape[-1], shape[-2]).mT):
        q = fp8fn.quantize(x, block, scale=scale)  # type: ignore[arg-type]
        column_major = contracts_rows(block)
        if is_square(block):
            column_major = x.stride(-1) != 1 and x.stride(-2) == 1
        unit, lead = (-2, -1) if column_major else (-1, -2)
        assert q.data.stride(unit) == 1
        assert q.data.stride(lead) % 16 == 0
        assert x.shape[unit] <= q.data.stride(lead) < x.shape[unit] + 16
        if not is_square(block):
            unit, lead = lead, unit
        bytes_each = scale_dtype(scale).itemsize
        assert q.scale.dtype == scale_dtype(scale)
        assert q.scale.stride(unit) == 1
        assert q.scale.stride(lead) * bytes_each % 16 == 0
        assert 0 <= q.scale.stride(lead) - q.scale.shape[unit] < 16 // bytes_each
        for part in (q.data, q.scale):
            assert part.data_ptr() % 16 == 0
            if part.ndim > 2:
                assert (
                    part.stride(-3) == part.stride(-2) * part.shape[-2]
                    or part.stride(-3) == part.stride(-1) * part.shape[-1]
                )


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_quantization_commutes_with_transposition(block: Block, shape: tuple[int, ...], scale: str) -> None:
    """`quantize(x, (c, r))` has the bytes, shapes and strides of `quantize(x.mT, (r, c)).mT`."""
    x = torch.randn(shape)
    there = fp8fn.quantize(x, swap(block), scale=scale)  # type: ignore[arg-type]
    back = fp8fn.quantize(x.mT, block, scale=scale).mT  # type: ignore[arg-type]
    assert there.block == back.block
    # A square block lies as x does, and strides (1, 1), of a row or a column, don't say which of x and x.mT that is.
    if not (is_square(block) and x.stride(-1) == x.stride(-2)):
        assert there.data.stride() == back.data.stride()
        assert there.scale.stride() == back.scale.stride()
    assert same_bits(there.data, back.data)
    assert same_bits(there.scale, back.scale)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values_do_not_depend_on_strides(block: Block, dtype: torch.dtype) -> None:
    wide = torch.randn(140, 280).bfloat16()
    x = wide[::2, ::2]
    expected = reference.quantize(x.contiguous(), block, dtype, "fp32")
    for view in (x, x.mT.contiguous().mT, torch.stack([x, x], -1)[..., 0]):
        q = fp8fn.quantize(view, block, dtype=dtype)
        assert same_bits(q.data, expected[0])
        assert same_bits(q.scale, expected[1])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_batch_is_its_matrices(block: Block) -> None:
    x = torch.randn(2, 3, 70, 150)
    q = fp8fn.quantize(x, block)
    for i in range(2):
        for j in range(3):
            one = fp8fn.quantize(x[i, j], block)
            assert same_bits(q.data[i, j], one.data)
            assert same_bits(q.scale[i, j], one.scale)
            assert q.data[i, j].stride() == one.data.stride()
            assert q.scale[i, j].stride() == one.scale.stride()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_empty_makes_what_quantize_returns(block: Block) -> None:
    for x in (torch.randn(33, 70), torch.randn(70, 33).mT, torch.randn(2, 33, 70)):
        q = fp8fn.quantize(x, block, scale="e8m0")
        data, scale = empty_data(x, block, q.dtype), empty_scale(x, block, "e8m0")
        assert (data.shape, data.stride(), data.dtype) == (q.shape, q.data.stride(), q.dtype)
        assert (scale.shape, scale.stride(), scale.dtype) == (q.scale.shape, q.scale.stride(), q.scale.dtype)


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", [b for b in BLOCKS if not is_square(b)], ids=str)
def test_dual_is_both(block: Block, scale: str) -> None:
    for x in (torch.randn(77, 200), torch.randn(200, 77).mT, torch.randn(2, 40, 300), torch.randn(0, 40)):
        row, col = fp8fn.quantize_dual(x, block, scale=scale)  # type: ignore[arg-type]
        for got, its in ((row, block), (col, swap(block))):
            want = fp8fn.quantize(x, its, scale=scale)  # type: ignore[arg-type]
            assert got.block == its
            assert same_bits(got.data, want.data)
            assert same_bits(got.scale, want.scale)
            assert (got.data.stride(), got.scale.stride()) == (want.data.stride(), want.scale.stride())


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", [b for b in BLOCKS if is_square(b)], ids=str)
def test_dual_of_a_square_block_is_one_result_along_either_axis(block: Block, scale: str) -> None:
    """Row-major, then column-major, whatever the strides of `x`: as `quantize` stores a matrix that lies so."""
    for x in (torch.randn(77, 200), torch.randn(200, 77).mT, torch.randn(2, 130, 300)):
        row, col = fp8fn.quantize_dual(x, block, scale=scale)  # type: ignore[arg-type]
        as_rows = fp8fn.quantize(x.contiguous(), block, scale=scale)  # type: ignore[arg-type]
        as_columns = fp8fn.quantize(x.mT.contiguous().mT, block, scale=scale)  # type: ignore[arg-type]
        for got, want in ((row, as_rows), (col, as_columns)):
            assert got.block == block
            assert same_bits(got.data, want.data)
            assert same_bits(got.scale, want.scale)
            assert (got.data.stride(), got.scale.stride()) == (want.data.stride(), want.scale.stride())
