"""`convert`, interrupted, killed, out of space, or run twice at once: what it leaves and how it goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

import fp8fn
from fp8fn.checkpoint.conversion import write
from fp8fn.checkpoint.conversion.plan import Plan
from support.checkpoints import checkpoint, content, failing, interrupt, run


@pytest.mark.parametrize("after", range(6))
def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(write, "quantize", failing(after, interrupt))
        capsys.readouterr()
        assert run(tmp_path / "in", tmp_path / "out") == 130
    message = "python -m fp8fn convert: interrupted; run the same command again to resume"
    assert capsys.readouterr().err.splitlines()[-1] == message
    unfinished = tmp_path / "out" / ".unfinished"
    assert (tmp_path / "out").exists() is (after > 1)  # nothing is left where no file was complete
    unfinished.mkdir(parents=True, exist_ok=True)
    assert os.listdir(tmp_path / "out") == [unfinished.name]
    whole, left = content(tmp_path / "whole"), content(unfinished)
    assert len(left) == after // 2
    assert all(whole[name] == data for name, data in left.items())
    made = {path.name: path.stat().st_ino for path in unfinished.iterdir()}
    capsys.readouterr()
    assert run(tmp_path / "in", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert f"{3 - after // 2} written now, {after // 2} complete before" in text
    kept = "kept, of this source and these options, and with the right checksums: " + ", ".join(sorted(left))
    assert [line for line in text.splitlines() if line.startswith("kept")] == [kept] * bool(left)
    assert "written again" not in text
    assert content(tmp_path / "out") == whole
    assert all((tmp_path / "out" / name).stat().st_ino == inode for name, inode in made.items())


def test_what_a_killed_run_leaves_has_no_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "in")
    code = """if True:
        import os, signal, sys, fp8fn
        from fp8fn import cli
        from fp8fn.checkpoint.conversion import write
        calls = []
        def quantize(*args, **kwargs):
            calls.append(0)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return fp8fn.quantize(*args, **kwargs)
        write.quantize = quantize
        cli.main(["convert", *sys.argv[1:]])
    """
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "in", tmp_path / "out"], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    # A lock whose holder is gone is none.
    assert sorted(os.listdir(tmp_path / "out")) == [".fp8fn-convert.lock", ".unfinished"]
    left = sorted(os.listdir(tmp_path / "out" / ".unfinished"))
    assert len(left) == 2
    assert left[0].startswith(".model-00002-of-00003.safetensors.")
    assert left[0].endswith(".partial")
    assert left[1] == "model-00001-of-00003.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(write, "quantize", failing(0, interrupt))
        assert run(tmp_path / "in", tmp_path / "out") == 130
    assert os.listdir(tmp_path / "out" / ".unfinished") == left[1:]
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / "out" / ".unfinished").exists()


@pytest.mark.parametrize("after", range(4))
def test_a_run_interrupted_while_files_go_to_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out", "--scale", "pow2") == 0
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    replace, calls = Path.replace, 0

    def counting(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls > 3 + after:  # the first three end the writing
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", counting)
        assert run(tmp_path / "in", tmp_path / "out", "--overwrite") == 130
    with pytest.raises(ValueError, match="has 3 files"):
        fp8fn.load_blockwise(tmp_path / "out")
    assert run(tmp_path / "in", tmp_path / "out", "--overwrite") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_an_overwriting_run_leaves_a_good_output_until_all_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    before = content(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(write, "quantize", failing(5, interrupt))
        assert run(tmp_path / "in", tmp_path / "out", "--scale", "pow2", "--overwrite") == 130
    assert content(tmp_path / "out") == before
    # The interrupted run's files are neither lost without --overwrite nor taken for this conversion's with it.
    assert run(tmp_path / "in", tmp_path / "out") == 1
    assert len(content(tmp_path / "out" / ".unfinished")) == 2
    assert run(tmp_path / "in", tmp_path / "out", "--overwrite") == 0
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("place", ["tensor", "header", "sync", "name"])
def test_a_full_disk_leaves_the_good_files_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, place: str
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    before, shard = content(tmp_path / "out"), "model-00001-of-00003.safetensors"

    def full(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    owner, name = {
        "tensor": (write, "write_bytes"),
        "header": (Plan, "header"),
        "sync": (os, "fsync"),
        "name": (Path, "replace"),
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        # An older conversion, and no folder yet.
        for folder in ("out", "new"):
            capsys.readouterr()
            assert run(tmp_path / "in", tmp_path / folder, "--scale", "pow2", "--overwrite") == 1
            message = capsys.readouterr().err.splitlines()[-1]
            target = tmp_path / folder / ".unfinished" / shard
            assert message.startswith(f"python -m fp8fn convert: {target}: {os.strerror(code)} (")
            assert message.endswith(" MiB are free there); make room and run the same command again to resume")
    assert content(tmp_path / "out") == before
    assert not (tmp_path / "out" / ".unfinished").exists()
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_later_keeps_what_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "in")

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(write, "quantize", failing(3, full))
        assert run(tmp_path / "in", tmp_path / "out") == 1
    assert os.listdir(tmp_path / "out") == [".unfinished"]
    assert os.listdir(tmp_path / "out" / ".unfinished") == ["model-00001-of-00003.safetensors"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure could leave a name, of a file whose bytes were never written."""
    checkpoint(tmp_path / "in")
    synced: dict[int, bytes] = {}
    named: dict[str, bool] = {}
    replace = Path.replace

    def sync(descriptor: int) -> None:
        synced[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def rename(self: Path, target: Path) -> Path:
        named[target.name] = synced.get(self.stat().st_ino) == self.read_bytes()
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert named == dict.fromkeys(os.listdir(tmp_path / "out"), True)
    assert len(named) == 6


def test_a_second_conversion_into_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, while the first one writes."""
    checkpoint(tmp_path / "in")
    seen: list[tuple[int, str]] = []

    def quantize(*args: Any, **kwargs: Any) -> fp8fn.ScaledTensor:
        if not seen:
            command = ["-m", "fp8fn", "convert", tmp_path / "in", tmp_path / "out", "--overwrite"]
            second = [sys.executable, *command]
            done = subprocess.run(second, capture_output=True, text=True)
            seen.append((done.returncode, done.stderr))
        return fp8fn.quantize(*args, **kwargs)

    monkeypatch.setattr(write, "quantize", quantize)
    assert run(tmp_path / "in", tmp_path / "out") == 0
    said = f"another convert is writing to {tmp_path / 'out'}; wait until it has ended, or name another folder"
    assert seen == [(1, f"python -m fp8fn convert: {said}\n")]
    assert ".fp8fn-convert.lock" not in os.listdir(tmp_path / "out")
    assert ".unfinished" not in os.listdir(tmp_path / "out")
    monkeypatch.setattr(write, "quantize", fp8fn.quantize)
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_without_fcntl(tmp_path: Path) -> None:
    """The whole command: `import fp8fn` too."""
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    code = """if True:
        import sys, warnings
        sys.modules["fcntl"] = None
        warnings.simplefilter("ignore")
        import fp8fn
        from fp8fn import cli
        from fp8fn.checkpoint.conversion import write
        statuses = []
        def quantize(*args, **kwargs):
            if not statuses:
                statuses.append(None)
                statuses.append(cli.main(["convert", *sys.argv[1:]]))
            return fp8fn.quantize(*args, **kwargs)
        write.quantize = quantize
        statuses.append(cli.main(["convert", *sys.argv[1:]]))
        assert statuses == [None, 1, 0], statuses
    """
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "in", tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"another convert is writing to {tmp_path / 'out'};" in done.stderr
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_folder_is_free_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "in")
    with monkeypatch.context() as patch:
        patch.setattr(write, "quantize", failing(3, interrupt))
        assert run(tmp_path / "in", tmp_path / "out") == 130
    assert run(tmp_path / "in", tmp_path / "out") == 0
