"""Random small models of the spellings that patterns know: substituted and as they are, they agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from fp8fn.lowering.explain import _traced
from fp8fn.lowering.graph.substitute import Substitution
from support.dequantized import PRODUCTS, SPELLINGS, quantized_activation, weight

WIDTHS = (128, 256, 384)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": F.silu,
    "norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "fake quantization": quantized_activation,
    "residual of itself": lambda x: x + torch.tanh(x),
}
DOMAINS = [name for name in PRODUCTS if name not in ("weight (K, N)", "weight on the left", "addmm")]


@st.composite
def models(draw: st.DrawFn) -> tuple[Callable[..., Tensor], list[Tensor], int, float]:
    """A chain of one to three layers, its inputs, how many products it has with a stored weight, and what may differ.

    Where a product's result is quantized, sums in another order may round one of its values to the next in FP8.
    """
    count = draw(st.integers(1, 3))
    widths = [draw(st.sampled_from(WIDTHS)) for _ in range(count + 1)]
    layers = [
        (
            draw(st.sampled_from(sorted(SPELLINGS))),
            draw(st.sampled_from(sorted(DOMAINS))),
            draw(st.sampled_from(sorted(ACTIVATIONS))),
        )
        for _ in range(count)
    ]
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    rows = draw(st.integers(1, 40))
    x = torch.randn(2, rows, widths[0], generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    stored = []
    for n, k in zip(widths[1:], widths[:-1], strict=True):
        data, scale = weight((n, k))
        stored += [data, scale / k**0.5]  # results about as large as inputs

    def model(x: Tensor, *stored: Tensor) -> Tensor:
        for i, (spelling, product, activation) in enumerate(layers):
            w = SPELLINGS[spelling](stored[2 * i], stored[2 * i + 1], x.dtype)
            x = PRODUCTS[product](ACTIVATIONS[activation](x), w)
        return x

    if dtype != torch.float32:
        return model, [x, *stored], count, 3e-2 * count
    return model, [x, *stored], count, 1e-2 if "fake quantization" in [layer[2] for layer in layers[1:]] else 1e-4


def step(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    out = function(*inputs)
    (grad,) = torch.autograd.grad(out.float().square().mean(), inputs[0])
    return out.detach(), grad


@pytest.mark.slow
@given(models())
@settings(max_examples=40, deadline=None)
def test_random_models_agree(drawn: tuple[Callable[..., Tensor], list[Tensor], int, float]) -> None:
    model, inputs, count, bound = drawn
    found: list[Substitution] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Tensor]) -> Any:
        return _traced(gm, example_inputs, found)

    torch._dynamo.reset()
    actual = step(torch.compile(model, backend=backend, fullgraph=True), inputs)
    expected = step(model, inputs)
    assert len([made for made in found if not made.backward and made.reason is None]) == count
    for got, want in zip(actual, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert (got.double() - want.double()).norm() <= bound * want.double().norm() + 1e-30
