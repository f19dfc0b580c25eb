"""`max_autotune`: which choices Inductor gets, what it makes of the faster one, and that nothing else changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import select_algorithm
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.utils import run_and_get_code

import fp8fn
from fp8fn.lowering.inductor import autotune
from fp8fn.ops.targets import SM90
from support.accuracy import snr

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # Inductor's own, of its benchmark
]

OPTIONS = {"where": "*", "max_autotune": True}


class Mlp(nn.Module):
    """Two layers whose products cuBLASLt takes in every recipe, forward and backward: K / 128 is a multiple of 4."""

    def __init__(self, width: int = 512, hidden: int = 1024) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(hidden, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"max_autotune": True}, True),
        ({"max_autotune_gemm": True}, True),
        ({"max_autotune": True, "autotune_in_subproc": True}, False),
        ({"max_autotune_gemm": True, "autotune_in_subproc": True}, False),
        ({"max_autotune": True, "pipeline_max_autotune_gemm": True}, False),
        ({"max_autotune_gemm": True, "pipeline_max_autotune_gemm": True}, False),
    ],
    ids=str,
)
def test_no_choices_for_processes_that_do_not_know_them(settings: dict[str, bool], expected: bool) -> None:
    off = dict.fromkeys(
        ("max_autotune", "max_autotune_gemm", "autotune_in_subproc", "pipeline_max_autotune_gemm"), False
    )
    with torch._inductor.config.patch({**off, **settings}):
        assert autotune.wanted() is expected


def step(module: Callable[[Tensor], Tensor], model: Mlp, x: Tensor) -> list[Tensor]:
    """Forward and backward: out and all gradients."""
    x = x.detach().requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, *model.parameters()))]


def near(found: list[Tensor], expected: list[Tensor], bound: float = 1e-2) -> bool:
    return all(
        bool((a.double() - b.double()).norm() <= bound * b.double().norm())
        for a, b in zip(found, expected, strict=True)
    )  # fmt: skip


def functional(model: Mlp, recipe: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return fp8fn.linear(
            torch.relu(fp8fn.linear(x, model.up.weight, recipe=recipe)), model.down.weight, recipe=recipe
        )

    return forward


@pytest.fixture
def timed() -> Iterator[list[dict[str, float]]]:
    """The times of each selection, by choice."""
    found: list[dict[str, float]] = []

    def save(timings: dict[Any, float], name: str, *_: Any) -> None:
        if name == autotune.NAME:
            found.append({choice.choice.name: time for choice, time in timings.items()})

    select_algorithm.add_feedback_saver(save)
    yield found
    select_algorithm.clear_feedback_savers()


@pytest.fixture
def uncached() -> Iterator[None]:
    """Neither graphs nor times of another test."""
    with torch._inductor.config.patch(fx_graph_cache=False, autotune_local_cache=False):
        yield


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch, uncached: None) -> Iterator[None]:
    """The CPU offers both choices, with a stand-in for PyTorch's products that have no kernel there."""
    monkeypatch.setattr(autotune, "targets", SimpleNamespace(target_of=lambda device: SM90))
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases have a kernel, which takes no scales of blocks
        library.impl("_scaled_mm", scaled_mm, "CPU")
        library.impl("_scaled_mm_v2", scaled_mm_v2, "CPU")
    yield
    library._destroy()


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any, scale_result: Any, out_dtype: Any,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    assert scale_a.shape in ((), (a.shape[0], 1))
    assert scale_b.shape in ((), (1, b.shape[1]))
    assert (bias, scale_result, fast) == (None, None, False)
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


def scaled_mm_v2(
    a: Tensor, b: Tensor, scale_a: Any, kinds_a: Any, swizzle_a: Any, scale_b: Any, kinds_b: Any, swizzle_b: Any,
    bias: Any, out_dtype: Any, dims: Any = (), fast: bool = False,
) -> Tensor:  # fmt: skip
    """1x128 for a, and 1x128 (4) or 128x128 (5) for b, whose scales are `(N, K / 128)` and `(K / 128, N / 128)`."""
    assert (list(kinds_a), list(swizzle_a), list(swizzle_b), bias, list(dims), fast) == ([4], [], [], None, [], False)
    left = a.float() * scale_a[0].repeat_interleave(128, 1)[:, : a.shape[1]]
    scales = scale_b[0].mT if list(kinds_b) == [4] else scale_b[0].repeat_interleave(128, 1)[:, : b.shape[1]]
    return (left @ (b.float() * scales.repeat_interleave(128, 0)[: b.shape[0]])).to(out_dtype)


# On the CPU the data of a square block is stored once, and does not lie along the contraction of each product.
@pytest.mark.parametrize(
    ("recipe", "winner", "count"),
    [
        ("blockwise", autotune.OURS, 4), ("blockwise", autotune.THEIRS, 4), ("rowwise", autotune.THEIRS, 6),
        ("tensorwise", autotune.THEIRS, 2),
    ],
)  # fmt: skip
def test_the_faster_choice_is_what_runs(
    recipe: str, winner: str, count: int, as_on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, dgrad and wgrad of both layers in values, and by which op."""
    offered = []

    def benchmark(self: Any, choices: list[Any], *_: Any, **__: Any) -> dict[Any, float]:
        offered.append([choice.choice.name for choice in choices])
        return {choice: 1.0 if choice.choice.name == winner else 2.0 for choice in choices}

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark", benchmark)
    model, x = Mlp(), torch.randn(512, 512, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="fp8fn", options={**OPTIONS, "recipe": recipe})
    found, code = run_and_get_code(lambda: step(compiled, model, x))
    assert near(found, step(functional(model, recipe), model, x))
    assert offered == [[autotune.OURS, autotune.THEIRS]] * count
    theirs = sum(text.count("= torch.ops.aten._scaled_mm") for text in code)
    assert theirs == (count if winner == autotune.THEIRS else 0)
    assert sum(text.count("= torch.ops.fp8fn.scaled_mm.default(") for text in code) == 6 - theirs


def test_both_choices_are_timed(as_on_hopper: None, timed: list[dict[str, float]]) -> None:
    """By Inductor's own benchmark, on the operands that it makes up."""
    model, x = Mlp(), torch.randn(512, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        out = torch.compile(model, backend="fp8fn", options=OPTIONS)(x)
        assert near([out], [functional(model, "blockwise_square")(x)])
    assert len(timed) == 2
    for times in timed:
        assert times.keys() == {autotune.OURS, autotune.THEIRS}
        assert all(0 < time < float("inf") for time in times.values())


def test_a_choice_that_pytorch_refuses_is_left_out(
    as_on_hopper: None, timed: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("no such scales")

    refuse.default = torch.ops.aten._scaled_mm_v2.default  # read by the patterns, which this test may import
    monkeypatch.setattr(autotune.cublaslt, "arguments", lambda *_: ("_scaled_mm_v2", ()))
    monkeypatch.setattr(torch.ops.aten, "_scaled_mm_v2", refuse)
    model, x = Mlp(), torch.randn(512, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        out = torch.compile(model, backend="fp8fn", options=OPTIONS)(x)
        assert near([out], [functional(model, "blockwise_square")(x)])
    assert [times[autotune.THEIRS] for times in timed] == [float("inf")] * 2


def test_sizes_that_are_not_known_are_not_timed(as_on_hopper: None, timed: list[dict[str, float]]) -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="fp8fn", options=OPTIONS, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for rows in (640, 300):
            x = torch.randn(rows, 512, dtype=torch.bfloat16)
            assert near([compiled(x)], [functional(model, "blockwise_square")(x)])
    assert timed == []


def test_without_max_autotune_nothing_is_timed(as_on_hopper: None, timed: list[dict[str, float]]) -> None:
    autotune.install()
    model, x = Mlp(), torch.randn(512, 512, dtype=torch.bfloat16)
    plain = torch.compile(model, backend="fp8fn", options={"where": "*"})
    found, code = run_and_get_code(lambda: step(plain, model, x))
    assert near(found, step(functional(model, "blockwise_square"), model, x))
    assert sum(text.count("= torch.ops.fp8fn.scaled_mm.default(") for text in code) == 6
    assert timed == []


def test_plain_inductor_times_what_is_substituted(as_on_hopper: None, timed: list[dict[str, float]]) -> None:
    q, w = fp8fn.quantize(torch.randn(256, 512), (1, 128)), fp8fn.quantize(torch.randn(512, 512), (128, 128)).mT

    def product(*tensors: Tensor) -> Tensor:
        return torch.ops.fp8fn.scaled_mm(*tensors[:2], (1, 128), *tensors[2:], (128, 128))

    tensors = q.data, q.scale, w.data, w.scale
    with fp8fn.lowering.substitution():
        out = torch.compile(product, options={"max_autotune": True})(*tensors)
    assert near([out], [product(*tensors)])
    assert len(timed) == 1


@pytest.mark.parametrize("how", [{"options": OPTIONS}, {"mode": "max-autotune"}])
def test_on_the_cpu_the_option_does_nothing(how: dict[str, Any], uncached: None, timed: list[dict[str, float]]) -> None:
    model, x = Mlp(512, 512), torch.randn(64, 512, dtype=torch.bfloat16)
    found = step(torch.compile(model, backend="fp8fn", **how), model, x)
    assert near(found, step(functional(model, "blockwise_square"), model, x))
    assert timed == []


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_on_a_gpu_both_are_timed_and_values_hold(recipe: str, uncached: None, timed: list[dict[str, float]]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuBLASLt's products are those of sm90 here")
    model, x = Mlp(2048, 4096).cuda(), torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(model, backend="fp8fn", options={**OPTIONS, "recipe": recipe})
    # Another kernel's rounding to bf16 moves some bytes of the next product's operands by a step of FP8: results are
    # not the same, but as far from bf16's.
    exact, found, ours = step(model, model, x), step(compiled, model, x), step(functional(model, recipe), model, x)
    for i, wanted in enumerate(exact):
        assert snr(found[i], wanted) > max(15.0, snr(ours[i], wanted) - 0.3)
    assert timed
    for times in timed:
        assert times.keys() == {autotune.OURS, autotune.THEIRS}
        assert all(0 < time < float("inf") for time in times.values())
