"""Products of no rows, no columns, no batch and no K: forward and backward, by the exact pass and by both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from fp8fn.lowering.graph.dequantized import _cut_steps
from fp8fn.lowering.graph.views import Dim, Run, divides, identity, reshaped
from fp8fn.lowering.patterns import transformers_fp8
from support.traced import Traced, both_passes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BACKENDS: dict[str, Callable[[], Traced]] = {"substitution": Traced, "backend": both_passes}


class Gated(nn.Module):
    """A norm, and a product of activations that is in another shape before the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(128), nn.Linear(128, 256), nn.Linear(128, 256)
        self.down = nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (0, 4, 128)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_on_no_rows(backend: str, shape: tuple[int, ...]) -> None:
    """Every gradient is there, and zero; that of the input has its shape."""
    model, x = Gated(), torch.randn(shape, requires_grad=True)
    out = torch.compile(model, backend=BACKENDS[backend](), fullgraph=True)(x)
    assert (out.shape, out.dtype) == (shape, torch.float32)
    grads = torch.autograd.grad(out.sum(), [x, *model.parameters()])
    assert [grad.shape for grad in grads] == [x.shape, *(p.shape for p in model.parameters())]
    assert not any(grad.count_nonzero() for grad in grads)


def in_blocks(w: Tensor, s: Tensor) -> Tensor:
    return w.float() * s.repeat_interleave(128, -2).repeat_interleave(128, -1)


def in_views(w: Tensor, s: Tensor) -> Tensor:
    n, k = w.shape[-2:]
    return (w.float().unflatten(-1, (k // 128, 128)).unflatten(-3, (n // 128, 128)) * s[..., :, None, :, None]).view(
        w.shape
    )


def cut(w: Tensor, s: Tensor) -> Tensor:
    n, k = w.shape[-2:]
    return w.float() * s.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)[..., :k]


def repeated_by_none(w: Tensor, s: Tensor) -> Tensor:
    return w.float() * s.repeat_interleave(w.shape[-2], -2)[..., : w.shape[-2], :].repeat_interleave(128, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spelling", [in_blocks, in_views, cut, repeated_by_none], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [((), 0, 256, 384), ((), 32, 0, 384), ((), 32, 256, 0), ((0,), 32, 256, 384), ((2,), 0, 256, 384)],
    ids=["M", "N", "K", "batch", "M of a batch"],
)
def test_dequantized_weights(
    batch: tuple[int, ...], m: int, n: int, k: int, spelling: Callable[[Tensor, Tensor], Tensor], backend: str
) -> None:
    w = torch.randn(*batch, n, k).to(torch.float8_e4m3fn)
    s = torch.ones(*batch, 1 if spelling is repeated_by_none else -(-n // 128), -(-k // 128))
    x = torch.randn(*batch, m, k, requires_grad=True)

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return x @ spelling(w, s).mT

    out = torch.compile(function, backend=BACKENDS[backend](), fullgraph=True, dynamic=False)(x, w, s)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert (out.shape, grad.shape) == ((*batch, m, n), x.shape)
    assert not out.count_nonzero()
    assert not grad.count_nonzero()


@pytest.mark.parametrize(
    ("batch", "m", "n", "k"), [(0, 32, 128, 128), (2, 0, 128, 128), (2, 32, 0, 128), (2, 32, 128, 0)]
)
def test_parameters(batch: int, m: int, n: int, k: int) -> None:
    """A batch of weights, by the recipe where there is enough of each."""
    w, x = nn.Parameter(torch.randn(batch, k, n)), torch.randn(batch, m, k, requires_grad=True)
    out = torch.compile(lambda x: torch.bmm(x, w), backend=both_passes(), fullgraph=True)(x)
    grads = torch.autograd.grad(out.sum(), [x, w])
    assert (out.shape, *(grad.shape for grad in grads)) == ((batch, m, n), x.shape, w.shape)
    assert not any(tensor.count_nonzero() for tensor in (out, *grads))


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256), (3, 0)], ids=str)
def test_what_serves_transformers(shape: tuple[int, ...]) -> None:
    w, s = torch.randn(384, shape[-1]).to(torch.float8_e4m3fn), torch.ones(3, -(-shape[-1] // 128))
    if shape[-1]:
        out = transformers_fp8.matmul(torch.randn(shape).bfloat16(), w, s, [128, 128])
        assert (out.shape, out.dtype) == ((*shape[:-1], 384), torch.bfloat16)
    static = torch.tensor(0.5)
    out = transformers_fp8.matmul(torch.randn(shape).bfloat16(), w, static, None, activation_scale=static)
    assert (out.shape, out.count_nonzero().item()) == ((*shape[:-1], 384), 0)


def test_zero_divides_nothing() -> None:
    assert not divides(0, 4)
    assert not divides(0, 0)
    assert divides(4, 0)
    assert reshaped(identity((4, 4)), (2, 0)) is None
    nothing = Dim(4, (Run(1, 0), Run(0, None)), cut=True)  # of each scale no copy
    assert not _cut_steps((Run(4, 0),), nothing, {})


def test_the_hubs_product_of_no_columns() -> None:
    """The shape that is reported of a launch, without a division by K."""
    graph = Graph()
    nodes: list[Any] = [graph.placeholder(name) for name in ("a", "b", "s")]
    shapes = (torch.empty(2, 3, 0).bfloat16(), torch.empty(384, 0).to(torch.float8_e4m3fn), torch.ones(3, 0))
    for node, value in zip(nodes, shapes, strict=True):
        node.meta["val"] = value
    with torch.library._scoped_library("_finegrained_fp8_0z", "DEF") as library:
        library.define(
            "w8a8_block_dynamic_fp8_matmul(Tensor A, Tensor B, Tensor Bs, SymInt[] block_size, ScalarType? d) -> Tensor"
        )
        op = torch.ops._finegrained_fp8_0z.w8a8_block_dynamic_fp8_matmul.default
        out = graph.call_function(op, (*nodes, [64, 64], torch.bfloat16))
        out.meta["val"] = torch.empty(2, 3, 384).bfloat16()
        graph.output(out)
        (made,) = transformers_fp8.substitute(graph)
    assert (made.shape, made.reason) == ((6, 384, 0), "weight_block_size is [64, 64]; fp8fn has blocks of 128x128")
