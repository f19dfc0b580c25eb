"""The kernels of batch-invariant products: one order of sums for every number of rows, and equal bits of each row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import mm_a16w8, scaled_mm
from fp8fn.ops.cuda.gemm import mm_a16w8 as many
from fp8fn.ops.cuda.gemm import parts_a16w8, splitk_a16w8
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.gemm.splitk_a16w8 import SplitKConfig, with_stages
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.cuda.operands import map_fault
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.layout import Block
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.targets import SM89, SM90, SM100, Target
from fp8fn.ops.tuning.model import alike
from fp8fn.ops.tuning.problem import Problem, empty_product, problem_of
from fp8fn.ops.tuning.weight import WeightProblem
from support.accuracy import snr
from support.compilers import instructions, needs_nvrtc
from support.cuda_emulator import emulate, needs_compiler
from support.gpu import FEW
from support.operands.weights import assert_right, operand, operands
from support.products import scaled_product, weight_product

WIDTHS = ((6144, 4096), (4096, 14336), (128256, 4096), (72, 768), (64, 100))


HOPPER = WIDTHS[:4]  # lines of K=100 begin at no multiples of 16 bytes, and Triton's kernel takes them
SIZES = (1, 2, 9, 16, 17, 33, 64, 65, 128, 129, 256, 512, 4096)
CONFIG = SplitKConfig(64, 4, 0, 1, 1, LATE=True)


@pytest.mark.parametrize("target", [SM89, SM100], ids=lambda target: target.name)
def test_rows_do_not_decide(target: Target) -> None:
    for n, k in WIDTHS:
        weights = [replace(operands(m, n, k), target=target) for m in SIZES]
        chosen = {(choice.name, choice.config) for choice in map(mm_a16w8.MM_A16W8_INVARIANT.choose, weights)}
        assert len(chosen) == 1
        products = [empty_product(Problem(m, n, k), "meta", target) for m in SIZES]
        found = {(choice.name, choice.config) for choice in map(scaled_mm.SCALED_MM_INVARIANT.choose, products)}
        assert len(found) == 1


@pytest.mark.parametrize("block", [(128, 128), (128, 1), (-1, 1)], ids=str)
def test_rows_decide_about_the_tile_and_not_about_k_on_hopper(block: Block) -> None:
    """K is divided alike for all rows, which split rows are for any number of them."""
    for n, k in ((6144, 4096), (4096, 14336), (4096, 4096), (28672, 4096), (512, 16384), (1024, 3424)):
        problems = [WeightProblem(m, n, k, block=block, constant=constant) for m in SIZES for constant in (False, True)]
        choices = [mm_a16w8.MM_A16W8_INVARIANT.choose(problem.product()) for problem in problems]
        assert {(choice.name, choice.config.SPLIT) for choice in choices} in ({("cuda_parts", i)} for i in (1, 2, 4))
        assert choices[0].config.BM == 64 < choices[-1].config.BM


@pytest.mark.parametrize(
    ("n", "k", "dtype", "out"),
    [
        (8192, 1008, torch.bfloat16, torch.bfloat16),
        (3408, 1024, torch.bfloat16, torch.bfloat16),
        (4096, 4096, torch.float16, torch.float16),
        (4096, 4096, torch.bfloat16, torch.float32),
    ],
)
def test_products_whose_rows_are_not_split_on_hopper(n: int, k: int, dtype: torch.dtype, out: torch.dtype) -> None:
    """The type and the weight decide, also for a number of rows whose own fastest kernel splits them."""
    for m in (1, 64, 4096):
        product = WeightProblem(m, n, k, x_dtype=dtype).product()
        product = replace(product, out=torch.empty(m, n, dtype=out, device="meta"))
        assert mm_a16w8.MM_A16W8_INVARIANT.choose(product).name in ("cuda_splitk", "cuda_many")


@pytest.mark.parametrize("cores", [1, 2, 3, 16])
def test_few_multiprocessors_share_k_among_as_many_blocks_on_hopper(cores: int) -> None:
    """As MPS leaves them to a process: a cluster of more blocks could not start."""
    for m in SIZES:
        for n, k in ((1024, 8192), (8, 1 << 20)):
            config = parts_a16w8.configure_invariant(WeightProblem(m, n, k, cores=cores).product())
            assert cores >= config.SPLIT


@pytest.mark.parametrize("block", [(128, 128), (128, 1), (-1, 1)], ids=str)
def test_rows_of_16_bits_divide_k_alike_on_hopper(block: Block) -> None:
    """Where K is in one part, `cuda_many` promotes in the same order."""
    for n, k in (*HOPPER, (4096, 4096), (28672, 4096), (512, 16384)):
        problems = [
            WeightProblem(m, n, k, block=block, constant=constant, x_dtype=torch.float16)
            for m in SIZES
            for constant in (False, True)
        ]
        choices = [mm_a16w8.MM_A16W8_INVARIANT.choose(problem.product()) for problem in problems]
        clusters = {choice.config.CLUSTER for choice in choices if choice.name == "cuda_splitk"}
        assert len(clusters) == 1, (n, k)
        for problem, choice in zip(problems, choices, strict=True):
            if choice.name == "cuda_splitk":
                tile = 16 * -(-problem.m // 16)
                assert min(ceil_power_of_two(tile), 128) == choice.config.ROWS
                assert choice.config.STAGES >= 2
            else:
                assert choice.name == "cuda_many"
                assert clusters == {1}
                assert block != (-1, 1)  # products with one scale for all of K stay in the tensor core's accumulator
                assert (choice.config.BM, choice.config.K_PARTS) == (128, 1)


@pytest.mark.parametrize("kinds", [("VECTOR", "BLOCK"), ("VECTOR", "VECTOR"), ("LINE", "LINE"), ("WHOLE", "WHOLE")])
def test_two_operands_divide_k_alike_on_hopper(kinds: tuple[str, str]) -> None:
    for n, k in HOPPER:
        problems = [Problem(m, n, k, *kinds) for m in SIZES]
        choices = [scaled_mm.SCALED_MM_INVARIANT.choose(empty_product(each, "meta", SM90)) for each in problems]
        splits = {choice.config.SPLIT for choice in choices}
        assert len(splits) == len({choice.name for choice in choices}) == 1
        assert (n, k) != (4096, 14336) or splits < {2, 4}
        assert n < 8192 or splits == {1}
        if kinds[0] != "VECTOR":  # PROMOTE K tiles a promotion
            assert {(choice.config.DEPTH, choice.config.PROMOTE) for choice in choices} == {(2, 4)}
        if n > 4096:
            assert choices[0].config.BM == 64 < choices[-1].config.BM


def _rows_of(k: int) -> list[Tensor]:
    """Rows of K elements as they may lie, of which TMA reads some in place."""
    memory = torch.randn(max(300, k), 5, 2 * k + 8).bfloat16()
    return [
        memory[:1, 0, :k].contiguous(), memory[:2, 0, :k].contiguous(), memory[:3, 0, 1 : k + 1],
        memory[:3, 0, : 2 * k : 2], memory[:k, 0, :1].mT, memory[:1, 0, :k].expand(9, k), memory[0, :, :k],
        memory[:130, 1:, :k], memory[:2, 1:, :k], memory[:, 1:, 3 : k + 3], memory[:1, :1, :k].expand(140, 3, k),
    ]  # fmt: skip


def _settled(given: WeightProduct) -> WeightProduct:
    """The product with the rows that its kernel is given: the same values, which are settled once."""
    settled = mm_a16w8.MM_A16W8_INVARIANT.settled(given)
    if settled is None:
        return given
    assert settled[0] is not None
    assert torch.equal(settled[0], given.x)
    copied = replace(given, x=settled[0])
    assert mm_a16w8.MM_A16W8_INVARIANT.settled(copied) is None
    return copied


@pytest.mark.parametrize("k", [100, 104, 256])
@pytest.mark.parametrize("n", [1, 72])
def test_where_rows_lie_does_not_decide_on_hopper(n: int, k: int) -> None:
    """A weight of any K, as `quantize` lays it, has one kernel, which is given no rows that TMA can't read."""
    w = fp8fn.quantize(torch.randn(n, k).mT, (128, 128))
    for x in _rows_of(k):
        given = weight_product(x, w, torch.empty(*x.shape[:-1], n, dtype=torch.bfloat16))
        given = _settled(given)
        choice = mm_a16w8.MM_A16W8_INVARIANT.choose(given)
        assert choice.name == "cuda_splitk", (x.shape, x.stride(), choice.refused)
        (launch,) = choice.plan(given)
        assert isinstance(launch, CudaLaunch)
        for name, arg in launch.args.items():
            assert not isinstance(arg, TensorMap) or map_fault(arg.tensor) is None, (name, x.shape, x.stride())


@pytest.mark.parametrize("k", [1024, 1032])
@pytest.mark.parametrize("n", [3408, 4096])
def test_where_rows_lie_does_not_decide_about_parts_on_hopper(n: int, k: int) -> None:
    """Rows that the kernel can't read are copied, and matrices of rows become one, unless each has its own bias."""
    w = fp8fn.quantize(torch.randn(n, k).mT, (128, 128))
    served = n * k >= 3_500_000
    for x in _rows_of(k):
        for bias in (None, torch.randn(n), torch.randn(x.shape[0], n))[: x.ndim]:
            given = weight_product(x, w, torch.empty(*x.shape[:-1], n, dtype=torch.bfloat16), bias=bias)
            choice = mm_a16w8.MM_A16W8_INVARIANT.choose(_settled(given).as_matrix())
            by_parts = served and (bias is None or bias.ndim == 1)
            assert choice.name == ("cuda_parts" if by_parts else "cuda_splitk"), (x.shape, x.stride(), choice.refused)


def test_many_matrices_of_rows_are_copied_into_one_on_hopper() -> None:
    """A grid has fewer than 65536 batches."""
    w = fp8fn.quantize(torch.randn(8, 16).mT, (128, 128))
    x = torch.randn(1 << 16, 3, 16).bfloat16()[:, :2]
    given = weight_product(x, w, torch.empty(*x.shape[:-1], 8, dtype=torch.bfloat16))
    settled = mm_a16w8.MM_A16W8_INVARIANT.settled(given)
    assert settled is not None
    assert settled[0] is not None
    assert mm_a16w8.MM_A16W8_INVARIANT.choose(replace(given, x=settled[0])).name == "cuda_splitk"


@pytest.mark.parametrize("k", [100, 256])
@pytest.mark.parametrize("block", [(1, 128), (1, -1)], ids=str)
def test_where_fp8_rows_lie_does_not_decide_on_hopper(block: Block, k: int) -> None:
    """Rows of a caller's own quantizer: any number of them has the kernel of those that `quantize` makes."""
    b = fp8fn.quantize(torch.randn(72, k).mT, (128, 128) if block[1] == 128 else (-1, 1))
    rows = fp8fn.quantize(torch.randn(300, k), block).to("meta")
    data = rows.data.contiguous()
    for m in (1, 2, 5, 300):
        for scale in (rows.scale, rows.scale.contiguous(), rows.scale.repeat(2, 2)[::2, : rows.scale.shape[1]]):
            for own in (rows.data, data, data.view(-1)[:-k].view(-1, k)):
                a = ScaledTensor(own[:m], scale[: min(m, len(own))], block)
                given = scaled_product(a, b.to("meta"), torch.empty(len(a.data), 72, device="meta"), SM90)
                settled = scaled_mm.SCALED_MM_INVARIANT.settled(given)
                if settled is not None:
                    assert settled[0] is not None
                    assert settled[1] is not None
                    assert (settled[0].shape, settled[1].shape) == (a.data.shape, a.scale.shape)
                    given = replace(given, a=Quantized(settled[0], settled[1], block))
                    assert scaled_mm.SCALED_MM_INVARIANT.settled(given) is None
                choice = scaled_mm.SCALED_MM_INVARIANT.choose(given)
                assert choice.name == "cuda", (m, a.data.stride(), a.scale.stride(), choice.refused)


@needs_nvrtc
@pytest.mark.parametrize("block", [(128, 128), (128, 1), (-1, 1)], ids=str)
@pytest.mark.parametrize("m", [16, 128])
def test_tiles_without_a_measured_configuration_spill_nothing(m: int, block: Block) -> None:
    product = WeightProblem(m, 4096, 4096, block=block, constant=True).product()
    config = splitk_a16w8.configure_invariant(product)
    found = config.ROWS, config.CLUSTER
    assert found == (m, 2)
    assert splitk_a16w8.plan(product, config)[0].resources().spills == 0


@needs_nvrtc
@pytest.mark.parametrize(
    ("kinds", "split"),
    [(("LINE", "LINE"), 1), (("LINE", "WHOLE"), 1), (("WHOLE", "WHOLE"), 2), (("VECTOR", "BLOCK"), 1)],
)
def test_a_bias_is_added_in_one_rounding_in_each_tile(kinds: tuple[str, str], split: int, tmp_path: Path) -> None:
    """The compiler contracted some of a tile's products with scales and left others, which tile by tile differed."""

    def additions(m: int, tile: ScaledMmConfig, added: bool) -> int:
        product = empty_product(Problem(m, 4096, 4096, *kinds), "meta", SM90)
        product = replace(product, bias=torch.empty(4096, dtype=torch.bfloat16, device="meta") if added else None)
        sass = instructions(scaled_mm.cuda.plan(product, tile)[0].compile().cubin, tmp_path)
        return sum(" FADD" in f" {text}" for _, text in sass)

    for tile in alike(Problem(256, 4096, 4096, *kinds), split)[-2:]:
        for m in (64, 4096):
            assert additions(m, tile, added=True) == additions(m, tile, added=False), (str(tile), m)


@needs_compiler
@pytest.mark.parametrize(("n", "k", "cluster"), [(72, 768, 3), (136, 600, 1)])
@pytest.mark.parametrize("block", [(128, 128), (128, 1)], ids=str)
def test_a_row_has_the_same_bits_in_cuda(n: int, k: int, cluster: int, block: Block) -> None:
    """In tiles of any height, at any place of them, and in the kernel of many rows where K is in one part."""
    x, w = torch.randn(150, k).bfloat16(), operand(k, n, block)

    def product(x: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(x), n, dtype=dtype)
        given = weight_product(x, w, out)
        if isinstance(config, SplitKConfig):
            assert splitk_a16w8.accepts_invariant(given) is None
            emulate(splitk_a16w8.plan(given, config)[0])
        else:
            assert many.accepts(given) is None
            emulate(many.plan(given, config)[0])
        return out

    def tile(rows: int) -> SplitKConfig:
        return with_stages(replace(CONFIG, ROWS=rows, CLUSTER=cluster), k, block)

    whole = product(x, tile(128), torch.float32)
    assert_right(whole, x, w)
    for start, end, rows in ((0, 1, 16), (7, 24, 32), (11, 75, 64), (0, 150, 64), (149, 150, 16), (20, 90, 128)):
        assert torch.equal(product(x[start:end], tile(rows), torch.float32), whole[start:end]), (start, end, rows)
    if cluster == 1:
        config = many.configure_invariant(weight_product(x, w, torch.empty(150, n)))
        assert torch.equal(product(x, config, torch.bfloat16), whole.bfloat16())


@needs_compiler
@pytest.mark.parametrize(
    ("split", "block"),
    [(split, block) for split in (1, 2) for block in ((128, 128), (128, 1), (-1, 1))] + [(4, (128, 128))],
)
def test_a_row_that_was_split_has_the_same_bits_in_cuda(split: int, block: Block) -> None:
    """In every tile that divides K alike, of all rows and of a few."""
    x, w, bias = torch.randn(270, 1032).bfloat16(), operand(1032, 136, block), torch.randn(136)

    def product(x: Tensor, config: Any) -> Tensor:
        out = torch.empty(len(x), 136)
        for launch in parts_a16w8.plan(weight_product(x, w, out, FEW, bias=bias), config):
            emulate(launch)
        return out

    whole = product(x, ScaledMmConfig(MATH=1, BN=64, SPLIT=split))
    assert_right(whole, x, w, bias)
    for i, tile in enumerate(parts_a16w8.TILES):
        if split == 1 or parts_a16w8.shares_k(tile):
            rows = (slice(0, 270), slice(3, 4), slice(8, 150))[i % 3]
            assert torch.equal(product(x[rows], replace(tile, SPLIT=split)), whole[rows]), (tile, rows)


@needs_compiler
@pytest.mark.parametrize("blocks", [((1, 128), (128, 128)), ((1, -1), (1, -1))], ids=["blocks", "rows"])
@pytest.mark.parametrize("split", [1, 2])
def test_a_row_of_two_operands_has_the_same_bits_in_cuda(blocks: tuple[Block, Block], split: int) -> None:
    """In every tile that divides K alike, of all rows and of a few."""
    a, b = fp8fn.quantize(torch.randn(136, 1312), blocks[0]), fp8fn.quantize(torch.randn(136, 1312), blocks[1]).mT

    def product(rows: slice, config: Any) -> Tensor:
        part = ScaledTensor(a.data[rows], _tma_scales(a.scale[rows]), a.block)
        out = torch.empty(len(part.data), 136)
        given = scaled_product(part, b, out, FEW)
        assert scaled_mm.cuda.accepts(given) is None
        emulate(scaled_mm.cuda.plan(given, config)[0])
        return out

    configs = alike(problem_of(scaled_product(a, b, torch.empty(136, 136), FEW)), split)
    assert len({(config.BM, config.BN) for config in configs}) >= (6 if split == 1 else 4)
    whole = product(slice(0, 136), configs[0])
    assert snr(whole, a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double()) > 110
    for i, config in enumerate(configs):
        rows = (slice(0, 136), slice(0, 1), slice(8, 108))[i % 3]
        assert torch.equal(product(rows, config), whole[rows]), (config, rows)


def _tma_scales(scale: Tensor) -> Tensor:
    """A copy whose columns begin at multiples of 16 bytes, as a quantizer's do."""
    rows, columns = scale.shape
    return torch.empty_strided((rows, columns), (1, -(-rows // 4) * 4), dtype=scale.dtype).copy_(scale)


def test_a_row_has_the_same_bits_in_triton() -> None:
    """Rows at the same places of their tiles: the interpreter multiplies tiles by NumPy, whose sums places decide."""
    x, w = torch.randn(150, 300).bfloat16(), operand(300, 72, (128, 128))
    kernel = mm_a16w8.MM_A16W8_INVARIANT.kernels[-1]

    def product(x: Tensor) -> Tensor:
        out = torch.empty(len(x), 72)
        given = weight_product(x, w, out, SM89)
        for launch in kernel.plan(given, kernel.configure(given)):
            launch.interpret()
        return out

    whole = product(x)
    assert_right(whole, x, w)
    for start, end in ((0, 1), (0, 24), (64, 70), (64, 150)):
        assert torch.equal(product(x[start:end]), whole[start:end])


@pytest.mark.gpu
@pytest.mark.parametrize("prequant", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (128, 1), (-1, 1)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 512), (4096, 14336), (72, 768), (72, 100)])
def test_each_number_of_rows_gives_the_same_bits_on_a_gpu(n: int, k: int, block: Block, prequant: bool) -> None:
    """1 to 256 rows, and more, at the start and at the end of 4500."""
    x = torch.randn(4500, k, device="cuda").bfloat16()
    w = fp8fn.quantize(torch.randn(n, k, device="cuda").mT, block)

    def product(x: Tensor) -> Tensor:
        return fp8fn.gemm(x, w, recipe=fp8fn.Recipe(batch_invariant=True), prequant=prequant)

    whole = product(x)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for m in (*range(1, 257), 300, 512, 1000, 2048):
        differing += (product(x[:m]).view(torch.int16) != whole[:m].view(torch.int16)).sum()
        differing += (product(x[-m:]).view(torch.int16) != whole[-m:].view(torch.int16)).sum()
    assert int(differing) == 0
    exact = x[:64].double() @ w.dequantize(torch.float32).double()
    assert snr(whole[:64], exact) > (28 if prequant else 45)
