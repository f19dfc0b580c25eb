"""`python -m fp8fn convert`: a bf16 checkpoint's linear layers in FP8 with block scales, as DeepSeek-V3 has them.

INPUT is a safetensors file, an index or a folder; OUTPUT gets files of the same names, the index, and config.json with
a `quantization_config`, as transformers reads it. `X.weight` becomes FP8 and `X.weight_scale_inv`; the rest is copied.
Each weight is compared with its source as it is written: under 25 dB of signal to noise the command fails and names it.
A file gets its name when it is complete, so that the same command, started again, goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import hashlib
import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

import torch
from torch import Tensor

from fp8fn.checkpoint import SCALE_SUFFIX, Checkpoint, Shard, find, open_all, read_json
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, short_name
from fp8fn.ops.layout import Block, scale_shape
from fp8fn.quantization import dequantize, quantize
from fp8fn.site import LEAST_K, LEAST_N, matches, why_sensitive

LEAST_SNR_DB: Final = 25.0
# Blocks along K of a weight (N, K), for which products exist.
_BLOCKS: Final[Mapping[str, Block]] = {"128,128": (128, 128), "1,128": (1, 128), "1,32": (1, 32)}
# What a checkpoint's folder has beside its tensors: configs, tokenizers, the model's code.
_BESIDE: Final = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
# Elements quantized at once: the float64 of the comparison takes eight bytes of each.
_SLICE: Final = 2**23
_COPY: Final = 2**26
_WORST: Final = 8
# In a file's metadata, which source and options it is from.
_ORIGIN: Final = "fp8fn.convert"
_UNFINISHED: Final = ".unfinished"
# Changes when what is written for the same source and options does.
_VERSION: Final = 1


def main(argv: Sequence[str]) -> int:
    """Converts, and prints the worst weights; 1 where the conversion failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    for module in ("safetensors", "tabulate", "tqdm"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"needs {module}: pip install {module}")
    options = Options(args.block, args.scale, tuple(args.include), tuple(args.exclude))
    try:
        print(convert(args.input, args.output, options, overwrite=args.overwrite, device=args.device))
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class Options:
    """What decides the bytes that are written."""

    block: Block = (128, 128)
    scale: Literal["fp32", "pow2"] = "fp32"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def take(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor goes to FP8: by default weights of linear layers, else what `include` names."""
        if tensor.dtype not in INPUT_DTYPES or tensor.ndim not in (2, 3) or not tensor.numel():
            return False
        if matches(name, self.exclude):
            return False
        if self.include:
            return matches(name, self.include)
        large = tensor.shape[-2] >= LEAST_N and tensor.shape[-1] >= LEAST_K
        return large and name.endswith(".weight") and why_sensitive(name, *tensor.shape[-2:]) is None


@dataclass(frozen=True)
class Verified:
    """A weight that was written, and how far it is from its source."""

    name: str
    shape: tuple[int, ...]
    snr_db: float


def convert(
    source: Path, output: Path, options: Options, *, overwrite: bool = False, device: torch.device | str = "cpu"
) -> str:
    """Writes the FP8 checkpoint, with a bar, and returns what there is to say about it.

    Raises `ValueError` or `OSError`, naming file and tensor, and leaves no file under its name that is not complete.
    """
    from tqdm import tqdm

    checkpoint = find(source)
    if output.exists() and output.samefile(checkpoint.folder):
        raise ValueError(f"{output} is the folder of the input; name another for the output")
    plans = [_planned(shard, options) for shard in dict.fromkeys(open_all(checkpoint).values())]
    if not any(plan.converted for plan in plans):
        raise ValueError(f"{source}: no tensor is a linear layer's weight by these options; see --include")
    texts = _texts(checkpoint, source.is_file() and checkpoint.index is None, plans, options)
    # Files go to their places when all are there: until then an older conversion stays as it is.
    unfinished = output / _UNFINISHED
    if not overwrite:
        _check_room(output, plans, texts)
    unfinished.mkdir(parents=True, exist_ok=True)
    todo = [plan for plan in plans if not any(plan.is_in(folder) for folder in (output, unfinished))]
    verified: list[Verified] = []
    size = sum(shard.tensor(name).nbytes for shard in (plan.shard for plan in todo) for name in shard.names)
    with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, disable=not todo) as bar:
        for plan in todo:
            bar.set_description(plan.shard.path.name)
            with _replacing(unfinished / plan.shard.path.name) as file:
                verified += _write(file, plan, options, torch.device(device), bar.update)
    made = [unfinished / plan.shard.path.name for plan in plans if plan.is_in(unfinished)]
    if made and checkpoint.index is not None:
        (output / checkpoint.index.name).unlink(missing_ok=True)  # never one with files of two conversions
    for path in made:
        path.replace(output / path.name)
    for name, text in texts.items():
        if not (output / name).exists() or (output / name).read_bytes() != text:
            with _replacing(output / name) as file:
                file.write(text)
    shutil.rmtree(unfinished)
    return report(verified, plans, len(plans) - len(todo), output)


@dataclass(frozen=True)
class _Entry:
    """A tensor of an output file, as its header has it."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    itemsize: int


@dataclass(frozen=True)
class _Plan:
    """An output file: its source, the tensors in the order in which they lie, and which are converted."""

    shard: Shard
    entries: tuple[_Entry, ...]
    converted: frozenset[str]
    origin: str

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has the file, whole, of this source and these options."""
        try:
            return Shard(folder / self.shard.path.name).metadata.get(_ORIGIN) == self.origin
        except (OSError, ValueError):
            return False

    @property
    def offsets(self) -> dict[str, int]:
        ends, end = {}, 0
        for entry in self.entries:
            ends[entry.name] = end
            end += entry.nbytes
        return ends

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def _planned(shard: Shard, options: Options) -> _Plan:
    entries: list[_Entry] = []
    converted = set()
    for name in shard.names:
        tensor = shard.tensor(name)
        if tensor.dtype in FP8_DTYPES or name.endswith(SCALE_SUFFIX):
            raise ValueError(
                f"{shard.path}: tensor {name!r} is of a checkpoint in FP8 already ({short_name(tensor.dtype)}); "
                "convert takes bfloat16, float16 and float32"
            )
        if options.take(name, tensor):
            scales = list(scale_shape(tensor.shape, options.block))
            entries.append(_Entry(name, "F8_E4M3", list(tensor.shape), tensor.numel(), 1))
            entries.append(_Entry(name + SCALE_SUFFIX, "F32", scales, 4 * math.prod(scales), 4))
            converted.add(name)
        else:
            dtype, shape = shard.header(name)
            entries.append(_Entry(name, dtype, shape, tensor.nbytes, tensor.element_size()))
    # Wide types first, as safetensors' own writer has it: then each tensor begins at a multiple of its element.
    entries.sort(key=lambda entry: -entry.itemsize)
    stat = shard.path.stat()
    origin = {"version": _VERSION, "name": shard.path.name, "size": stat.st_size, "mtime": stat.st_mtime_ns}
    described = json.dumps({**origin, **asdict(options)}, sort_keys=True)
    return _Plan(shard, tuple(entries), frozenset(converted), hashlib.sha256(described.encode()).hexdigest())


def _texts(checkpoint: Checkpoint, alone: bool, plans: Sequence[_Plan], options: Options) -> dict[str, bytes]:
    """The files beside the tensors; of a file that was named alone only config.json, for its folder may be any."""
    config = checkpoint.folder / "config.json"
    copied = [config] if config.exists() else []
    if not alone:
        copied = sorted(path for path in checkpoint.folder.iterdir() if path.suffix in _BESIDE and path.is_file())
    texts = {path.name: path.read_bytes() for path in copied if not path.name.endswith(".index.json")}
    if config.exists():
        content = read_json(config)
        if content.get("quantization_config"):
            raise ValueError(f"{config}: has a quantization_config; convert takes a checkpoint that is not quantized")
        texts[config.name] = _json({**content, "quantization_config": _quantization_config(plans, options)})
    if checkpoint.index is not None:
        metadata = read_json(checkpoint.index).get("metadata")
        kept = metadata if isinstance(metadata, dict) else {}
        texts[checkpoint.index.name] = _json({
            "metadata": {**kept, "total_size": sum(plan.nbytes for plan in plans)},
            "weight_map": {entry.name: plan.shard.path.name for plan in plans for entry in plan.entries},
        })  # fmt: skip
    return texts


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _quantization_config(plans: Sequence[_Plan], options: Options) -> dict[str, object]:
    """As DeepSeek-V3's; the modules left out are named, for transformers makes all others FP8 layers."""
    left = {"lm_head": None}  # which is not in the file where it is tied to the embedding
    for plan in plans:
        for entry in plan.entries:
            if entry.name.endswith(".weight") and len(entry.shape) in (2, 3) and entry.name not in plan.converted:
                left[entry.name.removesuffix(".weight")] = None
    if any("lm_head.weight" in plan.converted for plan in plans):
        del left["lm_head"]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": list(left),
        "quant_method": "fp8",
        "weight_block_size": list(options.block),
    }


def _check_room(output: Path, plans: Sequence[_Plan], texts: Mapping[str, bytes]) -> None:
    """What is in the output must be of this conversion, or it would be replaced, or be taken for a part of it."""
    ours = {plan.shard.path.name: plan for plan in plans}
    for folder in (output, output / _UNFINISHED):
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if path.suffix == ".safetensors":
                same = path.name in ours and ours[path.name].is_in(folder)
            else:
                same = path.name not in texts or path.read_bytes() == texts[path.name]
            if not same:
                raise ValueError(
                    f"{path} is there and not of this conversion (another source, other options, or damaged); name "
                    "another folder, or give --overwrite"
                )


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `target` once it is whole and on the disk; before, and if that fails, none has."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):  # of a run that was killed
        left.unlink(missing_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write(
    file: BinaryIO, plan: _Plan, options: Options, device: torch.device, progress: Callable[[int], object]
) -> list[Verified]:
    """The file, one slice of a tensor in memory at a time."""
    offsets = plan.offsets
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", **plan.shard.metadata, _ORIGIN: plan.origin},
        **{
            entry.name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": [offsets[entry.name], offsets[entry.name] + entry.nbytes],
            }
            for entry in plan.entries
        },
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    start = 8 + len(text)
    verified = []
    for name in plan.shard.names:
        tensor = plan.shard.tensor(name)
        file.seek(start + offsets[name])
        if name not in plan.converted:
            for part in tensor.contiguous().view(-1).view(torch.uint8).split(_COPY) if tensor.numel() else ():
                _write_bytes(file, part)
                progress(part.numel())
            continue
        scales, snr_db = _write_quantized(file, tensor, options, device, progress)
        if snr_db < LEAST_SNR_DB:
            raise ValueError(
                f"{plan.shard.path}: tensor {name!r} has {snr_db:.1f} dB of signal to noise in FP8, under "
                f"{LEAST_SNR_DB:.0f}; leave it as it is with --exclude {name!r}"
            )
        file.seek(start + offsets[name + SCALE_SUFFIX])
        _write_bytes(file, scales)
        verified.append(Verified(name, tuple(tensor.shape), snr_db))
    return verified


def _write_quantized(
    file: BinaryIO, weight: Tensor, options: Options, device: torch.device, progress: Callable[[int], object]
) -> tuple[Tensor, float]:
    """Writes the data; returns the scales, and the SNR: inf of zeros, NaN of a weight with NaN or Inf."""
    signal = noise = 0.0
    scales = []
    # Whole blocks of rows at once.
    rows = max(_SLICE // weight.shape[-1] // options.block[0], 1) * options.block[0]
    for matrix in weight.reshape(-1, *weight.shape[-2:]):
        for part in matrix.split(rows):
            exact = part.to(device)
            q = quantize(exact, options.block, dtype=torch.float8_e4m3fn, scale=options.scale)
            _write_bytes(file, q.data)
            scales.append(q.scale.cpu().flatten())
            reference = exact.double()
            signal += reference.square().sum().item()
            noise += (dequantize(q, torch.float32).double() - reference).square().sum().item()
            progress(part.nbytes)
    if noise == 0:
        return torch.cat(scales), math.inf
    ratio = signal / noise if math.isfinite(signal) else math.nan
    return torch.cat(scales), 10 * math.log10(ratio) if ratio else -math.inf


def _write_bytes(file: BinaryIO, tensor: Tensor) -> None:
    """A tensor's bytes without a copy of them; NumPy, which has this too, is no dependency."""
    flat = tensor.view(torch.uint8).cpu().contiguous()
    file.write((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()))


def report(verified: Sequence[Verified], plans: Sequence[_Plan], complete: int, output: Path) -> str:
    """The worst weights first, then what was written in all."""
    from tabulate import tabulate

    lines = []
    worst = sorted(verified, key=lambda weight: -math.inf if math.isnan(weight.snr_db) else weight.snr_db)[:_WORST]
    if worst:
        rows = [(weight.name, "x".join(map(str, weight.shape)), f"{weight.snr_db:.1f}") for weight in worst]
        lines += [tabulate(rows, ("worst weights", "shape", "SNR, dB"), disable_numparse=True), ""]
    broken = sum(math.isnan(weight.snr_db) for weight in verified)
    if broken:
        lines.append(f"{broken} weights have NaN or Inf in the source, and in FP8")
    count = sum(len(plan.converted) for plan in plans)
    left = sum(len(plan.shard.names) for plan in plans) - count
    before = sum(plan.shard.path.stat().st_size for plan in plans)
    after = sum(plan.nbytes for plan in plans)
    lines.append(
        f"{count} weights in FP8, {left} tensors as they were: {before / 2**20:,.1f} MiB to {after / 2**20:,.1f} MiB"
    )
    lines.append(f"{len(plans)} files, {len(plans) - complete} written now, {complete} complete before, in {output}")
    return "\n".join(lines)


def _block(text: str) -> Block:
    if text not in _BLOCKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no block of a weight N,K; choose from {' '.join(_BLOCKS)}")
    return _BLOCKS[text]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8fn convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="a safetensors file, an index, or their folder")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a folder, made if it is not there")
    parser.add_argument("--block", type=_block, default=(128, 128), metavar="N,K", help="by default 128,128")
    parser.add_argument("--scale", choices=("fp32", "pow2"), default="fp32", help="pow2: rounded up to powers of two")
    parser.add_argument(
        "--include", nargs="+", default=[], metavar="GLOB",
        help="the tensors to convert, matrices or batches of them; by default *.weight with N and K of at least "
        f"{LEAST_N}, without embeddings, lm_head, norms, routers and gates",
    )  # fmt: skip
    parser.add_argument("--exclude", nargs="+", default=[], metavar="GLOB", help="tensors to leave as they are")
    parser.add_argument("--overwrite", action="store_true", help="replace what another conversion left in OUTPUT")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), help="that quantizes, by default %(default)s"
    )
    return parser
