"""Training steps of unmodified models of transformers, compiled, in bf16 and in FP8: `python -m fp8fn bench train`.

The models are transformers' LlamaForCausalLM and MixtralForCausalLM with random weights in bf16. Each variant compiles
one model in its own process, so that peak memory is the variant's. The processes stay alive and take turns: a round
times every variant once, and a ratio is the median over rounds of two variants' times in the same round. Processes that
don't fit in the GPU's memory together take turns in groups, each of which has bf16.

Figures are printed and written as they come. With --json, the same command resumes an interrupted run: variants that
the file has for this machine, commit and setting are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from fp8fn.bench.train import attention, kept, kinds, table
from fp8fn.bench.train.models import SIZES, Size, as_json
from fp8fn.bench.train.runs import Runs, check_file, key_of, milliseconds, revision, round_rows, speedup
from fp8fn.bench.train.variants import BF16, DEFAULTS, UnavailableError, Variant, listed, parse
from fp8fn.bench.train.worker import Setting, Worker, WorkerError, attention_times
from fp8fn.cli import options
from fp8fn.cli.environment import device_name

_NEEDED: Final = ("tabulate", "transformers")
_IMPLEMENTATIONS: Final = {
    "causal": "is_causal, without a mask",
    "transformers": "transformers' sdpa",
    "ones": "transformers' sdpa, called with an attention_mask of ones",
    "varied": "transformers' sdpa, called with an attention_mask of ones, in a graph whose length is a variable",
}
# A process takes this memory on a GPU besides tensors, for CUDA's context and its kernels.
_CONTEXT_BYTES: Final = 900 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each figure as it comes, then the table; return 1 where a variant failed."""
    args = _parsed(argv)
    began = time.perf_counter()
    size = _size(args)
    device: torch.device = args.device
    kernel, found = _attention(args, size)
    attending = {"implementation": _IMPLEMENTATIONS[args.attention], "kernel": kernel}
    setting = Setting(
        size=size, batch=args.tokens[0], sequence=args.tokens[1],
        attention=attention.CAUSAL if args.attention == "causal" else attention.MASKED,
        kernel=kernel, steps=args.steps, device=str(device),
        ones=args.attention in ("ones", "varied"), varied=args.attention == "varied",
    )  # fmt: skip
    shared = {
        "model": args.model, "size": as_json(size), "batch": setting.batch, "sequence": setting.sequence,
        "steps": setting.steps, "attention": attending,
    }  # fmt: skip
    runs = Runs(args.json, key_of(device_name(device), args.commit or revision(), shared))
    runs.run["attention_ms"] = found
    attention.share_compilations("train", device, kernel)
    print(f"{table.title(runs.run)}; {runs.run['device']}; {runs.run['commit']}", flush=True)

    finished = set() if args.again else runs.finished()
    wanted = [variant for variant in args.variants if variant.name not in finished]
    for variant in args.variants:
        if variant.name in finished:
            print(f"{variant.name}: in {args.json} already", flush=True)
    if wanted and BF16 not in [variant.name for variant in wanted]:
        wanted.insert(0, parse(BF16))
    session = Session(setting, runs, args.rounds, args.repeats, args.profile, args.kept)
    deadline = began + args.minutes * 60 if args.minutes else None
    session.measure(wanted, deadline)
    print(f"\n{table.of_run(runs.run)}", flush=True)
    return int(any("failed" in row for row in runs.rows))


class Session:
    """The processes that are alive together, and their turns."""

    def __init__(
        self, setting: Setting, runs: Runs, rounds: int, repeats: int, profile: bool, show_kept: bool = False
    ) -> None:
        self.setting, self.runs = setting, runs
        self.rounds, self.repeats, self.profile, self.show_kept = rounds, repeats, profile, show_kept
        self.alive: dict[str, Worker] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.shuffle = random.Random(0).shuffle
        self.began = time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line at once, with the seconds since the session began."""
        print(f"[{time.perf_counter() - self.began:4.0f} s] {text}", flush=True)

    def measure(self, wanted: Sequence[Variant], deadline: float | None) -> None:
        """Prepare the variants in groups that fit in memory, and time each group in turns."""
        waiting = list(wanted)
        coming: Worker | None = None
        try:
            while waiting:
                variant = waiting.pop(0)
                worker = coming or Worker(self.setting, variant)
                coming = None
                if deadline is not None and time.perf_counter() > deadline:
                    self.say(f"{variant.name}: not begun, as the time of --minutes is over")
                    worker.close()
                    continue
                # The next process imports its modules while this one compiles.
                coming = Worker(self.setting, waiting[0]) if waiting else None
                self._prepare(variant, worker)
                if waiting and not self._fits_another():
                    self._turns(deadline)
                    self._close(name for name in list(self.alive) if name != BF16)
            self._turns(deadline)
        finally:
            if coming is not None:
                coming.close()
            self._close(list(self.alive))

    def _prepare(self, variant: Variant, worker: Worker) -> None:
        name = variant.name
        try:
            row: dict[str, Any] = {"variant": name, **worker.call("prepare")}
            self.alive[name] = worker
            self.say(f"{name}: {_prepared(row, self.rows.get(BF16))}")
            if self.show_kept:
                tokens = self.setting.batch * self.setting.sequence
                print("\n".join(kept.lines(row["kept"], tokens, self.setting.size.layers)), flush=True)
            if self.profile:
                row["profile"] = worker.call("profile")
                print("\n".join(kinds.lines(row["profile"])), flush=True)
            row |= worker.call("idle")
        except (UnavailableError, WorkerError) as error:
            key = "unavailable" if isinstance(error, UnavailableError) else "failed"
            row = {"variant": name, key: str(error)}
            self.say(f"{name}: {key}: {error}")
            self.alive.pop(name, None)
            worker.close()
        self.rows[name] = row
        self.runs.put(row)

    def _fits_another(self) -> bool:
        """Whether the memory holds one process more, at rest, beside the one that has its turn."""
        found = [self.rows[name] for name in self.alive]
        peaks = [row["step_peak_bytes"] for row in found if row.get("step_peak_bytes")]
        if not peaks:
            return True
        total = torch.cuda.get_device_properties(torch.device(self.setting.device)).total_memory
        held = sum(row["reserved_bytes"] + _CONTEXT_BYTES for row in found)
        # 1.3: the allocator reserves more than the tensors take; the new process may be the first one with its peak.
        return bool(held + _CONTEXT_BYTES + 1.3 * max(peaks) < total)

    def _turns(self, deadline: float | None) -> None:
        """Time the variants that are alive in turns, and write the rows after each round."""
        for number in range(self.rounds):
            if deadline is not None and number and time.perf_counter() > deadline:
                self.say(f"{number} of {self.rounds} rounds: the time of --minutes is over")
                return
            order = list(self.alive)
            self.shuffle(order)
            times = {}
            for name in order:
                try:
                    times[name] = self.alive[name].call("turn", self.repeats)
                    self.alive[name].call("idle")
                except WorkerError as error:
                    self.say(f"{name}: failed: {error}")
                    self.rows[name]["failed"] = str(error)
                    self.alive.pop(name).close()
            for name, found in round_rows(times).items():
                # The first round of a second group is the first of new figures for bf16, too.
                former = self.rows[name].get("rounds", []) if number or name == BF16 else []
                self.rows[name]["rounds"] = [*former, found]
                self.runs.put(self.rows[name])
            self.say(f"round {number + 1}: {', '.join(_timed(self.rows[name]) for name in times)}")

    def _close(self, names: Iterable[str]) -> None:
        for name in names:
            self.alive.pop(name).close()


def _prepared(row: Mapping[str, Any], bf16: Mapping[str, Any] | None) -> str:
    peak, saved = row["peak_bytes"], row["kept_bytes_per_token_and_layer"]
    memory = f"peak {peak / 1e9:.2f} GB (step {row['step_peak_bytes'] / 1e9:.2f}), " if peak else ""
    compared = ""
    if bf16 is not None and "losses" in bf16:
        compared = f" ({saved / bf16['kept_bytes_per_token_and_layer']:.3f}x)"
        compared += f", peak {peak / bf16['peak_bytes']:.3f}x bf16's" if peak else ""
    return (
        f"first step {row['first_step_s']:.1f} s{' (cached)' if row['cached_graphs'] else ''}, {memory}"
        f"kept {saved / 1024:.2f} KB a token and layer{compared}, loss {row['losses'][0]:.4f} → {row['losses'][-1]:.4f}"
        f" in {len(row['losses'])} steps, {row['graphs']} graphs"
    )


def _timed(row: Mapping[str, Any]) -> str:
    ratio = speedup(row, "forward_backward_ms")
    times = (milliseconds(row, figure) or 0.0 for figure in ("forward_backward_ms", "step_ms"))
    return f"{row['variant']} {' / '.join(f'{each:.2f}' for each in times)} ms" + (f" {ratio:.3f}x" if ratio else "")


def _attention(args: argparse.Namespace, size: Size) -> tuple[str, Mapping[str, float | str]]:
    """The attention's kernel, and the times by which it was chosen."""
    if args.kernel or args.device.type == "cpu" or args.attention != "causal":
        return args.kernel or attention.DEFAULT, {}
    found = attention_times(size, args.tokens[0], args.tokens[1], str(args.device))
    kernel = attention.fastest(found)
    times = ", ".join(
        f"{name} {each:.3f} ms" if isinstance(each, float) else f"{name}: {each}" for name, each in found.items()
    )
    print(f"causal attention, forward and backward of a layer: {times}; all variants use {kernel}", flush=True)
    return kernel, found


def _size(args: argparse.Namespace) -> Size:
    changes = {name: value for name in ("layers", "vocabulary") if (value := getattr(args, name))}
    return dataclasses.replace(SIZES[args.model], **changes)


def tokens_shape(text: str) -> tuple[int, int]:
    """`"4x4096"` → `(4, 4096)`."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not sequences x length, such as 4x4096")
    return int(parts[0]), int(parts[1])


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser_of(
        "bench train",
        __doc__,
        "--model 8b --tokens 4x4096",
        "--variants 'bf16 torchao:tensorwise fp8fn:BLOCKWISE_SQUARE' --rounds 4 --json train.json",
        "--model tiny --device cpu",
        epilog="Exit status 1 where a variant failed; a peer that is not installed is skipped, with the reason.",
    )
    parser.add_argument("--model", choices=SIZES, help="widths of the model (default: 8b, on a CPU tiny)")
    parser.add_argument("--layers", type=options.positive, metavar="L", help="number of layers (default: the model's)")
    parser.add_argument(
        "--vocabulary", type=options.positive, metavar="V", help="size of the vocabulary (default: the model's)"
    )
    parser.add_argument(
        "--tokens",
        type=tokens_shape,
        metavar="BxT",
        help="sequences x length (default: 4x4096; moe: 4x2048; CPU: 2x128)",
    )
    parser.add_argument(
        "--variants", type=listed, default=[parse(name) for name in DEFAULTS], metavar="NAMES",
        help="names with spaces between: bf16, torchao:RECIPE, transformer_engine, fp8fn:PRESET,option=value "
        f"(default: {' '.join(DEFAULTS)})",
    )  # fmt: skip
    parser.add_argument(
        "--attention", choices=_IMPLEMENTATIONS, default="causal", metavar="KIND",
        help="causal: is_causal and no mask; transformers: unchanged, a mask when compiled; ones: likewise, called "
        "with an attention_mask of ones, as tokenizers return it; varied: likewise, after shorter sequences, so that "
        "the length is a variable of the graph (default: causal)",
    )  # fmt: skip
    parser.add_argument("--kernel", choices=attention.KERNELS, help="attention's kernel (default: the fastest here)")
    parser.add_argument("--steps", type=options.positive, default=20, metavar="N", help="training steps (default: 20)")
    parser.add_argument("--rounds", type=options.positive, default=5, metavar="R", help="turns of each (default: 5)")
    parser.add_argument(
        "--repeats", type=options.positive, default=5, metavar="N", help="timed steps in a turn (default: 5)"
    )
    parser.add_argument(
        "--minutes", type=options.positive, metavar="M", help="begin nothing new after M minutes (default: no limit)"
    )
    parser.add_argument(
        "--commit", metavar="NAME", help="the code's name in the file (default: git's, or a digest of the sources)"
    )
    parser.add_argument("--profile", action="store_true", help="show kernels by kind")
    parser.add_argument("--kept", action="store_true", help="show the tensors kept between forward and backward")
    parser.add_argument("--again", action="store_true", help="measure variants again that the file already has")
    options.add_device(parser)
    options.add_json(parser, "add the figures to FILE, and go on from those in it")
    args = parser.parse_args(argv)
    check_file(parser, args.json, "train")
    options.check_machine(parser, args.device, _NEEDED)
    cuda = args.device.type == "cuda"
    args.model = args.model or ("8b" if cuda else "tiny")
    args.tokens = args.tokens or ((4, 2048 if args.model == "moe" else 4096) if cuda else (2, 128))
    return args
