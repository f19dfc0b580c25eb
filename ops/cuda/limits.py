"""Limits of Hopper that kernels' configurations keep to: shared memory, clusters, grids, alignment, 32-bit integers."""

from __future__ import annotations

from typing import Final

SHARED_LIMIT: Final = 227 << 10  # bytes of a block
RESERVED: Final = 1 << 10  # bytes of each block's shared memory, by the driver
PREFETCHED: Final = 16 << 20  # bytes of weights in the L2, of 50 MiB in two halves
TMA_ALIGNMENT: Final = 16
LARGEST: Final = 2**31 - 1024  # an int32 that an edge tile may be added to
MOST_BLOCKS: Final = 65535  # along a grid's second and third axis
_CORES_OF_LARGE_GPCS: Final = 132  # with fewer a cluster of more than 8 blocks may have no place


def largest_cluster(cores: int) -> int:
    """Blocks that find a place together on a GPU of so many multiprocessors."""
    return 16 if cores >= _CORES_OF_LARGE_GPCS else 8


def floor_power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def ceil_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
