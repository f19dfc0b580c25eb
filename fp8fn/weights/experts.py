"""Parameters that files hold in pieces under other names: experts of transformers, one matrix each.

transformers 5 stacks the experts of a layer in one parameter, `experts.gate_up_proj (E, 2 * I, K)`. Its files, and
those of other libraries, hold `experts.0.gate_proj.weight (I, K)`, `experts.0.up_proj.weight`, and so on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8fn.checkpoint.files import Shard
from fp8fn.checkpoint.format import WeightLayout
from fp8fn.checkpoint.load import Entry
from fp8fn.ops.formats import short_name
from fp8fn.ops.layout import WHOLE, Block, scale_is_column_major, scale_shape, turned
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.weights.form import bytes_of
from fp8fn.weights.fp8_weight import FP8Weight

# For each parameter that files name otherwise, the names in a file and what they hold of it.
Pieces: TypeAlias = Mapping[str, Mapping[str, "Piece"]]

_CONVERT: Final = "convert the checkpoint to other blocks: python -m fp8fn convert SOURCE TARGET --block=1,128"


@dataclass(frozen=True, order=True)
class Piece:
    """What one tensor of a file holds of a parameter: rows from `start` on, of the expert `index` if there is one."""

    index: tuple[int, ...]
    start: int
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The rows of a parameter that are the piece, a view."""
        return whole[self.index].narrow(0, self.start, self.shape[0]) if self.shape else whole

    def of_scale(self, scale: Tensor, block: Block) -> Tensor:
        """The scales of the piece, a view of the parameter's scales."""
        of_experts, rows = scale[self.index], block[0]
        if rows == WHOLE:
            return of_experts
        return of_experts.narrow(0, self.start // rows, -(-self.shape[0] // rows))

    def why_straddled(self, block: Block) -> str | None:
        """The reason why a block of the parameter would reach beyond the piece, or None."""
        if block[0] == WHOLE or self.start % block[0] == 0:
            return None
        return f"begins at its row {self.start}, inside a block of {block}"


@dataclass(frozen=True)
class JoinedEntry:
    """A parameter whose pieces are tensors of a checkpoint; it has what an `Entry` has."""

    parts: tuple[tuple[Piece, Entry], ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    scale: Tensor | None = None
    layout: WeightLayout | None = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files of the pieces."""
        return tuple(dict.fromkeys(entry.shard for _, entry in self.parts))

    def load(self) -> ScaledTensor | Tensor:
        """The parameter on the CPU. Each piece is copied into its place, so that one copy is in memory."""
        data = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for piece, entry in self.parts:
            bytes_of(piece.of(data)).copy_(bytes_of(entry.shard.tensor(entry.tensor)))
        if self.scale is None or self.layout is None:
            return data
        return ScaledTensor(data, self.scale, self.layout.block)


@dataclass(frozen=True)
class Found:
    """The tensors of a checkpoint by the parameters' names, and errors of shapes.

    A parameter of which a piece is missing is not among `entries`.
    """

    entries: Mapping[str, Entry | JoinedEntry]
    errors: list[str]


class _KeepViews(TorchFunctionMode):
    """`contiguous` returns its argument, so that a piece of a tensor stays a view of that tensor."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def pieces_in_files(model: nn.Module) -> Pieces:
    """The parameters and buffers that `save_pretrained` of transformers would write under other names, or in pieces.

    The function of transformers that reverts its conversions runs on tensors of the meta device; the storage offset of
    each result says which rows of which expert it is. A conversion that is no view, such as an interleaving, leaves
    the parameter under its own name. No other module has such names.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return {}
    values = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    with torch.inference_mode(False):  # an inference tensor does not know its base
        wholes = {name: torch.empty(value.shape, device="meta") for name, value in values.items()}
    try:
        from transformers.core_model_loading import revert_weight_conversion

        # The conversions that a model remembers from `from_pretrained` include its quantizer's. Without them the
        # function takes those of the architecture.
        architecture: Any = SimpleNamespace(
            _weight_conversions=None, config=model.config, named_modules=model.named_modules,
            base_model_prefix=model.base_model_prefix,
        )  # fmt: skip
        with torch.inference_mode(False), _KeepViews():
            stored = revert_weight_conversion(architecture, wholes)
    except Exception as error:
        fused = any("experts" in name and value.ndim == 3 for name, value in values.items())
        if not fused or _is_before_fusion(error):
            return {}
        raise NotImplementedError(
            f"transformers {sys.modules['transformers'].__version__} does not say how files name the experts of "
            f"{type(model).__name__}: core_model_loading.revert_weight_conversion raised {error!r}; use transformers "
            "5.23"
        ) from error
    owners = {id(whole): name for name, whole in wholes.items()}
    found: dict[str, dict[str, Piece]] = {}
    for file, tensor in stored.items():
        base = tensor if tensor._base is None else tensor._base
        name, piece = owners.get(id(base)), _piece(tensor, base)
        if name is not None and piece is not None:
            found.setdefault(name, {})[file] = piece
    return {
        name: dict(sorted(pieces.items(), key=lambda each: each[1]))
        for name, pieces in found.items()
        if [*pieces] != [name] and sum(map(_size, pieces.values())) == wholes[name].numel()
    }


def _is_before_fusion(error: Exception) -> bool:
    """Whether transformers is of a version whose models hold experts as their files do."""
    return isinstance(error, ModuleNotFoundError) and error.name == "transformers.core_model_loading"


def _size(piece: Piece) -> int:
    return torch.Size(piece.shape).numel()


def _piece(tensor: Tensor, base: Tensor) -> Piece | None:
    """Where a view lies in its base; None for a view of columns, a transpose, or a reshape."""
    leading = base.ndim - tensor.ndim
    strides = base.stride()[leading:]
    if leading not in (0, 1) or tensor.stride() != strides or tensor.shape[1:] != base.shape[leading + 1 :]:
        return None
    offset = int(tensor.storage_offset())
    expert, rest = divmod(offset, base.stride(0)) if leading else (0, offset)
    start, column = divmod(rest, strides[0]) if strides else (0, rest)
    return None if column else Piece((expert,) * leading, start, tuple(tensor.shape))


def by_parameter(entries: Mapping[str, Entry], stored: Pieces, shapes: Mapping[str, tuple[int, ...]]) -> Found:
    """The tensors of a checkpoint under the parameters' names; a file's own name for a parameter goes first."""
    owners = {file: name for name, pieces in stored.items() if name not in entries for file in pieces}
    found: dict[str, Entry | JoinedEntry] = {}
    errors: list[str] = []
    seen: set[str] = set()
    for file, entry in entries.items():
        name = owners.get(file)
        if name is None:
            found[file] = entry
        if name is None or name in seen:
            continue
        seen.add(name)
        parts = [(piece, entries[each]) for each, piece in stored[name].items() if each in entries]
        wrong = [
            f"size mismatch for {each}: copying a param with shape {torch.Size(entries[each].shape)} from checkpoint, "
            f"the shape in current model is {torch.Size(piece.shape)}."
            for each, piece in stored[name].items()
            if each in entries and entries[each].shape != piece.shape
        ]
        errors += wrong
        if not wrong and len(parts) == len(stored[name]):
            found[name] = entry if entry.shape == shapes[name] else _joined(name, shapes[name], parts)
    return Found(found, errors)


def _joined(name: str, shape: tuple[int, ...], parts: list[tuple[Piece, Entry]]) -> JoinedEntry:
    first = parts[0][1]
    for piece, entry in parts:
        if _kind(entry) != _kind(first):
            raise ValueError(
                f"load_weights: {first.tensor} is {_kind(first)} and {entry.tensor} is {_kind(entry)}; both belong to "
                f"{name}, which has one type"
            )
        straddled = None if entry.layout is None else piece.why_straddled(entry.layout.block)
        if straddled is not None:
            raise ValueError(
                f"load_weights: {entry.tensor} is the piece of {name} that {straddled}, which already has the scale of "
                f"the piece before; {_CONVERT}"
            )
    if first.scale is None or first.layout is None:
        return JoinedEntry(tuple(parts), first.dtype, shape)
    block = first.layout.block
    scale = torch.empty(scale_shape(shape, block), dtype=first.scale.dtype, device="cpu")
    filled: dict[tuple[int, ...], Entry] = {}
    for piece, entry in parts:
        assert entry.scale is not None
        other = filled.setdefault(piece.index, entry)
        if block[0] == WHOLE and other.scale is not None and not _same(other.scale, entry.scale):
            raise ValueError(
                f"load_weights: {other.tensor} and {entry.tensor} belong to {name} and have different scales, and a "
                f"block of {block} has one for both; {_CONVERT}"
            )
        bytes_of(piece.of_scale(scale, block)).copy_(bytes_of(entry.scale))
    aligned = turned(scale, scale_is_column_major(False, block))
    return JoinedEntry(tuple(parts), first.dtype, shape, aligned, first.layout)


def _kind(entry: Entry) -> str:
    """The type of a tensor, with the block and the type of its scales."""
    text = short_name(entry.dtype)
    if entry.scale is None or entry.layout is None:
        return text
    return f"{text} in blocks of {entry.layout.block} with scales in {short_name(entry.scale.dtype)}"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bytes_of(a), bytes_of(b))


def piece_of(name: str, value: Tensor, file: str, piece: Piece) -> Tensor:
    """The piece of a parameter that a file holds under its own name. Raises ValueError where a block straddles it."""
    if piece.shape == tuple(value.shape):
        return value
    if not isinstance(value, FP8Weight):
        return piece.of(value)
    q = value.scaled
    straddled = piece.why_straddled(q.block)
    if straddled is not None:
        raise ValueError(
            f"save_weights: {file} is the piece of {name} that {straddled}, whose scale it would share with the piece "
            "before; quantize the weight in blocks of (1, 128), or of rows that fit"
        )
    return FP8Weight(ScaledTensor(piece.of(q.data), piece.of_scale(q.scale, q.block), q.block), value.dtype)
