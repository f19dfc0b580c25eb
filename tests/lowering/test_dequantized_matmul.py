"""Dequantize-then-multiply in every spelling: what stands in the graph afterwards, and the same values as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Graph

import fp8fn
from fp8fn.lowering import joint_pass
from support.accuracy import assert_close
from support.dequantized import (
    PRODUCTS,
    SPELLINGS,
    K,
    N,
    by_expand,
    by_repeat_interleave,
    by_view,
    quantized_activation,
    weight,
)
from support.graphs import code, compiled_step, graphs, step

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def scale_first(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    return s.repeat_interleave(128, 1).repeat_interleave(128, 0) * w.to(dtype).to(FP32)


def activation(shape: tuple[int, ...] = (2, 24, K), dtype: torch.dtype = BF16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_in_every_product(spelling: str, product: str, fresh_dynamo: None) -> None:
    w, s = weight()
    x = activation()

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return PRODUCTS[product](x, SPELLINGS[spelling](w, s, x.dtype))

    expected = step(function, x, w, s)
    actual, record = compiled_step(function, x, w, s)
    if product == "weight (K, N)":  # read as another matrix: no block of it has one scale
        assert record == []
        assert_close(actual, expected)
        return
    assert [made.made for made in record] == ["fp8fn.mm_a16w8.default"] * 2, record
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_every_type(dtype: torch.dtype, fresh_dynamo: None) -> None:
    w, s = weight()
    x = activation(dtype=dtype)

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, by_view(w, s, x.dtype))

    actual, record = compiled_step(function, x, w, s)
    assert [made.reason for made in record] == [None, None]
    assert_close(actual, step(function, x, w, s), 1e-5 if dtype == FP32 else 1e-2)


@pytest.mark.parametrize("product", ["bmm", "einsum"])
def test_batches(product: str, fresh_dynamo: None) -> None:
    w, s = weight((3, N, K))
    x = activation((3, 24, K))

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        dequantized = (w.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)).to(x.dtype)
        return x @ dequantized.mT if product == "bmm" else torch.einsum("emk,enk->emn", x, dequantized)

    actual, record = compiled_step(function, x, w, s)
    assert [made.made for made in record] == ["fp8fn.mm_a16w8.default"] * 2
    assert_close(actual, step(function, x, w, s))


@pytest.mark.parametrize("shape", [(200, 300), (200, 96), (100, 300)], ids=str)
def test_ragged_blocks(shape: tuple[int, int], fresh_dynamo: None) -> None:
    w, s = weight(shape)
    x = activation((2, 24, shape[1]))

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        scales = s.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
        return F.linear(x, (w.float() * scales).to(x.dtype))

    actual, record = compiled_step(function, x, w, s)
    assert [made.made for made in record] == ["fp8fn.mm_a16w8.default"] * 2
    assert_close(actual, step(function, x, w, s))


def test_fake_quantization_becomes_fp8(fresh_dynamo: None) -> None:
    w, s = weight()
    x = activation()

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(quantized_activation(x), by_expand(w, s, x.dtype))

    actual, record = compiled_step(function, x, w, s)
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default", "fp8fn.mm_a16w8.default"]
    assert_close(actual, step(function, x, w, s))


def test_both_sides_of_a_training_step(fresh_dynamo: None) -> None:
    """wgrad would need scales along M: it stays in 16 bits, and says why."""
    x, w = activation(), activation((N, K))

    def fake(w: Tensor) -> Tensor:
        blocks = w.float().view(N // 128, 128, K // 128, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        q = (blocks / scale).clamp(-448, 448).to(E4M3)
        return w + ((q.float() * scale).view(N, K).to(w.dtype) - w).detach()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(quantized_activation(x), fake(w))

    actual, record = compiled_step(function, x, w)
    assert [made.made for made in record if made.reason is None] == [
        "fp8fn.scaled_mm.default",
        "fp8fn.mm_a16w8.default",
    ]
    assert [made.reason for made in record if made.reason] == [
        "a scale for each element of K, of data made in the graph: the product in 16 bits is faster"
    ]
    assert_close(actual, step(function, x, w))


def scaled(x: Tensor, s: Tensor) -> Tensor:
    return (x.float() * s).to(BF16)


@pytest.mark.parametrize("blocks", ["rowwise", "tensorwise", "1x128 and 128x1"])
def test_both_sides_stored(blocks: str, fresh_dynamo: None) -> None:
    torch.manual_seed(2)
    a, b = torch.randn(48, K), torch.randn(N, K)
    block = {"rowwise": (1, -1), "tensorwise": (-1, -1), "1x128 and 128x1": (1, 128)}[blocks]
    qa, qb = fp8fn.quantize(a, block), fp8fn.quantize(b, block)

    def function(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        if block == (1, 128):
            a_scale, b_scale = a_scale.repeat_interleave(128, 1), b_scale.repeat_interleave(128, 1)
        return scaled(a, a_scale) @ scaled(b, b_scale).t()

    inputs = (qa.data, qa.scale, qb.data, qb.scale)
    torch._dynamo.reset()
    with graphs(), joint_pass.recorded() as record:
        actual = torch.compile(function, fullgraph=True)(*inputs)
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default"]
    assert_close((actual,), (function(*inputs),))


def test_dynamic_tokens_compile_once(fresh_dynamo: None) -> None:
    w, s = weight()

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, by_view(w, s, x.dtype))

    compiled = torch.compile(function, fullgraph=True)
    with graphs(), joint_pass.recorded() as record, torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (4096, 100, 128, 3, 10003):
            x = activation((tokens, K)).detach()
            if tokens == 4096:
                torch._dynamo.mark_dynamic(x, 0)
            assert_close((compiled(x, w, s),), (function(x, w, s),))
    assert [made.made for made in record] == ["fp8fn.mm_a16w8.default"]


def test_scales_made_in_the_graph(fresh_dynamo: None) -> None:
    """Blocks that begin in the middle are blocks of one row, whose scales the graph cuts out."""
    w, s = weight()

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        scales = torch.cat([s, s]).repeat_interleave(128, 0)[64 : 64 + N].repeat_interleave(128, 1)
        return F.linear(x, w.to(x.dtype) * scales.to(x.dtype))

    x = activation()
    actual, record = compiled_step(function, x, w, s)
    assert [made.made for made in record] == ["fp8fn.mm_a16w8.default"] * 2
    assert_close(actual, step(function, x, w, s))


def not_in_order(w: Tensor, s: Tensor) -> Tensor:
    return w.bfloat16() * s.expand(128, 2, 3).reshape(N, 3).repeat_interleave(128, 1).bfloat16()


def of_other_blocks(w: Tensor, s: Tensor) -> Tensor:
    return w.bfloat16() * s[:, :1].repeat_interleave(128, 0).expand(N, K).bfloat16()


def with_an_offset(w: Tensor, s: Tensor) -> Tensor:
    return by_view(w, s, BF16) + 1


def part_of_the_data(w: Tensor, s: Tensor) -> Tensor:
    return by_view(w, s, BF16)[:, 128:].repeat(1, 2)[:, :K]


@pytest.mark.parametrize(
    "dequantize", [not_in_order, of_other_blocks, with_an_offset, part_of_the_data], ids=lambda f: f.__name__
)
def test_what_only_looks_like_it_is_left_alone(dequantize: Callable[..., Tensor], fresh_dynamo: None) -> None:
    w, s = weight()
    x = activation()

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, dequantize(w, s))

    actual, record = compiled_step(function, x, w, s)
    assert record == []
    assert_close(actual, step(function, x, w, s))


def test_the_graph_of_a_weight(fresh_dynamo: None) -> None:
    w, s = weight()

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, by_repeat_interleave(w, s, x.dtype))

    with graphs() as found:
        step(torch.compile(function, fullgraph=True), activation(), w, s)
    assert_expected_inline(
        code(found[0]),
        """\
fp8fn.mm_a16w8.default(
    view [48, 384],
    permute [384, 256],
    permute [3, 2],
    (128, 128),
    None,
    torch.bfloat16)
fp8fn.mm_a16w8.default(
    view [48, 256],
    primals [256, 384],
    primals [2, 3],
    (128, 128),
    None,
    torch.bfloat16)""",
    )


def test_the_graph_of_both_sides(fresh_dynamo: None) -> None:
    w, s = weight()

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(quantized_activation(x), by_expand(w, s, x.dtype))

    with graphs() as found:
        step(torch.compile(function, fullgraph=True), activation(), w, s)
    assert_expected_inline(
        code(found[0]),
        """\
fp8fn.scaled_mm.default(
    reshape [48, 384],
    reshape [48, 3],
    (1, 128),
    permute [384, 256],
    permute [3, 2],
    (128, 128),
    None,
    torch.bfloat16)
fp8fn.mm_a16w8.default(
    view [48, 256],
    primals [256, 384],
    primals [2, 3],
    (128, 128),
    None,
    torch.bfloat16)""",
    )


def test_enable_is_undone_by_disable(fresh_dynamo: None) -> None:
    import torch._inductor.config as config

    before = config.joint_custom_pre_pass
    fp8fn.lowering.enable()
    fp8fn.lowering.enable()
    assert isinstance(config.joint_custom_pre_pass, joint_pass.SubstitutionPass)
    fp8fn.lowering.disable()
    assert config.joint_custom_pre_pass is before
    fp8fn.lowering.disable()
    assert config.joint_custom_pre_pass is before


def test_the_users_own_pass_runs_first(fresh_dynamo: None) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Counting(CustomGraphPass):
        products = 0

        def __call__(self, graph: Graph) -> None:
            self.products += sum(node.target is torch.ops.aten.mm.default for node in graph.nodes)

        def uuid(self) -> Any:
            return "counting"

    w, s = weight()
    theirs = Counting()
    with torch._inductor.config.patch(joint_custom_pre_pass=theirs):
        _, record = compiled_step(lambda x, w, s: F.linear(x, by_view(w, s, x.dtype)), activation(), w, s)
    assert theirs.products == 2
    assert len(record) == 2
    assert joint_pass.SubstitutionPass(theirs).uuid() != joint_pass.SubstitutionPass().uuid()
