"""libcuda without a GPU, and unwritten operands of products that it launches."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.quantize.rms_norm import plan_row_rstd
from fp8fn.ops.cuda.runtime import driver
from fp8fn.ops.cuda.runtime.call_cache import Call, call_of
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operands import RMS_NORM, Quantized, ScaledProduct
from fp8fn.ops.targets import SM90
from support.quantizers import quantization

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

FORWARD: tuple[Block, Block] = ((1, 128), (128, 128))

WGRAD: tuple[Block, Block] = ((1, 128), (128, 1))


@dataclass
class Launched:
    """The arguments of one cuLaunchKernel."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    parameters: list[int]
    """The address of each parameter."""
    words: list[int]
    """The first 8 bytes of each: of a descriptor, the address that it was given."""


@dataclass
class StubDriver:
    """libcuda without a GPU: a descriptor's first 8 bytes are its address. `fail`: calls and their status."""

    fail: dict[str, int] = field(default_factory=dict)
    encoded: list[dict[str, Any]] = field(default_factory=list)
    replaced: list[tuple[int, int]] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    attributes: list[tuple[int, int]] = field(default_factory=list)
    pause: float | None = None

    def _enter(self, name: str) -> int:
        self.calls.append(name)
        if self.pause is not None:
            time.sleep(self.pause)
        return self.fail.get(name, 0)

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"a reason"
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 7000 + device
        return self._enter("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.fail.pop("cuLaunchKernel", None) if self.fail.get("cuLaunchKernel") == driver.INVALID_CONTEXT else None
        return self._enter("cuCtxSetCurrent")

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value = 2 - mode._obj.value
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        module._obj.value = 1000
        return self._enter("cuModuleLoadData")

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 2000 + len(self.calls)
        return self._enter("cuModuleGetFunction")

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return self._enter("cuFuncSetAttribute")

    def cuTensorMapEncodeTiled(
        self, into: Any, type_: int, rank: int, address: Any, shape: Any, strides: Any, box: Any, steps: Any, *rest: int
    ) -> int:
        ctypes.c_uint64.from_address(into.value).value = address.value or 0
        self.encoded.append(
            {
                "into": into.value, "type": type_, "rank": rank, "address": address.value or 0, "shape": list(shape),
                "strides": list(strides)[: rank - 1], "box": list(box), "steps": list(steps), "rest": rest,
            }
        )  # fmt: skip
        return self._enter("cuTensorMapEncodeTiled")

    def cuTensorMapReplaceAddress(self, map_: Any, address: Any) -> int:
        if status := self._enter("cuTensorMapReplaceAddress"):
            return status
        self.replaced.append((map_.value, address.value))
        ctypes.c_uint64.from_address(map_.value).value = address.value
        return 0

    def cuLaunchKernel(self, function: Any, *args: Any) -> int:
        *shape, shared, stream, parameters, extra = args
        assert extra is None
        if status := self._enter("cuLaunchKernel"):
            return status
        addresses = [address or 0 for address in parameters]
        words = [ctypes.c_uint64.from_address(address).value for address in addresses]
        self.launched.append(
            Launched(function.value, tuple(shape[:3]), tuple(shape[3:]), shared, stream.value or 0, addresses, words)
        )
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        launch = config._obj
        assert (launch.count, launch.attributes[0].id, launch.attributes[0].value) == (1, 6, 1)
        stream = ctypes.c_void_p(launch.stream)
        return self.cuLaunchKernel(function, *launch.grid, *launch.block, launch.shared, stream, parameters, extra)


class Operands:
    """Unwritten operands of a product on the CPU."""

    def __init__(
        self, shape: tuple[int, int, int] = (270, 136, 300), blocks: tuple[Block, Block] = WGRAD, *,
        bias: torch.dtype | None = None, batch: int | None = None, out: torch.dtype = BF16,
    ) -> None:  # fmt: skip
        m, n, k = shape
        lead = () if batch is None else (batch,)
        self.blocks, of_a, of_b = blocks, torch.empty(*lead, m, k), torch.empty(*lead, k, n)
        self.a, self.b = empty_data(of_a, blocks[0], E4M3, False), empty_data(of_b, blocks[1], E4M3, True)
        self.a_scale = empty_scale(of_a, blocks[0], "fp32", False)
        self.b_scale = empty_scale(of_b, blocks[1], "fp32", True)
        self.bias = None if bias is None else torch.empty(n, dtype=bias)
        self.out = torch.empty(*lead, m, n, dtype=out)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.a, self.a_scale, self.b, self.b_scale, self.bias

    def plan(self, config: ScaledMmConfig | None = None) -> CudaLaunch:
        return cuda.plan(self.product, config or ScaledMmConfig())[0]

    @property
    def product(self) -> ScaledProduct:
        a, b = Quantized(self.a, self.a_scale, self.blocks[0]), Quantized(self.b, self.b_scale, self.blocks[1])
        return ScaledProduct(a=a, b=b, bias=self.bias, out=self.out, target=SM90)

    def call(self, plan: CudaLaunch) -> Call:
        return call_of([plan], ("a", "a_scale", "b", "b_scale", "bias"), self.product.outputs)


def int32s(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


# The kernel of a small launch.
_X = quantization(torch.empty(4, 64, dtype=BF16, device="meta"), (1, 128), source=RMS_NORM, eps=1e-6)
ROWS = plan_row_rstd(_X, torch.empty(4, device="meta")).kernel
