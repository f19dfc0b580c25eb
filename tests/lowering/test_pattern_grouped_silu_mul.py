"""Experts' `silu(gate) * up` in training: one launch computes and quantizes it, and one its gradient."""

from __future__ import annotations

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
from fp8fn.lowering.patterns import grouped_silu_mul_backward, producers
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import SM89, SM90, Target
from support.kept import Kept, OpByOp, kept

WIDTH, HIDDEN = 256, 512
EXACT: Final = SavePlan()
ROWS, COLUMNS, BOTH, GRADIENT = (
    f"fp8fn.quantize_silu_mul{form}.default" for form in ("", "_grouped", "_grouped_dual", "_grad_grouped_dual")
)


class Experts(nn.Module):
    """Two experts, with rows past the last one's."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = nn.Parameter(torch.randn(2, WIDTH, 2 * HIDDEN) / 16)
        self.down = nn.Parameter(torch.randn(2, HIDDEN, WIDTH) / 22)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([100, x.shape[0] - 9], dtype=torch.int32)
        gate, up = torch._grouped_mm(x, self.gate_up, offsets).chunk(2, -1)
        out = torch._grouped_mm(self.activation(gate) * up, self.down, offsets)
        return out[: x.shape[0] - 9]


def made(*args: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(*args).bfloat16()


def one_step(call: Callable[[Tensor], Tensor], model: nn.Module, count: int = 320) -> Kept:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    return kept(model, lambda: call(x).float().square().mean())


def step(plan: SavePlan | None, model: nn.Module, **options: Any) -> Kept:
    torch._dynamo.reset()
    backend = OpByOp(plan, options.pop("recipe", fp8fn.BLOCKWISE), fuse=options.pop("fuse", True))
    return one_step(torch.compile(model, backend=backend, fullgraph=True), model, **options)


def of(name: str, reports: list[Substitution]) -> list[Substitution]:
    return [report for report in reports if report.pattern == name]


@pytest.mark.parametrize(
    "recipe", [fp8fn.BLOCKWISE, fp8fn.BLOCKWISE_POW2, fp8fn.BLOCKWISE_SQUARE, fp8fn.ROWWISE], ids=str
)
def test_values(recipe: fp8fn.Recipe) -> None:
    """Each rounds once, to FP8, and gradients do not depend on what the forward keeps."""
    model = made()
    apart = step(None, model, fuse=False, recipe=recipe)
    with post_grad_pass.recorded() as reports:
        together = step(None, model, recipe=recipe)
    assert [report.made for report in of(producers.NAME, reports)] == [BOTH]
    assert [report.made for report in of(grouped_silu_mul_backward.NAME, reports)] == [GRADIENT]
    assert together.worst_snr(apart) > 28
    exact = step(EXACT, model, recipe=recipe)
    assert exact.equals(together)
    assert exact.nbytes < together.nbytes


@pytest.mark.parametrize("recipe", [fp8fn.BLOCKWISE, fp8fn.BLOCKWISE_SQUARE], ids=lambda recipe: recipe.key)
@pytest.mark.parametrize("plan", [EXACT, None, SavePlan("fp8")], ids=["exact", "all", "fp8"])
def test_what_is_launched(plan: SavePlan | None, recipe: fp8fn.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares within groups are written by the same launches."""
    found: list[Counter[str]] = []
    fuse = post_grad_pass.fuse

    def counted(graph: torch.fx.Graph, *args: Any) -> list[Substitution]:
        reports = fuse(graph, *args)
        names = (str(node.target) for node in graph.nodes)
        found.append(Counter(name for name in names if "silu" in name or "sigmoid" in name or "quantize_g" in name))
        return reports

    monkeypatch.setattr(post_grad_pass, "fuse", counted)
    step(plan, made(), recipe=recipe)
    forward, backward = found
    dual = "fp8fn.quantize_grouped_dual.default"  # of x in the forward, of the output's gradient in the backward
    assert forward == {dual: 1, (BOTH if plan is None else ROWS): 1}
    assert backward == {dual: 1, GRADIENT: 1, **({} if plan is None else {COLUMNS: 1})}


def test_one_graph_for_every_count_of_tokens() -> None:
    torch._dynamo.reset()
    model = made()
    with torch._dynamo.config.patch(error_on_recompile=True), post_grad_pass.recorded() as reports:
        call = torch.compile(model, backend=OpByOp(EXACT), fullgraph=True, dynamic=True)
        found = [one_step(call, model, count) for count in (320, 260, 1507)]
    assert [report.made for report in of(grouped_silu_mul_backward.NAME, reports)] == [GRADIENT]
    for result, count in zip(found, (320, 260, 1507), strict=True):
        assert result.equals(step(EXACT, model, count=count))


@pytest.mark.parametrize("activation", [F.gelu, lambda gate: gate * torch.sigmoid(1.5 * gate)], ids=["gelu", "scaled"])
def test_other_functions_are_left_alone(activation: Callable[[Tensor], Tensor]) -> None:
    model = made(activation)
    with post_grad_pass.recorded() as reports:
        exact = step(EXACT, model)
    assert not of(grouped_silu_mul_backward.NAME, reports)
    assert exact.equals(step(None, model))


class Biased(Experts):
    """The bias's gradient is a sum of the rows of that of `hidden`, which a kernel of Inductor's computes."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2 * HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([100, x.shape[0]], dtype=torch.int32)
        gate, up = (torch._grouped_mm(x, self.gate_up, offsets) + self.bias).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.down, offsets)


def test_a_gradient_that_others_read_is_left_alone() -> None:
    torch.manual_seed(0)
    with post_grad_pass.recorded() as reports:
        step(EXACT, Biased().bfloat16())
    (report,) = of(grouped_silu_mul_backward.NAME, reports)
    assert report.made == ""
    assert "reads a gradient too" in str(report.reason)


@pytest.mark.parametrize(
    ("target", "recipe", "fuses"),
    [
        (SM90, fp8fn.BLOCKWISE, True),
        (SM90, fp8fn.BLOCKWISE_SQUARE, True),
        (SM90, fp8fn.ROWWISE, False),
        (SM89, fp8fn.BLOCKWISE, False),
    ],
    ids=["sm90", "sm90 squares", "sm90 rowwise", "sm89"],
)
def test_where_a_device_has_kernels(
    target: Target, recipe: fp8fn.Recipe, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes run for that device; the references compute."""
    monkeypatch.setattr(targets, "target_of", lambda device: target)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    with post_grad_pass.recorded() as reports:
        step(None, made(), recipe=recipe)
    activation, gradient = (of(name, reports) for name in (producers.NAME, grouped_silu_mul_backward.NAME))
    assert [report.made for report in (*activation, *gradient)] == ([BOTH, GRADIENT] if fuses else ["", ""])
    assert fuses or all("no kernel for it: " in str(report.reason) for report in (*activation, *gradient))


def test_inductor(fresh_dynamo: None) -> None:
    model, results = made(), {}
    for fuse in (False, True):
        torch._dynamo.reset()
        backend = torch.compile(model, backend="fp8fn", options={"where": "*", "fuse_quantize": fuse})
        with post_grad_pass.recorded() as reports:
            results[fuse] = one_step(backend, model)
    assert [report.made for report in of(grouped_silu_mul_backward.NAME, reports)] == [GRADIENT]
    assert results[True].worst_snr(results[False]) > 28
