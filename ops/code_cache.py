"""Compiled code on disk: where it is kept, and files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

_CHECKSUM_BYTES: Final = 32


def cache_dir() -> Path:
    """Where compiled kernels and tuned configurations are kept."""
    return Path(os.environ.get("FP8FN_CACHE_DIR") or Path.home() / ".cache" / "fp8fn")


def read_whole(path: Path) -> bytes | None:
    """What `write` wrote; None where there is nothing, it may not be read, or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return content if _checksum(content) == checksum else None


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, also beside another process that writes the same; a read-only home is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content + _checksum(content))  # after the content: tools that read an ELF file still do
        os.replace(file.name, path)
    except OSError:
        pass


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
