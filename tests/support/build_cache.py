"""Compiled results of tests, kept between runs by content in the folder `FP8FN_TEST_CACHE`.

A result is found again only where everything that it depends on is the same: the sources, the headers that they reach,
the macros, the options and the compiler. Without the folder, tests compile as if nothing had been kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import platform
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_path

VARIABLE: Final = "FP8FN_TEST_CACHE"
# A file that no run has used for this long is removed; beyond the size, the files that were used last are kept.
LONGEST_UNUSED: Final = 14 * 86400.0
LARGEST: Final = 4 << 30
_CHECKSUM_BYTES: Final = 32
# g++ has all libraries of a process share the variables of inline functions and of headers, whatever size each library
# takes them to have. A library that shares on purpose says `-fgnu-unique`.
_OWN_VARIABLES: Final = ("-fno-gnu-unique", "-Wl,-Bsymbolic")


def folder() -> Path:
    """`FP8FN_TEST_CACHE`, else the user's cache folder, else the folder of temporary files."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    found = user_cache_path("fp8fn-tests", appauthor=False)
    return found if found.is_absolute() else Path(tempfile.gettempdir(), "fp8fn-tests")


def digest(key: object) -> str:
    """The hash of an object that is known by its `repr`."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


def kept(kind: str, key: object, make: Callable[[], bytes]) -> bytes:
    """The result of `make`, from the folder if an equal key has been made before; `key` is known by its `repr`."""
    name = digest(key)
    path = folder() / kind / name[:2] / name
    if (found := _read(path)) is not None:
        return found
    made = make()
    with suppress(OSError):  # a folder that can't be written costs time only
        _write(path, made)
    return made


def reached(main: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers among `headers` that a source includes, by name, directly or through others."""
    found: dict[str, str] = {}
    waiting = [main]
    while waiting:
        for directive in re.findall(r"^\s*#\s*include\b(.*)", waiting.pop(), re.MULTILINE):
            named = re.match(r'\s*["<]([^">]+)[">]', directive)
            assert named is not None, f"#include{directive} names no file, so its contents can't be part of the key"
            if (name := named[1]) in headers and name not in found:
                found[name] = headers[name]
                waiting.append(headers[name])
    return dict(sorted(found.items()))


def compiled(source: str, headers: Mapping[str, str], options: Sequence[str], linked: bytes | None = None) -> bytes:
    """The library that g++ makes of a C++ source, linked with the object file `linked`."""
    included, options = reached(source, headers), [*_OWN_VARIABLES, *options]

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as name:
            inside = Path(name)
            for header, text in included.items():
                (inside / header).write_text(text, encoding="utf-8")
            (inside / "kernel.cpp").write_text(source, encoding="utf-8")
            files = [inside / "kernel.cpp"]
            if linked is not None:
                files.append(inside / "linked.o")
                files[-1].write_bytes(linked)
            subprocess.run(["g++", *options, "-o", inside / "made", *files], check=True)
            return (inside / "made").read_bytes()

    others = () if linked is None else (hashlib.sha256(linked).hexdigest(),)
    return kept("libraries", (source, included, tuple(options), host_compiler(), *others), build)


def library(
    source: str, headers: Mapping[str, str], options: Sequence[str], linked: bytes | None = None
) -> ctypes.CDLL:
    """A C++ source as a shared library, compiled by g++ and loaded anew, with variables of its own."""
    code = compiled(source, headers, options, linked)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "kernel.so")
        path.write_bytes(code)
        return ctypes.CDLL(str(path))


@cache
def loaded_library(pattern: str) -> str:
    """The hash of the library in this process whose path matches: two releases may have one version number."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        paths = {line.split(maxsplit=5)[5].rstrip() for line in file if re.search(pattern, line)}
    return digest([hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in sorted(paths)])


@cache
def host_compiler() -> tuple[str, ...]:
    """The version and target of this machine's g++, and its C library."""
    if shutil.which("g++") is None:
        return ()
    said = [
        subprocess.run(["g++", option], capture_output=True, text=True, check=True).stdout
        for option in ("--version", "-dumpmachine")
    ]
    return (*said, *platform.libc_ver())


def by_content(compile_source: Callable[..., Any], compiler: Callable[[], object]) -> Callable[..., Any]:
    """`nvrtc._compile` that keeps its results.

    Args:
        compile_source: takes a source, its name, headers and options.
        compiler: returns the version of the compiler.
    """

    def compiled(source: str, name: str, headers: dict[str, str], options: tuple[str, ...]) -> Any:
        key = (source, name, reached(source, headers), options, compiler())
        return pickle.loads(kept("nvrtc", key, lambda: pickle.dumps(compile_source(source, name, headers, options))))

    return compiled


def prune(longest_unused: float = LONGEST_UNUSED, largest: int = LARGEST) -> None:
    """Removes files that were not used for long, then those used longest ago until the rest is small enough.

    Triton's files of one kernel, which lie in a folder of their own, are removed together.
    """
    used: dict[str, float] = defaultdict(float)
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for parent, _, names in os.walk(folder()):
        kernels = Path(parent).parent.name == "triton"
        for name in names:
            path = os.path.join(parent, name)
            unit = parent if kernels else path
            with suppress(OSError):  # another run may have removed the file
                found = os.stat(path, follow_symlinks=False)
                used[unit] = max(used[unit], found.st_mtime, found.st_atime)
                sizes[unit][path] = found.st_size
    total, oldest = 0, time.time() - longest_unused
    for unit in sorted(used, key=used.__getitem__, reverse=True):
        total += sum(sizes[unit].values())
        if used[unit] < oldest or total > largest:
            for path in sizes[unit]:
                with suppress(OSError):
                    os.unlink(path)


def _read(path: Path) -> bytes | None:
    """The content that `_write` wrote, or None where the file is missing or damaged."""
    try:
        content = path.read_bytes()
        os.utime(path)  # the time of its last use, for `prune`
    except OSError:
        return None
    checksum, content = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    return content if checksum == hashlib.sha256(content).digest() else None


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also where two workers write the same file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
