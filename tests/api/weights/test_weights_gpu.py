"""`FP8Weight`s on a GPU: products, gradients, copies, graphs, host time."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops.formats import ScaleFormat
from fp8fn.ops.layout import Block
from support.accuracy import snr
from support.fp8_weights import layer, make, parts, same, values

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
FORMATS: list[tuple[ScaleFormat, Block]] = [
    ("fp32", (128, 128)), ("fp32", (1, 128)), ("fp32", (1, -1)), ("fp32", (-1, -1)), ("e8m0", (1, 32)),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8, 100, 1000])
@pytest.mark.parametrize(("scale", "block"), FORMATS, ids=str)
def test_products_and_gradients(scale: ScaleFormat, block: Block, rows: int) -> None:
    w = make(512, 768, block=block, scale=scale, dtype=BF16)
    m = nn.Linear(768, 512, dtype=BF16, device="cuda")
    m.weight = nn.Parameter(w, requires_grad=False)
    m.cuda()
    dense, bias = values(w).cuda(), m.bias.detach().float()
    x = torch.randn(rows, 768, device="cuda", dtype=BF16, requires_grad=True)
    out = m(x)
    assert snr(out.float(), x.float() @ dense.T + bias) > 45
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)
    assert snr(dx.float(), grad.float() @ dense) > 45
    with torch.inference_mode():
        assert torch.equal(m(x.detach()), out)


def test_experts_and_groups() -> None:
    w = make(4, 512, 256, dtype=BF16).to("cuda")
    dense = values(w)
    for rows in (20, 300):
        x = torch.randn(rows, 512, device="cuda", dtype=BF16)
        ends = torch.tensor([4, 4, 9, rows], dtype=torch.int32, device="cuda")
        expected = torch.cat([x[:4].float() @ dense[0], x[4:9].float() @ dense[2], x[9:].float() @ dense[3]])
        assert snr(torch._grouped_mm(x, w, ends).float(), expected) > 45
        assert snr((x @ w[2]).float(), x.float() @ dense[2]) > 45


@pytest.mark.parametrize(("scale", "block"), FORMATS, ids=str)
def test_copies(scale: ScaleFormat, block: Block, tmp_path: Path) -> None:
    m = layer(block=block, scale=scale, dtype=BF16)
    n = copy.deepcopy(m).cuda()
    assert n.weight.is_cuda
    assert same(n.weight.cpu(), m.weight)
    other = layer(block=block, scale=scale, dtype=BF16)
    n.load_state_dict(other.state_dict())
    assert same(n.weight.cpu(), other.weight)
    assert same(copy.deepcopy(n).weight.cpu(), other.weight)
    torch.save(n.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True, map_location="cpu")["weight"]
    assert same(loaded, other.weight)
    pinned = m.weight.pin_memory()
    assert pinned.is_pinned()
    moved = pinned.to("cuda", non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert same(moved.cpu(), m.weight)
    assert torch.equal(parts(moved.t().contiguous().t())[0].cpu(), parts(m.weight)[0])
    if scale == "fp32":
        values_16 = torch.randn(320, 384, dtype=BF16, device="cuda")
        n.load_state_dict({"weight": values_16})
        assert same(n.weight, FP8Weight(fp8fn.quantize(values_16, block)))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["inductor", "fp8fn"])
def test_a_captured_graph(backend: str) -> None:
    """`reduce-overhead` replays a graph; weights that were loaded since are read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 512)).to("cuda", BF16)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(-1)
    for each in (model, other):
        fp8fn.quantize_weights(each)
    options = {"triton.cudagraphs": True} if backend == "inductor" else {"triton.cudagraphs": True, "where": "*"}
    compiled = torch.compile(model, backend=backend, options=options, fullgraph=True)
    x = torch.randn(4, 512, device="cuda", dtype=BF16)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(x).clone()
        assert snr(out.float(), model(x).float()) > 40
        model.load_state_dict(other.state_dict())
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(x).clone()
        assert snr(out.float(), other(x).float()) > 40


def test_load_and_save(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512)).to("cuda", BF16)
    fp8fn.quantize_weights(model)
    fp8fn.save_weights(model, tmp_path)
    with torch.device("meta"):
        again = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512)).to(BF16)
    fp8fn.load_weights(again, tmp_path, device="cuda")
    x = torch.randn(4, 512, device="cuda", dtype=BF16)
    assert torch.equal(again(x), model(x))


def test_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the host time of an eager layer beside a bf16 one's; fails only where it is far off."""
    w = make(128, 128, dtype=BF16).to("cuda")
    dense, x = w.dequantize(), torch.randn(1, 128, dtype=BF16, device="cuda")
    found = {}
    with torch.inference_mode():
        for name, weight in (("FP8Weight", w), ("bf16", dense)):
            times = []
            for _ in range(50):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    F.linear(x, weight)
                times.append((time.perf_counter() - start) / 20)
            found[name] = 1e6 * min(times)
    with capsys.disabled():
        print("\nhost time of F.linear: " + ", ".join(f"{name} {us:.1f} µs" for name, us in found.items()))
    assert found["FP8Weight"] < 100
