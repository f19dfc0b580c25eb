"""An FP8 weight in 16 bits, for products of so many rows that PyTorch's own multiplies faster than Triton's kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.limits import TMA_ALIGNMENT
from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.kernel import Dispatch, Kernel, deferred, no_config
from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import WHOLE, Block, swap
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.targets import Target, hopper_fault

if TYPE_CHECKING:
    from fp8fn.ops.triton import dequantize as triton
else:
    triton = deferred("fp8fn.ops.triton.dequantize")

# Rows from which PyTorch's product was faster than Triton's kernel on an H200, and the same for rows of x that begin at
# multiples of 8 bytes, not of 16: Triton's kernel takes twice as long for these, PyTorch's the same time.
_LEAST_ROWS: Final = 512
_LEAST_ROWS_UNALIGNED: Final = 128
# Bytes that the weight may take in 16 bits while it is multiplied.
_MOST_BYTES: Final = 512 << 20
_BLOCKS: Final = ((128, 128), (1, 128), (1, WHOLE), (WHOLE, WHOLE))


@dataclass(frozen=True, eq=False, kw_only=True)
class Dequantization:
    """FP8 data with its scales, and `out`, contiguous, for their product."""

    q: Quantized
    out: Tensor
    target: Target

    @property
    def outputs(self) -> Outputs:
        return Outputs({"out": self.out}, 1)


def dequantized(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`data (M, N)` times its float32 scales, rounded once to `dtype`."""
    out: Tensor = DEQUANTIZE((data, scale), (block, dtype))[0]
    return out


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> Dequantization:
    (data, scale), (block, dtype) = tensors, values
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    return Dequantization(q=Quantized(data, scale, block), out=out, target=targets.target_of(data.device))


def _by_pytorch(given: Dequantization) -> tuple[Tensor]:
    return (given.out.copy_(reference.dequantize(*given.q)),)


def _accepts(given: Dequantization) -> str | None:
    if given.target.backend == "cpu":
        return "the data is on the CPU"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None if given.q.data.stride(-1) == 1 else "rows are not contiguous"


DEQUANTIZE: Final = Dispatch(
    op="dequantize",
    inputs=("data", "scale"),
    operands=_operands,
    kernels=(
        Kernel(
            "triton", _accepts, no_config, lambda given, _: (triton.plan_dequantize(given.q, given.out, given.target),)
        ),
    ),
    reference=_by_pytorch,
)


@dataclass(frozen=True, eq=False)
class DequantizedLaunch(Launch):
    """A product by PyTorch, of a weight that is first dequantized."""

    product: WeightProduct

    @property
    def name(self) -> str:
        return "torch.mm" if self.product.bias is None else "torch.addmm"

    def describe(self) -> str:
        """One line: function, the weight's block, target."""
        return f"{self.name}[{self.product.w.block}, dequantized] {self.target.name}{self._because()}"

    def run(self) -> None:
        """Writes `out` on the current stream of its device."""
        x, (w, scale, block), bias = self.product.x, self.product.w, self.product.bias
        _multiply(x, Quantized(w, scale, block), bias, self.product.out)

    def call(self) -> Callable[..., tuple[Tensor]]:
        """The launch on other tensors of the same kinds: `(x, w, w_scale)`, and `bias` if it has one."""
        block = self.product.w.block

        def call(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
            out = x.new_empty((*x.shape[:-1], w.shape[-1]))
            _multiply(x, Quantized(w, w_scale, block), bias, out)
            return (out,)

        return call


def _multiply(x: Tensor, w: Quantized, bias: Tensor | None, out: Tensor) -> None:
    """Fills `out`. Autocast would change the types of a product that makes its own result."""
    data, scale, block = w
    if _by_columns(data):
        weight = dequantized(data.mT, scale.mT, swap(block), x.dtype).mT
    else:
        weight = dequantized(data, scale, block, x.dtype)
    rows, result = x.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(rows, weight, out=result)
    else:
        torch.addmm(bias, rows, weight, out=result)


def _by_columns(w: Tensor) -> bool:
    """Whether the columns of `w (K, N)` are contiguous, as those of a layer's weight in its forward are."""
    return w.stride(0) == 1


def accepts(product: WeightProduct) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    x, (w, w_scale, block), bias = product.x, product.w, product.bias
    if (reason := hopper_fault(product.target)) is not None:
        return reason
    if find_spec("triton") is None:
        return "triton is not installed"
    if not x.dtype == product.out.dtype == torch.bfloat16:
        return (
            f"x has dtype {x.dtype} and out {product.out.dtype}, not both bfloat16, which has the range of the scales"
        )
    if w.ndim != 2 or 1 not in w.stride():
        return f"w has shape {tuple(w.shape)} and strides {w.stride()}, and is no matrix with a contiguous axis"
    if (swap(block) if _by_columns(w) else block) not in _BLOCKS or w_scale.dtype != torch.float32:
        return (
            f"scales of {w_scale.dtype} in blocks of {block} are not float32 ones that hold along its contiguous axis"
        )
    if bias is not None and (bias.ndim != 1 or bias.dtype != x.dtype):
        return f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}, and is no row of {x.dtype}"
    return None


def untuned(product: WeightProduct) -> str | None:
    """None where it was faster than Triton's kernel."""
    x, w = product.x, product.w.data
    rows = x.shape[:-1].numel()
    unaligned = x.stride(-1) == 1 and x.stride(-2) * x.element_size() % TMA_ALIGNMENT == 8
    if rows < (_LEAST_ROWS_UNALIGNED if unaligned else _LEAST_ROWS):
        return f"M={rows} rows do not pay for a weight that is written in 16 bits"
    if 2 * w.numel() > _MOST_BYTES:
        return f"the weight would take {2 * w.numel() >> 20} MB in 16 bits"
    return None


def plan(product: WeightProduct, _: None) -> tuple[DequantizedLaunch]:
    """The launch of a product that `accepts` accepts."""
    return (DequantizedLaunch(product, target=product.target),)
