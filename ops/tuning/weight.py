"""Products of rows by an FP8 weight as the configurations of their kernels see them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from fp8fn.ops.cuda.operands import is_k_contiguous
from fp8fn.ops.layout import Block, empty_scale
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.targets import SM90, Target, native_e4m3


class WeightProblem(NamedTuple):
    """`out (batch, m, n) = x (batch, m, k) @ w (batch, k, n)` on `cores` multiprocessors.

    A scale holds for `block` of w. `k_lines`: the columns of w are lines in memory. `constant`: as of `fp8fn.gemm`.
    `target`: whose kernels a sweep times.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    block: Block = (128, 128)
    x_dtype: torch.dtype = torch.bfloat16
    k_lines: bool = True
    constant: bool = False
    cores: int = 132
    target: Target = SM90

    def product(self) -> WeightProduct:
        """Operands on `meta` that lie as kernels take them."""
        lead = (self.batch,) if self.batch > 1 else ()
        w = torch.empty(*lead, self.n, self.k, dtype=native_e4m3(self.target), device="meta").mT
        return WeightProduct(
            x=torch.empty(*lead, self.m, self.k, dtype=self.x_dtype, device="meta"),
            w=Quantized(w, empty_scale(w, self.block, "fp32"), self.block),
            out=torch.empty(*lead, self.m, self.n, dtype=self.x_dtype, device="meta"),
            target=replace(self.target, multiprocessors=self.cores),
            constant=self.constant,
        )


def weight_problem(product: WeightProduct) -> WeightProblem:
    """The problem of a product; a batch of `x` whose rows follow one another, by one weight, is one matrix."""
    product = product.as_matrix()
    return WeightProblem(
        m=product.m, n=product.n, k=product.k, batch=product.batch, block=product.w.block, x_dtype=product.x.dtype,
        k_lines=is_k_contiguous(product.w.data), constant=product.constant, cores=product.target.cores,
    )  # fmt: skip
