"""`silu(x @ w) * (x @ w_up)` in one launch of `mm_a16w8.cu`: emulated on the CPU, as machine code, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ScaledTensor
from fp8fn.ops import mm_a16w8 as op
from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.gemm import mm_a16w8 as many
from fp8fn.ops.cuda.limits import SHARED_LIMIT
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import GFX942, SM90, Target
from support.accuracy import snr
from support.compilers import assert_well_compiled, needs_nvrtc
from support.configs import GATED
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.weights import BLOCKS, by_block, on_gpu, operand, operands
from support.products import quantized, weight_product, with_parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FEW: Final = replace(SM90, multiprocessors=2)  # so that a block has tile after tile
LARGE: Final = ((512, 14336, 4096), (1024, 14336, 4096), (4096, 14336, 4096), (4096, 28672, 8192))
by_config = pytest.mark.parametrize("config", GATED, ids=str)


def launched(
    x: Tensor, w: ScaledTensor, up: ScaledTensor | None, config: many.ManyRowsConfig, *, target: Target = FEW,
    backwards: bool = False, seed: int = 0,
) -> Tensor:  # fmt: skip
    """The product between two guards, in memory that was NaN before; on the CPU it is emulated."""
    n = w.shape[-1]
    memory = torch.full((x.shape[0] * n + 1024,), 7.0, dtype=x.dtype, device=x.device)
    out = memory[512:-512].view(x.shape[0], n).fill_(torch.nan)
    given = weight_product(x, w, out, target, w_up=None if up is None else quantized(up))
    (launch,) = many.plan(given, config)
    if x.device.type == "cpu":
        emulate(launch, backwards=backwards, seed=seed)
    else:
        launch.run()
    assert (memory[:512] == 7.0).all()
    assert (memory[-512:] == 7.0).all()
    return out


def combined(gate: Tensor, up: Tensor) -> Tensor:
    """As Inductor's kernel computes it of rounded products."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """The SiLU is off by up to 1e-5 of itself, so that one of a hundred values in float16 may be the next one."""
    assert int((found != expected).sum()) <= 1e-5 / torch.finfo(found.dtype).eps * found.numel() + 3
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), expected.float(), rtol=eps, atol=torch.finfo(found.dtype).tiny)


@needs_compiler
@by_config
def test_bits_are_those_of_two_products(config: many.ManyRowsConfig) -> None:
    """Tiles at the edges, several for a block, of a K that is no multiple of 128."""
    plain = replace(config, GATED=False)
    for dtype, fp8, block, backwards in (
        (BF16, E4M3, (128, 128), False), (FP16, E5M2, (128, 1), True), (BF16, E5M2, (-1, 1), True),
        (FP16, E4M3, (128, 128), False),
    ):  # fmt: skip
        m, n, k = config.BM + 9, 3 * config.BN + 8, 272
        x = (torch.randn(m, k) / 8).to(dtype)
        w, up = (operand(k, n, block, dtype=fp8) for _ in range(2))
        found = launched(x, w, up, config, backwards=backwards)
        gate, other = (launched(x, each, None, plain) for each in (w, up))
        assert snr(gate, other) < 3  # which of them is which can be told
        assert_near(found, combined(gate, other))
        for seed in (1, 2):
            assert torch.equal(launched(x, w, up, config, seed=seed), found)


@needs_compiler
def test_one_k_tile_and_many() -> None:
    """K of one tile has one scale; scales of 32 K tiles are loaded at a time."""
    config = many.ManyRowsConfig(128, 1, 4, TURNS=True, GATED=True)
    for k in (16, 128, 34 * 128):
        x = (torch.randn(150, k) / 8).to(BF16)
        w, up = operand(k, 200, (128, 128)), operand(k, 200, (128, 128))
        gate, other = (launched(x, each, None, replace(config, GATED=False)) for each in (w, up))
        assert_near(launched(x, w, up, config), combined(gate, other))


@needs_compiler
@by_config
def test_what_is_not_finite_stays_in_its_row_and_column(config: many.ManyRowsConfig) -> None:
    x = (torch.randn(150, 272) / 8).to(BF16)
    w, up = operand(272, 136, (128, 128)), operand(272, 136, (128, 128))
    clean = launched(x, w, up, config)
    assert clean.isfinite().all()
    x[5, 271] = torch.nan
    w.data.view(torch.uint8)[271, 40] = 0x7F
    up.data.view(torch.uint8)[271, 100] = 0x7F
    found = launched(x, w, up, config)
    touched = torch.zeros_like(found, dtype=torch.bool)
    touched[5] = touched[:, 40] = touched[:, 100] = True
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])


@needs_compiler
def test_saturated_gates() -> None:
    """silu(-100) is 0 and silu(100) 100; exp overflows for the largest gates."""
    config = many.ManyRowsConfig(128, 1, 4, TURNS=True, GATED=True)
    values = torch.tensor([100.0, -100.0, 0.0, -0.0, 3e38, -3e38, 1.0, -1.0])
    x = torch.zeros(8, 16)
    x[:, 0] = values
    x[:, 1] = 2.0
    columns = torch.zeros(2, 8, 16)
    columns[0, :, 0], columns[1, :, 1] = 1.0, 1.0  # the gate is the first column of x, and up the second one
    gate, up = (ScaledTensor(each.to(E4M3).mT, torch.ones(1, 8), (-1, 1)) for each in columns)
    found = launched(x.to(BF16), gate, up, config)
    expected = combined(x[:, :1].to(BF16), torch.full((8, 1), 2.0).to(BF16)).expand(8, 8)
    assert_near(found, expected)


@contextmanager
def few_cores() -> Iterator[list[CudaLaunch]]:
    """A processor whose multiprocessors small products fill."""
    with hopper_on_cpu() as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "target_of", lambda device: FEW)
        yield launches


@needs_compiler
def test_the_op_keeps_its_call_and_takes_pointers_in_order() -> None:
    """On a second call nothing is planned: the launch of the first takes the new tensors."""
    with few_cores() as launches:
        for _ in range(2):
            x = (torch.randn(300, 144) / 8).to(BF16)
            w, up = operand(144, 136, (128, 128)), operand(144, 136, (128, 128))
            found = op.mm_a16w8_silu_mul_kernel(x, w.data, w.scale, up.data, up.scale, w.block)
            expected = op.mm_a16w8_silu_mul_reference(x, w.data, w.scale, up.data, up.scale, w.block)
            assert snr(found, expected) > 45
        assert [(launch.name, launch.options["PAIRS"] > 0) for launch in launches] == [("mm_a16w8", True)]


@needs_compiler
def test_no_kernel_means_three_ops() -> None:
    x = (torch.randn(20, 144) / 8).to(BF16)
    w, up = operand(144, 136, (128, 128)), operand(144, 136, (128, 128))
    with few_cores() as launches:
        op.mm_a16w8_silu_mul_kernel(x, w.data, w.scale, up.data, up.scale, w.block)
        assert launches == []  # its products are ops of their own, and those are of the CPU
    found = op.MM_A16W8_SILU_MUL((x, w.data, w.scale, up.data, up.scale), (w.block,))[0]
    gate, other = (torch.ops.fp8fn.mm_a16w8(x, *quantized(each)) for each in (w, up))
    assert torch.equal(found, reference.silu_mul(gate, other).to(BF16))


def gated(m: int = 4096, n: int = 14336, k: int = 4096, **kwargs: Any) -> WeightProduct:
    return replace(operands(m, n, k, **kwargs), w_up=operands(m, n, k, **kwargs).w)


def test_what_is_refused() -> None:
    assert many.accepts_gated(gated()) is None
    assert many.accepts_gated(gated(x=FP16, fp8=E5M2, block=(-1, 1))) is None
    assert many.accepts_gated(gated(1024, 1536, 128)) is None
    apart = gated()
    assert apart.w_up is not None
    strided = apart.w_up._replace(scale=torch.empty(112, 2 * 32, device="meta")[:, ::2].mT)
    rows = apart.w_up._replace(data=torch.empty(4096, 14336, dtype=E4M3, device="meta"))
    expected = [
        (gated(128), "M=128 is few rows"),
        (gated(256, 384, 256), "each product is one of small tiles, 64x64/1 stages4 resident1 group8 parts2"),
        (gated(n=1004), "out has a stride of 2008 bytes, no multiple of 16"),
        (gated(k=4104), "w.mT has a stride of 4104 bytes, no multiple of 16"),
        (gated(x=FP32), "x has dtype torch.float32 and out torch.float32, not both 16 bits"),
        (gated(bias=FP32), "it has a bias or another output type"),
        (with_parts(gated(), out=gated(x=FP16).out), "it has a bias or another output type"),
        (with_parts(gated(), target=GFX942), "gfx942 is not sm90"),
        (replace(gated(), w_up=gated(block=(128, 1)).w), "w and w_up differ in shape, type or block"),
        (replace(gated(), w_up=gated(fp8=E5M2).w), "w and w_up differ in shape, type or block"),
        (replace(gated(), w_up=gated(n=14208).w), "w and w_up differ in shape, type or block"),
        (replace(gated(), w_up=strided), "the scales of w have strides (1, 32) and those of w_up (2, 64)"),
        (replace(gated(), w_up=rows), "w_up: w.mT has stride 14336 along its contiguous axis, not 1"),
    ]  # fmt: skip
    for product, words in expected:
        assert (many.accepts_gated(product) or "").startswith(words), (words, many.accepts_gated(product))


def test_the_default_configuration() -> None:
    """As many tiles as a product has with the columns of both; of the rows whose waves take the least time."""
    few = {(200, 8192, 4096): 224, (513, 14336, 4096): 160, (300, 1536, 4096): 128, (129, 2048, 4096): 128}
    for (m, n, k), rows in {**dict.fromkeys(LARGE, 256), **few}.items():
        config = many.configure_gated(gated(m, n, k))
        assert (rows, 64, 2, 0, True) == (config.BM, config.BN, config.MATH, config.RESIDENT, config.TURNS)
        plain = replace(config, GATED=False)
        assert many.tiles(m, n, 1, config) == many.tiles(m, 2 * n, 1, plain)
        assert many.plan(gated(m, n, k), config)[0].shared <= SHARED_LIMIT


def test_pairs_of_a_tile_find_room() -> None:
    """Then the warpgroups that multiply go on at once. No call takes 320 rows by default."""
    assert {config.BM: config.pairs for config in GATED} == {320: 4, 256: 8, 224: 7, 160: 5, 128: 4}
    assert {many.ManyRowsConfig().pairs, many.ManyRowsConfig(160, TURNS=True).pairs} == {0}


def test_all_defaults_are_emulated() -> None:
    assert {replace(config, GATED=True) for block in BLOCKS for config in many._gated_tiles(block)} <= {*GATED}


@needs_nvrtc
def test_machine_code_spills_nothing() -> None:
    for config in (config for config in GATED if config.TURNS):
        for block in BLOCKS[:3]:
            for x, fp8 in ((BF16, E4M3), (FP16, E5M2)):
                (launch,) = many.plan(gated(300, 200, 1024, block=block, x=x, fp8=fp8), config)
                assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
                assert launch.resources().spills == 0, launch.describe()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.empty(2, 2, 256)}, ValueError, r"x has shape \(2, 2, 256\); it must be \(M, K\)"),
        ({"w": torch.empty(2, 256, 128)}, ValueError, r"w has shape \(2, 256, 128\); it must be \(K, N\)"),
        ({"w": torch.empty(256, 128)}, TypeError, "mm_a16w8_silu_mul: w"),
        ({"x": torch.empty(2, 250)}, ValueError, r"x \(2, 250\) has K=250 and w \(256, 128\) has K=256"),
        ({"w_up": torch.empty(256, 64, dtype=E4M3)}, ValueError, r"w has shape \(256, 128\) and w_up \(256, 64\)"),
        ({"w_up": torch.empty(256, 128, dtype=E5M2)}, TypeError, "w has dtype .*e4m3fn and w_up torch.float8_e5m2"),
        ({"w_up_scale": torch.empty(3, 1)}, ValueError, "mm_a16w8_silu_mul: w_up"),
        ({"w_up": torch.empty(256, 128, dtype=E4M3, device="meta")}, ValueError, "x is on cpu and w_up on meta"),
        ({"w_up_scale": torch.empty(2, 1, device="meta")}, ValueError, "x is on cpu and w_up_scale on meta"),
    ],
)  # fmt: skip
def test_wrong_arguments(change: dict[str, Tensor], error: type[Exception], words: str) -> None:
    w = operand(256, 128, (128, 128))
    given = {"x": torch.empty(2, 256), "w": w.data, "w_scale": w.scale, "w_up": w.data, "w_up_scale": w.scale}
    with pytest.raises(error, match=words):
        torch.ops.fp8fn.mm_a16w8_silu_mul(**{**given, **change}, w_block=w.block)


def on_gpu_twice(m: int, n: int, k: int, block: Any, **kwargs: Any) -> tuple[Tensor, ScaledTensor, ScaledTensor]:
    x, w = on_gpu(m, n, k, block, **kwargs)
    return x / k**0.5, w, on_gpu(m, n, k, block, **kwargs)[1]


@pytest.mark.gpu
@by_block
@by_config
def test_values_on_a_gpu(config: many.ManyRowsConfig, block: Any, hopper: Target) -> None:
    """Edges of tiles, more tiles than multiprocessors, K of part of a block: the bits of two products."""
    for m, n, k in ((129, 8, 16), (193, 136, 144), (1000, 2056, 400), (3000, 4096, 512), (700, 200, 1168)):
        for dtype, fp8 in ((BF16, E4M3), (FP16, E5M2)):
            x, w, up = on_gpu_twice(m, n, k, block, x=dtype, fp8=fp8)
            found = launched(x, w, up, config, target=hopper)
            plain = replace(config, GATED=False)
            gate, other = (launched(x, each, None, plain, target=hopper) for each in (w, up))
            assert_near(found, combined(gate, other))


@pytest.mark.gpu
def test_the_op_on_a_gpu_gives_one_bit_pattern(hopper: Target) -> None:
    """Launches back to back, of which each may begin while the one before ends."""
    for m, n, k in ((512, 14336, 4096), (2048, 14336, 1024), (4096, 4096, 4096)):
        x, w, up = on_gpu_twice(m, n, k, (128, 128))
        parts = x, w.data, w.scale, up.data, up.scale, w.block
        first = torch.ops.fp8fn.mm_a16w8_silu_mul(*parts)
        gate, other = (torch.ops.fp8fn.mm_a16w8(x, *quantized(each)) for each in (w, up))
        assert snr(first, combined(gate, other)) > 45
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(300):
            differing += (torch.ops.fp8fn.mm_a16w8_silu_mul(*parts) != first).sum()
        assert int(differing) == 0


@pytest.mark.gpu
def test_replayed_as_a_graph(hopper: Target) -> None:
    x, w, up = on_gpu_twice(1024, 14336, 512, (128, 128))
    parts = x, w.data, w.scale, up.data, up.scale, w.block
    expected = torch.ops.fp8fn.mm_a16w8_silu_mul(*parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.fp8fn.mm_a16w8_silu_mul(*parts)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
