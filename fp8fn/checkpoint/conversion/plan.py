"""The files that a conversion writes: their tensors, what they declare, and the files beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.checkpoint.blocks import SQUARE
from fp8fn.checkpoint.conversion.identity import identity
from fp8fn.checkpoint.conversion.options import BLOCKS, Options
from fp8fn.checkpoint.files import Checkpoint, Json, Shard, read_json
from fp8fn.checkpoint.format import CheckpointLayout, Format, WeightLayout
from fp8fn.checkpoint.format import Contents as Declarable
from fp8fn.checkpoint.formats import FORMATS, drop_declarations
from fp8fn.checkpoint.load import Contents, Entry
from fp8fn.checkpoint.plan import check_names, declaration, new_layout, takes_static
from fp8fn.checkpoint.write import Written, header, in_order, written
from fp8fn.ops.formats import FP8_DTYPES, ScaleFormat

# Files beside a checkpoint's tensors: configs, tokenizers, the model's code.
_BESIDE: Final = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
# Keys of a file's metadata: the source and the options as JSON, and the CRC-32 of each tensor, eight digits each.
# CRC-32 detects damage by a disk or a copy, and takes 0.25 s for 1 GB (SHA-256: 0.6 s, BLAKE2b: 1.1 s).
ORIGIN: Final = "fp8fn.convert"
SUMS: Final = "fp8fn.convert.crc32"
# Changes when the bytes that are written for the same source and options change.
_VERSION: Final = 5


@dataclass(frozen=True)
class Weight:
    """A weight to write: its source, how it is quantized, and how the output stores it.

    `kept` says that the source's bytes are those of the output.
    """

    entry: Entry
    layout: WeightLayout
    format: Format
    name: str
    scale: ScaleFormat
    input_scale: Tensor | None
    kept: bool

    def written(self) -> list[Written]:
        shape, stored = list(self.entry.shape), self.layout
        scales = torch.empty(stored.scale_shape, dtype=stored.scale_dtype, device="meta")
        found = [Written(self.format.data.of(self.name), "F8_E4M3", shape, math.prod(shape), 1)]
        found.append(written(self.format.scale.of(self.name), scales))
        if self.input_scale is not None:
            found.append(written(self.format.input_scale.of(self.name), self.input_scale))
        return found


@dataclass(frozen=True)
class Plan:
    """An output file: its source, its tensors in the order of their bytes, and the names of the converted tensors."""

    shard: Shard
    entries: tuple[Written, ...]
    weights: Mapping[str, Weight]
    others: Mapping[str, Entry]
    declared: Mapping[str, Json]
    origin: Mapping[str, Any]

    @property
    def sources(self) -> list[Entry]:
        return [*self.others.values(), *(weight.entry for weight in self.weights.values())]

    @property
    def converted(self) -> frozenset[str]:
        return frozenset(self.weights)

    @property
    def name(self) -> str:
        return self.shard.path.name

    def header(self, sums: str) -> bytes:
        """The file's bytes before its tensors. Their number does not depend on the digits in `sums`."""
        # Sorted, because safetensors gives the source's metadata in another order each time.
        metadata = {"format": "pt", **dict(sorted(self.metadata.items()))}
        return header(self.entries, {**metadata, ORIGIN: json.dumps(self.origin), SUMS: sums})

    @property
    def metadata(self) -> Mapping[str, str]:
        """The source's metadata without what its format declares there, and the output's."""
        own: Mapping[str, str] = self.declared.get("metadata", {})
        kept = self.shard.metadata if all(weight.entry.layout is None for weight in self.weights.values()) else {}
        return {**kept, **own}

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def plan_files(contents: Contents, options: Options) -> list[Plan]:
    """The output files, with what all of them declare."""
    format = FORMATS[options.format]
    weights: dict[str, Weight] = {}
    others: dict[str, Entry] = {}
    for name, entry in contents.entries.items():
        if entry.layout is not None or options.take(name, entry):
            weights[name] = _weight(name, entry, contents.layout, options)
        elif name not in contents.own or format.beside.fullmatch(name):
            others[name] = entry
    own = {name: entry.dtype for name, entry in others.items() if name not in contents.own}
    try:
        check_names(format, weights.keys(), own)
    except ValueError as error:
        raise ValueError(f"{next(iter(weights.values())).entry.shard.path}: {error}") from None
    left = [name for name, entry in others.items() if name.endswith(".weight") and len(entry.shape) in (2, 3)]
    if "lm_head.weight" not in weights and "lm_head.weight" not in left:
        left.insert(0, "lm_head.weight")  # not in the file if it is tied to the embedding
    dtypes = {
        name: torch.bfloat16 if weight.entry.dtype in FP8_DTYPES else weight.entry.dtype
        for name, weight in weights.items()
    }
    layouts = {name: weight.layout for name, weight in weights.items()}
    shapes = {name: weight.entry.shape for name, weight in weights.items()}
    declared = declaration(format, Declarable(layouts, shapes, dtypes, list(others), left))
    plans: list[Plan] = []
    for shard in dict.fromkeys(entry.shard for entry in contents.entries.values()):
        mine = {name: weight for name, weight in weights.items() if weight.entry.shard is shard}
        copied = {name: entry for name, entry in others.items() if entry.shard is shard}
        entries = [part for weight in mine.values() for part in weight.written()]
        for name, entry in copied.items():
            dtype, shape = shard.header(entry.tensor)
            size = entry.dtype.itemsize
            entries.append(Written(name, dtype, shape, math.prod(shape) * size, size))
        if not plans:
            entries += [written(marker, torch.empty(0, dtype=format.dtypes[0])) for marker in format.markers]
        origin = {"version": _VERSION, "options": asdict(options), "source": identity(shard.path)}
        # Through JSON, so that it equals the origin that is read back, whose tuples are lists.
        made = json.loads(json.dumps(origin))
        plans.append(Plan(shard, tuple(in_order(entries)), mine, copied, declared, made))
    return plans


def _weight(name: str, entry: Entry, source: CheckpointLayout, options: Options) -> Weight:
    format = FORMATS[options.format]
    own = None if entry.layout is None else entry.layout.block
    usual_block = SQUARE if SQUARE in format.forms else next(iter(format.forms))
    again = own is None or options.named(name)
    block = (options.block if again else None) or own or usual_block
    chosen = options.scale if again else None
    scale = source.input_scales.get(name) if takes_static(format, block) else None
    same = entry.layout is not None and own == block
    exponents = same and entry.layout is not None and entry.layout.scale_dtype.itemsize == 1
    powers = chosen == "e8m0" or (chosen is None and exponents)
    able = [text for text, other in BLOCKS.items() if other in format.forms and not format.forms[other].static]
    remedy = f"quantize it in {' or '.join(f'--block={text}' for text in able)}" if able and again else ""
    try:
        layout = new_layout(format, name, entry.shape, block, static=scale is not None, powers=powers, remedy=remedy)
    except ValueError as error:
        raise ValueError(f"{entry.shard.path}: {error}") from None
    both = format.weight_only and FORMATS[source.format].weight_only
    if both and entry.layout is not None and entry.layout.activations is None:
        layout = replace(layout, activations=None)
    usual: ScaleFormat = "fp32" if layout.scale_dtype == torch.float32 else "e8m0"
    asked = chosen or usual
    kept = same and entry.dtype == torch.float8_e4m3fn and (asked == "fp32" or _are_powers(entry.scale))
    return Weight(entry, layout, format, name, asked, scale, kept)


def _are_powers(scale: Tensor | None) -> bool:
    """Whether all scales are powers of two that e8m0 holds."""
    if scale is None:
        return False
    values = scale.float()
    return torch.equal(values.to(torch.float8_e8m0fnu).float(), values)


def files_beside_tensors(
    checkpoint: Checkpoint, alone: bool, plans: Sequence[Plan], options: Options
) -> dict[str, bytes]:
    """The files beside the tensors. For a single file, only config.json: its folder may hold anything."""
    config = checkpoint.folder / "config.json"
    copied = [config] if config.exists() else []
    if not alone:
        copied = sorted(path for path in checkpoint.folder.iterdir() if path.suffix in _BESIDE and path.is_file())
    ours = (*plans[0].declared, "hf_quant_config.json")
    texts = {path.name: path.read_bytes() for path in copied if not path.name.endswith(".index.json")}
    texts = {name: text for name, text in texts.items() if name == config.name or name not in ours}
    for name, section in plans[0].declared.items():
        if name not in (config.name, "metadata"):
            texts[name] = _json(section)
    quantization = plans[0].declared.get(config.name)
    if config.exists() or (quantization is not None and None not in FORMATS[options.format].methods):
        content = read_json(config) if config.exists() else {}
        content.pop("quantization_config", None)
        drop_declarations(content)
        if quantization is not None:
            content["quantization_config"] = quantization
        texts[config.name] = _json(content)
    if checkpoint.index is not None:
        metadata = read_json(checkpoint.index).get("metadata")
        kept = metadata if isinstance(metadata, dict) else {}
        texts[checkpoint.index.name] = _json(
            {
                "metadata": {**kept, "total_size": sum(plan.nbytes for plan in plans)},
                "weight_map": {entry.name: plan.name for plan in plans for entry in plan.entries},
            }
        )
    return texts


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
