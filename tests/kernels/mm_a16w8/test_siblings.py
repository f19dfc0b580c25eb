"""Products of a few rows by two or three FP8 weights in one launch of `a16w8_tiles.cu`, beside those of one each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ScaledTensor
from fp8fn.ops import sibling_products as op
from fp8fn.ops.cuda.gemm import a16w8_tiles
from fp8fn.ops.cuda.gemm.a16w8_tiles import A16W8TilesConfig, accepts_beside
from fp8fn.ops.cuda.gemm.parts_a16w8 import untuned
from fp8fn.ops.operands import Beside, Quantized, WeightProduct
from fp8fn.ops.targets import GFX942, SM90, Target
from fp8fn.ops.tuning.weight import WeightProblem
from support.accuracy import snr
from support.compilers import assert_well_compiled, needs_nvrtc
from support.configs import WEIGHT_TILES, WEIGHT_TILES_HELD
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.weights import BLOCKS, by_block, exact, on_gpu, operand, weight
from support.products import planned, quantized, weight_product

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONFIGS: Final = (*WEIGHT_TILES, *WEIGHT_TILES_HELD)
# Columns of the weights: of q, k and v; more than a tile, less and one; the first one of a tile, or less.
WIDTHS: Final = ((256, 64, 64), (130, 7, 200), (64, 128), (3, 70), (129, 1, 1))
# K, and the columns of sibling products of some models.
MODELS: Final = (
    (4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (2048, (2048, 512, 512)), (3584, (3584, 512, 512)),
    (896, (4864, 4864)),
)  # fmt: skip


def of_linear(k: int, n: int, block: tuple[int, int], dtype: torch.dtype = E4M3) -> ScaledTensor:
    return as_of_linear(operand(k, n, block, dtype=dtype))


def as_of_linear(w: ScaledTensor) -> ScaledTensor:
    """With scales that lie as those of the transpose of `(N, K)`: their strides do not depend on N."""
    return ScaledTensor(w.data, w.scale.mT.contiguous().mT, w.block)


def launched(
    x: Tensor, weights: list[ScaledTensor], config: A16W8TilesConfig | None = None, *, constant: bool = False,
    backwards: bool = False, biases: list[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Each product between two guards, in memory that was NaN before; on the CPU they are emulated."""
    memories = [torch.full((x.shape[0] * w.shape[-1] + 128,), 7.0, dtype=x.dtype, device=x.device) for w in weights]
    outs = [
        memory[64:-64].view(x.shape[0], w.shape[-1]).fill_(torch.nan)
        for memory, w in zip(memories, weights, strict=True)
    ]
    first, *beside = map(Beside, map(quantized, weights), biases or [None] * len(weights), outs)
    given = weight_product(x, weights[0], outs[0], bias=first.bias, beside=tuple(beside), constant=constant)
    (launch,) = a16w8_tiles.plan(given, config or a16w8_tiles.configure(given))
    if x.device.type == "cpu":
        emulate(launch, backwards=backwards)
    else:
        torch.cuda.synchronize()
        launch.run()
    for memory in memories:
        assert (memory[:64] == 7.0).all()
        assert (memory[-64:] == 7.0).all()
    return outs


@needs_compiler
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_bits_are_those_of_products_alone(config: A16W8TilesConfig) -> None:
    k = config.STAGES * config.CLUSTER * 128 if config.HELD else 1152
    for m, widths, dtype, fp8, block in (
        (5, WIDTHS[0], BF16, E4M3, BLOCKS[0]), (13, WIDTHS[1], FP16, E5M2, (128, 1)),
        (1, WIDTHS[3], BF16, E5M2, (-1, 1)), (9, WIDTHS[4], FP16, E4M3, BLOCKS[0]),
    ):  # fmt: skip
        x, weights = torch.randn(m, k).to(dtype), [of_linear(k, n, block, fp8) for n in widths]
        for constant in (False, True):
            each = config if constant or not config.HELD else replace(config, READY=0)
            found = launched(x, weights, each, constant=constant, backwards=constant)
            alone = [launched(x, [w], each, constant=constant)[0] for w in weights]
            assert all(map(torch.equal, found, alone))
            assert all(snr(out, exact(x, w)) > 45 for out, w in zip(found, weights, strict=True))


@needs_compiler
@by_block
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_default_configuration(widths: tuple[int, ...], block: tuple[int, int]) -> None:
    """Also of a K that ends within a K tile."""
    for m, k, constant in ((1, 256, True), (8, 400, False), (16, 272, True)):
        x, weights = torch.randn(m, k).bfloat16(), [of_linear(k, n, block) for n in widths]
        found = launched(x, weights, constant=constant)
        assert all(snr(out, exact(x, w)) > 45 for out, w in zip(found, weights, strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_each_product_has_its_bias(dtype: torch.dtype) -> None:
    x, weights = torch.randn(4, 256).bfloat16(), [of_linear(256, n, (128, 128)) for n in WIDTHS[1]]
    biases = [torch.randn(n).to(dtype) for n in WIDTHS[1]]
    for config in (None, CONFIGS[1]):
        found = launched(x, weights, config, biases=biases, constant=config is None)
        assert all(snr(out, exact(x, w, b)) > 45 for out, w, b in zip(found, weights, biases, strict=True))


@needs_compiler
@pytest.mark.parametrize(
    ("k", "block"), [(256, (-1, 1)), (256, (-1, -1)), (128, (128, 1)), (128, (128, 128)), (256, (128, 128))], ids=str
)
def test_the_stride_of_one_scale_does_not_matter(k: int, block: tuple[int, int]) -> None:
    """The scales of channels lie in a row `(1, N)`, whose stride along K is N."""
    x, weights = torch.randn(9, k).bfloat16(), []
    for n in (7, 130, 200):
        w = of_linear(k, n, block)
        steps = [n if size == 1 else step for size, step in zip(w.scale.shape, w.scale.stride(), strict=True)]
        scale = torch.empty_strided(w.scale.shape, steps).copy_(w.scale)
        weights.append(ScaledTensor(w.data, scale, w.block))
    assert len({w.scale.stride() for w in weights}) > 1
    product = weight_product(x, weights[0], x.new_empty(9, 7), target=SM90)
    beside = tuple(Beside(quantized(w), None, x.new_empty(9, w.shape[-1])) for w in weights[1:])
    assert accepts_beside(replace(product, beside=beside)) is None
    assert all(snr(out, exact(x, w)) > 45 for out, w in zip(launched(x, weights), weights, strict=True))


@needs_compiler
def test_what_is_not_finite_stays_in_its_product() -> None:
    x, weights = torch.randn(4, 256).bfloat16(), [of_linear(256, n, (128, 128)) for n in WIDTHS[0]]
    clean = launched(x, weights)
    weights[1].data.view(torch.uint8)[199, 40] = 0x7F
    found = launched(x, weights)
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[2], clean[2])
    assert found[1].isnan().all(0).nonzero().tolist() == [[40]]
    x[2, 7] = torch.nan
    assert [out.isnan().all(1).tolist() for out in launched(x, weights)] == [[False, False, True, False]] * 3


@needs_compiler
def test_the_op_keeps_its_call_and_takes_pointers_in_order() -> None:
    """On a second call nothing is planned: the launch of the first takes the new tensors."""
    for count in (2, 3):
        with hopper_on_cpu() as launches:
            for constant in (False, True, False, True):
                x = torch.randn(3, 256).bfloat16()
                weights = [of_linear(256, n, (128, 128)) for n in WIDTHS[0][:count]]
                biases = [torch.randn(n) for n in WIDTHS[0][:count]]
                parts = [w.data for w in weights], [w.scale for w in weights], biases
                found = op.mm_a16w8_siblings_kernel(x, *parts, (128, 128), constant)
                expected = op.mm_a16w8_siblings_reference(x, *parts, (128, 128))
                assert [out.dtype for out in found] == [BF16] * count
                assert all(map(lambda a, b: snr(a, b) > 45, found, expected))
            assert [launch.name for launch in launches] == ["a16w8_tiles"] * 2
            assert [launch.options["W_CONSTANT"] for launch in launches] == [0, 1]


def given(**changes: Any) -> dict[str, Any]:
    weights = [weight(256, n, (128, 128)) for n in (64, 32)]
    whole = {"x": torch.randn(2, 256).bfloat16(), "w": [w.data for w in weights], "w_scale": [w.scale for w in weights]}
    return {**whole, "bias": [None, None], "w_block": (128, 128), **changes}


def test_opcheck(fp8_opcheck: Callable[..., dict[str, str]]) -> None:
    for changes in ({}, {"constant": True}, {"bias": [torch.randn(64), torch.randn(32)]}):
        found = fp8_opcheck(torch.ops.fp8fn.mm_a16w8_siblings.default, (), given(**changes))
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"w_scale": []}, ValueError, "2 w, 0 w_scale and 2 bias; pass two or three of each"),
        ({"bias": []}, ValueError, "2 w, 2 w_scale and 0 bias; pass two or three of each"),
        ({"w": [], "w_scale": [], "bias": []}, ValueError, "0 w, 0 w_scale and 0 bias; pass two or three of each"),
        ({"bias": [None, torch.zeros(64)]}, ValueError, r"bias\[1\] has shape \(64,\); it must be \(32,\)"),
        ({"x": torch.empty(2, 2, 256)}, ValueError, r"x has shape \(2, 2, 256\); it must be \(M, K\)"),
        ({"x": torch.empty(2, 128)}, ValueError, r"has K=128 and w \(256, 64\) has K=256"),
        ({"x": torch.empty(2, 256, dtype=torch.int8)}, TypeError, "x has dtype torch.int8"),
        ({"x": torch.empty(2, 256, device="meta")}, ValueError, "x is on meta and w on cpu"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        torch.ops.fp8fn.mm_a16w8_siblings(**given(**changes))


def test_no_kernel_means_one_op_each() -> None:
    x, w, w_scale, _, block = given().values()
    bias = torch.randn(64)
    tensors = (x, w[0], w_scale[0], bias, w[1], w_scale[1], None, None, None, None)
    found = op.MM_A16W8_SIBLINGS(tensors, (block, False))
    for out, *each, row in zip(found, w, w_scale, (bias, None), strict=True):
        assert torch.equal(out, torch.ops.fp8fn.mm_a16w8(x, *each, block, row))


def test_what_one_launch_takes() -> None:
    x = torch.empty(4, 256, dtype=BF16, device="meta")

    def reason(
        *weights: ScaledTensor, rows: int = 4, target: Target = SM90, biases: tuple[Tensor | None, ...] = ()
    ) -> str | None:
        each = [quantized(w) for w in weights]
        rows_of_x = torch.empty(rows, weights[0].shape[0], dtype=BF16, device="meta")
        return op.serves_siblings(rows_of_x, each, biases or [None] * len(each), target)

    first, second = (of_linear(256, n, (128, 128)).to("meta") for n in (70, 3))
    assert reason(first, second) is None
    assert reason(first, second, rows=17) == "K=256 is short; w_second: x has 17 rows, more than 16"
    large = of_linear(4096, 1536, (128, 128)).to("meta")
    assert reason(large, large, rows=17) is None
    assert reason(large, large, rows=768) is None
    assert "769 rows" in str(reason(large, large, rows=769))
    # Tiles in 16 bits would be faster by all columns at once, but not by those of one weight after the other.
    assert "estimated" in str(untuned(WeightProblem(400, 3 * 1536, 4096).product()))
    assert reason(large, large, large, rows=400) is None
    assert "has no kernel on gfx942" in (reason(first, second, target=GFX942) or "")
    other = of_linear(256, 70, (128, 1)).to("meta")
    assert reason(first, second, other) == "w and w_third differ in block or type"
    wide = operand(256, 200, (128, 128)).to("meta")
    assert reason(first, wide) == f"the scales of the weights have strides (1, 2) and {wide.scale.stride()}"
    narrow = [operand(256, n, (128, 128)).to("meta") for n in (3, 200, 600)]
    assert "the scales of the weights have strides" in (reason(*narrow) or "")
    row = torch.empty(70, device="meta")
    assert reason(first, second, biases=(row, row[:3])) is None
    for other in (None, row[:6:2], row[:3].half()):
        found = reason(first, second, biases=(row, other))
        assert found == "the biases of w and w_second differ in type or stride, or one has none"
    lines = as_of_linear(operand(256, 64, (128, 128), contiguous="N")).to("meta")
    assert reason(first, lines) == "w_second: columns of w are not contiguous"
    product = weight_product(x, first, x.new_empty(4, 70), up=x)
    assert accepts_beside(product) == "its rows are computed"


def unwritten(m: int, k: int, widths: tuple[int, ...], *, constant: bool) -> WeightProduct:
    """As `nn.Linear` layers have their weights."""
    x = torch.empty(m, k, dtype=BF16, device="meta")
    weights = [
        Quantized(
            torch.empty(n, k, dtype=E4M3, device="meta").mT, torch.empty(-(-n // 128), -(-k // 128)).mT, (128, 128)
        )
        for n in widths
    ]
    first, *others = (Beside(w, None, x.new_empty(m, w.data.shape[1])) for w in weights)
    return WeightProduct(x=x, w=first.w, out=first.out, beside=tuple(others), target=SM90, constant=constant)


@needs_nvrtc
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("constant", [False, True])
def test_machine_code(m: int, constant: bool) -> None:
    for k, widths in MODELS:
        product = unwritten(m, k, widths, constant=constant)
        assert accepts_beside(product) is None
        launch = planned(a16w8_tiles, product)
        assert_well_compiled(launch.compile(verbose=True).log, launch.shared)


def test_x_that_fits_beside_each_weight_alone_is_refused() -> None:
    """Fewer blocks share K where there are more columns: q, k and v of Llama 405B, of 16 rows in float16."""
    product = unwritten(16, 16384, (16384, 1024, 1024), constant=False)
    x, weights = product.x.half(), [product.w, *(each.w for each in product.beside)]
    parts = [Beside(w, None, x.new_empty(16, w.data.shape[1])) for w in weights]
    each = [replace(product, x=x, w=part.w, out=part.out, beside=()) for part in parts]
    assert [a16w8_tiles.accepts(alone) for alone in each] == [None] * 3
    joint = replace(each[0], beside=tuple(parts[1:]))
    assert accepts_beside(joint) == "x of K=16384 does not fit into shared memory"


def test_the_configuration_is_that_of_all_columns() -> None:
    """Without stages that are held in registers, as one product of so many columns may have them."""
    for m, constant in ((1, True), (16, False)):
        joint = unwritten(m, 4096, (4096, 1024, 1024), constant=constant)
        assert a16w8_tiles.configure(joint) == a16w8_tiles.configure(unwritten(m, 4096, (6144,), constant=constant))
    alone, joint = (unwritten(8, 2048, widths, constant=True) for widths in ((3072,), (2048, 512, 512)))
    assert str(a16w8_tiles.configure(alone)) == "8x128 stages8 cluster2 resident1 held8 ready8"
    assert str(a16w8_tiles.configure(joint)) == "8x128 stages4 cluster4 resident2"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_division_of_the_work_on_a_gpu(config: A16W8TilesConfig, hopper: Target) -> None:
    k = config.STAGES * config.CLUSTER * 128 if config.HELD else 1152
    for m, widths, dtype in ((5, (272, 70, 3), BF16), (16, (1040, 128), FP16), (1, (64, 2048, 520), BF16)):
        operands = [on_gpu(m, n, k, (128, 128), x=dtype) for n in widths]
        x, weights = operands[0][0], [as_of_linear(w) for _, w in operands]
        for constant in (False, True):
            each = config if constant or not config.HELD else replace(config, READY=0)
            found = launched(x, weights, each, constant=constant)
            for out, w in zip(found, weights, strict=True):
                assert torch.equal(out, launched(x, [w], each, constant=constant)[0])
                assert snr(out, exact(x, w)) > 45


@pytest.mark.gpu
def test_the_shapes_of_models_on_a_gpu(hopper: Target) -> None:
    for k, widths in (
        (4096, (4096, 1024, 1024)),
        (4096, (14336, 14336)),
        (2048, (2048, 512, 512)),
        (3584, (3584, 512)),
    ):
        for m in (1, 5, 16, 17, 64, 300):
            operands = [on_gpu(m, n, k, (128, 128)) for n in widths]
            x, weights = operands[0][0], [as_of_linear(w) for _, w in operands]
            biases = [torch.randn(n, device="cuda", dtype=BF16) for n in widths]
            parts = [w.data for w in weights], [w.scale for w in weights], biases
            first = torch.ops.fp8fn.mm_a16w8_siblings(x, *parts, (128, 128))
            assert all(snr(out, exact(x, w, b)) > 45 for out, w, b in zip(first, weights, biases, strict=True))
            for _ in range(100):
                assert all(map(torch.equal, torch.ops.fp8fn.mm_a16w8_siblings(x, *parts, (128, 128)), first))
