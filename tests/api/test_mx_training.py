"""Training in MXFP8: the operands of all three products, bit for bit, against the published conversion.

The conversion is that of cuBLAS's 1D block scaling and of torchao's training recipe (`ScaleCalculationMode.RCEIL`): a
block of 32 along the contraction has the scale `2 ** ceil(log2(amax / fp8_max))` in E8M0, of a quotient in float32 that
torchao computes as `amax * (1 / fp8_max)`; the data is `x / scale`, rounded to nearest even. It is written here from
`frexp` and `ldexp`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from support.accuracy import differing, snr
from support.operands.groups import ends, spans

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
FLOOR = replace(fp8fn.MXFP8, scale="e8m0")


def published(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """`x (..., K)` → its data and the bytes of its scales `(..., ceil(K / 32))`."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    quotient = blocks.abs().amax(-1) * (1 / torch.finfo(dtype).max)
    mantissa, exponent = torch.frexp(quotient)  # quotient = mantissa * 2 ** exponent, with 0.5 <= mantissa < 1
    exponent = (exponent - (mantissa == 0.5).int()).masked_fill(quotient == 0, -127).clamp_min(-127)
    data = torch.ldexp(blocks.double(), -exponent[..., None]).to(FP32)
    data = data.masked_fill(~quotient.isfinite()[..., None], torch.nan).to(dtype)
    return data.flatten(-2)[..., : x.shape[-1]], torch.where(quotient.isfinite(), exponent + 127, 255).to(torch.uint8)


def back(data: Tensor, scale: Tensor) -> Tensor:
    """Data and bytes of scales in float64."""
    powers = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    return data.double() * powers[..., : data.shape[-1]]


def multiplied(a: Tensor, b: Tensor, a_dtype: torch.dtype = E4M3) -> Tensor:
    """`a (M, K) @ b (N, K)ᵀ` of operands in the published format."""
    return back(*published(a, a_dtype)) @ back(*published(b)).T


def outliers(*shape: int, seed: int) -> Tensor:
    """Values whose blocks differ by many octaves, some of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 4)
    x[:, : shape[1] // 4] *= 2.0**-30
    x[: shape[0] // 8] = 0
    return x


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [BF16, torch.float16], ids=str)
def test_every_16_bit_amax_has_the_published_scale(source: torch.dtype, dtype: torch.dtype) -> None:
    amax = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(source)  # also Inf and NaN
    found = fp8fn.quantize(-amax[:, None], (1, 32), dtype=dtype, scale="rceil")
    data, scale = published(-amax[:, None], dtype)
    assert differing(found.scale.view(torch.uint8), scale) == 0
    assert differing(found.data, data) == 0


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_float32_next_to_each_border_has_the_published_scale(dtype: torch.dtype) -> None:
    """One value differs: the one above `fp8_max * 2 ** -127`, whose quotient is subnormal and loses the last bit."""
    borders = torch.finfo(dtype).max * torch.exp2(torch.arange(-140.0, 127.0).double())
    bits = borders[borders < torch.finfo(FP32).max].float().view(torch.int32)[:, None] + torch.arange(-2, 3)
    amax = bits.view(FP32).flatten()
    found = fp8fn.quantize(amax[:, None], (1, 32), dtype=dtype, scale="rceil").scale.view(torch.uint8)
    differs = amax[(found != published(amax[:, None], dtype)[1])[:, 0]]
    assert differs.tolist() == [torch.finfo(dtype).max * 2.0**-127 * (1 + 2.0**-22 / 3.5)]


@pytest.mark.parametrize("gradient", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_linear_multiplies_the_published_operands(dtype: torch.dtype, gradient: torch.dtype) -> None:
    """Output and both gradients, for sizes that are no multiples of 32."""
    m, n, k = 80, 72, 136
    x, w, grad = (outliers(*shape, seed=i).to(dtype) for i, shape in enumerate([(m, k), (n, k), (m, n)]))
    for operand in (x, w, grad, x.T, w.T, grad.T):
        q = fp8fn.quantize(operand, (1, 32), scale=fp8fn.MXFP8.scale)
        data, scale = published(operand)
        assert differing(q.data.contiguous(), data) == 0
        assert differing(q.scale.view(torch.uint8).contiguous(), scale) == 0
    a, b = (t.clone().requires_grad_() for t in (x, w))
    out = fp8fn.linear(a, b, recipe=replace(fp8fn.MXFP8, gradient_dtype=gradient))
    dx, dw = torch.autograd.grad(out, (a, b), grad)
    bound = 100 if dtype == FP32 else 45  # the results are rounded to bfloat16
    assert snr(out.detach(), multiplied(x, w)) > bound
    assert snr(dx, multiplied(grad, w.T, gradient)) > bound
    assert snr(dw, multiplied(grad.T, x.T, gradient)) > bound


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_groups_multiply_the_published_operands(dtype: torch.dtype) -> None:
    """Each group's rows alone, whose last block of tokens is partial; rows past the last group are zeros."""
    sizes, left, k, n = (0, 1, 31, 33, 96, 70), 5, 72, 104
    offsets, m = ends(sizes), sum(sizes) + left
    x, grad, w = outliers(m, k, seed=0), outliers(m, n, seed=1), outliers(len(sizes) * n, k, seed=2)
    x, grad, w = x.to(dtype), grad.to(dtype), w.to(dtype).unflatten(0, (len(sizes), n))
    a, b = x.clone().requires_grad_(), w.mT.clone().requires_grad_()
    out = fp8fn.grouped_gemm(a, b, offsets, recipe="mxfp8")
    dx, dw = torch.autograd.grad(out, (a, b), grad)
    bound = 100 if dtype == FP32 else 45
    for group, (start, end) in enumerate(spans(offsets)):
        tokens, grads = x[start:end], grad[start:end]
        assert snr(out[start:end].detach(), multiplied(tokens, w[group])) > bound
        assert snr(dx[start:end], multiplied(grads, w[group].T)) > bound
        assert snr(dw[group], multiplied(tokens.T, grads.T)) > bound
    assert not out[m - left :].any()
    assert not dx[m - left :].any()


class Layer(nn.Module):
    """A linear layer and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 160)
        self.experts = nn.Parameter(torch.randn(3, 160, 128) / 8)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(F.relu(self.linear(x)), self.experts, offs=offsets)


def test_a_compiled_step_has_the_bits_of_the_eager_one(fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    layer, x, offsets = Layer().to(BF16), torch.randn(100, 128, dtype=BF16), ends((33, 0, 67))
    grad = torch.randn(100, 128, dtype=BF16)

    def eager(x: Tensor, offsets: Tensor) -> Tensor:
        hidden = fp8fn.linear(x, layer.linear.weight, layer.linear.bias, recipe="mxfp8")
        return fp8fn.grouped_gemm(F.relu(hidden), layer.experts, offsets, recipe="mxfp8")

    compiled = torch.compile(layer, backend="fp8fn", options={"recipe": "mxfp8", "where": "*"}, fullgraph=True)
    steps = []
    for forward in (eager, compiled):
        a = x.clone().requires_grad_()
        out = forward(a, offsets)
        steps.append((out, *torch.autograd.grad(out, (a, *layer.parameters()), grad)))
    for got, want in zip(*steps, strict=True):
        assert torch.equal(got, want)


def test_rounding_up_loses_no_largest_element() -> None:
    """The preset beside the OCP specification's own conversion, whose largest elements saturate."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    up, down = (fp8fn.error(x, fp8fn.quantize(x, (1, 32), scale=of.scale)) for of in (fp8fn.MXFP8, FLOOR))
    assert up.saturated == 0
    assert down.saturated > 0.005
    assert up.snr_db > down.snr_db
