"""Tokens per second of a decoder under `torch.compile(mode="reduce-overhead")`: `python -m fp8fn bench generate`.

The model has random weights of Llama-3.1-8B's shape, with fewer layers. All linear layers but the head hold their
weights in one of three formats: bf16, A16W8 (FP8 in blocks of 128 x 128, by activations in bf16) and MX (MX-FP8, by
activations that are quantized in the step). "constant" tells `gemm` that nothing writes the weights.

A loop feeds a prompt, then its own likeliest tokens. Every step is the same compiled step, on a GPU one CUDA graph. The
formats take turns, and a figure is the median over the loops.

- SNR compares the logits with those of eager bf16 after the same tokens.
- "as eager" is the share of the compiled loop's tokens that are also eager PyTorch's likeliest ones after the same
  tokens. Rounding decides between tokens with nearly equal logits.
- The gap is the largest distance of such a token's logit from eager's best logit, in standard deviations of the logits.
  It may be four times the noise in a difference of two logits, by the SNR.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
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
# The noise of all layers adds up in the logits: the bar is lower than for one product.
SNR_BAR_DB: Final = 15.0
# Largest gap, in units of the noise in a difference of two logits.
GAP_BAR: Final = 4.0
# Tokens of a sequence whose logits are compared.
_COMPARED: Final = 64

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Row:
    """The figures of one format of the weights, as they stand in JSON. A step makes one token in each sequence.

    Attributes:
        ms, ms_q1, ms_q3: median and quartiles of a step's time over the loops.
        weight_bytes: bytes of weights and scales that a step reads.
        compiled: graphs that torch.compile made, over all loops.
        skipped: graphs that were not captured in a CUDA graph (0 on a CPU).
        copied: tensors that a CUDA graph copies to its own memory at each step.
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
        """Whether a bar is missed, the step was compiled more than once, or the step on a GPU is no CUDA graph."""
        near = self.gap <= gap_bar(self.snr_db)
        return not (self.snr_db >= SNR_BAR_DB and near and self.compiled == 1 and not self.skipped)


def gap_bar(snr_db: float) -> float:
    """The largest gap that noise of this SNR explains, in standard deviations of the logits."""
    return GAP_BAR * math.sqrt(2) * 10 ** (-snr_db / 20)


class Loop:
    """A generator and its compiled step."""

    def __init__(self, way: str, size: Size, batch: int, context: int, device: torch.device) -> None:
        self.generator = Generator(size, WAYS[way], batch, context, device)
        self.step: Step = torch.compile(self.generator, fullgraph=True, dynamic=False, mode="reduce-overhead")
        self.counts: Counter[str] = Counter()

    def generate(self, prompt: Tensor, steps: int) -> Tensor:
        """The tokens `(B, steps + 1)` of a loop whose first steps take `prompt (B, P)`."""
        self.generator.start(prompt)
        before = counts()
        for _ in range(steps):
            self.step()
        self.counts += counts() - before
        return self.generator.tokens[:, : steps + 1]

    def logits(self, tokens: Tensor, steps: int, step: Step | None = None) -> Tensor:
        """Logits `(steps, B, vocabulary)` after each of the first tokens, by `step` (default: the compiled one)."""
        step = step or self.step
        self.generator.start(tokens)
        return torch.stack([step().clone() for _ in range(steps)])


def counts() -> Counter[str]:
    """torch.compile's counters: graphs made, graphs outside CUDA graphs, and tensors that CUDA graphs copy."""
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
    """The share of `tokens (steps, B)` that are likeliest by eager's logits, and the largest gap of the others."""
    logits = eager.float()
    behind = logits.amax(-1) - logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (behind == 0).double().mean().item(), (behind.max() / logits.std()).item()


@torch.no_grad()
def measure(size: Size, batch: int, steps: int, rounds: int, clock: Clock) -> list[Row]:
    """A row for each format, from loops of `steps` steps with `batch` sequences."""
    torch.compiler.reset()
    loops = {way: Loop(way, size, batch, steps + 1, clock.device) for way in WAYS}
    prompt = prompts(size, batch, clock.device)
    clock.synchronize()  # `constant` promises that the weights are written before the first product
    for loop in loops.values():
        loop.generate(prompt, 4)  # compiles, and records a CUDA graph
    seconds = _timed_in_turns(loops, prompt, steps, rounds, clock)

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


def _timed_in_turns(
    loops: Mapping[str, Loop], prompt: Tensor, steps: int, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Wall seconds of each loop in each round. The host waits for the device once all steps are enqueued."""
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
    """A line for each number of sequences and format: tokens/s, speedup over bf16, time and bytes of a step, SNR."""
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
        "sequences", "weights", "tokens/s", "speedup over bf16", "ms a step", "GB of weights", "TB/s",
        "SNR of logits, dB", "as eager",
    )  # fmt: skip
    return "\n".join([tables.markdown(lines, headers, left=1), "", tables.provenance(run)])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where logits or tokens miss their bar, or where the loop compiled more than once."""
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
            record.write(args.json, "generate", results)  # after each batch: an interrupted run leaves its figures
    print(f"\n{table(record.make('generate', results))}")
    return int(any(row.wrong for row in rows))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser_of(
        "bench generate",
        __doc__,
        "",
        "--size tiny --device cpu",
        epilog="Exit status 1 where logits or tokens miss their bar, or where the loop compiled more than once.",
    )
    parser.add_argument("--size", choices=SIZES, help="size of the model (default: 8b, on a CPU tiny)")
    parser.add_argument("--layers", type=options.positive, metavar="L", help="number of layers (default: the size's)")
    parser.add_argument(
        "--batch",
        type=options.positive,
        metavar="B",
        action="append",
        help="sequences; repeatable (default: 1, 4 and 16)",
    )
    parser.add_argument(
        "--steps", type=options.positive, metavar="T", help="tokens of a loop (default: 255, on a CPU 31)"
    )
    parser.add_argument(
        "--rounds", type=options.positive, default=7, metavar="R", help="loops of each format (default: 7)"
    )
    options.add_device(parser)
    options.add_json(parser)
    args = parser.parse_args(argv)
    options.check_machine(parser, args.device, ("tabulate",))
    cuda = args.device.type == "cuda"
    args.size = args.size or ("8b" if cuda else "tiny")
    args.steps = args.steps or (255 if cuda else 31)
    if args.steps < PROMPT:
        parser.error(f"--steps {args.steps} is less than the prompt's {PROMPT} tokens")
    return args
