"""`python -m fp8fn convert`: writes a checkpoint's linear layers in FP8, in any format of the table.

INPUT is a safetensors file, an index or a folder. OUTPUT gets files of the same names, the index, and a config.json
with a `quantization_config`. Weights in 16 bits are quantized. FP8 weights of a source in another format keep their
bytes where the block stays, and are quantized again where it changes. Other tensors are copied.

Each weight is compared with its source as it is written. The command fails and names the weight if its SNR is under
25 dB, or if the source has NaN or Inf. A file gets its name only when it is complete and on the disk. An interrupted
conversion resumes when the same command runs again: files of the same source and options are kept if their checksums
agree.
"""

from __future__ import annotations

import argparse
import errno
import glob
import hashlib
import importlib.util
import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import torch
from torch import Tensor

from fp8fn.checkpoint.blocks import SQUARE
from fp8fn.checkpoint.files import Checkpoint, Json, Shard, find, read_json
from fp8fn.checkpoint.format import CheckpointLayout, Format, WeightLayout
from fp8fn.checkpoint.format import Contents as Declarable
from fp8fn.checkpoint.formats import FORMATS, drop_declarations
from fp8fn.checkpoint.load import Contents, Entry, read_contents
from fp8fn.checkpoint.plan import check_names, declaration, new_layout, stored_scale
from fp8fn.checkpoint.write import Written, header, in_order, offsets, write_bytes, written
from fp8fn.cli.options import device, parser_of
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, ScaleFormat
from fp8fn.ops.layout import WHOLE, Block, scale_shape
from fp8fn.quantization import dequantize, quantize
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.site import LEAST_K, LEAST_N, matches, why_sensitive

LEAST_SNR_DB: Final = 25.0
# The blocks of a weight (N, K) for which products exist.
_BLOCKS: Final[Mapping[str, Block]] = {
    "128,128": (128, 128), "1,128": (1, 128), "1,32": (1, 32), "1,-1": (1, -1), "-1,-1": (-1, -1),
}  # fmt: skip
# Files beside a checkpoint's tensors: configs, tokenizers, the model's code.
_BESIDE: Final = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
# Elements that are quantized at once. The float64 comparison takes eight bytes for each.
_SLICE: Final = 2**23
_COPY: Final = 2**26
_WORST: Final = 8
# Keys of a file's metadata: the source and the options as JSON, and the CRC-32 of each tensor, eight digits each.
# CRC-32 detects damage by a disk or a copy, and takes 0.25 s for 1 GB (SHA-256: 0.6 s, BLAKE2b: 1.1 s).
_ORIGIN: Final = "fp8fn.convert"
_SUMS: Final = "fp8fn.convert.crc32"
# A source tensor of at most _WHOLE bytes is hashed whole, a larger one in pieces from its first byte to its last.
_WHOLE: Final = 2**16
_PIECE: Final = 2**12
_PIECES: Final = 8
_UNFINISHED: Final = ".unfinished"
_LOCK: Final = ".fp8fn-convert.lock"
# The system's errors for a full disk and an exceeded quota.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
# Changes when the bytes that are written for the same source and options change.
_VERSION: Final = 4


def main(argv: Sequence[str]) -> int:
    """Convert, and print the worst weights; return 1 if the conversion failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    for module in ("safetensors", "tabulate", "tqdm"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"needs {module}: pip install {module}")
    options = Options(args.block, args.scale, tuple(args.include), tuple(args.exclude), args.format)
    try:
        print(report(convert(args.input, args.output, options, overwrite=args.overwrite, device=args.device)))
    except OSError as error:
        # Without errno, unlike `str(error)`: "[Errno 13] Permission denied: 'PATH'".
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"{parser.prog}: {message}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class Options:
    """The options that decide the bytes that are written.

    Without a `block`, FP8 weights keep theirs, and others get the format's. Without a `scale` it is the format's.
    """

    block: Block | None = None
    scale: Literal["fp32", "pow2", "e8m0"] | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    format: str = "deepseek"

    def __post_init__(self) -> None:
        # (128.0, 128.0) equals (128, 128), but would be written to config.json as floats.
        if self.block is None:
            return
        if self.block not in _BLOCKS.values() or not all(type(size) is int for size in self.block):
            raise ValueError(
                f"block={self.block!r} is no block of a weight (N, K); it must be one of {list(_BLOCKS.values())}"
            )
        forms = FORMATS[self.format].forms
        if self.block not in forms:
            raise ValueError(f"block={self.block!r} is no block of {self.format!r}; it must be one of {list(forms)}")

    def take(self, name: str, tensor: Entry) -> bool:
        """Whether a tensor goes to FP8: the tensors that `include` names, by default weights of linear layers.

        Experts are batches of matrices of any name (`experts.gate_up_proj`), as `quantize_weights` takes them.
        """
        if tensor.dtype not in INPUT_DTYPES or len(tensor.shape) not in (2, 3) or not math.prod(tensor.shape):
            return False
        if matches(name, self.exclude):
            return False
        if self.include:
            return matches(name, self.include)
        large = tensor.shape[-2] >= LEAST_N and tensor.shape[-1] >= LEAST_K
        named = name.endswith(".weight") or (len(tensor.shape) == 3 and not name.endswith("bias"))
        return large and named and why_sensitive(name, *tensor.shape[-2:]) is None


@dataclass(frozen=True)
class Verified:
    """A weight that was written, with its SNR against the source."""

    name: str
    shape: tuple[int, ...]
    snr_db: float


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did: the plans of all files, and the weights of those that it wrote.

    `kept` names the files that were complete before, `again` those that were not, each with the reason.
    """

    output: Path
    plans: Sequence[_Plan]
    verified: Sequence[Verified]
    kept: Sequence[str]
    again: Mapping[str, str]


def convert(
    source: Path, output: Path, options: Options, *, overwrite: bool = False, device: torch.device | str = "cpu"
) -> Conversion:
    """Write the FP8 checkpoint, with a progress bar.

    Raises `ValueError` or `OSError` with the file and the tensor. No file has its final name unless it is complete.
    """
    from tqdm import tqdm

    checkpoint = find(source)
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"{output} is a file; name a folder for the output")
    if output.exists() and output.samefile(checkpoint.folder):
        raise ValueError(f"{output} is the folder of the input; name another for the output")
    plans = _plans(read_contents(source), options)
    if not any(plan.converted for plan in plans):
        raise ValueError(f"{source}: no tensor is a linear layer's weight by these options; see --include")
    texts = _files_beside_tensors(checkpoint, source.is_file() and checkpoint.index is None, plans, options)
    # Files are moved to their places once all are written, so that an older conversion stays whole until then.
    unfinished = output / _UNFINISHED
    with _locked(output):
        found = _differences(plans, (output, unfinished))
        if not overwrite:
            _check_room(output, found, texts)
        unfinished.mkdir(exist_ok=True)
        whole = {path for path, difference in found.items() if difference is None}
        todo = [plan for plan in plans if whole.isdisjoint((output / plan.name, unfinished / plan.name))]
        verified: list[Verified] = []
        size = sum(math.prod(e.shape) * e.dtype.itemsize for plan in todo for e in plan.sources)
        with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, disable=not todo) as bar:
            for plan in todo:
                bar.set_description(plan.name)
                with _complete_file(unfinished / plan.name) as file:
                    verified += _write(file, plan, torch.device(device), bar.update)
        made = [unfinished / plan.name for plan in plans if plan in todo or unfinished / plan.name in whole]
        if made and checkpoint.index is not None:
            (output / checkpoint.index.name).unlink(missing_ok=True)  # an index never names files of two conversions
        for path in made:
            path.replace(output / path.name)
        for name, text in texts.items():
            if not (output / name).exists() or (output / name).read_bytes() != text:
                with _complete_file(output / name) as file:
                    file.write(text)
        shutil.rmtree(unfinished)
    # If two files have the same name, the one in `.unfinished` is newer.
    reasons = {path.name: difference.reason for path, difference in found.items() if difference is not None}
    kept = [plan.name for plan in plans if plan not in todo]
    again = {plan.name: reasons[plan.name] for plan in todo if plan.name in reasons}
    return Conversion(output=output, plans=plans, verified=verified, kept=kept, again=again)


@dataclass(frozen=True)
class _Weight:
    """A weight to write: its source, how it is quantized, and how the output stores it."""

    entry: Entry
    layout: WeightLayout
    format: Format
    name: str
    scale: ScaleFormat
    input_scale: Tensor | None

    @property
    def kept(self) -> bool:
        """Whether the source's bytes are those of the output."""
        old = self.entry.layout
        return old is not None and old.block == self.layout.block and self.entry.dtype == torch.float8_e4m3fn

    def written(self) -> list[Written]:
        shape, stored = list(self.entry.shape), self.layout
        scales = torch.empty(stored.scale_shape, dtype=stored.scale_dtype, device="meta")
        found = [Written(self.format.data.of(self.name), "F8_E4M3", shape, math.prod(shape), 1)]
        found.append(written(self.format.scale.of(self.name), scales))
        if self.input_scale is not None:
            found.append(written(self.format.input_scale.of(self.name), self.input_scale))
        return found


@dataclass(frozen=True)
class _Plan:
    """An output file: its source, its tensors in the order of their bytes, and the names of the converted tensors."""

    shard: Shard
    entries: tuple[Written, ...]
    weights: Mapping[str, _Weight]
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
        return header(self.entries, {**metadata, _ORIGIN: json.dumps(self.origin), _SUMS: sums})

    def difference(self, path: Path, progress: Callable[[int], object]) -> _Difference | None:
        """How a file differs from the one that this plan writes, or None if all bytes agree."""
        try:
            with path.open("rb") as file:
                return self._difference(file, progress)
        except OSError as error:
            return _Difference(f"it cannot be read: {error.strerror}")

    def _difference(self, file: BufferedReader, progress: Callable[[int], object]) -> _Difference | None:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        begin = 8 + int.from_bytes(prefix, "little")
        text = file.read(begin - 8) if begin <= size else b""
        try:
            metadata = json.loads(text).get("__metadata__", {})
            origin, sums = metadata.get(_ORIGIN), metadata.get(_SUMS)
        except (ValueError, AttributeError, RecursionError):
            return _Difference("its header cannot be read")
        if origin is None:
            return _Difference("another program wrote it")
        if origin != json.dumps(self.origin):
            return _Difference(_changed_origin(origin, self.origin))
        if not isinstance(sums, str) or prefix + text != self.header(sums):
            return _Difference("its header is damaged", damaged=True)
        if size != begin + self.nbytes:
            return _Difference(f"it is damaged: it has {size} bytes of {begin + self.nbytes}", damaged=True)
        for position, entry in enumerate(self.entries):
            if f"{_read_crc(file, entry.nbytes, progress):08x}" != sums[8 * position : 8 * position + 8]:
                return _Difference(f"it is damaged: tensor {entry.name!r} is not as it was written", damaged=True)
        return None

    @property
    def metadata(self) -> Mapping[str, str]:
        """The source's metadata without what its format declares there, and the output's."""
        own: Mapping[str, str] = self.declared.get("metadata", {})
        kept = self.shard.metadata if all(weight.entry.layout is None for weight in self.weights.values()) else {}
        return {**kept, **own}

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class _Difference:
    """Why a file is not the one that a plan writes. `damaged`: its header names the plan's origin, its bytes differ."""

    reason: str
    damaged: bool = False


def _changed_origin(text: object, origin: Mapping[str, Any]) -> str:
    """The difference between the origin in a file and the expected one, in words."""
    try:
        stored = json.loads(str(text))
        if stored["version"] != origin["version"]:
            return "another version of fp8fn wrote it"
        options, source = dict(stored["options"]), dict(stored["source"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "another version of fp8fn wrote it"
    for name, value in origin["options"].items():
        if options.get(name) != value:
            return f"it was made with other options: {name} was {json.dumps(options.get(name))}, is {json.dumps(value)}"
    for name, reason in (
        ("header", "its source has other tensors, types, shapes or metadata"),
        ("data", "its source has other values"),
        ("mtime", "its source was modified since"),
    ):
        if source.get(name) != origin["source"][name]:
            return reason
    return "its source is another file"


def _read_crc(file: BufferedReader, size: int, progress: Callable[[int], object]) -> int:
    """The CRC-32 of the next `size` bytes of a file."""
    buffer = memoryview(bytearray(min(size, 2**20)))
    crc = 0
    while size and (count := file.readinto(buffer[: min(size, len(buffer))])):
        crc = zlib.crc32(buffer[:count], crc)
        size -= count
        progress(count)
    return crc


def _differences(plans: Sequence[_Plan], folders: Sequence[Path]) -> dict[Path, _Difference | None]:
    """The existing files with the plans' names, and how each differs from what its plan writes."""
    from tqdm import tqdm

    there = {folder / plan.name: plan for folder in folders for plan in plans if os.path.lexists(folder / plan.name)}
    size = sum(path.stat().st_size for path in there if path.is_file())
    with tqdm(total=size, desc="checking", unit="B", unit_scale=True, unit_divisor=1024, disable=not there) as bar:
        return {path: plan.difference(path, bar.update) for path, plan in there.items()}


def _identity(path: Path) -> dict[str, object]:
    """The identity of a source file: its name, its time, and hashes of its header and of pieces of every tensor.

    Two files of equal header and time whose tensors agree in these pieces are taken for the same.
    """
    with path.open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        begin = file.tell()
        data = hashlib.sha256()
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        for first, last in sorted(tuple(entry["data_offsets"]) for entry in tensors.values()):
            for start, stop in _pieces(last - first):
                file.seek(begin + first + start)
                data.update(file.read(stop - start))
        stat = os.fstat(file.fileno())
    header = hashlib.sha256(text).hexdigest()
    return {"name": path.name, "mtime": stat.st_mtime_ns, "header": header, "data": data.hexdigest()}


def _pieces(size: int) -> list[tuple[int, int]]:
    """The parts of `size` bytes that are hashed: both ends, and pieces at equal distances between them."""
    if size <= _WHOLE:
        return [(0, size)]
    starts = [index * (size - _PIECE) // (_PIECES - 1) for index in range(_PIECES)]
    return [(start, start + _PIECE) for start in starts]


def _plans(contents: Contents, options: Options) -> list[_Plan]:
    """The output files, with what all of them declare."""
    format = FORMATS[options.format]
    weights: dict[str, _Weight] = {}
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
    plans = []
    for shard in dict.fromkeys(entry.shard for entry in contents.entries.values()):
        mine = {name: weight for name, weight in weights.items() if weight.entry.shard is shard}
        copied = {name: entry for name, entry in others.items() if entry.shard is shard}
        entries = [part for weight in mine.values() for part in weight.written()]
        for name, entry in copied.items():
            dtype, shape = shard.header(entry.tensor)
            size = entry.dtype.itemsize
            entries.append(Written(name, dtype, shape, math.prod(shape) * size, size))
        origin = {"version": _VERSION, "options": asdict(options), "source": _identity(shard.path)}
        # Through JSON, so that it equals the origin that is read back, whose tuples are lists.
        made = json.loads(json.dumps(origin))
        plans.append(_Plan(shard, tuple(in_order(entries)), mine, copied, declared, made))
    return plans


def _weight(name: str, entry: Entry, source: CheckpointLayout, options: Options) -> _Weight:
    format = FORMATS[options.format]
    own = None if entry.layout is None else entry.layout.block
    block = options.block or own or (SQUARE if SQUARE in format.forms else next(iter(format.forms)))
    scale = source.input_scales.get(name)
    kept = entry.layout is not None and own == block
    powers = options.scale == "e8m0" or (kept and entry.layout is not None and entry.layout.scale_dtype.itemsize == 1)
    try:
        layout = new_layout(format, name, entry.shape, block, static=scale is not None, powers=powers)
    except ValueError as error:
        raise ValueError(f"{entry.shard.path}: {error}") from None
    usual: ScaleFormat = "fp32" if layout.scale_dtype == torch.float32 else "e8m0"
    return _Weight(entry, layout, format, name, options.scale or usual, scale)


def _files_beside_tensors(
    checkpoint: Checkpoint, alone: bool, plans: Sequence[_Plan], options: Options
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


def _check_room(output: Path, found: Mapping[Path, _Difference | None], texts: Mapping[str, bytes]) -> None:
    """Raise ValueError if the output holds a file that is not this conversion's: it would be replaced or mixed in."""
    for folder in (output, output / _UNFINISHED):
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if path.suffix == ".safetensors":
                difference = found[path] if path in found else _Difference("the input has no file of that name")
                # Only convert writes to the folder of unfinished files, so that a damaged file there is written again.
                if difference is not None and difference.damaged and folder != output:
                    difference = None
            elif path.name not in texts or (path.is_file() and path.read_bytes() == texts[path.name]):
                difference = None
            else:
                difference = _Difference("its content is another")
            if difference is not None:
                raise ValueError(
                    f"{path} is there and not of this conversion: {difference.reason}; name another folder, or give "
                    "--overwrite"
                )


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Make the folder and lock it against other conversions; afterwards remove the folders made here that are empty."""
    from filelock import FileLock, Timeout, UnixFileLock

    made = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    path = output / _LOCK
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"another convert is writing to {output}; wait until it has ended, or name another folder"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            (output / _UNFINISHED).rmdir()
        # POSIX removes the file while the lock is held: later it could be the next holder's. Windows can't remove an
        # open file.
        early = isinstance(lock, UnixFileLock)
        with suppress(OSError):
            if early:
                path.unlink()
        lock.release()
        with suppress(OSError):
            if not early:
                path.unlink(missing_ok=True)
            if made:
                output.rmdir()


@contextmanager
def _complete_file(target: Path) -> Iterator[BinaryIO]:
    """A file that gets the name `target` once it is whole and on the disk. If writing fails, no file has the name."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):  # left by a run that was killed
        left.unlink(missing_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            free = shutil.disk_usage(target.parent).free
            raise OSError(
                error.errno,
                f"{error.strerror} ({free / 2**20:,.0f} MiB are free there); make room and run the same command again "
                "to resume",
                str(target),
            ) from error
        raise


def _write(file: BinaryIO, plan: _Plan, device: torch.device, progress: Callable[[int], object]) -> list[Verified]:
    """Write the file, with one slice of a tensor in memory at a time."""
    starts, sums = offsets(plan.entries), {}
    start = len(plan.header("0" * 8 * len(plan.entries)))
    verified = []
    for name, entry in plan.others.items():
        tensor = entry.shard.tensor(entry.tensor)
        file.seek(start + starts[name])
        crc = 0
        for part in tensor.contiguous().view(-1).view(torch.uint8).split(_COPY) if tensor.numel() else ():
            crc = write_bytes(file, part, crc)
            progress(part.numel())
        sums[name] = crc
    for name, weight in plan.weights.items():
        data, scales = weight.format.data.of(name), weight.format.scale.of(name)
        file.seek(start + starts[data])
        done = _write_quantized(file, weight, device, progress)
        if not done.snr_db >= LEAST_SNR_DB:
            reason = (
                "has NaN or Inf, for whose blocks there is no scale"
                if math.isnan(done.snr_db)
                else f"has {done.snr_db:.1f} dB of signal to noise in FP8, under {LEAST_SNR_DB:.0f}"
            )
            raise ValueError(f"{plan.shard.path}: tensor {name!r} {reason}; leave it as it is with --exclude {name!r}")
        sums[data] = done.crc
        file.seek(start + starts[scales])
        sums[scales] = write_bytes(file, done.scales, 0)
        if weight.input_scale is not None:
            inputs = weight.format.input_scale.of(name)
            file.seek(start + starts[inputs])
            sums[inputs] = write_bytes(file, weight.input_scale, 0)
        verified.append(Verified(name, weight.entry.shape, done.snr_db))
    # The header comes last, because it holds the checksums.
    file.seek(0)
    file.write(plan.header("".join(f"{sums[entry.name]:08x}" for entry in plan.entries)))
    return verified


@dataclass(frozen=True)
class _Written:
    """The CRC-32 of a weight's data, its scales, which are not written yet, and its SNR (inf of zeros, NaN of NaN)."""

    crc: int
    scales: Tensor
    snr_db: float


def _write_quantized(
    file: BinaryIO, weight: _Weight, device: torch.device, progress: Callable[[int], object]
) -> _Written:
    """Write the FP8 data of a weight, and compare it with the source."""
    source, layout = weight.entry.load(), weight.layout
    if weight.kept:
        assert isinstance(source, ScaledTensor)
        crc = 0
        for piece in source.data.contiguous().view(-1).view(torch.uint8).split(_COPY):
            crc = write_bytes(file, piece, crc)
            progress(piece.numel())
        return _Written(crc, stored_scale(source.scale, layout, weight.name), math.inf)
    tensor = dequantize(source, torch.float32) if isinstance(source, ScaledTensor) else source
    signal, noise, crc = 0.0, 0.0, 0
    scales = []
    # Slices of whole blocks of rows.
    block = layout.block
    step = tensor.shape[-2] if block[0] == WHOLE else block[0]
    rows = max(_SLICE // tensor.shape[-1] // step, 1) * step
    for matrix in tensor.reshape(-1, *tensor.shape[-2:]):
        for part in matrix.split(rows):
            exact = part.to(device)
            q = quantize(exact, block, dtype=torch.float8_e4m3fn, scale=weight.scale)
            crc = write_bytes(file, q.data, crc)
            scales.append(q.scale.float().cpu().flatten())
            reference = exact.double()
            signal += reference.square().sum().item()
            noise += (dequantize(q, torch.float32).double() - reference).square().sum().item()
            progress(part.numel() * weight.entry.dtype.itemsize)
    stored = stored_scale(torch.cat(scales).reshape(scale_shape(tensor.shape, block)), layout, weight.name)
    if noise == 0:
        return _Written(crc, stored, math.inf)
    ratio = signal / noise if math.isfinite(signal) else math.nan
    return _Written(crc, stored, 10 * math.log10(ratio) if ratio else -math.inf)


def report(done: Conversion) -> str:
    """The worst weights, the totals, and why existing files were kept or written again."""
    from tabulate import tabulate

    plans, lines = done.plans, []
    worst = sorted(done.verified, key=lambda weight: weight.snr_db)[:_WORST]
    if worst:
        rows = [(weight.name, "x".join(map(str, weight.shape)), f"{weight.snr_db:.1f}") for weight in worst]
        lines += [tabulate(rows, ("worst weights", "shape", "SNR, dB"), disable_numparse=True), ""]
    count = sum(len(plan.converted) for plan in plans)
    left = sum(len(plan.others) for plan in plans)
    before = sum(plan.shard.path.stat().st_size for plan in plans)
    after = sum(plan.nbytes for plan in plans)
    lines.append(
        f"{count} weights in FP8, {left} tensors as they were: {before / 2**20:,.1f} MiB to {after / 2**20:,.1f} MiB"
    )
    written = len(plans) - len(done.kept)
    lines.append(f"{len(plans)} files, {written} written now, {len(done.kept)} complete before, in {done.output}")
    if done.kept:
        lines.append(f"kept, of this source and these options, and with the right checksums: {', '.join(done.kept)}")
    lines += [f"written again: {name}: {reason}" for name, reason in done.again.items()]
    return "\n".join(lines)


def _block(text: str) -> Block:
    if text not in _BLOCKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no block of a weight N,K; choose from {' '.join(_BLOCKS)}")
    return _BLOCKS[text]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "convert",
        __doc__,
        "Llama-3.1-8B Llama-3.1-8B-FP8",
        "Llama-3.1-8B Llama-3.1-8B-FP8 --format compressed-tensors",
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="a safetensors file, an index, or their folder")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a folder, made if it does not exist")
    parser.add_argument(
        "--format", choices=list(FORMATS), default="deepseek", metavar="FORMAT",
        help=f"format of the output: {', '.join(FORMATS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--block",
        type=_block,
        metavar="N,K",
        help="block of a scale; -1 is a whole axis: --block=1,-1 (default: an FP8 source's own, else 128,128 where the "
        "format has it)",
    )
    parser.add_argument(
        "--scale",
        choices=("fp32", "pow2", "e8m0"),
        help="pow2: scales are rounded up to powers of two; e8m0: the scales of MX (default: the format's)",
    )
    parser.add_argument(
        "--include",
        nargs="+",
        default=[],
        metavar="GLOB",
        help="the tensors to convert, matrices or batches of matrices (default: *.weight and batches of any name, with "
        f"N and K of at least {LEAST_N}, without embeddings, lm_head, norms, routers and gates)",
    )
    parser.add_argument("--exclude", nargs="+", default=[], metavar="GLOB", help="tensors to leave as they are")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of another conversion in OUTPUT")
    parser.add_argument(
        "--device", type=device, default=torch.device("cpu"), help="device that quantizes (default: %(default)s)"
    )
    return parser
