"""Few rows by an FP8 weight that is constant: read before the launch waits, and otherwise the same product."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from test_cuda_a16w8 import BLOCKS, VIEWS, assert_right, hopper, on_gpu, operand, operands
from test_cuda_scaled_mm import instructions, needs_nvrtc, snr
from test_mm_a16w8 import CLASSES, ORDERING, exact, weight

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.bench.shapes import DECODE
from fp8fn.ops import mm_a16w8 as op
from fp8fn.ops.cuda.gemv_a16w8 import Config, accepts, plan
from fp8fn.ops.cuda.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import SM90

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGE = ((4096, 28672), (14336, 4096), (4096, 4096))  # (K, N)

__all__ = ["hopper"]  # the fixture

# All in registers, widened there or not; in shared memory; of both. Units are divided evenly or not.
CONFIGS = [
    Config(8, 1, 1, 8, 2, 1, 2), Config(8, 1, 3, 2, 6, 1, 2, WIDENED=True), Config(8, 2, 2, 1, 0, 2, 2, HELD=6),
    Config(16, 1, 1, 4, 1, 2, 2, HELD=2, WIDENED=True), Config(16, 2, 3, 1, 2, 4, 2, HELD=1),
    Config(32, 1, 2, 2, 1, 1, 2, HELD=5),
]  # fmt: skip


def emulated(
    x: Tensor, w: ScaledTensor, config: Config | None = None, *, constant: bool = True, bias: Tensor | None = None
) -> tuple[CudaLaunch, Tensor]:
    memory = torch.full((x.shape[-2] * w.shape[-1] + 64,), 7.0)
    out = memory[:-64].view(x.shape[-2], w.shape[-1])
    given = (x, w.data, w.scale, w.block, bias, out, SM90)
    assert accepts(*given) is None
    launch = plan(*given, config, constant=constant)
    emulate(launch, backwards=constant)
    assert (memory[-64:] == 7.0).all()
    return launch, out


@needs_compiler
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_product_is_the_same_in_the_same_configuration(config: Config, block: Block) -> None:
    """Ragged N and M, types of both, a bias."""
    few = config.ROWS == 8
    m, n, k = (3, 70, 768) if few else (11, 150, 704)
    x, w = torch.randn(m, k).to(BF16 if few else FP16), operand(k, n, block, dtype=E4M3 if few else E5M2)
    bias = torch.randn(n).half()
    launch, found = emulated(x, w, config, bias=bias)
    assert launch.options["W_CONSTANT"] == 1
    assert_right(found, x, w, bias)
    if config.UNROLL > 0:
        assert torch.equal(found, emulated(x, w, config, constant=False, bias=bias)[1])


@needs_compiler
def test_the_default_of_each_number_of_rows() -> None:
    for m in (1, 2, 8, 9, 16, 32):
        x, w = torch.randn(m, 512).bfloat16(), operand(512, 136, (128, 128))
        launch, found = emulated(x, w)
        assert launch.options["W_CONSTANT"] == (m <= 16)
        assert_right(found, x, w)


@needs_compiler
@pytest.mark.parametrize("view", VIEWS)
def test_strides_of_x(view: str) -> None:
    for m in (1, 6):
        x, w = VIEWS[view][0](torch.randn(m, 256).bfloat16()), operand(256, 40, (128, 1))
        assert_right(emulated(x, w)[1], x, w)


@needs_compiler
def test_what_is_not_finite_stays_in_its_rows_and_columns() -> None:
    for config in CONFIGS[1:4]:
        x, w = torch.randn(5, 768).bfloat16(), operand(768, 140, (128, 1))
        x[3, 767] = torch.nan
        w.data.view(torch.uint8)[767, 130] = 0x7F
        touched = torch.zeros(5, 140, dtype=torch.bool)
        touched[3] = touched[:, 130] = True
        assert torch.equal(~emulated(x, w, config)[1].isfinite(), touched)


@needs_compiler
def test_the_op_keeps_a_call_of_each_kind() -> None:
    x, w = torch.randn(2, 128).bfloat16(), operand(128, 40, (128, 128))
    with hopper_on_cpu() as launches:
        for constant in (False, True, False, True):
            found = op.mm_a16w8_kernel(x, w.data, w.scale, w.block, out_dtype=FP32, constant=constant)
            assert_right(found, x, w)
    assert [launch.options["W_CONSTANT"] for launch in launches] == [0, 1]


def constant_launches() -> Any:
    for k, n in (*DECODE, *LARGE):
        for m in (1, 4, 16):
            yield plan(*operands(m, n, k), constant=True)
    for block in BLOCKS:
        for x, fp8 in ((BF16, E5M2), (FP16, E4M3)):
            for m in (1, 8, 16):
                yield plan(*operands(m, 2304, 6144, block, x=x, fp8=fp8, bias=FP32), constant=True)


@needs_nvrtc
def test_no_configuration_spills_and_two_launches_fit_a_multiprocessor() -> None:
    for launch in {launch.kernel: launch for launch in constant_launches()}.values():
        resources = launch.resources()
        assert resources.spills == 0, launch.describe()
        assert launch.shared * launch.options["RESIDENT"] <= 227 << 10, launch.describe()


@needs_nvrtc
@pytest.mark.parametrize("m", [1, 8, 16])
def test_machine_code_reads_the_weight_before_it_waits_and_nothing_else(m: int, tmp_path: Path) -> None:
    launch = plan(*operands(m, bias=FP32), constant=True)
    assert launch.options["W_CONSTANT"] == 1
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    waits = next(i for i, text in enumerate(sass) if "ACQBULK" in text)
    before, after = sass[:waits], sass[waits:]
    wide = [text for text in before if re.search(r"LDG\.E\S*\.128", text)]
    assert len(wide) == launch.options["UNROLL"] * launch.options["TILES"] * 2
    assert not any(re.search(r"LDG\.E\S*\.128", text) for text in after)
    held = [text for text in before if "LDGSTS" in text]
    assert bool(held) == (launch.options["HELD"] > 0)
    assert not any("ZFILL" in text for text in held)
    assert any("LDGSTS" in text for text in after)  # x
    assert not any(re.search(r"\bSTG|UBLKPF", text) for text in before)
    assert any("LDG.E" in text for text in after)  # the bias


@pytest.mark.parametrize("rows", CLASSES[:3], ids=str)
@pytest.mark.parametrize("size", [(512, 128), (128, 512), (2304, 6144), (6144, 1536), (4096, 7168), (14336, 2048)])
def test_which_numbers_of_rows_have_one_configuration(rows: range, size: tuple[int, int]) -> None:
    """As of weights that are not constant."""
    n, k = size
    for block in BLOCKS:
        orders = set()
        for m in rows:
            x, w, scale, _, _, out, target = operands(m, n, k, block)
            options = plan(x, w, scale, block, None, out, target, constant=True).options
            orders.add(tuple(options[name] for name in (*ORDERING, "W_CONSTANT")))
        assert len(orders) == 1


def test_what_is_read_after_the_wait_all_the_same() -> None:
    """Lines across columns, units that are not whole, batches, and what is more than a multiprocessor holds."""
    for given in (operands(1, contiguous="N"), operands(1, k=6144 + 16), operands(1, n=64, k=64 * 8192), operands(32)):
        assert plan(*given, constant=True).options["W_CONSTANT"] == 0
        assert plan(*given, constant=True).kernel == plan(*given).kernel


def test_gemm_and_linear_pass_it_on() -> None:
    w, bias, x = weight(64, 48, (128, 128)), torch.randn(48), torch.randn(2, 3, 5, 64)
    for given in (x, x[0], x[0, 0], x[0, 0, 0]):
        assert torch.equal(fp8fn.gemm(given, w, bias=bias, constant=True), fp8fn.gemm(given, w, bias=bias))
        assert torch.equal(fp8fn.linear(given, w.mT, bias, constant=True), fp8fn.linear(given, w.mT, bias))
    assert torch.equal(fp8fn.gemm(w.mT, x.mT, constant=True), fp8fn.gemm(w.mT, x.mT))
    assert torch.equal(fp8fn.gemm(x, w, prequant=True, constant=True), fp8fn.gemm(x, w, prequant=True))
    for block, scale in (((128, 128), "fp32"), ((32, 1), "e8m0")):
        a = fp8fn.quantize(x, (1, block[0]), scale=scale)  # type: ignore[arg-type]
        b = fp8fn.quantize(torch.randn(64, 48), block, scale=scale)  # type: ignore[arg-type]
        assert torch.equal(fp8fn.gemm(a, b, constant=True), fp8fn.gemm(a, b))
    with pytest.raises(ValueError, match=r"constant=True is for a weight in FP8, and a and b are tensors"):
        fp8fn.gemm(x, torch.randn(64, 48), constant=True)


def test_it_reaches_the_op_and_the_gradient(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    w, told = weight(64, 48, (128, 128)), []

    class Told(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.fp8fn.mm_a16w8.default:
                told.append(dict(zip(range(7), args, strict=False)).get(6, (kwargs or {}).get("constant", False)))
            return func(*args, **(kwargs or {}))

    for constant in (True, False):
        told.clear()
        x = torch.randn(5, 64, requires_grad=True)
        with Told():
            fp8fn.gemm(x, w, constant=constant).sum().backward()
        assert told == [constant, constant]
    xs = torch.randn(3, 5, 64)
    found = torch.vmap(lambda x: fp8fn.gemm(x, w, constant=True))(xs)
    torch.testing.assert_close(found, fp8fn.gemm(xs, w))
    step = partial(fp8fn.gemm, b=w, constant=True)
    leaf = torch.randn(5, 64, requires_grad=True)
    out, expected = torch.compile(lambda x: step(x.sin()).cos(), fullgraph=True)(leaf), step(leaf.sin()).cos()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaf), torch.autograd.grad(expected.sum(), leaf))


def product(x: Tensor, w: ScaledTensor, out: torch.dtype = FP32) -> Tensor:
    found: Tensor = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block, None, out, True)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values_at_the_shapes_of_decoding(block: Block, hopper: None) -> None:
    for k, n in (*DECODE, *LARGE):
        for m in (1, 3, 16):
            for x_dtype, fp8 in ((BF16, E4M3), (FP16, E5M2)):
                x, w = on_gpu(m, n, k, block, x=x_dtype, fp8=fp8)
                torch.cuda.synchronize()
                assert snr(product(x, w), exact(x, w)) > 50


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_division_of_the_work_on_a_gpu(config: Config, hopper: None) -> None:
    for m, n, k in ((5, 80, 768), (16, 272, 704), (33, 1040, 512)):
        x, w = on_gpu(m, n, k, (128, 128))
        out = torch.full((m, n), torch.nan, device="cuda")
        torch.cuda.synchronize()
        plan(x, w.data, w.scale, w.block, None, out, SM90, config, constant=True).run()
        assert snr(out, exact(x, w)) > 50


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 8, 16])
def test_a_chain_takes_each_product_as_the_next_one_s_x(m: int, hopper: None) -> None:
    """Of 24 weights in a CUDA graph, replayed a hundred times with another x: as with a wait before each launch."""
    weights = [on_gpu(m, 2048, 2048, (128, 128))[1] for _ in range(24)]
    x = torch.randn(m, 2048, device="cuda").bfloat16()
    torch.cuda.synchronize()

    def chain(wait: bool) -> Tensor:
        y = x
        for i, w in enumerate(weights):
            if wait:
                torch.cuda.synchronize()
            y = product(y, w, BF16)
            y = y / 32 if i % 4 == 3 else y * 2**-5
        return y

    graph = torch.cuda.CUDAGraph()
    chain(wait=True)
    with torch.cuda.graph(graph):
        found = chain(wait=False)
    for _ in range(100):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, chain(wait=True))
        assert bool((found != 0).any())


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16])
def test_launches_without_anything_between_them(m: int, hopper: None) -> None:
    """The next launch begins while this one runs: each x was written by the launch right before."""
    weights = [on_gpu(m, 2048, 2048, (128, 128))[1] for _ in range(24)]
    weights = [ScaledTensor(w.data, w.scale / 64, w.block) for w in weights]
    x = torch.randn(m, 2048, device="cuda").bfloat16()
    torch.cuda.synchronize()
    expected = x
    for w in weights:
        expected = product(expected, w, BF16)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = x
        for w in weights:
            found = product(found, w, BF16)
    for _ in range(100):
        found.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
    assert bool((expected != 0).any() and expected.isfinite().all())
