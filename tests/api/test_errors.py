"""Every bad input is a ValueError or TypeError of ours; its message names the argument, its value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn import Recipe, ScaledTensor
from fp8fn.lowering.backend import fp8fn as backend
from fp8fn.ops import quantize as quantize_op
from fp8fn.ops import scaled_mm as scaled_mm_op
from fp8fn.ops import targets

pytestmark = pytest.mark.every_case

BF16 = torch.bfloat16
A, B = torch.zeros(32, 64, dtype=BF16), torch.zeros(64, 48, dtype=BF16)


def quantized(x: Tensor, block: tuple[int, int], **kwargs: Any) -> ScaledTensor:
    return fp8fn.quantize(x, block, **kwargs)


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


GEMM: list[tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    ("K", lambda: fp8fn.gemm(A, B.mT), ValueError, ("(32, 64)", "K=64", "(48, 64)", "K=48", "pass weight.mT")),
    (
        "device of b",
        lambda: fp8fn.gemm(A, meta(B)),
        ValueError,
        ("a is on cpu", "b on meta", "move them to one device"),
    ),
    (
        "device of a",
        lambda: fp8fn.gemm(meta(A), B),
        ValueError,
        ("a is on meta", "b on cpu", "move them to one device"),
    ),
    ("device of bias", lambda: fp8fn.gemm(A, B, bias=meta(B[0])), ValueError, ("bias on meta", "move them")),
    ("integer a", lambda: fp8fn.gemm(A.int(), B), TypeError, ("a has dtype torch.int32", "use bfloat16")),
    ("float64 b", lambda: fp8fn.gemm(A, B.double()), TypeError, ("b has dtype torch.float64", "use bfloat16")),
    ("FP8 a", lambda: fp8fn.gemm(A.to(torch.float8_e4m3fn), B), TypeError, ("a has dtype torch.float8_e4m3fn", "use")),
    (
        "vector b",
        lambda: fp8fn.gemm(A, B[:, 0]),
        ValueError,
        ("b has shape (64,)", "two dimensions, b[:, None] for one"),
    ),
    ("scalar b", lambda: fp8fn.gemm(A, B[0, 0]), ValueError, ("b has shape ()", "b[None, None] for one")),
    ("vector weight", lambda: fp8fn.linear(A, A[0]), ValueError, ("weight has shape (64,)", "weight[None] for one")),
    ("vector x", lambda: fp8fn.quantize(A[0], (1, 32)), ValueError, ("x has shape (64,)", "x[None] for one")),
    ("scalar a", lambda: fp8fn.gemm(A[0, 0], B), ValueError, ("a has shape ()", "at least one dimension")),
    (
        "batches",
        lambda: fp8fn.gemm(A.expand(2, -1, -1), B.expand(3, -1, -1)),
        ValueError,
        ("(2,)", "(3,)", "broadcast"),
    ),
    ("bias's shape", lambda: fp8fn.gemm(A, B, bias=B[0, :40]), ValueError, ("bias has shape (40,)", "must be (48,)")),
    ("bias's rank", lambda: fp8fn.gemm(A, B, bias=B[:1]), ValueError, ("bias has shape (1, 48)", "must be (48,)")),
    (
        "bias's rank of linear",
        lambda: fp8fn.linear(A, B.mT, B[:1]),
        ValueError,
        ("linear: bias has shape (1, 48)", "N of weight"),
    ),
    ("bias's dtype", lambda: fp8fn.gemm(A, B, bias=B[0].int()), TypeError, ("bias has dtype torch.int32", "use")),
    (
        "out_dtype",
        lambda: fp8fn.gemm(A, B, out_dtype=torch.int8),
        TypeError,
        ("out_dtype=torch.int8", "use torch.bfloat16"),
    ),
    ("recipe's name", lambda: fp8fn.gemm(A, B, recipe="rowise"), ValueError, ("'rowise'", "did you mean 'rowwise'")),
    ("recipe's type", lambda: fp8fn.gemm(A, B, recipe=8), TypeError, ("recipe=8", "pass an fp8fn.Recipe")),  # type: ignore[arg-type]
    (
        "recipe's field",
        lambda: fp8fn.gemm(A, B, recipe="scales=pow2"),
        ValueError,
        ("'scales'", "did you mean 'scale'"),
    ),
    ("op's recipe", lambda: torch.ops.fp8fn.gemm(A, B, None, "mxpf8"), ValueError, ("'mxpf8'", "did you mean 'mxfp8'")),
]

QUANTIZE: list[tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    ("block", lambda: quantized(A, (1, 64)), ValueError, ("block=(1, 64)", "use one of", "(1, 128)")),
    ("block of one", lambda: quantized(A, (128,)), ValueError, ("block=(128,)", "use one of")),  # type: ignore[arg-type]
    ("integers", lambda: quantized(A.int(), (1, 128)), TypeError, ("x has dtype torch.int32", "x.to(torch.float32)")),
    ("float64", lambda: quantized(A.double(), (1, 128)), TypeError, ("torch.float64", "use bfloat16")),
    ("vector", lambda: quantized(A[0], (1, 128)), ValueError, ("x has shape (64,)", "x[None]")),
    ("dtype", lambda: quantized(A, (1, 128), dtype=BF16), TypeError, ("dtype=torch.bfloat16", "use one of")),
    ("scale", lambda: quantized(A, (1, 128), scale="fp16"), ValueError, ("scale='fp16'", "'fp32', 'pow2', 'e8m0'")),
    ("dual block", lambda: fp8fn.quantize_dual(A, (2, 2)), ValueError, ("quantize_dual: block=(2, 2)", "use one of")),
    (
        "dequantize an FP8Weight",
        lambda: fp8fn.dequantize(fp8fn.FP8Weight(quantized(A, (1, 128)))),  # type: ignore[arg-type]
        TypeError,
        ("dequantize: q is an FP8Weight", "use q.scaled"),
    ),
    (
        "dequantize to integers",
        lambda: fp8fn.dequantize(quantized(A, (1, 128)), torch.int8),
        TypeError,
        ("dtype=torch.int8", "use torch.bfloat16"),
    ),
]

ROW, SQUARE = quantized(A, (1, 128)), quantized(B, (128, 128))
MX_A, MX_B = (quantized(x, block, scale="e8m0") for x, block in ((A, (1, 32)), (B, (32, 1))))

SCALED: list[tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    ("K", lambda: fp8fn.gemm(ROW, SQUARE.mT), ValueError, ("K=64", "K=48", "pass weight.mT")),
    ("device", lambda: fp8fn.gemm(ROW, SQUARE.to("meta")), ValueError, ("a is on cpu", "b on meta", "move them")),
    (
        "device of a scale",
        lambda: fp8fn.gemm(ScaledTensor(ROW.data, meta(ROW.scale), ROW.block), SQUARE),
        ValueError,
        ("a is on cpu", "a_scale on meta", "move them to one device"),
    ),
    (
        "scale of a wrong shape",
        lambda: ScaledTensor(ROW.data, ROW.scale.mT, ROW.block),
        ValueError,
        ("scale has shape (1, 32)", "needs (32, 1)"),
    ),
    (
        "scale of a wrong type",
        lambda: ScaledTensor(ROW.data, ROW.scale.to(BF16), ROW.block),
        TypeError,
        ("scale has dtype torch.bfloat16", "float32 or float8_e8m0fnu"),
    ),
    ("data of a wrong type", lambda: ScaledTensor(A, ROW.scale, ROW.block), TypeError, ("data", "fp8fn.quantize")),
    ("block", lambda: ScaledTensor(ROW.data, ROW.scale, (1, 2)), ValueError, ("block=(1, 2)", "use one of")),
    (
        "e8m0 beside a float32 scale",
        lambda: fp8fn.gemm(MX_A, ScaledTensor(MX_B.data, MX_B.scale.float(), MX_B.block)),
        ValueError,
        ("a_scale", "float8_e8m0fnu", "b_scale", "float32", "fp8fn.quantize(x, (32, 1), scale='e8m0')"),
    ),
    (
        "float32 beside an e8m0 scale",
        lambda: fp8fn.gemm(quantized(A, (1, 32)), MX_B),
        ValueError,
        ("a_scale", "float32", "b_scale", "float8_e8m0fnu", "fp8fn.quantize(x, (1, 32), scale='e8m0')"),
    ),
    (
        "a block across K",
        lambda: fp8fn.gemm(quantized(A, (128, 1)), SQUARE),
        ValueError,
        ("a_block=(128, 1)", "use (1, 128)"),
    ),
    (
        "b's block across K",
        lambda: fp8fn.gemm(ROW, quantized(B, (1, 128))),
        ValueError,
        ("b_block=(1, 128)", "use (128, 1)"),
    ),
    (
        "batches",
        lambda: fp8fn.gemm(quantized(A.expand(2, -1, -1), (1, 128)), quantized(B.expand(3, -1, -1), (128, 128))),
        ValueError,
        ("batch 2", "3", "equal"),
    ),
    (
        "batches of higher rank",
        lambda: fp8fn.gemm(quantized(A.expand(5, 2, -1, -1), (1, 128)), quantized(B.expand(3, -1, -1), (128, 128))),
        ValueError,
        ("(5, 2)", "(3,)", "broadcast"),
    ),
    (
        "four dimensions in the op",
        lambda: torch.ops.fp8fn.scaled_mm(
            ROW.data[None, None], ROW.scale[None, None], ROW.block, SQUARE.data, SQUARE.scale, SQUARE.block
        ),
        ValueError,
        ("4 dimensions", "flatten"),
    ),
]

OTHER: list[tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    ("fp8's recipe", lambda: fp8fn.fp8(torch.mm, recipe="mxfp"), ValueError, ("'mxfp'", "did you mean 'mxfp8'")),
    (
        "fp8's where",
        lambda: fp8fn.fp8(torch.mm, where="layers.*"),
        TypeError,
        ("where='layers.*'", "function of a Site"),
    ),
    ("fp8's number", lambda: fp8fn.fp8(torch.mm, where=3), TypeError, ("where=3", "function of a Site")),  # type: ignore[arg-type]
    ("explain's where", lambda: fp8fn.explain(torch.mm, A, B, where=3), TypeError, ("where=3", "glob patterns")),  # type: ignore[arg-type]
    ("explain's recipe", lambda: fp8fn.explain(torch.mm, A, B, recipe="x"), ValueError, ("recipe='x'", "All presets")),
    ("Recipe's field", lambda: Recipe(scales="pow2"), TypeError, ("unexpected keyword argument 'scales'",)),  # type: ignore[call-arg]
    ("Recipe's block", lambda: Recipe(weight_block=(1, 128)), ValueError, ("weight_block=(1, 128)", "use (128, 1)")),
    (
        "backend's option",
        lambda: backend(torch.fx.symbolic_trace(torch.nn.ReLU()), [A], options={"recipes": "rowwise"}),
        ValueError,
        ("options['recipes']", "'recipe', 'where'", "Inductor"),
    ),
    (
        "backend's recipe",
        lambda: backend(torch.fx.symbolic_trace(torch.nn.ReLU()), [A], options={"recipe": "rowise"}),
        ValueError,
        ("'rowise'", "did you mean 'rowwise'"),
    ),
    (
        "backend's where",
        lambda: backend(torch.fx.symbolic_trace(torch.nn.ReLU()), [A], options={"where": 3}),
        TypeError,
        ("where=3", "glob patterns"),
    ),
]
CASES = [*GEMM, *QUANTIZE, *SCALED, *OTHER]


@pytest.mark.parametrize(("call", "error", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_message(call: Callable[[], Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("option", [{"recipes": "rowwise"}, {"recipe": "rowise"}, {"where": 3}], ids=str)
def test_the_compiled_function_names_the_bad_option(option: dict[str, Any], fresh_dynamo: None) -> None:
    compiled = torch.compile(torch.mm, backend="fp8fn", options=option)
    (name,) = option
    with pytest.raises(Exception, match=re.escape(name)) as raised:
        compiled(A, B)
    cause = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(cause, (ValueError, TypeError))


def test_a_float32_scale_serves_every_block() -> None:
    """Float32 scales in blocks of 32 are no error; only a product of the two formats is."""
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    got = fp8fn.gemm(quantized(a, (1, 32)), quantized(b, (32, 1)), out_dtype=torch.float32)
    assert (got - a @ b).norm() < 0.056 * (a @ b).norm()


@pytest.mark.parametrize("target", [targets.Target("cuda", 80, 32), targets.Target("hip", "gfx90a", 64)], ids=str)
def test_a_device_without_fp8(target: targets.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "target_of", lambda device: target)
    value, remedy = ("compute capability 8.0", "8.9") if target.backend == "cuda" else ("gfx90a", "gfx942")
    for call in (
        lambda: quantize_op.quantize_kernel(A, (1, 128)),
        lambda: quantize_op.quantize_dual_kernel(A),
        lambda: scaled_mm_op.scaled_mm_kernel(ROW.data, ROW.scale, ROW.block, SQUARE.data, SQUARE.scale, SQUARE.block),
    ):
        with pytest.raises(ValueError, match="device") as raised:
            call()
        for word in (value, remedy, "move the tensors"):
            assert word in str(raised.value)
