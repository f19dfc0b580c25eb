"""On the device: sizes past 2**31 elements, the signal-to-noise ratio of layers people train, streams, graphs, bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn.bench.shapes import shape
from fp8fn.ops import reference
from support.accuracy import snr

pytestmark = pytest.mark.gpu

# One of each kind: small, square, wide N, deep K, and 47, whose output has more than 2**31 elements.
SAMPLE_IDS = (1, 16, 30, 50, 64, 47)


@pytest.mark.parametrize("id", SAMPLE_IDS)
def test_snr_of_a_linear_layer(id: int) -> None:
    """Out, dA and dB of the suite's shapes against bf16, over 25 dB."""
    _, _, m, n, k = shape(id)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    found = fp8fn.linear(x, w)
    found_x, found_w = torch.autograd.grad(found, (x, w), grad)
    with torch.no_grad():
        assert snr(found, x @ w.T) > 25
        del found
        assert snr(found_x, grad @ w) > 25
        assert snr(found_w, grad.T @ x) > 25


def test_quantize_past_int32() -> None:
    """More than 2**31 elements: the last rows are those of the reference."""
    x = torch.randn(2**16 + 3, 2**15 + 128, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    for block in ((1, 128), (128, 128), (1, -1)):
        q = fp8fn.quantize(x, block)
        tail = x.shape[0] // 128 * 128
        data, scale = reference.quantize(x[tail:], block, q.dtype, "fp32")
        assert torch.equal(q.data[tail:].float(), data.float())
        assert torch.equal(q.scale[-scale.shape[0] :], scale)
        del q, data, scale
    row, col = fp8fn.quantize_dual(x)
    data, scale = reference.quantize(x[:, -128:], (128, 1), col.dtype, "fp32")
    assert torch.equal(col.data[:, -128:].float(), data.float())
    assert torch.equal(col.scale[:, -128:], scale)
    data, scale = reference.quantize(x[-3:], (1, 128), row.dtype, "fp32")
    assert torch.equal(row.data[-3:].float(), data.float())


def test_same_bits_run_after_run() -> None:
    x = torch.randn(1000, 1111, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(777, 1111, device="cuda", dtype=torch.bfloat16)
    first = fp8fn.linear(x, w)
    for _ in range(100):
        assert torch.equal(fp8fn.linear(x, w), first)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise", "mxfp8", "hybrid"])
def test_cuda_graph(recipe: str) -> None:
    """A captured forward and backward replays on new values."""
    x = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(512, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = fp8fn.linear(x, w, recipe=recipe)
        return out, *torch.autograd.grad(out, (x, w), out.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)


def test_two_streams() -> None:
    """Products on two streams at once are those of one after the other."""
    xs = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    w = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    expected = [fp8fn.linear(x, w) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        found.clear()
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(fp8fn.linear(x, w))
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_backend_matches_eager(dynamic: bool) -> None:
    """The compiled model's loss and gradients are those of the functional form of the same model."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).cuda()
    x = torch.randn(300, 256, device="cuda")
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, dynamic=dynamic)
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(x).float().square().mean()
        loss.backward()
        hidden = torch.nn.functional.gelu(fp8fn.linear(x, model[0].weight, model[0].bias))
        expected = fp8fn.linear(hidden, model[2].weight, model[2].bias).float().square().mean()
    grads = torch.autograd.grad(expected, list(model.parameters()))
    assert abs(loss.item() - expected.item()) < 1e-2 * expected.item()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - grad).norm() < 0.05 * grad.norm()


def test_mixed_devices() -> None:
    a, b = torch.randn(128, 128, device="cuda"), torch.randn(128, 128)
    with pytest.raises(ValueError, match=r"a is on cuda:0 and b on cpu"):
        fp8fn.gemm(a, b)


def test_fnuz_on_nvidia_is_the_reference() -> None:
    x = torch.randn(200, 300, device="cuda")
    q = fp8fn.quantize(x, (1, 128), dtype=torch.float8_e4m3fnuz)
    data, scale = reference.quantize(x.cpu(), (1, 128), torch.float8_e4m3fnuz, "fp32")
    assert torch.equal(q.data.cpu().float(), data.float())
    assert torch.equal(q.scale.cpu(), scale)


# Inductor's own, which keeps a pool of memory alive.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_reduce_overhead() -> None:
    """CUDA graphs that torch.compile captures replay our launches on new data, forward and backward."""
    torch._dynamo.reset()
    model = (
        torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).cuda().bfloat16()
    )
    captured = torch.compile(model, backend="fp8fn", options={"where": "*", "triton.cudagraphs": True})
    plain = torch.compile(model, backend="fp8fn", options={"where": "*"})
    for seed in range(4):  # two to warm up and record, two to replay
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(256, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()
        found = []
        for compiled in (captured, plain):
            model.zero_grad(set_to_none=True)
            out = compiled(x)
            out.float().square().mean().backward()
            found.append([out.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_products_on_fp8_data_are_substituted() -> None:
    """An FP8 checkpoint's dequantized weight, and both sides quantized, by our kernels on the GPU."""
    torch._dynamo.reset()
    q = fp8fn.quantize(torch.randn(1024, 512, device="cuda"), (128, 128))
    weight, scale = q.data.contiguous(), q.scale.contiguous()

    def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scales = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return torch.nn.functional.linear(x, (weight.float() * scales).to(x.dtype))

    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with fp8fn.lowering.substitution(), torch.profiler.profile(acc_events=True) as profile:
        out = torch.compile(linear)(x, weight, scale)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x)
    expected = linear(x, weight, scale)
    (wanted,) = torch.autograd.grad(expected.float().square().sum(), x)
    assert "fp8fn::mm_a16w8" in {event.key for event in profile.key_averages()}
    for got, want in ((out, expected), (grad, wanted)):
        assert (got.float() - want.float()).norm() < 1e-2 * want.float().norm()
