"""The order in which programs take the tiles of a product, and how the tile's scales are loaded."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8fn.ops.triton.scale import scale_value


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tiles in columns of `GROUP` rows, so that neighbours in time share operands in L2."""
    span = GROUP * tiles_n
    first = tile // span * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + tile % span % height, tile % span // height


@triton.jit
def on_chiplet(program, programs, XCDS: tl.constexpr):
    """The tile of a program where programs are dealt out to `XCDS` chiplets in turn: each gets one run of tiles.

    Chiplets have an L2 each, so neighbours share operands only on one. Programs past the last whole round stay.
    """
    if XCDS == 1:
        tile = program
    else:
        run = programs // XCDS
        tile = tl.where(program < run * XCDS, program % XCDS * run + program // XCDS, program)
    return tile


@triton.jit
def tile_scales(scales, start, indices, size, stride, BLOCK: tl.constexpr, EXTENT: tl.constexpr, EVEN: tl.constexpr):
    """The scales of a tile along its axis that is not contracted: one, where the tile lies within a block, or a vector.

    `scales` points at the first scale of the k-block, `indices` are the tile's `EXTENT` indices from `start` on.
    """
    if BLOCK == -1:
        value = scale_value(tl.load(scales))
    elif BLOCK % EXTENT == 0:
        value = scale_value(tl.load(scales + start // BLOCK * stride))
    elif EVEN:
        value = scale_value(tl.load(scales + indices // BLOCK * stride))
    else:
        stored = tl.load(scales + indices // BLOCK * stride, mask=indices < size, other=0)
        value = scale_value(stored)
    return value


@triton.jit
def scaled(product, a_scale, b_scale, A_VECTOR: tl.constexpr, B_VECTOR: tl.constexpr):
    """`product * a_scale * b_scale`, with as few multiplications of the whole tile as the scales' shapes allow."""
    if A_VECTOR and B_VECTOR:
        result = product * a_scale[:, None] * b_scale[None, :]
    elif A_VECTOR:
        result = product * (a_scale * b_scale)[:, None]
    elif B_VECTOR:
        result = product * (a_scale * b_scale)[None, :]
    else:
        result = product * (a_scale * b_scale)
    return result
