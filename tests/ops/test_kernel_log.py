"""The dispatch's line in the log: shapes and the choice, and no value of a tensor, which a GPU would be waited for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8fn.ops.kernel import Dispatch
from fp8fn.ops.mm_a16w8 import MM_A16W8
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import WeightProduct
from fp8fn.ops.quantization import Quantization
from fp8fn.ops.quantize import QUANTIZE
from fp8fn.ops.targets import SM90

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
