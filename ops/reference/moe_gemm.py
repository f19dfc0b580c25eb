"""The definition of the products of routed tokens, in plain PyTorch: each expert's rows are one float32 product."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.operands import Quantized, Routing
from fp8fn.ops.reference.quantize import dequantize


def moe_gemm(
    a: Quantized, w: Quantized, routing: Routing, a_div: int, token_weights: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`out[id] = weight[id] * (a[id // a_div] @ w[expert])` of each id in a tile, `(R * a_div, N)`; zeros elsewhere."""
    rows, experts = a.data.shape[0] * a_div, w.data.shape[0]
    out = a.data.new_zeros((rows, w.data.shape[2]), dtype=torch.float32)
    tiles = routing.tiles
    if tiles > 0:
        place = torch.arange(tiles, device=out.device) * routing.block_m
        live = place < routing.num_tokens_post_padded
        ids = routing.sorted_token_ids.view(tiles, routing.block_m)
        activations = dequantize(*a)
        with torch.autocast(out.device.type, enabled=False):  # which would multiply in 16 bits
            for expert in range(experts):
                chosen = ids[live & (routing.expert_ids == expert)].flatten().long()
                chosen = chosen[(chosen >= 0) & (chosen < rows)]
                if chosen.numel():
                    weight = dequantize(w.data[expert], w.scale[expert], w.block)
                    product = activations[chosen // a_div] @ weight
                    out[chosen] = product if token_weights is None else product * token_weights[chosen, None]
    return out.to(out_dtype)
