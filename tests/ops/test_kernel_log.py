"""The dispatch's line in the log: shapes and the choice, and no value of a tensor, which a GPU would be waited for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8fn.lowering.explain import explain
from fp8fn.ops import kernel, reference, targets
from fp8fn.ops.kernel import Dispatch
from fp8fn.ops.mm_a16w8 import MM_A16W8
from fp8fn.ops.operands import Quantization, Quantized, ScaledProduct, WeightProduct
from fp8fn.ops.quantize import QUANTIZE
from fp8fn.ops.recipe import BLOCKWISE
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import GFX942, SM90

X = torch.empty(4, 512, dtype=torch.bfloat16)
W = Quantized(torch.empty(256, 512, dtype=torch.float8_e4m3fn).mT, torch.empty(4, 2), (128, 128))
PRODUCT = WeightProduct(x=X, w=W, out=torch.empty(4, 256, dtype=torch.bfloat16), target=SM90)
QUANTIZATION = Quantization(x=X, block=(1, 128), dtype=torch.float8_e4m3fn, scale="fp32", target=SM90)


@pytest.mark.parametrize(
    ("op", "operands", "line"),
    [
        (MM_A16W8, PRODUCT, "mm_a16w8 (4, 512) x (512, 256) x (4, 256): "),
        (QUANTIZE, QUANTIZATION, "quantize (4, 512): "),
    ],
    ids=["mm_a16w8", "quantize"],
)
def test_the_log_has_shapes_and_reads_no_values(
    op: Dispatch, operands: Any, line: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def refuse(x: Tensor, **_: Any) -> str:
        raise AssertionError("the log reads values")

    monkeypatch.setattr(Tensor, "__repr__", refuse)
    with caplog.at_level(logging.DEBUG, logger="fp8fn"):
        launches = op.plan(operands)
    (message,) = [text for record in caplog.records if (text := record.getMessage()).startswith(line)]
    assert message == line + launches[0].describe()


def test_types_without_a_kernel_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an MI300X a checkpoint in e4m3fn is multiplied by plain PyTorch; the results are the reference's."""
    said: list[str] = []
    monkeypatch.setattr(kernel, "warn_once", said.append)
    monkeypatch.setattr(targets, "target_of", lambda device: GFX942)
    a, a_scale = reference.quantize(torch.randn(16, 128), (1, 128), torch.float8_e4m3fn, "fp32")
    b, b_scale = reference.quantize(torch.randn(128, 32), (128, 128), torch.float8_e4m3fn, "fp32")
    (out,) = SCALED_MM((a, a_scale, b, b_scale, None), ((1, 128), (128, 128), torch.float32))
    left, right = Quantized(a, a_scale, (1, 128)), Quantized(b, b_scale, (128, 128))
    assert torch.equal(out, reference.scaled_mm(left, right, None, torch.float32))
    why = "has no kernel on gfx942, so that plain PyTorch computes it, slowly; quantize to torch.float8_e4m3fnuz"
    assert said == [f"scaled_mm: torch.float8_e4m3fn {why}"]
    product = ScaledProduct(a=left, b=right, out=torch.empty(16, 32), target=GFX942)
    assert SCALED_MM.unserved(product) == "torch.float8_e4m3fn @ torch.float8_e4m3fn has no kernel on gfx942"


def test_explain_names_no_kernel_for_types_that_have_none() -> None:
    recipe = replace(BLOCKWISE, activation_dtype=torch.float8_e4m3fn, weight_dtype=torch.float8_e4m3fn)
    layer, x = torch.nn.Linear(512, 512, bias=False).bfloat16(), torch.randn(64, 512).bfloat16()
    (row,) = explain(layer, x, recipe=recipe, where="*", target="gfx942", show=False).rows
    types = "torch.float8_e4m3fn @ torch.float8_e4m3fn"
    assert row.kernel == f"reference (plain PyTorch; {types} has no kernel on gfx942)"
