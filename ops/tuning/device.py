"""A GPU as the bench of a sweep: operands with the bytes of quantized normal numbers, and checked calls on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.scaled_mm import BK, ScaledMmConfig
from fp8fn.ops.cuda.runtime.call_cache import start
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, pointers
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import Chip, Target
from fp8fn.ops.tuning.model import config_name
from fp8fn.ops.tuning.problem import Problem, empty_product
from fp8fn.ops.tuning.sweep import Call, Clock
from fp8fn.ops.tuning.table import PEER

# A matrix repeats so many normal values. Power, so speed, depends on the bytes: uniform ones would flip more bits.
_SAMPLE: Final = 2**24
_AMAX_OF_NORMAL: Final = 2.7  # the mean of the amax of 128 numbers
_TOLERANCE: Final = 1e-2  # bfloat16 rounds to 2e-3
_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class DeviceBench:
    """`Bench` of one CUDA device."""

    device: torch.device
    target: Target
    chip: Chip
    clock: Clock
    _samples: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)

    def calls(self, problem: Problem, configs: Sequence[ScaledMmConfig]) -> dict[str, Call]:
        """As `Bench.calls`; what fails or is wrong at the corners of the output is left out, with a warning."""
        product = self.filled(problem)
        found: dict[str, Call] = {}
        for config in configs:
            self._try(problem, config_name(config), partial(_started, product, config), product, found)
        if cublaslt.accepts(product) is None:
            self._try(problem, PEER, lambda: cublaslt.plan(product)[0].run, product, found)
        return found

    def _try(self, problem: Problem, name: str, make: Call, product: ScaledProduct, found: dict[str, Call]) -> None:
        try:
            call: Call = make()
            product.out.fill_(torch.nan)
            call()
            error = corner_error(product)
            if not error <= _TOLERANCE:
                raise RuntimeError(f"its result is off by {error:.1e}")
            found[name] = call
        except Exception as error:
            _LOG.warning("tune: %s by %s is left out: %s: %s", problem, name, type(error).__name__, error)

    def filled(self, problem: Problem) -> ScaledProduct:
        """Operands on the device, with data as of quantized normal numbers and scales about 0.01."""
        product = empty_product(problem, self.device, self.target)
        for seed, operand in enumerate((product.a, product.b)):
            _repeat(self._sample(operand.data.dtype, seed), operand.data)
            operand.scale.uniform_(0.005, 0.015)
        return product

    def _sample(self, dtype: torch.dtype, seed: int) -> Tensor:
        """Bytes of quantized normal numbers."""
        if (dtype, seed) not in self._samples:
            generator = torch.Generator(self.device).manual_seed(seed)
            most = torch.finfo(dtype).max
            normal = torch.randn(_SAMPLE, device=self.device, generator=generator) * (most / _AMAX_OF_NORMAL)
            self._samples[dtype, seed] = normal.clamp_(-most, most).to(dtype).view(torch.uint8)
        return self._samples[dtype, seed]


def _started(product: ScaledProduct, config: ScaledMmConfig) -> Call:
    """The product's launch as a call with nothing left to prepare."""
    (launch,) = cuda.plan(product, config)
    prepared, addresses = launch.prepare(), pointers(launch.args)

    def call(_keeps_tensors: CudaLaunch = launch) -> None:
        start(prepared, addresses)

    return call


def _repeat(sample: Tensor, data: Tensor) -> None:
    """Fills the whole memory of `data`, padding included."""
    flat = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())
    whole = flat.numel() // sample.numel() * sample.numel()
    flat[:whole].view(-1, sample.numel()).copy_(sample.expand(whole // sample.numel(), -1))
    flat[whole:].copy_(sample[: flat.numel() - whole])


def corner_error(product: ScaledProduct) -> float:
    """The relative error of the corners of `out (M, N)` against float64; NaN where one was not written."""
    tensors = (product.a.data, product.a.scale, product.b.data, product.b.scale, product.out)
    a, a_scale, b, b_scale, out = (x[0] if x.dim() == 3 else x for x in tensors)
    left = _dequantized(a, a_scale, _ends(a.shape[0], 8).to(a.device))
    right = _dequantized(b.mT, b_scale.mT, _ends(b.shape[1], 32).to(b.device))
    expected = left @ right.mT
    found = out[_ends(out.shape[0], 8).to(out.device)][:, _ends(out.shape[1], 32).to(out.device)].double()
    return float((found - expected).norm() / expected.norm())


def _ends(size: int, count: int) -> Tensor:
    """The first and the last `count` places of an axis, each once."""
    return torch.tensor(sorted({*range(min(count, size)), *range(max(size - count, 0), size)}))


def _dequantized(lines: Tensor, scales: Tensor, chosen: Tensor) -> Tensor:
    """Chosen lines of `(L, K)`, whose scales are `(L or L / 128 or 1, K / 128 or 1)`, in float64."""
    along = 1 if scales.shape[0] == lines.shape[0] else BK if scales.shape[0] > 1 else lines.shape[0]
    scale = scales[chosen // along].double()
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BK, 1)[:, : lines.shape[1]]
    return lines.view(torch.uint8)[chosen].view(lines.dtype).double() * scale
