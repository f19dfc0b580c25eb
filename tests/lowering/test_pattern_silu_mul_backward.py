"""The backward of a gated MLP whose `gate` and `up` are kept in 16 bits quantizes all three results in one launch."""

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
from fp8fn.lowering.graph.nodes import arguments_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.patterns import silu_mul_backward
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import SM89, SM90, Target
from support.kept import Kept, OpByOp, kept

WIDTH, HIDDEN = 256, 512
EXACT: Final = SavePlan()
BACKWARD: Final = "fp8fn.quantize_silu_mul_backward.default"
Activation = Callable[[Tensor, Tensor], Tensor]


def silu_first(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def up_first(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


class Gated(nn.Module):
    def __init__(self, activation: Activation, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.gate(x), self.up(x)))


class Whole(Gated):
    """One product with the weights of `gate` and `up`: a kernel writes both gradients into one tensor."""

    def __init__(self) -> None:
        super().__init__(silu_first)
        self.both = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(*self.both(x).chunk(2, -1)))


def made(activation: Activation = silu_first, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    return Gated(activation, **options).to(dtype)


def one_step(call: Callable[[Tensor], Tensor], model: nn.Module, shape: tuple[int, ...] = (320,)) -> Kept:
    dtype = next(model.parameters()).dtype
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return kept(model, lambda: call(x).float().square().mean())


def step(plan: SavePlan | None, model: nn.Module, shape: tuple[int, ...] = (320,), **options: Any) -> Kept:
    torch._dynamo.reset()
    backend = OpByOp(plan, options.pop("recipe", fp8fn.BLOCKWISE), fuse=options.pop("fuse", True))
    return one_step(torch.compile(model, backend=backend, fullgraph=True, **options), model, shape)


def merged(reports: list[Substitution]) -> list[Substitution]:
    return [report for report in reports if report.pattern == silu_mul_backward.NAME]


def check(model: nn.Module, shape: tuple[int, ...] = (320,), **options: Any) -> None:
    """The backward is merged, and near the one that is not, which rounds more values to 16 bits."""
    apart = step(EXACT, model, shape, fuse=False, **options)
    with post_grad_pass.recorded() as reports:
        together = step(EXACT, model, shape, **options)
    assert [report.made for report in merged(reports)] == [BACKWARD]
    assert together.worst_snr(apart) > 28
    assert together.equals(step(None, model, shape, **options))


@pytest.mark.parametrize("activation", [silu_first, up_first])
@pytest.mark.parametrize("shape", [(320,), (2, 130)], ids=str)
def test_spellings(activation: Activation, shape: tuple[int, ...]) -> None:
    check(made(activation), shape)


@pytest.mark.parametrize(
    "recipe",
    [fp8fn.BLOCKWISE_POW2, fp8fn.HYBRID, fp8fn.BLOCKWISE_SQUARE, fp8fn.ROWWISE],
    ids=["pow2", "hybrid", "square", "rowwise"],
)
def test_other_recipes(recipe: fp8fn.Recipe) -> None:
    check(made(), recipe=recipe)


def test_float16() -> None:
    check(made(dtype=torch.float16))


def test_one_graph_for_every_count_of_tokens() -> None:
    torch._dynamo.reset()
    model = made()
    with post_grad_pass.recorded() as reports, torch._dynamo.config.patch(error_on_recompile=True):
        call = torch.compile(model, backend=OpByOp(EXACT), fullgraph=True, dynamic=True)
        found = [one_step(call, model, (count,)) for count in (320, 260, 507)]
    assert [report.made for report in merged(reports)] == [BACKWARD]
    for result, count in zip(found, (320, 260, 507), strict=True):
        assert result.equals(step(EXACT, model, (count,)))


def graphs_of(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[tuple[Counter[str], torch.fx.Graph]]:
    """The quantizers of each graph that a run fuses, counted, and the graph."""
    found: list[tuple[Counter[str], torch.fx.Graph]] = []
    fuse = post_grad_pass.fuse

    def counted(graph: torch.fx.Graph, *args: Any) -> list[Substitution]:
        reports = fuse(graph, *args)
        names = [str(node.target) for node in graph.nodes]
        found.append((Counter(name for name in names if name.startswith("fp8fn.quantize")), graph))
        return reports

    monkeypatch.setattr(post_grad_pass, "fuse", counted)
    run()
    return found


@pytest.mark.parametrize("plan", [EXACT, None], ids=["exact", "all"])
def test_what_is_launched(plan: SavePlan | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the op: the gradient, x where its columns are not kept, and weights. No result of the op goes unread."""
    model = made()
    (_, _), (backward, graph) = graphs_of(monkeypatch, lambda: step(plan, model))
    assert backward[BACKWARD] == 1
    assert "fp8fn.quantize_silu_mul.default" not in backward
    (op,) = (node for node in graph.nodes if str(node.target) == BACKWARD)
    given = arguments_of(op)
    assert given["gate_scale"] is None
    assert given["up_scale"] is None
    places = sorted(node.args[1] for node in op.users)
    assert places == list(range(10 if plan is EXACT else 8))
    assert not any("sigmoid" in str(node.target) or "silu.default" in str(node.target) for node in graph.nodes)


def test_a_step_without_fusion_is_not_merged(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    model = made()
    call = torch.compile(model, backend="fp8fn", options={"where": "*", "fuse_quantize": False})
    with post_grad_pass.recorded() as reports:
        one_step(call, model)
    assert not merged(reports)


def test_a_gradient_that_others_read_is_left_alone() -> None:
    """As a bias's gradient does."""
    model = made(bias=True)
    with post_grad_pass.recorded() as reports:
        exact = step(EXACT, model)
    (report,) = merged(reports)
    assert report.made == ""
    assert "reads a gradient too" in str(report.reason)
    assert exact.equals(step(None, model))


def test_float32_is_left_alone() -> None:
    with post_grad_pass.recorded() as reports:
        step(EXACT, made(dtype=torch.float32))
    (report,) = merged(reports)
    assert "not one of 16 bits" in str(report.reason)


@pytest.mark.parametrize(
    "activation",
    [
        lambda gate, up: gate * torch.sigmoid(gate) * up,
        lambda gate, up: gate * torch.sigmoid(1.5 * gate) * up,
        lambda gate, up: F.gelu(gate) * up,
        lambda gate, up: F.silu(gate) * up * up,
        lambda gate, up: F.silu(gate) * up[:1],
        lambda gate, up: F.silu(gate.cos()) * up,
    ],
    ids=["a sum of two terms", "sigmoid of another", "gelu", "square of up", "broadcast", "computed gate"],
)
def test_other_functions_are_left_alone(activation: Activation) -> None:
    model = made(activation)
    with post_grad_pass.recorded() as reports:
        exact = step(EXACT, model)
    assert not merged(reports)
    assert exact.equals(step(None, model))


def test_gradients_in_one_tensor_are_left_alone() -> None:
    torch.manual_seed(0)
    with post_grad_pass.recorded() as reports:
        step(EXACT, Whole().bfloat16())
    assert not merged(reports)


@pytest.mark.parametrize(
    ("target", "recipe", "merges"),
    [
        (SM90, fp8fn.BLOCKWISE, True),
        (SM90, fp8fn.BLOCKWISE_POW2, True),
        (SM90, fp8fn.BLOCKWISE_SQUARE, True),
        (SM90, fp8fn.HYBRID, True),
        (SM90, fp8fn.ROWWISE, False),
        (SM89, fp8fn.BLOCKWISE, False),
    ],
    ids=["sm90", "sm90 pow2", "sm90 square", "sm90 hybrid", "sm90 rowwise", "sm89"],
)
def test_where_a_device_has_kernels(
    target: Target, recipe: fp8fn.Recipe, merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes run for that device; the references compute."""
    monkeypatch.setattr(targets, "target_of", lambda device: target)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    with post_grad_pass.recorded() as reports:
        step(EXACT, made(), recipe=recipe)
    (report,) = merged(reports)
    assert report.made == (BACKWARD if merges else "")
    assert merges or str(report.reason).startswith("no kernel for it: ")


def test_inductor(fresh_dynamo: None) -> None:
    """Inductor rounds to 16 bits where autograd's formula ends, as the op does."""
    model, results = made(), {}
    for fuse in (False, True):
        torch._dynamo.reset()
        backend = torch.compile(model, backend="fp8fn", options={"where": "*", "fuse_quantize": fuse})
        with post_grad_pass.recorded() as reports:
            results[fuse] = one_step(backend, model)
    assert [report.made for report in merged(reports)] == [BACKWARD]
    assert results[True].worst_snr(results[False]) > 30
