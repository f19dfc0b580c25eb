"""Values of Hopper's scaled product in CUDA C++: emulated on the CPU, and on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig, accepts, plan
from fp8fn.ops.cuda.runtime.launch import pointers
from fp8fn.ops.layout import matrix_strides
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.reference.quantize import quantize, spread
from fp8fn.ops.targets import SM90, Target
from support.accuracy import snr
from support.configs import KINDS, OTHER_PAIRS, SCALED_MM, VARIANTS, every_variant
from support.cuda_emulator import emulate, needs_compiler
from support.gpu import FEW, skip_below
from support.products import Parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Operands:
    """Quantized operands, their product in float64, and the kernel's between two guards; on the CPU it is emulated."""

    GUARD: Final = 512

    def __init__(
        self, kind: str, shape: tuple[int, int, int], target: Target, *, bias: torch.dtype | None = None,
        types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), a_batch: int | None = None, b_batch: int | None = None,
        device: str = "cuda",
    ) -> None:  # fmt: skip
        m, n, k = shape
        self.device, self.target, (self.a_block, self.b_block) = device, target, {**KINDS, **OTHER_PAIRS}[kind]
        lead_a, lead_b = (() if size is None else (size,) for size in (a_batch, b_batch))
        of_a = torch.randn(*lead_a, m, k, device=self.device)
        # Column-major, as a weight's transpose is, for a square block's data to be so.
        of_b = torch.randn(*lead_b, n, k, device=self.device).mT
        self.a, self.a_scale = quantize(of_a, self.a_block, types[0], "fp32")
        self.b, self.b_scale = quantize(of_b, self.b_block, types[1], "fp32")
        self.along_k()
        self.bias = None if bias is None else torch.randn(n, device=self.device).to(bias)

    def along_k(self) -> None:
        """K contiguous in both, with rows of a multiple of 16 bytes, as `scaled_mm` makes them."""
        for name, column_major in (("a", False), ("b", True)):
            x: Tensor = getattr(self, name)
            strides = matrix_strides(x.shape, column_major, 16)
            data = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=self.device).view(torch.uint8)
            setattr(self, name, data.copy_(x.view(torch.uint8)).view(x.dtype))

    def expected(self) -> Tensor:
        a = self.a.double() * spread(self.a_scale.double(), self.a.shape, self.a_block)
        b = self.b.double() * spread(self.b_scale.double(), self.b.shape, self.b_block)
        out = a @ b
        return out if self.bias is None else out + self.bias.double()

    def magnitude(self) -> Tensor:
        """`|A| @ |B|`, to which the error of every element is proportional."""
        a = self.a.double().abs() * spread(self.a_scale.double(), self.a.shape, self.a_block)
        b = self.b.double().abs() * spread(self.b_scale.double(), self.b.shape, self.b_block)
        return a @ b

    def into(self, out: Tensor) -> ScaledProduct:
        parts = Parts(self.a, self.a_scale, self.a_block, self.b, self.b_scale, self.b_block, self.bias, out)
        return parts.product(self.target)

    def product(
        self, config: ScaledMmConfig, dtype: torch.dtype = FP32, *, backwards: bool = False, seed: int = 0
    ) -> Tensor:
        """Into memory that was NaN before; what lies before and after the output must be as it was."""
        batch = self.a.shape[:-2] or self.b.shape[:-2]
        shape = (*batch, self.a.shape[-2], self.b.shape[-1])
        size = torch.Size(shape).numel()
        memory = torch.full((size + 2 * self.GUARD,), float("nan"), dtype=dtype, device=self.device)
        memory[: self.GUARD] = memory[self.GUARD + size :] = 7.0
        out = memory[self.GUARD : self.GUARD + size].view(shape)
        product = self.into(out)
        assert accepts(product) is None
        (launch,) = plan(product, config)
        if self.device == "cpu":
            emulate(launch, backwards=backwards, seed=seed)
        else:
            launch.run()
        assert (memory[: self.GUARD] == 7.0).all()
        assert (memory[self.GUARD + size :] == 7.0).all()
        return out


def assert_rounded(found: Tensor, wide: Tensor) -> None:
    """Half a unit in the last place, and some for a sum that the compiler fuses otherwise."""
    unit = {BF16: 2.0**-8, FP16: 2.0**-11}[found.dtype]
    least = 2.0**-25 if found.dtype == FP16 else 2.0**-134
    assert torch.isfinite(found).all()
    assert ((found.double() - wide.double()).abs() <= 1.01 * unit * wide.double().abs() + least).all()


# ---- in the emulator -------------------------------------------------------------------------------------------------


@needs_compiler
@every_variant
def test_every_configuration_emulated(config: str, kind: str) -> None:
    """Tiles that are whole, that are ragged, and more than two rows of them; in two orders of the threads."""
    chosen = SCALED_MM[config]
    for m, n, k in ((2 * chosen.BM + 9, chosen.BN + 24, 300), (1, 8, 1), (chosen.BM, chosen.BN, 256)):
        operands = Operands(kind, (m, n, k), FEW, device="cpu")
        wide = operands.product(chosen)
        assert snr(wide, operands.expected()) >= 110
        if kind == "forward":  # leaves through shared memory, by TMA where there are more than two rows of tiles
            rounded = operands.product(chosen, BF16)
            assert_rounded(rounded, wide)
            assert torch.equal(operands.product(chosen, BF16, backwards=True), rounded)


@needs_compiler
@pytest.mark.parametrize("config", ["128x128", "192x128", "64x64", "128x256 cluster"])
def test_scales_of_a_square_block_lie_either_way_emulated(config: str) -> None:
    """A weight's data is turned for the backward, and its scales are not (`fp8fn.weights.products`)."""
    for batch in (None, 2):
        operands = Operands("forward", (200, SCALED_MM[config].BN + 130, 400), FEW, b_batch=batch, device="cpu")
        expected, lies = operands.product(SCALED_MM[config], BF16), operands.b_scale.stride()
        operands.b_scale = operands.b_scale.contiguous()
        assert operands.b_scale.stride() != lies
        assert torch.equal(operands.product(SCALED_MM[config], BF16), expected)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_biases_and_batches_emulated(kind: str) -> None:
    for config, bias, (a_batch, b_batch), out in (
        (ScaledMmConfig(MATH=1, BN=64), BF16, (3, None), FP16), (ScaledMmConfig(BN=64), FP16, (None, 2), BF16),
        (ScaledMmConfig(MATH=1, BN=64, SPLIT=4), FP32, (2, 2), FP16),
    ):  # fmt: skip
        for n in (80, 77):  # 16 bytes of each row, and not
            operands = Operands(
                kind, (70, n, 385), FEW, bias=bias, types=(E4M3, E5M2), a_batch=a_batch, b_batch=b_batch, device="cpu"
            )
            wide = operands.product(config)
            for found, want in zip(wide, operands.expected(), strict=True):
                assert snr(found, want) >= 110
            assert_rounded(operands.product(config, out), wide)


@needs_compiler
@pytest.mark.parametrize("config", ["64x64", "128x128", "192x128", "split"])
def test_single_scales_of_many_k_blocks_and_of_many_tiles_emulated(config: str) -> None:
    """They come 32 at a time: more than lie in shared memory at once, a last run that is short, and runs of one."""
    chosen = SCALED_MM[config]
    for m, n, k in ((16, 24, 128 * 67 + 24), (3 * chosen.BM, 2 * chosen.BN, 100)):
        operands = Operands("forward", (m, n, k), FEW, device="cpu")
        operands.b_scale *= torch.rand_like(operands.b_scale) * 100  # none could stand for another
        wide = operands.product(chosen, seed=3)
        assert snr(wide, operands.expected()) >= 110


@needs_compiler
@pytest.mark.parametrize("kind", OTHER_PAIRS)
def test_every_other_pair_of_blocks_emulated(kind: str) -> None:
    """Runs of single scales that are filled anew and that are short, several rows of tiles, and a batch."""
    for config, shape, batch in (
        (ScaledMmConfig(MATH=1, BN=64), (200, 77, 128 * 67 + 24), None), (ScaledMmConfig(BN=64), (300, 80, 300), 2),
    ):  # fmt: skip
        operands = Operands(kind, shape, FEW, device="cpu", a_batch=batch)
        for scale in (operands.a_scale, operands.b_scale):
            scale *= 0.1 + torch.rand_like(scale) * 100  # none could stand for another
        assert snr(operands.product(config, seed=3), operands.expected()) >= 110


@needs_compiler
@pytest.mark.parametrize(
    "config",
    [
        ScaledMmConfig(MATH=3, DEPTH=1, CLUSTER=2, SHARE_B=False),
        ScaledMmConfig(GROUP=1, STAGES=2),
        *(ScaledMmConfig(SPLIT=s) for s in (2, 8)),
    ],
    ids=str,
)
def test_other_clusters_groups_stages_and_shares_of_k_emulated(config: ScaledMmConfig) -> None:
    for shape in ((400, 264, 300), (65, 77, 1)):
        operands = Operands("forward", shape, FEW, device="cpu")
        for backwards in (False, True):
            assert snr(operands.product(config, backwards=backwards), operands.expected()) >= 110


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_stages_that_are_filled_anew_emulated(kind: str) -> None:
    """One given back before its product has ended would be poison there."""
    operands = Operands(kind, (65, 77, 7 * 128), FEW, device="cpu")
    for config in (ScaledMmConfig(MATH=1, BN=64, STAGES=2), ScaledMmConfig(MATH=1, BN=64, STAGES=3, DEPTH=1)):
        for backwards in (False, True):
            assert snr(operands.product(config, backwards=backwards), operands.expected()) >= 110


@needs_compiler
@pytest.mark.parametrize("config", ["192x128", "128x256", "128x128", "64x64", "128x256 cluster", "split"])
def test_what_is_not_finite_stays_in_its_rows_and_columns_emulated(config: str) -> None:
    for kind in KINDS:
        operands = Operands(kind, (200, 136, 300), FEW, types=(E5M2, E4M3), device="cpu")
        operands.a.view(torch.uint8)[7, 299] = 0x7C  # Inf of e5m2
        operands.a.view(torch.uint8)[199, 0] = 0x7F
        operands.b.view(torch.uint8)[200, 135] = 0x7F
        finite = torch.isfinite(operands.product(SCALED_MM[config]))
        assert not finite[[7, 199]].any()
        assert not finite[:, 135].any()
        assert int(finite.sum()) == 198 * 135


@needs_compiler
def test_drawn_products_emulated() -> None:
    """Warps in a random order, shapes about the edges of tiles, every configuration, output, bias and batch."""

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(VARIANTS), st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(1, 700)),
        st.sampled_from([2, 132]), st.sampled_from([FP32, BF16, FP16]), st.sampled_from([None, BF16, FP32]),
        st.sampled_from([(None, None), (2, 2), (3, None), (None, 2)]), st.integers(1, 2**31),
    )  # fmt: skip
    def check(
        variant: tuple[str, str], shape: tuple[int, int, int], cores: int, out: torch.dtype, bias: torch.dtype | None,
        batches: tuple[int | None, int | None], seed: int,
    ) -> None:  # fmt: skip
        config, kind = variant
        target = replace(SM90, multiprocessors=cores)
        operands = Operands(kind, shape, target, bias=bias, a_batch=batches[0], b_batch=batches[1], device="cpu")
        found = operands.product(SCALED_MM[config], out, seed=seed).double()
        expected, magnitude = operands.expected(), operands.magnitude()
        unit = {FP32: 0, BF16: 2.0**-8, FP16: 2.0**-11}[out]
        assert ((found - expected).abs() <= unit * expected.abs() + 2.0**-20 * magnitude + 2.0**-22).all()

    check()


# ---- on a GPU --------------------------------------------------------------------------------------------------------

# M about the heights of tiles and instructions; N odd, even, of 16 bytes; K of one, an odd, an even number of blocks.
SHAPES: Final = (
    (1, 1, 1), (63, 65, 127), (64, 64, 128), (65, 1, 129), (127, 257, 256), (128, 136, 385), (129, 8, 512),
    (193, 200, 1000), (1, 392, 513), (400, 777, 640),
)  # fmt: skip


@pytest.mark.gpu
@every_variant
def test_values_of_every_configuration(config: str, kind: str, hopper: Target) -> None:
    for shape in SHAPES:
        operands = Operands(kind, shape, hopper)
        wide = operands.product(SCALED_MM[config])
        assert snr(wide, operands.expected()) >= 50, shape
        if kind == "forward" or shape[1] % 8 == 0:  # by ordinary stores, which are another kernel, in one kind only
            assert_rounded(operands.product(SCALED_MM[config], BF16), wide)


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["192x128", "128x256", "128x128", "64x64", "split"])
def test_values_in_fp16(config: str, hopper: Target) -> None:
    for shape in ((1, 1, 1), (193, 200, 1000), (65, 77, 385)):
        operands = Operands("forward", shape, hopper)
        assert_rounded(operands.product(SCALED_MM[config], FP16), operands.product(SCALED_MM[config]))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("config", ["192x128", "128x256", "64x64", "split"])
def test_bias(config: str, bias: torch.dtype, hopper: Target) -> None:
    for shape in ((65, 77, 385), (130, 264, 300)):
        operands = Operands("forward", shape, hopper, bias=bias)
        wide = operands.product(SCALED_MM[config])
        assert snr(wide, operands.expected()) >= 50
        assert_rounded(operands.product(SCALED_MM[config], BF16), wide)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", ["192x128", "128x256 cluster", "128x128", "split"])
def test_batches(config: str, kind: str, hopper: Target) -> None:
    for shape in ((1, 1, 1), (65, 77, 385), (200, 264, 300)):
        for a_batch, b_batch in ((3, 3), (3, None), (None, 3), (1, 1)):
            operands = Operands(kind, shape, hopper, a_batch=a_batch, b_batch=b_batch)
            wide, expected = operands.product(SCALED_MM[config]), operands.expected()
            for found, want in zip(wide, expected, strict=True):
                assert snr(found, want) >= 50, (shape, a_batch, b_batch)
            assert_rounded(operands.product(SCALED_MM[config], BF16), wide)


@pytest.mark.gpu
@pytest.mark.parametrize("types", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_types(types: tuple[torch.dtype, torch.dtype], hopper: Target) -> None:
    for config in ("192x128", "128x256", "128x128"):
        for kind in KINDS:
            operands = Operands(kind, (130, 200, 513), hopper, types=types)
            assert snr(operands.product(SCALED_MM[config]), operands.expected()) >= 50


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [ScaledMmConfig(MATH=3, DEPTH=1, CLUSTER=2, SHARE_B=False), ScaledMmConfig(GROUP=1, STAGES=2)], ids=str
)
def test_other_clusters_groups_and_stages(config: ScaledMmConfig, hopper: Target) -> None:
    for shape in (*SHAPES, (1000, 2000, 300)):
        operands = Operands("forward", shape, hopper)
        assert snr(operands.product(config), operands.expected()) >= 50, shape


@pytest.mark.gpu
@pytest.mark.parametrize("split", [2, 4, 8])
def test_more_blocks_that_share_k_than_blocks_of_it(split: int, hopper: Target) -> None:
    for shape in ((65, 77, 1), (65, 77, 385), (130, 264, 1500)):
        operands = Operands("forward", shape, hopper, bias=BF16)
        assert snr(operands.product(ScaledMmConfig(SPLIT=split)), operands.expected()) >= 50


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["192x128", "128x256", "128x128", "64x192", "128x256 cluster", "split"])
def test_more_tiles_than_multiprocessors(config: str, hopper: Target) -> None:
    """Blocks walk over several tiles, the ring of stages and the output's buffers over their borders."""
    for kind, shape in itertools.product(KINDS, ((3000, 2056, 900), (100, 30008, 300))):
        operands = Operands(kind, shape, hopper)
        wide = operands.product(SCALED_MM[config])
        assert snr(wide, operands.expected()) >= 50
        assert_rounded(operands.product(SCALED_MM[config], BF16), wide)


@pytest.mark.gpu
@every_variant
def test_scales_of_all_magnitudes(config: str, kind: str, hopper: Target) -> None:
    """Errors stay below 2⁻¹⁰ of `|A| @ |B|` in every element, with scales of 1e-30 beside 1e30 and blocks of zeros."""
    for left, right in ((29.0, 1.0), (1.0, 29.0)):  # no product overflows
        operands = Operands(kind, (150, 264, 700), hopper)
        for scale, decades in ((operands.a_scale, left), (operands.b_scale, right)):
            scale.copy_(10 ** (torch.rand_like(scale) * 2 * decades - decades))
        operands.a[:, 128:256].view(torch.uint8).zero_()
        operands.b[:, :128].view(torch.uint8).zero_()
        found, expected, magnitude = operands.product(SCALED_MM[config]), operands.expected(), operands.magnitude()
        assert torch.isfinite(found).all()
        assert ((found.double() - expected).abs() <= 2.0**-10 * magnitude + 1e-37).all()
        assert (found[:, :128] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["192x128", "128x256", "128x128", "64x64", "128x256 cluster", "split"])
@pytest.mark.parametrize("kind", ["forward", "wgrad", "rowwise"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_rows_and_columns(value: float, kind: str, config: str, hopper: Target) -> None:
    m, n, k = 200, 264, 513
    for rows, columns in (([5], []), ([], [130]), ([5, 199], [0, 263])):
        operands = Operands(kind, (m, n, k), hopper)
        of_a, of_b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda").mT
        for row in rows:
            of_a[row, k - 1] = value
        for column in columns:
            of_b[300, column] = value
        operands.a, operands.a_scale = quantize(of_a, operands.a_block, E4M3, "fp32")
        operands.b, operands.b_scale = quantize(of_b, operands.b_block, E4M3, "fp32")
        operands.along_k()
        for dtype in (FP32, BF16):
            finite = torch.isfinite(operands.product(SCALED_MM[config], dtype))
            assert torch.equal(finite, torch.isfinite(operands.expected()))
            assert not finite[rows].any()
            assert not finite[:, columns].any()
            assert finite.any()


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["192x128", "128x128", "split"])
def test_infinities_and_nans_among_the_data_stay_in_their_rows_and_columns(config: str, hopper: Target) -> None:
    """An element that is not finite, under a finite scale."""
    for kind in KINDS:
        operands = Operands(kind, (200, 264, 513), hopper, types=(E5M2, E4M3))
        operands.a.view(torch.uint8)[7, 512] = 0x7C  # Inf of e5m2
        operands.a.view(torch.uint8)[199, 0] = 0x7F
        operands.b.view(torch.uint8)[400, 263] = 0x7F
        finite = torch.isfinite(operands.product(SCALED_MM[config]))
        assert torch.equal(finite, torch.isfinite(operands.expected()))
        assert not finite[[7, 199]].any()
        assert not finite[:, 263].any()
        assert int(finite.sum()) == 198 * 263


@pytest.mark.gpu
def test_garbage_past_the_edges_is_not_read(hopper: Target) -> None:
    """NaN bytes in the padding of rows, and in the scales' padding, do not reach the product."""
    for config in ("192x128", "128x256", "128x128", "split"):
        for kind in KINDS:
            clean = Operands(kind, (130, 133, 300), hopper)
            expected = clean.product(SCALED_MM[config])
            for name in ("a", "b", "a_scale", "b_scale"):
                x: Tensor = getattr(clean, name)
                bits = torch.uint8 if x.element_size() == 1 else torch.int32
                size = x.untyped_storage().nbytes() // x.element_size() + 4096
                memory = torch.full((size,), 0xFF if bits == torch.uint8 else -1, dtype=bits, device="cuda")
                inside = memory[1024:].as_strided(x.shape, x.stride()).copy_(x.view(bits))
                setattr(clean, name, inside.view(x.dtype))
            assert torch.equal(clean.product(SCALED_MM[config]), expected)


@pytest.mark.gpu
def test_a_scale_a_line_beside_one_for_all(hopper: Target) -> None:
    for a_block, b_block in (((1, -1), (-1, -1)), ((-1, -1), (-1, 1))):
        operands = Operands("rowwise", (130, 200, 513), hopper)
        of_a, of_b = torch.randn(130, 513, device="cuda"), torch.randn(200, 513, device="cuda").mT
        operands.a_block, operands.b_block = a_block, b_block
        operands.a, operands.a_scale = quantize(of_a, a_block, E4M3, "fp32")
        operands.b, operands.b_scale = quantize(of_b, b_block, E4M3, "fp32")
        operands.along_k()
        assert snr(operands.product(SCALED_MM["192x128"]), operands.expected()) >= 50


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["192x128", "128x256", "128x128", "192x128 cluster", "split"])
def test_a_thousand_runs_give_one_bit_pattern(config: str, hopper: Target) -> None:
    operands = Operands("forward", (513, 777, 1111), hopper, bias=BF16)
    out = torch.full((513, 777), float("nan"), dtype=BF16, device="cuda")
    (launch,) = plan(operands.into(out), SCALED_MM[config])
    prepared, addresses = launch.prepare(), pointers(launch.args)
    first, differing = None, torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.fill_(float("nan"))
        prepared.launch(addresses)
        first = out.clone() if first is None else first
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differing) == 0
    assert snr(out, operands.expected()) >= 45


def random_fp8(*shape: int) -> Tensor:
    """Finite positive and negative bytes, without a float copy."""
    bits = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device="cuda")
    return bits.bitwise_or_(torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda").mul_(0x80)).view(E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "dtype"), [("192x128", BF16), ("128x256", FP32), ("128x256 cluster", BF16)])
def test_more_than_2_to_the_31_outputs(config: str, dtype: torch.dtype, hopper: Target) -> None:
    skip_below(40)
    m, n, k = 2**16 + 3, 2**15 + 136, 130
    assert m * n > 2**31
    operands = Operands("forward", (1, 1, k), hopper)
    operands.a = random_fp8(m, 144)[:, :k]
    operands.b = random_fp8(n, 144)[:, :k].mT
    operands.a_scale = torch.rand(2, -(-m // 4) * 4, device="cuda")[:, :m].mT
    operands.b_scale = torch.rand(-(-n // 128), 4, device="cuda")[:, :2].mT
    out = operands.product(SCALED_MM[config], dtype)
    for rows in (slice(0, 200), slice(m // 2, m // 2 + 200), slice(m - 200, m)):
        for columns in (slice(0, 256), slice(n // 256 * 128, n // 256 * 128 + 256), slice(n // 128 * 128 - 128, n)):
            part = Operands("forward", (1, 1, k), hopper)
            part.a, part.a_scale = operands.a[rows], operands.a_scale[rows]
            part.b = operands.b[:, columns]
            part.b_scale = operands.b_scale[:, columns.start // 128 : -(-columns.stop // 128)]
            assert snr(out[rows, columns], part.expected()) >= (50 if dtype == FP32 else 45)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements_of_an_operand(hopper: Target) -> None:
    skip_below(40)
    m, n, k = 2**24 + 5, 24, 128
    operands = Operands("forward", (1, n, k), hopper)
    operands.a = random_fp8(m, k)
    operands.a_scale = torch.rand(1, -(-m // 4) * 4, device="cuda")[:, :m].mT
    out = operands.product(SCALED_MM["128x64"])
    for rows in (slice(0, 500), slice(m // 2, m // 2 + 500), slice(m - 500, m)):
        part = Operands("forward", (1, n, k), hopper)
        part.a, part.a_scale, part.b, part.b_scale = (
            operands.a[rows], operands.a_scale[rows], operands.b, operands.b_scale
        )  # fmt: skip
        assert snr(out[rows], part.expected()) >= 50
