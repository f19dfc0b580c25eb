"""`python -m fp8fn convert`: writes a checkpoint's linear layers in FP8, in any format of the table.

INPUT is a safetensors file, an index or a folder. OUTPUT gets files of the same names, the index, and a config.json
with a `quantization_config`. Weights in 16 bits are quantized. FP8 weights of a source in another format keep their
bytes where the block stays. They are quantized again where it changes, or where their scales must become powers of two.
Other tensors are copied.

Each weight is compared with its source as it is written. The command fails and names the weight if its SNR is under
25 dB, or if the source has NaN or Inf. A file gets its name only when it is complete and on the disk. An interrupted
conversion resumes when the same command runs again: files of the same source and options are kept if their checksums
agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from fp8fn.checkpoint.conversion.convert import Conversion, convert
from fp8fn.checkpoint.conversion.options import BLOCKS, Options
from fp8fn.checkpoint.formats import FORMATS
from fp8fn.cli.options import device, parser_of
from fp8fn.ops.layout import Block
from fp8fn.site import LEAST_N
from fp8fn.terminal import fitted

_WORST: Final = 8


def main(argv: Sequence[str]) -> int:
    """Convert, and print the worst weights; return 1 if the conversion failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    for module in ("safetensors", "tabulate", "tqdm"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"needs {module}: pip install {module}")
    try:
        options = Options(args.block, args.scale, tuple(args.include), tuple(args.exclude), args.format)
    except ValueError as error:
        parser.error(f"argument --block: {error}")
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


def report(done: Conversion) -> str:
    """The worst weights, the totals, and why existing files were kept or written again."""
    plans, lines = done.plans, []
    worst = sorted(done.verified, key=lambda weight: weight.snr_db)[:_WORST]
    if worst:
        rows = [(weight.name, "x".join(map(str, weight.shape)), f"{weight.snr_db:.1f}") for weight in worst]
        lines += [fitted(rows, ("worst weights", "shape", "SNR, dB")), ""]
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
    if text not in BLOCKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no block of a weight N,K; choose from {' '.join(BLOCKS)}")
    return BLOCKS[text]


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
