"""`mutate.py`: its faults still apply, their tests are there, and it tells a fault that is noticed from others."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mutations import mutate
from mutations.mutate import Mutation, Result, read_mutations, run_mutation

pytestmark = pytest.mark.every_case

MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_to_the_code_as_it_is(mutation: Mutation) -> None:
    text = (mutate.ROOT / mutation.file).read_text(encoding="utf-8")
    mutated = mutation.applied(text)
    assert len(mutated) == len(text) + mutation.count * (len(mutation.new) - len(mutation.old))
    assert mutation.harm
    if mutation.file.endswith(".py"):
        compile(mutated, mutation.file, "exec")


def test_every_test_that_a_mutation_names_is_there(request: pytest.FixtureRequest) -> None:
    """Among what this session collected, which is all of it where CI runs; of other files by their text."""
    collected = {item.nodeid for item in request.session.items}
    files = {node.partition("::")[0] for node in collected}
    whole = not request.config.option.keyword and not any("::" in arg for arg in request.config.args)
    for test in {test for mutation in MUTATIONS for test in mutation.tests}:
        file, _, name = test.partition("::")
        if whole and file in files:
            assert any(node == test or node.startswith((f"{test}[", f"{test}::")) for node in collected), test
        else:
            text = (mutate.ROOT / file).read_text(encoding="utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, test


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two functions, and tests of one of them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes most of what each run does
    root = tmp_path / "checkout"
    files = {
        "fp8fn/__init__.py": "def double(x):\n    return x * 2\n\n\ndef unused(x):\n    return x + 1\n",
        "tests/test_double.py": (
            "import subprocess\nimport time\n\nimport pytest\nfrom fp8fn import double\n\n"
            "def test_of_zero():\n    assert double(0) == 0\n\n"
            "@pytest.mark.parametrize('x', [1, 3])\ndef test_of_more(x):\n    assert double(x) == 2 * x\n\n"
            "def test_after():\n    assert double(5) == 10\n\n"
            "def test_compiles():\n"
            "    if double(1) != 2:\n        raise subprocess.CalledProcessError(1, ['g++', 'kernel.cpp'])\n\n"
            "@pytest.mark.skip(reason='no GPU')\ndef test_of_a_gpu():\n    assert double(1) == 2\n\n"
            "def test_ends():\n    if double(1) != 2:\n        time.sleep(60)\n"
        ),
        "ignored/file": "",
        ".gitignore": "ignored\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "link").symlink_to("fp8fn")
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


FAULT = Mutation(
    name="triples", file="fp8fn/__init__.py", old="x * 2", new="x * 3", harm="wrong", tests=("tests/test_double.py",)
)


def run(root: Path, timeout: float = 120, **changes: object) -> Result:
    return run_mutation(mutation := replace(FAULT, **changes), mutation.tests, root, timeout)  # type: ignore[arg-type]


def test_a_fault_is_killed_by_the_first_test_that_fails(checkout: Path) -> None:
    result = run(checkout)
    assert (result.status, result.by) == ("killed", "tests/test_double.py::test_of_more[1]")
    assert "x * 2" in (checkout / FAULT.file).read_text()
    assert not list(checkout.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("changes", "status", "by"),
    [
        ({"tests": ("tests/test_double.py::test_of_zero",)}, "SURVIVED", ""),
        ({"old": "x + 1", "new": "x - 1"}, "SURVIVED", ""),
        ({"new": "y * 3"}, "BROKEN", "tests/test_double.py::test_of_zero"),
        ({"old": "def double", "new": "def triple"}, "BROKEN", "tests/test_double.py"),
        ({"new": "x *"}, "BROKEN", "invalid syntax, line 2"),
        ({"tests": ("tests/test_double.py::test_compiles",)}, "BROKEN", "tests/test_double.py::test_compiles"),
        ({"tests": ("tests/test_double.py::test_of_a_gpu",)}, "SKIPPED", "tests/test_double.py::test_of_a_gpu"),
    ],
    ids=["right_by_chance", "unused", "no_such_name", "uncollected", "syntax", "compiler", "skipped"],
)  # fmt: skip
def test_what_says_nothing_of_a_fault_does_not_kill_it(
    checkout: Path, changes: dict[str, object], status: str, by: str
) -> None:
    result = run(checkout, **changes)
    assert (result.status, result.by) == (status, by)


def test_a_test_that_does_not_end_is_ended(checkout: Path) -> None:
    result = run(checkout, timeout=6, tests=("tests/test_double.py::test_ends",))
    assert (result.status, result.by) == ("TIMEOUT", "tests/test_double.py::test_ends")
    assert result.seconds < 30


def test_a_test_that_is_not_there_is_no_kill(checkout: Path) -> None:
    result = run(checkout, tests=("tests/test_double.py::test_gone",))
    assert result.status == "BROKEN"
    assert "test_gone" in result.by


@pytest.mark.parametrize(("old", "count", "found"), [("x * 4", 1, 0), ("x", 1, 4), ("x * 2", 2, 1)])
def test_a_text_that_is_not_there_as_often_is_an_error(checkout: Path, old: str, count: int, found: int) -> None:
    with pytest.raises(ValueError, match=rf"'triples': fp8fn/__init__.py has the old text {found} times, not {count}"):
        run(checkout, old=old, count=count)


def test_a_copy_has_what_git_does_not_ignore(checkout: Path, tmp_path: Path) -> None:
    mutate.copy_checkout(checkout, tmp_path / "copy")
    names = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert names >= {"fp8fn/__init__.py", "tests/test_double.py", ".gitignore"}
    assert "ignored/file" not in names
    assert (tmp_path / "copy" / "link").is_symlink()


def test_the_command_prints_a_table_and_fails_where_a_fault_survives(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"file": FAULT.file, "old": FAULT.old, "new": FAULT.new, "harm": "wrong"}
    survives = {**entry, "name": "survives", "tests": ["tests/test_double.py::test_of_zero"]}
    killed = {**entry, "name": "killed", "tests": ["tests/test_double.py::test_after"]}
    given, out = tmp_path / "mutations.json", tmp_path / "out.json"
    given.write_text(json.dumps([survives, killed]))
    args = ["--mutations", str(given), "--json", str(out), "-n", "2"]
    assert mutate.main(args, checkout) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 killed" in printed
    assert [(row["name"], row["status"], row["by"]) for row in json.loads(out.read_text())] == [
        ("survives", "SURVIVED", ""),
        ("killed", "killed", "tests/test_double.py::test_after"),
    ]
    assert mutate.main([*args, "--only", "killed"], checkout) == 0


def test_the_command_needs_tests_that_pass_without_a_fault(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "tests" / "test_double.py").write_text("def test_fails():\n    assert 0\n")
    given = tmp_path / "mutations.json"
    entry = {"name": "any", "file": FAULT.file, "old": FAULT.old, "new": FAULT.new, "harm": "wrong"}
    given.write_text(json.dumps([{**entry, "tests": ["tests/test_double.py"]}]))
    assert mutate.main(["--mutations", str(given)], checkout) == 1
    assert "the tests must pass before a fault is put in: tests/test_double.py::test_fails" in capsys.readouterr().err
