"""`sort_tokens` and `moe_gemm`: a mixture of experts at decode time, in the layout of serving engines."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.ops import sort_tokens as sorting
from fp8fn.scaled_tensor import ScaledTensor


@checked(topk_ids=arguments.tensor, num_experts=arguments.count, block_m=arguments.count)
def sort_tokens(topk_ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the experts chosen for each token into the tiles of ids that `moe_gemm` takes.

    An id is `token * top_k + choice`. The number of tiles depends on shapes alone, nothing waits for the device, and
    the same choices give the same layout.

    Args:
        topk_ids: int32 or int64. A value outside `0 … num_experts - 1` (an expert of another process) is left out.
        num_experts: Number of experts `E`.
        block_m: Ids of a tile; a matrix instruction takes at least 16.

    Shape:
        `topk_ids (T, top_k)` → `(tiles * block_m)`, `(tiles)`, `(1)`, with `tiles = ⌊(T top_k + min(E, T top_k)
        (block_m - 1)) / block_m⌋`.

    Returns:
        `(sorted_token_ids, expert_ids, num_tokens_post_padded)`, int32: the ids by expert, ascending for each, with
        each expert's last tile and all tiles past the last expert's filled with `T * top_k`; the expert of each tile,
        -1 past the last; and `block_m` times the number of tiles in use.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, `num_experts` or `block_m` does not fit.

    Example:
        >>> ids, experts, padded = fp8fn.sort_tokens(torch.tensor([[0], [2], [0]]), num_experts=3, block_m=2)
        >>> ids.tolist(), experts.tolist(), padded.tolist()
        ([0, 2, 1, 3, 3, 3], [0, 2, -1], [4])
    """
    return sorting.sort_tokens(topk_ids, num_experts, block_m)


@checked(
    a=arguments.quantized,
    w=arguments.quantized,
    sorted_token_ids=arguments.tensor,
    expert_ids=arguments.tensor,
    num_tokens_post_padded=arguments.tensor,
    top_k=arguments.count,
    a_div=arguments.optional(arguments.count),
    token_weights=arguments.optional(arguments.tensor),
    out_dtype=arguments.out_dtype,
)
def moe_gemm(  # noqa: PLR0913  an op's signature
    a: ScaledTensor,
    w: ScaledTensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    top_k: int,
    a_div: int | None = None,
    token_weights: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies routed tokens by their experts' FP8 weights: `token_weights[id] * (a[id // a_div] @ w[expert of id])`.

    Float32 sums are rounded once. Nothing waits for the device. There is no derivative; `expert_mlp` has one.

    Args:
        a: `ScaledTensor` in blocks `(1, 32)` with e8m0 scales, or `(1, 128)`: a row for each token, or for each id.
        w: `ScaledTensor` in blocks `(32, 1)` with e8m0 scales, or `(128, 128)`.
        sorted_token_ids: int32, from `sort_tokens` or an engine's kernel. Ids are distinct; an id outside `0 … R *
            a_div - 1` is padding.
        expert_ids: int32, the expert of each tile of ids; a tile of an expert outside `0 … E - 1` is skipped.
        num_tokens_post_padded: int32; tiles from this id on are skipped.
        top_k: Experts of a token.
        a_div: Ids that share a row of `a`: `top_k`, the default, for an MLP's first product, 1 for its second.
        token_weights: float32, multiplies the sums of each id.
        out_dtype: bfloat16 by default, or float16, float32.

    Shape:
        `a (R, K)`, `w (E, K, N)`, `sorted_token_ids (tiles * block_m)`, `expert_ids (tiles)`, `token_weights (R *
        a_div)` → `(R * a_div, N)`.

    Returns:
        A row for each id, with zeros where no tile in use holds the id.

    Raises:
        TypeError: An operand or a dtype does not fit.
        ValueError: A shape, a block or a device does not fit.

    Example:
        >>> layout = fp8fn.sort_tokens(torch.tensor([[0, 1], [1, 2]]), num_experts=3, block_m=16)
        >>> a = fp8fn.quantize(torch.randn(2, 128), (1, 128))
        >>> w = fp8fn.quantize(torch.randn(3, 256, 128), (128, 128)).mT
        >>> fp8fn.moe_gemm(a, w, *layout, top_k=2).shape
        torch.Size([4, 256])
    """
    args = (a.data, a.scale, a.block, w.data, w.scale, w.block, sorted_token_ids, expert_ids, num_tokens_post_padded)
    a_div = top_k if a_div is None else a_div
    out: Tensor = torch.ops.fp8fn.moe_gemm(*args, top_k, a_div, token_weights, out_dtype)
    return out
