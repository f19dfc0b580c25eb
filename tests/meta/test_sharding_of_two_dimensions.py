"""Quantizers of DTensors on a mesh of two dimensions, in one process, against one call on whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from fp8fn.ops.layout import BLOCKS, Block
from support.accuracy import differing

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import Replicate, Shard

from support.ranks import Ranks, gathered, ranks_in_one_process, sharded

ops = torch.ops.fp8fn


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_in_one_process(2, 2) as ranks:
        yield ranks


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (250, 30)], ids=str)
def test_quantizers_give_the_same_bits(ranks: Ranks, shape: tuple[int, int], block: Block) -> None:
    x = torch.randn(shape)
    expected = [*ops.quantize(x, block), *ops.quantize_dual(x, block), ops.amax(x, block)]
    with ranks.mode:
        for placements in product((Shard(0), Shard(1), Replicate()), repeat=2):
            d = sharded(x, ranks.mesh, *placements)
            found = [*ops.quantize(d, block), *ops.quantize_dual(d, block), ops.amax(d, block)]
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                assert differing(gathered(one).contiguous(), other.contiguous()) == 0
