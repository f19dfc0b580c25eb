"""The SNR of a weight's gradient by the distribution of the activations, for both blocks that a wgrad may read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fp8fn
from fp8fn import Recipe
from support.accuracy import snr
from support.distributions import DISTRIBUTIONS

# dB of dW, and of its worst column: what docs/numerics.md says, with a margin of half a dB.
BLOCKWISE = {
    "normal": (28.8, 26.9), "Student t(3)": (29.4, 27.6), "Laplace": (29.0, 27.0),
    "outlier channels x1000": (28.8, 26.9), "outlier tokens x100": (31.5, 29.5),
    "channels over six decades": (28.9, 27.4), "silu(gate) * up": (29.3, 27.6),
}  # fmt: skip
SQUARE = {
    "normal": (28.7, 27.0), "Student t(3)": (28.8, 26.2), "Laplace": (28.7, 27.0),
    "outlier channels x1000": (28.7, 27.2), "outlier tokens x100": (28.8, 26.7),
    "channels over six decades": (28.6, -0.3), "silu(gate) * up": (28.7, 27.0),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [(fp8fn.BLOCKWISE, BLOCKWISE), (fp8fn.BLOCKWISE_SQUARE, SQUARE)],
    ids=lambda v: getattr(v, "key", ""),
)
def test_the_snr_of_a_weights_gradient(name: str, recipe: Recipe, wanted: dict[str, tuple[float, float]]) -> None:
    random = torch.Generator().manual_seed(0)
    x = DISTRIBUTIONS[name]((4096, 512), random).bfloat16()
    w = torch.randn(256, 512, generator=random).bfloat16().requires_grad_()
    g = torch.randn(4096, 256, generator=random).bfloat16()
    (found,) = torch.autograd.grad(fp8fn.linear(x, w, recipe=recipe), w, g)
    exact = g.double().mT @ x.double()
    wrong, power = (found.double() - exact).square(), exact.square()
    whole, columns = 10 * torch.log10(power.sum() / wrong.sum()), 10 * torch.log10(power.sum(0) / wrong.sum(0))
    assert abs(float(whole) - wanted[name][0]) < 0.5
    assert abs(float(columns.min()) - wanted[name][1]) < 0.5


def test_only_the_weights_gradient_differs() -> None:
    """The output and the gradient of x have the same bits, and dW is that of x in square blocks."""
    x, w, g = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((300, 200), (140, 200), (300, 140)))
    found = []
    for recipe in (fp8fn.BLOCKWISE, fp8fn.BLOCKWISE_SQUARE):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = fp8fn.linear(*leaves, recipe=recipe)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][2], found[1][2])
    square = fp8fn.quantize(g, (128, 1)).mT, fp8fn.quantize(x, (128, 128))
    assert torch.equal(found[1][2], fp8fn.gemm(*square))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    compiled = torch.compile(lambda x, w: fp8fn.linear(x, w, recipe=fp8fn.BLOCKWISE_SQUARE), backend="aot_eager")
    out = compiled(*leaves)
    for ours, eager in zip((out, *torch.autograd.grad(out, leaves, g)), found[1], strict=True):
        assert torch.equal(ours, eager)
    by_transform = torch.func.vjp(lambda w: fp8fn.linear(x, w, recipe=fp8fn.BLOCKWISE_SQUARE), w)[1](g)[0]
    assert torch.equal(by_transform, found[1][2])


@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("sizes", [(100, 0, 290), (1, 127, 128, 129)], ids=str)
def test_squares_of_groups_begin_at_each_groups_first_row(sizes: tuple[int, ...], column_major: bool) -> None:
    """The output and the gradient of x have the same bits, and dW is that of each group's rows alone."""
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    m, k, n = sum(sizes) + 10, 160, 72
    x, g = torch.randn(m, k), torch.randn(m, n)
    w = torch.randn(len(sizes), n, k).mT if column_major else torch.randn(len(sizes), k, n)
    found = []
    for recipe in (fp8fn.BLOCKWISE, fp8fn.BLOCKWISE_SQUARE):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = fp8fn.grouped_gemm(*leaves, ends, recipe=recipe)
        found.append((out, *torch.autograd.grad(out, leaves, g)))
    (out, dx, dw), (square_out, square_dx, square_dw) = found
    assert torch.equal(square_out, out)
    assert torch.equal(square_dx, dx)
    assert not torch.equal(square_dw, dw)
    assert square_dw.stride() == dw.stride() == w.stride()
    for got, rows, grad in zip(square_dw, x[: sum(sizes)].split(sizes), g[: sum(sizes)].split(sizes), strict=True):
        want = fp8fn.quantize(rows, (128, 128)).dequantize(torch.float32).mT.double()
        want = want @ fp8fn.quantize(grad, (128, 1)).dequantize(torch.float32).double()
        assert (got.double() - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_snr_of_an_experts_gradient(name: str) -> None:
    """The rows of each ragged group fill squares, as those of a matrix do."""
    random = torch.Generator().manual_seed(0)
    ends = torch.tensor([1500, 1500, 2700, 4096], dtype=torch.int32)
    x = DISTRIBUTIONS[name]((4096, 512), random).bfloat16()
    w = torch.randn(4, 512, 256, generator=random).bfloat16().requires_grad_()
    g = torch.randn(4096, 256, generator=random).bfloat16()
    out = fp8fn.grouped_gemm(x, w, ends, recipe=fp8fn.BLOCKWISE_SQUARE)
    (found,) = torch.autograd.grad(out, w, g)
    exact = torch.stack(
        [
            rows.double().mT @ grad.double()
            for rows, grad in zip(x.tensor_split(ends[:-1].tolist()), g.tensor_split(ends[:-1].tolist()), strict=True)
        ]
    )
    assert abs(snr(found, exact) - SQUARE[name][0]) < 0.5
    assert not found[1].any()


@pytest.mark.parametrize("eager", [False, True], ids=["nested transforms", "second_order"])
def test_a_second_derivative_of_groups_reads_columns(eager: bool) -> None:
    """As BLOCKWISE does: a product of groups of K quantizes both sides alike. The outermost level reads squares."""
    ends = torch.tensor([100, 200], dtype=torch.int32)
    x, w = torch.randn(200, 160), torch.randn(2, 160, 72)
    found = []
    for recipe in (fp8fn.BLOCKWISE, fp8fn.BLOCKWISE_SQUARE):
        given = dataclasses.replace(recipe, second_order=eager)

        def loss(w: torch.Tensor, recipe: Recipe = given) -> torch.Tensor:
            return fp8fn.grouped_gemm(x, w, ends, recipe=recipe).pow(3).sum()

        if eager:
            leaf = w.clone().requires_grad_()
            (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
        else:
            found.append(torch.func.grad(lambda w, loss=loss: torch.func.grad(loss)(w).square().sum())(w))
    assert torch.equal(*found) if eager else snr(*found) > 25


def test_other_squares_are_refused_for_groups_of_tokens() -> None:
    recipe = fp8fn.Recipe(wgrad_activation_block=(-1, -1))
    x, w, ends = torch.randn(200, 64), torch.randn(2, 64, 48), torch.tensor([100, 200], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"wgrad_activation_block=\(-1, -1\) does not fit groups of tokens"):
        fp8fn.grouped_gemm(x, w, ends, recipe=recipe)
