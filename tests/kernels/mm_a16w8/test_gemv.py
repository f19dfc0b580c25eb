"""Rows by an FP8 weight in CUDA C++: emulated on the CPU, as machine code, and through the op on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ScaledTensor
from fp8fn.bench.shapes import BATCHED, DECODE
from fp8fn.ops import mm_a16w8 as op
from fp8fn.ops import reference
from fp8fn.ops.cuda.gemm import gemv_a16w8
from fp8fn.ops.cuda.gemm import mm_a16w8 as many
from fp8fn.ops.cuda.gemm.gemv_a16w8 import GemvConfig, accepts, choose_config
from fp8fn.ops.cuda.operands import SCALES
from fp8fn.ops.cuda.runtime import call_cache
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CompilationError
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import GFX942, SM89, SM100, Target, target_of
from fp8fn.ops.tuning.weight import WeightProblem
from support.accuracy import snr
from support.compilers import assert_well_compiled, instructions, needs_nvrtc
from support.configs import GEMVS, MANY, ROW_MAJOR
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.gpu import FEW
from support.operands.weights import (
    BATCHES,
    BLOCKS,
    POISON,
    assert_right,
    by_block,
    exact,
    on_gpu,
    operand,
    operands,
    weight,
)
from support.products import entry_without_parts, planned, weight_product, with_parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

plan = partial(planned, gemv_a16w8)
plan_many = partial(planned, many)

by_layout = pytest.mark.parametrize("contiguous", ["K", "N"])


def emulated(
    x: Tensor, w: ScaledTensor, bias: Tensor | None = None, config: GemvConfig | None = None, *,
    out: torch.dtype = FP32, backwards: bool = False,
) -> Tensor:  # fmt: skip
    """Into memory that was 7 before; what lies behind it must be as it was."""
    shape = (*(x.shape[:-2] or w.shape[:-2]), x.shape[-2], w.shape[-1])
    memory = torch.full((torch.Size(shape).numel() + 64,), 7.0, dtype=out)
    found = memory[:-64].view(shape)
    given = weight_product(x, w, found, bias=bias)
    assert accepts(given) is None
    emulate(plan(given, config), backwards=backwards)
    assert (memory[-64:] == 7.0).all()
    return found


@needs_compiler
@by_layout
@by_block
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_blocks_types_and_layouts(dtype: torch.dtype, fp8: torch.dtype, block: Block, contiguous: str) -> None:
    """N and K ragged, M of one and of two groups of eight rows."""
    for m, backwards in ((3, False), (11, True)):
        x, w = torch.randn(m, 300).to(dtype), operand(300, 150, block, contiguous=contiguous, dtype=fp8)
        assert_right(emulated(x, w, backwards=backwards), x, w)


@needs_compiler
@by_layout
@pytest.mark.parametrize("m", range(1, 17))
def test_every_number_of_rows(m: int, contiguous: str) -> None:
    x, w = torch.randn(m, 128).bfloat16(), operand(128, 48, (128, 128), contiguous=contiguous)
    assert_right(emulated(x, w), x, w)


@needs_compiler
@by_layout
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 40), (17, 15), (16, 16), (130, 129), (40, 520), (300, 64)])
def test_ragged_shapes(n: int, k: int, contiguous: str) -> None:
    for m, block in ((1, (128, 128)), (9, (128, 1)), (2, (-1, 1))):
        x, w = torch.randn(m, k).bfloat16(), operand(k, n, block, contiguous=contiguous)
        assert_right(emulated(x, w), x, w)


@needs_compiler
@pytest.mark.parametrize(("contiguous", "config"), [("K", c) for c in GEMVS] + [("N", c) for c in ROW_MAJOR], ids=str)
def test_every_division_of_the_work(contiguous: str, config: GemvConfig) -> None:
    """Warps and blocks along K with much, little and nothing to do; rows in several tiles."""
    for m, n, k, block in ((5, 70, 700, (128, 128)), (19, 33, 200, (128, 1)), (70, 20, 90, (-1, 1))):
        x, w = torch.randn(m, k).half(), operand(k, n, block, contiguous=contiguous)
        shape = m, n
        found, launches = torch.empty(2, *shape), []
        for out, backwards in zip(found, (False, True), strict=True):
            launches.append(plan(weight_product(x, w, out), config))
            emulate(launches[-1], backwards=backwards)
        assert_right(found[0], x, w)
        assert torch.equal(found[0], found[1])


@needs_compiler
@by_layout
def test_x_in_chunks(contiguous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An x too large for shared memory is read part of K after part."""
    monkeypatch.setattr("fp8fn.ops.cuda.gemm.gemv_a16w8.SHARED_LIMIT", 12 << 10)
    for m, config in ((7, GemvConfig(8, 1, 1, 4, 2, 2, 1)), (16, GemvConfig(16, 1, 2, 2, 4, 1, 1))):
        x, w = torch.randn(m, 1500).bfloat16(), operand(1500, 40, (128, 128), contiguous=contiguous)
        if contiguous == "N":
            config = GemvConfig(config.ROWS, 8, config.WARPS_N, config.WARPS_K, 1, config.CLUSTER, 1)
        assert_right(emulated(x, w, config=config), x, w)


VIEWS: dict[str, tuple[Any, ...]] = {
    "transposed": (lambda x: x.mT.contiguous().mT,),
    "every second element": (lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2],),
    "unaligned": (lambda x: torch.cat([x[..., :3] * torch.nan, x], -1)[..., 3:],),
    "aligned rows among others": (lambda x: torch.nn.functional.pad(x, (0, 16), value=torch.nan)[..., :-16],),
    "one row for all": (lambda x: x[..., :1, :].expand(x.shape),),
}


@needs_compiler
@pytest.mark.parametrize("view", VIEWS)
def test_strides_of_x_and_of_scales(view: str) -> None:
    for k in (136, 203):
        x, w = VIEWS[view][0](torch.randn(6, k).bfloat16()), operand(k, 40, (128, 1))
        scale = torch.stack([w.scale.mT] * 3, -1)[..., 1].mT
        assert scale.stride() != w.scale.stride()
        strided = ScaledTensor(w.data, scale, w.block)
        assert_right(emulated(x, strided), x, w)


@needs_compiler
@by_layout
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
def test_outputs_and_biases(out: torch.dtype, contiguous: str) -> None:
    """Each output is the sum rounded once."""
    x, w = torch.randn(5, 192).bfloat16(), operand(192, 70, (128, 128), contiguous=contiguous)
    for bias in (None, torch.randn(70), torch.randn(140).bfloat16()[::2], torch.randn(70).half()):
        wide, found = (emulated(x, w, bias, out=dtype) for dtype in (FP32, out))
        assert_right(wide, x, w, bias)
        assert torch.equal(found, wide.to(out))


@needs_compiler
@by_layout
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_batches(batch: tuple[tuple[int, ...], tuple[int, ...]], contiguous: str) -> None:
    (size,) = batch[0] or batch[1]
    for block, m in (((128, 128), 4), ((-1, 1), 9)):
        x, w = torch.randn(*batch[0], m, 140).bfloat16(), operand(140, 40, block, contiguous=contiguous, batch=batch[1])
        for bias in (None, torch.randn(40), torch.randn(size, 40).half(), torch.randn(size, 1, 40)):
            for view in (x, x.movedim(0, -2).contiguous().movedim(-2, 0)):
                assert_right(emulated(view, w, bias), x, w, bias)


@needs_compiler
@by_layout
@by_block
def test_what_is_not_finite_stays_in_its_rows_and_columns(block: Block, contiguous: str) -> None:
    for fp8 in (E4M3, E5M2):
        x, w = torch.randn(9, 200).bfloat16(), operand(200, 140, block, contiguous=contiguous, dtype=fp8)
        x[3, 199], x[8, 0] = torch.nan, torch.inf
        w.data.view(torch.uint8)[199, 130] = POISON[fp8]
        w.scale[-1, -1] = torch.inf if block[1] == 128 else w.scale[-1, -1]
        finite = emulated(x, w).isfinite()
        touched = torch.zeros(9, 140, dtype=torch.bool)
        touched[[3, 8]] = True
        touched[:, 128 if block[1] == 128 else 130 : None if block[1] == 128 else 131] = True
        assert torch.equal(~finite, touched)


@needs_compiler
@by_layout
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_every_fp8_value(fp8: torch.dtype, contiguous: str) -> None:
    """All 256 by an identity, in a row of which the others are finite."""
    data = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    data = (data.mT.contiguous().mT if contiguous == "K" else data).view(fp8)
    finite = data.float().isfinite()
    clean = torch.where(finite, data.float(), 0.0).to(fp8)
    clean = clean.mT.contiguous().mT if contiguous == "K" else clean
    for dtype in (BF16, FP16):
        x = torch.eye(16, dtype=dtype)
        scale = torch.full((1, 1), 0.25)
        found = emulated(x, ScaledTensor(clean, scale, (128, 128)))
        assert torch.equal(found[finite], data.float()[finite] / 4)
        found = emulated(x, ScaledTensor(data, scale, (128, 128)))
        assert not found[:, (~finite).any(0)].isfinite().any()


def many_rows(
    x: Tensor, w: ScaledTensor, bias: Tensor | None = None, config: many.ManyRowsConfig | None = None, *,
    target: Target = FEW, backwards: bool = False, constant: bool = False,
) -> Tensor:  # fmt: skip
    """Their product between two guards, in memory that was NaN before; on the CPU it is emulated."""
    n = w.shape[-1]
    memory = torch.full((x[..., 0].numel() * n + 1024,), 7.0, dtype=x.dtype, device=x.device)
    out = memory[512:-512].view(*x.shape[:-1], n).fill_(torch.nan)
    given = weight_product(x, w, out, target, bias=bias, constant=constant)
    assert many.accepts(given) is None
    launch = plan_many(given, config)
    if x.device.type == "cpu":
        emulate(launch, backwards=backwards)
    else:
        launch.run()
    assert (memory[:512] == 7.0).all()
    assert (memory[-512:] == 7.0).all()
    return out


@needs_compiler
@pytest.mark.parametrize("config", [*MANY, many.ManyRowsConfig(64, 1, 3, K_PARTS=2, RESIDENT=1)], ids=str)
def test_every_division_of_many_rows(config: many.ManyRowsConfig) -> None:
    """Tiles at the edges, several for a block, of a K that is no multiple of 128; rounded to 16 bits, hence the bar.

    Tiles of 256 rows of bfloat16 or more round the weight too, if its blocks are squares.
    """
    for x_dtype, fp8, block, backwards in ((BF16, E4M3, (128, 128), False), (FP16, E5M2, (-1, 1), True)):
        for m, n, k, batch in ((config.BM + 9, config.BN + 8, 272, ()), (33, 72, 128, (2,))):
            x, w = torch.randn(*batch, m, k).to(x_dtype), operand(k, n, block, dtype=fp8, batch=batch)
            bias = torch.randn(n)
            out = many_rows(x, w, bias, config, backwards=backwards, constant=backwards)
            bar = 68 if x_dtype == FP16 else 55 if k <= 128 or config.BM < 256 else 50
            assert snr(out, exact(x, w, bias)) > bar, (m, n, k)


def assert_any_scale(config: many.ManyRowsConfig, fp8: torch.dtype, dtype: torch.dtype, **place: Any) -> None:
    """Columns with the scale of one k-block alone and the others 0, and with scales that fall, rise or change sign."""
    blocks, alone = 5, (1e-5, 3e-3, 1.0, 300.0, *((3e-39, 1e-34, 1e-12, 1e12, 1e28) if dtype == BF16 else ()))
    columns = []
    for size in alone:
        columns += [[size if i == j else 0.0 for i in range(blocks)] for j in range(blocks)]
    for first, last in ((1e-4, 1e2), (1e2, 1e-4), (1e-5, 1e-4), (-3.0, 7.0)):
        columns += [torch.linspace(first, last, blocks).tolist(), [first, last, first, last, last]]
    for least in (1e-40, -2e-38, 1e-30):  # beside scales that outweigh them
        columns += [[1.0, least, 0.0, 1.0, least], [least, least, 1.0, least, 1.0]]
        columns += [[1e30, least, 0.0, least, 1e-45], [1e-45, 1e30, least, 0.0, 0.0]] * (dtype == BF16)
    columns += [[0.0] * blocks] * (-len(columns) % 8)
    w = operand(128 * blocks, len(columns), (128, 1), dtype=fp8)
    w = ScaledTensor(w.data, torch.tensor(columns).mT.contiguous(), (128, 1))
    x = (torch.randn(70, 128 * blocks) * (10 / torch.finfo(fp8).max if dtype == FP16 else 1)).to(dtype)
    device = place.pop("device", "cpu")
    found, expected = many_rows(x.to(device), w.to(device), config=config, **place).double().cpu(), exact(x, w)
    error = (found - expected).norm(dim=0) / expected.norm(dim=0).clamp(min=1e-45)
    assert found.isfinite().all()
    assert error.max() < 4e-3, error


of_any_scale = pytest.mark.parametrize(
    "config",
    [many.ManyRowsConfig(160), many.ManyRowsConfig(224, 1), many.ManyRowsConfig(64, 1, 4, K_PARTS=2, RESIDENT=1)],
    ids=str,
)


@needs_compiler
@of_any_scale
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_scales_of_any_size_among_many_rows(config: many.ManyRowsConfig, fp8: torch.dtype, dtype: torch.dtype) -> None:
    assert_any_scale(config, fp8, dtype)


@needs_compiler
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("config", [config for config in many._TIMES["VECTOR"] if config.BM > 128], ids=str)
def test_scales_of_columns_round_nothing(config: many.ManyRowsConfig, fp8: torch.dtype) -> None:
    """By a rounded weight the product has 53 dB. Scales reach up to the largest float32, where no weight would fit."""
    for power in (-110, 0, 112, 119, 127):
        x = (torch.randn(70, 304) * 2.0 ** max(-power - 12, -118)).to(BF16)
        w = operand(304, 24, (128, 1), dtype=fp8)
        w = ScaledTensor(w.data, torch.exp2(power + 0.9 * torch.rand_like(w.scale)), w.block)
        weight = w.data.double() * w.scale.double().repeat_interleave(128, 0)[:304]
        assert snr(many_rows(x, w, config=config), x.double() @ weight) > 55, power


@needs_compiler
@pytest.mark.parametrize("config", [many.ManyRowsConfig(64, 1, 2 * n, K_PARTS=2, RESIDENT=1) for n in (1, 2)], ids=str)
def test_two_parts_of_a_long_k(config: many.ManyRowsConfig) -> None:
    """An odd number of K tiles in stages that each part uses again and again."""
    for k, backwards in ((1152, False), (1296, True)):
        x, w = torch.randn(70, k).bfloat16(), operand(k, 72, (128, 1))
        assert snr(many_rows(x, w, config=config, backwards=backwards), exact(x, w)) > 55


@needs_nvrtc
def test_two_parts_of_k_have_stages_of_their_own() -> None:
    config = many.ManyRowsConfig(64, 1, 3, K_PARTS=2, RESIDENT=1)
    assert plan_many(operands(64, 512, 384), config).resources().spills == 0  # all of K is in flight
    with pytest.raises(CompilationError, match="two parts of K would meet in a stage"):
        plan_many(operands(64, 512, 385), config).compile()


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("config", [*many._TIMES["BLOCK"]], ids=str)
def test_each_k_tile_has_its_own_scale_in_every_tile_of_a_block(
    config: many.ManyRowsConfig, dtype: torch.dtype
) -> None:
    """Scales are loaded three times for each of two tiles, the second one by another weight of the batch."""
    k = 128 * 64 + 16
    w = operand(k, 72, (128, 128), batch=(2,))
    signs = torch.where(torch.rand_like(w.scale) < 0.5, -1.0, 1.0)
    w = ScaledTensor(w.data, w.scale * signs * torch.exp2(torch.rand_like(w.scale) - 0.5), w.block)
    x = torch.randn(2, 40, k).to(dtype)
    x[..., -16:] *= 8  # the last scale holds for 16 elements
    found = many_rows(x, w, config=config, target=replace(FEW, multiprocessors=1))
    weight = reference.dequantize(w.data, w.scale, w.block)
    if config.BM >= 256 and dtype == BF16:
        weight = weight.to(BF16)
    assert snr(found, x.double() @ weight.double()) > (55 if dtype == BF16 else 70)


@needs_compiler
@by_block
def test_what_is_not_finite_among_many_rows(block: Block) -> None:
    x, w = torch.randn(70, 304).bfloat16(), operand(304, 72, block)
    x[5, 303] = torch.nan
    w.data.view(torch.uint8)[303, 40] = 0x7F
    finite = many_rows(x, w).isfinite()
    touched = torch.zeros_like(finite)
    touched[5] = touched[:, 40] = True
    assert torch.equal(~finite, touched)


@needs_compiler
def test_the_op_keeps_its_call_and_takes_pointers_in_order() -> None:
    """On the second call nothing is planned: the launch of the first takes the new tensors."""
    for bias in (None, torch.randn(40)):
        with hopper_on_cpu() as launches:
            for _ in range(2):
                x, w = torch.randn(2, 5, 140).half(), operand(140, 40, (128, 1), batch=(2,))
                extra = () if bias is None else (torch.randn(40),)
                found = op.mm_a16w8_kernel(x, w.data, w.scale, w.block, *extra, out_dtype=FP32)
                assert_right(found, x, w, *extra)
            assert len(launches) == 1


@needs_compiler
def test_what_is_empty_is_no_launch() -> None:
    with hopper_on_cpu() as launches:
        for m, n, k in ((0, 32, 64), (4, 0, 64), (4, 32, 0)):
            w = weight(k, n, (128, 128))
            found = op.mm_a16w8_kernel(torch.randn(m, k).bfloat16(), w.data, w.scale, w.block)
            assert torch.equal(found, torch.zeros(m, n).bfloat16())
        assert launches == []


def test_what_is_refused() -> None:
    def refusal(change: dict[str, Any], **kwargs: Any) -> str | None:
        return accepts(with_parts(operands(**kwargs), **change))

    assert refusal({}) is None
    assert refusal({}, m=128) is None
    assert refusal({}, m=32, contiguous="N") is None
    expected = [
        ({}, {"m": 129}, "x has 129 rows a matrix, more than 128"),
        ({}, {"m": 33, "contiguous": "N"}, "x has 33 rows a matrix, more than 32"),
        ({}, {"x": FP32}, "not 16 bits"),
        ({}, {"block": (1, 128)}, r"blocks of \(1, 128\)"),
        ({}, {"k": 6150}, "w has a stride of 6150 bytes, no multiple of 16"),
        ({"target": SM100}, {}, "sm100 is not sm90"),
        ({"target": SM89}, {}, "sm89 is not sm90"),
        ({"target": GFX942}, {}, "gfx942 is not sm90"),
        ({"data": torch.empty(6144, 2 * 2304, dtype=E4M3, device="meta")[:, ::2]}, {}, "w has stride 2"),
        ({"data": torch.empty(6144, 2304, dtype=torch.float8_e4m3fnuz, device="meta")}, {}, "e4m3fnuz"),
        ({"scale": torch.empty(48, 18, dtype=torch.float8_e8m0fnu, device="meta")}, {}, "scales of torch.float8_e8m0"),
    ]  # fmt: skip
    for change, kwargs, message in expected:
        assert re.search(message, refusal(change, **kwargs) or ""), message
    assert "batch of 70000" in str(accepts(operands(m=1, n=16, k=16, batch=(70000,))))


def launches() -> Iterator[CudaLaunch]:
    """The kernels of the shapes that are measured, and of the other types, blocks and layouts of some."""
    for k, n in DECODE:
        for m in (1, 4, 16):
            yield plan(operands(m, n, k))
    for batch, m, n, k in BATCHED:
        if m <= 128:
            yield plan(operands(m, n, k, batch=(batch,)))
    for block in BLOCKS:
        for x, fp8 in ((BF16, E5M2), (FP16, E4M3)):
            for m in (1, 16, 32, 64):
                yield plan(operands(m, 2304, 6144, block, x=x, fp8=fp8, bias=FP32))
                if m <= 16:
                    yield plan(operands(m, 2304, 6144, block, contiguous="N", x=x, fp8=fp8))


@needs_nvrtc
def test_no_configuration_spills() -> None:
    for launch in {launch.kernel: launch for launch in launches()}.values():
        resources = launch.resources()
        assert resources.spills == 0, launch.describe()
        assert launch.shared <= 227 << 10


@needs_nvrtc
@by_layout
def test_weights_load_by_16_bytes_before_x_is_waited_for(contiguous: str, tmp_path: Path) -> None:
    launch = plan(operands(1, contiguous=contiguous))
    assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    wide = [i for i, text in enumerate(sass) if re.search(r"LDG\.E\.NA\.128", text)]
    waits = next(i for i, text in enumerate(sass) if "DEPBAR.LE" in text)
    in_flight = launch.options["UNROLL"] * (2 if contiguous == "K" else 8)
    assert len([i for i in wide if i < waits]) == in_flight
    assert len(wide) == 2 * in_flight
    assert any("F2FP.F16.E4M3.UNPACK_B" in text for text in sass)
    assert any("HMMA.16816.F32.BF16" in text for text in sass)


def test_the_default_configuration() -> None:
    """At the shapes of decoding each warp has something to do, and the rule gives what was the fastest on an H200."""
    for k, n in DECODE:
        for m in (1, 4, 16):
            chosen = choose_config(WeightProblem(m, n, k))
            rows, depth, width = chosen.ROWS, 64 * chosen.WARPS_K * chosen.CLUSTER, chosen.BN
            assert rows == (16 if m == 16 else 8)
            assert depth <= max(k, 64)
            assert width - 16 < n
    for (m, k, n), name in {
        (1, 6144, 2304): "8x16 warps1x8 unroll2 cluster2 resident2",
        (1, 2048, 6144): "8x16 warps1x8 unroll2 cluster1 resident2",
        (4, 6144, 2304): "8x64 warps4x2 unroll2 cluster8 resident3",
        (4, 6144, 1536): "8x32 warps2x4 unroll1 cluster8 resident3",
        (16, 6144, 1536): "16x64 warps4x2 unroll2 cluster8 resident2",
        (16, 2048, 6144): "16x128 warps8x1 unroll2 cluster4 resident2",
    }.items():
        assert str(choose_config(WeightProblem(m, n, k))) == name
    assert str(choose_config(WeightProblem(1, 512, 128, 128))) == "8x128 warps8x1 unroll1 cluster1 resident2"
    assert choose_config(WeightProblem(32, 512, 128, 128)).TILES == 2


def test_many_rows_take_tiles_for_all_multiprocessors() -> None:
    def choose(m: int, n: int, batches: int = 1) -> tuple[int, int, int]:
        config = many.choose_config(WeightProblem(m, n, 4096, batches))
        assert config.TURNS is not (config.RESIDENT > 0)
        return config.BM, config.BN, config.K_PARTS

    assert choose(320, 4096, 16) == choose(640, 28672) == (320, 128, 1)
    assert choose(4096, 4096) == choose(4096, 28672) == choose(4096, 4096, 16) == (256, 128, 1)
    assert choose(128, 28672) == choose(256, 6144) == choose(128, 512, 128) == choose(512, 2304) == (128, 128, 1)
    assert choose(64, 28672) == (64, 128, 1)
    assert choose(128, 6144) == choose(300, 2048) == (128, 64, 2)
    assert choose(64, 6144) == choose(33, 4096) == choose(200, 1024) == (64, 64, 2)
    assert choose(300, 3072) == (64, 128, 1)
    assert [choose(m, 4096)[0] for m in (513, 777, 897, 2600)] == [160, 224, 256, 224]
    assert [choose(m, 14336)[0] for m in (200, 300, 500, 650, 8192)] == [224, 320, 256, 224, 256]


def test_the_tile_whose_waves_take_the_least_time() -> None:
    """By the blocks of the weight: no tile that isn't the fastest one of its rows is chosen."""
    for block, heights in (
        ((128, 128), {64, 128, 160, 192, 224, 256, 288, 320}), ((128, 1), {64, 128, 192, 256, 320}),
        ((-1, 1), {64, 128, 160, 192, 224, 256, 288, 320}), ((-1, -1), {64, 128, 160, 192, 224, 256, 288, 320}),
    ):  # fmt: skip
        problems = [
            WeightProblem(m, n, 4096, block=block) for m in range(129, 4097, 16) for n in (1024, 2304, 4096, 28672)
        ]
        chosen = {problem: many.choose_config(problem) for problem in problems}
        assert {config.BM for config in chosen.values()} == heights
        for problem, config in chosen.items():
            times = {each: many._microseconds(problem, each) for each in many.candidates(problem) if each != config}
            assert many.estimate(problem) == many._microseconds(problem, config) <= min(times.values())


def test_a_short_k_is_in_flight_as_a_whole() -> None:
    """One k-block, or a few that two warpgroups share, have the tiles that were the fastest on an H200."""

    def choose(batches: int, m: int, n: int, k: int) -> tuple[int, int, int]:
        config = many.choose_config(WeightProblem(m, n, k, batches))
        return config.BM, config.BN, config.K_PARTS

    assert choose(16, 128, 512, 128) == choose(64, 128, 512, 128) == choose(128, 128, 512, 128) == (128, 64, 1)
    assert choose(32, 128, 512, 128) == choose(32, 64, 512, 128) == (64, 64, 1)
    assert choose(16, 128, 128, 512) == choose(32, 128, 128, 512) == choose(64, 48, 128, 512) == (64, 64, 2)
    assert choose(16, 64, 128, 512) == (32, 64, 2)
    assert choose(64, 128, 128, 512) == (128, 64, 2)
    assert choose(128, 128, 128, 512) == (128, 128, 1)
    assert choose(128, 64, 128, 512) == (64, 64, 2)
    assert choose(32, 64, 1024, 256) == (64, 128, 1)
    assert choose(64, 32, 512, 128) == (32, 64, 1)
    assert choose(64, 32, 128, 512) == choose(1, 32, 14336, 6144) == choose(64, 1, 128, 256) == (32, 64, 2)
    assert choose(64, 32, 512, 512) == choose(16, 32, 4096, 384) == (32, 128, 1)
    for k, in_flight in ((100, 1), (129, 1), (512, 1), (513, 0)):
        launch = plan_many(operands(64, 512, k, batch=(4,)))
        assert (launch.options["ONCE"], launch.options["IN_FLIGHT"]) == (int(k <= 128), in_flight)
        assert launch.options["X_STAGES"] == launch.options["W_STAGES"] * launch.options["SLICES"]
        assert launch.options["PERSISTENT"] == 0 or launch.grid[0] <= 132


@needs_nvrtc
def test_which_kernel_serves_few_rows() -> None:
    """The kernel of many rows where a batch has tiles for most multiprocessors, or K is short: timed on an H200."""

    def entry(m: int, n: int, k: int, *batch: int, constant: bool = False) -> str:
        return entry_without_parts(operands(m, n, k, batch=batch, constant=constant))

    few, many, split, tiles = "gemv_a16w8", "mm_a16w8", "splitk_a16w8", "a16w8_tiles"
    assert [entry(m, 6144, 2048) for m in (65, 128)] == [many] * 2
    assert [entry(m, 256, 128) for m in (16, 17, 32, 33)] == [tiles, many, many, many]
    assert [entry(m, 512, 128, 16) for m in (1, 2, 8, 16, 32)] == [few, many, many, split, many]
    assert [entry(m, 512, 128, 128) for m in (1, 8, 9)] == [few, few, many]
    assert entry(1, 512, 128, 16, constant=True) == many
    assert [entry(m, 512, 512, 64) for m in (1, 8, 9, 32)] == [few, few, many, many]


@needs_nvrtc
@by_block
def test_many_rows_take_the_weight_from_registers_and_spill_none(block: Block, tmp_path: Path) -> None:
    for x, fp8, bias in ((BF16, E4M3, None), (FP16, E5M2, FP32)):
        launch = plan_many(operands(4096, 4096, 4096, block, x=x, fp8=fp8, batch=(16,), bias=bias))
        assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
        sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
        width, slices = launch.options["WIDTH"], launch.options["SLICES"]
        products = [text for text in sass if f"HGMMA.64x{width}x16.F32" in text]
        assert len(products) == 8 * slices
        assert all(re.search(r"HGMMA\S* R\d+, R\d+, gdesc", text) for text in products)


@needs_nvrtc
@pytest.mark.parametrize("k", [512, 1024])
@pytest.mark.parametrize("constant", [False, True])
def test_a_constant_weight_of_few_tiles_is_read_before_the_wait(constant: bool, k: int, tmp_path: Path) -> None:
    """And its scales; x, the bias and the output are not."""
    launch = plan_many(operands(32, 128, k, batch=(64,), bias=FP32, constant=constant))
    assert launch.options["W_CONSTANT"] == constant
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    copying, multiplying = [i for i, text in enumerate(sass) if "ACQBULK" in text]  # those who wait

    def count(pattern: str, start: int, stop: int | None) -> int:
        return sum(re.search(pattern, text) is not None for text in sass[start:stop])

    loads = r"UTMALDG|\bLDG\."
    assert (count("UTMALDG", 0, copying) > 0) is constant
    assert count(r"\bLDG\.|\bSTG|UTMASTG", 0, copying) == 0
    assert (count(r"\bLDG\.", copying, multiplying) > 0) is constant
    assert count(loads, multiplying, None) > 0
    assert count(r"\bSTG|UTMASTG", copying, multiplying) == 0


def test_large_tiles_wait_for_a_constant_weight() -> None:
    def early(m: int, n: int, k: int) -> int:
        return int(plan_many(operands(m, n, k, batch=(64,), constant=True)).options["W_CONSTANT"])

    assert [early(m, 128, k) for m in (32, 64, 128) for k in (128, 512)] == [1] * 6
    assert [early(m, 128, 640) for m in (32, 64, 128)] == [1, 0, 0]
    assert early(256, 4096, 4096) == 0


@needs_nvrtc
@by_block
def test_no_default_of_many_rows_spills(block: Block) -> None:
    for batches, m, n, k in (
        (16, 128, 512, 128), (16, 64, 512, 128), (16, 64, 128, 512), (16, 128, 128, 512), (64, 128, 128, 512),
        (128, 128, 128, 512), (128, 64, 128, 512), (1, 128, 6144, 2048), (1, 64, 6144, 2048), (1, 256, 4096, 1024),
        (16, 32, 512, 128), (64, 32, 128, 512), (64, 32, 512, 512), (32, 64, 1024, 256),
    ):  # fmt: skip
        for constant in (False, True) if k <= 512 else (False,):
            given = operands(m, n, k, block, batch=(batches,), bias=FP32, constant=constant)
            launch = plan_many(given)
            assert_well_compiled(launch.compile(verbose=True).log, launch.shared)


@needs_nvrtc
@by_block
def test_no_tile_for_many_rows_spills(block: Block) -> None:
    for config in many._TIMES[SCALES[block]]:
        for x, fp8, bias in ((BF16, E4M3, FP32), (FP16, E5M2, None)):
            launch = plan_many(operands(4096, 4096, 4096, block, x=x, fp8=fp8, bias=bias), config)
            assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
            assert launch.resources().spills == 0, launch.describe()


def test_what_the_kernel_of_many_rows_refuses_and_copies() -> None:
    def refusal(change: dict[str, Any], **kwargs: Any) -> str | None:
        return many.accepts(with_parts(operands(300, **kwargs), **change))

    assert refusal({}) is None
    for change, kwargs, message in (
        ({}, {"contiguous": "N"}, "w.mT has stride 2304"),
        ({}, {"x": FP32}, "x has dtype torch.float32"),
        ({"out": torch.empty(300, 2304, device="meta")}, {}, "out torch.float32"),
        ({}, {"n": 2300}, "out has a stride of 4600 bytes"),
        ({}, {"block": (1, -1)}, r"blocks of \(1, -1\)"),
        ({"target": SM100}, {}, "sm100 is not sm90"),
    ):  # fmt: skip
        assert re.search(message, refusal(change, **kwargs) or ""), message
    launch = plan_many(operands(300, 200, 136, batch=(3,)))
    boxes = {name: arg.box for name, arg in launch.args.items() if isinstance(arg, TensorMap)}
    assert boxes == {"x": (1, 64, 64), "w": (1, 64, 128), "out": (1, 32, 64)}
    assert launch.args["problem"] == (300, 200, 136, 3)
    assert launch.grid == (5 * 4 * 3, 1, 1)


def product(x: Tensor, w: ScaledTensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block, bias, FP32)
    return found


@pytest.mark.gpu
@by_layout
@pytest.mark.parametrize("m", [1, 16, 96])
def test_a_launch_that_begins_early_sees_what_the_ones_before_it_wrote(m: int, contiguous: str, hopper: Target) -> None:
    """Each product takes the one before it as x, by a weight that was written just then: the same with waits."""
    x, w = on_gpu(m, 2048, 2048, (128, 128), contiguous=contiguous)
    others = [on_gpu(m, 2048, 2048, (128, 128), contiguous=contiguous)[1] for _ in range(8)]

    def run(wait: Callable[[], None]) -> Tensor:
        y, mine = x, w.data.view(torch.uint8).clone()
        for other in others:
            wait()
            mine.copy_(other.data.view(torch.uint8))
            wait()
            y = torch.ops.fp8fn.mm_a16w8(y, mine.view(E4M3), other.scale, other.block, None, BF16)
            wait()
            y = torch.ops.fp8fn.mm_a16w8(y, other.data, other.scale, other.block, None, BF16) / 64
        return y

    expected = run(torch.cuda.synchronize)
    assert bool(expected.isfinite().all())
    for _ in range(20):
        assert torch.equal(run(lambda: None), expected)


@pytest.mark.gpu
@by_layout
@by_block
def test_values_at_the_shapes_of_decoding(block: Block, contiguous: str, hopper: Target) -> None:
    for k, n in DECODE:
        for m in (1, 3, 16):
            for x, fp8 in ((BF16, E4M3), (FP16, E5M2)):
                given, w = on_gpu(m, n, k, block, contiguous=contiguous, x=x, fp8=fp8)
                assert snr(product(given, w), exact(given, w)) > 50


@pytest.mark.gpu
@by_layout
def test_values_of_batches(contiguous: str, hopper: Target) -> None:
    for batch, m, n, k in BATCHED:
        if m <= 128:
            x, w = on_gpu(m, n, k, (128, 128), contiguous=contiguous, batch=(batch,))
            bias = torch.randn(batch, 1, n, device="cuda", dtype=BF16)
            expected = exact(x, w, bias)
            assert snr(product(x, w, bias), expected) > 50
            for constant in (False, True):
                found = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block, bias, None, constant)
                assert snr(found, expected) > 45


@pytest.mark.gpu
@by_layout
def test_values_of_ragged_shapes(contiguous: str, hopper: Target) -> None:
    for m, n, k in ((1, 16, 16), (5, 48, 304), (9, 144, 4112), (16, 1040, 1040), (31, 80, 208), (100, 208, 400)):
        for block in BLOCKS:
            x, w = on_gpu(m, n, k, block, contiguous=contiguous)
            assert snr(product(x, w), exact(x, w)) > 50
            assert snr(product(x.mT.contiguous().mT, w), exact(x, w)) > 50


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*GEMVS, *ROW_MAJOR], ids=str)
def test_every_division_of_the_work_on_a_gpu(config: GemvConfig, hopper: Target) -> None:
    for m, n, k in ((5, 80, 704), (19, 272, 208), (70, 1040, 6160)):
        x, w = on_gpu(m, n, k, (128, 128), contiguous="N" if config.TILES == 8 else "K")
        out = torch.full((m, n), torch.nan, device="cuda")
        plan(weight_product(x, w, out, target_of(x.device)), config).run()
        assert snr(out, exact(x, w)) > 50


@pytest.mark.gpu
@by_block
@pytest.mark.parametrize("config", [None, *MANY], ids=str)
def test_values_of_many_rows(config: many.ManyRowsConfig | None, block: Block, hopper: Target) -> None:
    """Edges of tiles, more tiles than multiprocessors, K of part of a block; rounded to 16 bits, hence the bar."""
    for m, n, k, batch in (
        (129, 8, 16, ()), (193, 136, 144, ()), (384, 256, 1024, (3,)), (1000, 2056, 400, ()), (3000, 4096, 512, (2,)),
        (33, 200, 128, (5,)), (100, 72, 1168, (7,)),
    ):  # fmt: skip
        for x, fp8 in ((BF16, E4M3), (FP16, E5M2)):
            given, w = on_gpu(m, n, k, block, x=x, fp8=fp8, batch=batch)
            bias = torch.randn(n, device="cuda", dtype=x)
            out = many_rows(given, w, bias, config, target=hopper)
            assert snr(out, exact(given, w, bias)) > (45 if x == BF16 else 60), (m, n, k)


@pytest.mark.gpu
@of_any_scale
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_scales_of_any_size_on_a_gpu(
    config: many.ManyRowsConfig, fp8: torch.dtype, dtype: torch.dtype, hopper: Target
) -> None:
    assert_any_scale(config, fp8, dtype, target=hopper, device="cuda")


@pytest.mark.gpu
def test_what_is_not_finite_among_many_rows_stays_in_its_row_and_column(hopper: Target) -> None:
    x, w = on_gpu(300, 264, 400, (128, 1))
    x[5, 399] = torch.nan
    w.data.view(torch.uint8)[399, 200] = 0x7F
    finite = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block).isfinite()
    touched = torch.zeros_like(finite)
    touched[5] = touched[:, 200] = True
    assert torch.equal(~finite, touched)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 24, 64, 1000])
def test_a_thousand_runs_give_one_bit_pattern(m: int, hopper: Target) -> None:
    x, w = on_gpu(m, 1040, 6144, (128, 128))
    run = partial(torch.ops.fp8fn.mm_a16w8, x, w.data, w.scale, w.block)
    first, differing = run(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (run() != first).sum()
    assert int(differing) == 0


@pytest.mark.gpu
def test_replayed_as_a_graph(hopper: Target) -> None:
    x, w = on_gpu(4, 2304, 6144, (128, 128))
    expected = product(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x, w)
    for scale in (1.0, 2.0):
        x.mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, scale * expected)


@pytest.mark.gpu
def test_the_call_is_kept_and_of_the_cuda_kernel(hopper: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = on_gpu(2, 256, 512, (128, 128))
    started: list[None] = []
    start = call_cache.start

    def counted(*args: Any) -> None:
        started.append(None)
        start(*args)

    monkeypatch.setattr(call_cache, "start", counted)
    assert torch.equal(product(x, w), product(x, w))
    assert len(started) == 2
