"""Whole matrices quantized by one scale, and their largest magnitudes: launches, bits, what may be given, refusals.

`test_blocks.py` has their bits for every layout, view and hard value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import reference
from fp8fn.ops.cuda.quantize import quantize_whole as whole
from fp8fn.ops.formats import SCALE_FORMATS
from fp8fn.ops.quantize import amax_kernel, quantize_dual_kernel, quantize_kernel
from fp8fn.ops.targets import OCP, SM89, SM90
from fp8fn.ops.triton.quantize import plan_quantize
from support.accuracy import same_bits
from support.compilers import needs_nvrtc
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.values import HARD, random
from support.quantizers import quantization, tensors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = OCP
WHOLE: Final = (-1, -1)
VIEWS: Final[dict[str, Callable[[], Tensor]]] = {
    "even": lambda: random(256, 384),
    "ragged": lambda: random(131, 261, dtype=FP16),
    "float32": lambda: random(70, 200, dtype=FP32),
    "column-major": lambda: random(200, 136).mT,
    "batch": lambda: random(2, 3, 130, 72),
    "part of rows": lambda: random(130, 300)[:, 5:205],
    "one element": lambda: random(1, 1),
}


def largest(x: Tensor) -> Tensor:
    """As PyTorch computes it, in the type of `x`."""
    return x.abs().amax((-2, -1), keepdim=True)


def launched(function: Callable[[], object], device: str) -> list[str]:
    """Calls the function, emulated where the device is the CPU, and returns the names of its launches there."""
    if device == "cuda":
        function()
        return []
    with hopper_on_cpu() as launches:
        function()
    return [launch.name for launch in launches]


@pytest.mark.parametrize("view", VIEWS)
def test_the_largest_magnitude(view: str, where: str) -> None:
    x, found = VIEWS[view]().to(where), list[Tensor]()
    names = launched(lambda: found.append(amax_kernel(x, WHOLE)), where)
    assert torch.equal(found[0], largest(x).float())
    assert found[0].is_contiguous()
    assert not names or names == ["amax"] * (1 if view == "one element" else 2)


@pytest.mark.parametrize("hard", HARD)
def test_the_largest_of_hard_values(hard: str, where: str) -> None:
    x, found = HARD[hard]().to(where), list[Tensor]()
    launched(lambda: found.append(amax_kernel(x, WHOLE)), where)
    torch.testing.assert_close(found[0], largest(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("view", VIEWS)
def test_a_given_magnitude_takes_one_launch_and_gives_the_same_bits(view: str, where: str) -> None:
    x = VIEWS[view]().to(where)
    of_pair, of_one = (f(x, WHOLE, E4M3, "fp32") for f in (reference.quantize_dual, reference.quantize))
    rows, columns = of_pair[:2], of_pair[2:]
    for amax in (largest(x), largest(x).float(), -largest(x)):

        def check(amax: Tensor = amax) -> None:
            assert same_bits(quantize_dual_kernel(x, WHOLE, amax=amax), of_pair)
            assert same_bits(quantize_kernel(x, WHOLE, amax=amax), of_one)
            assert same_bits(quantize_kernel(x, WHOLE, amax=amax, column_major=False), rows)
            assert same_bits(quantize_kernel(x, WHOLE, amax=amax, column_major=True), columns)

        names = launched(check, where)
        assert not names or names == ["quantize"] * 4


@pytest.mark.parametrize(("dtype", "scale"), [(dtype, scale) for dtype in OCP for scale in SCALE_FORMATS], ids=str)
def test_given_magnitudes_that_are_no_maximum(dtype: torch.dtype, scale: str, where: str) -> None:
    """Elements past a smaller magnitude saturate; a NaN or an Inf goes into the scale."""
    x = random(2, 40, 72).to(where)
    for value in (0.0, 1e-20, 0.01, 1e6, torch.inf, torch.nan):
        amax = torch.tensor([value, 3.0], device=where).view(2, 1, 1)
        for given in (amax, amax.to(BF16), amax.expand(2, 1, 3)[..., :1]):

            def check(given: Tensor = given) -> None:
                found = quantize_dual_kernel(x, WHOLE, dtype, scale, given)
                assert same_bits(found, reference.quantize_dual(x, WHOLE, dtype, scale, given))

            launched(check, where)


@needs_compiler
def test_two_reads_are_two_launches() -> None:
    for x, column_major in ((random(140, 264), False), (random(264, 140).mT, True)):
        with hopper_on_cpu() as launches:
            pair = quantize_dual_kernel(x, WHOLE)
            data, scale = quantize_kernel(x, WHOLE)
        assert [launch.name for launch in launches] == ["amax", "quantize"] * 2
        assert [out.stride() for out in pair] == [(272, 1), (4, 1), (1, 144), (1, 4)]
        assert data.stride() == ((1, 144) if column_major else (272, 1))
        assert same_bits((data, scale), reference.quantize(x, WHOLE, E4M3, "fp32"))


@needs_compiler
def test_blocks_of_threads_walk_over_all_tiles() -> None:
    """As many as there are tiles; with two multiprocessors, each block has several of the 27 tiles of its matrix."""
    x = random(3, 1100, 300)
    for target, blocks in ((SM90, 27), (replace(SM90, multiprocessors=2), 2)):
        q = quantization(x, WHOLE, dual=True, target=target)
        launches = whole.plan(q, whole.configure(q))
        assert launches[0].grid == (blocks, 1, 3)
        for launch in launches:
            emulate(launch)
        assert same_bits(tensors(q), reference.quantize_dual(x, WHOLE, E4M3, "fp32"))


def test_what_is_refused() -> None:
    x = torch.empty(40, 72, device="meta", dtype=BF16)
    assert "is no whole matrix" in str(whole.accepts(quantization(x, (1, -1))))
    assert "not sm90" in str(whole.accepts(quantization(x, WHOLE, target=SM89)))
    assert "is no type of the hardware" in str(whole.accepts(quantization(x, WHOLE, dtype=torch.float8_e4m3fnuz)))
    assert "none of the last two 1" in str(whole.accepts(quantization(x[::2, ::2], WHOLE)))
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    assert "groups of rows" in str(whole.accepts(quantization(x, WHOLE, offsets=offsets)))
    assert whole.accepts(quantization(x.mT, WHOLE)) is None


@pytest.mark.parametrize(("amax", "kind", "message"), [
    (torch.ones(1), ValueError, r"quantize: amax has shape \(1,\); x \(8, 16\) in \(-1, -1\) needs \(1, 1\)"),
    (torch.ones(1, 1, dtype=FP16), TypeError, "amax has dtype torch.float16; use float32, or torch.bfloat16"),
    (torch.ones(1, 1, device="meta"), ValueError, "x is on cpu and amax on meta; move them to one device"),
])  # fmt: skip
def test_a_wrong_amax(amax: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        torch.ops.fp8fn.quantize(torch.ones(8, 16, dtype=BF16), WHOLE, None, "fp32", amax)


def test_an_amax_serves_one_block() -> None:
    x = torch.ones(8, 16)
    with pytest.raises(ValueError, match=r"amax is given for block \(1, -1\), whose transpose needs another"):
        torch.ops.fp8fn.quantize_dual(x, (1, -1), None, "fp32", torch.ones(8, 1))


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (1, -1), (-1, 1), WHOLE, (1, 32)], ids=str)
def test_quantize_is_quantize_of_its_own_amax(block: tuple[int, int]) -> None:
    for x in (random(130, 140), random(2, 33, 40, dtype=FP32), torch.zeros(0, 40), torch.full((3, 5), torch.nan)):
        amax = torch.ops.fp8fn.amax(x, block)
        found = torch.ops.fp8fn.quantize(x, block, E5M2, "pow2", amax)
        assert same_bits(found, torch.ops.fp8fn.quantize(x, block, E5M2, "pow2"))


@pytest.mark.parametrize("block", [(128, 128), WHOLE], ids=str)
def test_triton_writes_either_layout(block: tuple[int, int]) -> None:
    for x in (random(2, 130, 200), random(200, 140, dtype=FP32).mT):
        pair = reference.quantize_dual(x, block, E4M3, "fp32")
        for column_major, expected in ((False, pair[:2]), (True, pair[2:])):
            q = quantization(x, block, column_major=column_major)
            for launch in plan_quantize(q):
                launch.interpret()
            assert same_bits(tensors(q), expected)


@pytest.mark.parametrize(("block", "always"), [((1, 128), "row-major"), ((128, 1), "column-major")], ids=str)
def test_only_square_blocks_have_a_choice_of_layouts(block: tuple[int, int], always: str) -> None:
    x, weight = torch.ones(8, 16, dtype=BF16), torch.ones(16, dtype=BF16)
    ops = torch.ops.fp8fn
    for name, call in (
        ("quantize", lambda: ops.quantize(x, block, column_major=True)),
        ("quantize_silu_mul", lambda: ops.quantize_silu_mul(x, x, block, column_major=True)),
        ("quantize_rms_norm", lambda: ops.quantize_rms_norm(x, weight, 1e-6, block, column_major=True)),
    ):
        message = f"{name}: column_major=True is given for block {block}, which is always {always}"
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_triton_takes_a_given_magnitude() -> None:
    for x in (random(2, 70, 200), random(33, 40, dtype=FP32).mT):
        for amax in (largest(x), torch.full_like(largest(x), -torch.nan), torch.zeros_like(largest(x))):
            q = quantization(x, WHOLE, amax=amax)
            (launch,) = plan_quantize(q)
            launch.interpret()
            assert same_bits(tensors(q), reference.quantize(x, WHOLE, E4M3, "fp32", amax))


@needs_nvrtc
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (4097, 4099)], ids=str)
def test_machine_code(shape: tuple[int, int], dtype: torch.dtype) -> None:
    q = quantization(torch.empty(shape, device="meta", dtype=dtype), WHOLE, dual=True)
    maxima, quantize = (launch.resources() for launch in whole.plan(q, whole.configure(q)))
    assert (maxima.spills, quantize.spills) == (0, 0)
    assert maxima.registers <= 64
    assert quantize.registers <= (64 if dtype != FP32 and shape[1] == 4096 else 128)
