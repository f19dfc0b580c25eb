"""The choice of each tuned op for a problem for which no table names a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fp8fn.ops import mm_a16w8
from fp8fn.ops.kernel import Kernel, choose
from fp8fn.ops.layout import empty_scale
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import WeightProduct
from fp8fn.ops.targets import native_e4m3
from fp8fn.ops.tuning.measured import candidate_name
from fp8fn.ops.tuning.weight import WeightProblem


def default_of(kernels: Sequence[Kernel], problem: Any) -> str:
    choice = choose(problem, kernels)
    return candidate_name(choice.name, choice.config)


def weight_default(problem: WeightProblem) -> str:
    """The default for operands that lie as kernels take them."""
    lead = (problem.batch,) if problem.batch > 1 else ()
    x, out = (
        torch.empty(*lead, problem.m, size, dtype=problem.x_dtype, device="meta") for size in (problem.k, problem.n)
    )
    w = torch.empty(*lead, problem.n, problem.k, dtype=native_e4m3(problem.target), device="meta").mT
    scaled = Quantized(w, empty_scale(w, problem.block, "fp32"), problem.block)
    target = replace(problem.target, multiprocessors=problem.cores)
    product = WeightProduct(x=x, w=scaled, out=out, target=target, constant=problem.constant)
    return default_of(mm_a16w8.KERNELS, product)
