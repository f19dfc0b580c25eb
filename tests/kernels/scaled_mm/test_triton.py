"""The Triton products, interpreted on the CPU, against the float64 product of the dequantized operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.layout import Block
from fp8fn.ops.targets import GFX942, SM89, SM90, SM100, SM120, Target
from fp8fn.ops.triton import scaled_mm, scaled_mm_tma
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.scaled_mm_tma import TmaConfig
from support.accuracy import relative_error
from support.operands.scaled import SMALL_TMA, Operands
from support.products import Parts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


PAIRS: tuple[tuple[Block, Block], ...] = (
    ((1, 128), (128, 128)), ((1, 128), (128, 1)), ((128, 128), (128, 1)), ((128, 128), (128, 128)),
    ((1, -1), (-1, 1)), ((-1, -1), (-1, -1)), ((1, -1), (-1, -1)), ((1, 128), (-1, 1)), ((1, -1), (128, 128)),
    ((-1, -1), (128, 1)),
)  # fmt: skip
MX_PAIRS: tuple[tuple[Block, Block], ...] = (
    ((1, 32), (32, 1)), ((1, 32), (128, 128)), ((1, 128), (32, 1)), ((1, 32), (-1, 1)),
)  # fmt: skip


@pytest.mark.parametrize(("a_block", "b_block"), PAIRS + MX_PAIRS, ids=str)
@pytest.mark.parametrize(("a_contiguous", "b_contiguous"), [("K", "K"), ("K", "N"), ("M", "N"), ("M", "K")])
def test_pointer_blocks_and_layouts(a_block: Block, b_block: Block, a_contiguous: str, b_contiguous: str) -> None:
    operands = Operands(70, 130, 300, a_block, b_block, a_contiguous=a_contiguous, b_contiguous=b_contiguous)
    assert relative_error(operands.product(), operands.expected()) < 1e-6


@pytest.mark.parametrize(("a_block", "b_block"), PAIRS, ids=str)
def test_tma_blocks(a_block: Block, b_block: Block) -> None:
    operands = Operands(70, 130, 300, a_block, b_block)
    assert relative_error(operands.product("tma"), operands.expected()) < 1e-6


@pytest.mark.parametrize(("a_block", "b_block"), PAIRS, ids=str)
@pytest.mark.parametrize(("a_contiguous", "b_contiguous"), [("K", "N"), ("M", "N"), ("M", "K")])
def test_tma_layouts(a_block: Block, b_block: Block, a_contiguous: str, b_contiguous: str) -> None:
    """As on sm100, whose matrix instruction reads operands along either axis."""
    operands = Operands(70, 130, 300, a_block, b_block, a_contiguous=a_contiguous, b_contiguous=b_contiguous)
    assert relative_error(operands.product("tma", target=SM100), operands.expected()) < 1e-6


@pytest.mark.parametrize(
    "config",
    [
        *scaled_mm_tma.candidates(SM90, vectors=False),
        *scaled_mm_tma.candidates(SM100, vectors=False),
        *scaled_mm_tma.candidates(SM120, vectors=False),
        TmaConfig(PROMOTE=False),
        TmaConfig(BM=64, BN=256),
        TmaConfig(BM=256),
    ],
    ids=str,
)
@pytest.mark.parametrize(("a_block", "b_block"), [((1, 128), (128, 128)), ((1, -1), (-1, 1))], ids=str)
def test_tma_configurations(a_block: Block, b_block: Block, config: TmaConfig) -> None:
    operands = Operands(300, 264, 260, a_block, b_block, bias=torch.float32)
    assert relative_error(operands.product("tma", config=config), operands.expected()) < 1e-6


@pytest.mark.parametrize(
    "config", [GemmConfig(16, 64, 4, 2), GemmConfig(128, 128, 4, 2, HALVES=True), GemmConfig(256, 64, 8, 2)], ids=str
)
@pytest.mark.parametrize(("a_block", "b_block"), [((1, 128), (128, 128)), ((128, 128), (128, 1))], ids=str)
def test_pointer_configurations(a_block: Block, b_block: Block, config: GemmConfig) -> None:
    for shape in ((256, 256, 256), (150, 200, 200)):
        operands = Operands(*shape, a_block, b_block)
        assert relative_error(operands.product(config=config), operands.expected()) < 1e-6


@pytest.mark.parametrize("kernel", ["pointer", "tma"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 129), (64, 64, 128), (128, 256, 256), (129, 65, 31)], ids=str)
def test_shapes(shape: tuple[int, int, int], kernel: str) -> None:
    operands = Operands(*shape, (1, 128), (128, 128))
    assert relative_error(operands.product(kernel), operands.expected()) < 1e-6


@pytest.mark.parametrize("kernel", ["pointer", "tma"])
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_mixed_types(dtypes: tuple[torch.dtype, torch.dtype], kernel: str) -> None:
    operands = Operands(40, 70, 200, (1, 128), (128, 1), dtypes=dtypes)
    assert relative_error(operands.product(kernel), operands.expected()) < 1e-6


def test_fnuz_types() -> None:
    for dtypes in ((FNUZ[0], FNUZ[0]), FNUZ):
        operands = Operands(40, 70, 200, (1, 128), (128, 128), dtypes=dtypes)
        assert relative_error(operands.product(target=GFX942), operands.expected()) < 1e-6


@pytest.mark.parametrize("kernel", ["pointer", "tma"])
@pytest.mark.parametrize("scale", ["pow2", "e8m0"])
def test_scale_formats(scale: str, kernel: str) -> None:
    blocks: tuple[Block, Block] = ((1, 32), (32, 1)) if kernel == "pointer" else ((1, 128), (128, 128))
    operands = Operands(40, 70, 200, *blocks, scale=scale)
    assert relative_error(operands.product(kernel), operands.expected()) < 1e-6


@pytest.mark.parametrize("kernel", ["pointer", "tma"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bias_and_output_types(bias: torch.dtype | None, out_dtype: torch.dtype, kernel: str) -> None:
    operands = Operands(40, 72, 200, (1, 128), (128, 128), bias=bias)
    out = operands.product(kernel, out_dtype)
    torch.testing.assert_close(out, operands.expected().to(out_dtype), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias_alone_where_nothing_is_contracted(out_dtype: torch.dtype) -> None:
    for blocks in (((1, 128), (128, 128)), ((1, -1), (-1, 1))):
        operands = Operands(5, 70, 0, *blocks, bias=torch.float32)
        assert operands.bias is not None
        assert torch.equal(operands.product(out_dtype=out_dtype), operands.bias.to(out_dtype).expand(5, 70))
        assert torch.equal(Operands(5, 70, 0, *blocks).product(), torch.zeros(5, 70))


@pytest.mark.parametrize("batch", [(3, 3), (3, None), (None, 3), (1, 1), (None, 1)], ids=str)
@pytest.mark.parametrize(("a_block", "b_block"), [((1, 128), (128, 128)), ((1, -1), (-1, 1))], ids=str)
def test_batches(a_block: Block, b_block: Block, batch: tuple[int | None, int | None]) -> None:
    operands = Operands(40, 70, 200, a_block, b_block, batch=batch, bias=torch.float32)
    assert relative_error(operands.product(), operands.expected()) < 1e-6


BATCHES = [(3, 3), (3, None), (None, 3), (1, 1), (None, 1)]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(("a_block", "b_block"), [((1, 128), (128, 128)), ((1, 128), (128, 1)), ((1, -1), (-1, 1))])
def test_batches_by_tma(a_block: Block, b_block: Block, batch: tuple[int | None, int | None]) -> None:
    """The same bits as by pointers, from tiles of the same size; outputs are stored by TMA at 72 columns only."""
    for n, contiguous in ((70, ("K", "K")), (72, ("M", "N"))):
        axes = dict(zip(("a_contiguous", "b_contiguous"), contiguous, strict=True))
        operands = Operands(70, n, 300, a_block, b_block, batch=batch, bias=torch.float32, **axes)
        found = operands.product("tma", target=SM100)
        assert relative_error(found, operands.expected()) < 1e-6
        assert torch.equal(found, operands.product(target=SM100, config=GemmConfig(64, 64, 4, 2, GROUP=2)))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_nan_stays_in_its_matrix_of_a_batch(out_dtype: torch.dtype) -> None:
    """Boxes end at the edges of their matrix, in loads and in stores: the next one is NaN in all that it has."""
    for config in (SMALL_TMA, TmaConfig(BM=64, num_stages=2, SPLIT=True, FLATTEN=True, AHEAD=True)):
        operands = Operands(70, 72, 300, (1, 128), (128, 128), batch=(3, 3))
        clean = operands.product("tma", out_dtype, SM100, config)
        for x in (operands.a, operands.b):
            x[1].copy_(torch.full((), torch.nan).to(x.dtype))
        for scale in (operands.a_scale, operands.b_scale):
            scale[1] = torch.nan
        found = operands.product("tma", out_dtype, SM100, config)
        assert found[1].isnan().all()
        assert torch.equal(found[::2], clean[::2])


@pytest.mark.parametrize("kernel", ["pointer", "tma"])
@pytest.mark.parametrize(("a_block", "b_block"), [((1, 128), (128, 1)), ((1, -1), (-1, 1))], ids=str)
def test_a_nan_stays_in_its_row_and_column(a_block: Block, b_block: Block, kernel: str) -> None:
    operands = Operands(70, 130, 300, a_block, b_block)
    operands.a.view(torch.uint8)[3, 299] = 0x7F
    operands.b_scale[..., 5] = float("nan")
    clean = Operands(70, 130, 300, a_block, b_block)
    out, expected = operands.product(kernel), clean.product(kernel)
    nan = torch.zeros(70, 130, dtype=torch.bool)
    nan[3, :] = True
    nan[:, 5] = True
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan], expected[~nan])


@pytest.mark.parametrize("kernel", ["pointer", "tma"])
def test_what_lies_beyond_the_edges_is_never_read_into_the_result(kernel: str) -> None:
    operands = Operands(70, 130, 300, (1, 128), (128, 1))
    for x in (operands.a, operands.b.mT):
        whole = x.as_strided((x.shape[0], x.stride(0)), x.stride())
        whole.view(torch.uint8)[:, x.shape[1] :] = 0x7F
    scales = torch.full((operands.a_scale.shape[1], 128), float("nan"))
    scales[:, :70] = operands.a_scale.mT
    operands.a_scale = scales[:, :70].mT
    assert relative_error(operands.product(kernel), operands.expected()) < 1e-6


def test_output_without_tma_alignment_is_stored_through_pointers() -> None:
    operands = Operands(70, 130, 300, (1, 128), (128, 128))
    wide = torch.zeros(70, 131, dtype=torch.bfloat16)
    for out in (wide[:, :130], wide[:, 1:]):
        flat = Parts(
            operands.a, operands.a_scale, (1, 128), operands.b, operands.b_scale, (128, 128), None, out
        )  # fmt: skip
        (launch,) = scaled_mm_tma.plan_scaled_mm_tma(flat.product(SM90), SMALL_TMA)
        assert launch.constexprs["OUT_TMA"] is False
        launch.interpret()
        torch.testing.assert_close(out, operands.expected().bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(("a_block", "b_block"), [((128, 1), (128, 128)), ((1, 128), (1, 128))], ids=str)
def test_a_scale_per_element_of_k_is_refused_with_the_remedy(a_block: Block, b_block: Block) -> None:
    operands = Operands(40, 70, 200, a_block, b_block)
    with pytest.raises(ValueError, match=r"along K: quantize (a in blocks \(1, 128\)|b in blocks \(128, 1\))"):
        operands.product()


def meta(m: int, n: int, k: int) -> dict[str, Any]:
    a = torch.empty(m, k, dtype=E4M3, device="meta")
    b = torch.empty(n, k, dtype=E4M3, device="meta").mT
    a_scale = torch.empty(k // 128, m, device="meta").mT
    b_scale = torch.empty(n // 128, k // 128, device="meta").mT
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    return {
        "a": a, "a_scale": a_scale, "a_block": (1, 128), "b": b, "b_scale": b_scale, "b_block": (128, 128),
        "bias": None, "out": out,
    }  # fmt: skip


def test_offsets_are_wide_only_where_they_must_be() -> None:
    for planner in (scaled_mm.plan_scaled_mm, scaled_mm_tma.plan_scaled_mm_tma):
        assert planner(Parts(**meta(8192, 8192, 8192)).product(SM90))[0].constexprs["WIDE"] is False
        # Llama-3.1-405B's gate_up at 32768 tokens: the output has 3.5e9 elements.
        assert planner(Parts(**meta(32768, 106496, 16384)).product(SM90))[0].constexprs["WIDE"] is True
    deep = Parts(**meta(128, 128, 2**25)).product(SM89)
    assert scaled_mm.plan_scaled_mm(deep)[0].constexprs["WIDE"] is True


@pytest.mark.parametrize("kernel", ["pointer", "tma"])
def test_wide_offsets_address_the_same_elements(kernel: str) -> None:
    operands = Operands(70, 131, 300, (1, 128), (128, 1))
    out = operands.product(kernel, torch.bfloat16, wide=True)
    torch.testing.assert_close(out, operands.expected().bfloat16(), rtol=2**-7, atol=1e-3)
    batched = Operands(70, 71, 300, (1, 128), (128, 128), batch=(2, None))
    found = batched.product(kernel, target=SM100, wide=True)
    assert relative_error(found, batched.expected()) < 1e-6


def test_what_tma_cannot_take_is_named() -> None:
    good = meta(256, 256, 256)
    a, b, out = good["a"], good["b"], good["out"]

    def reason(target: Target = SM90, **changed: Any) -> str | None:
        return scaled_mm_tma.accepts(Parts(**{**good, **changed}).product(target))

    assert reason() is None
    assert reason(target=SM100) is None
    assert reason(target=SM120) is None
    assert reason(target=SM89) == "sm89 is none of sm90, sm100, sm103, sm120"
    row_major = torch.empty_like(out, dtype=E4M3)
    for target in (SM90, SM120):
        assert reason(target, b=row_major) == "b.mT has stride 256 along its contiguous axis, not 1"
    assert reason(SM100, b=row_major) is None
    assert reason(SM100, b=row_major, a=row_major.mT) is None
    assert reason(SM100, b=row_major[:, ::2]) == "b.mT has stride 256 along its contiguous axis, not 1"
    assert reason(a=a[:, 1:], b=b[1:]) == "a starts at an address that is no multiple of 16"
    assert reason(a=a[:, :250].contiguous(), b=b[:250]) == "a has a stride of 250 bytes, no multiple of 16"
    assert reason(a=a[:64], out=out[:64]) == "M is 64, below 65"
    assert reason(a=a[:, :0], b=b[:0]) == "K is 0"
    assert reason(a_block=(1, 32)) == "blocks (1, 32) and (128, 128): a scale must hold for 128 or all elements along K"
    batch = {"a": a.repeat(2, 1, 1), "out": out.repeat(2, 1, 1)}
    assert reason(**batch) == "a batch on sm90 would spill 8 registers in partial tiles"
    for target in (SM100, SM120):
        assert reason(target, **batch) is None
        assert reason(target, a=a.expand(2, 256, 256), out=batch["out"]) == (
            "a has a stride of 0 bytes, no multiple of 16"
        )
    assert reason(a=a[:1].expand(256, 256)) == "a has a stride of 0 bytes, no multiple of 16"
    assert reason(a=a.as_strided(a.shape, (16, 1))) == "a has lines of 256 elements at a stride of 16"
