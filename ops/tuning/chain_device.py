"""A GPU as the bench of an op's products: chains of them by several weights in a graph, each checked first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops import mm_a16w8, moe_gemm, mx_mm, quantize_grouped, reference, scaled_grouped_mm, scaled_mm
from fp8fn.ops.kernel import Dispatch
from fp8fn.ops.layout import swap
from fp8fn.ops.operands import Quantization, Quantized, RoutedProduct, Routing, ScaledProduct, WeightProduct
from fp8fn.ops.sort_tokens import sort_tokens
from fp8fn.ops.targets import Chip, Target, native_e4m3
from fp8fn.ops.tuning import mx
from fp8fn.ops.tuning.device import corner_error
from fp8fn.ops.tuning.grouped_mm_table import LAYOUTS, GroupsProblem
from fp8fn.ops.tuning.grouped_table import GroupedProblem
from fp8fn.ops.tuning.op_sweep import Named
from fp8fn.ops.tuning.sweep import Call, Clock
from fp8fn.ops.tuning.tile_space import TileProblem
from fp8fn.ops.tuning.weight import WeightProblem

_MOST_COPIES: Final = 64
_WEIGHT_BYTES: Final = 160 << 20  # all copies together, more than the L2
_TOLERANCE: Final = 1e-2  # bfloat16 rounds to 2e-3
_LOG: Final = logging.getLogger("fp8fn")


class Check(NamedTuple):
    """The check of a product's outputs: `clear` them, launch, then ask for the relative `error`."""

    clear: Callable[[], Any]
    error: Callable[[], float]


def by_reference(op: Dispatch, product: Any) -> Check:
    """Against the whole reference."""
    (expected,) = op.reference(product)
    norm = expected.double().norm()
    # Rows of no id stay zero.
    return Check(product.out.zero_, lambda: float((product.out.double() - expected.double()).norm() / norm))


def by_corners(op: Dispatch, product: ScaledProduct) -> Check:
    """At the corners alone: a large product would be multiplied for longer than it is timed."""
    return Check(lambda: product.out.fill_(torch.nan), lambda: corner_error(product))


def by_bytes(op: Dispatch, quantized: Quantization) -> Check:
    """Byte for byte: the error is 0 or infinite."""
    outs = [x for out in quantized.outs for x in (out.data, out.scale)]
    expected = op.reference(quantized)

    def same(x: Tensor, y: Tensor) -> bool:
        return torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.itemsize == 1 else torch.equal(x, y)

    def error() -> float:
        return 0.0 if all(map(same, outs, expected)) else torch.inf

    return Check(lambda: [x.zero_() for x in outs], error)


@dataclass(frozen=True)
class ChainBench:
    """`OpBench` of one CUDA device; `make` is the product of a problem, with a weight of its own at each call.

    If `chained`, a call multiplies by several weights in turn, so that none is in the L2; else the clock flushes it.
    """

    device: torch.device
    target: Target
    chip: Chip
    clock: Clock
    op: Dispatch
    make: Callable[[Any, torch.device, Target], Any]
    check: Callable[[Dispatch, Any], Check] = by_reference
    chained: bool = True

    def calls(self, problem: Any, candidates: Mapping[str, Named]) -> tuple[dict[str, Call], int]:
        """As `OpBench.calls`; what fails or is wrong is left out, with a warning."""
        torch.manual_seed(0)
        first = self.make(problem, self.device, self.target)
        products = [first, *(self.make(problem, self.device, self.target) for _ in range(self._copies(first) - 1))]
        check = self.check(self.op, products[-1])
        found: dict[str, Call] = {}
        for name, (kernel, config) in candidates.items():
            try:
                found[name] = self._chain(products, kernel, config, check)
            except Exception as error:
                _LOG.warning("tune: %s by %s is left out: %s: %s", problem, name, type(error).__name__, error)
        return found, len(products)

    def _copies(self, product: Any) -> int:
        if not self.chained:
            return 1
        w = product.b if isinstance(product, ScaledProduct) else product.w
        return max(2, min(_MOST_COPIES, -(-_WEIGHT_BYTES // w.data.numel())))

    def _chain(self, products: Sequence[Any], name: str, config: Any, check: Check) -> Call:
        """The products one after another as a graph, whose last result is right."""
        kernel = next(kernel for kernel in self.op.kernels if kernel.name == name)
        if (reason := kernel.accepts(self.op.problem(products[0]))) is not None:
            raise ValueError(reason)
        launches = [launch for product in products for launch in kernel.plan(product, config)]
        check.clear()
        for launch in launches:
            launch.run()
        torch.cuda.synchronize(self.device)
        error = check.error()
        if not error <= _TOLERANCE:
            raise RuntimeError(f"its result is off by {error:.1e}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch.run()

        def call(_keeps_tensors: Sequence[Any] = launches) -> None:
            graph.replay()

        return call


def _scaled_product(problem: TileProblem, device: torch.device, target: Target) -> ScaledProduct:
    """Bytes of quantized normal numbers and scales about 0.01."""
    product = problem.product(device)
    for operand in (product.a, product.b):
        most = torch.finfo(operand.data.dtype).max
        rows = operand.data if operand.data.stride(-1) == 1 else operand.data.mT
        for row in rows.view(-1, *rows.shape[-2:]):  # a matrix at a time: four bytes an element
            row.copy_((torch.randn(row.shape, device=device) * (most / 3)).clamp_(-most, most))
        operand.scale.uniform_(0.005, 0.015)
    return product


def _grouped_tokens(problem: GroupedProblem, device: torch.device, target: Target) -> Quantization:
    """Normal numbers in groups of equal sizes."""
    quantized = problem.quantization(device)
    quantized.x.normal_()
    assert quantized.offsets is not None
    quantized.offsets.copy_(_even_ends(problem.m, problem.groups, device))
    return quantized


def _even_ends(tokens: int, groups: int, device: torch.device) -> Tensor:
    return (torch.arange(1, groups + 1, device=device, dtype=torch.int64) * tokens // groups).to(torch.int32)


def _product_of_groups(problem: GroupsProblem, device: torch.device, target: Target) -> ScaledProduct:
    """Normal numbers in groups of equal sizes."""
    (of_rows, a_block, b_block, _), dtype = LAYOUTS[problem.layout], native_e4m3(target)
    product = problem.product(device)
    offsets = _even_ends(problem.m if of_rows else problem.k, problem.groups, device)
    product.group_ends.copy_(offsets)
    if of_rows:
        parts = [reference.quantize(torch.randn(problem.m, problem.k, device=device), a_block, dtype, "fp32")]
        b = torch.randn(problem.groups, problem.n, problem.k, device=device).mT
        parts.append(reference.quantize(b, b_block, dtype, "fp32"))
    else:
        a, b = (torch.randn(problem.k, columns, device=device) for columns in (problem.m, problem.n))
        data, scale = reference.quantize_grouped(a, offsets, swap(a_block), dtype, "fp32")
        parts = [(data.mT, scale.mT), reference.quantize_grouped(b, offsets, b_block, dtype, "fp32")]
    for operand, (data, scale) in zip((product.a, product.b), parts, strict=True):
        operand.data.copy_(data)
        operand.scale.copy_(scale)
    return product


def _weight_product(problem: WeightProblem, device: torch.device, target: Target) -> WeightProduct:
    lead = (problem.batch,) if problem.batch > 1 else ()
    x = torch.randn(*lead, problem.m, problem.k, device=device).to(problem.x_dtype)
    w = torch.randn(*lead, problem.k, problem.n, device=device)
    data, scale = reference.quantize(w, problem.block, native_e4m3(target), "fp32")
    out = torch.empty(*lead, problem.m, problem.n, dtype=problem.x_dtype, device=device)
    operand = Quantized(_in_lines(data), scale, problem.block)
    return WeightProduct(x=x, w=operand, out=out, target=target, constant=problem.constant)


def _mx_product(problem: mx.Problem, device: torch.device, target: Target) -> ScaledProduct:
    a = _mx(torch.randn(problem.m, problem.k, device=device), target)
    b = _mx(torch.randn(problem.n, problem.k, device=device), target).mT
    out = torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device=device)
    return ScaledProduct(a=a, b=b, out=out, target=target, constant=problem.constant)


def _routed_product(problem: mx.MoeProblem, device: torch.device, target: Target) -> RoutedProduct:
    """A bench of tokens that choose among the experts at random, with as many ids as the problem has."""
    a = _mx(torch.randn(problem.ids, problem.k, device=device), target)
    w = _mx(torch.randn(problem.experts, problem.n, problem.k, device=device), target).mT
    chosen = torch.randint(0, problem.experts, (problem.ids, 1), device=device)
    out = torch.empty(problem.ids, problem.n, dtype=torch.bfloat16, device=device)
    routing = Routing(*sort_tokens(chosen, problem.experts, problem.block_m))
    return RoutedProduct(a=a, w=w, routing=routing, a_div=1, out=out, target=target)


def _mx(x: Tensor, target: Target) -> Quantized:
    """In blocks of 32 along the last axis, and in the target's own e4m3."""
    return Quantized(*reference.quantize(x, (1, 32), native_e4m3(target), "e8m0"), (1, 32))


def _in_lines(data: Tensor) -> Tensor:
    """With columns that are lines in memory."""
    return data.view(torch.uint8).mT.contiguous().mT.view(data.dtype)


scaled_bench: Final = partial(ChainBench, op=scaled_mm.SCALED_MM, make=_scaled_product, check=by_corners, chained=False)
grouped_bench: Final = partial(
    ChainBench, op=quantize_grouped.QUANTIZE_GROUPED, make=_grouped_tokens, check=by_bytes, chained=False
)
groups_bench: Final = partial(
    ChainBench, op=scaled_grouped_mm.SCALED_GROUPED_MM, make=_product_of_groups, chained=False
)
weight_bench: Final = partial(ChainBench, op=mm_a16w8.MM_A16W8, make=_weight_product)
mx_bench: Final = partial(ChainBench, op=mx_mm.MX_MM, make=_mx_product)
moe_bench: Final = partial(ChainBench, op=moe_gemm.MOE_GEMM, make=_routed_product)
