"""The files of a safetensors checkpoint: found, opened by memory map, and checked against their index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.kinds import kind_of

Json: TypeAlias = Mapping[str, Any]

_INDEX_SUFFIX: Final = ".safetensors.index.json"
# A model's name on the Hugging Face Hub, which users may pass in place of a folder.
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The most characters of a file's name or tensor that an error repeats: an index may hold names of any length.
_REPEATED: Final = 80
# The types in a file's header.
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint, and its `index` with the `weight_map` from tensors to files, if there is one."""

    folder: Path
    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: Mapping[str, str] | None = None


def find(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint of a file, an index or a folder."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or an os.PathLike, not {type(path).__name__}")
    path = Path(path)
    # `os.path` returns False for an impossible name (too long, or with a zero byte), for which `Path` raises an error.
    if os.path.isdir(path):
        path = _of_folder(path)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{shortened(str(path))} does not exist; pass a safetensors file, its index, or their folder"
            f"{_download(path)}"
        )
    if path.suffix != ".json":
        return Checkpoint(path.parent, (path,))
    content = read_json(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: no index of safetensors files: it has no weight_map from tensors to files")
    for name, file in weight_map.items():
        said = f"{path}: tensor {shortened(name)!r} is said to be in {shortened(file)!r}"
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{said}; that must be a file beside the index")
        if not os.path.exists(path.parent / file):
            raise FileNotFoundError(f"{said}, which does not exist")
    files = tuple(path.parent / file for file in dict.fromkeys(weight_map.values()))
    return Checkpoint(path.parent, files, path, weight_map)


def _download(path: Path) -> str:
    """The remedy for a missing path that may be a model's name."""
    name = path.as_posix()
    if not _HUB_NAME.fullmatch(name) or path.suffix in (".safetensors", ".json"):
        return ""
    return f". If it is a model of the Hugging Face Hub, download it first: hf download {name} --local-dir {name}"


def shortened(value: object) -> object:
    """A value for a message; a long text is shortened in its middle."""
    if not isinstance(value, str) or len(value) <= _REPEATED:
        return value
    return f"{value[: _REPEATED // 2]}...{value[-_REPEATED // 2 :]}"


def _of_folder(folder: Path) -> Path:
    try:
        # `Path.glob` treats an unreadable folder as an empty one.
        files = sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
    except OSError as error:
        raise _unreadable(folder, error) from error
    for pattern, usual in ((f"*{_INDEX_SUFFIX}", f"model{_INDEX_SUFFIX}"), ("*.safetensors", "model.safetensors")):
        found = [file for file in files if fnmatchcase(file, pattern)]
        if usual in found:
            return folder / usual
        if len(found) == 1:
            return folder / found[0]
        if found:
            names = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
            raise ValueError(f"{folder} has {len(found)} files {pattern} ({names}) and no {usual}; pass one of them")
    raise FileNotFoundError(f"{folder} has no *.safetensors and no *{_INDEX_SUFFIX}")


def _unreadable(path: Path, error: OSError) -> OSError:
    """An error of the same type, with a sentence that begins with the path."""
    return type(error)(f"{path} cannot be read: {error.strerror or error}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds {kind_of(content)}; it must be a JSON object")
    return content


class Shard:
    """An open, memory-mapped safetensors file; opening it checks its length against its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: Any = _opened(path)
        self.names: tuple[str, ...] = tuple(self._file.offset_keys())
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})

    @property
    def _file(self) -> Any:
        if self._open is None:
            self._open = _opened(self.path)
        return self._open

    def unmap(self) -> None:
        """End the mapping until the next use; tensors that were read keep theirs."""
        self._open = None

    def tensor(self, name: str) -> Tensor:
        """A CPU tensor that maps the file; writing to the tensor does not change the file."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
            return tensor
        except Exception as error:
            raise ValueError(f"{self.path}: tensor {name!r} cannot be read: {error}") from error

    def header(self, name: str) -> tuple[str, list[int]]:
        """The dtype and the shape of a tensor, as in the file's header."""
        entry = self._file.get_slice(name)
        return str(entry.get_dtype()), list(entry.get_shape())

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The PyTorch dtype and the shape of a tensor, from the header alone."""
        dtype, shape = self.header(name)
        if dtype not in DTYPES:
            raise ValueError(f"{self.path}: tensor {name!r} cannot be read: PyTorch has no type {dtype}")
        return DTYPES[dtype], tuple(shape)


def _opened(path: Path) -> Any:
    """A `safetensors.safe_open`, whose methods have no types."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from error
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; its name is that of a safetensors file")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist, or is no file; pass a safetensors file")
    try:
        return safe_open(str(path), framework="pt")
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise ValueError(f"{path}: no whole safetensors file: {_cut_off(path) or error}") from error


def _cut_off(path: Path) -> str | None:
    """Says where a truncated file ends, and in which tensor; None if it is complete or its header is unreadable."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            return f"it ends after {size} bytes, before the end of its header"
        try:
            header = json.loads(file.read(length))
            ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items() if "dtype" in entry}
            late = [(end, name) for name, end in ends.items() if end > size]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None
    if not late:
        return None
    end, name = min(late)
    return f"it ends after {size} bytes, and tensor {name!r} at {end}"


def open_all(checkpoint: Checkpoint) -> dict[str, Shard]:
    """The shard of each tensor, in order. Raises ValueError if the index and the shards, or two shards, disagree."""
    owners: dict[str, Shard] = {}
    for path in checkpoint.files:
        shard = Shard(path)
        for name in shard.names:
            if name in owners:
                raise ValueError(f"{path}: tensor {name!r} is in {owners[name].path.name} too; one of them must go")
            owners[name] = shard
    for name, file in (checkpoint.weight_map or {}).items():
        if name not in owners or owners[name].path.name != file:
            raise ValueError(f"{checkpoint.index}: tensor {name!r} is said to be in {file!r}, which does not have it")
    if checkpoint.weight_map is not None:
        for name, shard in owners.items():
            if name not in checkpoint.weight_map:
                raise ValueError(f"{shard.path}: tensor {name!r} is not in the index {checkpoint.index}")
    return owners


def modules(weights: Sequence[str]) -> list[str]:
    """The modules that hold these weights; a parameter of another name than `weight` stands for itself."""
    return [name.removesuffix(".weight") for name in weights]
