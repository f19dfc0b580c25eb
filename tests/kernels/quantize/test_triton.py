"""The Triton quantizers, interpreted on the CPU, against the definition: every byte and every scale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.far import FAR, far

pytest.importorskip("triton")

from fp8fn.ops.formats import FP8_DTYPES, SCALE_FORMATS
from fp8fn.ops.layout import BLOCKS, Block, contracts_rows, empty_data, empty_scale, swap, turned
from fp8fn.ops.operands import Quantized, empty_dual
from fp8fn.ops.quantize import BESIDE_SQUARE, SQUARE
from fp8fn.ops.reference.quantize import quantize
from fp8fn.ops.targets import GFX950, SM90, SM120, Target
from fp8fn.ops.triton import amax
from fp8fn.ops.triton.quantize import BlockTile
from fp8fn.ops.triton.quantize import plan_quantize as plan
from support.accuracy import assert_same_bits
from support.compilers import assert_no_spills
from support.operands.values import HARD, random
from support.quantizers import plan_quantize, plan_quantize_dual, quantization, tensors

E4M3 = torch.float8_e4m3fn


def interpreted(x: Tensor, block: Block, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    data, scales = empty_data(x, block, dtype), empty_scale(x, block, scale)
    for launch in plan_quantize(x, data, scales, block, scale, SM90):
        launch.interpret()
    return data, scales


def interpreted_dual(
    x: Tensor, block: Block, dtype: torch.dtype, scale: str, dual_block: Block | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outs = empty_dual(x, block, dtype, scale, dual_block)
    plan_quantize_dual(x, outs, block, scale, SM90, dual_block=dual_block).interpret()
    return outs


def assert_equals_reference(x: Tensor, block: Block, dtype: torch.dtype, scale: str) -> None:
    for actual, expected in zip(interpreted(x, block, dtype, scale), quantize(x, block, dtype, scale), strict=True):
        assert_same_bits(actual, expected)


def assert_dual_equals_reference(
    x: Tensor, block: Block, dtype: torch.dtype, scale: str, dual_block: Block | None = None
) -> None:
    expected = (*quantize(x, block, dtype, scale), *quantize(x, dual_block or swap(block), dtype, scale))
    outs = interpreted_dual(x, block, dtype, scale, dual_block)
    for i, (actual, wanted) in enumerate(zip(outs, expected, strict=True)):
        if i >= 2 and dual_block is not None:  # `quantize` stores a square block as its input lies
            wanted = turned(wanted, column_major=not contracts_rows(block))
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_format(block: Block, dtype: torch.dtype, scale: str) -> None:
    assert_equals_reference(random(127, 129), block, dtype, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (128, 256), (2, 5, 130), (3, 1, 33)], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_shape(block: Block, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_equals_reference(random(*shape, dtype=dtype), block, E4M3, "fp32")


VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: random(200, 72).mT,
    "sliced": lambda: random(90, 300)[3:77, 5:271],
    "strided": lambda: random(100, 280)[::2, ::2],
    "batch transposed": lambda: random(3, 140, 36).mT,
    "batch inside": lambda: random(40, 3, 140).transpose(0, 1),
    "broadcast": lambda: random(1, 140).expand(50, 140),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_stride(block: Block, view: str) -> None:
    assert_equals_reference(VIEWS[view](), block, E4M3, "fp32")


@pytest.mark.parametrize("values", HARD)
@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, -1), (-1, -1), (1, 32)], ids=str)
def test_hard_values(block: Block, scale: str, values: str) -> None:
    for dtype in (E4M3, torch.float8_e5m2fnuz):
        assert_equals_reference(HARD[values](), block, dtype, scale)


@pytest.mark.parametrize("values", HARD)
@pytest.mark.parametrize("block", [(1, 128), (1, 32)], ids=str)
def test_hard_values_dual(block: Block, values: str) -> None:
    assert_dual_equals_reference(HARD[values](), block, E4M3, "e8m0" if block == (1, 32) else "fp32")


@pytest.mark.parametrize("block", BESIDE_SQUARE, ids=str)
def test_dual_beside_a_square_block(block: Block) -> None:
    """Hard values, every stride, every format and every shape."""
    for x in (*(make() for make in HARD.values()), *(make() for make in VIEWS.values())):
        assert_dual_equals_reference(x, block, E4M3, "fp32", SQUARE)
    for dtype, scale in zip(FP8_DTYPES, SCALE_FORMATS, strict=True):
        assert_dual_equals_reference(random(127, 129), block, dtype, scale, SQUARE)
    for shape in ((1, 1), (3, 300), (128, 256), (2, 5, 130)):
        assert_dual_equals_reference(random(*shape), block, E4M3, "pow2", SQUARE)


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("block", [(1, 128), (1, 32)], ids=str)
def test_dual_every_format(block: Block, dtype: torch.dtype, scale: str) -> None:
    assert_dual_equals_reference(random(127, 129), block, dtype, scale)


@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (128, 256), (2, 5, 130)], ids=str)
@pytest.mark.parametrize("block", [(1, 128), (1, 32)], ids=str)
def test_dual_every_shape(block: Block, shape: tuple[int, ...]) -> None:
    assert_dual_equals_reference(random(*shape), block, E4M3, "pow2")


@pytest.mark.parametrize("view", VIEWS)
def test_dual_every_stride(view: str) -> None:
    assert_dual_equals_reference(VIEWS[view](), (1, 128), E4M3, "fp32")


@pytest.mark.parametrize("tile", [BlockTile(1, 64, 4), BlockTile(4, 512, 4), BlockTile(16, 16, 4)], ids=str)
@pytest.mark.parametrize("block", [(1, -1), (-1, -1)], ids=str)
def test_whole_axes_in_any_tile(block: Block, tile: BlockTile) -> None:
    x = random(33, 300)
    data, scales = empty_data(x, block, E4M3), empty_scale(x, block, "fp32")
    for launch in plan_quantize(x, data, scales, block, "fp32", SM90, tile):
        launch.interpret()
    expected, expected_scales = quantize(x, block, E4M3, "fp32")
    assert_same_bits(data, expected)
    assert_same_bits(scales, expected_scales)


def test_one_read_and_as_few_launches_as_the_block_allows() -> None:
    x = random(256, 384)
    for block in BLOCKS:
        launches = plan_quantize(x, empty_data(x, block, E4M3), empty_scale(x, block, "fp32"), block, "fp32", SM90)
        assert len(launches) == (2 if block == (-1, -1) else 1)


def test_parts_of_long_rows_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amax, "_ROW_PARTS", 4)
    q = quantization(random(4099, 5), (-1, 1))
    launches = plan(q, in_parts=True)
    assert (launches[0].constexprs["STRIP"], launches[0].args["strips"]) == (2048, 3)
    for launch in launches:
        launch.interpret()
    for actual, expected in zip(tensors(q), quantize(q.x, q.block, E4M3, "fp32"), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("shape", [(8192, 4096), (131072, 130), (10**6, 67)], ids=str)
@pytest.mark.parametrize("target", [SM90, SM120, GFX950], ids=lambda target: target.name)
def test_rows_of_any_length_in_parts_spill_nothing(target: Target, shape: tuple[int, int]) -> None:
    """With a part for each strip of 1024 columns the last one spilled 1444 registers on sm90."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    launches = plan(quantization(x, (-1, 1), target=target))
    assert [launch.name for launch in launches] == ["partial_amax_rows", "quantize_parts_of_rows"]
    for launch in launches:
        assert_no_spills(launch.resources(), target)


def test_short_columns_are_read_once() -> None:
    for rows, names in ((256, ["quantize_rows"]), (257, ["partial_amax_rows", "quantize_parts_of_rows"])):
        x = torch.empty(rows, 2**17, dtype=torch.bfloat16, device="meta")
        assert [launch.name for launch in plan(quantization(x, (-1, 1)))] == names


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4)], ids=str)
def test_an_empty_tensor_launches_nothing(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert plan_quantize(x, empty_data(x, (1, 128), E4M3), torch.empty(0), (1, 128), "fp32", SM90) == ()


@pytest.mark.parametrize("rows", [2**15, 2**17])
def test_offsets_are_wide_only_where_they_must_be(rows: int) -> None:
    x = torch.empty(rows, 2**15, dtype=torch.bfloat16, device="meta")
    for block in BLOCKS:
        data, scales = empty_data(x, block, E4M3), empty_scale(x, block, "fp32")
        for launch in plan_quantize(x, data, scales, block, "fp32", SM90):
            assert launch.constexprs["WIDE"] is (rows == 2**17)
    # Few elements, far apart.
    apart = torch.empty(2**17, 2**17, device="meta")[:: 2**16, :128]
    data, scales = empty_data(apart, (1, 128), E4M3), empty_scale(apart, (1, 128), "fp32")
    assert plan_quantize(apart, data, scales, (1, 128), "fp32", SM90)[0].constexprs["WIDE"] is True


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_wide_offsets_address_the_same_elements(block: Block) -> None:
    x = random(70, 200)
    data, scales = empty_data(x, block, E4M3), empty_scale(x, block, "fp32")
    for launch in plan_quantize(x, data, scales, block, "fp32", SM90):
        launch.constexprs["WIDE"] = True  # type: ignore[index]
        launch.interpret()
    expected, expected_scales = quantize(x, block, E4M3, "fp32")
    assert_same_bits(data, expected)
    assert_same_bits(scales, expected_scales)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, -1), (-1, -1), "dual"], ids=str)
def test_wide_offsets_reach_elements_past_32_bits(block: Block | str, axis: int) -> None:
    """The third matrix, row or column of input and data lies more than 2**31 elements away."""
    x = random(3, 3, 3)
    strides = tuple(FAR if a == axis else stride for a, stride in enumerate(x.stride()))
    source = far(x, strides)
    orders: tuple[Block, ...] = ((1, 128), (128, 1)) if block == "dual" else (block,)  # type: ignore[assignment]
    out = []
    for order in orders:
        data, scales = empty_data(x, order, E4M3), empty_scale(x, order, "fp32")
        out += [far(torch.zeros(3, 3, 3, dtype=torch.uint8), strides).view(E4M3), torch.zeros_like(scales)]
        assert data.shape == out[-2].shape
    if block == "dual":
        launches = (plan_quantize_dual(source, out, (1, 128), "fp32", SM90),)
    else:
        launches = plan_quantize(source, *out, orders[0], "fp32", SM90)
    for launch in launches:
        assert launch.constexprs["WIDE"] is True
        launch.interpret()
    for order, data, scales in zip(orders, out[::2], out[1::2], strict=True):
        expected_data, expected_scales = quantize(x, order, E4M3, "fp32")
        assert torch.equal(data.view(torch.uint8), expected_data.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("axis", [0, 1])
def test_wide_offsets_of_parts_reach_elements_past_32_bits(axis: int) -> None:
    """The third matrix, or the third element of a column, lies more than 2**31 elements away."""
    x, block = random(3, 3, 3), (-1, 1)
    strides = tuple(FAR if a == axis else stride for a, stride in enumerate(x.stride()))
    data, scales = far(torch.zeros(3, 3, 3, dtype=torch.uint8), strides).view(E4M3), empty_scale(x, block, "fp32")
    launches = plan(quantization(far(x, strides), block, into=(Quantized(data, scales, block),)), in_parts=True)
    assert len(launches) == 2
    for launch in launches:
        assert launch.constexprs["WIDE"] is True
        launch.interpret()
    expected_data, expected_scales = quantize(x, block, E4M3, "fp32")
    assert torch.equal(data.view(torch.uint8), expected_data.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
