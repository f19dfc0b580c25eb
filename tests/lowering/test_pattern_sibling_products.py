"""Products of one activation become one: its outputs and gradients, what is launched, and what is left alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn.lowering import post_grad_pass
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.patterns import sibling_products
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import SM89, Chip
from support.kept import Kept, OpByOp, kept

WIDTH, HEAD, TOKENS = 256, 128, (2, 160)
EXACT: Final = SavePlan()
JOINED, BOTH = "fp8fn.quantize_joined.default", "fp8fn.quantize_joined_dual.default"


class Attention(nn.Module):
    """Grouped-query attention: q has more columns than k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 2 * HEAD, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(2 * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = (q.cos() @ k.transpose(-2, -1)).softmax(-1)
        return x + self.o((scores @ v).transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 384, bias=False) for _ in range(2))
        self.down = nn.Linear(384, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().bfloat16()


def one_step(call: Callable[[Tensor], Tensor], model: nn.Module, shape: tuple[int, ...] = TOKENS) -> Kept:
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    result = kept(model, lambda: call(x).float().square().mean())
    assert x.grad is not None
    result.gradients["x"] = x.grad
    return result


def step(model: nn.Module, *, merge: bool, **options: Any) -> Kept:
    torch._dynamo.reset()
    backend = OpByOp(EXACT, options.pop("recipe", fp8fn.BLOCKWISE), merge_products=merge)
    return one_step(torch.compile(model, backend=backend, fullgraph=True, **options), model)


def of_siblings(reports: list[Substitution]) -> list[Substitution]:
    return [report for report in reports if report.pattern == sibling_products.NAME]


def counts(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[Counter[str]]:
    """The products and quantizers of each graph that a run fuses."""
    found: list[Counter[str]] = []
    fuse = post_grad_pass.fuse

    def counted(graph: torch.fx.Graph, *args: Any, **options: Any) -> list[Substitution]:
        reports = fuse(graph, *args, **options)
        found.append(Counter(str(node.target) for node in graph.nodes if "fp8fn." in str(node.target)))
        return reports

    monkeypatch.setattr(post_grad_pass, "fuse", counted)
    run()
    return found


@pytest.mark.parametrize("recipe", [fp8fn.BLOCKWISE, fp8fn.BLOCKWISE_POW2, fp8fn.HYBRID], ids=["", "pow2", "hybrid"])
def test_attention(recipe: fp8fn.Recipe) -> None:
    """All bits are kept but those of the sum of dgrad, which is float32's."""
    model = made(Attention)
    apart = step(model, merge=False, recipe=recipe)
    with post_grad_pass.recorded() as reports:
        together = step(model, merge=True, recipe=recipe)
    assert [(report.made, report.backward) for report in of_siblings(reports)] == [
        ("3 products as one", False), ("3 products as one", True),
    ]  # fmt: skip
    assert 45 < together.worst_snr(apart) < math.inf
    for result in (together, apart):
        del result.gradients["x"]
    assert together.equals(apart)


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Attention)
    forward, backward = counts(monkeypatch, lambda: step(model, merge=True))
    assert (forward["fp8fn.scaled_mm.default"], forward[JOINED]) == (2, 1)
    assert (backward["fp8fn.scaled_mm.default"], backward[JOINED], backward[BOTH]) == (4, 1, 1)
    assert backward["fp8fn.quantize_dual.default"] == 1


def test_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward's gradients come from one op already."""
    model = made(Gated)
    apart = step(model, merge=False)
    forward, backward = counts(monkeypatch, lambda: step(model, merge=True))
    assert (forward["fp8fn.scaled_mm.default"], forward[JOINED]) == (2, 1)
    assert backward[BOTH] == 0
    assert step(model, merge=True).equals(apart)


def test_dynamic() -> None:
    torch._dynamo.reset()
    model = made(Attention)
    with torch._dynamo.config.patch(error_on_recompile=True):
        backend = OpByOp(EXACT, merge_products=True)
        call = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        found = [one_step(call, model, (2, length)) for length in (160, 129)]
    assert found[0].equals(step(model, merge=True))


@pytest.mark.parametrize(("width", "bias", "merged"), [(64, False, 0), (128, True, 1)], ids=["half a block", "bias"])
def test_what_is_left_alone(width: int, bias: bool, merged: int) -> None:
    """Of layers with a bias the backward is merged, which has none."""
    model = nn.Sequential(*(nn.Linear(WIDTH, width, bias=bias) for _ in range(2))).bfloat16()

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            first, second = (layer(x) for layer in self.layers)
            return first.sin() + second.cos()

    with post_grad_pass.recorded() as reports:
        step(Beside(), merge=True)
    assert [report.backward for report in of_siblings(reports)] == [True] * merged


def test_other_devices_and_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Attention)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(targets, "target_of", lambda device: SM89)
    with post_grad_pass.recorded() as reports:
        step(model, merge=True)
    assert {report.reason for report in of_siblings(reports)} == {"not estimated for sm89"}
    monkeypatch.undo()
    monkeypatch.setattr(targets, "target_of", lambda device: targets.SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(sibling_products, "chip_of", lambda device, target: Chip("NVIDIA H100 80GB HBM3", 132))
    monkeypatch.setattr(sibling_products, "product_us", lambda problem, chip: (float(problem.n == 512), ""))
    with post_grad_pass.recorded() as reports:
        step(model, merge=True)
    forward, backward = of_siblings(reports)
    assert forward.reason == "slower as one: 1 µs, 0 apart"
    assert backward.reason == "slower as one: 0 µs, 0 apart"


def test_inductor(fresh_dynamo: None) -> None:
    results = {}
    model = made(Attention)
    for merge in (False, True):
        torch._dynamo.reset()
        options = {"where": "*", "merge_products": merge}
        with post_grad_pass.recorded() as reports:
            results[merge] = one_step(torch.compile(model, backend="fp8fn", options=options), model)
        assert len(of_siblings(reports)) == 2 * merge
    assert results[True].worst_snr(results[False]) > 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"merge_products": 1}, "is 1; use True or False"),
        ({"merge_products": True, "fuse_quantize": False}, "'fuse_quantize'.* False; set one of them"),
        ({"merge_products": True, "monitor": 10}, "'monitor'.* 10; set one of them"),
    ],
)
def test_options(options: dict[str, Any], words: str, fresh_dynamo: None) -> None:
    call = torch.compile(made(Gated), backend="fp8fn", options=options)
    with pytest.raises(Exception, match=rf"options\['merge_products'\].*{words}"):
        call(torch.zeros(2, WIDTH, dtype=torch.bfloat16))
