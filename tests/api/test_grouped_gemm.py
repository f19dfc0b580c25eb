"""`grouped_gemm`: values, gradients and transforms against a float64 loop over the groups; what may not leak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn import Recipe
from fp8fn.ops import scaled_grouped_mm as op
from fp8fn.ops import targets
from fp8fn.ops.cuda.quantize import turn
from fp8fn.ops.grouped_gemm import sum_groups
from fp8fn.ops.layout import swap
from fp8fn.ops.triton.launch import TritonLaunch
from support.accuracy import relative_error, snr
from support.gradients import gradients, saved_by, second_derivative
from support.graphs import assert_one_compile_serves
from support.operands.groups import EACH_RECIPE, LEFT, RECIPES, SIZES, ends, spans
from support.operands.values import dequantized, normal
from support.samples import SAMPLES

BF16, FP32 = torch.bfloat16, torch.float32
EACH_KIND = pytest.mark.parametrize("kind", ["rows", "k"])


def loop(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition of `grouped_gemm`, in the type of the operands and differentiable."""
    pieces = []
    for group, (start, end) in enumerate(spans(offsets)):
        out = a[start:end] @ b[group] if b.ndim == 3 else a[:, start:end] @ b[start:end]
        pieces.append(out if bias is None else out + bias[group])
    if b.ndim == 2:
        return torch.stack(pieces)
    return torch.cat([*pieces, a[offsets[-1] :] @ b[0] * 0])


def operands(
    kind: str, tokens: int, m: int, n: int, groups: int, device: Any = "cpu", dtype: torch.dtype = BF16,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(T, m)` and `(E, m, n)`, or `(m, T)` and `(T, n)`."""
    if kind == "rows":
        b = normal(groups, m, n, dtype=dtype, transposed=transposed, device=device)
        return normal(tokens, m, dtype=dtype, device=device), b
    a = normal(m, tokens, dtype=dtype, transposed=not transposed, device=device)
    return a, normal(tokens, n, dtype=dtype, transposed=transposed, device=device)


def check_end_to_end(
    kind: str, sizes: tuple[int, ...], m: int, n: int, recipe: Recipe, transposed: bool, device: Any = "cpu"
) -> None:
    """Out, dA and dB against float64, and zeros where there is nothing."""
    offsets = ends(sizes, device)
    tokens = sum(sizes) + LEFT
    a, b = operands(kind, tokens, m, n, len(sizes), device, transposed=transposed)
    out_grad = normal(tokens, n, device=device) if kind == "rows" else normal(len(sizes), m, n, device=device)
    got = gradients(lambda a, b: fp8fn.grouped_gemm(a, b, offsets, recipe=recipe), out_grad, a, b)
    want = gradients(lambda a, b: loop(a, b, offsets), out_grad.double(), a.double(), b.double())
    needs = (25, *(2 * (20 if recipe.gradient_dtype is torch.float8_e5m2 else 25,)))
    for x, y, like, need in zip((got[0], *got[1]), (want[0], *want[1]), (None, a, b), needs, strict=True):
        assert x.shape == y.shape
        assert x.dtype == BF16
        if y.any():
            assert snr(x, y) > need
        x, y = (t.mT if like is a and kind == "k" else t for t in (x, y))
        assert not x[(y == 0).all(-1)].any()  # empty groups, tokens past the last offset
        if like is b and kind == "rows":
            assert x.stride() == b.stride()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@EACH_KIND
@EACH_RECIPE
def test_end_to_end(recipe: Recipe, kind: str, sizes: tuple[int, ...], device: torch.device) -> None:
    check_end_to_end(kind, sizes, 150, 70, recipe, sum(sizes) % 2 == 0, device)


drawn = st.lists(st.one_of(st.sampled_from([0, 1, 3, 127, 128, 129]), st.integers(0, 90)), min_size=1, max_size=9)


@EACH_KIND
def test_end_to_end_of_drawn_groups(kind: str) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(drawn, st.integers(40, 200), st.integers(40, 200), st.sampled_from(list(RECIPES)), st.booleans())
    def check(sizes: list[int], m: int, n: int, recipe: str, transposed: bool) -> None:
        check_end_to_end(kind, tuple(sizes), m, n, RECIPES[recipe], transposed)

    check()


def exact(q: Any) -> Tensor:
    return fp8fn.dequantize(q, FP32).double()


@pytest.mark.parametrize("storage", ["row", "column"])
@EACH_RECIPE
def test_values_are_those_of_each_group_alone(recipe: Recipe, storage: str, device: torch.device) -> None:
    """The float64 product of what `quantize` makes of a group by itself: no scale has seen another group."""
    offsets = ends(SIZES["around a block"], device)
    a, b = operands("rows", 390, 190, 65, 5, device, FP32, storage == "column")
    a_args = {"dtype": recipe.activation_dtype, "scale": recipe.scale}
    b_args = {"dtype": recipe.weight_dtype, "scale": recipe.scale}
    out = fp8fn.grouped_gemm(a, b, offsets, recipe=recipe)
    for group, (start, end) in enumerate(spans(offsets)):
        left = exact(fp8fn.quantize(a[start:end], recipe.activation_block, **a_args))
        want = left @ exact(fp8fn.quantize(b[group], recipe.weight_block, **b_args))
        assert not want.numel() or snr(out[start:end], want) > 50
    block = recipe.activation_block
    a, b = operands("k", 390, 90, 65, 5, device, FP32, storage == "column")
    out = fp8fn.grouped_gemm(a, b, offsets, recipe=recipe)
    for group, (start, end) in enumerate(spans(offsets)):
        left = exact(fp8fn.quantize(a[:, start:end], block, **a_args))
        want = left @ exact(fp8fn.quantize(b[start:end], swap(block), **b_args))
        assert not want.any() or snr(out[group], want) > 50


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["blockwise", Recipe(keep_weights=True)], ids=str)
def test_a_checkpoint_makes_the_gradients_that_it_makes_without(recipe: Any, reentrant: bool) -> None:
    """Which unpacks each saved tensor once."""
    offsets = ends((2, 0, 3)).to(torch.int32)

    def gradients_of(checkpointed: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        a, b, bias = (torch.randn(*s, requires_grad=True) for s in ((5, 256), (3, 256, 128), (3, 128)))

        def product(a: Tensor) -> Tensor:
            return fp8fn.grouped_gemm(a, b, offsets, bias=bias, recipe=recipe)

        out = checkpoint(product, a, use_reentrant=reentrant) if checkpointed else product(a)
        return torch.autograd.grad(out.square().sum(), (a, b, bias)) if not reentrant else _backward(out, (a, b, bias))

    for found, wanted in zip(gradients_of(True), gradients_of(False), strict=True):
        assert torch.equal(found, wanted)


def _backward(out: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out.square().sum().backward()
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


def test_what_torch_calls_a_grouped_product(device: torch.device) -> None:
    """The same arguments as `torch._grouped_mm`'s, and the same shapes."""
    offsets = ends((16, 48, 0, 32), device)
    a, b = normal(96, 64, device=device), normal(4, 64, 32, transposed=True, device=device)
    out = torch._grouped_mm(a, b, offs=offsets)
    assert snr(fp8fn.grouped_gemm(a, b, offsets), out) > 25
    left, right = normal(64, 96, device=device), normal(96, 32, transposed=True, device=device)
    out = torch._grouped_mm(left, right, offs=offsets)
    assert snr(fp8fn.grouped_gemm(left, right, offsets), out) > 25
    batch = normal(4, 16, 64, device=device)
    assert snr(fp8fn.grouped_gemm(batch, b), torch._grouped_mm(batch, b)) > 25


def test_without_offsets_it_is_the_batched_product(device: torch.device) -> None:
    a, b = normal(3, 40, 130, device=device), normal(3, 130, 50, device=device)
    bias = torch.randn(3, 50, device=device)
    assert torch.equal(fp8fn.grouped_gemm(a, b, recipe="mxfp8"), fp8fn.gemm(a, b, recipe="mxfp8"))
    out, (da, db, dbias) = gradients(
        lambda a, b, bias: fp8fn.grouped_gemm(a, b, bias=bias), normal(3, 40, 50, device=device), a, b, bias
    )
    want = (fp8fn.gemm(a, b, out_dtype=FP32) + bias[:, None]).to(BF16)
    assert torch.equal(out, want)
    assert (da.shape, db.shape, dbias.shape) == (a.shape, b.shape, bias.shape)


@EACH_KIND
def test_bias_and_its_gradient(kind: str, device: torch.device) -> None:
    sizes = (0, 130, 7, 90)
    offsets, tokens = ends(sizes, device), sum(sizes) + LEFT
    a, b = operands(kind, tokens, 70, 40, 4, device)
    bias = torch.randn(4, 40, device=device)
    out_grad = normal(tokens, 40, device=device) if kind == "rows" else normal(4, 70, 40, device=device)
    out, (*_, dbias) = gradients(lambda a, b, bias: fp8fn.grouped_gemm(a, b, offsets, bias=bias), out_grad, a, b, bias)
    plain = fp8fn.grouped_gemm(a, b, offsets, out_dtype=FP32)
    want, (*_, dwant) = gradients(
        lambda a, b, bias: loop(a, b, offsets, bias), out_grad.double(), a.double(), b.double(), bias.double()
    )
    assert snr(out, want) > 25
    torch.testing.assert_close(dbias.double(), dwant, rtol=1e-5, atol=1e-5)
    added = torch.zeros_like(plain)
    for group, (start, end) in enumerate(spans(offsets)):
        added[slice(start, end) if kind == "rows" else group] += bias[group]
    assert torch.equal(out, (plain + added).to(BF16))  # one rounding
    if kind == "rows":
        assert not out[-LEFT:].any()
    _, (alone,) = gradients(lambda bias: fp8fn.grouped_gemm(a, b, offsets, bias=bias), out_grad, bias)
    assert torch.equal(alone, dbias)


@pytest.mark.parametrize("sizes", [*SIZES.values(), (1000, 1, 1, 0, 30), (0,) * 70 + (5,)], ids=str)
def test_sums_of_groups(sizes: tuple[int, ...], device: torch.device) -> None:
    offsets = ends(sizes, device)
    x = torch.randn(sum(sizes) + LEFT, 9, device=device)
    x[-LEFT:] = float("nan")
    want = torch.stack([x[start:end].double().sum(0) for start, end in spans(offsets)])
    got = sum_groups(x, offsets)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(sum_groups(x, offsets), got)
    if max(sizes) > 0:
        hit = max(range(len(sizes)), key=lambda group: sizes[group])
        x[spans(offsets)[hit][0]] = float("inf")
        others = [group for group in range(len(sizes)) if group != hit]
        again = sum_groups(x, offsets)
        assert not again[hit].isfinite().any()
        assert torch.equal(again[others], got[others])


def test_sums_of_groups_of_a_number_of_tokens_that_is_data() -> None:
    """Traced for some tokens that a mask leaves, and run for as many as there may be, none included."""
    x, rows, offsets = torch.randn(20, 9), torch.arange(20), ends((2, 0, 7))
    trace = make_fx(lambda mask, x, offsets: sum_groups(x[mask], offsets), tracing_mode="symbolic")
    graph = trace(rows < 7, x, offsets)
    for tokens in (0, 1, 7, 20):
        want = torch.stack([x[:tokens][start:end].double().sum(0) for start, end in spans(offsets)])
        torch.testing.assert_close(graph(rows < tokens, x, offsets).double(), want, rtol=1e-5, atol=1e-5)


@EACH_RECIPE
@EACH_KIND
def test_nothing_leaks_out_of_a_group(kind: str, recipe: Recipe, device: torch.device) -> None:
    """NaN in one group, and in tokens past the last offset, of operands and of the gradient."""
    sizes = (40, 30, 0, 130, 20)
    offsets, tokens = ends(sizes, device), sum(sizes) + LEFT
    a, b = operands(kind, tokens, 70, 40, 5, device)
    out_grad = normal(tokens, 40, device=device) if kind == "rows" else normal(5, 70, 40, device=device)
    bias = torch.randn(5, 40, device=device)

    def run(a: Tensor, b: Tensor, out_grad: Tensor) -> tuple[Tensor, ...]:
        out, grads = gradients(
            lambda a, b, bias: fp8fn.grouped_gemm(a, b, offsets, bias=bias, recipe=recipe), out_grad, a, b, bias
        )
        return out, *grads

    clean = run(a, b, out_grad)
    bad_a, bad_b, bad_grad = a.clone(), b.clone(), out_grad.clone()
    start, end = spans(offsets)[3]
    rows = torch.zeros(tokens, dtype=torch.bool)
    rows[start:end] = rows[-LEFT:] = True
    in_k = kind == "k"
    (bad_a.mT if in_k else bad_a)[rows] = float("nan")
    (bad_b if in_k else bad_b[3])[rows if in_k else ...] = float("nan")
    bad_grad[3 if in_k else rows] = float("nan")
    others = [group for group in range(5) if group != 3]
    for got, want, by_token in zip(run(bad_a, bad_b, bad_grad), clean, (not in_k, True, in_k, False), strict=True):
        x, y = (t.mT if in_k and got.shape == a.shape else t for t in (got, want))
        if by_token:
            assert torch.equal(x[~rows], y[~rows])
            assert not x[-LEFT:].any()
            assert x[start:end].isnan().all()
        else:
            assert torch.equal(x[others], y[others])
            assert x[3].isnan().all()


@EACH_KIND
@EACH_RECIPE
def test_no_tokens_at_all(recipe: Recipe, kind: str, device: torch.device) -> None:
    offsets = ends((0, 0, 0), device)
    a, b = operands(kind, 0, 70, 40, 3, device)
    out_grad = normal(*((0, 40) if kind == "rows" else (3, 70, 40)), device=device)
    bias = torch.randn(3, 40, device=device)
    out, grads = gradients(
        lambda a, b, bias: fp8fn.grouped_gemm(a, b, offsets, bias=bias, recipe=recipe), out_grad, a, b, bias
    )
    assert out.shape == out_grad.shape
    assert torch.equal(out, bias.to(BF16)[:, None].expand(3, 70, 40) if kind == "k" else out_grad)
    assert not grads[0].any()
    assert not grads[1].any()
    assert [g.shape for g in grads] == [a.shape, b.shape, bias.shape]


@pytest.mark.parametrize("shape", [(40, 0), (0, 50), (0, 0)], ids=str)
@EACH_KIND
def test_zero_sizes(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    m, n = shape
    offsets = ends((10, 0, 6), device)
    a, b = operands(kind, 20, m, n, 3, device)
    out_grad = torch.ones((20, n) if kind == "rows" else (3, m, n), dtype=BF16, device=device)
    out, (da, db) = gradients(lambda a, b: fp8fn.grouped_gemm(a, b, offsets), out_grad, a, b)
    assert torch.equal(out, torch.zeros_like(out_grad))
    assert torch.equal(da, torch.zeros_like(a))
    assert torch.equal(db, torch.zeros_like(b))


def test_gradients_of_one_operand_alone(device: torch.device) -> None:
    offsets = ends((30, 0, 50), device)
    for kind in ("rows", "k"):
        a, b = operands(kind, 80, 70, 40, 3, device)
        out_grad = normal(*((80, 40) if kind == "rows" else (3, 70, 40)), device=device)
        _, (da, db) = gradients(lambda a, b: fp8fn.grouped_gemm(a, b, offsets), out_grad, a, b)
        _, (only_a,) = gradients(lambda a, b=b: fp8fn.grouped_gemm(a, b, offsets), out_grad, a)
        _, (only_b,) = gradients(lambda b, a=a: fp8fn.grouped_gemm(a, b, offsets), out_grad, b)
        assert torch.equal(only_a, da)
        assert torch.equal(only_b, db)


def test_types(device: torch.device) -> None:
    offsets = ends((30, 0, 50), device)
    a, b = operands("rows", 80, 70, 40, 3, device)
    weight, out_grad = b.float(), normal(80, 40, device=device)
    out, (da, db) = gradients(lambda a, b: fp8fn.grouped_gemm(a, b, offsets), out_grad, a, weight)
    assert (out.dtype, da.dtype, db.dtype) == (BF16, BF16, FP32)
    full = fp8fn.grouped_gemm(a, b, offsets, out_dtype=FP32)
    assert full.dtype == FP32
    assert torch.equal(full.to(BF16), out)
    with torch.autocast(device.type, dtype=torch.float16):
        assert fp8fn.grouped_gemm(a.float(), weight, offsets).dtype == torch.float16


@EACH_RECIPE
@EACH_KIND
def test_same_bits_every_run_and_inputs_untouched(kind: str, recipe: Recipe, device: torch.device) -> None:
    offsets = ends((30, 0, 150), device)
    inputs = (*operands(kind, 190, 70, 40, 3, device), torch.randn(3, 40, device=device))
    out_grad = normal(*((190, 40) if kind == "rows" else (3, 70, 40)), device=device)
    before = [x.clone() for x in (*inputs, offsets, out_grad)]

    def run() -> tuple[Tensor, ...]:
        out, grads = gradients(
            lambda a, b, bias: fp8fn.grouped_gemm(a, b, offsets, bias=bias, recipe=recipe), out_grad, *inputs
        )
        return out, *grads

    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))
    assert all(torch.equal(x, y) for x, y in zip((*inputs, offsets, out_grad), before, strict=True))


@EACH_RECIPE
@EACH_KIND
def test_no_wide_form_of_an_operand_is_saved(kind: str, recipe: Recipe, device: torch.device) -> None:
    offsets = ends((100, 28), device)
    a, b = (x.requires_grad_() for x in operands(kind, 128, 256, 128, 2, device))
    less = saved_by(lambda: fp8fn.grouped_gemm(a, b, offsets, recipe=recipe))
    wide = [x.data_ptr() for x in less if x.dtype.itemsize > 1 and x.numel() > a.numel() / 32]
    assert wide == ([b.data_ptr()] if kind == "rows" else [])  # a batch of weights, which takes no memory
    assert len(less) == (4 if kind == "rows" else 5)
    saved = saved_by(lambda: fp8fn.grouped_gemm(a, b, offsets, recipe=replace(recipe, keep_weights=True)))
    assert len(saved) == 5
    for x in saved:
        assert x.dtype.itemsize == 1 or x.numel() <= a.numel() / 32
    assert saved_by(lambda: fp8fn.grouped_gemm(a.detach(), b.detach(), offsets)) == []


@EACH_KIND
def test_product_of_quantized_operands_is_the_forward(kind: str, device: torch.device) -> None:
    offsets = ends((30, 0, 150), device)
    a, b = operands(kind, 190, 70, 40, 3, device)
    bias = torch.randn(3, 40, device=device)
    for recipe, block in ((fp8fn.BLOCKWISE, 128), (fp8fn.ROWWISE, -1)):
        want = fp8fn.grouped_gemm(a, b, offsets, bias=bias, recipe=recipe)
        if kind == "rows":
            left, right = fp8fn.quantize(a, recipe.activation_block), fp8fn.quantize(b, recipe.weight_block)
            assert torch.equal(fp8fn.grouped_gemm(left, right, offsets, bias=bias), want)
        else:
            columns = fp8fn.quantize_grouped(a, offsets, 1, block=block)
            rows = fp8fn.quantize_grouped(b, offsets, block=block)
            assert torch.equal(fp8fn.grouped_gemm(columns, rows, bias=bias), want)


def test_the_op_of_a_device_runs_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, against the reference; plain PyTorch for a type that the device lacks, and nothing for nothing."""
    names: list[str] = []

    def run(launch: TritonLaunch) -> None:
        names.append(launch.name)
        launch.interpret()

    monkeypatch.setattr(targets, "target_of", lambda device: targets.SM90)
    monkeypatch.setattr(turn, "accepts", lambda _: "its launch can't be interpreted")
    monkeypatch.setattr(TritonLaunch, "run", run)
    for label, kernel in {
        "plain_columns": "grouped_rows_mm", "ragged": "grouped_rows_mm", "strided": "grouped_rows_mm",
        "ragged_summed": "grouped_k_mm", "ragged_summed_whole": "grouped_k_mm", "empty_summed": "grouped_k_mm",
        "empty": None,
    }.items():  # fmt: skip
        sample = next(sample for sample in SAMPLES["scaled_grouped_mm"]() if sample.label == label)
        names.clear()
        got = op.scaled_grouped_mm_kernel(*sample.args, **sample.kwargs)
        want = op.scaled_grouped_mm_reference(*sample.args, **sample.kwargs)
        turned = ["turn"] * (label == "ragged")  # whose weights lie along N
        assert names == ([] if kernel is None else [*turned, kernel])
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3)
    names.clear()
    sample = next(sample for sample in SAMPLES["scaled_grouped_mm"]() if sample.label == "ragged")
    fnuz = [arg.view(torch.uint8).view(torch.float8_e4m3fnuz) if isinstance(arg, Tensor) and arg.dtype.itemsize == 1
            else arg for arg in sample.args]  # fmt: skip
    op.scaled_grouped_mm_kernel(*fnuz)
    assert names == []


# Transforms


def loss(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return fp8fn.grouped_gemm(a, b, offsets).float().square().sum()


def loss64(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return loop(a, b, offsets).square().sum()


@EACH_KIND
def test_func_grad_is_the_eager_backward(kind: str) -> None:
    offsets = ends((30, 0, 50))
    a, b = operands(kind, 85, 130, 70, 3)
    got = grad(loss, (0, 1))(a, b, offsets)
    leaves = [x.clone().requires_grad_() for x in (a, b)]
    for g, want in zip(got, torch.autograd.grad(loss(*leaves, offsets), leaves), strict=True):
        assert torch.equal(g, want)
    out, pull = vjp(lambda a: fp8fn.grouped_gemm(a, b, offsets), a)
    assert torch.equal(pull(out)[0], gradients(lambda a: fp8fn.grouped_gemm(a, b, offsets), out, a)[1][0])


@EACH_KIND
def test_vmap_of_grad_and_grad_of_vmap(kind: str) -> None:
    """Each element of the batch has its own tokens, its own groups and its own scales."""
    all_ends = torch.stack([ends((30, 0, 50)), ends((1, 60, 7))])
    pairs = [operands(kind, 85, 130, 70, 3) for _ in range(2)]
    a, b = (torch.stack(list(xs)) for xs in zip(*pairs, strict=True))
    bias = torch.randn(2, 3, 70)

    def total(a: Tensor, b: Tensor, bias: Tensor, all_ends: Tensor) -> Tensor:
        return fp8fn.grouped_gemm(a, b, all_ends, bias=bias).float().square().sum()

    got = vmap(grad(total, (0, 1, 2)))(a, b, bias, all_ends)
    for i in range(2):
        want = grad(total, (0, 1, 2))(a[i], b[i], bias[i], all_ends[i])
        for g, w in zip(got, want, strict=True):
            assert relative_error(g[i], w) < 1e-5
    through = grad(lambda *args: vmap(total)(*args).sum(), (0, 1, 2))(a, b, bias, all_ends)
    for g, t in zip(got, through, strict=True):
        assert relative_error(t, g) < 1e-5


@EACH_KIND
def test_jvp(kind: str) -> None:
    offsets = ends((30, 0, 50))
    a, b = operands(kind, 85, 130, 70, 3)
    bias = torch.randn(3, 70)
    tangents = torch.randn_like(a), torch.randn_like(b), torch.randn_like(bias)
    jvp: Callable[..., Any] = torch.func.jvp

    def product(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return fp8fn.grouped_gemm(a, b, offsets, bias=bias)

    out, tangent = jvp(product, (a, b, bias), tangents)
    want = jvp(lambda *args: loop(args[0], args[1], offsets, args[2]), *(
        tuple(t.double() for t in pair) for pair in ((a, b, bias), tangents)
    ))  # fmt: skip
    assert torch.equal(out, product(a, b, bias))
    assert snr(tangent, want[1]) > 25
    if kind == "rows":
        assert not tangent[80:].any()
    with pytest.raises(NotImplementedError, match="jvp of jvp is not supported"):
        jvp(lambda x: jvp(lambda a: product(a, b, bias), (x,), tangents[:1])[1], (a,), tangents[:1])


@EACH_KIND
def test_second_derivatives(kind: str) -> None:
    offsets = ends((30, 0, 50))
    a, b = operands(kind, 80, 130, 70, 3, dtype=FP32)

    def twice(loss: Callable[..., Tensor], argnums: int) -> Callable[..., Tensor]:
        return grad(lambda *args: grad(loss)(*args).square().sum() * 1e-4, argnums)

    for argnums in (0, 1):
        got, want = twice(loss, argnums)(a, b, offsets), twice(loss64, argnums)(a.double(), b.double(), offsets)
        assert relative_error(got, want) < 0.1
    with pytest.raises(NotImplementedError, match=r"Recipe\(second_order=True\)"):
        second_derivative(lambda a, b: fp8fn.grouped_gemm(a, b, offsets), a, b)
    recipe = Recipe(second_order=True)
    got = second_derivative(lambda a, b: fp8fn.grouped_gemm(a, b, offsets, recipe=recipe), a, b)
    want = second_derivative(lambda a, b: loop(a, b, offsets), a.double(), b.double())
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 0.08
    ones = torch.ones(80, 70) if kind == "rows" else torch.ones(3, 130, 70)
    kept = gradients(lambda a, b: fp8fn.grouped_gemm(a, b, offsets, recipe=recipe), ones, a, b)
    plain = gradients(lambda a, b: fp8fn.grouped_gemm(a, b, offsets), ones, a, b)
    assert torch.equal(kept[0], plain[0])
    for g, p in zip(kept[1], plain[1], strict=True):
        torch.testing.assert_close(g, p)


@EACH_KIND
def test_each_gradient_of_kept_operands_is_the_product_of_its_own_recipe(kind: str) -> None:
    """With one type for each operand: expected are float64 products of each group's dequantized operands."""
    types = {"x": torch.float8_e4m3fn, "w": torch.float8_e4m3fnuz, "g": torch.float8_e5m2}
    recipe = Recipe(
        activation_dtype=types["x"], weight_dtype=types["w"], gradient_dtype=types["g"], second_order=True
    )  # fmt: skip
    offsets = ends((30, 0, 50))
    a, b = operands(kind, 80, 130, 70, 3, dtype=FP32)
    grad = normal(*((80, 70) if kind == "rows" else (3, 130, 70)), dtype=FP32)
    _, (da, db) = gradients(lambda a, b: fp8fn.grouped_gemm(a, b, offsets, recipe=recipe), grad, a, b)

    def product(left: Tensor, left_type: str, right: Tensor, right_type: str, right_block: tuple[int, int]) -> Tensor:
        rows = dequantized(left, (1, 128), types[left_type], "fp32")
        return rows @ dequantized(right, right_block, types[right_type], "fp32")

    square, columns = (128, 128), (128, 1)
    for group, (start, end) in enumerate(spans(offsets)):
        if start == end:
            continue
        part = slice(start, end)
        if kind == "rows":
            got, want = da[part], product(grad[part], "g", b[group].mT, "w", square)
            got_b, want_b = db[group], product(a[part].mT, "x", grad[part], "g", columns)
        else:
            got, want = da[:, part].mT, product(b[part], "w", grad[group].mT, "g", columns)
            got_b, want_b = db[part], product(a[:, part].mT, "x", grad[group], "g", columns)
        assert snr(got, want) > 100
        assert snr(got_b, want_b) > 100


@pytest.mark.parametrize(
    ("name", "label"),
    [("grouped_gemm", label) for label in ("plain_bias", "ragged_whole", "ragged_k", "strided_k", "batched", "empty")]
    + [("expert_mlp", label) for label in ("ragged", "empty")],
)
# torch's own fake check reads .grad of every tensor that an inner op receives, of a reshaped operand too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_opcheck_with_gradients(name: str, label: str, fp8_opcheck: Callable[..., dict[str, str]]) -> None:
    sample = next(sample for sample in SAMPLES[name]() if sample.label == label)
    floats = (t.clone().requires_grad_() if t.is_floating_point() else t for t in sample.tensors)
    result = fp8_opcheck(getattr(torch.ops.fp8fn, name).default, sample.with_tensors(tuple(floats)), sample.kwargs)
    assert set(result.values()) == {"SUCCESS"}


@EACH_KIND
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_compiled_for_every_number_of_tokens_once(
    kind: str, recipe: str, fresh_dynamo: None, fresh_caches: None
) -> None:
    """The ends of groups are data: neither they nor the number of tokens compile anything again."""

    def step(a: Tensor, b: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        return torch.tanh(fp8fn.grouped_gemm(a * 2, b, offsets, bias=bias, recipe=RECIPES[recipe]))

    def problems() -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        for sizes, left in (
            ((64, 0, 96), 0), ((1, 200, 7), 32), ((0, 0, 0), 144), ((1000, 3, 529), 36), ((400, 3, 29), 0)
        ):  # fmt: skip
            tokens = sum(sizes) + left
            out_grad = normal(*((tokens, 272) if kind == "rows" else (3, 144, 272)))
            yield (*operands(kind, tokens, 144, 272, 3), torch.randn(3, 272)), out_grad, ends(sizes)

    assert_one_compile_serves(step, problems, 1e-2)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_where_the_number_of_tokens_is_data(fresh_dynamo: None) -> None:
    """Tokens are selected inside, few and many: no check may ask for their number."""

    def step(x: Tensor, taken: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x[taken.nonzero().squeeze(1)]
        q = fp8fn.quantize_grouped(tokens, offsets)
        return fp8fn.grouped_gemm(q.mT, q), fp8fn.grouped_gemm(tokens.mT, tokens, offsets)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for i, count in enumerate((300, 1300, 200)):
        x, taken = normal(count + 20, 48), torch.ones(count + 20, dtype=torch.bool)
        taken[::17] = False
        offsets = ends((3, count // 2))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = compiled(x, taken, offsets)
        for g, w in zip(got, step(x, taken, offsets), strict=True):
            assert torch.equal(g, w)


A, B, ENDS = torch.zeros(32, 64, dtype=BF16), torch.zeros(3, 64, 48, dtype=BF16), ends((10, 0, 20))
QA, QB = fp8fn.quantize(A, (1, 128)), fp8fn.quantize(B, (128, 128))
LEFT_K, RIGHT_K = fp8fn.quantize_grouped(A, ENDS).mT, fp8fn.quantize_grouped(A, ENDS)


def scaled(**changed: Any) -> Any:
    names = ("a", "a_scale", "a_block", "b", "b_scale", "b_block", "offsets", "bias", "out_dtype")
    good = (QA.data, QA.scale, QA.block, QB.data, QB.scale, QB.block, ENDS, None, None)
    return torch.ops.fp8fn.scaled_grouped_mm(*{**dict(zip(names, good, strict=True)), **changed}.values())


def summed(**changed: Any) -> Any:
    left = {"a": LEFT_K.data, "a_scale": LEFT_K.scale, "a_block": (1, 128)}
    return scaled(**{**left, "b": RIGHT_K.data, "b_scale": RIGHT_K.scale, "b_block": (128, 1), **changed})


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "K": (lambda: fp8fn.grouped_gemm(A, B.mT, ENDS), ValueError, ("K=64", "K=48", "pass weight.mT")),
    "experts": (lambda: fp8fn.grouped_gemm(A, B, ENDS[:2]), ValueError, ("2 ends", "3 experts", "equal to the one")),
    "long": (lambda: fp8fn.grouped_gemm(A, B, ENDS.long()), TypeError, ("torch.int64", "offsets.to(torch.int32)")),
    "rank of offsets": (lambda: fp8fn.grouped_gemm(A, B, ENDS[None]), ValueError, ("(1, 3)", "must be (E,)")),
    "no ends": (lambda: fp8fn.grouped_gemm(A, B[:0], ENDS[:0]), ValueError, ("(0,)", "E >= 1")),
    "device": (lambda: fp8fn.grouped_gemm(A, B, ENDS.to("meta")), ValueError, ("offsets on meta", "move them")),
    "batch and matrix": (lambda: fp8fn.grouped_gemm(B, A, ENDS), ValueError, ("grouped_gemm(b.mT, a.mT, offsets).mT",)),
    "no offsets": (lambda: fp8fn.grouped_gemm(A, B), ValueError, ("offsets is None", "(E, M, K)")),
    "batches": (lambda: fp8fn.grouped_gemm(B.mT, B[:2]), ValueError, ("batch 3", "2", "equal")),
    "integers": (lambda: fp8fn.grouped_gemm(A.int(), B, ENDS), TypeError, ("torch.int32", "use bfloat16")),
    "bias": (lambda: fp8fn.grouped_gemm(A, B, ENDS, bias=A[0, :48]), ValueError, ("(48,)", "must be (3, 48)")),
    "bias's dtype": (
        lambda: fp8fn.grouped_gemm(A, B, ENDS, bias=B[:, 0].double()), TypeError, ("bias has dtype torch.float64",),
    ),
    "tensorwise": (
        lambda: fp8fn.grouped_gemm(A, B, ENDS, recipe="tensorwise"), ValueError,
        ("activation_block=(-1, -1)", "use one of ((1, 128), (1, -1), (1, 32))", "fp8fn.ROWWISE"),
    ),
    "two kinds of blocks": (
        lambda: fp8fn.grouped_gemm(A, B, ENDS, recipe=Recipe(gradient_block=(1, -1))), ValueError,
        ("gradient_block=(1, -1)", "use one of ((1, 128),)"),
    ),
    "out_dtype": (lambda: fp8fn.grouped_gemm(A, B, ENDS, out_dtype=torch.int8), TypeError, ("out_dtype=torch.int8",)),
    "a mixture": (lambda: fp8fn.grouped_gemm(QA, B, ENDS), TypeError, ("a is a ScaledTensor", "b a Tensor")),
    "quantized batch": (lambda: fp8fn.grouped_gemm(QB.mT, QB), ValueError, ("offsets is None", "fp8fn.gemm")),
    "offsets twice": (lambda: fp8fn.grouped_gemm(LEFT_K, RIGHT_K, ENDS), ValueError, ("bring their own",)),
    "axes": (lambda: fp8fn.grouped_gemm(RIGHT_K, RIGHT_K), ValueError, ("axis 0", "axis 1 of a", ".mT")),
    "blocks of the two": (
        lambda: fp8fn.grouped_gemm(LEFT_K, fp8fn.quantize_grouped(A, ENDS, block=-1)), ValueError,
        ("blocks of 128", "blocks of -1", "equal"),
    ),
    "a_scale": (lambda: scaled(a_scale=QA.scale[1:]), ValueError, ("a: scale has shape (31, 1)", "needs (32, 1)")),
    "a_block": (
        lambda: scaled(a_block=(128, 128), a_scale=QA.scale[:1]), ValueError, ("a_block=(128, 128)", "rows of a"),
    ),
    "b_block": (
        lambda: scaled(b_block=(1, 128), b_scale=torch.ones(3, 64, 1)), ValueError, ("b_block=(1, 128)", "use one of"),
    ),
    "formats": (
        lambda: scaled(b_scale=QB.scale.to(torch.float8_e8m0fnu)), ValueError, ("a_scale has dtype", "one format"),
    ),
    "rank of a": (lambda: scaled(a=QA.data[None]), ValueError, ("(1, 32, 64)", "rows of a (M, K)")),
    "spread": (
        lambda: summed(a=LEFT_K.data[:, :64], a_scale=LEFT_K.scale[:, :2]), ValueError,
        ("a has 64 rows of spread tokens", "multiple of 32 from 96 to 1600, or one of 128 of at least 1920"),
    ),
    "between the units": (
        lambda: summed(a=LEFT_K.data.new_empty(64, 1728)), ValueError,
        ("a has 1728 rows of spread tokens", "32 from 96 to 1600", "1920", "fp8fn.quantize_grouped"),
    ),
    "summed scale": (
        lambda: summed(b_scale=RIGHT_K.scale[:2]), ValueError, ("b_scale has shape (2, 64)", "needs (3, 64)"),
    ),
    "spread in MX": (
        lambda: summed(a=LEFT_K.data[:, :64], a_scale=LEFT_K.scale[:, :2], a_block=(1, 32)), ValueError,
        ("a has 64 rows of spread tokens", "3 groups need a multiple of 32 of at least 96"),
    ),
    "summed block": (
        lambda: summed(b_block=(1, 1)), ValueError, ("b_block=(1, 1)", "((128, 1), (-1, 1), (32, 1), (128, 128))"),
    ),
    "squares of both": (
        lambda: summed(
            a_block=(128, 128), a_scale=LEFT_K.scale[:1], b_block=(128, 128), b_scale=RIGHT_K.scale[:, :1]
        ),
        ValueError, ("are both (128, 128)", "use (1, 128) or (128, 1) for one"),
    ),
    "summed squares' scale": (
        lambda: summed(b_block=(128, 128)), ValueError, ("b_scale has shape (3, 64)", "needs (3, 1)"),
    ),
    "ways to lie": (
        lambda: summed(b_block=(-1, 1)), ValueError, ("a_block=(1, 128)", "use b_block=(128, 1)"),
    ),
    "summed dtype": (lambda: summed(a=LEFT_K.data.float()), TypeError, ("a has dtype torch.float32", "FP8")),
    "ranks of x": (lambda: fp8fn.expert_mlp(A, B, A, ENDS), ValueError, ("use (T, H), (E, H, 2I) and (E, I, H)",)),
    "sizes of x": (lambda: fp8fn.expert_mlp(A, B, B, ENDS), ValueError, ("(3, 64, 48)", "first half of w_gate_up")),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_its_value_and_the_remedy(name: str) -> None:
    call, kind, parts = ERRORS[name]
    with pytest.raises(kind) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {str(caught.value)!r}"


def test_quantized_products_have_no_derivative() -> None:
    with pytest.raises(NotImplementedError, match=r"fp8fn\.scaled_grouped_mm has no derivative"):
        scaled(bias=torch.zeros(3, 48, requires_grad=True)).sum().backward()
