"""The quantizers of `silu(gate) * up` in training: their definition against autograd, and their kernels against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8fn.ops import quantize_silu_mul as ops
from fp8fn.ops import reference
from fp8fn.ops.layout import Block
from fp8fn.ops.silu_mul import BACKWARD_OUTPUTS, SAVED_OUTPUTS
from fp8fn.ops.targets import OCP, SM90
from support.accuracy import assert_same_bits
from support.cuda_emulator import hopper_on_cpu
from support.kernel_info import assert_near_bits
from support.operands.values import HARD, random

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = OCP
ROW, COLUMN, SQUARE = (1, 128), (128, 1), (128, 128)
op: Final = torch.ops.fp8fn

# Shapes whose rows a kernel loads by 16 bytes: whole tiles, ragged ones, one row, few columns, batches.
SHAPES: Final = ((128, 256), (131, 264), (1, 136), (70, 8), (300, 128), (2, 3, 40, 136))
FORMATS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"dtype": E5M2, "scale": "pow2"},
    {"product_block": SQUARE, "product_dtype": E5M2},
    {"product_block": SQUARE, "dtype": E5M2, "product_dtype": E4M3, "scale": "e8m0"},
)


def inputs(shape: Sequence[int], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up, and the gradient of their product."""
    gate, up, grad = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    return gate, up, grad


def kept(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(part for x in tensors for part in reference.quantize(x, ROW, E4M3, "fp32"))


def runs(name: str, *args: Any, **kwargs: Any) -> Iterator[Sequence[Tensor]]:
    """The op's results on a GPU; on the CPU those of its kernel, emulated, in both orders of the threads."""
    if args[0].is_cuda:
        yield getattr(op, name)(*args, **kwargs)
        return
    for backwards in (False, True):
        with hopper_on_cpu(backwards=backwards) as launches:
            found = getattr(ops, f"{name}_kernel")(*args, **kwargs)
        assert len(launches) == 1
        yield found


def assert_right(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor], rounded: Any) -> None:
    for name, x, y in zip(names, found, expected, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()), name
        assert_near_bits(name, x, y, rounded)


def check_saved(gate: Tensor, up: Tensor, **form: Any) -> None:
    expected = ops.quantize_silu_mul_saved_reference(gate, up, **form)
    for found in runs("quantize_silu_mul_saved", gate, up, **form):
        assert_right(SAVED_OUTPUTS[:2], found[:2], expected[:2], None)
        for x, y in zip(found[2:], expected[2:], strict=True):
            assert_same_bits(x, y)


def check_backward(grad: Tensor, *saved: Tensor | None, **form: Any) -> None:
    expected = ops.quantize_silu_mul_backward_reference(grad, *saved, **form)
    for found in runs("quantize_silu_mul_backward", grad, *saved, **form):
        assert_right(BACKWARD_OUTPUTS[:8], found[:8], expected[:8], grad.dtype)
        rounded = None if saved[1] is None else grad.dtype
        assert_right(BACKWARD_OUTPUTS[8:], found[8:], expected[8:], rounded)


def values(gate: Tensor, up: Tensor) -> tuple[Tensor | None, ...]:
    return gate, None, up, None


def snr(exact: Tensor, x: Tensor) -> float:
    return float(20 * torch.log10(exact.norm() / (exact - x.double()).norm()))


@pytest.mark.parametrize("product_block", [COLUMN, SQUARE])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_definition_against_autograd(dtype: torch.dtype, product_block: Block) -> None:
    """Gradients in float64 at the values that are kept; FP8's rounding alone leaves about 31 dB."""
    gate, up, grad = inputs((256, 384), dtype)
    saved = kept(gate, up)
    wide_gate, wide_up = (reference.dequantize(*saved[i : i + 2], ROW).double().requires_grad_() for i in (0, 2))
    product = F.silu(wide_gate) * wide_up
    product.backward(grad.double())
    results = op.quantize_silu_mul_backward(grad, *saved, product_block=product_block)
    exact = (wide_gate.grad, wide_gate.grad, wide_up.grad, wide_up.grad, product.detach())
    for i, (value, block) in enumerate(zip(exact, (ROW, COLUMN, ROW, COLUMN, product_block), strict=True)):
        assert value is not None
        assert snr(value, reference.dequantize(*results[2 * i : 2 * i + 2], block)) > 29, BACKWARD_OUTPUTS[2 * i]


def test_gradients_have_the_bits_of_autograd_and_the_quantizer() -> None:
    """In float32 and rounded to bfloat16, as a graph that is not fused computes them from the values that are kept."""
    gate, up, grad = inputs((128, 256))
    saved = kept(gate, up)
    wide_gate, wide_up = (reference.dequantize(*saved[i : i + 2], ROW).requires_grad_() for i in (0, 2))
    (F.silu(wide_gate) * wide_up).backward(grad.float())
    results = op.quantize_silu_mul_backward(grad, *saved)
    for i, value in ((0, wide_gate.grad), (4, wide_up.grad)):
        assert value is not None
        assert_right(BACKWARD_OUTPUTS[i : i + 4], results[i : i + 4], op.quantize_dual(value.to(BF16)), BF16)


@pytest.mark.parametrize("product_block", [COLUMN, SQUARE])
def test_16_bit_inputs_have_the_bits_of_autograd_and_the_quantizers(product_block: Block) -> None:
    """The product is not rounded before: it does not matter whether the forward or the backward quantizes it."""
    gate, up, grad = inputs((128, 256))
    wide_gate, wide_up = (x.float().requires_grad_() for x in (gate, up))
    (F.silu(wide_gate) * wide_up).backward(grad.float())
    results = op.quantize_silu_mul_backward(grad, gate, None, up, None, product_block=product_block)
    for i, value in ((0, wide_gate.grad), (4, wide_up.grad)):
        assert value is not None
        assert_right(BACKWARD_OUTPUTS[i : i + 4], results[i : i + 4], op.quantize_dual(value.to(BF16)), BF16)
    for x, y in zip(results[8:], op.quantize_silu_mul(gate, up, product_block), strict=True):
        assert torch.equal(x.float(), y.float())


def test_the_forward_is_three_quantizers() -> None:
    gate, up, _ = inputs((70, 99))
    for form in ((ROW, None, "fp32"), (COLUMN, E5M2, "pow2"), ((1, 32), None, "e8m0")):
        found = op.quantize_silu_mul_saved(gate, up, *form)
        for x, y in zip(found, (*op.quantize_silu_mul(gate, up, *form), *kept(gate, up)), strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: tuple[int, ...], where: str) -> None:
    gate, up, grad = (x.to(where) for x in inputs(shape))
    check_saved(gate, up)
    check_backward(grad, *kept(gate, up))
    check_backward(grad, *values(gate, up))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_format(form: dict[str, Any], dtype: torch.dtype, where: str) -> None:
    gate, up, grad = (x.to(where) for x in inputs((131, 264), dtype))
    check_saved(gate, up, **{key: form[key] for key in ("dtype", "scale") if key in form})
    check_backward(grad, *kept(gate, up), **form)
    check_backward(grad, *values(gate, up), **form)


def test_inputs_among_others(where: str) -> None:
    """gate and up side by side in one tensor, the gradient in every second row of one."""
    both, rows = (random(*shape).to(where) for shape in ((140, 272), (280, 136)))
    gate, up = both.chunk(2, -1)
    check_saved(gate, up)
    check_backward(rows[::2], *kept(gate, up))
    check_backward(rows[::2], *values(gate, up))


@pytest.mark.parametrize("name", HARD)
def test_hard_values(name: str, where: str) -> None:
    """In each input in turn. Off the powers of two, where a rounding error changes the scale."""
    x = HARD[name]().to(BF16)
    x = F.pad(x, (0, -x.shape[1] % 8)).to(where)
    x = (1.1 * x).masked_fill((x < -75) & (x > -85), 0.0)
    ordinary = random(*x.shape, seed=5).to(where)
    check_saved(x, ordinary)
    check_saved(ordinary, x)
    check_backward(x, *kept(ordinary, ordinary.flip(0)))
    check_backward(ordinary, *kept(x, ordinary))
    check_backward(ordinary, *kept(ordinary, x))
    check_backward(x, *values(ordinary, ordinary.flip(0)))
    check_backward(ordinary, *values(x, ordinary))
    check_backward(ordinary, *values(ordinary, x))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", range(3), ids=["gate", "up", "grad"])
def test_what_is_not_finite_stays_in_its_blocks(value: float, place: int, where: str) -> None:
    """An element of row 5 and column 7: the others' results have the bits that they have without it."""
    given = [x.to(where) for x in inputs((256, 256))]
    results = []
    for bad in (False, True):
        if bad:
            given[place][5, 7] = value
        gate, up, grad = given
        results.append([next(runs("quantize_silu_mul_backward", grad, *kept(gate, up)))[i] for i in range(10)])
    for name, clean, found in zip(BACKWARD_OUTPUTS, *results, strict=True):
        touched = torch.ones(found.shape, dtype=torch.bool, device=found.device)
        if name.endswith("_scale"):
            by_column = "columns" in name or name == "product_scale"
            touched[0 if by_column else 5, (slice(0, 128) if by_column else 0)] = False
        else:
            touched[:128, :128] = False
        assert torch.equal(found.float()[touched], clean.float()[touched]), name
    rows = reference.dequantize(*results[1][:2], ROW)
    assert bool(rows[5, :128].isnan().all())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda gate, up, grad: (gate.float(), up.float(), grad.float()), "gate is torch.float32, not of 16 bits"),
        (lambda gate, up, grad: (gate[:, 1:9], up[:, :8], grad[:, :8]), "rows of gate do not begin"),
        (lambda gate, up, grad: (gate[:, :9], up[:, :9], grad[:, :9]), "gate has 9 columns, no multiple of 8"),
    ],
)
def test_what_the_kernels_refuse_is_computed_by_other_ops(change: Callable[..., Any], reason: str) -> None:
    gate, up, grad = change(*inputs((130, 272)))
    operands = ops._saved_operands((gate, up), (ROW, None, "fp32"))
    assert str(ops.cuda_silu_mul.accepts_saved(_on_hopper(operands))).startswith(reason)
    with hopper_on_cpu() as launches:
        found = ops.quantize_silu_mul_saved_kernel(gate, up)
        backward = ops.quantize_silu_mul_backward_kernel(grad.float(), *kept(gate, up))
    assert "silu_mul_saved" not in {launch.name for launch in launches}
    assert "silu_mul_backward" not in {launch.name for launch in launches}
    assert_right(SAVED_OUTPUTS, found, ops.quantize_silu_mul_saved_reference(gate, up), None)
    expected = ops.quantize_silu_mul_backward_reference(grad.float(), *kept(gate, up))
    assert_right(BACKWARD_OUTPUTS, backward, expected, None)


def _on_hopper(saved: Any) -> Any:
    return replace(saved, product=replace(saved.product, target=SM90, dtype=E4M3))


GATE, UP, GRAD = inputs((64, 256))
SAVED = kept(GATE, UP)
WRONG: Final[tuple[tuple[Callable[[], Any], type[Exception], str], ...]] = (
    (lambda: op.quantize_silu_mul_saved(GATE, UP[:1]), ValueError, "gate has shape (64, 256) and up (1, 256)"),
    (lambda: op.quantize_silu_mul_saved(GATE, UP, (2, 128)), ValueError, "block=(2, 128) is not a block"),
    (
        lambda: op.quantize_silu_mul_backward(GRAD[:1], *SAVED),
        ValueError,
        "grad has shape (1, 256) and gate (64, 256); they must be equal",
    ),
    (
        lambda: op.quantize_silu_mul_backward(GRAD, GATE, *SAVED[1:]),
        TypeError,
        "gate has dtype torch.bfloat16, which is not an FP8 type; use the results of torch.ops.fp8fn",
    ),
    (
        lambda: op.quantize_silu_mul_backward(GRAD, *SAVED[:3], SAVED[3].double()),
        ValueError,
        "up_scale is torch.float64 of shape (64, 2); it must be torch.float32 of shape (64, 2)",
    ),
    (
        lambda: op.quantize_silu_mul_backward(GRAD, GATE, None, *SAVED[2:]),
        ValueError,
        "up_scale is given and gate_scale is None; give both or neither",
    ),
    (
        lambda: op.quantize_silu_mul_backward(GRAD, SAVED[0], None, UP, None),
        TypeError,
        "gate has dtype torch.float8_e4m3fn and gate_scale is None; give gate_scale, or use one of",
    ),
    (
        lambda: op.quantize_silu_mul_backward(GRAD, *SAVED, COLUMN),
        ValueError,
        "block=(128, 1) does not lie along the columns; use (1, 128)",
    ),
    (
        lambda: op.quantize_silu_mul_backward(GRAD, *SAVED, product_block=ROW),
        ValueError,
        "product_block=(1, 128) does not lie along the rows; use (128, 1)",
    ),
    (
        lambda: op.quantize_silu_mul_backward(GRAD, *SAVED, product_dtype=BF16),
        TypeError,
        "product_dtype=torch.bfloat16 is not an FP8 type; use one of",
    ),
)


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_errors_name_the_argument(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_derivative_is_an_error() -> None:
    gate, grad = GATE.clone().requires_grad_(), GRAD.clone().requires_grad_()
    for found in (op.quantize_silu_mul_saved(gate, UP), op.quantize_silu_mul_backward(grad, *SAVED)):
        with pytest.raises(RuntimeError, match=r"use fp8fn\.gemm"):
            found[1].sum().backward()
