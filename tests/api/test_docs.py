"""README and `docs/`: generated tables, lengths, links, commands and examples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8fn
import fp8fn.distributed
from fp8fn import cli
from fp8fn.bench import docs, record
from fp8fn.bench.train import figure
from fp8fn.demo.model import GPT
from fp8fn.demo.presets import PRESETS
from fp8fn.ops.recipe import PRESETS as RECIPES

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((README, *(ROOT / "docs").rglob("*.md")))
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


def test_tables_have_the_committed_figures(capsys: pytest.CaptureFixture[str]) -> None:
    status = docs.main(["--check"])
    assert status == 0, capsys.readouterr().out


def test_tables_are_made_again(tmp_path: Path) -> None:
    """Each table stands between its own markers; a marker that is missing, or there twice, is an error."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"rows": 3}))
    table = docs.Table("count", path, lambda run: f"{run['rows']} rows")
    text = docs.rewritten("before\n<!-- count -->\nold\n<!-- /count -->\nafter\n", [table])
    assert text == "before\n<!-- count -->\n3 rows\n<!-- /count -->\nafter\n"
    for wrong in ("no markers\n", text + text):
        with pytest.raises(ValueError, match="between <!-- count --> and <!-- /count -->"):
            docs.rewritten(wrong, [table])


@pytest.mark.parametrize("argv", [(), ("--check",)])
def test_a_stale_page_is_written_or_named(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    stale, fresh = (f"<!-- count -->\n{rows} rows\n<!-- /count -->\n" for rows in (2, 3))
    page.write_text(stale)
    (tmp_path / "run.json").write_text(json.dumps({"rows": 3}))
    table = docs.Table("count", tmp_path / "run.json", lambda run: f"{run['rows']} rows")
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    monkeypatch.setattr(docs, "PAGES", {"page.md": (table,)})
    assert cli.main(["bench", "docs", *argv]) == len(argv)
    printed = capsys.readouterr().out
    assert printed == (f"{page} is stale: python -m fp8fn bench docs\n" if argv else f"wrote {page}\n")
    assert page.read_text() == (stale if argv else fresh)


def test_picture_of_whole_models_has_the_committed_figures(tmp_path: Path) -> None:
    """`python -m fp8fn bench plot docs/results/train.json docs/whole_models.svg` makes it again."""
    document = json.loads((record.RESULTS / "train.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "whole_models.svg").read_text(encoding="utf-8")
    found = re.findall(r">(\d+\.\d(?:, [\d.]+x[ \w]*)?)</text>", text)  # ticks have no decimals
    assert found == [label for run in figure.shown(document) for each in figure.bars(run) for _, label in each]
    assert len(found) == 12
    assert [run["device"] in text for run in figure.shown(document)] == [True, True]
    figure.draw(document, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").stat().st_size > 10_000


def test_every_committed_result_has_a_table() -> None:
    used = {table.path for tables in docs.PAGES.values() for table in tables}
    assert set(record.RESULTS.iterdir()) <= used
    assert not list((ROOT / "fp8fn").rglob("results/*.json"))


def test_markers_are_those_of_generated_tables() -> None:
    """No text stands between markers that no command writes."""
    for page in PAGES:
        known = {table.marker for table in docs.PAGES.get(page.name, ())} if page.parent.name == "docs" else set()
        found = set(re.findall(r"^<!-- /(\S+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert found - {"explain"} == known, page


def test_readme_is_short_and_has_no_figures() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert not re.search(r"[TG]FLOP|TB/s|\d ?µs|<!--", text)


def test_readme_has_the_command_of_ci() -> None:
    command = "python -m pytest -n logical --dist worksteal --quick"
    assert f"\n{command}\n" in README.read_text(encoding="utf-8")
    assert f'{command} "$@"' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_reference_has_every_public_callable() -> None:
    """The presets of `Recipe` are on the page of recipes."""
    shown = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    for module in (fp8fn, fp8fn.distributed):
        public = {f"{module.__name__}.{name}" for name in module.__all__ if callable(getattr(module, name))}
        assert len(public) >= 7
        assert public <= shown, public - shown
    recipes = (ROOT / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
    assert [name.upper() for name in RECIPES if f"`{name.upper()}`" not in recipes] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub spells them."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in targets:
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in headings(path), f"{name_of(page)} links to {target}"


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths from the root in inline code, such as `tests/stress/stress_early_launches.py`."""
    roots = "ops|meta|lowering|fp8fn|tests|docs"
    text = page.read_text(encoding="utf-8")
    for name in re.findall(rf"(?:^|[`\s])((?:{roots})/[\w./-]*\w)(?=[`\s)]|$)", text):
        assert (ROOT / name).exists() or "NAME" in name, f"{name_of(page)} names {name}"


@pages
def test_commands_exist(page: Path) -> None:
    for words in re.findall(r"python -m fp8fn((?:\s+[a-z]\w*)*)", page.read_text(encoding="utf-8")):
        group: cli.Group | cli.Command = cli.COMMANDS
        for word in words.split():
            if not isinstance(group, cli.Group):
                break
            assert word in group.commands, f"{name_of(page)} has python -m fp8fn {' '.join(words.split())}"
            group = group.commands[word]


def test_every_command_is_documented() -> None:
    text = " ".join("\n".join(page.read_text(encoding="utf-8") for page in PAGES).split())
    named = {name for name in cli.COMMANDS.commands if name != "bench"}
    bench = cli.COMMANDS.commands["bench"]
    assert isinstance(bench, cli.Group)
    named |= {f"bench {name}" for name in bench.commands}
    assert [name for name in sorted(named) if f"python -m fp8fn {name}" not in text] == []


class Tanh(nn.Module):
    """A model for the README's examples; it has a weight that `layers.*` selects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).tanh()


def test_examples_of_the_readme_run(fresh_dynamo: None) -> None:
    weight = torch.randn(256, 128)
    params = {"w": torch.randn(128, 64)}
    names: dict[str, Any] = {
        "torch": torch, "fp8fn": fp8fn, "model": Tanh(), "x": torch.randn(32, 128), "w": torch.randn(128, 64),
        "weight": weight, "bias": torch.randn(256), "params": params, "batch": torch.randn(4, 16, 128),
        "loss_function": lambda params, x: (x @ params["w"]).square().mean(),
    }  # fmt: skip
    blocks = [code for language, code in _FENCED.findall(README.read_text(encoding="utf-8")) if language == "python"]
    assert len(blocks) == 4
    for code in blocks:
        on_cpu = [line for line in code.splitlines() if "measure=True" not in line]
        exec("\n".join(on_cpu), names)
    assert names["y"].shape == (32, 256)
    assert names["per_sample"]["w"].shape == (4, 128, 64)
    with torch.no_grad():
        assert names["model"](names["x"]).shape == (32, 128)


def test_explain_of_the_demo_is_as_printed(fresh_dynamo: None) -> None:
    text = (ROOT / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- explain -->\n```\n(.*?)```\n<!-- /explain -->", text, re.DOTALL)
    assert found is not None
    preset = PRESETS["tiny"]
    model = GPT(preset.model)
    tokens = torch.zeros(preset.batch, preset.model.context, dtype=torch.int64)
    assert found[1] == f"{fp8fn.explain(model, tokens, show=False)}\n"


def test_messages_of_troubleshooting_are_ours() -> None:
    """Each message of the page is in a string of the sources, but for those of other libraries."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    others = {
        "is not a valid DynamoBackend", "Invalid scalar type", "Failed to initialize NumPy",
        "Either mode or options can be specified",
        "only Tensors of floating point dtype can require gradients",
        "Attempted to access the data pointer on an invalid python storage",
        "is not supported for tensor subclasses",
    }  # fmt: skip
    assert others < set(quoted)
    sources = "".join(path.read_text(encoding="utf-8") for folder in ("ops", "meta", "fp8fn", "lowering")
                      for path in (ROOT / folder).rglob("*.py"))  # fmt: skip
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    forms = {
        "0 of 12 products in FP8": "%d of %d products in FP8",
        "so pass weight.mT for a weight of shape": "so pass weight.mT",
    }
    assert [each for each in quoted if each not in others and forms.get(each, each) not in joined] == []
