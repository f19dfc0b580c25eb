"""The definition of quantization against a second one, in NumPy from the bits up, and against the peers' formulas."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn.ops import reference
from fp8fn.ops.formats import FP8_DTYPES, SCALE_FORMATS
from fp8fn.ops.layout import BLOCKS, Block

E4M3, E5M2, E4M3Z, E5M2Z = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
# Bits of the mantissa, bias of the exponent, code of the largest finite value.
FORMAT: Final = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B), E4M3Z: (3, 8, 0x7F), E5M2Z: (2, 16, 0x7F)}
EMAX: Final = {E4M3: 8, E5M2: 15, E4M3Z: 7, E5M2Z: 15}
F32_MAX, F32_TINY = float(np.finfo(np.float32).max), 2.0**-149


def positive_values(dtype: torch.dtype) -> np.ndarray:
    """All non-negative finite values in the order of their codes, decoded by hand."""
    mantissa_bits, bias, last = FORMAT[dtype]
    values = []
    for code in range(last + 1):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        values.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return np.array(values, np.float32)


def nearest_code(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The code of each finite float32, to nearest, ties to the even code, saturating."""
    values = positive_values(dtype)
    middles = (values[:-1] + values[1:]) / np.float32(2)  # exact: one bit more than FP8
    magnitude = np.minimum(np.abs(x), values[-1])
    below, above = np.searchsorted(middles, magnitude, "left"), np.searchsorted(middles, magnitude, "right")
    code = np.where(below % 2 == 0, below, above)  # they differ on a tie alone, by one
    negative = np.signbit(x) & ((code != 0) | (dtype in (E4M3, E5M2)))  # fnuz has no negative zero
    return (code | (negative * 0x80)).astype(np.uint8)


def scale_by_rule(amax: np.float32, dtype: torch.dtype, rule: str) -> np.float32:
    largest = positive_values(dtype)[-1]
    if rule == "e8m0":
        if not np.isfinite(amax):
            return np.float32(np.nan)
        exponent = int(np.frexp(amax)[1]) - 1 - EMAX[dtype] if amax else -1000
        return np.float32(2.0 ** max(exponent, -127))
    if rule == "rceil":
        if not np.isfinite(amax):
            return np.float32(np.nan)
        quotient = Fraction(float(amax)) / Fraction(float(largest))
        first = max(int(np.frexp(amax)[1]) - EMAX[dtype] - 2, -127) if amax else -127
        return np.float32(2.0 ** next(e for e in range(first, 128) if quotient <= Fraction(2) ** e))
    scale = np.float32(np.maximum(amax, np.float32(1e-12)) / largest)
    if rule == "pow2" and np.isfinite(scale):
        mantissa, exponent = np.frexp(scale)
        scale = np.float32(2.0 ** (int(exponent) - (mantissa == 0.5)))
    return scale


def by_hand(x: np.ndarray, block: Block, dtype: torch.dtype, rule: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, which of them are NaN (their bits are free), and scales of a float32 matrix, block after block."""
    rows, columns = (n if b == -1 else b for n, b in zip(x.shape, block, strict=True))
    codes, nans = np.zeros(x.shape, np.uint8), np.zeros(x.shape, bool)
    scales: list[list[np.float32]] = []
    with np.errstate(all="ignore"):
        for top in range(0, x.shape[0], rows):
            scales.append([])
            for left in range(0, x.shape[1], columns):
                here = np.s_[top : top + rows, left : left + columns]
                scale = scale_by_rule(np.max(np.abs(x[here])), dtype, rule)
                scaled = x[here] * (np.float32(1) / scale)
                nans[here] = np.isnan(scaled)
                codes[here] = nearest_code(np.nan_to_num(scaled, nan=0.0), dtype)
                scales[-1].append(scale)
    return codes, nans, np.array(scales, np.float32)


def check(x: Tensor, block: Block, dtype: torch.dtype, rule: str) -> None:
    data, scale = reference.quantize(x, block, dtype, rule)
    codes, nans, scales = by_hand(x.float().numpy(), block, dtype, rule)
    np.testing.assert_array_equal(data.float().isnan().numpy(), nans)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy()[~nans], codes[~nans])
    np.testing.assert_array_equal(scale.float().numpy(), scales)


def wide(*shape: int) -> Tensor:
    """Values of all magnitudes from 2**-40 to 2**40, both signs, and some zeros."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape).float())
    return x * (torch.rand(shape) > 0.05)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_tables_of_values(dtype: torch.dtype) -> None:
    values = positive_values(dtype)
    codes = torch.arange(len(values), dtype=torch.uint8)
    np.testing.assert_array_equal(codes.view(dtype).float().numpy(), values)
    assert values[-1] == torch.finfo(dtype).max
    assert not (codes + 1)[-1:].view(dtype).float().isfinite().item() or dtype in (E4M3Z, E5M2Z)


@pytest.mark.parametrize("rule", SCALE_FORMATS)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_definition(block: Block, dtype: torch.dtype, rule: str) -> None:
    for x in (torch.randn(130, 150).bfloat16(), torch.randn(40, 257).half(), wide(70, 140)):
        check(x, block, dtype, rule)


@pytest.mark.parametrize("rule", SCALE_FORMATS)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_definition_at_the_edges_of_float32(dtype: torch.dtype, rule: str) -> None:
    edges = [0.0, -0.0, F32_TINY, 2.0**-126, 1e-12, 9.99e-13, 1.0, F32_MAX, 448.0, 57344.0, 1e-30, 2.0**-127, 3e38]
    for largest in edges:
        row = torch.linspace(-1, 1, 128).mul(largest)
        row[5] = largest
        check(row[None], (1, 128), dtype, rule)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_every_tie_goes_to_the_even_code(dtype: torch.dtype) -> None:
    values = torch.from_numpy(positive_values(dtype))
    middles = (values[:-1] + values[1:]) / 2
    row = torch.cat([middles, -middles, values[-1:]])[None]
    data, scale = reference.quantize(row, (1, -1), dtype, "fp32")
    assert scale.item() == 1.0
    codes = data.view(torch.uint8)[0]
    mantissa = codes[: len(middles)]
    assert (mantissa % 2 == 0).all()
    np.testing.assert_array_equal(codes.numpy(), nearest_code(row[0].numpy(), dtype))


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("rule", SCALE_FORMATS)
def test_zeros_have_a_finite_scale_and_come_back(dtype: torch.dtype, rule: str) -> None:
    q = fp8fn.quantize(torch.zeros(3, 256), (1, 128), dtype=dtype, scale=rule)  # type: ignore[arg-type]
    assert q.scale.float().isfinite().all()
    assert (q.scale.float() > 0).all()
    assert (1 / q.scale.float()).isfinite().all()
    assert torch.equal(fp8fn.dequantize(q, torch.float32), torch.zeros(3, 256))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", SCALE_FORMATS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_a_bad_value_stays_in_its_block_and_is_never_finite(
    dtype: torch.dtype, block: Block, rule: str, bad: float
) -> None:
    clean = torch.randn(2, 130, 260)
    x = clean.clone()
    x[0, 129, 130] = bad
    got, want = (
        fp8fn.dequantize(fp8fn.quantize(t, block, dtype=dtype, scale=rule), torch.float32)  # type: ignore[arg-type]
        for t in (x, clean)
    )
    rows, columns = (n if b == -1 else b for n, b in zip((130, 260), block, strict=True))
    inside = torch.zeros(2, 130, 260, dtype=torch.bool)
    top, left = 129 // rows * rows, 130 // columns * columns
    inside[0, top : top + rows, left : left + columns] = True
    assert not got[0, 129, 130].isfinite()
    assert not got[inside].isfinite().any()
    assert torch.equal(got[~inside], want[~inside])


def test_saturation() -> None:
    """An e8m0 scale rounds down, so a block's largest values can pass FP8's range: they become its largest."""
    x = torch.full((1, 32), 500.0)
    for dtype, power in ((E4M3, 1.0), (E4M3Z, 2.0)):
        q = fp8fn.quantize(x, (1, 32), dtype=dtype, scale="e8m0")
        assert q.scale.float().item() == power
        assert (fp8fn.dequantize(q, torch.float32) == torch.finfo(dtype).max * power).all()
    data, scale = reference.quantize(torch.tensor([[F32_MAX, -F32_MAX]]), (1, -1), E4M3, "pow2")
    assert data.float().isfinite().all()
    assert scale.item() == 2.0**120


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_pow2_is_the_least_power_that_holds_amax(dtype: torch.dtype) -> None:
    x = wide(64, 128) + 1e-3
    exact = fp8fn.quantize(x, (1, 128), dtype=dtype).scale
    power = fp8fn.quantize(x, (1, 128), dtype=dtype, scale="pow2").scale
    mantissa, _ = torch.frexp(power)
    assert (mantissa == 0.5).all()
    assert ((power >= exact) & (power < 2 * exact)).all()
    # A power of two stays as it is.
    row = torch.tensor([[torch.finfo(dtype).max * 2.0**-9]])
    assert fp8fn.quantize(row, (1, 128), dtype=dtype, scale="pow2").scale.item() == 2.0**-9


@pytest.mark.parametrize(
    ("dtype", "amax", "power"),
    [
        (E4M3, 1.0, -8), (E4M3, 1.99, -8), (E4M3, 2.0, -7), (E4M3, 0.0, -127), (E4M3, 2.0**-149, -127),
        (E4M3, 2.0**-119, -127), (E4M3, 2.0**-118, -126), (E4M3, F32_MAX, 119), (E5M2, 1.0, -15), (E5M2, F32_MAX, 112),
        (E4M3Z, 1.0, -7), (E5M2Z, 1.0, -15),
    ],
    ids=str,
)  # fmt: skip
def test_e8m0_is_the_ocp_rule(dtype: torch.dtype, amax: float, power: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 7] = -amax
    scale = fp8fn.quantize(x, (1, 32), dtype=dtype, scale="e8m0").scale
    assert scale.dtype == torch.float8_e8m0fnu
    assert scale.view(torch.uint8).item() == power + 127


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_rceil_is_the_least_power_that_holds_amax(dtype: torch.dtype) -> None:
    """Also where `amax / fp8_max` is so near a power of two that its float32 might be one."""
    largest = torch.tensor(torch.finfo(dtype).max)
    borders = torch.stack([largest, largest.nextafter(torch.tensor(torch.inf)), largest.nextafter(torch.tensor(0.0))])
    amax = torch.cat([borders * 2.0**e for e in (-100, -9, 0, 1, 60)] + [wide(1, 64).abs().flatten() + 1e-30])
    q = fp8fn.quantize(-amax[:, None], (1, 32), dtype=dtype, scale="rceil")
    assert q.scale.dtype == torch.float8_e8m0fnu
    ratio = amax.double() / (torch.finfo(dtype).max * q.scale.double()[:, 0])
    assert ((ratio <= 1) & (ratio > 0.5)).all()
    back = fp8fn.dequantize(q, torch.float32)
    step = {3: 2.0**-4, 2: 2.0**-3}[FORMAT[dtype][0]]
    assert ((back + amax[:, None]).abs() <= step * amax[:, None]).all()
    edges = torch.tensor([0.0, F32_TINY, 2.0**-127 * torch.finfo(dtype).max, F32_MAX, torch.inf, torch.nan])
    stored = fp8fn.quantize(edges[:, None], (1, 32), dtype=dtype, scale="rceil").scale.view(torch.uint8)[:, 0]
    assert stored.tolist() == [0, 0, 0, 255 - EMAX[dtype], 255, 255]


# The peers' formulas, from SEMANTICS: the scale is forward, s = FP8_MAX / max(amax, floor), in float64, rounded once;
# y = clamp(x * s); they store 1 / s. Ours: scale = max(amax, floor) / FP8_MAX and inv = 1 / scale, in float32.
PEERS: Final = {
    "act_quant_lhs": ((1, 128), False, lambda M, N: ((N, 1), (1, M))),
    "act_quant_rhs": ((128, 1), False, lambda M, N: ((1, M), (N, 1))),
    "act_quant_transposed_lhs": ((128, 1), True, lambda M, N: ((M, 1), (1, N))),
    "weight_quant_rhs": ((128, 128), False, lambda M, N: ((1, M), (1, M // 128))),
    "weight_quant_transposed_rhs": ((128, 128), True, lambda M, N: ((1, N), (1, N // 128))),
}
ULP: Final = 2.0**-24  # half a unit in the last place of float32, the relative error of one rounding


def peers_quantizer(x: Tensor, block: Block, dtype: torch.dtype, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """`x * s` in float32, y, and the stored `1 / s`, of sizes that are multiples of the block."""
    rows, columns = block
    tiles = x.float().reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    amax = tiles.abs().amax((1, 3)).double().clamp_min(floor)
    s = (torch.finfo(dtype).max / amax).float()
    largest = torch.finfo(dtype).max
    scaled = (tiles * s[:, None, :, None]).reshape(x.shape)
    return scaled, scaled.clamp(-largest, largest).to(dtype), 1 / s


@pytest.mark.parametrize("dtype", [E4M3, E4M3Z], ids=str)
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_equivalence_with_torchaos_quantizers(peer: str, dtype: torch.dtype, source: torch.dtype) -> None:
    block, transposed, strides = PEERS[peer]
    M, N = 384, 512
    x = torch.randn(M, N, dtype=source)
    if block == (128, 128):  # a square block follows its input; theirs stores column-major whatever it is given
        x = x if transposed else x.T.contiguous().T
    scaled, theirs, stored = peers_quantizer(x, block, dtype, 1e-12)
    ours = fp8fn.quantize(x, block, dtype=dtype)
    if transposed:
        scaled, theirs, stored, ours = scaled.T, theirs.T, stored.T, ours.mT
    shape, scale_shape = (theirs.shape, stored.shape)
    assert (ours.data.shape, ours.scale.shape) == (shape, scale_shape)
    data_strides, scale_strides = strides(M, N)
    assert ours.data.stride() == data_strides
    assert tuple(s for s, n in zip(ours.scale.stride(), scale_shape, strict=True) if n > 4) == tuple(
        s for s, n in zip(scale_strides, scale_shape, strict=True) if n > 4
    )
    assert_related(ours, theirs, stored, scaled)


def assert_related(ours: fp8fn.ScaledTensor, theirs: Tensor, stored: Tensor, scaled: Tensor) -> None:
    """Scales within 3 roundings (one of ours, two of theirs); codes differ only next to a tie, and by one."""
    assert ((ours.scale.double() / stored.double() - 1).abs() <= 3 * ULP * (1 + 1e-6)).all()
    mine, other = ours.data.view(torch.uint8).int(), theirs.contiguous().view(torch.uint8).int()
    differ = mine != other
    assert differ.double().mean() < 1e-3
    if differ.any():
        values = torch.from_numpy(positive_values(ours.dtype)).double()
        low = torch.minimum(mine, other)[differ] & 0x7F
        assert ((mine - other)[differ].abs() == 1).all()
        middle = (values[low.long()] + values[low.long() + 1]) / 2
        # x * s and x * inv each have at most 4 roundings between them and the real product.
        assert ((scaled[differ].double().abs() / middle - 1).abs() <= 8 * ULP).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E4M3Z], ids=str)
def test_equivalence_with_primus_turbos_dual_quantizer(dtype: torch.dtype) -> None:
    """Theirs has an amax floor of 1e-4 and ragged last blocks; above the floor, the relation is torchao's."""
    x = torch.randn(256, 384).bfloat16()
    row, col = fp8fn.quantize_dual(x, dtype=dtype)
    for ours, block in ((row, (1, 128)), (col, (128, 1))):
        scaled, theirs, stored = peers_quantizer(x, block, dtype, 1e-4)
        assert_related(ours, theirs, stored, scaled)
    small = torch.full((1, 128), 1e-6)
    q, _ = fp8fn.quantize_dual(small, dtype=dtype)
    assert (fp8fn.dequantize(q, torch.float32) / small - 1).abs().max() < 1e-6  # below their floor ours keeps all bits


@pytest.mark.parametrize("rule", SCALE_FORMATS)
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_round_trip_error_is_half_a_step(block: Block, dtype: torch.dtype, rule: str) -> None:
    """`|x - x̂| <= max(|x| 2^-(m+1), scale 2^-(m+bias)) `; an e8m0 scale can saturate, by up to an eighth of `|x|`."""
    mantissa_bits, bias, _ = FORMAT[dtype]
    x = torch.randn(130, 200) * torch.exp2(torch.randint(-12, 3, (130, 200)).float())
    q = fp8fn.quantize(x, block, dtype=dtype, scale=rule)  # type: ignore[arg-type]
    back = fp8fn.dequantize(q, torch.float32).double()
    rows, columns = (n if b == -1 else b for n, b in zip(x.shape, block, strict=True))
    scale = q.scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:130, :200].double()
    relative = 2.0 ** -(mantissa_bits + 1)
    if rule == "e8m0":
        relative = max(relative, 0.125)
    bound = torch.maximum(x.double().abs() * relative, scale * 2.0 ** -(mantissa_bits + bias))
    assert ((x.double() - back).abs() <= bound * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dequantize_is_the_product_rounded_once(dtype: torch.dtype) -> None:
    q = fp8fn.quantize(torch.randn(70, 260), (1, 128))
    scale = q.scale.repeat_interleave(128, 1)[:, :260]
    assert torch.equal(fp8fn.dequantize(q, dtype), (q.data.float() * scale).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", SCALE_FORMATS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_definition_gives_the_same_bits_on_every_device(block: Block, rule: str) -> None:
    for dtype in FP8_DTYPES:
        x = torch.cat([wide(70, 140), torch.randn(70, 140), torch.zeros(70, 140)])
        here, there = (reference.quantize(t, block, dtype, rule) for t in (x, x.cuda()))
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.float(), b.float().cpu())
            assert a.stride() == b.stride()
