"""Largest magnitudes that Inductor's kernels find for quantizers of whole matrices: which, their bits, what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph, Node

import fp8fn
from fp8fn.lowering import post_grad_pass
from fp8fn.lowering.graph.nodes import arguments_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fresh_caches")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DUAL = torch.ops.fp8fn.quantize_dual.default


class Gated(nn.Module):
    """A norm and an activation, which Inductor computes, before products; the residual comes from a product."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 64)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(F.layer_norm(x, (128,))))
        y: Tensor = self.out(self.down(h))
        return y


def compiled(function: Callable[..., Any], recipe: str = "tensorwise", **options: Any) -> Callable[..., Any]:
    settings = {"recipe": recipe, "where": "*", **options}
    return torch.compile(function, backend="fp8fn", fullgraph=True, options=settings)


def step(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[Tensor], list[str]]:
    """Output and gradients, and the code of forward and backward."""
    torch._dynamo.reset()
    function = compiled(model, **options)

    def run() -> list[Tensor]:
        out = function(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), list(model.parameters()))]

    with fresh_cache():
        found: tuple[list[Tensor], list[str]] = run_and_get_code(run)
    return found


@pytest.mark.slow(but="torch.bfloat16")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_the_bits_stay(dtype: torch.dtype) -> None:
    """Also of values that round to the largest magnitude, which is found before they are rounded."""
    torch.manual_seed(0)
    model, x = Gated(dtype), torch.randn(48, 128).to(dtype)
    with post_grad_pass.recorded() as record:
        found, _ = step(model, x)
    # The norm's and the activation's result, and the gradient through the activation.
    assert [made.made for made in record] == ["fp8fn.quantize.default, amax given"] * 3
    expected, _ = step(model, x, fuse_quantize=False)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("value", [3.4e38, torch.inf, torch.nan, 0.0], ids=str)
def test_values_that_have_no_finite_scale(value: float) -> None:
    """3.4e38 is Inf in bfloat16, and so is the largest magnitude."""

    def quantized(x: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.fp8fn.quantize_dual((x * 1.0).to(BF16), (-1, -1))  # type: ignore[no-any-return]

    x = torch.randn(32, 64) * (value != 0)
    x[3, 5] = value
    with post_grad_pass.recorded() as record:
        found = compiled(quantized)(x)
    assert [made.reason for made in record] == [None]
    assert record[0].made == "fp8fn.quantize_dual.default, amax given"
    expected = quantized(x)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))


def given(graph: Graph) -> list[bool]:
    """Whether each quantizer is given its largest magnitude."""
    quantizers = [node for node in graph.nodes if node.target in (DUAL, torch.ops.fp8fn.quantize.default)]
    return [isinstance(arguments_of(node)["amax"], Node) for node in quantizers]


def captured(function: Callable[..., Any], *inputs: Tensor, recipe: str = "tensorwise", **options: Any) -> list[bool]:
    found: list[bool] = []
    original = post_grad_pass.fuse

    def fuse(graph: Graph, *options: Any) -> Any:
        made = original(graph, *options)
        found.extend(given(graph))
        return made

    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        patch.setattr(post_grad_pass, "fuse", fuse)
        compiled(function, recipe, **options)(*inputs)
    return found


class Two(nn.Module):
    """A product of `function`'s result, and one of that product."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(128, 256), nn.Linear(256, 128), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.function(x)))
        return out


def test_what_another_kernel_makes_is_left_alone() -> None:
    """An input, two weights, and the result of a product."""
    x = torch.randn(32, 128)
    assert captured(Two(lambda x: x), x) == [False] * 4
    torch._dynamo.reset()
    assert sorted(captured(Two(torch.tanh), x)) == [False, False, False, True]


def test_other_blocks_are_left_alone() -> None:
    for recipe in ("rowwise", "blockwise"):
        torch._dynamo.reset()
        found = captured(Two(torch.tanh), torch.randn(32, 128), recipe=recipe)
        assert found
        assert not any(found)


def test_a_magnitude_that_a_user_gives_stays() -> None:
    def quantized(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x)
        amax = torch.full((1, 1), 2.0)
        return torch.ops.fp8fn.quantize(y, (-1, -1), None, "fp32", amax)  # type: ignore[no-any-return]

    x = torch.randn(32, 128)
    with post_grad_pass.recorded() as record:
        found = compiled(quantized)(x)
    assert record == []
    assert float(found[1]) == pytest.approx(2 / 448)


def test_lengths_that_differ_share_a_graph() -> None:
    model = Two(torch.tanh)
    options = {"recipe": "tensorwise", "where": "*"}
    function = torch.compile(model, backend="fp8fn", dynamic=True, options=options)
    eager = fp8fn.fp8(model, recipe="tensorwise")
    for i, rows in enumerate((40, 77, 131)):
        x = torch.randn(rows, 128)
        with torch._dynamo.config.patch(error_on_recompile=i > 0), post_grad_pass.recorded() as record:
            found = function(x)
        assert [made.reason for made in record] == ([None] if i == 0 else [])
        expected = eager(x)
        assert (found - expected).norm() <= 5e-3 * expected.norm()
