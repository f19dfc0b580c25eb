"""Eager products keep a parameter itself for the backward, and no FP8 form of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import Recipe

M, K, N, EXPERTS = 96, 256, 384, 3
OFFSETS = torch.tensor([30, 60, M], dtype=torch.int32)
RECIPES = ("blockwise", "rowwise", "tensorwise", "mxfp8")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def linear(x: Tensor, weight: Tensor, recipe: Any) -> Tensor:
    return fp8fn.linear(x, weight, recipe=recipe)


def gemm(x: Tensor, weight: Tensor, recipe: Any) -> Tensor:
    return fp8fn.gemm(x, weight.view(K, N), recipe=recipe)


def grouped(x: Tensor, weight: Tensor, recipe: Any) -> Tensor:
    return fp8fn.grouped_gemm(x, weight, OFFSETS, recipe=recipe)


def transposed_experts(x: Tensor, weight: Tensor, recipe: Any) -> Tensor:
    return fp8fn.grouped_gemm(x, weight.view(EXPERTS, N, K).mT, OFFSETS, recipe=recipe)


def kept_by(call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    found: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        found.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    return out, found


def step(product: Callable[..., Tensor], weight: Tensor, recipe: Any) -> tuple[list[Tensor], int, int]:
    """The results and gradients, the bytes kept that are not the weight's own, and those kept in FP8."""
    x = random(M, K).requires_grad_()
    out, found = kept_by(lambda: product(x, weight, recipe))
    grads = torch.autograd.grad(out, (x, weight), random(*out.shape))
    own = weight.untyped_storage().data_ptr()
    others = [t.untyped_storage() for t in found if t.untyped_storage().data_ptr() != own]
    fp8 = sum(t.untyped_storage().nbytes() for t in found if t.dtype.itemsize == 1)
    return [out, *grads], sum(storage.nbytes() for storage in others), fp8


CASES = [(product, recipe) for recipe in RECIPES for product in (linear, gemm)]
CASES += [(product, recipe) for recipe in RECIPES[:2] for product in (grouped, transposed_experts)]


@pytest.mark.parametrize(("product", "recipe"), CASES)
def test_no_form_of_a_weight_is_kept(product: Callable[..., Tensor], recipe: str) -> None:
    shape = (EXPERTS, K, N) if product in (grouped, transposed_experts) else (N, K)
    preset = fp8fn.ops.recipe.parse_recipe(recipe)
    fields = {name: getattr(preset, name) for name in ("activation_block", "weight_block", "gradient_block", "scale")}
    keeping = Recipe(**fields, keep_weights=True)
    expected, kept, _ = step(product, nn.Parameter(random(*shape)), keeping)
    results, less, fp8 = step(product, nn.Parameter(random(*shape)), preset)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)
        assert result.stride() == other.stride()
    assert less <= kept - torch.Size(shape).numel()
    assert fp8 <= 1.1 * (M + 32 * EXPERTS) * K  # x, whose groups may be padded


def test_experts_of_an_mlp() -> None:
    up, down = nn.Parameter(random(EXPERTS, K, 2 * N)), nn.Parameter(random(EXPERTS, N, K))
    results = []
    for recipe in (fp8fn.BLOCKWISE, Recipe(keep_weights=True)):
        x = random(M, K).requires_grad_()
        out, found = kept_by(lambda x=x, recipe=recipe: fp8fn.expert_mlp(x, up, down, OFFSETS, recipe=recipe))
        grads = torch.autograd.grad(out, (x, up, down), random(M, K))
        weights = [t for t in found if t.dim() == 3 and t.dtype.itemsize == 1]
        results.append(([out, *grads], len(weights)))
    for result, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(result, other)
    assert [count for _, count in results] == [0, 2]


def test_a_frozen_weight_is_kept_as_it_is() -> None:
    weight = nn.Parameter(random(N, K), requires_grad=False)
    x = random(M, K).requires_grad_()
    out, found = kept_by(lambda: fp8fn.linear(x, weight))
    assert [t.untyped_storage().data_ptr() for t in found] == [weight.untyped_storage().data_ptr()]
    out.sum().backward()
    assert x.grad is not None


def test_an_activation_is_kept_in_fp8() -> None:
    """The right operand is no parameter: its 16-bit form would be kept for this product alone."""
    a, b = random(M, K).requires_grad_(), (random(K, N).requires_grad_() * 2)
    _, found = kept_by(lambda: fp8fn.gemm(a, b))
    assert all(t.dtype != torch.bfloat16 for t in found)


def test_a_weight_that_was_written_since_is_an_error() -> None:
    weight = nn.Parameter(random(N, K))
    out = fp8fn.linear(random(M, K).requires_grad_(), weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_func_grad_has_the_same_bits() -> None:
    x, weight = random(M, K), random(N, K)

    def loss(weight: Tensor, recipe: Recipe) -> Tensor:
        return fp8fn.linear(x, weight, recipe=recipe).float().square().sum()

    keeping = Recipe(keep_weights=True)
    leaf = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, keeping), leaf)
    assert torch.equal(torch.func.grad(loss)(weight, fp8fn.BLOCKWISE), expected)
    batch = torch.stack([weight, weight * 2])
    each = torch.func.vmap(lambda w: torch.func.grad(loss)(w, fp8fn.BLOCKWISE))(batch)
    assert torch.equal(each[0], expected)


@pytest.mark.parametrize("field", ["keep_weights", "second_order"])
def test_flags_of_a_recipe(field: str) -> None:
    assert fp8fn.ops.recipe.parse_recipe(f"{field}=True") == Recipe(**{field: True})
    with pytest.raises(TypeError, match=f"Recipe: {field}=1 is an int; use True or False"):
        Recipe(**{field: 1})


def test_ways_to_save() -> None:
    assert fp8fn.ops.recipe.parse_recipe("save=fp8") == Recipe(save="fp8")
    with pytest.raises(ValueError, match=r"Recipe: save='half' is not a way to save; use one of \('all', 'exact'"):
        Recipe(save="half")
