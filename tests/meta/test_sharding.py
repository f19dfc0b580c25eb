"""DTensor: each op on ranks of one process against one call on whole tensors."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn.meta.registry import OPS, shardings
from fp8fn.meta.sharding import Composed, Refusal
from fp8fn.ops.layout import BLOCKS
from support.accuracy import differing, snr
from support.samples import SAMPLES

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from support.ranks import Ranks, gathered, moved, placed, ranks_in_one_process, sharded

RANKS = 2
ops = torch.ops.fp8fn


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_in_one_process(RANKS) as ranks:
        yield ranks


def assert_equal(found: Any, expected: Tensor, least: float = math.inf) -> None:
    """Equal bits, or `least` dB: of products a sum may be split, and the CPU's BLAS adds in an order of the shape.

    A sum that is rounded to 16 bits may then be rounded to a neighbour, a few elements of them.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    whole = gathered(found)
    if least < math.inf and expected.dtype.itemsize == 2:
        steps = (whole.contiguous().view(torch.int16).int() - expected.contiguous().view(torch.int16).int()).abs()
        assert int(steps.max() if steps.numel() else 0) <= 1
        assert int(steps.count_nonzero()) <= 1 + steps.numel() // 100
        return
    assert differing(whole.contiguous(), expected.contiguous()) == 0 or snr(whole, expected) >= least


def test_every_op_has_a_rule_or_says_why_not() -> None:
    names = {str(name).removeprefix("fp8fn::") for name in registered()}
    of_passes = {"gather_scaled_mm", "mm_a16w8_siblings", "monitor"}
    assert names == {*OPS, *of_passes}
    kinds = {name: type(sharding) for name, sharding in shardings(names).items()}
    assert {name for name, kind in kinds.items() if kind is Composed} == {
        name for name, op in OPS.items() if op.composite is not None
    }
    assert {name for name, kind in kinds.items() if kind is Refusal} == of_passes


def registered() -> set[str]:
    return {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fp8fn::")}


SHAPES = {"even": (256, 512), "ragged": (3, 250, 30), "empty_rank": (1, 257), "empty": (0, 256)}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_quantizers_give_the_same_bits(ranks: Ranks, kind: str, block: tuple[int, int]) -> None:
    x = torch.randn(SHAPES[kind])
    amax = ops.amax(x, block)
    expected = [*ops.quantize(x, block), *ops.quantize_dual(x, block), amax, *ops.quantize(x, block, amax=amax)]
    with ranks.mode:
        for placement in (*map(Shard, range(x.ndim)), Replicate(), Partial()):
            d = sharded(x, ranks.mesh, placement)
            found = [*ops.quantize(d, block), *ops.quantize_dual(d, block), ops.amax(d, block)]
            found += ops.quantize(d, block, amax=ops.amax(d, block))
            for one, other in zip(found, expected, strict=True):
                assert_equal(one, other)


ELSEWHERE = ("amax", "quantize", "quantize_dual")
LEAVES = [name for name, op in OPS.items() if op.composite is None and name not in ELSEWHERE]
KINDS = ("plain", "ragged", "batched", "empty")
CASES = [(name, each.label) for name in sorted(LEAVES) for each in SAMPLES[name]() if each.label.startswith(KINDS)]


@pytest.mark.parametrize(("name", "label"), CASES)
def test_samples(ranks: Ranks, name: str, label: str) -> None:
    """Each tensor cut along each axis, beside whole ones."""
    sample = next(each for each in SAMPLES[name]() if each.label == label)
    op, kwargs = getattr(ops, name), sample.kwargs
    if "out_dtype" in {argument.name for argument in op.default._schema.arguments[len(sample.args) :]}:
        kwargs = {**kwargs, "out_dtype": torch.float32}
    expected = op(*sample.args, **kwargs)
    expected = (expected,) if isinstance(expected, Tensor) else expected
    places = [
        (i, Shard(dim))
        for i, x in enumerate(sample.tensors)
        for dim in range(x.ndim)
        if x.dtype != torch.float8_e8m0fnu and x.shape[dim] > 1  # PyTorch pads no e8m0
    ]
    of_sums = 125 if label == "ragged_summed_large" else 130  # of 1,000 terms, or fewer
    least = math.inf if name.startswith("quantize") else of_sums
    with ranks.mode:
        for place in places:
            found = op(*placed(sample.args, ranks.mesh, *place), **kwargs)
            for one, other in zip((found,) if isinstance(found, DTensor) else found, expected, strict=True):
                assert_equal(one, other, least)


PRODUCTS = ("scaled_mm", "mx_mm", "mm_a16w8", "grouped_mm_a16w8", "moe_gemm", "scaled_grouped_mm")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_whose_sums_are_exact_have_the_same_bits(ranks: Ranks, name: str) -> None:
    """Small integers and scales near 1, so that an order of sums changes nothing: each tensor, each axis."""
    op = getattr(ops, name)
    for sample in SAMPLES[name]():
        if "unwritten" in sample.label:
            continue
        parameters = op.default._schema.arguments
        args = [_small(value, parameter.name) for value, parameter in zip(sample.args, parameters, strict=False)]
        kwargs = {**sample.kwargs}
        if "out_dtype" in {parameter.name for parameter in parameters[len(args) :]}:
            kwargs["out_dtype"] = torch.float32
        expected = op(*args, **kwargs)
        with ranks.mode:
            for i, x in enumerate(sample.tensors):
                for dim in range(x.ndim if x.dtype != torch.float8_e8m0fnu else 0):  # PyTorch pads no e8m0
                    assert_equal(op(*placed(args, ranks.mesh, i, Shard(dim)), **kwargs), expected)


def _small(value: Any, name: str) -> Any:
    """A tensor of numbers as small in the place of an op's argument, with its strides; offsets and ids as they are."""
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return value
    generator = torch.Generator().manual_seed(value.numel())
    if "scale" in name or value.dtype == torch.float8_e8m0fnu:
        numbers = 2.0 ** torch.randint(-1, 2, value.shape, generator=generator)
    else:
        numbers = torch.randint(-2, 3, value.shape, generator=generator).float()
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.element_size() == 1:
        made.view(torch.uint8).copy_(numbers.to(value.dtype).view(torch.uint8))
        return made
    return made.copy_(numbers)


def test_the_block_is_in_the_key_of_the_cache(ranks: Ranks) -> None:
    """A rule for one block would cut the next one in two."""
    x = torch.randn(128, 256)
    with ranks.mode:
        d = sharded(x, ranks.mesh, Shard(0))
        for block in ((1, 128), (128, 128), (1, 128), (128, 1)):
            _, scale = ops.quantize(d, block)
            assert_equal(scale, ops.quantize(x, block)[1])
            assert scale.placements[0] == (Shard(0) if block[0] == 1 else scale.placements[0])


PLACEMENTS = {
    "rows": (Shard(0), Replicate(), Shard(0)),
    "columns": (Replicate(), Shard(0), Shard(1)),
    "sums": (Shard(1), Shard(1), Partial()),
}


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_linear_moves_no_unquantized_data(ranks: Ranks, kind: str, recipe: str) -> None:
    """Forward and backward of whole blocks: at most magnitudes are reduced, and gradients have the same bits."""
    x, w, bias, grad = torch.randn(2, 256, 256), torch.randn(256, 256), torch.randn(256), torch.randn(2, 256, 256)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    expected = fp8fn.linear(*leaves, recipe=recipe)
    expected.backward(grad)
    of_x, of_w, of_y = PLACEMENTS[kind]
    with ranks.mode:
        of_x, of_y = (Shard(2) if place == Shard(1) else place for place in (of_x, of_y))
        of_bias = Shard(0) if kind == "columns" else Replicate()
        cut = [sharded(t, ranks.mesh, place) for t, place in zip((x, w, bias), (of_x, of_w, of_bias), strict=True)]
        cut = [t.requires_grad_() for t in cut]
        with CommDebugMode() as comm:
            y = fp8fn.linear(*cut, recipe=recipe)
            y.backward(sharded(grad, ranks.mesh, Replicate() if of_y == Partial() else of_y))
        assert y.placements[0] == of_y
        assert set(moved(comm)) <= {"all_reduce"}
        assert_equal(y, expected.detach(), 130)
        for t, leaf in zip(cut, leaves, strict=True):
            assert_equal(t.grad, leaf.grad, 130)


def test_the_largest_magnitude_of_all_ranks_may_be_a_nan(ranks: Ranks) -> None:
    x = torch.randn(4, 256)
    x[0, 200], x[1, 3] = torch.nan, torch.inf
    with ranks.mode:
        found = fp8fn.quantize(sharded(x, ranks.mesh, Shard(1)), (1, -1))
        assert found.data.placements == (Shard(1),)
        for one, other in zip((found.data, found.scale), ops.quantize(x, (1, -1)), strict=True):
            assert_equal(one, other)


def test_blocks_on_two_ranks_are_logged(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with ranks.mode, caplog.at_level("WARNING", "fp8fn"):
        ops.quantize(sharded(torch.randn(200, 128), ranks.mesh, Shard(0)), (128, 128))
    assert "fp8fn::quantize: x (200, 128) is sharded along dimension 0 over 2 ranks" in caplog.text


def test_a_refusal_names_the_op(ranks: Ranks) -> None:
    x = torch.randn(128, 128)
    with ranks.mode:
        d = sharded(x, ranks.mesh, Shard(0))
        data, scale = ops.quantize(d, (1, 128))
        with pytest.raises(NotImplementedError, match=r"fp8fn::monitor: no argument may be a DTensor"):
            ops.monitor(data, scale, (1, 128), [], "x", [])


@pytest.mark.parametrize("first", ["fp8fn", "torch.distributed.tensor"])
def test_rules_are_registered_whatever_is_imported_first(first: str) -> None:
    program = f"""
import sys
import {first}
assert ("torch.distributed.tensor" in sys.modules) == ({first!r} != "fp8fn")
import fp8fn
from torch.distributed.tensor import DTensor
import torch.distributed.tensor
import torch
assert torch.ops.fp8fn.quantize.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert type(torch.distributed.tensor.__spec__.loader).__name__ == "SourceFileLoader"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
