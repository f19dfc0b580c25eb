"""The launch of products of routed tokens with their experts in MX-FP8 on gfx950 (`mxfp8_moe.hip`)."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from fp8fn.ops.hip.build import HipKernel
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch, Wide
from fp8fn.ops.hip.mx_mm import THREADS, TYPES, check_span, grid, lines, stride
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.views import ceil_div

_MOST_TILES: Final = 4  # of 16 rows, a block


def plan_moe(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, sorted_token_ids: Tensor, expert_ids: Tensor,
    num_tokens_post_padded: Tensor, a_div: int, token_weights: Tensor | None, out: Tensor, target: Target,
    config: HipConfig,
) -> HipLaunch:  # fmt: skip
    """The launch that fills the rows of `out (R * a_div, N)` that the ids of `a (R, K)` name, by `w (E, K, N)`.

    K is a multiple of 32. `out` is contiguous, and so are the layout's tensors and `token_weights`; there is a tile and
    an expert at least.
    """
    ids, n = out.shape
    k, block_n = a.shape[1], config.block_n
    if block_n not in (8, 16) or k % 32 != 0:
        raise ValueError(f"mxfp8_moe: block_n={block_n} and K={k}; block_n must be 8 or 16, and K a multiple of 32")
    tiles = expert_ids.shape[0]
    block_m = sorted_token_ids.shape[0] // tiles
    tiles_m = min(ceil_div(block_m, 16), _MOST_TILES)
    left, right, right_scale = lines(a), lines(w.mT), w_scale.mT
    for name, operand, most in (
        ("a", left, left.shape[0]), ("a_scale", a_scale, left.shape[0]),
        ("w", right, block_n), ("w_scale", right_scale, block_n),
    ):  # fmt: skip
        check_span("mxfp8_moe", name, operand, most)
    macros = (
        ("BLOCK_N", block_n), ("TILES_M", tiles_m), ("WEIGHTED", int(token_weights is not None)),
        ("OUT", TYPES[out.dtype]),
    )  # fmt: skip
    places = tiles * ceil_div(block_m, 16 * tiles_m)
    return HipLaunch(
        kernel=HipKernel("mxfp8_moe.hip", "mxfp8_moe", str(target.arch), macros),
        grid=grid("mxfp8_moe", places * ceil_div(n, block_n)),
        threads=THREADS,
        args={
            "a": left, "a_scale": a_scale, "w": right, "w_scale": w_scale, "sorted_token_ids": sorted_token_ids,
            "expert_ids": expert_ids, "num_tokens_post_padded": num_tokens_post_padded,
            "token_weights": token_weights, "out": out,
            "ids": ids, "N": n, "K": k, "E": right.shape[0], "block_m": block_m, "a_div": a_div,
            "a_row": stride(left, 0), "as_row": stride(a_scale, 0), "as_block": stride(a_scale, 1),
            "w_column": stride(right, 1), "ws_column": stride(right_scale, 1), "ws_block": stride(right_scale, 2),
            "w_expert": Wide(stride(right, 0)), "ws_expert": Wide(stride(right_scale, 0)),
        },
        target=target,
        options={"TILES_M": tiles_m, "BLOCK_N": block_n},
    )  # fmt: skip
