"""The op by Hopper's kernel on a GPU: kept calls, streams, threads, graphs, another device."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import reference
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.runtime import driver
from fp8fn.ops.cuda.runtime.call_cache import Call
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, Prepared, TensorMap
from fp8fn.ops.kernel import Choice, Named
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import Target
from fp8fn.ops.tuning import table
from support.stub_driver import FORWARD, ROWS, WGRAD

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


Forced = Callable[[ScaledMmConfig], None]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch, kept: OrderedDict[Any, Any], hopper: Target) -> Forced:
    """`forced(config)`: the op takes the CUDA kernel in this configuration, whatever the tables say."""

    def force(config: ScaledMmConfig) -> None:
        kept.clear()
        monkeypatch.setattr(table, "named", lambda product: Named("cuda", "a test", lambda _: config))

    return force


CONFIGS = {
    "192x128": ScaledMmConfig(MATH=3, DEPTH=1),
    "128x256": ScaledMmConfig(BN=256, SLICES_N=2, DEPTH=1),
    "128x128": ScaledMmConfig(),
    "split": ScaledMmConfig(SPLIT=4),
}

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Product:
    """Quantized operands on the GPU, and the op on them."""

    def __init__(
        self, m: int = 200, n: int = 264, k: int = 520, blocks: tuple[Block, Block] = FORWARD, *,
        bias: torch.dtype | None = None, batch: int | None = None, device: str = "cuda",
    ) -> None:  # fmt: skip
        lead = () if batch is None else (batch,)
        x, w = torch.randn(*lead, m, k, device=device), torch.randn(*lead, n, k, device=device)
        self.blocks = blocks
        self.a, self.a_scale = torch.ops.fp8fn.quantize(x, blocks[0])
        self.b, self.b_scale = torch.ops.fp8fn.quantize(w.mT, blocks[1])
        self.bias = None if bias is None else torch.randn(n, device=device).to(bias)

    def __call__(self, out_dtype: torch.dtype | None = None) -> Tensor:
        return torch.ops.fp8fn.scaled_mm(  # type: ignore[no-any-return]
            self.a, self.a_scale, self.blocks[0], self.b, self.b_scale, self.blocks[1], self.bias, out_dtype
        )

    def expected(self) -> Tensor:
        a = reference.dequantize(self.a, self.a_scale, self.blocks[0]).double()
        b = reference.dequantize(self.b, self.b_scale, self.blocks[1]).double()
        out = a @ b
        return out if self.bias is None else out + self.bias.double()

    def assert_right(self, found: Tensor) -> None:
        expected = self.expected()
        assert found.shape == expected.shape
        noise = (found.double() - expected).square().sum()
        assert 10 * torch.log10(expected.square().sum() / noise) >= (50 if found.dtype == FP32 else 45)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [FORWARD, WGRAD, ((1, -1), (-1, 1)), ((-1, -1), (-1, -1))], ids=str)
def test_the_op_takes_the_kernel_in_cuda(
    blocks: tuple[Block, Block], hopper: Target, kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """At ragged sizes, which the library does not take; the line of the log says so too."""
    planned = []
    plan = Choice.plan

    def recorded(choice: Choice, operands: Any) -> Any:
        launches = plan(choice, operands)
        planned.extend(launch for launch in launches if launch.name == "scaled_mm")
        return launches

    monkeypatch.setattr(Choice, "plan", recorded)
    caplog.set_level(logging.DEBUG, "fp8fn")
    for shape in ((200, 264, 521), (1, 7, 130), (2000, 999, 385)):
        product = Product(*shape, blocks)
        caplog.clear()
        product.assert_right(product())
        product.assert_right(product(FP32))
        assert "scaled_mm[BM=" in caplog.text
        assert "sm90" in caplog.text
    assert len(planned) == 6
    assert all(isinstance(launch, CudaLaunch) for launch in planned)
    product.assert_right(product())
    assert len(planned) == 6  # the second time it was kept


@pytest.mark.gpu
@each_config
@pytest.mark.parametrize("bias", [None, BF16, FP32], ids=str)
def test_a_kept_call_gives_the_same_bits_and_takes_other_addresses(
    bias: torch.dtype | None, config: ScaledMmConfig, forced: Forced, kept: OrderedDict[Any, Any]
) -> None:
    forced(config)
    products = [Product(bias=bias) for _ in range(4)]
    outs = [product() for product in products]
    assert sum(isinstance(call, Call) and key[0] == "scaled_mm" for key, call in kept.items()) == 1
    for product, out in zip(products, outs, strict=True):
        product.assert_right(out)
    for product, out in zip(reversed(products), reversed(outs), strict=True):
        again = product()
        assert torch.equal(again.view(torch.int16), out.view(torch.int16))
        assert again.data_ptr() != out.data_ptr()


@pytest.mark.gpu
def test_other_strides_types_or_alignment_make_another_plan(forced: Forced, kept: OrderedDict[Any, Any]) -> None:
    forced(ScaledMmConfig())

    def calls() -> int:
        return sum(key[0] == "scaled_mm" for key in kept)

    product = Product()
    product.assert_right(product())
    assert calls() == 1
    product.assert_right(product(FP32))
    product.assert_right(product(FP16))
    assert calls() == 3
    product.bias = torch.randn(264, device="cuda")
    product.assert_right(product())
    assert calls() == 4
    product.bias = None
    wide = torch.empty(200, 1024, dtype=torch.uint8, device="cuda")
    wide[:, 16:536] = product.a.view(torch.uint8)
    product.a = wide[:, 16:536].view(E4M3)
    product.assert_right(product())
    assert calls() == 5
    shorter = Product(199)
    shorter.assert_right(shorter())
    assert calls() == 6


@pytest.mark.gpu
def test_operands_that_tma_cannot_address_are_right_too(hopper: Target) -> None:
    """Row-major b, column-major a, unaligned views, every second column, expanded and strided scales."""
    rowwise: tuple[Block, Block] = ((1, -1), (-1, 1))
    for blocks in (FORWARD, rowwise):
        product = Product(blocks=blocks)
        whole_a, whole_b = product.a.view(torch.uint8), product.b.view(torch.uint8)
        product.b = whole_b.contiguous().view(E4M3)
        product.assert_right(product())
        product.a = whole_a.mT.contiguous().mT.view(E4M3)
        product.assert_right(product())
        memory = torch.empty(200, 1100, dtype=torch.uint8, device="cuda")
        memory[:, 3:523] = whole_a
        product.a = memory[:, 3:523].view(E4M3)
        product.assert_right(product())
        memory[:, :1040:2] = whole_a
        product.a = memory[:, :1040:2].view(E4M3)
        product.assert_right(product())
    product = Product(blocks=rowwise)
    product.a_scale = product.a_scale[:1].expand(200, 1)
    product.assert_right(product())
    product.b_scale = product.b_scale.repeat_interleave(2, -1)[:, ::2]
    product.assert_right(product())
    product = Product(200, 264, 129)
    product.a = product.a.view(torch.uint8).contiguous().view(E4M3)  # rows of 129 bytes
    product.assert_right(product())


@pytest.mark.gpu
@each_config
def test_one_row_column_and_matrix(config: ScaledMmConfig, forced: Forced) -> None:
    """Axes of size 1 have strides that no descriptor takes."""
    forced(config)
    for shape in ((1, 7, 129), (1, 1, 1), (5, 1, 17)):
        for batch in (None, 1, 3):
            for blocks in (FORWARD, WGRAD, ((1, -1), (-1, 1))):
                product = Product(*shape, blocks, batch=batch)
                expected = product.expected()
                for dtype in (FP32, BF16):
                    assert ((product(dtype).double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-8).all()
    contiguous = Product(1, 16, 129, ((1, -1), (-1, 1)), batch=1)
    contiguous.a = contiguous.a.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(E4M3)
    assert contiguous.a.stride() == (129, 129, 1)
    contiguous.assert_right(contiguous(FP32))


@pytest.mark.gpu
@each_config
def test_two_streams(config: ScaledMmConfig, forced: Forced) -> None:
    """Launches of one kept call on two streams at once are those of one after the other."""
    forced(config)
    products = [Product(1000, 2000, 1024, bias=BF16) for _ in range(2)]
    expected = [product() for product in products]
    streams = [torch.cuda.Stream() for _ in products]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for product, stream, outs in zip(products, streams, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(product())
    torch.cuda.synchronize()
    for outs, want in zip(found, expected, strict=True):
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.gpu
@each_config
def test_threads(config: ScaledMmConfig, forced: Forced) -> None:
    """New threads, in which CUDA has no context yet, each on a stream of its own, through one kept call."""
    forced(config)
    products = [Product(300, 520, 768, bias=FP32) for _ in range(6)]
    expected = [product() for product in products]
    torch.cuda.synchronize()
    found: list[Any] = [None] * len(products)
    barrier = threading.Barrier(len(products))

    def work(i: int, stream: torch.cuda.Stream | None) -> None:
        barrier.wait()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                found[i] = [products[i]() for _ in range(20)]
        except Exception as error:
            found[i] = error

    # Half of them make no call of CUDA before the product's own.
    streams = [None if i % 2 else torch.cuda.Stream() for i in range(len(products))]
    threads = [threading.Thread(target=work, args=(i, stream)) for i, stream in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for outs, want in zip(found, expected, strict=True):
        assert isinstance(outs, list), outs
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.gpu
@each_config
def test_a_captured_graph_replays_on_new_values(config: ScaledMmConfig, forced: Forced) -> None:
    forced(config)
    product, other = Product(300, 520, 777, bias=BF16), Product(300, 520, 777, bias=BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
        twice = product(FP32)
    want, want_wide = other(), other(FP32)
    for name in ("a", "a_scale", "b", "b_scale", "bias"):
        into, of = getattr(product, name), getattr(other, name)
        bits = torch.uint8 if into.element_size() == 1 else into.dtype
        into.view(bits).copy_(of.view(bits))
    product()  # a launch between that has other addresses does not change the graph's
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, want)
        assert torch.equal(twice, want_wide)


@pytest.mark.gpu
@each_config
def test_a_thousand_calls_give_one_bit_pattern(config: ScaledMmConfig, forced: Forced) -> None:
    forced(config)
    product = Product(333, 777, 1111, bias=BF16)
    first = product()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (product().view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differing) == 0


@pytest.mark.gpu
def test_compiled_is_eager(forced: Forced, fresh_dynamo: None) -> None:
    forced(CONFIGS["192x128"])
    product = Product(200, 264, 520, bias=BF16)

    def step(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor) -> Tensor:
        out = torch.ops.fp8fn.scaled_mm(a, a_scale, FORWARD[0], b, b_scale, FORWARD[1], bias, BF16)
        return torch.nn.functional.relu(out) * 2

    args = (product.a, product.a_scale, product.b, product.b_scale, product.bias)
    for dynamic in (False, True):
        torch._dynamo.reset()
        found = torch.compile(step, dynamic=dynamic, fullgraph=True)(*args)  # type: ignore[arg-type]
        assert torch.equal(found, step(*args))  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_backward_runs_in_autograds_thread(forced: Forced) -> None:
    """The products of a backward are launched by a thread of autograd."""
    import fp8fn

    forced(CONFIGS["192x128"])
    x = torch.randn(200, 520, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(264, 520, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(200, 264, device="cuda", dtype=BF16)
    first = torch.autograd.grad(fp8fn.linear(x, w), (x, w), grad)
    second = torch.autograd.grad(fp8fn.linear(x, w), (x, w), grad)
    for found, again, expected in zip(first, second, (grad @ w, grad.mT @ x), strict=True):
        assert torch.equal(found, again)
        assert (found.float() - expected.float()).norm() < 0.06 * expected.float().norm()


@pytest.mark.gpu
def test_a_device_that_is_not_the_current_one(hopper: Target, kept: OrderedDict[Any, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    products = [Product(200, 264, 521, device=f"cuda:{i}") for i in range(2)]
    for current in (0, 1):
        with torch.cuda.device(current):
            for _ in range(2):
                for i, product in enumerate(products):
                    found = product()
                    assert found.device.index == i
                    product.assert_right(found)
            assert torch.cuda.current_device() == current


@pytest.mark.gpu
def test_an_error_of_the_real_driver_has_its_text(hopper: Target) -> None:
    with pytest.raises(driver.DriverError, match=r"loading nothing: .+ \(\d+\)"):
        driver.load_function(b"\x7fELF no cubin" + b"\0" * 200, "nothing", 0, torch.cuda.current_device())
    product = Product()
    unaligned = TensorMap(product.a.as_strided((1, 200, 520), (200 * 521, 521, 1)), (1, 128, 128), 128)
    launch_ = CudaLaunch(ROWS, (1, 1, 1), 256, 0, {"a": unaligned}, target=hopper)
    with pytest.raises(driver.DriverError, match=r"TMA descriptor of shape \(520, 200, 1\), strides \(521, .* \(1\)"):
        Prepared(launch_)
