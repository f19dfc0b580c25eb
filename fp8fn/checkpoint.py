"""`load_blockwise`: memory-mapped safetensors checkpoints with FP8 weights and block scales, as `ScaledTensor`s."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_DTYPES, short_name
from fp8fn.ops.layout import BLOCKS, Block, known_block, scale_shape, turned
from fp8fn.scaled_tensor import ScaledTensor

# The scales of `layer.weight` are `layer.weight_scale_inv`: DeepSeek-V3's name for the factors that dequantize.
SCALE_SUFFIX: Final = "_scale_inv"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_USUAL: Final[Block] = (128, 128)
# A model's name on the Hugging Face Hub, which users may pass in place of a folder.
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The most characters of a file's name or tensor that an error repeats: an index may hold names of any length.
_REPEATED: Final = 80


def load_blockwise(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
) -> dict[str, ScaledTensor | Tensor]:
    """Loads a safetensors checkpoint, with FP8 weights and their block scales as `ScaledTensor`s.

    The convention is that of DeepSeek-V3 and Qwen3-FP8: `X.weight` in FP8 with `X.weight_scale_inv`, one scale for each
    block, becomes the `ScaledTensor` `X.weight`. Scales in bfloat16 and float16 become float32. The block is
    `quantization_config.weight_block_size` of a `config.json` beside the file, or follows from the shapes. Other
    tensors are loaded unchanged. Needs `pip install safetensors`.

    Args:
        path: A safetensors file, an index (`model.safetensors.index.json`), or a folder with an index or one file.
        device: Where the tensors go. On the CPU they map the file: pages are read when they are used, and writing to a
            tensor does not change the file.

    Shape:
        `X.weight (N, K)` or `(E, N, K)` → a `ScaledTensor` of that shape; `fp8fn.linear(x, tensors["X.weight"])` is the
        layer.

    Returns:
        The tensors by name, in the order of the files.

    Raises:
        FileNotFoundError: A file does not exist.
        OSError: A file cannot be read.
        ValueError: A file is damaged or cut off, an index disagrees with its shards, a weight and its scales do not
            belong together, or a scale is not finite and positive.

    Example:
        >>> import safetensors.torch, tempfile
        >>> file = tempfile.mkdtemp() + "/model.safetensors"
        >>> q = fp8fn.quantize(torch.ones(256, 128), (128, 128))
        >>> tensors = {"fc.weight": q.data, "fc.weight_scale_inv": q.scale.contiguous()}
        >>> safetensors.torch.save_file(tensors, file)
        >>> fp8fn.load_blockwise(file)["fc.weight"].block
        (128, 128)
    """
    target = torch.device(device)
    checkpoint = find(path)
    owners = open_all(checkpoint)
    declared = _declared_block(checkpoint.folder / "config.json")
    tensors: dict[str, ScaledTensor | Tensor] = {}
    for name, shard in owners.items():
        if name.endswith(SCALE_SUFFIX):
            weight = name.removesuffix(SCALE_SUFFIX)
            if weight not in owners:
                raise ValueError(f"{shard.path}: tensor {name!r} has the scales of {weight!r}, which is not there")
            continue
        value = shard.tensor(name)
        scales = owners.get(name + SCALE_SUFFIX)
        if scales is not None:
            tensors[name] = _scaled(name, value, shard, scales, declared)
        elif value.dtype in FP8_DTYPES and value.ndim >= 2:
            raise ValueError(
                f"{shard.path}: tensor {name!r} is {short_name(value.dtype)} and has no scales: "
                f"{name + SCALE_SUFFIX!r} is not there"
            )
        else:
            tensors[name] = value
    # Copy after all tensors are checked: a large checkpoint takes minutes to copy.
    return tensors if target.type == "cpu" else {name: moved_to(value, target) for name, value in tensors.items()}


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
            f"{_short(str(path))} does not exist; pass a safetensors file, its index, or their folder{_download(path)}"
        )
    if path.suffix != ".json":
        return Checkpoint(path.parent, (path,))
    content = read_json(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: no index of safetensors files: it has no weight_map from tensors to files")
    for name, file in weight_map.items():
        said = f"{path}: tensor {_short(name)!r} is said to be in {_short(file)!r}"
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


def _short(value: object) -> object:
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
        raise ValueError(f"{path}: holds a {type(content).__name__}; it must be a JSON object")
    return content


class Shard:
    """An open, memory-mapped safetensors file; opening it checks its length against its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _opened(path)
        self.names: tuple[str, ...] = tuple(self._file.offset_keys())
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})

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


@dataclass(frozen=True)
class _Declared:
    """The block that a config declares, and the path of the config."""

    path: Path
    block: Block


def _declared_block(config: Path) -> _Declared | None:
    if not os.path.lexists(config):  # a broken link is an error, not a checkpoint without a config
        return None
    quantization = read_json(config).get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise ValueError(f"{config}: quantization_config={quantization!r} must be a JSON object")
    sizes = quantization.get("weight_block_size")
    if sizes is None:
        return None
    # 128.0 == 128 and True == 1, but kernels need ints.
    whole = isinstance(sizes, list) and all(type(size) is int for size in sizes)
    block = known_block(sizes) if whole else None
    if block is None:
        raise ValueError(
            f"{config}: weight_block_size={_short(repr(sizes))} is no block of fp8fn; it must be a list of two ints, "
            f"one of {list(map(list, BLOCKS))}"
        )
    return _Declared(config, block)


def _scaled(name: str, data: Tensor, shard: Shard, scales: Shard, declared: _Declared | None) -> ScaledTensor:
    scale_name = name + SCALE_SUFFIX
    scale = scales.tensor(scale_name)
    if data.dtype not in FP8_DTYPES or data.ndim < 2:
        raise ValueError(
            f"{shard.path}: tensor {name!r} is {short_name(data.dtype)}{list(data.shape)} and has scales "
            f"({scale_name!r}); it must be a matrix in FP8, or a batch of them"
        )
    if scale.dtype not in (*INPUT_DTYPES, *SCALE_DTYPES):
        raise ValueError(
            f"{scales.path}: tensor {scale_name!r} is {short_name(scale.dtype)}; scales must be float32, bfloat16, "
            "float16 or float8_e8m0fnu"
        )
    _check_scales(scales.path, scale_name, scale)
    if not scale.ndim:  # one scale for the whole tensor
        scale = scale.expand(*data.shape[:-2], 1, 1)
    usual = _USUAL if declared is None else declared.block
    fitting = [block for block in (usual, *BLOCKS) if scale_shape(data.shape, block) == tuple(scale.shape)]
    if not fitting or (declared is not None and fitting[0] != declared.block):
        by = "" if declared is None else f", which {declared.path} declares"
        raise ValueError(
            f"{scales.path}: tensor {scale_name!r} has shape {tuple(scale.shape)}; {name!r} of {tuple(data.shape)} in "
            f"blocks of {usual}{by}, needs {scale_shape(data.shape, usual)}"
        )
    # Copy the scales, 1/4096 of the weight's bytes, to aligned rows, which TMA can address.
    scale = turned(scale if scale.dtype in SCALE_DTYPES else scale.float(), column_major=False)
    return ScaledTensor(data, scale, fitting[0])


def _check_scales(path: Path, name: str, scale: Tensor) -> None:
    """Raises an error for scales that cannot be right. This is one pass over the scales, which are copied anyway."""
    if scale.dtype == torch.float8_e8m0fnu:
        wrong = scale.view(torch.uint8) == 0xFF  # the code of NaN; the format has no sign, no zero and no Inf
    else:
        wrong = ~((scale > 0) & (scale < math.inf))
    count = int(wrong.sum())
    if count:
        first = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{path}: tensor {name!r} has {count} of {scale.numel()} scales that are NaN, infinite, zero or negative; "
            f"the first is {scale.float()[first].item()} at {list(first)}. Every scale must be finite and positive"
        )


def moved_to(value: ScaledTensor | Tensor, device: torch.device) -> ScaledTensor | Tensor:
    """A tensor of a checkpoint on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    # Align the rows for TMA, as `quantize` does.
    data = value.data if value.shape[-1] % 16 == 0 else turned(value.data, column_major=False)
    return ScaledTensor(data, value.scale, value.block).to(device)
