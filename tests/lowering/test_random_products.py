"""Random chains of products whose weights are views of parameters: in FP8 they agree with PyTorch's, in layout too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn.ops.layout import Block
from support.accuracy import snr
from support.gradients import gradients
from support.traced import both_passes

# Views of a parameter that are (N, K), and the shape of the parameter.
VIEWS: Final[dict[str, tuple[Callable[[int, int], tuple[int, ...]], Callable[[Tensor, int, int], Tensor]]]] = {
    "as it is": (lambda n, k: (n, k), lambda w, n, k: w),
    "turned": (lambda n, k: (k, n), lambda w, n, k: w.mT),
    "permuted": (lambda n, k: (k, n), lambda w, n, k: w.permute(1, 0)),
    "one of three": (lambda n, k: (3, n, k), lambda w, n, k: w[1]),
    "unbound": (lambda n, k: (2, n, k), lambda w, n, k: w.unbind(0)[-1]),
    "half": (lambda n, k: (2 * n, k), lambda w, n, k: w.chunk(2)[1]),
    "narrowed": (lambda n, k: (n + 32, k), lambda w, n, k: w.narrow(0, 16, n)),
    "columns": (lambda n, k: (n, 2 * k), lambda w, n, k: w[:, k:]),
    "unflattened": (lambda n, k: (n // 8, 8, k), lambda w, n, k: w.view(n, k)),
}
# Products of x (..., K) and a weight (N, K) and a bias (N).
PRODUCTS: Final[dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "linear": lambda x, w, b: F.linear(x, w),
    "linear with a bias": lambda x, w, b: F.linear(x, w, b),
    "matmul": lambda x, w, b: x @ w.mT,
    "inner": lambda x, w, b: torch.inner(x, w),
    "tensordot": lambda x, w, b: torch.tensordot(x, w.mT, 1),
    "einsum": lambda x, w, b: torch.einsum("...k,nk->...n", x, w),
    "einsum that turns": lambda x, w, b: torch.einsum("bmk,nk->bnm", x, w).mT,
    "einsum of heads": lambda x, w, b: torch.einsum("bmk,hek->bmhe", x, w.unflatten(0, (4, -1))).flatten(-2),
    "einsum over heads": lambda x, w, b: torch.einsum(
        "bmhe,nhe->bmn", x.unflatten(-1, (4, -1)), w.unflatten(1, (4, -1))
    ),
    "weight on the left": lambda x, w, b: (w @ x.mT).mT,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.mT).unflatten(0, x.shape[:2]),
    "addmm with scales": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.mT, beta=0.5, alpha=-2)[None],
    "checkpoint": lambda x, w, b: checkpoint(lambda y: F.linear(F.silu(y), w, b), x, use_reentrant=False),
    "batch": lambda x, w, b: torch.stack([x.flatten(0, 1), 0.5 * x.flatten(0, 1)]) @ torch.stack([w, -w]).mT,
    "kernel of a convolution": lambda x, w, b: F.conv1d(x.mT, w[..., None], b).mT,
}
# Autocast leaves their operands as they are, and they take no two types.
_OF_ONE_TYPE: Final = ("inner", "tensordot")
BETWEEN: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "nothing": lambda x: x,
    "silu": F.silu,
    "a residual": lambda x: x + 0.5 * x.tanh(),
    "columns first": lambda x: x.mT.contiguous().mT,
    "reversed": lambda x: x.flip(-2),
    "twice": lambda x: torch.cat((x, -x), -2),
    "a view": lambda x: x.reshape(1, -1, x.shape[-1]),
}


@dataclass(frozen=True)
class Layer:
    n: int
    k: int
    view: str
    product: str
    between: str


class Chain(nn.Module):
    """The layers in turn; autocast if the parameters are in float32."""

    def __init__(self, layers: list[Layer], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = layers
        shapes = [VIEWS[layer.view][0](layer.n, layer.k) for layer in layers]
        scales = [layer.k**-0.5 for layer in layers]
        self.weights = nn.ParameterList(
            [nn.Parameter((scale * torch.randn(shape)).to(dtype)) for shape, scale in zip(shapes, scales, strict=True)]
        )
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(layer.n).to(dtype)) for layer in layers])

    def __repr__(self) -> str:
        return f"Chain({self.layers}, {self.biases[0].dtype})"

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.biases[0].dtype == torch.float32):
            for layer, parameter, bias in zip(self.layers, self.weights, self.biases, strict=True):
                w = VIEWS[layer.view][1](parameter, layer.n, layer.k)
                x = BETWEEN[layer.between](PRODUCTS[layer.product](x, w, bias))
        return x


@st.composite
def chains(draw: st.DrawFn) -> tuple[Chain, Tensor]:
    widths = draw(st.lists(st.sampled_from([128, 256, 136, 384]), min_size=2, max_size=4))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    products = [name for name in PRODUCTS if dtype == torch.bfloat16 or name not in _OF_ONE_TYPE]
    layers = [
        Layer(n, k, *(draw(st.sampled_from(names)) for names in (list(VIEWS), products, list(BETWEEN))))
        for k, n in itertools.pairwise(widths)
    ]
    batch, rows = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 16, 33]))
    chain = Chain(layers, dtype)
    return chain, torch.randn(batch, rows, widths[0]).to(dtype)


def assert_alike(found: Tensor, wanted: Tensor, decibel: float) -> None:
    assert type(found) is type(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    strides = [[s for s, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (found, wanted)]
    assert strides[0] == strides[1]
    assert torch.equal(found, wanted) or snr(found.float(), wanted.float()) > decibel


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@given(chains(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_products_of_parameters(drawn: tuple[Chain, Tensor], dynamic: bool) -> None:
    chain, x = drawn
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend=both_passes(), fullgraph=True, dynamic=dynamic)
    expected = chain(x)
    cotangent = torch.randn_like(expected)
    leaves = [x.requires_grad_(), *chain.parameters()]
    found, wanted = (
        torch.autograd.grad(function(x), leaves, cotangent, allow_unused=True) for function in (compiled, chain)
    )
    assert_alike(compiled(x).detach(), expected.detach(), 17)
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert torch.equal(got, want) or snr(got.float(), want.float()) > 12


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.*has no FP8 form:UserWarning")
@given(chains(), st.sampled_from([(128, 128), (1, 128), (1, -1), (-1, -1)]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_products_of_fp8_weights(drawn: tuple[Chain, Tensor], block: Block, compiled: bool) -> None:
    chain, x = drawn
    chain, x = chain.bfloat16(), x.bfloat16()
    stored = [fp8fn.quantize(weight.detach(), block) for weight in chain.weights]
    chain.requires_grad_(False)
    for place, q in enumerate(stored):
        chain.weights[place] = nn.Parameter(fp8fn.dequantize(q, torch.bfloat16), requires_grad=False)
    cotangent = torch.randn_like(chain(x))
    expected, (wanted,) = gradients(chain, cotangent, x.requires_grad_())
    for place, q in enumerate(stored):
        chain.weights[place] = nn.Parameter(fp8fn.FP8Weight(q), requires_grad=False)
    torch._dynamo.reset()
    function = torch.compile(chain, backend="aot_eager", fullgraph=True) if compiled else chain
    out, (found,) = gradients(function, cotangent, x)
    assert_alike(out.detach(), expected.detach(), 32)
    assert_alike(found, wanted, 28)
