"""Support for tests that execute AMD code objects on the CPU, in the CDNA emulator of `FP8FN_CDNA_EMULATOR`.

A launch's tensors lie on the CPU and are written in place. What it writes is poisoned first; afterwards what it only
reads, and the bytes between and around the elements of what it writes, must be as they were.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.triton.launch import TritonLaunch

if TYPE_CHECKING:
    from fp8fn.ops.hip.launch import HipLaunch

FOLDER: Final = "FP8FN_CDNA_EMULATOR"
TINYGRAD_COMMIT: Final = "a9069c177a9d"  # that the tests pass with
# One byte is 2 ** 40 as a scale and no NaN as FP8; more bytes are a huge number that no sum or maximum hides.
_POISON_BYTE, _POISON_BYTES = 0xA7, 0x7F


class Part(NamedTuple):
    """A part of the emulator: what is wrong with it, or None, and how to get it."""

    name: str
    fault: str | None
    remedy: str


def parts() -> tuple[Part, ...]:
    """All parts; without the folder only that one, since the others lie in it unless a variable says otherwise."""
    folder = os.environ.get(FOLDER)
    remedy = f"set {FOLDER} to the folder of the emulator"
    if not folder:
        fault = f"{FOLDER} is not set: it names the folder with run_hsaco.py and emu_patch.py of the CDNA emulator"
        return (Part("emulator", fault, remedy),)
    absent = [name for name in ("run_hsaco.py", "emu_patch.py") if not (Path(folder) / name).is_file()]
    tinygrad, native = _tinygrad(folder), _native(folder)
    no_tinygrad = not (tinygrad / "test" / "mockgpu").is_dir()
    return (
        Part("emulator", f"{FOLDER}={folder} has no {absent[0]}" if absent else None, remedy),
        Part(
            "tinygrad",
            f"TINYGRAD={tinygrad} is not a checkout of tinygrad, whose test/mockgpu the emulator needs"
            if no_tinygrad else None,
            f"git clone https://github.com/tinygrad/tinygrad {tinygrad} and check out {TINYGRAD_COMMIT}, or set "
            "TINYGRAD to a checkout; the package on PyPI has no test/mockgpu",
        ),
        Part(
            "native",
            None if native.is_file()
            else f"CDNA_NATIVE={native} is not the library made of the emulator's native.c",
            "python -m tests.support.cdna --build",
        ),
        Part(
            "clang",
            f"no clang in {FOLDER}/bin or on PATH, with which the emulator compiles instructions"
            if shutil.which("clang", path=_path()) is None else None,
            "pip install ziglang==0.16.0",
        ),
    )  # fmt: skip


def missing() -> str | None:
    """Why the emulator cannot be used here; None where it can."""
    return next((part.fault for part in parts() if part.fault is not None), None)


def _tinygrad(folder: str) -> Path:
    return Path(os.environ.get("TINYGRAD") or Path(folder) / "tinygrad")


def _native(folder: str) -> Path:
    return Path(os.environ.get("CDNA_NATIVE") or Path(folder) / "native.so")


def build_native() -> Path:
    """Compiles the emulator's native.c; CalledProcessError where the compiler fails, KeyError without a folder."""
    folder = os.environ[FOLDER]
    library = _native(folder)
    flags = ("-shared", "-fPIC", "-O2", "-march=native", "-fno-sanitize=all", "-o", str(library))
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *flags, str(Path(folder) / "native.c")], check=True)
    return library


def _path() -> str:
    """PATH with the emulator's own tools in front, and the Python that finds ziglang, which is their clang."""
    folders = [str(Path(os.environ[FOLDER]) / "bin")]
    if find_spec("ziglang"):
        folders.append(str(Path(sys.executable).parent))
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def _environment(folder: Path) -> dict[str, str]:
    """The emulator's variables, each with its default in the folder."""
    found = {"TINYGRAD": str(_tinygrad(str(folder))), "CDNA_NATIVE": str(_native(str(folder)))}
    found["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )  # the worker imports `support`
    return {**os.environ, **found, "PATH": _path(), FOLDER: str(folder)}


class Worker:
    """The process that executes launches, each in a child of its own."""

    def __init__(self) -> None:
        worker = Path(__file__).with_name("emulated_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(Path(os.environ[FOLDER]).resolve()),
        )
        atexit.register(self.close)
        self._answer()

    def launch(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        body = pickle.dumps(request)
        self._process.stdin.write(struct.pack("<Q", len(body)) + body)
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        head = self._process.stdout.read(8)
        if len(head) < 8:
            raise RuntimeError(f"the emulator's process ended with {self._process.wait()}; its stderr says why")
        answer: dict[str, Any] = pickle.loads(self._process.stdout.read(struct.unpack("<Q", head)[0]))
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}\n{answer['traceback']}")
        return answer


@cache
def worker() -> Worker:
    return Worker()


def execute(launch: TritonLaunch | HipLaunch) -> int:
    """Executes the code object of one launch, and returns how many instructions its wavefronts took."""
    request = _of_triton(launch) if isinstance(launch, TritonLaunch) else _of_hip(launch)
    storages: dict[int, torch.UntypedStorage] = {}
    args: list[Any] = []
    for arg in request.pop("args"):
        if isinstance(arg, Tensor):
            storage = arg.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
            place = list(storages).index(storage.data_ptr())
            args.append((place, arg.storage_offset() * arg.element_size()))
        else:
            args.append(arg)
    contents = [_bytes(storage).numpy().tobytes() for storage in storages.values()]
    found = worker().launch(storages=contents, args=args, grid=launch.grid, **request)
    for storage, written in zip(storages.values(), found["storages"], strict=True):
        if written:
            _bytes(storage).copy_(torch.frombuffer(bytearray(written), dtype=torch.uint8))
    return int(found["instructions"])


def _of_triton(launch: TritonLaunch) -> dict[str, Any]:
    compiled = launch.compile()
    # A constant, None and an integer that is 1 are compiled in, and no arguments of the machine code.
    args = [value for name, value in launch.args.items() if compiled.src.signature[name] != "constexpr"]
    return {
        "code": compiled.asm["hsaco"], "name": compiled.metadata.name, "args": args,
        "threads": launch.target.warp_size * compiled.metadata.num_warps, "shared": compiled.metadata.shared,
    }  # fmt: skip


def _of_hip(launch: HipLaunch) -> dict[str, Any]:
    # Local memory is static, so the code object says how much.
    args = [int(value) if isinstance(value, int) else value for value in launch.args.values()]
    return {
        "code": launch.compile(), "name": launch.kernel.entry, "args": args, "threads": launch.threads, "shared": 0,
    }  # fmt: skip


def run(launches: Sequence[TritonLaunch | HipLaunch], inputs: Sequence[Tensor | None]) -> int:
    """Executes launches in order, on poisoned outputs and scratch; AssertionError where one wrote what it must not."""
    read = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in inputs if x is not None}
    before = {address: _bytes(storage).clone() for address, storage in read.items()}
    written: dict[int, Output] = {}
    for launch in launches:
        for tensor in launch.args.values():
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in read:
                written.setdefault(tensor.untyped_storage().data_ptr(), Output(tensor)).add(tensor)
    count = sum(execute(launch) for launch in launches)
    names = " then ".join(launch.name for launch in launches)
    for address, storage in read.items():
        assert torch.equal(_bytes(storage), before[address]), f"{names} wrote an input"
    for output in written.values():
        assert output.kept(), f"{names} wrote beside its output"
    return count


class Output:
    """A storage full of poison, and which of its bytes are elements of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.bytes = _bytes(tensor.untyped_storage())
        self.poison = _POISON_BYTE if tensor.element_size() == 1 else _POISON_BYTES
        self.bytes.fill_(self.poison)
        self.elements = torch.zeros(self.bytes.shape, dtype=torch.bool)

    def add(self, tensor: Tensor) -> None:
        mark_elements(self.elements, tensor)

    def kept(self) -> bool:
        """Whether every other byte is still poison."""
        return bool((self.bytes[~self.elements] == self.poison).all())


def untouched(tensor: Tensor) -> bool:
    """Whether no element of a contiguous tensor was written by `run`."""
    poison = _POISON_BYTE if tensor.element_size() == 1 else _POISON_BYTES
    return bool((tensor.view(torch.uint8) == poison).all())


def mark_elements(marks: Tensor, tensor: Tensor) -> None:
    """Sets those of `marks`, one for each byte of the tensor's storage, that belong to an element of it."""
    size = tensor.element_size()
    strides, start = [size * stride for stride in tensor.stride()], size * tensor.storage_offset()
    for byte in range(size):
        marks.as_strided(tensor.shape, strides, start + byte).fill_(True)


def with_nan_between(tensor: Tensor) -> Tensor:
    """The same tensor, the bytes of its storage that belong to no element now those of NaNs."""
    storage = _bytes(tensor.untyped_storage())
    marks = torch.zeros(storage.shape, dtype=torch.bool)
    mark_elements(marks, tensor)
    fnuz = tensor.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    storage[~marks] = 0x80 if fnuz else 0xFF
    return tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
