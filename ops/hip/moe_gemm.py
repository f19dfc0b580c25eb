"""The launch of products of routed tokens with their experts in MX-FP8 on gfx950 (`mxfp8_moe.hip`)."""

from __future__ import annotations

from typing import Final

from fp8fn.ops.hip.build import HipKernel
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch, Wide
from fp8fn.ops.hip.mx_mm import THREADS, TYPES, check_span, grid, lines, stride
from fp8fn.ops.operands import RoutedProduct
from fp8fn.ops.triton.views import ceil_div

_MOST_TILES: Final = 4  # tiles of 16 rows in a block


def plan_moe(product: RoutedProduct, config: HipConfig) -> tuple[HipLaunch]:
    """The launch that fills the rows of `out` that ids name; K is a multiple of 32.

    There is a tile and an expert at least.
    """
    (a, a_scale, _), (w, w_scale, _), routing = product.a, product.w, product.routing
    n, k, out, block_n = product.n, product.k, product.out, config.block_n
    if block_n not in (8, 16) or k % 32 != 0:
        raise ValueError(f"mxfp8_moe: block_n={block_n} and K={k}; block_n must be 8 or 16, and K a multiple of 32")
    tiles_m = min(ceil_div(routing.block_m, 16), _MOST_TILES)
    left, right, right_scale = lines(a), lines(w.mT), w_scale.mT
    for name, operand, most in (
        ("a", left, left.shape[0]),
        ("a_scale", a_scale, left.shape[0]),
        ("w", right, block_n),
        ("w_scale", right_scale, block_n),
    ):
        check_span("mxfp8_moe", name, operand, most)
    macros = (
        ("BLOCK_N", block_n),
        ("TILES_M", tiles_m),
        ("WEIGHTED", int(product.token_weights is not None)),
        ("OUT", TYPES[out.dtype]),
    )
    places = routing.tiles * ceil_div(routing.block_m, 16 * tiles_m)
    return (
        HipLaunch(
            kernel=HipKernel("mxfp8_moe.hip", "mxfp8_moe", str(product.target.arch), macros),
            grid=grid("mxfp8_moe", places * ceil_div(n, block_n)),
            threads=THREADS,
            args={
                "a": left, "a_scale": a_scale, "w": right, "w_scale": w_scale, **routing._asdict(),
                "token_weights": product.token_weights, "out": out, "ids": product.ids, "N": n, "K": k,
                "E": product.experts, "block_m": routing.block_m, "a_div": product.a_div,
                "a_row": stride(left, 0), "as_row": stride(a_scale, 0), "as_block": stride(a_scale, 1),
                "w_column": stride(right, 1), "ws_column": stride(right_scale, 1), "ws_block": stride(right_scale, 2),
                "w_expert": Wide(stride(right, 0)), "ws_expert": Wide(stride(right_scale, 0)),
            },
            target=product.target,
            options={"TILES_M": tiles_m, "BLOCK_N": block_n},
        ),
    )  # fmt: skip
