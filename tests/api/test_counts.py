"""`grouped_gemm` with `counts`: only the first rows of each expert are multiplied, as a float64 loop has it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import fp8fn
from fp8fn import Recipe
from fp8fn.ops import scaled_grouped_mm as op
from fp8fn.ops import targets
from fp8fn.ops.cuda.quantize import turn
from fp8fn.ops.triton.launch import TritonLaunch
from support.accuracy import relative_error, snr
from support.gradients import gradients, second_derivative
from support.operands.groups import EACH_RECIPE
from support.operands.values import normal
from support.samples import SAMPLES

BF16, FP32 = torch.bfloat16, torch.float32

# Counts of rows, and the room for them: around the heights of tiles and blocks, none, all, and what is no count.
COUNTS: Final[dict[str, tuple[tuple[int, ...], int]]] = {
    "around tiles": ((0, 1, 63, 64, 65, 127, 128, 129), 200),
    "none": ((0, 0, 0), 70),
    "all": ((70, 70), 70),
    "one expert": ((130,), 150),
    "out of range": ((-1, 71, 2**31 - 1, -(2**31), 5), 70),
}
each_count = pytest.mark.parametrize(("counts", "room"), COUNTS.values(), ids=COUNTS)


def int32(counts: tuple[int, ...], device: Any = "cpu") -> Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=device)


def loop(a: Tensor, b: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, in the type of the operands and differentiable; zeros past each count."""
    outs = []
    for expert, count in enumerate(counts.tolist()):
        rows = min(max(count, 0), a.shape[1])
        out = a[expert, :rows] @ b[expert]
        out = out if bias is None else out + bias[expert]
        outs.append(torch.cat([out, out.new_zeros(a.shape[1] - rows, b.shape[2])]))
    return torch.stack(outs)


def operands(counts: Tensor, room: int, k: int, n: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """`(E, room, k)` with NaN past each count, and `(E, k, n)`."""
    a = normal(len(counts), room, k, dtype=dtype, device=counts.device)
    for expert, count in enumerate(counts.tolist()):
        a[expert, max(count, 0) :] = torch.nan
    return a, normal(len(counts), k, n, dtype=dtype, transposed=True, device=counts.device)


def exact(q: Any) -> Tensor:
    return fp8fn.dequantize(q, FP32).double()


@each_count
@EACH_RECIPE
def test_values(recipe: Recipe, counts: tuple[int, ...], room: int, device: torch.device) -> None:
    """Ragged N and K; beside the exact values of quantized operands, and of the unquantized ones."""
    of = int32(counts, device)
    a, b = operands(of, room, 190, 70)
    bias = torch.randn(len(counts), 70, device=device)
    for added in (None, bias):
        out = fp8fn.grouped_gemm(a, b, counts=of, bias=added, recipe=recipe, out_dtype=FP32)
        left = fp8fn.quantize(a, recipe.activation_block, dtype=recipe.activation_dtype, scale=recipe.scale)
        right = fp8fn.quantize(b, recipe.weight_block, dtype=recipe.weight_dtype, scale=recipe.scale)
        want = loop(exact(left), exact(right), of, None if added is None else added.double())
        assert not out[want == 0].any()
        if want.any():
            assert snr(out, want) > 50
            assert snr(out, loop(a.double(), b.double(), of, None if added is None else added.double())) > 25
        assert torch.equal(fp8fn.grouped_gemm(left, right, counts=of, bias=added, out_dtype=FP32), out)


@each_count
@EACH_RECIPE
def test_gradients(recipe: Recipe, counts: tuple[int, ...], room: int, device: torch.device) -> None:
    """Gradients of the first rows; zeros and no NaN past them, whatever the operands and the gradient have there."""
    of = int32(counts, device)
    a, b = operands(of, room, 150, 70)
    bias, out_grad = torch.randn(len(counts), 70, device=device), normal(len(counts), room, 70, device=device)
    for expert, count in enumerate(counts):
        out_grad[expert, max(count, 0) :] = torch.nan
    got = gradients(
        lambda a, b, bias: fp8fn.grouped_gemm(a, b, counts=of, bias=bias, recipe=recipe), out_grad, a, b, bias
    )
    leaves = (x.double() for x in (a, b, bias))
    want = gradients(lambda a, b, bias: loop(a, b, of, bias), out_grad.double(), *leaves)
    need = 20 if recipe.gradient_dtype is torch.float8_e5m2 else 25
    for x, y, like in zip((got[0], *got[1]), (want[0], *want[1]), (out_grad, a, b, bias), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        assert not x[y == 0].any()
        if y.any():
            assert snr(x, y) > (25 if x is got[0] else need)


def test_a_result_is_the_same_with_and_without_gradients(device: torch.device) -> None:
    of = int32((0, 1, 40, 33), device)
    a, b = operands(of, 40, 190, 70)
    plain = fp8fn.grouped_gemm(a, b, counts=of)
    assert relative_error(fp8fn.grouped_gemm(a.requires_grad_(), b, counts=of), plain) < 1e-2
    assert torch.equal(fp8fn.grouped_gemm(a.detach(), b, counts=of), plain)


def test_every_count_is_the_product_of_the_rows_alone(device: torch.device) -> None:
    """Rows past a count have no effect on the others, and full counts give the batched product."""
    a, b = normal(3, 40, 130, device=device), normal(3, 130, 50, device=device)
    whole = fp8fn.grouped_gemm(a, b, counts=int32((40, 40, 40), device))
    assert relative_error(whole, fp8fn.grouped_gemm(a, b)) < 1e-2
    for counts in ((3, 0, 40), (40, 17, 1)):
        out = fp8fn.grouped_gemm(a, b, counts=int32(counts, device))
        for expert, count in enumerate(counts):
            assert relative_error(out[expert, :count], whole[expert, :count]) < 1e-2 or count == 0
            assert not out[expert, count:].any()


def test_experts_without_an_element(device: torch.device) -> None:
    of = int32((3, 0), device)
    for m, k, n in ((0, 40, 16), (5, 0, 16), (5, 40, 0)):
        a, b = normal(2, m, k, device=device), normal(2, k, n, device=device)
        assert torch.equal(fp8fn.grouped_gemm(a, b, counts=of), torch.zeros(2, m, n, dtype=BF16, device=device))
    none = fp8fn.grouped_gemm(normal(0, 5, 40), normal(0, 40, 16), counts=int32(()))
    assert none.shape == (0, 5, 16)


def test_the_op_of_a_device_runs_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Interpreted, against the reference; the log says that the product has counts."""
    names: list[str] = []

    def run(launch: TritonLaunch) -> None:
        names.append(launch.name)
        launch.interpret()

    monkeypatch.setattr(targets, "target_of", lambda device: targets.SM90)
    monkeypatch.setattr(turn, "accepts", lambda _: "its launch can't be interpreted")
    monkeypatch.setattr(TritonLaunch, "run", run)
    for sample in (sample for sample in SAMPLES["scaled_grouped_mm"]() if "masked" in sample.label):
        names.clear()
        with caplog.at_level(logging.DEBUG, "fp8fn"):
            got = op.scaled_grouped_mm_kernel(*sample.args, **sample.kwargs)
        want = op.scaled_grouped_mm_reference(*sample.args, **sample.kwargs)
        b = sample.args[3]
        turned = ["turn"] * (b.stride(-1) == 1)  # weights that lie along N
        assert names == ([] if sample.label.startswith("empty") else [*turned, "grouped_rows_mm"])
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
        if sample.kwargs:  # rows of no tile are unwritten
            counts = sample.args[-1].tolist()
            got, want = (torch.cat([part[:count] for part, count in zip(x, counts, strict=True)]) for x in (got, want))
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3)
    assert any("MASKED=True" in record.getMessage() for record in caplog.records)


# Transforms


def loss(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return fp8fn.grouped_gemm(a, b, counts=counts).float().square().sum()


def test_func_grad_and_vmap() -> None:
    of = torch.stack([int32((30, 0, 5)), int32((1, 40, 41))])
    a, b = normal(2, 3, 40, 130), normal(2, 3, 130, 70)
    got = vmap(grad(loss, (0, 1)))(a, b, of)
    for i in range(2):
        want = grad(loss, (0, 1))(a[i], b[i], of[i])
        leaves = [x.clone().requires_grad_() for x in (a[i], b[i])]
        eager = torch.autograd.grad(loss(*leaves, of[i]), leaves)
        for g, w, e in zip(got, want, eager, strict=True):
            assert relative_error(g[i], w) < 1e-5
            assert torch.equal(w, e)
    plain = vmap(lambda a, b, of: fp8fn.grouped_gemm(a, b, counts=of))(a, b, of)
    for i in range(2):
        assert relative_error(plain[i], fp8fn.grouped_gemm(a[i], b[i], counts=of[i])) < 1e-5


def test_forward_mode_and_second_derivatives() -> None:
    of = int32((30, 0, 41))
    a, b = normal(3, 40, 130, dtype=FP32), normal(3, 130, 70, dtype=FP32)
    tangents = torch.randn_like(a), torch.randn_like(b)
    out, tangent = torch.func.jvp(lambda a, b: fp8fn.grouped_gemm(a, b, counts=of), (a, b), tangents)
    want = torch.func.jvp(
        lambda a, b: loop(a, b, of), (a.double(), b.double()), tuple(tangent.double() for tangent in tangents)
    )
    assert snr(out, want[0]) > 25
    assert snr(tangent, want[1]) > 25
    recipe = Recipe(second_order=True)
    got = second_derivative(lambda a, b: fp8fn.grouped_gemm(a, b, counts=of, recipe=recipe), a, b)
    twice = second_derivative(lambda a, b: loop(a, b, of), a.double(), b.double())
    for g, w in zip(got, twice, strict=True):
        assert relative_error(g, w) < 0.08


@pytest.mark.parametrize("tracked", [False, True], ids=["inference", "training"])
def test_compiled_once_for_all_counts(tracked: bool, fresh_dynamo: None) -> None:
    """Counts are data, and the room for rows is dynamic: neither compiles anything again.

    A batched product that is trained has guards on strides, whether M is a multiple of 16 and more than one block.
    """

    def step(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        return torch.tanh(fp8fn.grouped_gemm(a * 2, b, counts=counts))

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for i, (counts, room) in enumerate((((64, 0, 96), 208), ((1, 200, -7), 144), ((0, 0, 0), 336))):
        of = int32(counts)
        a, b = (x.requires_grad_(tracked) for x in operands(of, room, 144, 272))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = compiled(a, b, of)
        want = step(a, b, of)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
        assert not got[loop(torch.ones(3, room, 1), torch.ones(3, 1, 272), of) == 0].any()
        if tracked:
            grads = [torch.autograd.grad(out.float().square().sum(), (a, b)) for out in (got, want)]
            for g, w in zip(*grads, strict=True):
                assert relative_error(g, w) < 1e-2


# Errors

A, B, C = torch.zeros(3, 16, 64, dtype=BF16), torch.zeros(3, 64, 48, dtype=BF16), int32((10, 0, 16))
QA, QB = fp8fn.quantize(A, (1, 128)), fp8fn.quantize(B, (128, 128))


def scaled(**changed: Any) -> Any:
    names = ("a", "a_scale", "a_block", "b", "b_scale", "b_block", "offsets", "bias", "out_dtype", "counts", "zeros")
    good = (QA.data, QA.scale, QA.block, QB.data, QB.scale, QB.block, None, None, None, C, True)
    return torch.ops.fp8fn.scaled_grouped_mm(*{**dict(zip(names, good, strict=True)), **changed}.values())


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "long": (
        lambda: fp8fn.grouped_gemm(A, B, counts=C.long()), TypeError, ("counts has dtype torch.int64", "torch.int32"),
    ),
    "shape": (
        lambda: fp8fn.grouped_gemm(A, B, counts=C[:2]), ValueError, ("counts has shape (2,)", "must be (3,)", "rows"),
    ),
    "rank": (lambda: fp8fn.grouped_gemm(A, B, counts=C[None]), ValueError, ("counts has shape (1, 3)", "(3,)")),
    "device": (
        lambda: fp8fn.grouped_gemm(A, B, counts=C.to("meta")), ValueError, ("a is on cpu and counts on meta", "move"),
    ),
    "list": (
        lambda: fp8fn.grouped_gemm(A, B, counts=[10, 0, 16]), TypeError,  # type: ignore[arg-type]
        ("counts=[10, 0, 16]", "torch.tensor(counts, dtype=torch.int32)"),
    ),
    "both": (
        lambda: fp8fn.grouped_gemm(A, B, int32((1, 2, 3)), counts=C), ValueError,
        ("offsets and counts are both given", "use counts"),
    ),
    "matrix": (
        lambda: fp8fn.grouped_gemm(A[0], B, counts=C), ValueError, ("a has shape (16, 64)", "a (E, M, K)", "offsets"),
    ),
    "experts": (lambda: fp8fn.grouped_gemm(A[:2], B, counts=C), ValueError, ("a has 2 experts and b 3", "equal")),
    "bias": (
        lambda: fp8fn.grouped_gemm(A, B, counts=C, bias=A[0, :3, :40]), ValueError, ("(3, 40)", "must be (3, 48)"),
    ),
    "K": (lambda: fp8fn.grouped_gemm(A, B.mT, counts=C), ValueError, ("K=64", "K=48")),
    "tensorwise": (
        lambda: fp8fn.grouped_gemm(A, B, counts=C, recipe="tensorwise"), ValueError, ("activation_block=(-1, -1)",),
    ),
    "batch-invariant": (
        lambda: fp8fn.grouped_gemm(A, B, counts=C, recipe=Recipe(batch_invariant=True)), NotImplementedError,
        ("batch_invariant=True",),
    ),
    "a mixture": (
        lambda: fp8fn.grouped_gemm(A, QB, counts=C), TypeError,
        ("a is a Tensor and b a ScaledTensor", "fp8fn.quantize(a, (1, 128))"),
    ),
    "neither": (lambda: scaled(counts=None), ValueError, ("offsets and counts are both None", "fp8fn.gemm")),
    "zeros": (
        lambda: scaled(a=QA.data[0], a_scale=QA.scale[0], offsets=C, counts=None, zeros=False), ValueError,
        ("zeros=False needs counts",),
    ),
    "expected without counts": (
        lambda: scaled(a=QA.data[0], a_scale=QA.scale[0], offsets=C, counts=None, expected_rows=4), ValueError,
        ("expected_rows=4 needs counts", "offsets"),
    ),
    "expected": (lambda: scaled(expected_rows=0), ValueError, ("expected_rows=0", "1 or more, or None")),
    "a_block": (
        lambda: scaled(a_block=(128, 128), a_scale=QA.scale[:, :1]), ValueError, ("a_block=(128, 128)", "use one of"),
    ),
}  # fmt: skip


def test_rows_that_are_expected_change_no_result_and_compile_nothing_again(fresh_dynamo: None) -> None:
    """They are symbolic: a step of decoding expects another number each time."""
    step = torch.compile(lambda rows: scaled(expected_rows=rows), fullgraph=True, dynamic=True)
    want = scaled()
    for i, rows in enumerate((20, 5, 1000, 2**31)):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            assert torch.equal(step(rows), want)
        assert torch.equal(scaled(expected_rows=rows), want)


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
