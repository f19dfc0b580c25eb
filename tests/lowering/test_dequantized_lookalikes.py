"""Graphs that look like dequantized data, or like a copy of it, but differ in one place: the values are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fp8fn
from fp8fn.lowering.patterns.producers import _eps_of
from support.traced import Traced

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E4M3 = torch.float8_e4m3fn
N, K = 256, 384


def fake(x: Tensor) -> Tensor:
    """FP8 data times scales, of blocks of (1, 128)."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


def wide(s: Tensor) -> Tensor:
    return s.repeat_interleave(128, 0).repeat_interleave(128, 1)


def straight_through(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x + (fake(x) - x).detach(), w.float() * wide(s))


def of_another(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x + (fake(x) - x.tanh()).detach(), w.float() * wide(s))


def turned_round(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x + (x - fake(x)).detach(), w.float() * wide(s))


def of_another_first(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear((fake(x) - x.tanh()).detach() + x, w.float() * wide(s))


def added_twice(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(torch.add(x, (fake(x) - x).detach(), alpha=2), w.float() * wide(s))


def taken_twice(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x + torch.sub(fake(x), x, alpha=2).detach(), w.float() * wide(s))


def scale_first(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, wide(s) * w.float())


def divided(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.float() / wide(1 / s))


def data_below(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, wide(s) / w.float().clamp_min(0.5).to(E4M3).float())


def kron(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.float() * torch.kron(s, torch.ones(128, 128)))


def kron_of_twos(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.float() * torch.kron(s, torch.full((128, 128), 2.0)))


def rolled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.float() * wide(s).roll(64, 1))


def tiled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """The scales of neighbours, not of blocks."""
    return F.linear(x, w.float() * s.repeat(128, 128))


def cut_data(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x[..., :300], (w.float() * wide(s))[:200, :300])


def cut_from_the_middle(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, (w.float() * wide(s))[64:192])


def with_alpha(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.addmm(torch.ones(N), x.flatten(0, 1), (w.float() * wide(s)).mT, alpha=2)


def with_beta(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.addmm(torch.ones(N), x.flatten(0, 1), (w.float() * wide(s)).mT, beta=0.5)


def with_a_matrix(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.addmm(x.flatten(0, 1)[:, :N], x.flatten(0, 1), (w.float() * wide(s)).mT)


def of_bytes(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """A cast to integers on the way is no cast to a wider type."""
    return F.linear(x, (w.float() * wide(s) * 64).to(torch.int32).to(torch.float32))


A16W8 = "fp8fn.mm_a16w8.default"
# The op that the forward's product becomes; None where the product is left alone or either is right.
SPELLINGS: dict[Callable[..., Tensor], str | None] = {
    straight_through: "fp8fn.scaled_mm.default", scale_first: A16W8, divided: A16W8, kron: A16W8,
    **dict.fromkeys((of_another, of_another_first, turned_round, added_twice, taken_twice), A16W8),
    **dict.fromkeys((data_below, kron_of_twos, rolled, tiled, cut_data, cut_from_the_middle, of_bytes)),
    **dict.fromkeys((with_alpha, with_beta, with_a_matrix)),
}  # fmt: skip


def compared(function: Callable[..., Tensor], *inputs: Tensor) -> Traced:
    """Output and gradient of the first input, compiled and not, to 1e-5 of the norm."""
    backend, x = Traced(), inputs[0]
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = []
    for call in (function, compiled):
        out = call(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for want, got in zip(*results, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert (got - want).double().norm() <= 1e-5 * want.double().norm()
    return backend


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_values(spelling: Callable[..., Tensor]) -> None:
    q = fp8fn.quantize(torch.randn(N, K), (128, 128))
    x = torch.randn(2, 24, K, requires_grad=True)
    backend = compared(spelling, x, q.data.contiguous(), q.scale.contiguous())
    made = SPELLINGS[spelling]
    if made is not None:
        assert next(found.made for found in backend.found if found.reason is None) == made


@pytest.mark.parametrize("spelling", ["each", "of two", "one", "of two, interleaved", "expanded"])
def test_scales_of_a_batch(spelling: str) -> None:
    """A scale for each matrix is served; one that two matrices share is of no block of ours."""
    count = {"each": 4, "of two": 2, "one": 1, "of two, interleaved": 2, "expanded": 4}[spelling]
    q = fp8fn.quantize(torch.randn(1 if spelling == "expanded" else 4, N, K), (128, 128))
    data, scale = q.data.contiguous(), torch.rand(count, 2, 3) + 0.5
    if spelling == "expanded":
        scale = scale[:1].contiguous()
    x = torch.randn(4, 24, K, requires_grad=True)

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        s = s.repeat_interleave(128, 1).repeat_interleave(128, 2)
        if spelling == "of two":
            s = s.repeat_interleave(2, 0)
        elif spelling == "of two, interleaved":
            s = s.repeat(2, 1, 1)
        w = w.float() * s
        return x @ (w.expand(4, N, K) if spelling == "expanded" else w).mT

    backend = compared(function, x, data, scale)
    served = [found.made for found in backend.found if found.reason is None]
    assert served == ([A16W8, A16W8] if spelling in ("each", "one", "expanded") else [])


def norm_of(rstd: Callable[[Tensor, Tensor], Tensor]) -> tuple[Node, Node]:
    """The nodes of what a function gives, and of its first input."""
    graph: Graph = make_fx(rstd, tracing_mode="fake")(torch.randn(8, 16), torch.randn(8, 16)).graph
    output: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    return output, next(iter(graph.nodes))


@pytest.mark.parametrize(
    ("rstd", "eps"),
    [
        (lambda x, y: torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5), 1e-5),
        (lambda x, y: torch.rsqrt(x.pow(2).mean(1, True) + 0.25), 0.25),
        (lambda x, y: torch.rsqrt((x * x).mean(-1, True) + 1), 1.0),
        (lambda x, y: (x.pow(2).mean(-1, True) + 1e-6) ** -0.5, 1e-6),
        (lambda x, y: torch.rsqrt((x * y).mean(-1, True) + 1e-5), None),
        (lambda x, y: torch.rsqrt(y.pow(2).mean(-1, True) + 1e-5), None),
        (lambda x, y: torch.rsqrt((y * y).mean(-1, True) + 1e-5), None),
        (lambda x, y: torch.rsqrt(x.pow(3).mean(-1, True) + 1e-5), None),
        (lambda x, y: torch.rsqrt(x.pow(2).mean(0, True) + 1e-5), None),
        (lambda x, y: torch.rsqrt(x.pow(2).mean((0, 1), True) + 1e-5), None),
        (lambda x, y: torch.rsqrt(x.pow(2).mean(-1, False) + 1e-5), None),
        (lambda x, y: torch.rsqrt(x.pow(2).sum(-1, True) + 1e-5), None),
        (lambda x, y: torch.rsqrt(x.pow(2).mean(-1, True) - 1e-5), None),
        (lambda x, y: torch.rsqrt(x.pow(2).mean(-1, True) + y), None),
        (lambda x, y: torch.rsqrt(torch.add(x.pow(2).mean(-1, True), 1e-5, alpha=2)), None),
        (lambda x, y: (x.pow(2).mean(-1, True) + 1e-5) ** 0.5, None),
        (lambda x, y: torch.sqrt(x.pow(2).mean(-1, True) + 1e-5), None),
    ],
)  # fmt: skip
def test_eps_of_a_norm(rstd: Callable[[Tensor, Tensor], Tensor], eps: float | None) -> None:
    """Only of `1 / sqrt(mean(x²) + eps)` over whole rows of this `x`: the op computes nothing else."""
    assert _eps_of(*norm_of(rstd)) == eps
