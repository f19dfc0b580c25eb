"""The estimate of a whole step: what is counted once, what the host adds, and when a model is left alone in full."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn.demo.model import GPT
from fp8fn.demo.presets import MODELS
from fp8fn.lowering import recipe_pass, whole_step
from fp8fn.lowering.recipe_pass import Decision, decide, rewrite
from fp8fn.lowering.whole_step import StepTimes, Taken, step_times
from fp8fn.ops.recipe import BLOCKWISE
from fp8fn.ops.targets import SM90
from fp8fn.ops.tuning.estimate import Parts
from fp8fn.ops.tuning.rates import HostTimes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BF16 = torch.bfloat16
PARTS = Parts(
    forward=100.0, dgrad=110.0, wgrad=120.0, x=10.0, weight=20.0, weight_again=25.0, gradient=15.0, bf16=170.0,
    source="the test",
)  # fmt: skip


@pytest.fixture
def free_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_step, "HOST", HostTimes(0.0, 0.0, 0.0, 0.0))


def test_one_product(free_host: None) -> None:
    both = step_times([Taken(PARTS, "x", "w", dgrad=True, wgrad=True)])
    assert (both.fp8, both.bf16) == (100 + 110 + 120 + 10 + 20 + 25 + 15, 3 * 170)
    assert (both.products, both.backward, both.loses) == (1, True, False)
    forward = step_times([Taken(PARTS, "x", "w", dgrad=False, wgrad=False)])
    assert (forward.fp8, forward.bf16, forward.backward) == (130, 170, False)
    frozen = step_times([Taken(PARTS, "x", "w", dgrad=True, wgrad=False)])
    assert (frozen.fp8, frozen.bf16) == (100 + 110 + 10 + 20 + 25 + 15, 2 * 170)
    first = step_times([Taken(PARTS, "x", "w", dgrad=False, wgrad=True)])
    assert (first.fp8, first.bf16) == (100 + 120 + 10 + 20 + 15, 2 * 170)


def test_a_shared_tensor_is_quantized_once(free_host: None) -> None:
    """q, k and v of one x; and one weight that is tied to two products."""
    alone = step_times([Taken(PARTS, "x", "q", dgrad=True, wgrad=True)])
    three = step_times([Taken(PARTS, "x", name, dgrad=True, wgrad=True) for name in "qkv"])
    assert three.fp8 == 3 * alone.fp8 - 2 * PARTS.x
    tied = step_times([Taken(PARTS, name, "w", dgrad=True, wgrad=True) for name in ("x", "y")])
    assert tied.fp8 == 2 * alone.fp8 - PARTS.weight - PARTS.weight_again


def test_launches_take_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_step, "HOST", HostTimes(product=20.0, quantize=25.0, dual=30.0, bf16=12.0))
    both = step_times([Taken(PARTS, "x", "w", dgrad=True, wgrad=True)])
    # x and its columns, the weight, three products, the gradient and its columns, the weight again
    assert (both.fp8_host, both.bf16_host) == (30 + 25 + 3 * 20 + 30 + 30, 3 * 12)
    forward = step_times([Taken(PARTS, "x", "w", dgrad=False, wgrad=False)])
    assert (forward.fp8_host, forward.bf16_host) == (25 + 25 + 20, 12)


def test_a_step_waits_for_the_slower_of_device_and_host() -> None:
    bound = StepTimes(fp8=100.0, bf16=150.0, fp8_host=180.0, bf16_host=40.0, products=2, backward=True)
    assert (bound.fp8_us, bound.bf16_us, bound.loses) == (180.0, 150.0, True)
    assert bound.describe() == ("2 products, forward and backward: bf16 0.15 ms → FP8 0.18 ms, launch-bound (0.83x)")
    assert bound.reason.startswith("slower as a whole step: 2 products")
    assert bound.reason.endswith("; where='*' takes it too")
    both = bound + StepTimes(fp8=100.0, bf16=350.0, products=1, unknown=3)
    assert (both.fp8_us, both.bf16_us, both.products, both.unknown, both.loses) == (200.0, 500.0, 3, 3, False)
    assert both.describe().endswith("FP8 0.2 ms (2.50x); unknown: the time of 3 more in FP8")
    graphed = StepTimes(fp8=100.0, bf16=150.0, fp8_host=180.0, bf16_host=40.0, products=2, replayed=True)
    assert (graphed.fp8_us, graphed.bf16_us, graphed.loses) == (100.0, 150.0, False)
    assert not StepTimes().loses


class Layers(nn.Module):
    """Pairs of products that share their x."""

    def __init__(self, width: int, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, hidden, bias=False, dtype=BF16) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, hidden, bias=False, dtype=BF16) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, bias=False, dtype=BF16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            x = x + down(F.silu(gate(x)) * up(x))
        return x


def decisions(
    model: Callable[..., Any], *args: Any, target: str | None = "h200", **options: Any
) -> tuple[list[Decision], StepTimes]:
    """The decisions about a model, uncompiled, for a target."""
    found: list[Decision] = []

    def backend(gm: Any, _: Any) -> Any:
        found.extend(decide(gm, options.get("where"), BLOCKWISE, target, replayed=options.get("replayed", False)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*args)
    return found, recipe_pass.step_of(found, replayed=options.get("replayed", False))


def on_meta(model: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return model(), torch.empty(*shape, dtype=BF16, requires_grad=True)


def test_single_products_win_and_their_sum_loses() -> None:
    """Each product is faster on the device; the launches of all take the host longer than bf16 takes."""
    model, x = on_meta(lambda: Layers(2048, 2048), 4096, 2048)
    found, step = decisions(model, x)
    assert [each.times is not None and each.times.speedup > 1 for each in found] == [True] * 6
    assert step.fp8 < step.bf16 < step.fp8_host
    assert {each.reason for each in found} == {step.reason}
    assert "launch-bound" in step.reason
    for options in ({"replayed": True}, {"where": "*"}, {"where": lambda site: True}):
        others, _ = decisions(model, x, **options)
        assert [each.reason for each in others] == [None] * 6


class Experts(nn.Module):
    """A product of eight groups of rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, width, width, dtype=BF16))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=offsets)


@pytest.mark.parametrize(("width", "rows", "wins"), [(1024, 4096, False), (4096, 32768, True)])
def test_products_of_groups_count_as_if_the_groups_were_equal(width: int, rows: int, wins: bool) -> None:
    model, x = on_meta(lambda: Experts(width), rows, width)
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    (decision,), step = decisions(model, x, offsets)
    assert (step.products, step.groups, step.unknown) == (1, 1, 0)
    assert "1 of them by groups, as if these were equal" in step.describe()
    assert decision.times is None
    assert (decision.reason is None) is wins
    assert step.loses is not wins


def test_a_large_model_is_taken() -> None:
    model, x = on_meta(lambda: Layers(4096, 14336, 1), 8192, 4096)
    found, step = decisions(model, x)
    assert [each.reason for each in found] == [None] * 3
    assert step.fp8 > step.fp8_host
    total = sum(each.times.fp8.combined for each in found if each.times is not None)
    shared = found[0].taken
    assert shared is not None
    assert step.fp8 == pytest.approx(total - shared.parts.x)
    assert step.bf16 / step.fp8 > 1.3


def test_a_forward_alone_is_judged_by_its_forward() -> None:
    """The quantizers of a long K take what the forward saves, which the backward would win back."""
    model, x = on_meta(lambda: nn.Linear(2816, 1024, bias=False, dtype=BF16), 8192, 2816)
    found, step = decisions(model, x)
    assert [each.reason for each in found] == [None]
    assert step.backward
    with torch.no_grad():
        found, step = decisions(model, x.detach())
    (reason,) = (each.reason for each in found)
    times = found[0].times
    assert times is not None
    assert times.speedup > 1
    assert times.fp8.forward > times.bf16.forward
    assert reason is not None
    assert f"{times.fp8.forward:.0f} µs in FP8" in reason
    assert ", forward by" in reason


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's tensors pass for an H200's where times are estimated."""
    from fp8fn.lowering import costs
    from fp8fn.ops.tuning.rates import NAMED

    monkeypatch.setattr(recipe_pass, "chip_for", lambda device, target=None: NAMED["h200"])
    monkeypatch.setattr(costs.targets, "target_of", lambda device: SM90)


def test_the_log_has_one_line_for_a_model_that_is_left_alone(on_hopper: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp8fn")
    model, x = on_meta(lambda: Layers(2048, 2048), 4096, 2048)
    left: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        left.extend(rewrite(gm, BLOCKWISE))
        return gm.forward

    torch.compile(model, backend=backend)(x)
    lines = [record for record in caplog.records if "of 6 products" in record.getMessage()]
    assert [record.levelname for record in lines] == ["INFO"]
    text = lines[0].getMessage()
    assert text.startswith("0 of 6 products in FP8, recipe blockwise; left: 6x slower as a whole step: 6 products")
    assert all(record.levelno <= logging.INFO for record in caplog.records if record.name == "fp8fn")
    assert not [each for each in left if each.reason is None]


def test_explain_shows_what_was_left_alone() -> None:
    model, x = on_meta(lambda: Layers(2048, 2048), 4096, 2048)
    explanation = fp8fn.explain(model, x, target="h200", show=False)
    assert explanation.substituted == 0
    assert explanation.step is not None
    assert explanation.step.loses
    last = f"whole step (left alone): {explanation.step.describe()}; the rest of the step is not counted"
    assert " ".join(str(explanation).split()).endswith(last)


@pytest.mark.parametrize(
    ("family", "size"), [("gpt", "small"), ("gpt", "medium"), ("gpt", "1b"), ("moe", "small"), ("moe", "medium")]
)
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_no_size_of_the_demo_is_estimated_to_lose(family: str, size: str, target: str) -> None:
    """One layer of each, at the demo's batch: what is taken wins; what would lose is left alone."""
    preset = MODELS[family][size]
    config = replace(preset.model, layers=1)
    with torch.device("meta"):
        model = GPT(config).to(BF16)
        tokens = torch.zeros(preset.batch, config.context, dtype=torch.int64)
    explanation = fp8fn.explain(model, tokens, target=target, show=False)
    step = explanation.step
    assert step is not None
    assert step.unknown == 0
    assert step.groups == (2 if family == "moe" else 0)
    assert (explanation.substituted > 0) == (step.products > 0 and not step.loses)
    if size == "1b":
        assert explanation.substituted == 5
        assert step.bf16_us / step.fp8_us > 1.15
