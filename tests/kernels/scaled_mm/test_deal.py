"""Tiles that are dealt out while Hopper's scaled product runs: in the emulator, and beside another kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig, plan
from fp8fn.ops.cuda.runtime import counters
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, pointers
from fp8fn.ops.layout import matrix_strides
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.reference.quantize import quantize
from fp8fn.ops.targets import SM90, Target, target_of
from support.configs import KINDS, SCALED_MM
from support.cuda_emulator import emulate, needs_compiler
from support.gpu import FEW
from support.products import Parts

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DEALT = {
    name: SCALED_MM[name]
    for name in ("192x128", "128x256", "128x128", "256x128", "64x64", "192x128 cluster", "128x256 cluster")
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_tile = pytest.mark.parametrize("config", DEALT)


@pytest.fixture
def any_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few K tiles are dealt out too."""
    monkeypatch.setattr(cuda, "_DEALT_K", 1)


def product(
    kind: str, shape: tuple[int, int, int], target: Target, *, device: str = "cpu", out: torch.dtype = BF16,
    offsets: Tensor | None = None,
) -> ScaledProduct:  # fmt: skip
    """A product of random operands into NaN, or with `offsets` one of groups of rows."""
    (m, n, k), (a_block, b_block) = shape, KINDS[kind]
    groups = () if offsets is None else (offsets.shape[0],)
    made = torch.Generator(device).manual_seed(m + n + k)
    a, a_scale = quantize(torch.randn(m, k, device=device, generator=made), a_block, E4M3, "fp32")
    b, b_scale = quantize(torch.randn(*groups, n, k, device=device, generator=made).mT, b_block, E4M3, "fp32")
    filled = torch.full((m, n), float("nan"), dtype=out, device=device)
    a, b = along_k(a, column_major=False), along_k(b, column_major=True)
    return Parts(a, a_scale, a_block, b, b_scale, b_block, None, filled).product(target, offsets=offsets)


def along_k(x: Tensor, *, column_major: bool) -> Tensor:
    """The same with K contiguous, and rows of a multiple of 16 bytes."""
    strides = matrix_strides(x.shape, column_major, 16)
    data = torch.empty_strided(x.shape, strides, dtype=torch.uint8, device=x.device)
    return data.copy_(x.view(torch.uint8)).view(x.dtype)


# ---- in the emulator, where the first cluster does its list and then all others' -------------------------------------


@needs_compiler
@every_tile
@every_kind
@pytest.mark.usefixtures("any_k")
def test_tiles_taken_over_have_the_same_bytes(config: str, kind: str) -> None:
    chosen = DEALT[config]
    few = replace(FEW, multiprocessors=3 * chosen.CLUSTER)
    for out, k in ((BF16, 300), (FP32, 40)):
        of = product(kind, (3 * chosen.BM + 9, 2 * chosen.BN + 24, k), few, out=out)
        (launch,) = plan(of, chosen)
        assert launch.counted == "counters"
        emulate(launch, deals=False)
        listed = of.out.clone()
        for backwards, seed in ((False, 0), (True, 0), (False, 5)):
            of.out.fill_(float("nan"))
            emulate(launch, backwards=backwards, seed=seed)
            assert torch.equal(of.out, listed)


@needs_compiler
@pytest.mark.parametrize("config", ["192x128", "128x256", "64x64"])
@pytest.mark.parametrize("ends", [(5, 5, 400, 460), (0, 0, 0, 0), (700, 700, 700, 700), (100, 300, 500, 700)], ids=str)
@pytest.mark.usefixtures("any_k")
def test_groups_that_are_taken_over_have_the_same_bytes(config: str, ends: tuple[int, ...]) -> None:
    """Tokens in no group come last; an early start must not follow the tile of zeros that they are."""
    offsets = torch.tensor(ends, dtype=torch.int32)
    for cores in (2, 3, 5):
        of = product("forward", (700, DEALT[config].BN + 24, 200), replace(FEW, multiprocessors=cores), offsets=offsets)
        (launch,) = plan(of, DEALT[config])
        assert launch.counted == "counters"
        emulate(launch, deals=False)
        listed = of.out.clone()
        assert listed[ends[-1] :].count_nonzero() == 0
        for backwards in (False, True):
            of.out.fill_(float("nan"))
            emulate(launch, backwards=backwards)
            assert torch.equal(of.out, listed)


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "config", "counted"),
    [
        ((4096, 4096, 1024), ScaledMmConfig(), True),
        ((4096, 4096, 1023), ScaledMmConfig(), False),  # few K tiles
        ((128 * 12, 128 * 11, 4096), ScaledMmConfig(), False),  # as many tiles as multiprocessors
        ((128 * 19, 128 * 7, 4096), ScaledMmConfig(), True),
        ((256, 2**16, 4096), ScaledMmConfig(), False),  # two rows of tiles
        ((4096, 4096, 4096), ScaledMmConfig(MATH=1, BN=64, SPLIT=4), False),
        ((4096, 4096, 4096), ScaledMmConfig(CLUSTER=2), True),
    ],
    ids=str,
)
def test_which_products_have_counters(shape: tuple[int, int, int], config: ScaledMmConfig, counted: bool) -> None:
    m, n, k = shape
    of = Parts(
        torch.empty(m, k, dtype=E4M3, device="meta"), torch.empty(1, 1, device="meta"), (-1, -1),
        torch.empty(n, k, dtype=E4M3, device="meta").mT, torch.empty(1, 1, device="meta"), (-1, -1),
        None, torch.empty(m, n, dtype=BF16, device="meta"),
    ).product(SM90)  # fmt: skip
    (launch,) = plan(of, config)
    assert launch.counted == ("counters" if counted else "")
    assert launch.args["counters"] is None


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of a group."""
    monkeypatch.setattr(counters, "is_shared", lambda: True)


def _spin() -> Callable[[int], None]:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def spin(out, rounds):  # type: ignore[no-untyped-def]
        x = tl.program_id(0) * 1.0
        for _ in range(rounds):
            x = x * 1.0001 + 0.5
        tl.store(out + tl.program_id(0), x)

    out = torch.empty(132, device="cuda")
    return lambda blocks: spin[(blocks,)](out, 300_000)


@pytest.fixture
def beside() -> Iterator[Callable[[], None]]:
    """Starts a kernel on another stream that holds 24 multiprocessors for about a millisecond."""
    spin, stream = _spin(), torch.cuda.Stream()

    def start() -> None:
        with torch.cuda.stream(stream):
            spin(24)
        torch.cuda._sleep(20_000)  # until it has begun

    start()
    torch.cuda.synchronize()
    yield start
    torch.cuda.synchronize()


def listed(of: ScaledProduct, launch: CudaLaunch) -> Tensor:
    """The product of each block's own list."""
    replace(launch, counted="").run()
    expected = of.out.clone()
    of.out.fill_(float("nan"))
    return expected


@pytest.mark.gpu
@every_tile
@every_kind
@pytest.mark.usefixtures("shared")
def test_values_beside_a_kernel_that_holds_multiprocessors(
    config: str, kind: str, hopper: Target, beside: Callable[[], None]
) -> None:
    for shape in ((4000, 4104, 1100), (2100, 6144, 2048)):
        of = product(kind, shape, hopper, device="cuda")
        (launch,) = plan(of, DEALT[config])
        assert launch.counted
        expected = listed(of, launch)
        prepared = launch.prepare()
        for late in (False, True, True, False):
            of.out.fill_(float("nan"))
            if late:
                beside()
            prepared.launch(pointers(launch.args))
            assert torch.equal(of.out, expected)
        assert prepared._counters._places[0].value != 0


@pytest.mark.gpu
@pytest.mark.usefixtures("shared")
def test_groups_beside_a_kernel_that_holds_multiprocessors(hopper: Target, beside: Callable[[], None]) -> None:
    offsets = torch.tensor([0, 1000, 1001, 3000, 3500], dtype=torch.int32, device="cuda")
    for config in ("192x128", "128x256", "64x64"):
        of = product("forward", (4000, 4104, 1100), hopper, device="cuda", offsets=offsets)
        (launch,) = plan(of, DEALT[config])
        expected = listed(of, launch)
        for _ in range(3):
            of.out.fill_(float("nan"))
            beside()
            launch.run()
            assert torch.equal(of.out, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("shared")
def test_two_streams_and_two_graphs_at_once(hopper: Target) -> None:
    """Each has its own counters."""
    of = [product("forward", (4000, 4104 + 64 * i, 2048), hopper, device="cuda") for i in range(2)]
    launches = [plan(one, DEALT["192x128"])[0] for one in of]
    expected = [listed(one, launch) for one, launch in zip(of, launches, strict=True)]
    streams = [torch.cuda.Stream() for _ in of]
    prepared = [launch.prepare() for launch in launches]
    graphs = [torch.cuda.CUDAGraph() for _ in of]
    for graph, ready, launch in zip(graphs, prepared, launches, strict=True):
        with torch.cuda.graph(graph):
            for _ in range(4):
                ready.launch(pointers(launch.args))
    torch.cuda.synchronize()
    for captured in (False, True):
        for one in of:
            one.out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph, ready, launch in zip(streams, graphs, prepared, launches, strict=True):
            with torch.cuda.stream(stream):
                if captured:
                    graph.replay()
                else:
                    for _ in range(4):
                        ready.launch(pointers(launch.args))
        torch.cuda.synchronize()
        for one, wanted in zip(of, expected, strict=True):
            assert torch.equal(one.out, wanted)
    assert target_of(of[0].out.device) == hopper
