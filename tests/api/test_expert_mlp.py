"""`expert_mlp`: values, gradients and transforms against a float64 loop over the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import fp8fn
from fp8fn import Recipe
from support.accuracy import relative_error, snr
from support.gradients import gradients, saved_by, second_derivative
from support.graphs import assert_one_compile_serves
from support.operands.groups import EACH_RECIPE, LEFT, RECIPES, SIZES, ends, spans
from support.operands.values import normal

H, I = 136, 72  # noqa: E741

BF16, FP32 = torch.bfloat16, torch.float32


def loop(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor) -> Tensor:
    pieces = []
    for expert, (start, end) in enumerate(spans(offsets)):
        gate, up = (x[start:end] @ w_gate_up[expert]).chunk(2, -1)
        pieces.append((F.silu(gate) * up) @ w_down[expert])
    return torch.cat([*pieces, x[offsets[-1] :] * 0])


def composed(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: Any = fp8fn.BLOCKWISE) -> Tensor:
    gate, up = fp8fn.grouped_gemm(x, w_gate_up, offsets, recipe=recipe).chunk(2, -1)
    return fp8fn.grouped_gemm(F.silu(gate) * up, w_down, offsets, recipe=recipe)


def operands(
    tokens: int, experts: int, device: Any = "cpu", dtype: torch.dtype = BF16, transposed: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of which the products have the variance of their inputs, column-major as `torch.nn` has them."""
    return (
        normal(tokens, H, dtype=dtype, device=device),
        normal(experts, H, 2 * I, dtype=dtype, transposed=transposed, device=device) * H**-0.5,
        normal(experts, I, H, dtype=dtype, transposed=transposed, device=device) * I**-0.5,
    )


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@EACH_RECIPE
def test_end_to_end(recipe: Recipe, sizes: tuple[int, ...], device: torch.device) -> None:
    """23 dB for e4m3, not 25: two products, one after the other, of values that were rounded to FP8 each time."""
    offsets, tokens = ends(sizes, device), sum(sizes) + LEFT
    inputs = operands(tokens, len(sizes), device, transposed=tokens % 2 == 0)
    out_grad = normal(tokens, H, device=device)
    out, grads = gradients(lambda *args: fp8fn.expert_mlp(*args, offsets, recipe), out_grad, *inputs)
    want, grads64 = gradients(lambda *args: loop(*args, offsets), out_grad.double(), *(t.double() for t in inputs))
    need = 19 if recipe.gradient_dtype is torch.float8_e5m2 else 23
    for got, expected, x in zip((out, *grads), (want, *grads64), (inputs[0], *inputs), strict=True):
        assert (got.shape, got.dtype) == (x.shape, BF16)
        if expected.any():
            assert snr(got, expected) > need
        assert not got[(expected == 0).flatten(1).all(1)].any()  # empty experts, tokens past the last offset
        if x.ndim == 3:
            assert got.stride() == x.stride()


@EACH_RECIPE
def test_it_is_two_grouped_products(recipe: Recipe, device: torch.device) -> None:
    """But for roundings to 16 bits between them, which the products in FP8 do not see: so never less exact."""
    offsets = ends((30, 0, 150), device)
    inputs, out_grad = operands(190, 3, device), normal(190, H, device=device)
    got = gradients(lambda *args: fp8fn.expert_mlp(*args, offsets, recipe), out_grad, *inputs)
    want = gradients(lambda *args: composed(*args, offsets, recipe), out_grad, *inputs)
    exact = gradients(lambda *args: loop(*args, offsets), out_grad.double(), *(t.double() for t in inputs))
    for g, w, e in zip((got[0], *got[1]), (want[0], *want[1]), (exact[0], *exact[1]), strict=True):
        assert snr(g, w) > 32
        assert snr(g, e) > snr(w, e) - 0.3
    with torch.no_grad():
        assert torch.equal(fp8fn.expert_mlp(*inputs, offsets, recipe), got[0])
    again = gradients(lambda *args: fp8fn.expert_mlp(*args, offsets, recipe), out_grad, *inputs)
    assert all(torch.equal(x, y) for x, y in zip((got[0], *got[1]), (again[0], *again[1]), strict=True))


def test_gradients_of_some_operands_alone(device: torch.device) -> None:
    offsets = ends((30, 0, 50), device)
    inputs, out_grad = operands(80, 3, device), normal(80, H, device=device)
    _, grads = gradients(lambda *args: fp8fn.expert_mlp(*args, offsets), out_grad, *inputs)
    for which in ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1)):
        leaves = [x.detach().requires_grad_(i in which) for i, x in enumerate(inputs)]
        out = fp8fn.expert_mlp(*leaves, offsets)
        got = torch.autograd.grad(out, [leaves[i] for i in which], out_grad)
        assert all(torch.equal(g, grads[i]) for g, i in zip(got, which, strict=True))


@EACH_RECIPE
def test_nothing_leaks_out_of_an_expert(recipe: Recipe, device: torch.device) -> None:
    offsets, tokens = ends((40, 0, 130, 20), device), 190 + LEFT
    inputs, out_grad = operands(tokens, 4, device), normal(tokens, H, device=device)

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        out, grads = gradients(lambda *args: fp8fn.expert_mlp(*args, offsets, recipe), args[3], *args[:3])
        return out, *grads

    clean = run(*inputs, out_grad)
    bad = [t.clone() for t in (*inputs, out_grad)]
    rows = torch.zeros(tokens, dtype=torch.bool)
    rows[40:170] = rows[-LEFT:] = True
    bad[0][rows] = bad[3][rows] = bad[1][2] = float("nan")
    out, dx, *dw = run(*bad)
    for got, want in ((out, clean[0]), (dx, clean[1])):
        assert torch.equal(got[~rows], want[~rows])
        assert got[40:170].isnan().all()
        assert not got[-LEFT:].any()
    for got, want in zip(dw, clean[2:], strict=True):
        assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])
        assert not got[1].any()


@EACH_RECIPE
def test_what_is_saved(recipe: Recipe, device: torch.device) -> None:
    """In 16 bits only gate, up and the parameters are saved; every other large tensor takes a byte for an element."""
    offsets = ends((100, 28), device)
    inputs = [x.requires_grad_() for x in operands(128, 2, device)]
    own = {x.untyped_storage().data_ptr() for x in inputs[1:]}
    for kept, weights, count in ((recipe, 2, 8), (replace(recipe, keep_weights=True), 0, 10)):
        saved = saved_by(lambda kept=kept: fp8fn.expert_mlp(*inputs, offsets, kept))
        wide = [x for x in saved if x.dtype.itemsize > 1 and x.numel() > 128 * H / 32]
        parameters = [x for x in wide if x.untyped_storage().data_ptr() in own]
        assert [tuple(x.shape) for x in wide if x.untyped_storage().data_ptr() not in own] == [(128, 2 * I)]
        assert len(parameters) == weights
        assert len(saved) == count


def test_types(device: torch.device) -> None:
    offsets = ends((30, 0, 50), device)
    x, *weights = operands(80, 3, device)
    wide = [w.float() for w in weights]
    out, grads = gradients(lambda *args: fp8fn.expert_mlp(*args, offsets), normal(80, H, device=device), x, *wide)
    assert [t.dtype for t in (out, *grads)] == [BF16, BF16, FP32, FP32]
    with torch.autocast(device.type, dtype=torch.float16):
        assert fp8fn.expert_mlp(x.float(), *wide, offsets).dtype == torch.float16


def test_no_tokens_at_all(device: torch.device) -> None:
    offsets, inputs = ends((0, 0, 0), device), operands(0, 3, device)
    out, grads = gradients(lambda *args: fp8fn.expert_mlp(*args, offsets), torch.zeros(0, H, device=device), *inputs)
    assert out.shape == (0, H)
    assert not any(g.any() for g in grads)


def total(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor) -> Tensor:
    return fp8fn.expert_mlp(x, w_gate_up, w_down, offsets).float().square().sum()


def test_transforms() -> None:
    """`grad` is the eager backward; `vmap` is a loop, inside and out."""
    all_ends = torch.stack([ends((30, 0, 50)), ends((1, 60, 7))])
    pairs = [operands(85, 3) for _ in range(2)]
    batch = [torch.stack(list(xs)) for xs in zip(*pairs, strict=True)]
    got = vmap(grad(total, (0, 1, 2)))(*batch, all_ends)
    through = grad(lambda *args: vmap(total)(*args).sum(), (0, 1, 2))(*batch, all_ends)
    for i in range(2):
        want = grad(total, (0, 1, 2))(*pairs[i], all_ends[i])
        leaves = [x.clone().requires_grad_() for x in pairs[i]]
        eager = torch.autograd.grad(total(*leaves, all_ends[i]), leaves)
        for g, t, w, e in zip(got, through, want, eager, strict=True):
            assert torch.equal(w, e)
            assert relative_error(g[i], w) < 1e-5
            assert relative_error(t[i], w) < 1e-5


def test_forward_mode_and_second_derivatives() -> None:
    offsets, inputs = ends((30, 0, 50)), operands(80, 3, dtype=FP32)
    tangents = tuple(torch.randn_like(t) for t in inputs)
    jvp: Callable[..., Any] = torch.func.jvp
    _, tangent = jvp(lambda *args: fp8fn.expert_mlp(*args, offsets), inputs, tangents)
    doubles = tuple(tuple(t.double() for t in pair) for pair in (inputs, tangents))
    assert snr(tangent, jvp(lambda *args: loop(*args, offsets), *doubles)[1]) > 22

    def twice(total: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return grad(lambda *args: grad(total)(*args, offsets).square().sum() * 1e-2)

    want = twice(lambda *args: loop(*args).square().sum())(*doubles[0])
    assert relative_error(twice(total)(*inputs), want) < 0.15
    x, w_gate_up, w_down = inputs
    with pytest.raises(NotImplementedError, match=r"fp8fn\.expert_mlp: .*Recipe\(second_order=True\)"):
        second_derivative(lambda x, w: fp8fn.expert_mlp(x, w, w_down, offsets), x, w_gate_up)
    recipe = Recipe(second_order=True)
    got = second_derivative(lambda x, w: fp8fn.expert_mlp(x, w, w_down, offsets, recipe), x, w_gate_up)
    want = second_derivative(lambda x, w: loop(x, w, doubles[0][2], offsets), *doubles[0][:2])
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 0.15


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_compiled_for_every_number_of_tokens_once(recipe: str, fresh_dynamo: None, fresh_caches: None) -> None:
    def step(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor) -> Tensor:
        return torch.tanh(fp8fn.expert_mlp(x * 2, w_gate_up, w_down, offsets, RECIPES[recipe]))

    def problems() -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        for sizes, left in (((64, 0, 96), 0), ((1, 200, 7), 32), ((0, 900, 700), 0), ((0, 0, 0), 144)):
            tokens = sum(sizes) + left
            yield operands(tokens, 3), normal(tokens, H), ends(sizes)

    assert_one_compile_serves(step, problems, 2e-2)
