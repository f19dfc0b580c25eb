"""Training that keeps `gate` and `up` in FP8 quantizes `silu(gate) * up` in one launch forward and one backward."""

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
from fp8fn.lowering.patterns import saved_silu_mul
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import SM89, SM90, Target
from support.kept import Kept, OpByOp, kept

WIDTH, HIDDEN = 256, 512
HALF: Final = SavePlan("fp8")
SAVED, BACKWARD = "fp8fn.quantize_silu_mul_saved.default", "fp8fn.quantize_silu_mul_backward.default"
Activation = Callable[[Tensor, Tensor], Tensor]


class Gated(nn.Module):
    def __init__(self, activation: Activation, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.gate(x), self.up(x)))


class Chain(nn.Module):
    """Two layers, the second of which reads what the first one computes."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.layers = nn.Sequential(Gated(activation), Gated(activation))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def silu_first(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def up_first(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


def made(
    kind: Callable[..., nn.Module] = Gated, *args: Any, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Any:
    torch.manual_seed(0)
    return kind(*(args or (silu_first,)), **options).to(dtype)


def step(plan: SavePlan | None, model: nn.Module, shape: tuple[int, ...] = (320,), **options: Any) -> Kept:
    torch._dynamo.reset()
    backend = OpByOp(plan, options.pop("recipe", fp8fn.BLOCKWISE), fuse=options.pop("fuse", True))
    return one_step(torch.compile(model, backend=backend, fullgraph=True, **options), model, shape)


def one_step(call: Callable[[Tensor], Tensor], model: nn.Module, shape: tuple[int, ...]) -> Kept:
    dtype = next(model.parameters()).dtype
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return kept(model, lambda: call(x).float().square().mean())


def merged(reports: list[Substitution]) -> list[Substitution]:
    return [report for report in reports if report.pattern == saved_silu_mul.NAME]


def check(model: nn.Module, count: int, shape: tuple[int, ...] = (320,), **options: Any) -> None:
    """`count` forwards and backwards are merged, and the gradients are near those of a step that keeps everything."""
    everything = step(None, model, shape, **options)
    with post_grad_pass.recorded() as reports:
        half = step(HALF, model, shape, **options)
    assert Counter(report.made for report in merged(reports)) == Counter({SAVED: count, BACKWARD: count})
    assert half.loss == everything.loss
    assert half.worst_snr(everything) > 20


@pytest.mark.parametrize("activation", [silu_first, up_first])
@pytest.mark.parametrize("shape", [(320,), (2, 130)], ids=str)
def test_both_directions(activation: Activation, shape: tuple[int, ...]) -> None:
    check(made(Gated, activation), 1, shape)


def test_every_layer() -> None:
    check(made(Chain), 2)


@pytest.mark.parametrize(
    "recipe", [fp8fn.BLOCKWISE_POW2, fp8fn.HYBRID, fp8fn.BLOCKWISE_SQUARE], ids=["pow2", "hybrid", "square"]
)
def test_other_recipes(recipe: fp8fn.Recipe) -> None:
    check(made(), 1, recipe=recipe)


def test_float16() -> None:
    check(made(dtype=torch.float16), 1)


def test_one_graph_for_every_count_of_tokens() -> None:
    torch._dynamo.reset()
    model = made()
    with post_grad_pass.recorded() as reports, torch._dynamo.config.patch(error_on_recompile=True):
        call = torch.compile(model, backend=OpByOp(HALF), fullgraph=True, dynamic=True)
        found = [one_step(call, model, (count,)) for count in (320, 260, 507)]
    assert Counter(report.made for report in merged(reports)) == Counter({SAVED: 1, BACKWARD: 1})
    for result, count in zip(found, (320, 260, 507), strict=True):
        assert result.worst_snr(step(None, model, (count,))) > 20


def test_the_forward_keeps_its_bits_and_the_backward_is_near() -> None:
    """Against the launches that are merged, which read gate, up and some products of theirs rounded to 16 bits."""
    model = made()
    apart, together = (step(HALF, model, fuse=fuse) for fuse in (False, True))
    assert together.nbytes == apart.nbytes
    assert together.worst_snr(apart) > 28


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the op: x and three weights in the forward, the gradient and three weights in the backward."""
    graphs: list[Counter[str]] = []
    fuse = post_grad_pass.fuse

    def counted(graph: torch.fx.Graph, *options: Any) -> list[Substitution]:
        reports = fuse(graph, *options)
        names = [str(node.target) for node in graph.nodes]
        graphs.append(Counter(name for name in names if name.startswith("fp8fn.quantize")))
        return reports

    monkeypatch.setattr(post_grad_pass, "fuse", counted)
    step(HALF, made())
    others = {"fp8fn.quantize_dual.default": 1, "fp8fn.quantize.default": 3}
    assert graphs == [Counter({SAVED: 1, **others}), Counter({BACKWARD: 1, **others})]


def test_a_gradient_that_others_read_is_left_alone() -> None:
    """As a bias's gradient does."""
    model = made(bias=True)
    everything = step(None, model)
    with post_grad_pass.recorded() as reports:
        half = step(HALF, model)
    found = {report.made: report.reason for report in merged(reports)}
    assert found.keys() == {SAVED, ""}
    assert "reads a gradient too" in str(found[""])
    assert half.worst_snr(everything) > 20


@pytest.mark.parametrize(
    "activation",
    [
        lambda gate, up: gate * torch.sigmoid(1.5 * gate) * up,
        lambda gate, up: F.gelu(gate) * up,
        lambda gate, up: F.silu(gate) * up * up,
    ],
    ids=["sigmoid of another", "gelu", "square of up"],
)
def test_other_functions_are_left_alone(activation: Activation) -> None:
    model = made(Gated, activation)
    everything = step(None, model)
    with post_grad_pass.recorded() as reports:
        half = step(HALF, model)
    assert not merged(reports)
    assert half.worst_snr(everything) > 18


@pytest.mark.parametrize(
    ("target", "recipe", "merges"),
    [
        (SM90, fp8fn.BLOCKWISE, True),
        (SM90, fp8fn.HYBRID, True),
        (SM90, fp8fn.ROWWISE, False),
        (SM89, fp8fn.BLOCKWISE, False),
    ],
    ids=["sm90", "sm90 hybrid", "sm90 rowwise", "sm89"],
)
def test_where_a_device_has_kernels(
    target: Target, recipe: fp8fn.Recipe, merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes run for that device; the references compute."""
    monkeypatch.setattr(targets, "target_of", lambda device: target)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    with post_grad_pass.recorded() as reports:
        step(HALF, made(), recipe=recipe)
    found = merged(reports)
    assert {report.made for report in found} == ({SAVED, BACKWARD} if merges else {""} if found else set())
    assert all(str(report.reason).startswith("no kernel for it: ") for report in found if not merges)


def test_nothing_is_merged_where_gate_and_up_are_kept_in_16_bits() -> None:
    with post_grad_pass.recorded() as reports:
        step(SavePlan(), made())
    assert not merged(reports)


def test_inductor(fresh_dynamo: None) -> None:
    model, results = made(), {}
    for save in ("all", "fp8"):
        torch._dynamo.reset()
        call = torch.compile(model, backend="fp8fn", options={"where": "*", "save": save})
        with post_grad_pass.recorded() as reports:
            results[save] = one_step(call, model, (320,))
    assert Counter(report.made for report in merged(reports)) == Counter({SAVED: 1, BACKWARD: 1})
    assert results["fp8"].worst_snr(results["all"]) > 20
