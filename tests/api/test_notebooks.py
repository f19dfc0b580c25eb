"""The notebooks: each runs from top to bottom, has its outputs committed, and shows nothing of the machine it ran on.

`python tests/api/test_notebooks.py [NAME…]` runs them, or those named, and writes their outputs anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
# It writes the list of a machine's fonts, once. A kernel that has to write it prints a line of its own after 5 s.
pytest.importorskip("matplotlib.font_manager")

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Their numbers are those of trainings of a minute, which end elsewhere on another processor.
TRAINED = {"01_fp8_by_hand", "04_training_in_fp8"}
# The time for one cell: on shared cores Inductor's C++ takes a minute.
TIMEOUT_S = 400
LARGEST = 1_000_000
MACHINE = re.compile(r"(?<![\w.])/(?:tmp|home|root|Users|usr|opt|var|work|private)/|\b\d\d:\d\d:\d\d\b|[A-Z]:\\")

names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def executed(path: Path) -> Any:
    """The notebook with the outputs of a new kernel. A cell that raises is a `CellExecutionError`."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    # The kernel may send a line and its end apart, which would be two lines here.
    options = {"timeout": TIMEOUT_S, "kernel_name": "python3", "resources": resources, "coalesce_streams": True}
    nbclient.NotebookClient(notebook, **options).execute()
    return notebook


def cleaned(notebook: Any) -> Any:
    """Without times, versions and random ids. A picture says what it shows: its cell's `alt`."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook.cells):
        cell.metadata = {name: text for name, text in cell.metadata.items() if name == "alt"}
        for output in pictures(cell):
            output.metadata = {"image/png": dict(cell.metadata)}
        cell["id"] = f"cell-{i:02}"
    return notebook


def pictures(cell: Any) -> list[Any]:
    """The outputs of a cell that are pictures."""
    return [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]


def texts(notebook: Any) -> list[str]:
    """Everything that is printed or shown as text, HTML or Markdown."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            found += [shown[kind] for kind in ("text/plain", "text/html", "text/markdown") if kind in shown]
            found.append(output.get("text", ""))
    return found


def test_there_are_six() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@names
def test_outputs_are_committed(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert any(map(pictures, code))
    assert path.stat().st_size < LARGEST


@names
def test_pictures_say_what_they_show(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        for picture in pictures(cell):
            assert 60 <= len(cell.metadata["alt"]) <= 260
            assert picture.metadata == {"image/png": {"alt": cell.metadata["alt"]}}


@names
def test_outputs_say_nothing_of_the_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert [found[0] for text in texts(notebook) if (found := MACHINE.search(text))] == []
    assert notebook == cleaned(nbformat.read(path, as_version=4))


def test_the_list_of_results_is_whole() -> None:
    """A new file in docs/results asks for another run of the notebook, which a quick run of the tests leaves out."""
    shown = "\n".join(texts(nbformat.read(FOLDER / "05_performance.ipynb", as_version=4)))
    results = {path.stem for path in (FOLDER.parent / "results").glob("*.json")}
    assert results == {name for name in re.findall(r"^\| (\S+)", shown, re.MULTILINE) if name in results}


@pytest.mark.slow(but="02_gemm_and_transforms")
@names
def test_runs_from_top_to_bottom(path: Path) -> None:
    notebook = executed(path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    warned = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in warned if "No CUDA runtime is found" not in text]  # a CUDA build of PyTorch says it
    within = 2.0 if path.stem in TRAINED else 0.5
    found = moved(texts(nbformat.read(path, as_version=4)), texts(notebook), within)
    assert not found, found  # all of them, where pytest would cut the list


def moved(committed: list[str], found: list[str], within: float = 0.5) -> list[tuple[str, str]]:
    """Lines whose words differ, or whose numbers differ by more than a share of them."""
    number = re.compile(r"(?:(?<![\w.)])[-+])?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
    before, after = ([line for text in each for line in text.splitlines()] for each in (committed, found))
    if len(before) != len(after):
        known = {number.sub("", line) for line in before}
        added = [("", line) for line in after if number.sub("", line) not in known]
        return [(f"{len(before)} lines", f"{len(after)} lines"), *added]

    def equal(old: str, new: str) -> bool:
        pairs = [*zip(map(float, number.findall(old)), map(float, number.findall(new)), strict=False)]
        close = all(abs(a - b) <= within + within * min(abs(a), abs(b)) for a, b in pairs)
        return close and number.sub("", old).split() == number.sub("", new).split()

    return [(old, new) for old, new in zip(before, after, strict=True) if not equal(old, new)]


def test_moved() -> None:
    assert moved(["SNR 25.7 dB\n2 of 3"], ["SNR 25.9 dB\n2 of 3"]) == []
    assert moved(["SNR 25.7 dB"], ["SNR 11.9 dB"]) == [("SNR 25.7 dB", "SNR 11.9 dB")]
    assert moved(["amax 45"], ["amax 81"], within=2.0) == []
    assert moved(["loss +0.13%"], ["loss -0.21%"]) == []
    assert moved(["loss +0.13%"], ["loss -0.51%"]) == [("loss +0.13%", "loss -0.51%")]
    assert moved(["a 1"], ["b 1"]) == [("a 1", "b 1")]
    assert moved(["a", "b"], ["a"]) == [("2 lines", "1 lines")]
    assert moved(["a 1"], ["a 2", "b"]) == [("1 lines", "2 lines"), ("", "b")]


def test_a_number_that_is_off_fails(tmp_path: Path) -> None:
    path = tmp_path / "wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")]), path)
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        executed(path)


def test_links_between_notebooks() -> None:
    for path in (*NOTEBOOKS, FOLDER / "README.md"):
        for name in re.findall(r"\]\((\w+\.ipynb)\)", path.read_text(encoding="utf-8")):
            assert (FOLDER / name).is_file(), f"{path.name} links to {name}"


if __name__ == "__main__":
    for chosen in NOTEBOOKS:
        if len(sys.argv) == 1 or any(name in chosen.stem for name in sys.argv[1:]):
            nbformat.write(cleaned(executed(chosen)), chosen)
            print(chosen.name)
