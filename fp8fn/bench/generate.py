"""Tokens a second of a decoder under `torch.compile(mode="reduce-overhead")`: `python -m fp8fn bench generate`.

Random weights of Llama-3.1-8B's shape, with fewer layers, held in three formats: bf16, A16W8 (FP8 in blocks of 128 x
128 by rows in bf16) and MX (MX-FP8 by rows that are quantized to it); "constant" where `gemm` is told that nothing
writes the weights. All linear layers but the head are in FP8. A loop feeds a prompt and then its own likeliest tokens,
from the same compiled step each time, on a GPU one CUDA graph; the ways take turns, and a figure is the median over the
loops. SNR is that of the logits against eager bf16's, behind the tokens that bf16 made. "as eager" are the tokens of
the compiled loop that eager PyTorch finds the likeliest too, behind the same ones: rounding decides between near ones,
and the gap says how far behind eager's best the logit of any of them is, in standard deviations of the logits. It may
be four times the noise that the SNR says two logits differ by.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.bench import record, tables
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.llama import A16W8, MX, SIZES, ConstantA16W8, ConstantMX, Generator, Hold, Plain, Size
from fp8fn.cli import options
from fp8fn.cli.environment import device_name
from fp8fn.timing import Clock, clock_of

WAYS: Final[Mapping[str, Hold]] = {
    "bf16": Plain, "A16W8": A16W8, "A16W8, constant": ConstantA16W8, "MX": MX, "MX, constant": ConstantMX,
}  # fmt: skip
BATCHES: Final = (1, 4, 16)
PROMPT: Final = 16
# Of logits behind all layers, where a product's noise adds up: less than of one product.
SNR_BAR_DB: Final = 15.0
# Of the noise that a difference of two logits has.
GAP_BAR: Final = 4.0
# Tokens of a sequence whose logits are compared.
_COMPARED: Final = 64

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Row:
    """What was measured of one way of holding the weights, as it stands in JSON; a step makes a token in each sequence.

    `ms` is a step's median over the loops, beside quartiles; `weight_bytes` what a step reads of weights and scales.
    Over all loops `compiled` graphs were made, of which `skipped` were not captured in a CUDA graph (0 on a CPU), and
    `copied` tensors does a CUDA graph copy to a place of its own at each step.
    """

    batch: int
    way: str
    ms: float
    ms_q1: float
    ms_q3: float
    tokens_s: float
    weight_bytes: int
    snr_db: float
    as_eager: float
    gap: float
    compiled: int
    skipped: int
    copied: int

    @property
    def wrong(self) -> bool:
        """Whether a bar is missed, the step was compiled more than once, or runs in no CUDA graph on a GPU."""
        near = self.gap <= gap_bar(self.snr_db)
        return not (self.snr_db >= SNR_BAR_DB and near and self.compiled == 1 and not self.skipped)


def gap_bar(snr_db: float) -> float:
    """How far behind the likeliest token the one that noise of an SNR chose may be, in deviations of the logits."""
    return GAP_BAR * math.sqrt(2) * 10 ** (-snr_db / 20)


class Loop:
    """A generator, and its step compiled."""

    def __init__(self, way: str, size: Size, batch: int, context: int, device: torch.device) -> None:
        self.generator = Generator(size, WAYS[way], batch, context, device)
        self.step: Step = torch.compile(self.generator, fullgraph=True, dynamic=False, mode="reduce-overhead")
        self.counts: Counter[str] = Counter()

    def generate(self, prompt: Tensor, steps: int) -> Tensor:
        """The tokens `(B, steps + 1)` of a loop from `prompt (B, P)`, which the first steps take."""
        self.generator.start(prompt)
        before = counts()
        for _ in range(steps):
            self.step()
        self.counts += counts() - before
        return self.generator.tokens[:, : steps + 1]

    def logits(self, tokens: Tensor, steps: int, step: Step | None = None) -> Tensor:
        """Those `(steps, B, vocabulary)` behind each of the first given tokens, by the compiled step or another."""
        step = step or self.step
        self.generator.start(tokens)
        return torch.stack([step().clone() for _ in range(steps)])


def counts() -> Counter[str]:
    """What torch.compile counts: graphs it made, those in no CUDA graph, and tensors that CUDA graphs copy."""
    stats, inductor = (torch._dynamo.utils.counters[name] for name in ("stats", "inductor"))
    return Counter(
        compiled=stats["unique_graphs"],
        skipped=inductor["cudagraph_skips"],
        copied=inductor["cudagraph_recorded_non_static_inputs"],
    )


def prompts(size: Size, batch: int, device: torch.device) -> Tensor:
    """Random tokens `(B, PROMPT)`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocabulary, (batch, PROMPT), generator=generator).to(device)


def agreement(eager: Tensor, tokens: Tensor) -> tuple[float, float]:
    """The share of `tokens (steps, B)` that are the likeliest by eager's logits, and the largest gap of the others."""
    logits = eager.float()
    behind = logits.amax(-1) - logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (behind == 0).double().mean().item(), (behind.max() / logits.std()).item()


@torch.no_grad()
def measure(size: Size, batch: int, steps: int, rounds: int, clock: Clock) -> list[Row]:
    """A row for each way, of loops of `steps` steps in each of `batch` sequences."""
    torch.compiler.reset()
    loops = {way: Loop(way, size, batch, steps + 1, clock.device) for way in WAYS}
    prompt = prompts(size, batch, clock.device)
    clock.synchronize()  # weights are written before a product of them begins
    for loop in loops.values():
        loop.generate(prompt, 4)  # compiles, and records a CUDA graph
    seconds = _turns(loops, prompt, steps, rounds, clock)

    compared = min(steps, _COMPARED)
    plain = loops["bf16"]
    given = plain.generate(prompt, steps).clone()
    bf16 = plain.logits(given, compared, plain.generator).flatten(0, 1)
    rows = []
    for way, loop in loops.items():
        tokens = loop.generate(prompt, steps).clone()
        eager = loop.logits(tokens, compared, loop.generator)[PROMPT - 1 :]
        same, gap = agreement(eager, tokens.T[PROMPT : compared + 1])
        found = snr_db(bf16, loop.logits(given, compared).flatten(0, 1))
        first, middle, third = statistics.quantiles(seconds[way], n=4, method="inclusive")
        rows.append(
            Row(
                batch=batch,
                way=way,
                ms=1e3 * middle / steps,
                ms_q1=1e3 * first / steps,
                ms_q3=1e3 * third / steps,
                tokens_s=batch * steps / middle,
                weight_bytes=loop.generator.weight_bytes(),
                snr_db=found,
                as_eager=same,
                gap=gap,
                compiled=loop.counts["compiled"],
                skipped=loop.counts["skipped"] if clock.device.type == "cuda" else 0,
                copied=loop.counts["copied"],
            )
        )
    return rows


def _turns(loops: Mapping[str, Loop], prompt: Tensor, steps: int, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each loop in each round, by the clock: the host waits for the device when all steps are enqueued."""
    seconds: dict[str, list[float]] = {way: [] for way in loops}
    order = list(loops)
    shuffle = random.Random(0).shuffle
    clock.warm(1.0)
    for _ in range(rounds):
        shuffle(order)
        for way in order:
            clock.synchronize()
            start = time.perf_counter()
            loops[way].generate(prompt, steps)
            clock.synchronize()
            seconds[way].append(time.perf_counter() - start)
    return seconds


def table(run: dict[str, Any]) -> str:
    """A line for each number of sequences and each way: tokens/s, over bf16, a step's time, and what it reads."""
    rows = [Row(**row) for row in run["results"]["rows"]]
    lines = []
    for row in rows:
        bf16 = next(other for other in rows if other.batch == row.batch and other.way == "bf16")
        rate = row.weight_bytes / row.ms / 1e9
        read = tables.rate(row.weight_bytes / 1e9), tables.rate(rate)
        right = f"{row.snr_db:.1f}", f"{100 * row.as_eager:.1f} %"
        over = f"{bf16.ms / row.ms:.2f}x"
        lines.append([str(row.batch), row.way, f"{row.tokens_s:.0f}", over, f"{row.ms:.3f}", *read, *right])
    headers = (
        "sequences", "weights", "tokens/s", "over bf16", "ms a step", "GB of weights", "TB/s", "SNR of logits, dB",
        "as eager",
    )  # fmt: skip
    return "\n".join([tables.markdown(lines, headers, left=1), "", tables.provenance(run)])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; exit status 1 where logits or tokens miss their bar, or the loop compiled anything anew."""
    args = _parsed(argv)
    size = dataclasses.replace(SIZES[args.size], **({"layers": args.layers} if args.layers else {}))
    clock = clock_of(args.device)
    results: dict[str, Any] = {
        "device": device_name(args.device),
        "size": dataclasses.asdict(size),
        "prompt": PROMPT,
        "steps": args.steps,
        "rounds": args.rounds,
        "rows": [],
    }
    rows: list[Row] = []
    for batch in args.batch or BATCHES:
        found = measure(size, batch, args.steps, args.rounds, clock)
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
        for row in found:
            print(
                f"{row.batch:3} x {row.way:15} {row.tokens_s:10.1f} tokens/s  {row.ms:8.3f} ms a step"
                f" ({row.ms_q1:.3f} to {row.ms_q3:.3f})  SNR {row.snr_db:5.1f} dB  as eager {row.as_eager:.1%}"
                f" (gap {row.gap:.3f})  copied {row.copied}{'  WRONG' if row.wrong else ''}",
                flush=True,
            )
        rows += found
        results["rows"] = [dataclasses.asdict(row) for row in rows]
        if args.json:
            record.write(args.json, "generate", results)  # after each, so that a run cut short leaves its figures
    print(f"\n{table(record.make('generate', results))}")
    return int(any(row.wrong for row in rows))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fp8fn bench generate",
        description=__doc__,
        epilog=main.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, help="of the model; by default 8b, and tiny on a CPU")
    parser.add_argument("--layers", type=_positive, metavar="L", help="and not the size's own")
    parser.add_argument(
        "--batch", type=_positive, metavar="B", action="append", help="sequences; repeatable; by default 1, 4 and 16"
    )
    parser.add_argument("--steps", type=_positive, metavar="T", help="tokens of a loop; by default 255, 31 on a CPU")
    parser.add_argument("--rounds", type=_positive, default=7, metavar="R", help="loops of each way; by default 7")
    parser.add_argument("--device", type=options.device, default=torch.device("cuda"), help="by default cuda")
    parser.add_argument(
        "--json", type=options.output_file, metavar="FILE", help="write the figures and the environment to FILE"
    )
    args = parser.parse_args(argv)
    cuda = args.device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu shows what is measured")
    args.size = args.size or ("8b" if cuda else "tiny")
    args.steps = args.steps or (255 if cuda else 31)
    if args.steps < PROMPT:
        parser.error(f"--steps {args.steps} is less than the prompt's {PROMPT} tokens")
    if importlib.util.find_spec("tabulate") is None:
        parser.error("needs tabulate: pip install tabulate")
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)
