"""`python -m tests.support.cdna` names each part of the emulator that is missing, and how to get it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from support import cdna, emulated

VARIABLES = (emulated.FOLDER, "TINYGRAD", "CDNA_NATIVE")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_the_variable_nothing_else_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cdna.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("emulator  missing: FP8FN_CDNA_EMULATOR is not set")
    with pytest.raises(SystemExit):
        cdna.main(["--build"])


def test_the_folder_alone_is_enough_where_it_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(emulated.FOLDER, str(tmp_path))
    assert cdna.main([]) == 1
    absent = {line.split()[0] for line in capsys.readouterr().out.splitlines() if " missing: " in line}
    assert {"emulator", "tinygrad", "native"} <= absent
    for name in ("run_hsaco.py", "emu_patch.py", "native.so", "bin/clang"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    assert emulated.missing() == (
        f"TINYGRAD={tmp_path / 'tinygrad'} is not a checkout of tinygrad, whose test/mockgpu the emulator needs"
    )
    (tmp_path / "tinygrad" / "test" / "mockgpu").mkdir(parents=True)
    capsys.readouterr()
    assert cdna.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "python -m pytest -m emulated runs the tests"
    assert emulated.missing() is None
