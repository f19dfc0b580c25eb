"""`bench prefill`: the variants' weights and graphs, bytes of wrapped weights, the table, and a tiny run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import fp8fn
from fp8fn import cli
from fp8fn.bench import docs, prefill, record
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.prefill import VARIANTS, Forward, Row, Setting
from fp8fn.bench.train import attention, models, variants

CPU = torch.device("cpu")
SIZE = replace(models.SIZES["tiny"], layers=1)
TOKENS = 192


@pytest.fixture
def setting(fresh_dynamo: None) -> Iterator[Setting]:
    pytest.importorskip("transformers")
    attention.register()
    with torch.no_grad():
        yield Setting(size=SIZE, batch=1, sequence=TOKENS, kernel=attention.DEFAULT, device=CPU)


def forward(setting: Setting, variant: str) -> Forward:
    return Forward(setting, variant, models.batches(SIZE, 1, TOKENS, 1)[0])


def row(variant: str, ms: float, **changes: Any) -> Row:
    figures = {"ms": ms, "ms_q1": ms, "ms_q3": ms, "tokens_s": 1e3 / ms, "snr_db": 24.0, "graphs": 1, **changes}
    return Row(variant=variant, weight_bytes=10**9, **figures)


@pytest.mark.parametrize(
    ("variant", "block", "activations", "a_block"),
    [
        ("fp8fn:16bit", (128, 128), "16bit", None),
        ("fp8fn:fp8", (128, 128), "fp8", (1, 128)),
        ("fp8fn:fp8-rowwise", (1, -1), "fp8", (1, -1)),
        ("fp8fn:fp8-tensorwise", (-1, -1), "fp8", (1, -1)),
    ],
)
def test_a_variant_is_what_its_name_says(
    setting: Setting, variant: str, block: Any, activations: str, a_block: Any
) -> None:
    """All linear layers but the head are quantized, and the logits are those of the dequantized operands."""
    found = forward(setting, variant)
    weights = {name: p for name, p in found.model.named_parameters() if isinstance(p, fp8fn.FP8Weight)}
    assert len(weights) == 7
    assert not any("lm_head" in name or "embed" in name for name in weights)
    for weight in weights.values():
        assert (weight.scaled.block, weight.activations) == (block, activations)

    def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].flatten(0, 1).float()
        if a_block is not None:
            x = fp8fn.dequantize(fp8fn.quantize(x, a_block), torch.float32)
        product = x @ fp8fn.dequantize(module.weight.scaled, torch.float32).mT
        assert snr_db(product, output.flatten(0, 1)) > 45
        checked.append(module)
        return output

    checked: list[Any] = []
    for module in found.model.modules():
        if isinstance(getattr(module, "weight", None), fp8fn.FP8Weight):
            module.register_forward_hook(hook)
    assert found.eager().shape == (1, SIZE.vocabulary)
    assert len(checked) == 7


def test_the_logits_are_those_of_the_last_position(setting: Setting) -> None:
    found = forward(setting, "bf16")
    whole = found.model(input_ids=found.given).logits
    torch.testing.assert_close(found.eager(), whole[:, -1], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        ("bf16", "inductor"),
        ("fp8fn:fp8", "inductor"),
        ("fp8fn:fp8,backend=fp8fn", "fp8fn"),
        ("torchao:dynamic-rowwise", "inductor"),
    ],
)
def test_what_compiles_a_variant(setting: Setting, variant: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda model, **arguments: given.update(arguments))
    monkeypatch.setattr(prefill, "VARIANTS", {variant: lambda model: None})
    forward(setting, variant)
    assert given == {"backend": backend, "dynamic": False}


def test_bytes_of_weights(setting: Setting) -> None:
    products = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    others = 2 * (768 * 256 + 3 * 256)  # the head and three norms, in bf16
    expected = {
        "bf16": others + 2 * products,
        "fp8fn:16bit": others + products + 4 * products // 128**2,
        "fp8fn:fp8-rowwise": others + products + 4 * (2 * 256 + 2 * 128 + 2 * 512 + 256),
        "fp8fn:fp8-tensorwise": others + products + 4 * 7,
    }
    assert {name: models.weight_bytes(forward(setting, name).model) for name in expected} == expected


def test_torchao_is_skipped_where_it_is_absent_or_refuses(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        PerRow = object

        @staticmethod
        def Float8DynamicActivationFloat8WeightConfig(granularity: object, set_inductor_config: bool) -> object:
            assert not set_inductor_config
            return granularity

        @staticmethod
        def quantize_(model: object, config: object, filter_fn: Any) -> None:
            assert filter_fn is variants.convertible
            raise AssertionError("needs another GPU")

    monkeypatch.setattr(variants, "needed", lambda name: Module)
    with pytest.raises(variants.UnavailableError, match="torchao refuses this device: AssertionError: needs another"):
        forward(setting, "torchao:dynamic-rowwise")
    with pytest.raises(variants.UnavailableError, match=r"this torchao is too old: AttributeError: .*PerTensor"):
        forward(setting, "torchao:dynamic-tensorwise")


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (row("bf16", 1.0), False),
        (row("fp8fn:fp8", 1.0, snr_db=14.9), True),
        (row("fp8fn:fp8", 1.0, snr_db=float("nan")), True),
        (row("torchao:dynamic-rowwise", 1.0, graphs=2), True),
        (Row(variant="fp8fn:fp8", missing="out of memory"), True),
        (Row(variant="torchao:dynamic-rowwise", missing="not installed"), False),
    ],
)
def test_what_is_wrong(found: Row, wrong: bool) -> None:
    assert found.wrong is wrong


def test_the_table_has_ratios_over_bf16_and_torchaos_best() -> None:
    rows = [
        row("bf16", 15.0, peak_bytes=2 * 10**9), row("torchao:dynamic-rowwise", 12.0),
        row("torchao:dynamic-tensorwise", 11.0), row("fp8fn:fp8", 10.0, cached=1),
        Row(variant="fp8fn:16bit", missing="RuntimeError: no."),
    ]  # fmt: skip
    results = {"size": asdict(SIZE), "batch": 1, "sequence": 8, "kernel": "cudnn", "rows": [asdict(r) for r in rows]}
    text = prefill.table(record.make("prefill", results))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    assert [line[:4] for line in lines] == [
        ["`bf16`", "15.00 (15.00 to 15.00)", "1.000x", "0.733x"],
        ["`torchao:dynamic-rowwise`", "12.00 (12.00 to 12.00)", "1.250x", "0.917x"],
        ["`torchao:dynamic-tensorwise`", "11.00 (11.00 to 11.00)", "1.364x", "1.000x"],
        ["`fp8fn:fp8`", "10.00 (10.00 to 10.00)", "1.500x", "1.100x"],
    ]
    assert lines[0][5] == "2.00"
    assert lines[3][-1] == "0.0 (cached)"
    assert "`fp8fn:16bit`: n/a: RuntimeError: no.\n" in text
    assert "kernel cudnn" in text


def test_the_docs_have_a_place_for_the_run() -> None:
    (table,) = [table for table in docs.PAGES["benchmarks.md"] if table.marker == "prefill"]
    assert (table.path, table.make, table.optional) == (record.RESULTS / "prefill.json", prefill.table, True)


@pytest.mark.slow
def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_dynamo: None) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "run.json"
    wanted = ["bf16", "torchao:dynamic-rowwise", "fp8fn:16bit", "fp8fn:fp8", "fp8fn:fp8,backend=fp8fn"]
    argv = ["bench", "prefill", "--device", "cpu", "--layers", "1", "--tokens", "1x192", "--rounds", "2", "--profile"]
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}), patch.object(variants, "needed") as peer:
        peer.side_effect = variants.UnavailableError("torchao is not installed")
        assert cli.main([*argv, "--variants", " ".join(wanted), "--json", str(path)]) == 0
    run = record.read(path)
    rows = {found["variant"]: Row(**found) for found in run["results"]["rows"]}
    assert list(rows) == wanted
    assert rows.pop("torchao:dynamic-rowwise").missing == "torchao is not installed"
    for found in rows.values():
        assert found.ms is not None
        assert found.tokens_s == pytest.approx(192e3 / found.ms)
        assert (found.graphs, found.cached) == (1, 0)
        assert found.profile is not None
        assert found.profile["products"]["launches"] > 0
    assert rows["bf16"].snr_db > 38  # type: ignore[operator]
    assert all(rows[name].snr_db > 20 for name in rows)  # type: ignore[operator]
    assert capsys.readouterr().out.endswith(f"\n{prefill.table(run)}\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--variants", "bf16 fp8fn:fp4"), "'fp8fn:fp4': use some of bf16 torchao:dynamic-rowwise"),
        (("--variants", " "), "' ': use some of bf16"),
        (("--tokens", "4096"), "'4096' is not sequences x length"),
        (("--size", "moe"), "invalid choice: 'moe'"),
    ],
)
def test_wrong_use(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", "prefill", *argv])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_names_of_variants() -> None:
    assert prefill.names("fp8fn:fp8 bf16 fp8fn:fp8") == ["fp8fn:fp8", "bf16"]
    assert set(prefill.DEFAULTS) <= set(VARIANTS)
