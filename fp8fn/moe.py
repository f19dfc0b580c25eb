"""`sort_tokens` and `moe_gemm`: a mixture of experts at decode time, in the layout of the serving engines."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.ops import sort_tokens as sorting
from fp8fn.scaled_tensor import ScaledTensor


@checked(topk_ids=arguments.tensor, num_experts=arguments.count, block_m=arguments.count)
def sort_tokens(topk_ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """The experts chosen for each token, `topk_ids (T, top_k)`, as the tiles of ids that `moe_gemm` takes.

    Args:
        topk_ids: int32 or int64. What is none of `0 … num_experts - 1` (an expert of another process) is left out.
        num_experts: `E`.
        block_m: ids of a tile; 16 is the least that a matrix instruction takes at once.

    Returns `(sorted_token_ids, expert_ids, num_tokens_post_padded)`, int32:

    - `sorted_token_ids (tiles * block_m,)`: ids `token * top_k + choice` by expert, ascending for each; an expert's
      last tile is filled with `T * top_k`, and so are all tiles past the last expert's;
    - `expert_ids (tiles,)`: the expert of each tile, -1 past the last;
    - `num_tokens_post_padded (1,)`: `block_m` times the number of tiles in use.

    `tiles = ⌊(T top_k + min(E, T top_k) (block_m - 1)) / block_m⌋`, the most there can be, depends on shapes alone: no
    part of it waits for the device, and the same choices give the same layout.

    Raises `TypeError` for a dtype, `ValueError` for a shape, `num_experts` or `block_m` that do not fit.
    """
    return sorting.sort_tokens(topk_ids, num_experts, block_m)


@checked(
    a=arguments.quantized,
    w=arguments.quantized,
    sorted_token_ids=arguments.tensor,
    expert_ids=arguments.tensor,
    num_tokens_post_padded=arguments.tensor,
    top_k=arguments.count,
    a_div=arguments.optional_count,
    token_weights=arguments.optional_tensor,
    out_dtype=arguments.out_dtype,
)
def moe_gemm(
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
    """`out[id] = token_weights[id] * (a[id // a_div] @ w[expert of id])`, summed in float32 and rounded once.

    Args:
        a: `(R, K)` in blocks `(1, 32)` with e8m0 scales, or `(1, 128)`: a row for each token, or for each id.
        w: `(E, K, N)` in blocks `(32, 1)` with e8m0 scales, or `(128, 128)`; `fp8fn.quantize(weight, (1, 32), ...).mT`
            of a weight `(E, N, K)` is read best.
        sorted_token_ids: int32, its length `block_m` times that of `expert_ids`; of `sort_tokens`, or of an engine's
            own kernel. Ids are distinct; one that is negative, or not below `R * a_div`, is padding.
        expert_ids: int32, the expert of each `block_m` ids; a tile of an expert that is none of `0 … E - 1` is skipped.
        num_tokens_post_padded: int32 `(1,)`; tiles from there on are skipped.
        top_k: experts of a token.
        a_div: ids that share a row of `a`: `top_k`, the default, where it has a row for each token (an MLP's first
            product), 1 where it has one for each id (its second).
        token_weights: float32 `(R * a_div,)`, multiplies the float32 sums.
        out_dtype: bfloat16 by default, or float16, float32.

    Returns `(R * a_div, N)`: row `id` is the product of that id, and zeros where no tile that counts holds it. Nothing
    waits for the device. Has no derivative: `grouped_gemm` and `expert_mlp` of tensors have one.

    Raises `ValueError` or `TypeError` for shapes, blocks, dtypes or devices that do not fit.
    """
    args = (a.data, a.scale, a.block, w.data, w.scale, w.block, sorted_token_ids, expert_ids, num_tokens_post_padded)
    a_div = top_k if a_div is None else a_div
    return torch.ops.fp8fn.moe_gemm(*args, top_k, a_div, token_weights, out_dtype)  # type: ignore[no-any-return]
