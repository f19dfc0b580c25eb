"""cuBLASLt through PyTorch as a launch, for products where a table says that it is faster than this library's kernels.

Scales by tensor or by row go through `torch._scaled_mm`, with fast accumulation where a product allows it, those of
blocks through `torch._scaled_mm_v2`, the op below `torch.nn.functional.scaled_mm`, which alone writes to an output that
is there. What each asks for is in PyTorch's `ScaledBlas.cpp`, restated in `accepts`. PyTorch's builds for a CUDA before
12.9 raise an error for scales of blocks, and multiply scales by row with CUTLASS, which was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm.scaled_mm import BK, scale_kind
from fp8fn.ops.launch import Launch
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import hopper_fault

RECIPES: Final = {
    ("WHOLE", "WHOLE"): "tensorwise",
    ("LINE", "LINE"): "rowwise",
    ("VECTOR", "BLOCK"): "1x128·128x128",
    ("VECTOR", "VECTOR"): "1x128·128x1",
}
# The CUDA from which on cuBLASLt takes other scales than one of a tensor.
_CUDA_OF_SCALES: Final = (12, 9)
# torch.nn.functional.ScalingType.BlockWise1x128 and .BlockWise128x128.
_ROW_BLOCKS: Final = 4
_SQUARE_BLOCKS: Final = 5


_allowed = True


@contextmanager
def left_out() -> Iterator[None]:
    """No product planned inside goes to PyTorch: a benchmark of this library's kernels measures those."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def allowed() -> bool:
    return _allowed


@dataclass(frozen=True, eq=False)
class LibraryLaunch(Launch):
    """A product by PyTorch's own kernel, decided but not performed; `recipe` is one of `RECIPES`."""

    recipe: str
    product: ScaledProduct

    @property
    def name(self) -> str:
        return "torch._scaled_mm" if self.recipe in ("tensorwise", "rowwise") else "torch._scaled_mm_v2"

    def describe(self) -> str:
        """One line: function, recipe, target."""
        fast = ", fast accumulation" if self.product.fast else ""
        return f"{self.name}[{self.recipe}{fast}] {self.target.name}{self._because()}"

    def run(self) -> None:
        """Writes `out` on the current stream of its device."""
        (a, a_scale, _), (b, b_scale, _), out = self.product.a, self.product.b, self.product.out
        name, given = arguments(self.recipe, a, a_scale, b, b_scale, self.product.bias, out.dtype)
        if self.product.fast:
            given = (*given[:-1], True)
        getattr(torch, name)(*given, out=out)

    def call(self) -> Callable[..., tuple[Tensor]]:
        """The launch on other tensors of the same kinds: `(a, a_scale, b, b_scale)`, and `bias` if it has one."""
        recipe, dtype, fast = self.recipe, self.product.out.dtype, self.product.fast

        def call(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
            name, given = arguments(recipe, a, a_scale, b, b_scale, bias, dtype)
            return (getattr(torch, name)(*(*given[:-1], True) if fast else given),)

        return call


def accepts(product: ScaledProduct) -> str | None:
    """None where `plan` takes these operands, which `cuda.scaled_mm.accepts`, else the reason why not."""
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, target = product.bias, product.target
    recipe = RECIPES.get((scale_kind(*a_block), scale_kind(b_block[1], b_block[0])))
    if hopper_fault(target) or recipe is None:
        return f"blocks {a_block} and {b_block} on {target.name} are no recipe of cuBLASLt's"
    if (reason := _build_fault(recipe)) is not None:
        return reason
    if a.dim() != 2 or b.dim() != 2:
        return f"a has {a.dim()} dimensions and b {b.dim()}, not 2"
    if a.stride(1) != 1 or b.stride(0) != 1:
        return f"a has strides {a.stride()} and b {b.stride()}, K is not contiguous in both"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "both operands are e5m2"
    (m, k), n = a.shape, b.shape[1]
    if k % 16 or n % 16:
        return f"K is {k} and N {n}, not both multiples of 16"
    if not out.is_contiguous() or out.dtype not in (torch.bfloat16, torch.float16):
        return f"out is {out.dtype} with strides {out.stride()}, not 16 bits wide and row-major"
    if recipe != "tensorwise" and (out.dtype != torch.bfloat16 or bias is not None):
        return f"{recipe} is for bfloat16 without a bias"
    if bias is not None and bias.dtype != out.dtype:
        return f"bias is {bias.dtype} and out {out.dtype}"
    return _scale_fault(recipe, m, n, k, a_scale, b_scale)


def _build_fault(recipe: str) -> str | None:
    """Why this build of PyTorch has no such product of cuBLASLt's, or None; a build for CPUs plans for another one."""
    cuda = torch.version.cuda
    if recipe == "tensorwise" or cuda is None or tuple(map(int, cuda.split(".")[:2])) >= _CUDA_OF_SCALES:
        return None
    needed = ".".join(map(str, _CUDA_OF_SCALES))
    return f"PyTorch is built for CUDA {cuda}, and cuBLASLt has the scales of {recipe} from CUDA {needed} on"


def _scale_fault(recipe: str, m: int, n: int, k: int, a_scale: Tensor, b_scale: Tensor) -> str | None:
    """Why scales of blocks do not lie as cuBLASLt reads them, without the padding that TMA asks for."""
    if recipe in ("tensorwise", "rowwise"):
        return None
    if a_scale.stride() != (1, m):
        return f"a_scale has strides {a_scale.stride()}, not (1, {m})"
    if recipe == "1x128·128x1":
        return None if b_scale.stride() == (n, 1) else f"b_scale has strides {b_scale.stride()}, not ({n}, 1)"
    blocks = -(-k // BK)
    if blocks % 4 or b_scale.stride() != (1, blocks):
        return f"b_scale has strides {b_scale.stride()}, not (1, {blocks}) with a multiple of 4"
    return None


def recipe_of(product: ScaledProduct) -> str:
    """The recipe of operands that cuBLASLt multiplies; see `accepts`."""
    a_block, b_block = product.a.block, product.b.block
    return RECIPES[scale_kind(*a_block), scale_kind(b_block[1], b_block[0])]


def plan(product: ScaledProduct) -> tuple[LibraryLaunch]:
    """The launch of `out (M, N) = a (M, K) @ b (K, N) + bias (N)`; see `accepts`."""
    return (LibraryLaunch(recipe_of(product), product, target=product.target),)


def arguments(
    recipe: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[str, tuple[Any, ...]]:
    """PyTorch's op, by its name in `torch` and in ATen, and its arguments: views of those here, and constants."""
    if recipe in ("tensorwise", "rowwise"):
        if recipe == "tensorwise":
            a_scale, b_scale = a_scale.reshape(()), b_scale.reshape(())
        else:
            a_scale, b_scale = a_scale.flatten()[:, None], b_scale.flatten()[None]
        return "_scaled_mm", (a, b, a_scale, b_scale, bias, None, dtype, False)
    kind = _SQUARE_BLOCKS if recipe == "1x128·128x128" else _ROW_BLOCKS
    b_scale = b_scale if kind == _SQUARE_BLOCKS else b_scale.mT  # each `(N, K / 128)` is asked for as such
    return "_scaled_mm_v2", (a, b, [a_scale], [_ROW_BLOCKS], [], [b_scale], [kind], [], bias, dtype, (), False)
