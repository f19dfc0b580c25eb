"""A GPU as the bench of `mm_a16w8`: chains of products by several weights in a CUDA graph, each checked first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops import mm_a16w8, reference
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import WeightProduct
from fp8fn.ops.targets import Chip, Target
from fp8fn.ops.tuning.op_sweep import Named
from fp8fn.ops.tuning.sweep import Call, Clock
from fp8fn.ops.tuning.weight import WeightProblem

_MOST_COPIES: Final = 64
_WEIGHT_BYTES: Final = 160 << 20  # of all copies: more than the L2
_TOLERANCE: Final = 1e-2  # bfloat16 rounds to 2e-3
_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class WeightBench:
    """`OpBench` of one CUDA device."""

    device: torch.device
    target: Target
    chip: Chip
    clock: Clock

    def calls(self, problem: WeightProblem, candidates: Mapping[str, Named]) -> tuple[dict[str, Call], int]:
        """As `OpBench.calls`; what fails or is wrong is left out, with a warning."""
        products = self._products(problem)
        expected = _expected(products[-1])
        found: dict[str, Call] = {}
        for name, (kernel, config) in candidates.items():
            try:
                found[name] = _chain(products, kernel, config, expected)
            except Exception as error:
                _LOG.warning("tune: %s by %s is left out: %s: %s", problem, name, type(error).__name__, error)
        return found, len(products)

    def _products(self, problem: WeightProblem) -> list[WeightProduct]:
        lead = (problem.batch,) if problem.batch > 1 else ()
        size = problem.batch * problem.n * problem.k
        copies = max(2, min(_MOST_COPIES, -(-_WEIGHT_BYTES // size)))
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*lead, *shape, device=self.device, generator=generator)

        x, products = normal(problem.m, problem.k).to(problem.x_dtype), []
        for _ in range(copies):
            data, scale = torch.ops.fp8fn.quantize(normal(problem.k, problem.n), problem.block)
            data = data.view(torch.uint8).mT.contiguous().mT.view(data.dtype)
            out = torch.empty(*lead, problem.m, problem.n, dtype=problem.x_dtype, device=self.device)
            w = Quantized(data, scale, problem.block)
            products.append(WeightProduct(x=x, w=w, out=out, target=self.target, constant=problem.constant))
        return products


def _chain(products: list[WeightProduct], name: str, config: Any, expected: Tensor) -> Call:
    """The products one after another as a graph, whose last result is right."""
    kernel = next(kernel for kernel in mm_a16w8.KERNELS if kernel.name == name)
    if (reason := kernel.accepts(products[0])) is not None:
        raise ValueError(reason)
    launches = [launch for product in products for launch in kernel.plan(product, config)]
    last = products[-1].out.fill_(torch.nan)
    for launch in launches:
        launch.run()
    torch.cuda.synchronize(last.device)
    error = float((last.double() - expected).norm() / expected.norm())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"its result is off by {error:.1e}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.run()

    def call(_keeps_tensors: list[WeightProduct] = products) -> None:
        graph.replay()

    return call


def _expected(product: WeightProduct) -> Tensor:
    """In float64."""
    return product.x.double() @ reference.dequantize(*product.w).double()
