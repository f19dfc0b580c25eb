"""FP8 data in the other layout: bytes and strides, and the products that read it."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import targets
from fp8fn.ops.cuda.quantize import turn as cuda
from fp8fn.ops.formats import FP8_DTYPES
from fp8fn.ops.layout import matrix_strides
from fp8fn.ops.scaled_mm import contiguous_along_k
from fp8fn.ops.targets import SM89, SM90
from fp8fn.ops.triton.turn import plan_turn
from fp8fn.ops.turn import TURN, Turn, column_major

E4M3 = torch.float8_e4m3fn
SHAPES = [(1, 1), (1, 300), (300, 1), (127, 17), (128, 128), (16, 4096), (3, 33, 65), (5, 128, 16), (0, 16), (16, 0)]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def codes(*shape: int, device: str = "cpu") -> Tensor:
    """Bytes of every value, NaN included, in an order that is no one's transposition."""
    count = torch.Size(shape).numel()
    return (
        (torch.arange(count, device=device) * 37 % 251 + torch.arange(count, device=device) // 256)
        .to(torch.uint8)
        .view(shape)
    )


def checked(x: Tensor, copy: Tensor) -> None:
    assert copy.dtype == x.dtype
    assert copy.stride() == matrix_strides(x.shape, True, 16)
    assert torch.equal(copy.view(torch.uint8), x.view(torch.uint8))


@each_shape
def test_the_kernel_copies_every_byte(shape: tuple[int, ...]) -> None:
    x = codes(*shape).view(E4M3)
    if not x.numel():
        return
    out = torch.empty_strided(shape, matrix_strides(shape, True, 16), dtype=E4M3)
    plan_turn(x, out, SM90)[0].interpret()
    checked(x, out)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_the_copy_on_a_cpu(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = codes(*shape).view(dtype)
        checked(x, column_major(x))


def test_the_kernel_on_each_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's is in CUDA C++, which a process has compiled before and loads: Triton takes most of a second."""
    x = codes(4, 16).view(E4M3)
    given = Turn(x=x, out=torch.empty_strided((4, 16), (1, 16), dtype=E4M3), target=SM90)
    other = replace(given, target=SM89)
    assert TURN.choose(given).describe() == "cuda by default"
    assert TURN.choose(other).describe() == "triton by default; not cuda: sm89 is not sm90"
    monkeypatch.setattr("fp8fn.ops.turn.find_spec", lambda _: None)
    assert TURN.choose(given).describe() == "cuda by default"
    expected = "reference by default; not cuda: sm89 is not sm90; not triton: triton is not installed"
    assert TURN.choose(other).describe() == expected


def test_what_the_kernel_of_hopper_does_not_address() -> None:
    def fault(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
        x = torch.empty_strided(shape, strides, dtype=E4M3, device="meta")
        out = torch.empty_strided(shape, matrix_strides(shape, True, 16), dtype=E4M3, device="meta")
        return cuda.accepts(Turn(x=x, out=out, target=SM90))

    assert fault((5, 300, 64), (300 * 64, 64, 1)) is None
    assert fault((5, 300, 70), (300 * 80, 80, 1)) is None
    assert fault((5, 300, 70), (0, 80, 1)) == "x has strides (0, 80, 1): its matrices do not follow each other"
    assert fault((2, 2**31 - 1), (2**31 - 1, 1)) == "x has shape (2, 2147483647), past 32 bits"
    assert fault((300, 70), (70, 1)) == "rows of x begin at no multiples of 16 bytes"
    assert fault((2**24, 16), (16, 1)) == "x has shape (16777216, 16), more than 65535 blocks of rows or matrices"


def test_a_first_product_on_hopper_imports_no_triton() -> None:
    """The product quantizes both operands and turns one. Triton's import took the first call 0.8 s."""
    code = """
import sys
import torch
import fp8fn
from fp8fn.ops.operands import Quantized
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.operands import Quantization
from fp8fn.ops.quantize import QUANTIZE
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import SM90
from fp8fn.ops.turn import TURN, Turn

x, e4m3 = torch.empty(256, 256, dtype=torch.bfloat16, device="meta"), torch.float8_e4m3fn
a, b = (Quantization(x=x, block=block, dtype=e4m3, scale="fp32", target=SM90) for block in ((1, 128), (128, 128)))
turned = torch.empty(256, 256, dtype=e4m3, device="meta").mT
turn = Turn(x=b.out.data, out=turned, target=SM90)
product = ScaledProduct(a=a.out, b=Quantized(turned, *b.out[1:]), bias=None, out=x, target=SM90)
names = []
for dispatch, given in ((QUANTIZE, a), (QUANTIZE, b), (TURN, turn), (SCALED_MM, product)):
    names += [launch.name for launch in dispatch.choose(given).plan(given)]
assert "triton" not in sys.modules
print(*names)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["quantize", "quantize", "turn", "scaled_mm"], found.stderr


@pytest.mark.gpu
@each_shape
def test_the_copy_on_a_gpu(shape: tuple[int, ...]) -> None:
    x = codes(*shape, device="cuda").view(E4M3)
    for _ in range(2):  # planned, and kept
        checked(x, column_major(x))


@pytest.mark.gpu
def test_views_on_a_gpu() -> None:
    """Rows that begin at any byte, a batch that `expand` made, and rows far apart."""
    memory = codes(200, 1000, device="cuda").view(E4M3)
    for x in (memory[3:170, 5:300], memory[:, 1:], memory[::3, 16:48], memory.expand(3, 200, 1000)):
        checked(x, column_major(x))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    x = torch.zeros(2**15 + 16, 2**16 + 16, dtype=torch.uint8, device="cuda")
    x[-1], x[:, -1] = 3, 5
    copy = column_major(x.view(E4M3)).view(torch.uint8)
    assert torch.equal(copy, x)


@pytest.mark.gpu
def test_a_product_turns_what_hopper_cannot_read(kept: OrderedDict[Any, Any]) -> None:
    if targets.hopper_fault(targets.target_of(torch.device("cuda"))):
        pytest.skip("only Hopper reads operands along K alone")
    a = codes(256, 384, device="cuda").remainder(0x70).to(torch.uint8).view(E4M3)
    b = codes(384, 512, device="cuda").remainder(0x70).to(torch.uint8).view(E4M3)
    along = contiguous_along_k(b)
    assert (b.stride(), along.stride()) == ((512, 1), (1, 384))
    assert contiguous_along_k(along) is along
    scales = torch.rand(256, 3, device="cuda"), torch.rand(3, 4, device="cuda")
    found = [torch.ops.fp8fn.scaled_mm(a, scales[0], (1, 128), x, scales[1], (128, 128)) for x in (b, b, along)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])
    assert "column_major" in {key[0] for key in kept if isinstance(key, tuple)}
