"""DTensors on a mesh of two dimensions, in one process, against one call on whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

import fp8fn
from fp8fn.ops.layout import BLOCKS, Block
from support.accuracy import differing, snr

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import Partial, Replicate, Shard

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


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_was_quantized_is_dequantized(ranks: Ranks, block: Block) -> None:
    x = torch.randn(250, 130)
    want = fp8fn.quantize(x, block).dequantize()
    with ranks.mode:
        for placements in product((Shard(0), Shard(1), Replicate()), repeat=2):
            found = fp8fn.quantize(sharded(x, ranks.mesh, *placements), block).dequantize()
            assert torch.equal(gathered(found), want)


# The placements of x, of w and of the result, on either dimension of the mesh.
PLACEMENTS = {
    "rows": (Shard(0), Replicate(), Shard(0)),
    "columns": (Replicate(), Shard(0), Shard(1)),
    "sums": (Shard(1), Shard(1), Partial()),
    "whole": (Replicate(), Replicate(), Replicate()),
}


@pytest.mark.parametrize(("first", "second"), [*product(PLACEMENTS, repeat=2)])
def test_linear_by_one_recipe_after_another(ranks: Ranks, first: str, second: str) -> None:
    """Forward and backward: a rule of the recipe before would cut blocks of the next."""
    x, w, grad = torch.randn(512, 512), torch.randn(512, 512), torch.randn(512, 512)
    of_x, of_w, of_y = zip(PLACEMENTS[first], PLACEMENTS[second], strict=True)
    for recipe in ("blockwise", "rowwise", "tensorwise", "mxfp8", "blockwise_square"):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        expected = fp8fn.linear(*leaves, recipe=recipe)
        expected.backward(grad)
        with ranks.mode:
            cut = [sharded(t, ranks.mesh, *places).requires_grad_() for t, places in ((x, of_x), (w, of_w))]
            y = fp8fn.linear(*cut, recipe=recipe)
            assert y.placements == of_y
            y.backward(sharded(grad, ranks.mesh, *(Replicate() if p == Partial() else p for p in of_y)))
            for one, other in ((y, expected), (cut[0].grad, leaves[0].grad), (cut[1].grad, leaves[1].grad)):
                assert snr(gathered(one.detach()), other.detach()) >= 130
