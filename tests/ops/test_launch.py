"""Targets and launches: what is said of a device, and that a launch compiles and is interpreted in one process."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.formats import FP8_DTYPES, fp8_max
from fp8fn.ops.layout import empty_data, empty_scale
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.reference.quantize import quantize
from fp8fn.ops.targets import (
    CPU,
    GFX942,
    GFX950,
    SM89,
    SM90,
    SM100,
    SM120,
    Target,
    check_supported,
    fp8_dtypes,
    native_e4m3,
    target_of,
)
from fp8fn.ops.triton import launch as launch_module
from fp8fn.ops.triton.interpreter import interpreting
from fp8fn.ops.triton.launch import SecondArchitectureError, TritonLaunch
from fp8fn.ops.triton.scaled_mm_tma import plan_scaled_mm_tma
from support.products import Parts, dispatched
from support.quantizers import plan_quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@triton.jit
def cast_kernel(source, target, N, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + index, mask=index < N, other=0.0)
    tl.store(target + index, values.to(target.dtype.element_ty), mask=index < N)


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + row * N + column, tl.dot(tl.load(a + row * N + column), tl.load(b + row * N + column)))


@triton.jit
def argument_kernel(out, big, sixteen, one, odd, nothing):
    tl.store(out, big + sixteen + one + odd)


def cast_launch(source: torch.Tensor, target: torch.Tensor) -> TritonLaunch:
    count = source.numel()
    args = {"source": source, "target": target, "N": count}
    grid = triton.cdiv(count, 4096), 1, 1
    return TritonLaunch(cast_kernel, grid, args, {"BLOCK": 4096}, {"num_warps": 4}, target=SM90)


def test_targets_have_names_types_and_triton_targets() -> None:
    assert [t.name for t in (CPU, SM89, SM90, GFX942, GFX950)] == ["cpu", "sm89", "sm90", "gfx942", "gfx950"]
    assert native_e4m3(GFX942) is torch.float8_e4m3fnuz
    assert [t.cubin for t in (SM89, SM90, SM100, SM120)] == ["sm_89", "sm_90a", "sm_100a", "sm_120a"]
    with pytest.raises(ValueError, match="gfx942 runs no cubin"):
        GFX942.cubin  # noqa: B018
    assert {native_e4m3(t) for t in (CPU, SM89, SM90, SM100, GFX950)} == {E4M3}
    assert fp8_dtypes(SM90) == fp8_dtypes(GFX950) == (E4M3, E5M2)
    assert fp8_dtypes(GFX942) == (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    assert fp8_dtypes(Target("cuda", 80, 32)) == ()
    assert SM90.to_triton().arch == 90
    assert GFX950.to_triton().warp_size == 64
    assert SM90.cores == 132
    assert Target("cuda", 90, 32, 78).cores == 78
    assert target_of(torch.device("cpu")) == CPU
    with pytest.raises(ValueError, match="CPU is no target"):
        CPU.to_triton()


def test_an_old_device_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"cuda:0 has compute capability 8\.0; .* 8\.9 .* move the tensors"):
        check_supported(Target("cuda", 80, 32), torch.device("cuda:0"))
    with pytest.raises(ValueError, match="gfx1100"):
        check_supported(Target("hip", "gfx1100", 32))
    for target in (CPU, SM89, SM90, SM100, GFX942, GFX950):
        check_supported(target)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_interpreted_cast_to_fp8_rounds_to_nearest_even_and_saturates(dtype: torch.dtype) -> None:
    # Every upper half of a float32: all exponents, and the ties of every FP8 type.
    source = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    out = torch.empty(source.shape, dtype=dtype)
    cast_launch(source, out).interpret()
    expected = source.clamp(-fp8_max(dtype), fp8_max(dtype)).to(dtype)
    nan = source.isnan()
    assert torch.equal(out.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])
    assert out.float()[nan].isnan().all()


def test_interpreted_cast_to_bfloat16_rounds_to_nearest_even() -> None:
    source = torch.randn(5000) * 10
    out = torch.empty(5000, dtype=torch.bfloat16)
    cast_launch(source, out).interpret()
    assert torch.equal(out, source.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8_DTYPES], ids=str)
def test_interpreted_product_multiplies_values(dtype: torch.dtype) -> None:
    a, b = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    out = torch.empty(32, 32)
    args = {"a": a, "b": b, "out": out}
    TritonLaunch(dot_kernel, (1, 1, 1), args, {"N": 32}, {"num_warps": 4}, target=SM90).interpret()
    torch.testing.assert_close(out, a.float() @ b.float())


def test_the_interpreter_leaves_nothing_behind() -> None:
    before = (JITFunction.__call__, tl.load, tl.core.reduce, tl.tensor.__add__, tl.dtype.to_ir, tl.range, tl.float32)
    with interpreting():
        assert JITFunction.__call__ is not before[0]
    after = (JITFunction.__call__, tl.load, tl.core.reduce, tl.tensor.__add__, tl.dtype.to_ir, tl.range, tl.float32)
    assert before == after
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        tl.cdiv(3, 2)


def test_one_process_compiles_interprets_and_compiles() -> None:
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    data, scales = empty_data(x, (1, 128), E4M3), empty_scale(x, (1, 128), "fp32")
    (launch,) = plan_quantize(x, data, scales, (1, 128), "fp32", SM90)
    first = launch.compile().asm["ptx"]
    launch.interpret()
    expected, expected_scales = quantize(x, (1, 128), E4M3, "fp32")
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    # A changed scalar makes another kernel, so this is no answer from the compiler's cache.
    wide = plan_quantize(x.float(), data, scales, (1, 128), "fp32", SM90)[0].compile().asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in first
    assert "cvt.rn.satfinite.e4m3x2.f32" in wide
    conversions = set(re.findall(r"v_cvt_\w+", launch.compile(GFX950).asm["amdgcn"]))
    assert "v_cvt_scalef32_pk_fp8_f32" in conversions


def test_an_old_triton_compiles_for_one_amd_architecture_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_first", {})
    x = torch.randn(64, 256, dtype=torch.bfloat16)

    def conversions(target: Target) -> set[str]:
        data = empty_data(x, (1, 128), native_e4m3(target))
        (launch,) = plan_quantize(x, data, empty_scale(x, (1, 128), "fp32"), (1, 128), "fp32", target)
        return set(re.findall(r"v_cvt_\w*fp8\w*", launch.compile().asm["amdgcn"]))

    with monkeypatch.context() as older:
        older.setattr(triton, "__version__", "3.6.0")
        launch_module._check_architecture(GFX942.to_triton())
        launch_module._check_architecture(GFX942.to_triton())
        launch_module._check_architecture(SM90.to_triton())
        with pytest.raises(SecondArchitectureError, match=r"target is gfx950, .* compiled for gfx942, .* Triton 3\.7"):
            launch_module._check_architecture(GFX950.to_triton())
    if launch_module.takes_architectures():
        assert conversions(GFX942) == {"v_cvt_pk_fp8_f32"}
        assert conversions(GFX950) == {"v_cvt_scalef32_pk_fp8_f32"}


def test_arguments_are_typed_as_the_jit_types_them() -> None:
    out = torch.empty(8, dtype=torch.int64)
    args = {"out": out, "big": 2**31, "sixteen": 48, "one": 1, "odd": 7, "nothing": None}
    source = TritonLaunch(argument_kernel, (1, 1, 1), args, {}, {"num_warps": 1}, target=SM90).compile().src
    assert source.signature == {
        "out": "*i64", "big": "i64", "sixteen": "i32", "one": "constexpr", "odd": "i32", "nothing": "constexpr",
    }  # fmt: skip
    assert source.constants == {(3,): 1, (5,): None}
    divisible = [key for key, value in source.attrs.items() if ["tt.divisibility", 16] in value]
    assert divisible == [(0,), (1,), (2,)]
    shifted = {**args, "out": out[1:]}
    again = TritonLaunch(argument_kernel, (1, 1, 1), shifted, {}, {"num_warps": 1}, target=SM90).compile().src
    assert (0,) not in again.attrs or again.attrs[(0,)] == []


def meta_product(m: int, n: int, k: int, padded: int | None = None, target: Target = SM90) -> ScaledProduct:
    a = torch.empty_strided((m, k), (padded or k, 1), dtype=E4M3, device="meta")
    b = torch.empty(n, k, dtype=E4M3, device="meta").mT
    a_scale, b_scale = empty_scale(a, (1, 128), "fp32"), empty_scale(b, (128, 128), "fp32")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    return Parts(a, a_scale, (1, 128), b, b_scale, (128, 128), None, out).product(target)


def test_tma_is_chosen_without_nvrtc_and_the_log_says_why_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no NVRTC here")
    with caplog.at_level(logging.DEBUG, logger="fp8fn"):
        assert dispatched(meta_product(4096, 4096, 4096)).name == "scaled_mm_tma"
        assert dispatched(meta_product(4096, 4096, 4096, target=SM89)).name == "scaled_mm"
        assert dispatched(meta_product(16, 4096, 4096)).name == "scaled_mm"
        unaligned = dispatched(meta_product(256, 256, 256, padded=257))
    assert unaligned.reason.endswith("not triton_tma: a has a stride of 257 bytes, no multiple of 16")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert "scaled_mm_tma[BM=128,BN=128,BK=128]" in messages[0]
    assert "not triton_tma: sm89 is none of sm90, sm100, sm103, sm120" in messages[1]
    assert "M is 16" in messages[2]


def test_a_launch_describes_itself() -> None:
    (launch,) = plan_scaled_mm_tma(meta_product(4096, 8192, 4096))
    assert launch.describe() == "scaled_mm_tma[BM=128,BN=128,BK=128] grid=132x1x1 num_warps=8 num_stages=4 sm90"


class Counted:
    """In the place of a kernel: notes which device was the current one when it ran."""

    def __init__(self, devices: list[int]) -> None:
        self.devices, self.ran_on = devices, []  # type: ignore[var-annotated]

    def run(self, *args: Any, **options: Any) -> None:
        self.ran_on.append(self.devices[-1])


class Lying(torch.Tensor):
    """A tensor that says that it is on GPU 1."""

    def get_device(self) -> int:
        return 1


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("described", [False, True])
def test_a_launch_runs_on_the_device_of_its_tensors(
    current: int, described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one of its tensors in a descriptor or plain; and the device that was current is so again."""
    devices = [current]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        devices.append(index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    x = torch.empty(4).as_subclass(Lying)
    kernel = Counted(devices)
    argument = SimpleNamespace(base=x) if described else x
    TritonLaunch(kernel, (1, 1, 1), {"M": 3, "x": argument}, {}, {}, target=SM90).run()  # type: ignore[dict-item]
    assert kernel.ran_on == [1]
    assert devices == [current]
