"""`sort_tokens` and `moe_gemm` against plain Python: the layout, the interpreted kernel, machine code, a layer."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import moe_gemm as moe
from fp8fn.ops.layout import empty_scale
from fp8fn.ops.operands import Quantized, RoutedProduct, Routing
from fp8fn.ops.sort_tokens import most_tiles
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, Target, native_e4m3
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.moe_gemm import configure, plan_moe_gemm
from fp8fn.ops.tuning.mx import MxConfig
from support.compilers import assert_no_spills
from support.operands.experts import FORMATS, Layout, assert_near, by_hand, operands
from support.products import routed_product

BF16, FP32 = torch.bfloat16, torch.float32
SMALL: Final = {"mx": MxConfig(16, 32, 64, 4, 2), "blockwise": MxConfig(16, 32, 128, 4, 2)}


def sorted_by_hand(chosen: list[list[int]], experts: int, block_m: int) -> tuple[list[int], list[int], int]:
    """Tiles one after the other: ids and experts of those in use, and the padded number of ids."""
    width = len(chosen[0]) if chosen else 0
    ids, owners = [], []
    for expert in range(experts):
        mine = [t * width + c for t, row in enumerate(chosen) for c, e in enumerate(row) if e == expert]
        for first in range(0, len(mine), block_m):
            tile = mine[first : first + block_m]
            ids += tile + [len(chosen) * width] * (block_m - len(tile))
            owners.append(expert)
    return ids, owners, len(ids)


def assert_sorted(chosen: Tensor, experts: int, block_m: int) -> None:
    ids, owners, number = fp8fn.sort_tokens(chosen, experts, block_m)
    expected_ids, expected_owners, expected_number = sorted_by_hand(chosen.tolist(), experts, block_m)
    assert (ids.dtype, owners.dtype, number.dtype) == (torch.int32,) * 3
    assert (number.tolist(), len(ids)) == ([expected_number], len(owners) * block_m)
    assert len(owners) == most_tiles(chosen.numel(), experts, block_m)
    assert len(expected_owners) <= len(owners)
    assert ids.tolist() == expected_ids + [chosen.numel()] * (len(ids) - len(expected_ids))
    assert owners.tolist() == expected_owners + [-1] * (len(owners) - len(expected_owners))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 40), st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 16, 64]),
    st.sampled_from(["uniform", "one expert", "some invalid", "none"]), st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_layout(tokens: int, top_k: int, experts: int, block_m: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, experts, (tokens, top_k), generator=generator)
    if kind == "one expert":
        chosen[:] = seed % experts
    elif kind == "some invalid":
        chosen = torch.randint(-3, experts + 3, (tokens, top_k), generator=generator)
    elif kind == "none":
        chosen[:] = -1
    assert_sorted(chosen.to(dtype), experts, block_m)


def test_as_many_tiles_as_there_can_be() -> None:
    """One id for each of all experts but one: every tile is in use."""
    chosen = torch.tensor([[0] * 17, [*range(17)]])
    ids, owners, number = fp8fn.sort_tokens(chosen[1:], 17, 16)
    assert number.item() == len(ids) == 16 * 17
    assert owners.tolist() == list(range(17))
    assert_sorted(chosen, 17, 16)


def test_sorting_waits_for_nothing_and_its_sizes_are_those_of_shapes() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        ids, owners, number = fp8fn.sort_tokens(torch.zeros(7, 2, dtype=torch.int64), 4, 16)
    assert (ids.shape, owners.shape, number.shape) == ((64,), (4,), (1,))


def test_sorting_a_number_of_tokens_that_is_data() -> None:
    """Traced for some tokens that a mask leaves, and run for as many as there may be, none included."""

    def kept(mask: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        return fp8fn.sort_tokens(chosen[mask], 4, 16)

    chosen, rows = torch.randint(-1, 5, (20, 2)), torch.arange(20)
    graph = make_fx(kept, tracing_mode="symbolic")(rows < 7, chosen)
    for tokens in (0, 1, 7, 20):
        ids, owners, number = graph(rows < tokens, chosen)
        expected_ids, expected_owners, expected_number = sorted_by_hand(chosen[:tokens].tolist(), 4, 16)
        assert ids.tolist() == expected_ids + [2 * tokens] * (len(ids) - len(expected_ids))
        assert owners.tolist() == expected_owners + [-1] * (len(owners) - len(expected_owners))
        assert number.item() == expected_number


def interpreted(
    a: ScaledTensor, w: ScaledTensor, layout: Layout, a_div: int, weights: Tensor | None = None,
    config: MxConfig | None = None, wide: bool = False,
) -> Tensor:  # fmt: skip
    out = torch.zeros(a.shape[0] * a_div, w.shape[-1])
    given = routed_product(a, w, layout, a_div, out, SM90, weights)
    (launch,) = plan_moe_gemm(given, config or configure(moe.problem_of(given)))
    launch.constexprs["WIDE"] |= wide  # type: ignore[index]
    launch.interpret()
    return out


@pytest.mark.parametrize("block_m", [4, 16, 24, 64])
@pytest.mark.parametrize("kind", FORMATS)
def test_interpreted(kind: str, block_m: int) -> None:
    for rows, a_div, (n, k) in ((11, 2, (40, 96)), (22, 1, (33, 190)), (1, 3, (1, 31))):
        a, w = operands(rows, n, k, 4, kind)
        layout = fp8fn.sort_tokens(torch.randint(-1, 5, (rows, a_div)), 4, block_m)
        weights = torch.randn(rows * a_div)
        config = SMALL["mx" if a.block == (1, 32) else "blockwise"]
        for factor, chosen in ((None, None), (weights, config)):
            assert_near(interpreted(a, w, layout, a_div, factor, chosen), by_hand(a, w, layout, a_div, factor))


def test_a_tile_of_more_ids_than_one_product_has_rows() -> None:
    a, w = operands(150, 40, 64, 2)
    layout = fp8fn.sort_tokens(torch.zeros(150, 1, dtype=torch.int64), 2, 256)
    assert_near(interpreted(a, w, layout, 1), by_hand(a, w, layout, 1))


@pytest.mark.parametrize("kind", ["mx", "blockwise"])
def test_wide_offsets_and_strides(kind: str) -> None:
    a, w = operands(12, 40, 160, 3, kind)
    layout = fp8fn.sort_tokens(torch.randint(0, 3, (12, 2)), 3, 16)
    expected = interpreted(a, w, layout, 2)
    assert torch.equal(interpreted(a, w, layout, 2, wide=True), expected)
    row_major = w.data.view(torch.uint8).contiguous().view(w.dtype)
    assert torch.equal(interpreted(a, ScaledTensor(row_major, w.scale, w.block), layout, 2), expected)


def rules() -> dict[str, Layout]:
    """Layouts of 10 ids and 3 experts in tiles of 4, each with a rule of SEMANTICS in it."""
    ids = [0, 3, 5, 10, 1, 2, 10, 11, 9, 8, 7, 6]

    def layout(ids: list[int], experts: list[int], number: int) -> Layout:
        return (torch.tensor(ids, dtype=torch.int32), torch.tensor(experts, dtype=torch.int32),
                torch.tensor([number], dtype=torch.int32))  # fmt: skip

    return {
        "padding": layout(ids, [0, 1, 2], 12),
        "padding far past and below": layout([0, 2**31 - 1, -1, 3, *ids[4:]], [0, 1, 2], 12),
        "padding first": layout([10, 10, 3, 10, *ids[4:]], [0, 1, 2], 12),
        "an invalid expert": layout(ids, [0, 3, 2], 12),
        "a negative expert": layout(ids, [-1, 1, 2], 12),
        "tiles past the number": layout(ids, [0, 1, 2], 8),
        "half a tile past the number": layout(ids, [0, 1, 2], 5),
        "a number past the tiles": layout(ids, [0, 1, 2], 100),
        "nothing": layout(ids, [0, 1, 2], 0),
        "an expert twice": layout(ids, [2, 2, 0], 12),
        "a tile of padding": layout([*ids[:4], 10, 10, 10, 10, *ids[8:]], [0, 1, 2], 12),
    }


@pytest.mark.parametrize("a_div", [1, 2])
@pytest.mark.parametrize("rule", rules())
def test_every_rule(rule: str, a_div: int, device: torch.device) -> None:
    layout = rules()[rule]
    weights = torch.randn(10)
    for kind in ("mx", "blockwise"):
        a, w = operands(10 // a_div, 40, 96, 3, kind)
        expected = by_hand(a, w, layout, a_div, weights)
        assert_near(interpreted(a, w, layout, a_div, weights), expected)
        there = [part.to(device) for part in layout]
        found = fp8fn.moe_gemm(
            a.to(device), w.to(device), *there, top_k=2, a_div=a_div, token_weights=weights.to(device), out_dtype=FP32
        )  # type: ignore[misc]
        assert_near(found, tuple(part.to(device) for part in expected))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mx", "blockwise"])
def test_a_nan_stays_in_its_rows(kind: str) -> None:
    """One of a token's scale in its ids, of a weight's in its expert's ids, of a factor in its id."""
    a, w = operands(8, 40, 128, 3, kind)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [2, 0], [0, 1], [-1, 2]])
    layout = fp8fn.sort_tokens(chosen, 3, 16)
    nan = 255 if kind == "mx" else math.nan
    a_scale, w_scale, weights = a.scale.clone(), w.scale.clone(), torch.randn(16)
    for scale, at in ((a_scale, (3, 0)), (w_scale, (2, 0, 0))):
        (scale.view(torch.uint8) if kind == "mx" else scale)[at] = nan
    weights[[2, 14]] = math.nan  # 14 is the id of no expert
    clean = interpreted(a, w, layout, 2, torch.where(weights.isnan(), 1.0, weights))
    a, w = ScaledTensor(a.data, a_scale, a.block), ScaledTensor(w.data, w_scale, w.block)
    found = interpreted(a, w, layout, 2, weights)
    touched = torch.zeros(16, 40, dtype=torch.bool)
    touched[[6, 7, 2]] = True
    columns = 1 if kind == "mx" else 40
    touched[chosen.flatten() == 2, :columns] = True
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])
    assert (found[14] == 0).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_op_and_its_reference(kind: str, device: torch.device) -> None:
    for rows, a_div, block_m in ((13, 2, 16), (26, 1, 16), (1, 8, 16), (40, 1, 64)):
        a, w = operands(rows, 72, 256, 5, kind, device)
        chosen = torch.randint(0, 5, (rows * a_div // 2, 2), device=device)
        layout = fp8fn.sort_tokens(chosen, 5, block_m)
        found = fp8fn.moe_gemm(a, w, *layout, top_k=2, a_div=a_div, out_dtype=FP32)
        expected = by_hand(a, w, layout, a_div)
        assert_near(found, expected)
        rounded = fp8fn.moe_gemm(a, w, *layout, top_k=2, a_div=a_div)
        assert rounded.dtype == BF16
        torch.testing.assert_close(rounded, found.bfloat16(), rtol=2**-7, atol=1e-5)
        assert torch.equal(rounded, fp8fn.moe_gemm(a, w, *layout, top_k=2, a_div=a_div))


def layer(x: Tensor, gate_up: ScaledTensor, down: ScaledTensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """A mixture of experts as an engine decodes with it, `(T, H)`."""
    top_k = chosen.shape[1]
    layout = fp8fn.sort_tokens(chosen, gate_up.shape[0], 16)
    hidden = fp8fn.moe_gemm(fp8fn.quantize(x, (1, 32), scale="e8m0"), gate_up, *layout, top_k=top_k, out_dtype=FP32)
    gate, up = hidden.chunk(2, -1)
    y = fp8fn.quantize_silu_mul(gate, up, (1, 32), scale="e8m0")
    out = fp8fn.moe_gemm(
        y, down, *layout, top_k=top_k, a_div=1, token_weights=factors.flatten(), out_dtype=FP32
    )  # fmt: skip
    return out.view(*chosen.shape, -1).sum(1)


def test_a_layer_is_each_tokens_own_experts(device: torch.device) -> None:
    x = torch.randn(9, 64, device=device)
    weights = [torch.randn(4, *shape, device=device) / 8 for shape in ((96, 64), (64, 48))]
    gate_up, down = (fp8fn.quantize(w, (1, 32), scale="e8m0").mT for w in weights)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(9)]).to(device)
    factors = torch.rand(9, 2, device=device)
    found = layer(x, gate_up, down, chosen, factors)
    expected = torch.zeros(9, 64, device=device)
    for t in range(9):
        for c in range(2):
            gate, up = (x[t] @ weights[0][chosen[t, c]].T).chunk(2)
            expected[t] += factors[t, c] * ((torch.nn.functional.silu(gate) * up) @ weights[1][chosen[t, c]].T)
    assert (found - expected).norm() < 0.1 * expected.norm()  # four roundings to 3 bits, of 2.7 % each or more


def test_compiled_with_changing_numbers_of_tokens(fresh_dynamo: None) -> None:
    gate_up, down = (
        fp8fn.quantize(torch.randn(4, *s) / 8, (1, 32), scale="e8m0").mT for s in ((96, 64), (64, 48))
    )  # fmt: skip

    def call(x: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        return layer(x, gate_up, down, chosen, factors)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for tokens in (9, 5, 33, 12):
        args = torch.randn(tokens, 64), torch.randint(-1, 5, (tokens, 2)), torch.rand(tokens, 2)
        torch.testing.assert_close(compiled(*args), call(*args), rtol=1e-2, atol=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def offline(target: Target, kind: str, block_m: int, tiles: int = 256, n: int = 2048, k: int = 4096) -> TritonLaunch:
    dtype, (a_block, w_block, scale) = native_e4m3(target), FORMATS[kind]
    a = torch.empty(64, k, dtype=dtype, device="meta")
    w = torch.empty(32, n, k, dtype=dtype, device="meta").mT
    scales = empty_scale(a, a_block, scale), empty_scale(w, w_block, scale)
    ids, experts, number = (torch.empty(n, dtype=torch.int32, device="meta") for n in (tiles * block_m, tiles, 1))
    out, weights = torch.empty(512, n, dtype=BF16, device="meta"), torch.empty(512, device="meta")
    left, right = Quantized(a, scales[0], a_block), Quantized(w, scales[1], w_block)
    given = RoutedProduct(
        a=left, w=right, routing=Routing(ids, experts, number), a_div=8, out=out, target=target, token_weights=weights
    )  # fmt: skip
    return plan_moe_gemm(given, configure(moe.problem_of(given)))[0]


@pytest.mark.parametrize("kind", ["mx", "blockwise"])
@pytest.mark.parametrize("target", [SM89, SM90, SM100, GFX942, GFX950], ids=lambda target: target.name)
def test_no_configuration_spills(target: Target, kind: str) -> None:
    for block_m, tiles in ((16, 1), (16, 256), (32, 256), (64, 256), (128, 256)):
        assert_no_spills(offline(target, kind, block_m, tiles).resources(), target)
    for block_m in (16, 128):
        assert_no_spills(offline(target, kind, block_m, 256, 2047, 4001).resources(), target)


def test_machine_code_multiplies() -> None:
    assert re.search(r"mma.*\.f32\.bf16\.bf16", offline(SM90, "mx", 16).compile().asm["ptx"])
    assert re.search(r"mma.*e4m3\.e4m3", offline(SM90, "blockwise", 16).compile().asm["ptx"])
    assert re.search(r"v_mfma_f32_16x16x32_bf16", offline(GFX950, "mx", 16).compile().asm["amdgcn"])
    assert re.search(r"v_mfma_\w*f8", offline(GFX950, "blockwise", 16).compile().asm["amdgcn"])


A, W = operands(6, 40, 64, 3)
LAYOUT = fp8fn.sort_tokens(torch.zeros(6, 2, dtype=torch.int64), 3, 16)


def call(a: Any = A, w: Any = W, layout: Any = LAYOUT, top_k: int = 2, **kwargs: Any) -> Tensor:
    return fp8fn.moe_gemm(a, w, *layout, top_k=top_k, **kwargs)


ERRORS: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("a tensor", lambda: call(a=torch.zeros(6, 64)), TypeError, ("a is a Tensor", "use a ScaledTensor")),
    ("K", lambda: call(a=operands(6, 40, 96, 3)[0]), ValueError, ("K=96", "K=64", "pass weight.mT")),
    ("blocks", lambda: call(a=operands(6, 40, 64, 3, "blockwise")[0]), ValueError, ("(1, 128)", "(1, 32) with")),
    ("float32 scales", lambda: call(a=ScaledTensor(A.data, A.scale.float(), A.block)), TypeError, ("a_scale", "e8m0")),
    ("one expert", lambda: call(w=ScaledTensor(W.data[0], W.scale[0], W.block)), ValueError, ("(E, K, N)", "(64, 40)")),
    ("no ids", lambda: call(top_k=0), ValueError, ("top_k=0", "1 at least")),
    ("rows", lambda: call(a_div=1, top_k=4), ValueError, ("6 rows", "top_k=4", "a_div=top_k")),
    ("int64", lambda: call(layout=[t.long() for t in LAYOUT]), TypeError, ("dtype torch.int64", "int32")),
    ("rank", lambda: call(layout=(LAYOUT[0][None], *LAYOUT[1:])), ValueError, ("sorted_token_ids", "one dim")),
    ("length", lambda: call(layout=(LAYOUT[0][:-1], *LAYOUT[1:])), ValueError, ("47 ids", "3 tiles", "sort_tokens")),
    ("no tiles", lambda: call(layout=(LAYOUT[0], LAYOUT[1][:0], LAYOUT[2])), ValueError, ("48 ids", "0 tiles")),
    ("number", lambda: call(layout=(*LAYOUT[:2], LAYOUT[1])), ValueError, ("num_tokens_post_padded", "(1,)")),
    ("weights", lambda: call(token_weights=torch.zeros(6)), ValueError, ("token_weights", "(12,)")),
    ("weights' type", lambda: call(token_weights=torch.zeros(12).half()), ValueError, ("float16", "float32")),
    ("device", lambda: call(layout=[t.to("meta") for t in LAYOUT]), ValueError, ("sorted_token_ids on meta", "move")),
    ("out_dtype", lambda: call(out_dtype=torch.int8), TypeError, ("out_dtype=torch.int8", "use torch.bfloat16")),
    ("chosen's type", lambda: fp8fn.sort_tokens(torch.zeros(6, 2), 3, 16), TypeError, ("float32", "int64")),
    ("chosen's rank", lambda: fp8fn.sort_tokens(LAYOUT[0], 3, 16), ValueError, ("(48,)", "(T, top_k)")),
    ("no experts", lambda: fp8fn.sort_tokens(LAYOUT[0][None], 0, 16), ValueError, ("num_experts=0",)),
    ("no tile", lambda: fp8fn.sort_tokens(LAYOUT[0][None], 3, 0), ValueError, ("block_m=0",)),
]


@pytest.mark.parametrize(("call", "error", "words"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors(call: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def test_a_device_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe.targets, "target_of", lambda device: Target("cuda", 80, 32))
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        moe.moe_gemm_kernel(A.data, A.scale, A.block, W.data, W.scale, W.block, *LAYOUT, 2, 2)
