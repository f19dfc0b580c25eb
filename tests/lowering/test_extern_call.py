"""How Inductor calls the ops: one statement for all results, the same bits, and its own way where that must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import lowering
from torch._inductor.utils import fresh_cache, run_and_get_code

import fp8fn
from fp8fn.lowering.inductor import extern_call
from fp8fn.ops.cuda.runtime.call_cache import Program

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OWN_WAY = {
    "hooks": {"generate_intermediate_hooks": True},
    "alignment": {"assume_unaligned_fallback_output": True},
}


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384, bias), nn.ReLU(), nn.Linear(384, 256, bias)).bfloat16()


def step(model: nn.Module, x: Tensor, **options: Any) -> tuple[tuple[Tensor, ...], list[str]]:
    """Output and gradients, and the code of forward and backward."""
    dynamic = options.pop("dynamic", None)
    compiled = torch.compile(model, backend="fp8fn", dynamic=dynamic, options={"where": "*", **options})

    def run() -> tuple[Tensor, ...]:
        out = compiled(x)
        return out.detach(), *torch.autograd.grad(out.float().sum(), list(model.parameters()))

    with fresh_cache():
        found: tuple[tuple[Tensor, ...], list[str]] = run_and_get_code(run)
    return found


def calls_of(code: list[str], op: str) -> list[str]:
    lines = [line.strip() for text in code for line in text.splitlines()]
    return [line for line in lines if f" = torch.ops.fp8fn.{op}.default(" in line]


@pytest.fixture
def own_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on Inductor's own way for every call."""
    return lambda: monkeypatch.setattr(extern_call, "_is_plain", lambda: False)


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_same_bits_as_inductors_own_way(own_way: Callable[[], None], dynamic: bool | None) -> None:
    model, x = mlp(), torch.randn(24, 256, dtype=torch.bfloat16)
    found, code = step(model, x, dynamic=dynamic)
    assert all(line.count("buf") >= 4 for line in calls_of(code, "quantize_dual"))
    torch._dynamo.reset()
    own_way()
    expected, other = step(model, x, dynamic=dynamic)
    assert all(line.partition(" = ")[0].count("buf") == 1 for line in calls_of(other, "quantize_dual"))
    for op in ("quantize_dual", "quantize", "scaled_mm"):
        assert len(calls_of(code, op)) == len(calls_of(other, op)) > 0
    assert all(map(torch.equal, found, expected))


def test_a_site_for_each_call_whose_sizes_are_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), torch.randn(24, 256, dtype=torch.bfloat16)
    expected, code = step(model, x)
    calls = {op: len(calls_of(code, op)) for op in ("quantize_dual", "quantize", "scaled_mm")}
    monkeypatch.setattr(extern_call, "_WITH_SITES", {"cpu"})
    torch._dynamo.reset()
    found, code = step(model, x)
    for op, count in calls.items():
        assert not calls_of(code, op)
        made = 0
        for text in code:
            sites = [line for line in text.splitlines() if f": torch.ops.fp8fn.{op}.default(x0" in line]
            assert all(text.count(f" = {line.partition(' = ')[0]}(") == 1 for line in sites)
            made += len(sites)
        assert made == count > 0
    assert all(map(torch.equal, found, expected))
    torch._dynamo.reset()
    found, code = step(model, x, dynamic=True)
    assert calls_of(code, "quantize_dual")  # of rows that are known at run time alone
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
@pytest.mark.parametrize("graphs", [False, True])
def test_sites_on_a_gpu(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New values, other addresses, an unaligned one, and a profiler that sees each op."""
    started: list[Program] = []
    start = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *x: started.append(self) or start(self, *x))
    model = mlp().cuda()
    options = {"where": "*", "triton.cudagraphs": graphs}
    compiled = torch.compile(model, backend="fp8fn", dynamic=False, options=options)
    inputs = [torch.randn(160, 256, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs.append(torch.randn(160 * 256 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(160, 256))

    def run(x: Tensor) -> list[Tensor]:
        out = compiled(x.clone() if graphs else x)
        return [out.detach().clone(), *torch.autograd.grad(out.float().square().sum(), list(model.parameters()))]

    found = [[each.clone() for each in run(x)] for x in inputs]
    assert len(started) > 8 or graphs  # in a graph's replay nothing is called
    monkeypatch.setattr(extern_call, "_WITH_SITES", set())
    torch._dynamo.reset()
    with fresh_cache():
        compiled = torch.compile(model, backend="fp8fn", dynamic=False, options=options)
        for x, got in zip(inputs, found, strict=True):
            assert all(map(torch.equal, got, run(x)))


@pytest.mark.gpu
def test_a_profiler_sees_the_ops_of_sites() -> None:
    model, x = mlp().cuda(), torch.randn(160, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="fp8fn", dynamic=False, options={"where": "*"})
    for _ in range(3):
        compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        compiled(x)
    assert sum(event.count for event in profiler.key_averages() if event.key == "fp8fn::scaled_mm") == 2


@pytest.mark.parametrize("patches", OWN_WAY.values(), ids=OWN_WAY)
def test_what_inductor_adds_to_a_call_is_added(patches: dict[str, bool]) -> None:
    model, x = mlp(), torch.randn(24, 256, dtype=torch.bfloat16)
    expected, _ = step(model, x)
    torch._dynamo.reset()
    found, code = step(model, x, **patches)
    assert all(line.partition(" = ")[0].count("buf") == 1 for line in calls_of(code, "quantize_dual"))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("plain_first", [False, True])
def test_what_nothing_reads_is_let_go_at_once(plain_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowering also serves after a graph that plain Inductor compiled, which makes an own one for the op."""

    def rows(x: Tensor) -> Tensor:
        return torch.ops.fp8fn.quantize_dual(x + 1)[0].float()

    x = torch.randn(16, 256)
    if plain_first:
        monkeypatch.delitem(lowering.lowerings, torch.ops.fp8fn.quantize_dual.default, raising=False)
        with fresh_cache():
            torch.compile(lambda x: rows(x * 2))(x)
        torch._dynamo.reset()
        extern_call.install.cache_clear()
    with fresh_cache(), fp8fn.lowering.substitution():
        found, code = run_and_get_code(torch.compile(rows), x)
    lines = [line.strip() for line in code[0].splitlines()]
    at = next(i for i, line in enumerate(lines) if "quantize_dual.default(" in line)
    assert lines[at].partition(" = ")[0].endswith(", _, _, _")
    assert lines[at + 1] == "del _"
    assert torch.equal(found, rows(x))


def test_inputs_are_laid_out_as_they_were_traced() -> None:
    """A quantizer's input that Inductor computes, and could lay out in any way."""

    def turned(x: Tensor) -> tuple[Tensor, Tensor]:
        data, scale = torch.ops.fp8fn.quantize((x.mT * 2).contiguous(), (128, 128))
        return data.float(), scale

    x = torch.randn(256, 384)
    with fp8fn.lowering.substitution():
        found = torch.compile(turned)(x)
    for got, want in zip(found, turned(x), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


def test_a_number_known_only_at_run_time_takes_inductors_own_way() -> None:
    def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.fp8fn.quantize_rms_norm(x, weight, eps)[0].float()

    x, weight = torch.randn(16, 256), torch.rand(256)
    with fp8fn.lowering.substitution():
        compiled = torch.compile(normed, dynamic=True)
        for eps in (1e-6, 0.5):
            assert torch.equal(compiled(x, weight, eps), normed(x, weight, eps))


def test_a_tensor_given_by_name() -> None:
    def product(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        a, b = torch.ops.fp8fn.quantize(x, (1, 128)), torch.ops.fp8fn.quantize(w, (128, 128))
        out: Tensor = torch.ops.fp8fn.scaled_mm(
            *a, (1, 128), *b, (128, 128), out_dtype=torch.float32, bias=bias.relu()
        )  # fmt: skip
        return out + 1

    given = torch.randn(16, 256), torch.randn(256, 384), torch.randn(384)
    with fp8fn.lowering.substitution():
        found = torch.compile(product)(*given)
    assert torch.equal(found, product(*given))
