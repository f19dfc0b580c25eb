"""`load_blockwise`: memory-mapped safetensors checkpoints with FP8 weights and their scales, as `ScaledTensor`s.

`read_contents` checks a whole checkpoint and reads no weight's data: headers, declarations and scales are enough.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fp8fn.checkpoint.blocks import SQUARE, TENSOR
from fp8fn.checkpoint.files import Shard, find, open_all
from fp8fn.checkpoint.format import (
    Activations,
    CheckpointLayout,
    Format,
    Scheme,
    Schemes,
    UnknownScheme,
    WeightLayout,
    shapes,
)
from fp8fn.checkpoint.formats import format_of, read_declared
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_DTYPES, short_name
from fp8fn.ops.layout import BLOCKS, Block, scale_is_column_major, scale_shape, turned
from fp8fn.scaled_tensor import ScaledTensor

# Keys of metadata that a saved model does not get: checksums of the file that `convert` wrote.
_NOT_KEPT: Final = ("fp8fn.convert", "fp8fn.convert.crc32", "format")


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint under its parameter's name, with its scales where it is an FP8 weight.

    `tensor` is its name in the file.
    """

    shard: Shard
    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    scale: Tensor | None = None
    layout: WeightLayout | None = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The file, as that of a tensor of several files."""
        return (self.shard,)

    def load(self) -> ScaledTensor | Tensor:
        """The tensor on the CPU, which maps the file."""
        data = self.shard.tensor(self.tensor)
        if self.scale is None or self.layout is None:
            return data
        return ScaledTensor(data, self.scale, self.layout.block)


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint by the parameters' names, in the order of the files, and its layout.

    The tensors of `layout.input_scales` and `layout.beside` are in `entries` too: a module may have parameters of
    their names. `own` are the names in the file of those tensors.
    """

    entries: Mapping[str, Entry]
    layout: CheckpointLayout
    own: frozenset[str]


def load_blockwise(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
) -> dict[str, ScaledTensor | Tensor]:
    """Loads a safetensors checkpoint, with FP8 weights and their scales as `ScaledTensor`s.

    The format is found from the files: DeepSeek's and Qwen's (`X.weight` with `X.weight_scale_inv`),
    compressed-tensors', ModelOpt's, torchao's, and others that docs/guides/checkpoints.md lists. The block is the one
    that a `config.json` beside the file declares, or follows from the shapes. Scales in bfloat16 and float16 become
    float32. Other tensors are loaded unchanged. Needs `pip install safetensors`.

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
    tensors = {name: entry.load() for name, entry in read_contents(path).entries.items()}
    # Copy after all tensors are checked: a large checkpoint takes minutes to copy.
    return tensors if target.type == "cpu" else {name: moved_to(value, target) for name, value in tensors.items()}


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """The tensors of a checkpoint, checked, with its layout. Raises ValueError that names the file and the tensor."""
    checkpoint = find(path)
    owners = open_all(checkpoint)
    declared = read_declared(checkpoint, owners)
    if not owners:
        return Contents({}, CheckpointLayout("deepseek", {}), frozenset())
    format = format_of(owners, declared)
    reader = _Reader(owners, format, format.read(declared), declared.path)
    entries: dict[str, Entry] = {}
    beside: dict[str, Tensor] = {}
    own: set[str] = set()
    for name, shard in owners.items():
        if reader.is_scale(name, shard):
            continue
        weight = format.data.weight(name) or name
        entries[weight] = reader.entry(weight, name)
        if format.beside.fullmatch(name) or format.declaring.fullmatch(name):
            beside[name] = shard.tensor(name)
            _check_finite(shard.path, name, beside[name])
            own.add(name)
    weights = {name: entry.layout for name, entry in entries.items() if entry.layout is not None}
    inputs = reader.input_scales({name: entries[name].shape for name in weights})
    own.update(map(format.input_scale.of, inputs))
    kept = {key: value for key, value in declared.metadata.items() if key not in _NOT_KEPT}
    layout = CheckpointLayout(format.name, weights, inputs, beside, {**declared.files, "metadata": kept})
    return Contents(entries, layout, frozenset(own))


@dataclass(frozen=True)
class _Reader:
    """Reads and checks the tensors of one checkpoint."""

    owners: Mapping[str, Shard]
    format: Format
    schemes: Schemes
    declared: Path

    def is_scale(self, name: str, shard: Shard) -> bool:
        """Whether a tensor is a weight's scale. Raises ValueError if that weight is not there."""
        weight = self.format.scale.weight(name)
        if weight is None:
            return False
        data = self.format.data.of(weight)
        there = data in self.owners
        if self.format.may_be_own(weight, self.owners[data].kind(data)[0] if there else None):
            return False
        if there:
            return True
        activated = self.format.input_scale.weight(name)
        if activated is not None and self.format.data.of(activated) in self.owners:
            return False  # torchao's scale of activations is spelled like scales of a weight
        raise ValueError(f"{shard.path}: tensor {name!r} has the scales of {data!r}, which is not there")

    def entry(self, weight: str, name: str) -> Entry:
        shard = self.owners[name]
        dtype, shape = shard.kind(name)
        scale_name = self.format.scale.of(weight)
        if scale_name in self.owners and self.is_scale(scale_name, self.owners[scale_name]):
            return self._weight(weight, Entry(shard, name, dtype, shape), scale_name)
        if dtype in FP8_DTYPES and len(shape) >= 2:
            raise ValueError(
                f"{shard.path}: tensor {name!r} is {short_name(dtype)} and has no scales: {scale_name!r} is not there"
            )
        return Entry(shard, name, dtype, shape)

    def _weight(self, weight: str, entry: Entry, scale_name: str) -> Entry:
        shard, scales = entry.shard, self.owners[scale_name]
        try:
            scheme = self.schemes(weight, entry.shape)
        except UnknownScheme as error:
            raise ValueError(
                f"{shard.path}: tensor {entry.tensor!r} is stored as {error}, which fp8fn does not read"
            ) from None
        kind = f"{short_name(entry.dtype)}{list(entry.shape)}"
        if entry.dtype not in FP8_DTYPES or len(entry.shape) < 2:
            by = f" as {scheme.words}" if scheme.words else ""
            raise ValueError(
                f"{shard.path}: tensor {entry.tensor!r} is {kind}{by} and has scales ({scale_name!r}); it must be a "
                "matrix in FP8, or a batch of them"
            )
        if entry.dtype not in scheme.dtypes:
            raise ValueError(f"{shard.path}: tensor {entry.tensor!r} is {kind}, and declared as {scheme.words}")
        scale = scales.tensor(scale_name)
        stored = scale.dtype, tuple(scale.shape)
        if scale.dtype == torch.uint8:  # exponents of powers of two
            scale = scale.view(torch.float8_e8m0fnu)
        if scale.dtype not in (*INPUT_DTYPES, *SCALE_DTYPES):
            raise ValueError(
                f"{scales.path}: tensor {scale_name!r} is {short_name(scale.dtype)}; scales must be float32, bfloat16, "
                "float16, float8_e8m0fnu or uint8"
            )
        _check_scales(scales.path, scale_name, scale)
        block = self._block(entry, scheme, scale_name, stored[1])
        layout = WeightLayout(block, stored[1], stored[0], self._activations(weight, scheme, entry))
        return Entry(shard, entry.tensor, entry.dtype, entry.shape, _aligned(scale, entry.shape, block), layout)

    def _block(self, entry: Entry, scheme: Scheme, scale_name: str, stored: tuple[int, ...]) -> Block:
        """The declared block if the scales' shape fits it, else the first block that fits."""
        usual = SQUARE if scheme.block is None else scheme.block
        possible = (usual,) if scheme.block is not None else (usual, *BLOCKS)
        # A scale for each row is more likely than a weight whose rows are all one block of another kind.
        for named in ("grid", None):
            for block in possible:
                found = shapes(entry.shape, block)
                if stored in (found.values() if named is None else (found[named],)):
                    return block
        by = "" if scheme.block is None else f", which {self.declared} declares"
        raise ValueError(
            f"{self.owners[scale_name].path}: tensor {scale_name!r} has shape {stored}; {entry.tensor!r} of "
            f"{entry.shape} in blocks of {usual}{by}, needs {scale_shape(entry.shape, usual)}"
        )

    def _activations(self, weight: str, scheme: Scheme, entry: Entry) -> Activations | None:
        """The files' recipe of a weight's activations: a scale in the file is static where they say nothing else."""
        name = self.format.input_scale.of(weight)
        if scheme.activations is None:
            return Activations(TENSOR, static=True) if name in self.owners else None
        if scheme.activations.static and name not in self.owners:
            raise ValueError(
                f"{entry.shard.path}: tensor {entry.tensor!r} has static activations by {self.declared}, and their "
                f"scale {name!r} is not there"
            )
        return scheme.activations

    def input_scales(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The static scales of activations, by the weights' names, of weights with these shapes."""
        found = {}
        for weight, shape in weights.items():
            name = self.format.input_scale.of(weight)
            if name not in self.owners:
                continue
            shard = self.owners[name]
            scale = found[weight] = shard.tensor(name)
            one = scale.numel() == 1 and scale.ndim <= len(shape)
            of_each_expert = tuple(scale.shape) in (shape[:-2], (*shape[:-2], 1), (*shape[:-2], 1, 1))
            if not scale.is_floating_point() or not (one or of_each_expert):
                raise ValueError(
                    f"{shard.path}: tensor {name!r} is {short_name(scale.dtype)}{list(scale.shape)}; a scale of "
                    "activations must be a floating-point number, or one for each expert"
                )
            _check_scales(shard.path, name, scale)
        return found


def _aligned(scale: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """The scales as `quantize` lays them out, in aligned rows that TMA can address: a copy, 1/4096 of the weight."""
    scale = scale if scale.dtype in SCALE_DTYPES else scale.float()
    grid = scale_shape(shape, block)
    one_for_all = scale.numel() == 1 != math.prod(grid)  # of several experts
    scale = scale.reshape([1] * len(grid)).expand(grid) if one_for_all else scale.reshape(grid)
    return turned(scale, scale_is_column_major(False, block))


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


def _check_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Raises ValueError for a key-value cache's scale that is NaN or infinite; a model's own may have any sign."""
    if tensor.is_floating_point() and tensor.dtype not in FP8_DTYPES and not bool(tensor.float().isfinite().all()):
        raise ValueError(f"{path}: tensor {name!r} holds NaN or Inf. Every scale must be finite")


def moved_to(value: ScaledTensor | Tensor, device: torch.device) -> ScaledTensor | Tensor:
    """A tensor of a checkpoint on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    # Align the rows for TMA, as `quantize` does.
    data = value.data if value.shape[-1] % 16 == 0 else turned(value.data, column_major=False)
    return ScaledTensor(data, value.scale, value.block).to(device)
