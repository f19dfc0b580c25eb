"""`gemm` and `linear`: values, gradients, memory, autocast and determinism, for every preset and storage."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fp8fn
from fp8fn import Recipe
from fp8fn.meta.bypass import is_last, nothing_watches
from fp8fn.meta.levels import is_tracked
from fp8fn.ops.layout import swap
from fp8fn.ops.recipe import PRESETS
from support.accuracy import relative_error, snr
from support.gradients import gradients, saved_by, second_derivative
from support.operands.values import dequantized, normal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STORAGES = ("NT", "NN", "TN", "TT")
EACH_PRESET = pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)


def exact(a: Tensor, b: Tensor, recipe: Recipe, bias: Tensor | None = None) -> Tensor:
    """The float64 product of the dequantized operands."""
    left = dequantized(a, recipe.activation_block, recipe.activation_dtype, recipe.scale)
    right = dequantized(b, recipe.weight_block, recipe.weight_dtype, recipe.scale)
    out = left @ right
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("shape", [(128, 256, 384), (33, 65, 190), (1, 7, 129)], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
@EACH_PRESET
def test_values(recipe: Recipe, storage: str, shape: tuple[int, int, int], device: torch.device) -> None:
    """BLAS's letters of the storage: T of a is (K, M) in memory, T of b is (N, K)."""
    M, N, K = shape
    # BLAS counts columns: our A @ B with a weight (N, K) is what it calls "NT" in row-major terms.
    a = normal(M, K, transposed=storage[0] == "T", device=device)
    b = normal(K, N, transposed=storage[1] == "T", device=device)
    want = exact(a, b, recipe)
    got = fp8fn.gemm(a, b, recipe=recipe, out_dtype=FP32)
    assert (got.shape, got.dtype) == ((M, N), FP32)
    assert got.is_contiguous()
    assert relative_error(got, want) < 1e-3
    assert snr(got, want) >= 50
    assert torch.equal(fp8fn.gemm(a, b, recipe=recipe), got.to(BF16))  # one sum, one rounding


@pytest.mark.parametrize("out_dtype", [None, BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_types_and_bias(
    dtype: torch.dtype, out_dtype: torch.dtype | None, with_bias: bool, device: torch.device
) -> None:
    a, b = normal(40, 200, dtype=dtype, device=device), normal(200, 56, dtype=dtype, transposed=True, device=device)
    bias = torch.randn(56, device=device) if with_bias else None
    got = fp8fn.gemm(a, b, bias=bias, out_dtype=out_dtype)
    want = exact(a, b, fp8fn.BLOCKWISE, bias)
    assert got.dtype == (out_dtype or dtype)
    full = fp8fn.gemm(a, b, bias=bias, out_dtype=FP32)
    assert relative_error(full, want) < 1e-3
    assert snr(full, want) >= 50
    assert torch.equal(got, full.to(got.dtype))


@EACH_PRESET
def test_leading_dimensions_are_rows(recipe: Recipe, device: torch.device) -> None:
    a, b = normal(2, 3, 20, 160, device=device), normal(160, 48, device=device)
    out = fp8fn.gemm(a, b, recipe=recipe)
    assert out.shape == (2, 3, 20, 48)
    assert torch.equal(out.reshape(120, 48), fp8fn.gemm(a.reshape(120, 160), b, recipe=recipe))
    vector = fp8fn.gemm(a[0, 0, 0], b, recipe=recipe)
    assert torch.equal(vector, fp8fn.gemm(a[0, 0, :1], b, recipe=recipe)[0])


@pytest.mark.parametrize(
    ("lead_a", "lead_b"), [((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((1,), (4,)), ((), (2,)), ((2, 1), (1, 3))]
)
@EACH_PRESET
def test_batched(recipe: Recipe, lead_a: tuple[int, ...], lead_b: tuple[int, ...], device: torch.device) -> None:
    a, b = normal(*lead_a, 33, 130, device=device), normal(*lead_b, 130, 40, transposed=True, device=device)
    lead = torch.broadcast_shapes(lead_a, lead_b)
    left, right = a.expand(*lead, 33, 130), b.expand(*lead, 130, 40)
    got = fp8fn.gemm(a, b, recipe=recipe, out_dtype=FP32)
    assert got.shape == (*lead, 33, 40)
    assert relative_error(got, exact(left, right, recipe)) < 1e-3


@pytest.mark.parametrize("shape", [(0, 16, 32), (16, 0, 32), (16, 32, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (0,)], ids=str)
@EACH_PRESET
def test_zero_sizes(recipe: Recipe, lead: tuple[int, ...], shape: tuple[int, int, int], device: torch.device) -> None:
    M, N, K = shape
    bias = torch.randn(N, device=device)
    for b_lead in ((), lead):
        a, b = normal(*lead, M, K, device=device), normal(*b_lead, K, N, device=device)
        grad = torch.ones(*lead, M, N, device=device)
        out, (da, db, dbias) = gradients(
            lambda a, b, bias: fp8fn.gemm(a, b, bias=bias, recipe=recipe, out_dtype=FP32), grad, a, b, bias
        )
        assert torch.equal(out, bias.expand(*lead, M, N))
        assert torch.equal(da, torch.zeros_like(a))
        assert torch.equal(db, torch.zeros_like(b))
        rows = grad.numel() // N if N else 0
        assert torch.equal(dbias, torch.full_like(bias, rows))


def test_linear_is_gemm_with_the_weight_transposed(device: torch.device) -> None:
    x, w, bias = normal(4, 20, 130, device=device), normal(50, 130, device=device), normal(1, 50, device=device)[0]
    assert torch.equal(fp8fn.linear(x, w, bias), fp8fn.gemm(x, w.mT, bias=bias))
    assert snr(fp8fn.linear(x, w, bias), F.linear(x.double(), w.double(), bias.double())) > 25
    out = fp8fn.linear(x, w, recipe="rowwise", out_dtype=FP32)
    assert torch.equal(out, fp8fn.gemm(x, w.mT, recipe=fp8fn.ROWWISE, out_dtype=FP32))
    q, weight = fp8fn.quantize(x[0], (1, 128)), fp8fn.quantize(w, (128, 128))
    assert torch.equal(fp8fn.linear(q, weight, bias), fp8fn.gemm(q, weight.mT, bias=bias))


@EACH_PRESET
def test_product_of_scaled_tensors_is_the_forward(recipe: Recipe, device: torch.device) -> None:
    a, b = normal(40, 200, device=device), normal(200, 56, device=device)
    qa = fp8fn.quantize(a, recipe.activation_block, dtype=recipe.activation_dtype, scale=recipe.scale)
    qb = fp8fn.quantize(b, recipe.weight_block, dtype=recipe.weight_dtype, scale=recipe.scale)
    assert torch.equal(fp8fn.gemm(qa, qb), fp8fn.gemm(a, b, recipe=recipe))


def test_product_of_scaled_tensors_with_leading_dimensions(device: torch.device) -> None:
    a, b = fp8fn.quantize(normal(2, 3, 24, 140, device=device), (1, 128)), normal(3, 140, 40, device=device)
    for right in (b, b[0]):
        qb = fp8fn.quantize(right, (128, 128))
        got = fp8fn.gemm(a, qb, out_dtype=FP32)
        want = fp8fn.dequantize(a, FP32).double() @ fp8fn.dequantize(qb, FP32).double()
        assert got.shape == (2, 3, 24, 40)
        assert relative_error(got, want) < 1e-3


@pytest.mark.parametrize("storage", STORAGES)
@EACH_PRESET
def test_end_to_end_snr(recipe: Recipe, storage: str, device: torch.device) -> None:
    """25 dB for e4m3 and 20 dB for e5m2, against float64, for out, dA and dB of normal inputs."""
    M, N, K = 192, 160, 320
    a = normal(M, K, transposed=storage[0] == "T", device=device)
    b = normal(K, N, transposed=storage[1] == "T", device=device)
    grad = normal(M, N, device=device)
    out, (da, db) = gradients(lambda a, b: fp8fn.gemm(a, b, recipe=recipe), grad, a, b)
    need = 20 if recipe.gradient_dtype is torch.float8_e5m2 else 25
    assert snr(out, a.double() @ b.double()) > 25
    assert snr(da, grad.double() @ b.double().mT) > need
    assert snr(db, a.double().mT @ grad.double()) > need
    assert (da.dtype, db.dtype) == (BF16, BF16)
    assert (da.shape, db.shape) == (a.shape, b.shape)
    assert db.stride() == b.stride()  # a weight's gradient lies as the weight does


@pytest.mark.parametrize("shape", [(128, 256, 384), (33, 65, 190)], ids=str)
@EACH_PRESET
def test_gradients_are_the_products_of_the_recipe(
    recipe: Recipe, shape: tuple[int, int, int], device: torch.device
) -> None:
    """dA = dC Bᵀ and dB = Aᵀ dC, of the dequantized operands in the transposed blocks, in float64."""
    M, N, K = shape
    a, b, grad = normal(M, K, dtype=FP32, device=device), normal(K, N, dtype=FP32, device=device), None
    grad = normal(M, N, dtype=FP32, device=device)
    _, (da, db) = gradients(lambda a, b: fp8fn.gemm(a, b, recipe=recipe), grad, a, b)
    row = dequantized(grad, recipe.gradient_block, recipe.gradient_dtype, recipe.scale)
    col = dequantized(grad, swap(recipe.gradient_block), recipe.gradient_dtype, recipe.scale)
    weight = dequantized(b, swap(recipe.weight_block), recipe.weight_dtype, recipe.scale)
    activation_block = recipe.wgrad_activation_block or swap(recipe.activation_block)
    activation = dequantized(a, activation_block, recipe.activation_dtype, recipe.scale)
    assert relative_error(da, row @ weight.mT) < 1e-3
    assert relative_error(db, activation.mT @ col) < 1e-3


def test_gradients_of_one_operand_alone(device: torch.device) -> None:
    a, b, grad = normal(40, 130, device=device), normal(130, 60, device=device), normal(40, 60, device=device)
    _, (da, db) = gradients(fp8fn.gemm, grad, a, b)
    _, (only_a,) = gradients(lambda a: fp8fn.gemm(a, b), grad, a)
    _, (only_b,) = gradients(lambda b: fp8fn.gemm(a, b), grad, b)
    assert torch.equal(only_a, da)
    assert torch.equal(only_b, db)


@pytest.mark.parametrize("bias_dtype", [BF16, FP32], ids=str)
def test_gradient_of_the_bias_is_the_sum(bias_dtype: torch.dtype, device: torch.device) -> None:
    a, b = normal(4, 40, 130, device=device), normal(130, 60, device=device)
    bias, grad = torch.randn(60, device=device).to(bias_dtype), normal(4, 40, 60, device=device)
    _, (_, _, dbias) = gradients(lambda a, b, bias: fp8fn.gemm(a, b, bias=bias), grad, a, b, bias)
    assert dbias.dtype == bias_dtype
    torch.testing.assert_close(dbias, grad.double().sum((0, 1)).to(bias_dtype))
    _, (alone,) = gradients(lambda bias: fp8fn.gemm(a, b, bias=bias), grad, bias)
    assert torch.equal(alone, dbias)


@pytest.mark.parametrize(("lead_a", "lead_b"), [((2, 3), (2, 3)), ((2, 3), (3,)), ((), (2,)), ((2, 3), ())])
def test_gradients_of_batches(lead_a: tuple[int, ...], lead_b: tuple[int, ...], device: torch.device) -> None:
    a, b = normal(*lead_a, 33, 130, device=device), normal(*lead_b, 130, 40, transposed=True, device=device)
    grad = normal(*torch.broadcast_shapes(lead_a, lead_b), 33, 40, device=device)
    _, got = gradients(fp8fn.gemm, grad, a, b)
    _, want = gradients(torch.matmul, grad.double(), a.double(), b.double())
    for g, w, x in zip(got, want, (a, b), strict=True):
        assert (g.shape, g.dtype) == (x.shape, x.dtype)
        assert snr(g, w) > 25


def test_float32_weights_beside_bfloat16_activations(device: torch.device) -> None:
    a, b = normal(48, 130, device=device), normal(130, 64, dtype=FP32, transposed=True, device=device)
    out, (da, db) = gradients(fp8fn.gemm, normal(48, 64, device=device), a, b)
    assert (out.dtype, da.dtype, db.dtype) == (BF16, BF16, FP32)
    assert db.stride() == b.stride()
    assert torch.equal(out, fp8fn.gemm(a.float(), b, out_dtype=BF16))


def test_autocast_names_the_output_type(device: torch.device) -> None:
    a, b = normal(48, 130, dtype=FP32, device=device), normal(130, 64, dtype=FP32, device=device)
    grad = normal(48, 64, device=device)
    want, want_grads = gradients(lambda a, b: fp8fn.gemm(a, b, out_dtype=BF16), grad, a, b)
    with torch.autocast(device.type, dtype=BF16):
        got, grads = gradients(fp8fn.gemm, grad, a, b)
        assert fp8fn.gemm(a, b, out_dtype=FP32).dtype == FP32
    assert got.dtype == BF16
    assert torch.equal(got, want)
    assert all(g.dtype == FP32 and torch.equal(g, w) for g, w in zip(grads, want_grads, strict=True))
    with torch.autocast(device.type, dtype=FP16):
        assert fp8fn.gemm(a, b).dtype == FP16
    assert fp8fn.gemm(a, b).dtype == FP32


@EACH_PRESET
def test_same_bits_every_run_and_inputs_untouched(recipe: Recipe, device: torch.device) -> None:
    inputs = normal(130, 257, device=device), normal(257, 100, device=device), normal(1, 100, device=device)[0]
    grad = normal(130, 100, device=device)
    before = [x.clone() for x in (*inputs, grad)]

    def run() -> tuple[Tensor, ...]:
        out, grads = gradients(lambda a, b, bias: fp8fn.gemm(a, b, bias=bias, recipe=recipe), grad, *inputs)
        return out, *grads

    first, second = run(), run()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((*inputs, grad), before, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_reaches_its_own_row_alone(bad: float, device: torch.device) -> None:
    a, b = normal(8, 256, device=device), normal(256, 16, device=device)
    clean = fp8fn.gemm(a, b)
    a[3, 7] = bad
    out = fp8fn.gemm(a, b)
    assert not out[3].isfinite().any()
    others = [row for row in range(8) if row != 3]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("storage", ["row", "column"])
def test_saved_bytes(storage: str, device: torch.device) -> None:
    """One byte for an element of the activation, and its scales: 4 bytes for each 128, so 1.031; none for a weight."""
    M, K, N = 256, 640, 384
    a = normal(M, K, transposed=storage == "column", device=device).requires_grad_()
    b = normal(N, K, device=device).requires_grad_()
    own = b.untyped_storage().data_ptr()
    less = saved_by(lambda: fp8fn.linear(a, b))
    assert [x.untyped_storage().data_ptr() for x in less if x.dtype.itemsize > 1 and x.numel() > M * K / 32] == [own]
    assert len(less) == 3
    saved = saved_by(lambda: fp8fn.linear(a, b, recipe=Recipe(keep_weights=True)))
    assert sum(x.untyped_storage().nbytes() for x in less[:2]) == sum(x.untyped_storage().nbytes() for x in saved[:2])
    activation = [x for x in saved if x.shape[-2:] in ((M, K), (-(-M // 128), K))]
    weight = [x for x in saved if x.shape[-2:] in ((K, N), (K // 128, N // 128))]
    assert len(activation) == len(weight) == 2
    assert len(saved) == 4
    bytes_saved = sum(x.untyped_storage().nbytes() for x in activation)
    assert bytes_saved <= 1.05 * M * K
    for x in saved:
        assert x.dtype.itemsize == 1 or x.numel() < M * K / 32


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "mxfp8", "tensorwise", "hybrid"])
def test_no_wide_form_of_an_operand_is_saved(recipe: str, device: torch.device) -> None:
    a, b = (normal(256, 640, device=device).requires_grad_() for _ in range(2))
    for x in saved_by(lambda: fp8fn.linear(a, b, recipe=replace(PRESETS[recipe], keep_weights=True))):
        assert x.dtype.itemsize == 1 or x.numel() < a.numel() / 32
        assert x.untyped_storage().data_ptr() not in (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr())
    for x in saved_by(lambda: fp8fn.linear(a, b, recipe=recipe)):  # the weight itself takes no memory
        assert x.dtype.itemsize == 1 or x.numel() < a.numel() / 32 or x.data_ptr() == b.data_ptr()
        assert x.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()


def test_the_activation_is_freed_after_the_forward(device: torch.device) -> None:
    leaf, w = normal(64, 256, device=device).requires_grad_(), normal(128, 256, device=device).requires_grad_()
    x = leaf + 1
    dies = weakref.ref(x)
    out = fp8fn.linear(x, w)
    del x
    gc.collect()
    assert dies() is None
    out.sum().backward()
    assert leaf.grad is not None
    assert w.grad is not None
    kept = leaf + 1  # where a second derivative may follow, it must stay
    dies = weakref.ref(kept)
    out = fp8fn.linear(kept, w, recipe=Recipe(second_order=True))
    del kept
    saved_again = saved_by(lambda: fp8fn.linear(leaf, w, recipe=Recipe(second_order=True)))
    assert any(x.dtype == BF16 and x.shape == leaf.shape for x in saved_again)


def test_nothing_is_saved_without_gradients(device: torch.device) -> None:
    a, b = normal(64, 256, device=device).requires_grad_(), normal(256, 64, device=device)
    with torch.no_grad():
        out = fp8fn.gemm(a, b)
    assert not out.requires_grad
    assert saved_by(lambda: fp8fn.gemm(a.detach(), b)) == []
    tracked = fp8fn.gemm(a, b)
    assert tracked.requires_grad
    assert torch.equal(tracked, out)


def test_second_derivative_asks_for_second_order() -> None:
    a, b = normal(64, 128, dtype=FP32), normal(128, 96, dtype=FP32)
    with pytest.raises(NotImplementedError, match=r"Recipe\(second_order=True\)"):
        second_derivative(fp8fn.gemm, a, b)


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
def test_second_derivative(scale: Any) -> None:
    a, b = normal(64, 128, dtype=FP32), normal(128, 96, dtype=FP32)
    recipe = Recipe(second_order=True, scale=scale)
    got = second_derivative(lambda a, b: fp8fn.gemm(a, b, recipe=recipe), a, b)
    want = second_derivative(torch.matmul, a.double(), b.double())
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < 0.08
    out, grads = gradients(lambda a, b: fp8fn.gemm(a, b, recipe=recipe), torch.ones(64, 96), a, b)
    plain, plain_grads = gradients(lambda a, b: fp8fn.gemm(a, b, recipe=Recipe(scale=scale)), torch.ones(64, 96), a, b)
    assert torch.equal(out, plain)
    for g, p in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(g, p)


# Each operand has a block and a type that no other has, so that a recipe in another's place shows.
DISTINCT = Recipe(
    activation_block=(1, 128), weight_block=(-1, 1), gradient_block=(1, 32),
    activation_dtype=torch.float8_e4m3fn, weight_dtype=torch.float8_e4m3fnuz, gradient_dtype=torch.float8_e5m2,
    second_order=True,
)  # fmt: skip


def test_each_derivative_is_the_product_of_its_own_recipe() -> None:
    """The gradients of kept operands, and of those gradients, against float64 products of dequantized operands."""
    recipe, scale = DISTINCT, "fp32"
    activation, weight, gradient = (
        (getattr(recipe, f"{name}_block"), getattr(recipe, f"{name}_dtype"))
        for name in ("activation", "weight", "gradient")
    )
    a, b, grad = (normal(*shape, dtype=FP32).requires_grad_() for shape in ((48, 160), (160, 96), (48, 96)))
    dgrad, wgrad = torch.autograd.grad(fp8fn.gemm(a, b, recipe=recipe), (a, b), grad, create_graph=True)

    def product(left: Tensor, left_as: Any, right: Tensor, right_block: tuple[int, int], right_dtype: Any) -> Tensor:
        return dequantized(left, *left_as, scale) @ dequantized(right, right_block, right_dtype, scale)

    x, w, g = a.detach(), b.detach(), grad.detach()
    by_gradient = swap(gradient[0]), gradient[1]  # on the right of a wgrad
    assert snr(dgrad, product(g, gradient, w.mT, *weight)) > 100
    assert snr(wgrad, product(x.mT, activation, g, *by_gradient)) > 100
    of_dgrad, of_wgrad = normal(48, 160, dtype=FP32), normal(160, 96, dtype=FP32)
    for got, want in zip(
        torch.autograd.grad(dgrad, (grad, b), of_dgrad),
        (product(of_dgrad, gradient, w, *weight), product(g.mT, gradient, of_dgrad, *by_gradient).mT),
        strict=True,
    ):
        assert snr(got, want) > 100
    for got, want in zip(
        torch.autograd.grad(wgrad, (a, grad), of_wgrad),
        (product(of_wgrad, gradient, g.mT, *by_gradient).mT, product(x, activation, of_wgrad, *by_gradient)),
        strict=True,
    ):
        assert snr(got, want) > 100


def test_bias_of_any_stride(device: torch.device) -> None:
    a, b = (fp8fn.quantize(torch.randn(64, 128, device=device), (1, 128)) for _ in range(2))
    bias = torch.randn(128, device=device)
    expected = fp8fn.gemm(a, b.mT, bias=bias[::2].contiguous())
    assert torch.equal(fp8fn.gemm(a, b.mT, bias=bias[::2]), expected)
    one = fp8fn.quantize(torch.randn(1, 128, device=device), (1, 128)).mT
    assert torch.equal(fp8fn.gemm(a, one, bias=bias[:2:2]), fp8fn.gemm(a, one, bias=bias[:1].clone()))


def test_meta_tensors_have_a_shape() -> None:
    x = torch.empty(3, 48, 128, device="meta", dtype=torch.bfloat16)
    out = fp8fn.gemm(x, torch.empty(128, 64, device="meta", dtype=torch.bfloat16))
    assert (out.shape, out.dtype, out.device.type) == ((3, 48, 64), torch.bfloat16, "meta")


def goes_unseen(*tensors: torch.Tensor | None) -> bool:
    """The condition under which `bypass.shortest` leaves the dispatcher out, for tensors of a GPU."""
    return nothing_watches(*tensors) and not is_tracked(*tensors)


def test_who_listens_to_an_op_sees_its_call() -> None:
    x = torch.randn(4, 4)
    assert goes_unseen(x, None)
    assert not goes_unseen(x, x.clone().requires_grad_())
    with torch.no_grad():
        assert goes_unseen(x.clone().requires_grad_())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert not goes_unseen(x)
    with FakeTensorMode():
        assert not goes_unseen(torch.empty(4))
    with torch.device("cpu"):  # a mode of functions
        assert not goes_unseen(x)
    seen = []
    torch.func.vmap(lambda row: seen.append(goes_unseen(row)) or row)(x)
    torch.func.grad(lambda y: seen.append(goes_unseen(x)) or y.sum())(x)
    assert seen == [False, False]

    class Wrapped(torch.Tensor):
        pass

    assert not goes_unseen(x.as_subclass(Wrapped))


KINDS_OF_TENSOR = {
    "negative": lambda: torch.randn(4, 4, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.randn(4, 4, dtype=torch.complex64).conj(),
    "zero": lambda: torch._efficientzerotensor((4, 4)),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "mkldnn": lambda: torch.randn(4, 4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(4)]),
    "functional": lambda: torch._to_functional_tensor(torch.randn(4, 4)),
    "meta": lambda: torch.randn(4, 4, device="meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors
@pytest.mark.parametrize("kind", KINDS_OF_TENSOR)
def test_tensors_that_are_not_what_their_memory_holds_go_through_the_dispatcher(kind: str) -> None:
    """Every bypass asks: an op's Autograd kernel for the keys of the call, `gemm` for the keys of its tensors."""
    x, special = torch.randn(4, 4), KINDS_OF_TENSOR[kind]()
    assert not goes_unseen(special)
    assert not goes_unseen(x, None, special)
    assert not nothing_watches(x, special)
    assert is_last(torch._C._dispatch_keys(x))
    assert not is_last(torch._C._dispatch_keys(special))
