"""Products of each expert's first rows, as many as `counts` says: emulated, interpreted, their machine code, on a GPU.

The oracle is a float64 product of each expert's rows alone. Rows past a count are NaN in `a` and in its scales.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from random import Random
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn.ops.cuda.gemm import scaled_mm as products
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.scaled_grouped_mm import SCALED_GROUPED_MM
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, SM120, Target, native_e4m3
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scaled_grouped_mm import configured, plan_scaled_grouped_mm
from fp8fn.ops.tuning.model import SMALLEST, X, grouped_tiles, modelled
from fp8fn.ops.tuning.problem import problem_of
from support.accuracy import relative_error
from support.compilers import assert_no_spills, assert_well_compiled, instructions, needs_nvrtc
from support.cuda_emulator import emulate, needs_compiler
from support.gpu import FEW, nothing_waits

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

PAIRS: Final[dict[str, tuple[Block, Block, str]]] = {
    "rows": ((1, 128), (128, 128), "fp32"),
    "rows, columns' scales": ((1, 128), (128, 1), "fp32"),
    "rowwise": ((1, -1), (-1, 1), "fp32"),
    "tensorwise": ((-1, -1), (-1, -1), "fp32"),
    "mx": ((1, 32), (32, 1), "e8m0"),
}
HOPPER: Final = tuple(kind for kind in PAIRS if kind != "mx")
# Counts around the heights of tiles, of none and of all rows, and what is no count; with the room for rows.
COUNTS: Final[dict[str, tuple[list[int], int]]] = {
    "around 64": ([0, 1, 63, 64, 65], 130),
    "around 128": ([127, 128, 129, 0], 200),
    "all": ([130, 130], 130),
    "none": ([0, 0, 0], 70),
    "room of one row": ([1, 0, 1], 1),
    "out of range": ([-1, 71, 2**31 - 1, -(2**31), 5], 70),
}
each_count = pytest.mark.parametrize(("counts", "room"), COUNTS.values(), ids=COUNTS)


def int32(counts: list[int], device: Any = "cpu") -> Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=device)


class Experts:
    """Operands of a product, those past a count NaN; a bias for each expert; products without it and with."""

    def __init__(self, kind: str, counts: list[int], room: int, n: int, k: int, device: str = "cpu") -> None:
        a_block, b_block, scale = PAIRS[kind]
        self.room, self.rows = room, [min(max(count, 0), room) for count in counts]
        x = torch.randn(len(counts), room, k, device=device, dtype=BF16)
        w = torch.randn(len(counts), n, k, device=device, dtype=BF16).mT
        for expert, rows in enumerate(self.rows):
            # One scale of a whole matrix would see the NaN.
            x[expert, rows:] = torch.nan if a_block[0] == 1 else 0
        a, b = fp8fn.quantize(x, a_block, scale=scale), fp8fn.quantize(w, b_block, scale=scale)
        self.a, self.b = Quantized(a.data, a.scale, a_block), Quantized(b.data, b.scale, b_block)
        for expert, rows in enumerate(self.rows):
            a.data[expert, rows:].view(torch.uint8).fill_(0x7F)
        self.counts = int32(counts, device)
        self.bias = torch.randn(len(counts), n, device=device, dtype=BF16)
        left, right = (fp8fn.dequantize(q, FP32).double() for q in (a, b))
        self.want = torch.zeros(len(counts), room, n, device=device, dtype=torch.float64)
        self.biased = self.want.clone()
        for expert, rows in enumerate(self.rows):
            self.want[expert, :rows] = left[expert, :rows] @ right[expert]
            self.biased[expert, :rows] = self.want[expert, :rows] + self.bias[expert].double()

    def product(self, out: Tensor, target: Target, *, bias: bool = False, zeros: bool = True) -> ScaledProduct:
        return ScaledProduct(
            a=self.a, b=self.b, out=out, counts=self.counts, zeros=zeros, bias=self.bias if bias else None,
            target=target,
        )  # fmt: skip

    def check(self, out: Tensor, bound: float, *, bias: bool = False, tile: int = 0) -> None:
        """`out` was NaN before. Rows past a count are zeros, or with a height of tiles NaN past the last one's."""
        want = self.biased if bias else self.want
        for expert, rows in enumerate(self.rows):
            assert rows == 0 or relative_error(out[expert, :rows], want[expert, :rows]) < bound
            written = min(-(-rows // tile) * tile, self.room) if tile else self.room
            assert not out[expert, rows:written].any()
            assert out[expert, written:].isnan().all()


def unwritten(shape: torch.Size, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def configs(kind: str, *, every: bool = False) -> tuple[ScaledMmConfig, ...]:
    """The tiles that may be chosen, or four of them."""
    found = grouped_tiles(problem_of(planned_product(kind)), jagged_m=True)
    return found if every else tuple(config for config in found if config in (X, SMALLEST)) + found[1:3]


# ---- in CUDA C++, emulated -------------------------------------------------------------------------------------------


@needs_compiler
@each_count
@pytest.mark.parametrize("kind", HOPPER)
def test_emulated(kind: str, counts: list[int], room: int) -> None:
    """With ragged N and K, in both orders of the threads; the emulator sees what lies outside of a tensor."""
    for i, config in enumerate(configs(kind)):
        n, dtype, bias = [(136, BF16, False), (77, FP32, True)][i % 2]
        of = Experts(kind, counts, room, n, 200)
        for zeros in (True, False):
            outs = []
            for backwards in (False, True):
                outs.append(unwritten(of.want.shape, dtype))
                product = of.product(outs[-1], FEW, bias=bias, zeros=zeros)
                assert products.accepts(product) is None
                emulate(products.plan(product, config)[0], backwards=backwards)
            of.check(outs[0], 1e-6 if dtype == FP32 else 2.5e-3, bias=bias, tile=0 if zeros else config.BM)
            assert torch.equal(outs[0].nan_to_num(7.0), outs[1].nan_to_num(7.0)), config


@needs_compiler
def test_many_experts_of_few_rows_emulated() -> None:
    counts = [Random(0).randrange(-1, 40) for _ in range(33)]
    of, out = Experts("rows", counts, 32, 72, 136), unwritten(torch.Size((33, 32, 72)), BF16)
    emulate(products.plan(of.product(out, FEW), SMALLEST)[0], seed=3)
    of.check(out, 2.5e-3)


# ---- in Triton, interpreted ------------------------------------------------------------------------------------------


@each_count
@pytest.mark.parametrize("kind", PAIRS)
def test_interpreted(kind: str, counts: list[int], room: int) -> None:
    of = Experts(kind, counts, room, 70, 200)
    for zeros, bias, target in ((True, True, SM90), (False, False, SM100)):
        out = unwritten(of.want.shape, FP32)
        (launch,) = plan_scaled_grouped_mm(
            of.product(out, target, bias=bias, zeros=zeros), GemmConfig(32, 64, 4, 2, GROUP=2)
        )
        launch.interpret()
        of.check(out, 1e-6, bias=bias, tile=0 if zeros else 32)


def test_wide_offsets_address_the_same_elements() -> None:
    of = Experts("rows", [30, 0, 70], 70, 70, 200)
    outs = []
    for wide in (False, True):
        outs.append(unwritten(of.want.shape, FP32))
        (launch,) = plan_scaled_grouped_mm(of.product(outs[-1], SM90), GemmConfig(32, 64, 4, 2, HALVES=True))
        launch.constexprs["WIDE"] = wide  # type: ignore[index]
        launch.interpret()
    assert torch.equal(*outs)


# ---- plans and machine code ------------------------------------------------------------------------------------------


def planned_product(
    kind: str, target: Target = SM90, *, experts: int = 8, room: int = 1000, n: int = 512, k: int = 1024,
    dtype: torch.dtype = BF16, bias: bool = False, zeros: bool = True,
) -> ScaledProduct:  # fmt: skip
    a_block, b_block, scale = PAIRS[kind]
    a, b = torch.empty(experts, room, k, device="meta"), torch.empty(experts, k, n, device="meta")
    fp8 = native_e4m3(target)
    return ScaledProduct(
        a=Quantized(empty_data(a, a_block, fp8), empty_scale(a, a_block, scale), a_block),
        b=Quantized(empty_data(b, b_block, fp8, True), empty_scale(b, b_block, scale, True), b_block),
        out=torch.empty(experts, room, n, device="meta", dtype=dtype),
        counts=torch.empty(experts, device="meta", dtype=torch.int32), zeros=zeros,
        bias=torch.empty(experts, n, device="meta", dtype=BF16) if bias else None, target=target,
    )  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("kind", HOPPER)
def test_no_tile_that_may_be_chosen_spills(kind: str) -> None:
    for config in configs(kind, every=True):
        for dtype, bias, n in ((BF16, False, 512), (FP32, True, 500)):
            used = products.plan(planned_product(kind, dtype=dtype, bias=bias, n=n), config)[0].resources()
            assert used.spills == 0, (config, dtype)
            assert used.shared <= 227 << 10


@needs_nvrtc
@pytest.mark.parametrize("zeros", [True, False])
def test_machine_code(zeros: bool, tmp_path: Any) -> None:
    """No wait is injected between products; whole tiles leave by bulk stores, and no store is left of single rows."""
    for config in (X, SMALLEST):
        (launch,) = products.plan(planned_product("rows", zeros=zeros), config)
        compiled = launch.compile(verbose=True)
        assert_well_compiled(compiled.log, launch.shared)
        sass = [text for _, text in instructions(compiled.cubin, tmp_path)]
        assert sum("QGMMA" in text for text in sass) >= 4
        assert any("UTMASTG" in text for text in sass)
        assert any("UTMALDG" in text for text in sass)
        assert not any(re.search(r"\bSTG?\.E\b", text) for text in sass)


def test_the_grid_is_no_larger_than_the_tiles() -> None:
    (few,) = products.plan(planned_product("rows", experts=2, room=100, n=256), X)
    assert few.grid == (2 * 1 * 2, 1, 1)
    (many,) = products.plan(planned_product("rows", experts=32, room=4096), X)
    assert many.grid == (132, 1, 1)


def test_the_room_for_rows_is_taken_to_be_full_by_a_sixteenth() -> None:
    """At DeepGEMM's own sizes: a decode step's few rows take low tiles, a room for many takes high ones."""
    few, many = (planned_product("rows", experts=32, room=room, n=4096, k=7168) for room in (128, 16384))
    assert modelled(few).BM == 64
    assert modelled(many).BM >= 128


@pytest.mark.parametrize(
    ("experts", "n", "rows", "tile"),
    [
        (6, 6144, 20, (64, 64)), (32, 6144, 20, (64, 128)), (6, 7168, 20, (64, 128)), (6, 4096, 64, (64, 64)),
        (32, 6144, 192, (128, 128)), (6, 4096, 1024, (128, 128)), (6, 4096, 65, (128, 128)),
        (32, 6144, None, (128, 128)), (32, 6144, 4096, (192, 128)),
    ],
)  # fmt: skip
def test_the_tile_by_the_rows_that_are_expected(experts: int, n: int, rows: int | None, tile: tuple[int, int]) -> None:
    """As tiles were timed on an H200."""
    of = replace(planned_product("rows", experts=experts, room=4096, n=n, k=4096), expected_rows=rows)
    config = modelled(of)
    assert tile == (config.BM, config.BN)


@pytest.mark.parametrize("kind", HOPPER)
def test_each_kind_of_scales_has_a_tile_for_each_number_of_rows(kind: str) -> None:
    for rows in (1, 64, 65, 1024, 1025, 2**40):
        of = replace(planned_product(kind, room=3000), expected_rows=rows)
        assert replace(modelled(of), GROUP=X.GROUP) in configs(kind, every=True)
        assert of.mean_rows == min(rows, 3000)


def test_triton_takes_the_rows_that_are_expected() -> None:
    few, many = (replace(planned_product("rows", SM89, room=4096), expected_rows=rows) for rows in (16, 2048))
    assert configured(few).BM < configured(many).BM


def test_what_is_chosen_and_how_it_is_told() -> None:
    """A launch says that it has counts, and binds them by their name."""
    (launch,) = products.plan(planned_product("rows"), X)
    assert "GROUPED=MASKED" in launch.describe()
    assert "ZEROS=1" in launch.describe()
    assert launch.binds["offsets"] == "counts"
    choice = SCALED_GROUPED_MM.choose(planned_product("mx", SM89))
    assert "triton" in choice.describe()
    (other,) = choice.plan(planned_product("mx", SM89))
    assert "MASKED=True" in other.describe()


def test_refusals() -> None:
    def refusal(**changed: Any) -> str:
        return str(products.accepts(replace(planned_product("rows"), **changed)))

    assert refusal() == "None"
    assert "not sm90" in refusal(target=GFX942)
    assert "counts has stride 2" in refusal(counts=torch.empty(16, device="meta", dtype=torch.int32)[::2])
    assert "bias" in refusal(bias=torch.empty(512, 8, device="meta", dtype=BF16).mT)
    assert "no pair" in str(products.accepts(replace(planned_product("rows"), a=planned_product("mx").a)))


@pytest.mark.parametrize("kind", ["rows", "rowwise", "mx"])
@pytest.mark.parametrize("target", [SM89, SM90, SM100, SM120, GFX942, GFX950], ids=lambda target: target.name)
def test_triton_compiles_without_spills(target: Target, kind: str) -> None:
    for room in (512, 4096):
        launch: TritonLaunch
        (launch,) = plan_scaled_grouped_mm(planned_product(kind, target, room=room, n=4096, k=2048))
        assert_no_spills(launch.resources(), target)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_count
@pytest.mark.parametrize("kind", HOPPER)
def test_products(kind: str, counts: list[int], room: int, hopper: Target) -> None:
    for k, n, dtype in ((300, 136, BF16), (256, 131, FP32), (1000, 512, FP16)):
        of = Experts(kind, counts, room, n, k, "cuda")
        for config in configs(kind, every=True):
            for bias, zeros in ((False, True), (True, True), (True, False)):
                out = unwritten(of.want.shape, dtype, "cuda")
                products.plan(of.product(out, hopper, bias=bias, zeros=zeros), config)[0].run()
                of.check(out, 4e-3, bias=bias, tile=0 if zeros else config.BM)


@pytest.mark.gpu
def test_deepgemms_sizes(hopper: Target) -> None:
    """32 experts with room for 4096 rows, of which some 20 are there."""
    random = Random(0)
    of = Experts("rows", [int(20 * random.uniform(0.7, 1.3)) for _ in range(32)], 4096, 2048, 4096, "cuda")
    args = (*of.a, *of.b, None, None, BF16, of.counts)
    of.check(torch.ops.fp8fn.scaled_grouped_mm(*args), 4e-3)
    fast = torch.ops.fp8fn.scaled_grouped_mm(*args, zeros=False)
    for expert, rows in enumerate(of.rows):
        assert relative_error(fast[expert, :rows], of.want[expert, :rows]) < 4e-3


@pytest.mark.gpu
def test_the_op_takes_the_kernel_in_cuda(hopper: Target, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 96, 256, device="cuda", dtype=BF16)
    w = torch.randn(4, 256, 384, device="cuda", dtype=BF16)
    with caplog.at_level(logging.DEBUG, "fp8fn"):
        fp8fn.grouped_gemm(x, w, counts=int32([10, 0, 96, 33], "cuda"))
    assert sum("GROUPED=MASKED" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.gpu
def test_a_graph_replays_with_other_counts(hopper: Target) -> None:
    x = torch.randn(5, 200, 256, device="cuda", dtype=BF16)
    w = torch.randn(5, 256, 384, device="cuda", dtype=BF16)
    counts = int32([200] * 5, "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            fp8fn.grouped_gemm(x, w, counts=counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8fn.grouped_gemm(x, w, counts=counts)
    random = Random(0)
    for _ in range(20):
        counts.copy_(int32([random.randrange(-2, 203) for _ in range(5)]))
        graph.replay()
        assert torch.equal(captured, fp8fn.grouped_gemm(x, w, counts=counts.clone()))


@pytest.mark.gpu
def test_nothing_waits_for_the_device(hopper: Target) -> None:
    x = torch.randn(5, 200, 256, device="cuda", dtype=BF16)
    w = torch.randn(5, 256, 384, device="cuda", dtype=BF16)
    counts = int32([3, 0, 200, 64, 1], "cuda")
    fp8fn.grouped_gemm(x, w, counts=counts)
    with nothing_waits():
        fp8fn.grouped_gemm(x, w, counts=counts)


@pytest.mark.gpu
def test_1000_runs_give_one_bit_pattern(hopper: Target) -> None:
    for room, k, n in ((200, 1024, 512), (4096, 512, 256)):
        of = Experts("rows", [1, 0, 150, 64, 99], room, n, k, "cuda")
        args = (*of.a, *of.b, None, None, BF16, of.counts)
        first = torch.ops.fp8fn.scaled_grouped_mm(*args)
        of.check(first, 4e-3)
        for _ in range(500):
            assert torch.equal(torch.ops.fp8fn.scaled_grouped_mm(*args), first)
