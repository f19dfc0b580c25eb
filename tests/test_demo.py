"""The demo: the text, the model, a very short comparison with its values, and the verdict."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import compile_fx

import fp8fn.demo.model
from fp8fn.demo import command
from fp8fn.demo.compare import build, compare, in_fp8
from fp8fn.demo.corpus import HELD_OUT, Corpus, standard_library
from fp8fn.demo.model import GPT, Experts, GPTConfig
from fp8fn.demo.presets import MODELS, PRESETS
from fp8fn.demo.report import conclusion, plot, table, verdict
from fp8fn.demo.saved import bytes_saved
from fp8fn.demo.train import Plan, Run, Variant, evaluate

CPU = torch.device("cpu")
CONFIG = GPTConfig(context=64, dim=128, layers=1, heads=2, hidden=128)
PLAN = Plan(device=CPU, steps=3, batch=2, learning_rate=1e-3, evaluations=3, validation_batches=2)
UNCOMPILED = Variant(name="baseline", backend="eager")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library(cap=1 << 18)


@pytest.fixture(scope="module")
def runs(corpus: Corpus) -> Iterator[tuple[Run, Run]]:
    yield compare(build(CONFIG, PLAN), corpus, PLAN, in_fp8("blockwise"), UNCOMPILED)
    torch.compiler.reset()


def write_sources(root: Path, count: int) -> None:
    for index in range(count):
        (root / f"m{index:02}.py").write_text(f"{index:02}" * 100)


def test_corpus_is_deterministic(corpus: Corpus) -> None:
    again = standard_library(cap=1 << 18)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.validation, again.validation)
    assert len(corpus.train) + len(corpus.validation) == 1 << 18


def test_split_is_by_whole_files_and_disjoint(tmp_path: Path) -> None:
    write_sources(tmp_path, 2 * HELD_OUT)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("xx" * 100)
    text = standard_library(tmp_path)
    names = [{bytes(pair.tolist()).decode() for pair in part.split(2)} for part in (text.train, text.validation)]
    assert names[1] == {"09", "19"}
    assert names[0] == {f"{index:02}" for index in range(20)} - names[1]
    assert len(text.train) == 18 * 200


def test_cap_cuts_the_text(tmp_path: Path) -> None:
    write_sources(tmp_path, HELD_OUT)
    text = standard_library(tmp_path, cap=1850)
    assert (len(text.train), len(text.validation)) == (1800, 50)


def test_no_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="too few Python sources"):
        standard_library(tmp_path)


def test_batches_are_windows_of_the_text_fixed_by_the_seed(corpus: Corpus) -> None:
    first, again, other = (next(corpus.batches(4, 32, seed)) for seed in (7, 7, 8))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert first[0].shape == (4, 32)
    assert bytes(first[0][0].tolist()) in bytes(corpus.train.tolist())


def test_validation_batches_cover_the_text(corpus: Corpus) -> None:
    batches = corpus.validation_batches(3, 2, 32)
    assert [inputs.shape for inputs, _ in batches] == [(2, 32)] * 3
    assert torch.equal(batches[0][0][0], corpus.validation[:32].long())
    assert torch.equal(batches[-1][1][-1], corpus.validation[-32:].long())


def test_model_does_not_know_fp8fn() -> None:
    tree = ast.parse(Path(fp8fn.demo.model.__file__).read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported
    assert not [name for name in imported if "fp8fn" in name]


def test_model_is_causal() -> None:
    model = build(CONFIG, PLAN)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_model_knows_positions() -> None:
    # Without them attention over a repeated byte gives the same logits wherever another byte stands before it.
    model = build(replace(CONFIG, layers=2), PLAN)
    near, far = torch.full((1, 8), 65), torch.full((1, 8), 65)
    near[0, 5], far[0, 1] = 66, 66
    assert not torch.allclose(model(near)[0, -1], model(far)[0, -1], atol=1e-6)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, presets in MODELS.items() for size in presets])
def test_presets_have_sizes_that_fp8_takes(name: str, size: str) -> None:
    preset = MODELS[name][size]
    model = preset.model
    assert bool(model.experts) == (name == "moe")
    assert [n % 128 for n in (model.dim, model.hidden, model.vocabulary, preset.batch * model.context)] == [0] * 4
    assert model.dim % (2 * model.heads) == 0


def test_preset_1b_is_a_billion() -> None:
    with torch.device("meta"):
        model = GPT(PRESETS["1b"].model)
    assert 1.0e9 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e9


def test_experts_are_the_sum_over_those_that_the_router_chose() -> None:
    config = replace(CONFIG, experts=4)
    torch.manual_seed(0)
    experts, x = Experts(config), torch.randn(2, 8, config.dim)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    chances, chosen = torch.softmax(experts.router(x), -1).topk(2)
    expected = torch.zeros_like(x)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(8)).tolist():
        at = tuple(place)
        for chance, expert in zip(chances[at] / chances[at].sum(), chosen[at], strict=True):
            gate, up = (x[at] @ experts.gate_up[expert]).chunk(2)
            expected[at] += chance * ((F.silu(gate) * up) @ experts.down[expert])
    assert (experts(x) - expected).norm() < 2e-2 * expected.norm()  # bfloat16


def test_a_mixture_trains_by_its_products_of_groups(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs run as they are: Inductor is in the runs of the model without experts."""
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, *_, **__: gm.forward)
    model = build(replace(CONFIG, experts=4), PLAN)
    tokens = torch.zeros(PLAN.batch, CONFIG.context, dtype=torch.int64)
    rows = fp8fn.explain(model, tokens, where="*", show=False).rows
    assert [row.weight for row in rows if row.op == "grouped_mm"] == ["layers.0.mlp.gate_up", "layers.0.mlp.down"]
    assert [row.weight for row in rows if row.reason] == ["layers.0.mlp.router.weight"]
    baseline, fp8 = compare(model, corpus, PLAN, in_fp8("blockwise"), UNCOMPILED)
    assert fp8.losses != baseline.losses
    assert fp8.final_loss < fp8.validation[0][1] - 0.2
    assert verdict(baseline.final_loss, fp8.final_loss) == 0


def test_a_size_of_another_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--device", "cpu", "--model", "moe", "--size", "1b"])
    assert stop.value.code == 2
    assert "--size 1b is not one of --model moe: use tiny or small" in capsys.readouterr().err


def test_both_runs_start_alike(runs: tuple[Run, Run], corpus: Corpus) -> None:
    model = build(CONFIG, PLAN)
    held_out = corpus.validation_batches(PLAN.validation_batches, PLAN.batch, CONFIG.context)
    inputs, targets = next(corpus.batches(PLAN.batch, CONFIG.context, PLAN.seed))
    baseline, fp8 = runs
    assert baseline.validation[0][1] == pytest.approx(evaluate(model, held_out, PLAN), rel=1e-6)
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    assert baseline.losses[0] == pytest.approx(expected, rel=1e-6)
    # FP8 rounds each operand by up to 2**-4 of itself: near, and not the same.
    assert fp8.losses[0] == pytest.approx(baseline.losses[0], rel=5e-3)
    assert fp8.losses[0] != baseline.losses[0]


def test_both_runs_learn(runs: tuple[Run, Run]) -> None:
    for run in runs:
        assert len(run.losses) == len(run.step_seconds) == PLAN.steps
        assert [step for step, _ in run.validation] == [0, 1, 2, 3]
        assert run.final_loss < run.validation[0][1] - 0.3
    assert verdict(runs[0].final_loss, runs[1].final_loss) == 0


def test_fp8_saves_fewer_bytes(runs: tuple[Run, Run]) -> None:
    baseline, fp8 = runs
    assert 0 < fp8.saved_bytes < baseline.saved_bytes


def test_table_and_plot(runs: tuple[Run, Run], tmp_path: Path) -> None:
    text = table(*runs)
    assert f"{runs[0].final_loss:.4f}" in text
    assert f"{runs[1].final_loss:.4f}" in text
    plot(*runs, tmp_path / "curves.any")
    assert (tmp_path / "curves.any").read_bytes().startswith(b"\x89PNG")


def test_bytes_saved_counts_each_storage_once_and_no_parameter() -> None:
    layer = torch.nn.Linear(16, 8, bias=False)
    x = torch.randn(4, 16)
    # Saved: x by the product, twice, and the product by the square; the weight is the layer's own.
    assert bytes_saved(layer, lambda: layer(x).square() + layer(x[:2]).sum()) == x.nbytes + 4 * 8 * 4


def test_bytes_saved_of_a_compiled_module() -> None:
    layer = torch.nn.Linear(16, 8, bias=False)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(4, 16)
    compiled(x)
    assert bytes_saved(layer, lambda: compiled(x)) == x.nbytes
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("baseline", "fp8", "status"),
    [
        (2.0, 2.0, 0),
        (2.0, 1.0, 0),
        (2.0, 2.019, 0),
        (2.0, 2.021, 1),
        (2.0, math.nan, 1),
        (math.nan, 2.0, 1),
        (2.0, math.inf, 1),
        (math.inf, 2.0, 1),
    ],
)
def test_verdict(baseline: float, fp8: float, status: int) -> None:
    assert verdict(baseline, fp8) == status
    assert conclusion(baseline, fp8).startswith(("OK", "FAIL")[status])


def test_speed_is_the_median_after_the_warm_up() -> None:
    run = Run(
        name="", losses=[], validation=[], step_seconds=[9, 9, 9, 9, 9, 1, 2, 8], tokens_per_step=10, saved_bytes=0
    )
    assert run.tokens_per_second == 5
    assert replace(run, step_seconds=[9, 4]).tokens_per_second == 2.5


def test_learning_rate_warms_up_and_decays() -> None:
    plan = replace(PLAN, steps=100, learning_rate=1.0)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.missing_packages() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tqdm" else object())
    assert command.missing_packages() == "tqdm not installed: pip install 'fp8fn[demo]'"
