"""Lines that are right, and whose loss no other test noticed; `mutations.json` has the faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from cuda_emulator import emulate, needs_compiler

import fp8fn
from fp8fn import HYBRID, Recipe
from fp8fn.meta import remembered
from fp8fn.ops import launch as launches
from fp8fn.ops import reference
from fp8fn.ops.cuda import captured, gemv_a16w8
from fp8fn.ops.cuda import quantize as cuda_quantize
from fp8fn.ops.cuda.quantize import Quantized
from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import Block, empty_scale
from fp8fn.ops.recipe import BLOCKWISE, ROWWISE
from fp8fn.ops.targets import SM90
from fp8fn.ops.triton import quantize as triton_quantize
from fp8fn.ops.tuning import estimate
from fp8fn.ops.tuning.problem import Chip, linear_problems
from fp8fn.ops.tuning.rates import rates_of

BF16, FP32 = torch.bfloat16, torch.float32
OPS = torch.ops.fp8fn
H200 = Chip("NVIDIA H200", 132)


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", ["a", "b"])
def test_a_second_derivative_quantizes_each_gradient_by_its_own_recipe(needed: str) -> None:
    """`hybrid` has other types in the two: the gradients are those that the kept FP8 forms give."""
    a, b = torch.randn(160, 256, dtype=BF16), torch.randn(256, 136, dtype=BF16)
    grad = torch.randn(160, 136, dtype=BF16)

    def gradient(recipe: Recipe) -> Tensor:
        operands = {"a": a.clone(), "b": b.clone()}
        x = operands[needed].requires_grad_()
        out = fp8fn.gemm(operands["a"], operands["b"], recipe=recipe)
        return torch.autograd.grad(out, x, grad)[0]

    assert HYBRID.dgrad.key != HYBRID.wgrad.key
    assert torch.equal(gradient(replace(HYBRID, second_order=True)), gradient(HYBRID))


def test_the_gradient_of_one_x_beside_a_batch_of_weights_is_summed_in_float32() -> None:
    x = torch.randn(9, 64, dtype=BF16, requires_grad=True)
    w = fp8fn.quantize(torch.randn(48, 64, 32), (128, 128))
    grad = torch.randn(48, 9, 32, dtype=BF16)
    out = OPS.mm_a16w8(x, w.data, w.scale, w.block)
    found = torch.autograd.grad(out, x, grad)[0]
    weights = reference.dequantize(w.data, w.scale, w.block).double()
    exact = (grad.double() @ weights.mT).sum(0)
    assert found.dtype == BF16
    # Rounded once: all but ties are the nearest. Summed in bf16 most are not.
    assert (found != exact.to(BF16)).double().mean() < 0.01


# ---- fake tensors and transforms -------------------------------------------------------------------------------------


def test_fake_results_are_of_the_inputs_device() -> None:
    with FakeTensorMode():
        for device in ("cpu", "meta", "cpu"):
            data, scale = OPS.quantize(torch.empty(141, 1031, dtype=BF16, device=device), (1, 128))
            assert (data.device.type, scale.device.type) == (device, device)


def test_what_a_fake_result_depends_on() -> None:
    """The names of arguments, too: two of a call's may have one type."""
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4, 128)
        keys = [remembered._key(mode, (x,), given) for given in ({"top_k": 2}, {"a_div": 2}, {"top_k": 1}, {})]
    assert None not in keys
    assert len(set(keys)) == 4


def test_fake_tensors_that_carry_real_ones_keep_them() -> None:
    x = torch.randn(142, 256)
    with FakeTensorMode() as mode:
        OPS.quantize(torch.empty(142, 256), (1, 128))  # the geometry is known from now on
    mode.propagate_real_tensors = True
    with mode:
        fake = mode.from_tensor(x)
        fake.real_tensor = x
        data, _ = OPS.quantize(fake, (1, 128))
    expected, _ = reference.quantize(x, (1, 128), torch.float8_e4m3fn, "fp32")
    assert torch.equal(data.real_tensor.float(), expected.float())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"b": (160, 96)}, ValueError, "K=128 and b .* has K=160"),
        ({"scale": FP32}, TypeError, "a_scale has dtype torch.float32"),
    ],
)
def test_mx_mm_refuses_operands_while_it_is_traced(change: dict[str, Any], error: type, message: str) -> None:
    with FakeTensorMode():
        a, b = torch.empty(16, 128), torch.empty(change.get("b", (128, 96)))
        rows = OPS.quantize(a, (1, 32), None, "e8m0")
        columns = OPS.quantize(b, (32, 1), None, "e8m0")
        scale = rows[1] if "scale" not in change else torch.empty(rows[1].shape, dtype=change["scale"])
        with pytest.raises(error, match=message):
            OPS.mx_mm(rows[0], scale, *columns)


def test_vmap_of_an_empty_batch_of_groups() -> None:
    x, ends = torch.empty(0, 40, 24), torch.tensor([16, 40], dtype=torch.int32)
    data, scale = torch.vmap(lambda x: OPS.quantize_grouped(x, ends))(x)
    one_data, one_scale = OPS.quantize_grouped(torch.randn(40, 24), ends)
    assert (data.shape, data.dtype) == ((0, *one_data.shape), one_data.dtype)
    assert (scale.shape, scale.dtype) == ((0, *one_scale.shape), FP32)
    weights = torch.empty(0, 2, 24, 32)
    out = torch.vmap(lambda x, w: OPS.grouped_gemm(x, w, ends))(x, weights)
    assert out.shape == (0, 40, 32)


# ---- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_on_the_device_of_its_tensors(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [current]
    ran = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        devices.append(index)
        yield
        devices.pop()

    class Kernel:
        def run(self, *args: Any, **options: Any) -> None:
            ran.append(devices[-1])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Launch, "_device_index", lambda self: 1)
    launches.Launch(Kernel(), (1, 1, 1), {"x": torch.empty(1)}, {}, {}, SM90).run()
    assert ran == [1]
    assert devices == [current]


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (range(10), range(5, 15), True), (range(20), range(5, 15), True), (range(10), range(10), True),
        (range(10), range(9, 10), True), (range(10), range(10, 20), False), (range(10), range(15, 20), False),
    ],
)  # fmt: skip
def test_spans_of_memory_that_meet(one: range, other: range, meet: bool) -> None:
    """What a launch writes may begin before a weight, in it, or be a part of it: views share a storage."""
    assert captured._meet(one, other) is meet
    assert captured._meet(other, one) is meet


def sparse(path: Path, size: int) -> Tensor:
    """So many bytes of which only those that are touched take memory."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


@needs_compiler
def test_weights_of_a_batch_past_2_to_the_31(tmp_path: Path) -> None:
    """The third matrix of a batch that lie 3 * 2**29 bytes apart."""
    (m, n, k), apart = (2, 16, 64), 3 * 2**29
    memory = sparse(tmp_path / "weights", 2 * apart + n * k)
    w = memory.as_strided((3, k, n), (apart, 1, k))
    values = fp8fn.quantize(torch.randn(3, k, n), (-1, -1))
    w.copy_(values.data.view(torch.uint8))
    x, out = torch.randn(3, m, k, dtype=BF16), torch.empty(3, m, n)
    operands = x, w.view(torch.float8_e4m3fn), values.scale, (-1, -1), None, out, SM90
    assert gemv_a16w8.accepts(*operands) is None
    emulate(gemv_a16w8.plan(*operands))
    exact = x.double() @ reference.dequantize(values.data, values.scale, values.block).double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_quantized_batches_past_2_to_the_31(tmp_path: Path) -> None:
    """The second matrix of a batch whose rows lie 2**28 bytes apart, eight of them a matrix."""
    (m, n), lead = (8, 128), 2**28
    memory = sparse(tmp_path / "data", 2 * m * lead)
    data = memory.as_strided((2, m, n), (m * lead, lead, 1)).view(torch.float8_e4m3fn)
    x = torch.randn(2, m, n, dtype=BF16)
    scale = empty_scale(x, (1, 128), "fp32")
    emulate(cuda_quantize.plan_quantize(x, Quantized(data, scale), (1, 128), "fp32", SM90))
    expected, scales = reference.quantize(x, (1, 128), torch.float8_e4m3fn, "fp32")
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, scales)


STEP = 3 * 2**29  # elements; twice that is past int32
LAYOUTS = {  # sizes and strides
    "batch": ((3, 5, 130), (STEP, 130, 1)),
    "rows": ((1, 9, 130), (2 * STEP, STEP // 4, 1)),
    "columns": ((1, 5, 34), (4 * STEP, 1, STEP // 16)),
}


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, -1), (-1, 1), (-1, -1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_quantizers_past_2_to_the_31(layout: str, block: Block, tmp_path: Path) -> None:
    """Few elements, far apart: between matrices, rows or columns."""
    shape, strides = LAYOUTS[layout]
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    x = sparse(tmp_path / "x", 2 * size).view(BF16).as_strided(shape, strides)
    data = sparse(tmp_path / "data", size).view(torch.float8_e4m3fn).as_strided(shape, strides)
    values = torch.randn(shape, dtype=BF16)
    x.copy_(values)
    scales = empty_scale(values, block, "fp32")
    for launch in triton_quantize.plan_quantize(x, data, scales, block, "fp32", SM90):
        assert launch.constexprs["WIDE"]
        launch.interpret()
    expected, expected_scales = reference.quantize(values, block, torch.float8_e4m3fn, "fp32")
    assert torch.equal(data.view(torch.uint8).contiguous(), expected.view(torch.uint8).contiguous())
    assert torch.equal(scales, expected_scales)


# ---- estimates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "reads"), [(BLOCKWISE, 1), (ROWWISE, 2)])
def test_a_quantizer_is_estimated_to_read_blocks_once_and_lines_twice(recipe: Recipe, reads: int) -> None:
    m, n, k = 8192, 4096, 6144
    times = estimate.linear_times(m, n, k, recipe, H200)
    assert times is not None
    product, _ = estimate.product_us(linear_problems(m, n, k, recipe)["forward"], H200)
    moved = (m * k + n * k) * (2 * reads + 2)  # 16 bits read, and two forms in FP8 written
    expected = product + 2 * 3.0 + moved / (rates_of(H200).quantize * 1e6)
    assert times.fp8.forward == pytest.approx(expected, rel=1e-6)
