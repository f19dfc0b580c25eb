"""The search for NVRTC, and the message where it is missing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.cuda.runtime import nvrtc
from support.compilers import needs_nvrtc


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """NVRTC is looked for again, in the test and after it."""
    caches: list[Any] = [nvrtc._library, nvrtc.unavailable, nvrtc.version]
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(("cuda_version", "names"), [("12.8", "12"), ("13.0", "13"), (None, "13 or .12")])
def test_unavailable_says_which_library_is_missing_and_what_to_do(
    cuda_version: str | None, names: str, fresh_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def missing(name: str) -> Any:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    reason = nvrtc.unavailable()
    assert reason is not None
    assert reason.startswith(f"no libnvrtc.so.{names} is here: pip install nvidia-cuda-nvrtc")
    assert f"libnvrtc.so.{(cuda_version or '13').split('.')[0]}" in asked


def test_a_missing_nvrtc_is_looked_for_once(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing() -> Any:
        asked.append("")
        raise OSError("none")

    monkeypatch.setattr(nvrtc, "_library", missing)
    try:
        assert [nvrtc.unavailable() for _ in range(3)] == ["none"] * 3
    finally:
        monkeypatch.undo()
    assert len(asked) == 1


@needs_nvrtc
def test_nvrtc_of_the_nvidia_package_is_found_where_the_loader_has_none(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The packaged library's builtins are loaded before it; the working folder is not searched for them."""
    (tmp_path / "libnvrtc-builtins.so.13.0").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    packaged = tmp_path / "nvidia" / "cu13" / "lib"
    packaged.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (packaged / name).touch()
    monkeypatch.setattr(nvrtc, "_packaged", lambda major: [str(packaged / f"libnvrtc.so.{major}")])
    loaded = []

    def load(name: str) -> str:
        if os.sep not in name and "builtins" not in name:
            raise OSError(name)
        loaded.append(name)
        return name

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert nvrtc._library() == str(packaged / "libnvrtc.so.13")  # type: ignore[comparison-overlap]
    assert loaded == [str(packaged / "libnvrtc-builtins.so.13.0"), str(packaged / "libnvrtc.so.13")]
