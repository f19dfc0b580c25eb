"""Inlines quantizers of elementwise results: spells them in ATen ops, which Inductor fuses with the producer.

    fc2(F.gelu(h)), fc2(torch.relu(h).square()), proj(x + attention)

`fp8fn::quantize` of such a tensor becomes amax, scale and cast in the graph. Inductor generates one kernel for them and
the producer, which saves writing and reading the 16-bit tensor. This works for blocks of one row, `(1, 128)`, `(1, 32)`
and `(1, -1)`: Inductor's reductions cannot compute the amax of a column, or both orientations in one read. The formula
is that of `ops/reference/quantize.py`, with each division rounded to nearest, and gives the same bits for the same
float32 input. Its input is the producer's float32 result, not the result rounded to 16 bits.

Inductor multiplies by the reciprocal of a constant, and lets Triton divide approximately. Since PyTorch 2.13 it rounds
`addcdiv` to nearest, as eager CUDA does. Before 2.13 no division on a GPU is exact, so this pattern is for CPUs only.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import place_of, source_of, tensor_of
from fp8fn.lowering.graph.quantizers import Quantizer, elementwise, find_quantizers, reshaped_of, same_layout
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten
from fp8fn.ops import layout, targets
from fp8fn.ops.formats import AMAX_FLOOR, fp8_max
from fp8fn.ops.layout import Block, extent

NAME: Final = "inlined"
BLOCKS: Final[tuple[Block, ...]] = tuple(block for block in layout.BLOCKS if block[0] == 1)
_CAST: Final = torch.ops.prims.convert_element_type.default
_SCALES: Final = ("fp32", "pow2")


def substitute(graph: Graph, blocks: Collection[Block] = BLOCKS) -> Iterator[Substitution]:
    """Inlines the quantizers in `blocks` of elementwise results, and reports each."""
    for quantizer in find_quantizers(graph):
        product = reshaped_of(quantizer.x)
        if quantizer.dual or quantizer.block not in blocks or not elementwise(product) or not _is_plain(quantizer):
            continue
        reason = _why_not(quantizer)
        if reason is None:
            _emit(graph, quantizer)
        made, (m, k) = "" if reason else f"{quantizer.node.target}, inlined", quantizer.shape
        at = source_of(product) or source_of(quantizer.node)
        yield Substitution(NAME, str(quantizer.node), at, str(product), (m, 0, k), made, reason)


def _is_plain(quantizer: Quantizer) -> bool:
    """Whether all blocks are whole, and data and scales need no padding."""
    shape = quantizer.shape
    if len(shape) != 2 or not all(isinstance(size, int) for size in shape) or 0 in shape or shape[1] % 16:
        return False
    return shape[1] % extent(shape[1], quantizer.block[1]) == 0 and shape[0] % 4 == 0


def _why_not(quantizer: Quantizer) -> str | None:
    if quantizer.scale not in _SCALES:
        return f"Inductor has no {quantizer.scale}"
    target = targets.target_of(quantizer.device)
    if target.backend == "hip":
        return "Inductor's casts to FP8 on AMD were compared with no reference"
    if quantizer.dtype not in targets.fp8_dtypes(target):
        return f"{target.name} has no instruction for {quantizer.dtype}"
    if target.backend == "cuda" and not _divides_exactly():
        return "Inductor divides approximately before PyTorch 2.13"
    return None


def _divides_exactly() -> bool:
    from torch._inductor.lowering import lowerings

    return aten.addcdiv.default in lowerings


def _emit(graph: Graph, quantizer: Quantizer) -> None:
    node, (m, n), most = quantizer.node, quantizer.shape, fp8_max(quantizer.dtype)
    columns = extent(n, quantizer.block[1])
    with graph.inserting_before(node):
        x = quantizer.x
        if tensor_of(x).dtype != torch.float32:
            x = call(graph, _CAST, x, torch.float32)
        tiles = call(graph, aten.reshape.default, x, [m, n // columns, columns])
        amax = call(graph, aten.amax.default, call(graph, aten.abs.default, tiles), [-1], True)
        amax = call(graph, aten.clamp_min.default, amax, AMAX_FLOOR)
        scale = _divided(graph, amax, _constant(graph, most, amax))
        if quantizer.scale == "pow2":
            scale = _rounded_up(graph, scale)
        inverse = _divided(graph, _constant(graph, 1.0, amax), scale)
        data = call(graph, aten.mul.Tensor, tiles, inverse)
        data = call(graph, aten.clamp_min.default, data, -most)
        data = call(graph, aten.clamp_max.default, data, most)
        # Not `reshape`: Inductor would compute its result in a second kernel over (M, N), which repeats all of the
        # above. `as_strided` makes Inductor store the blocks first, in the kernel that computes the amax.
        data = call(graph, aten.as_strided.default, call(graph, _CAST, data, quantizer.dtype), [m, n], [n, 1], 0)
        scale = call(graph, aten.reshape.default, scale, [m, n // columns])
        scale = call(graph, aten.permute.default, scale, [1, 0])
        scale = call(graph, aten.clone.default, scale, memory_format=torch.contiguous_format)
        scale = call(graph, aten.permute.default, scale, [1, 0])
    outs = data, scale
    assert all(same_layout(new.meta["val"], old) for new, old in zip(outs, quantizer.outs, strict=True)), node
    for item in list(node.users):
        assert item.target is operator.getitem
        item.replace_all_uses_with(outs[place_of(item)])
        graph.erase_node(item)
    graph.erase_node(node)


def _divided(graph: Graph, a: Node, b: Node) -> Node:
    """`a / b` rounded to nearest, for positive numbers and NaN."""
    if not _divides_exactly():
        return call(graph, aten.div.Tensor, a, b)  # exact on a CPU
    return call(graph, aten.addcdiv.default, _constant(graph, 0.0, a), a, b)


def _constant(graph: Graph, number: float, like: Node) -> Node:
    x: Any = like.meta["val"]
    with x.fake_mode:
        return call(graph, aten.full.default, [], number, dtype=x.dtype, device=x.device, pin_memory=False)


def _rounded_up(graph: Graph, exact: Node) -> Node:
    """`exact` rounded up to a power of two."""
    bits = call(graph, aten.view.dtype, exact, torch.int32)
    bits = call(graph, aten.add.Tensor, bits, 0x7FFFFF)
    bits = call(graph, aten.bitwise_and.Scalar, bits, 0x7F800000)
    power = call(graph, aten.view.dtype, bits, torch.float32)
    return call(graph, aten.where.self, call(graph, aten.isnan.default, exact), exact, power)
