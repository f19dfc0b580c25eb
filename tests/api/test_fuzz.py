"""Kernels against the reference on drawn shapes, strides, types and values: interpreted, and on a device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.formats import SCALE_FORMATS
from fp8fn.ops.layout import BLOCKS, Block, empty_data, empty_scale, swap
from fp8fn.ops.mx_mm import KERNELS, problem_of
from support.products import Parts, dispatched, mx_product
from support.quantizers import plan_quantize, plan_quantize_dual

EXECUTIONS = [
    pytest.param("interpreted", marks=pytest.mark.slow),
    pytest.param("device", marks=pytest.mark.gpu),
]
EXAMPLES = {"interpreted": 100, "device": 300}
PRODUCT_BLOCKS: list[tuple[Block, Block]] = [
    ((1, 128), (128, 128)), ((1, 128), (128, 1)), ((1, -1), (-1, 1)), ((-1, -1), (-1, -1)), ((1, 32), (32, 1)),
]  # fmt: skip

sizes = st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 257]))
storages = st.sampled_from(["contiguous", "transposed", "sliced"])
inputs = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
contents = st.sampled_from(["normal", "zeros", "subnormal", "nan", "inf", "outliers"])
scales = st.sampled_from(SCALE_FORMATS)
seeds = st.integers(0, 2**31)


def device_of(execution: str) -> torch.device:
    return torch.device("cpu" if execution == "interpreted" else "cuda")


def target_for(execution: str) -> targets.Target:
    return targets.SM90 if execution == "interpreted" else targets.target_of(device_of(execution))


def draw(m: int, n: int, dtype: torch.dtype, storage: str, content: str, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (m, n) if storage == "contiguous" else (n, m) if storage == "transposed" else (m + 3, 2 * n + 5)
    x = torch.randn(rows, columns, generator=generator)
    if content == "zeros":
        x.zero_()
    elif content == "subnormal":
        x *= torch.finfo(dtype).smallest_normal / 2
    elif content == "outliers":
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.01, x * 1e4, x)
    x = x.to(dtype).to(device)
    x = x.mT if storage == "transposed" else x if storage == "contiguous" else x[2 : 2 + m, 3 : 3 + 2 * n : 2]
    if content in ("nan", "inf") and x.numel():
        x[seed % m, seed % n] = float(content)
    return x


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal bytes and strides; any NaN equals any other."""
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    numbers, others = found.float().cpu(), expected.float()
    same = (numbers == others) & (numbers.signbit() == others.signbit()) | (numbers.isnan() & others.isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_quantize(execution: str) -> None:
    @settings(max_examples=EXAMPLES[execution], deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        sizes, sizes, inputs, storages, contents, st.sampled_from(BLOCKS), scales,
        st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]), seeds,
    )  # fmt: skip
    def check(
        m: int, n: int, dtype: torch.dtype, storage: str, content: str, block: Block, scale: str,
        fp8: torch.dtype, seed: int,
    ) -> None:  # fmt: skip
        x = draw(m, n, dtype, storage, content, device_of(execution), seed)
        data, scale_values = torch.ops.fp8fn.quantize(x, block, fp8, scale)
        if execution == "interpreted" and x.numel():
            data, scale_values = empty_data(x, block, fp8), empty_scale(x, block, scale)
            for launch in plan_quantize(x, data, scale_values, block, scale, target_for(execution)):
                launch.interpret()
        expected, expected_scale = reference.quantize(x.cpu(), block, fp8, scale)
        assert_same_bits(scale_values, expected_scale)
        assert_same_bits(data, expected)

    check()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_quantize_dual(execution: str) -> None:
    @settings(max_examples=EXAMPLES[execution] // 2, deadline=None, suppress_health_check=list(HealthCheck))
    @given(sizes, sizes, inputs, storages, contents, st.sampled_from([(1, 128), (1, 32)]), scales, seeds)
    def check(
        m: int, n: int, dtype: torch.dtype, storage: str, content: str, block: Block, scale: str, seed: int
    ) -> None:
        x, fp8 = draw(m, n, dtype, storage, content, device_of(execution), seed), torch.float8_e4m3fn
        found = torch.ops.fp8fn.quantize_dual(x, block, fp8, scale)
        if execution == "interpreted" and x.numel():
            found = (
                empty_data(x, block, fp8), empty_scale(x, block, scale),
                empty_data(x, swap(block), fp8), empty_scale(x, swap(block), scale),
            )  # fmt: skip
            plan_quantize_dual(x, found, block, scale, target_for(execution)).interpret()
        for tensor, expected in zip(found, reference.quantize_dual(x.cpu(), block, fp8, scale), strict=True):
            assert_same_bits(tensor, expected)

    check()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_scaled_mm(execution: str) -> None:
    @settings(max_examples=EXAMPLES[execution], deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        sizes, sizes, sizes, storages, storages, contents, contents, st.sampled_from(PRODUCT_BLOCKS),
        st.sampled_from(["e8m0", "rceil"]), st.booleans(), seeds,
    )  # fmt: skip
    def check(
        m: int, n: int, k: int, a_storage: str, b_storage: str, a_content: str, b_content: str,
        blocks: tuple[Block, Block], mx_scale: str, with_bias: bool, seed: int,
    ) -> None:  # fmt: skip
        device = device_of(execution)
        a = draw(m, k, torch.bfloat16, a_storage, a_content, device, seed)
        b = draw(k, n, torch.bfloat16, b_storage, b_content, device, seed + 1)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device) if with_bias else None
        scale = mx_scale if blocks[0][1] == 32 else "fp32"
        operands = []
        for x, block in zip((a, b), blocks, strict=True):
            operands += [*reference.quantize(x, block, torch.float8_e4m3fn, scale), block]
        if execution == "interpreted" and m * n:
            out = torch.full((m, n), torch.nan)
            dispatched(Parts(*operands, bias, out).product(target_for(execution))).interpret()
        else:
            out = torch.ops.fp8fn.scaled_mm(*operands, bias, torch.float32)
        left, right = (
            reference.dequantize(*operands[i : i + 3]).double().cpu() for i in (0, 3)
        )  # fmt: skip
        expected = left @ right + (0 if bias is None else bias.double().cpu())
        assert out.shape == expected.shape
        found, finite = out.double().cpu(), expected.isfinite()
        # A NaN or an Inf reaches the outputs of its own block, and is finite nowhere there.
        assert torch.equal(found.isfinite(), finite)
        error = (found - expected)[finite].norm()
        assert error <= 1e-3 * expected[finite].norm() + 1e-30

    check()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_mx_mm(execution: str) -> None:
    """Each kernel that takes a problem; on a device the one that is chosen."""
    triton = [kernel for kernel in KERNELS if kernel.name.startswith("triton_")]
    fp8 = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])

    @settings(max_examples=EXAMPLES[execution], deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.integers(0, 80), sizes, st.one_of(st.integers(0, 9).map(lambda blocks: 32 * blocks), sizes), storages,
        storages, contents, contents, fp8, fp8, st.sampled_from(["e8m0", "rceil"]), st.booleans(), seeds,
    )  # fmt: skip
    def check(
        m: int, n: int, k: int, a_storage: str, b_storage: str, a_content: str, b_content: str,
        a_fp8: torch.dtype, b_fp8: torch.dtype, scale: str, with_bias: bool, seed: int,
    ) -> None:  # fmt: skip
        device = device_of(execution)
        x = draw(m, k, torch.bfloat16, a_storage, a_content, device, seed)
        y = draw(k, n, torch.bfloat16, b_storage, b_content, device, seed + 1)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device) if with_bias else None
        a, b = reference.quantize(x, (1, 32), a_fp8, scale), reference.quantize(y, (32, 1), b_fp8, scale)
        left, right = (reference.dequantize(*q).double().cpu() for q in ((*a, (1, 32)), (*b, (32, 1))))
        expected = left @ right + (0 if bias is None else bias.double().cpu())
        results = []
        if execution == "interpreted" and m * n:
            for kernel in triton:
                problem = problem_of(a[0], b[0], targets.GFX950)
                if kernel.accepts(problem) is None:
                    results.append(torch.full((m, n), torch.nan, dtype=torch.bfloat16))
                    config = kernel.configure(problem)
                    product = mx_product((a[0], b[0]), (a[1], b[1]), results[-1], targets.GFX950, bias=bias)
                    for launch in kernel.plan(product, config):
                        launch.interpret()
            assert results
        else:
            results.append(torch.ops.fp8fn.mx_mm(*a, *b, bias))
        finite = expected.isfinite()
        for out in results:
            assert (out.shape, out.dtype) == (expected.shape, torch.bfloat16)
            found = out.double().cpu()
            assert torch.equal(found.isfinite(), finite)
            assert (found - expected)[finite].norm() <= 4e-3 * expected[finite].norm() + 1e-30

    check()
