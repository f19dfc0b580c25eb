"""Tokens per second of a decoder compiled to a CUDA graph: `python -m fp8fn bench generate`.

bf16 is compiled by `torch.compile(mode="reduce-overhead")`, FP8 by `backend="fp8fn"` with `"triton.cudagraphs"`, which
also computes `silu(gate) * up` of up to 8 rows in the product that reads it.

The model has random weights of Llama-3.1-8B's shape, with fewer layers. All linear layers but the head hold their
weights in one of three formats: bf16, A16W8 (FP8 in blocks of 128 x 128, by activations in bf16) and MX (MX-FP8, by
activations that are quantized in the step). "+ head" quantizes the head's weight too. "constant" tells `gemm` that
nothing writes the weights.

A loop feeds a prompt, then its own likeliest tokens. Every step is the same compiled step, on a GPU one CUDA graph. The
formats take turns, and a figure is the median over the loops.

"transformers" is the `generate` of transformers' LlamaForCausalLM of the same size, with a static cache and a compiled
step, over weights in bf16 or those of `fp8fn.quantize_weights`; "+ loop" is the same with `fp8fn.decoding_loop`. The
time of a call that makes the first token alone is subtracted: a step is one of those that decode. "transformers A16W8,
forward", measured where --ways names it, assigns `torch.compile(model.forward, mode="reduce-overhead",
fullgraph=True)`, which compiles the prefill too.

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
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.bench import record, tables
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.llama import (
    A16W8,
    MX,
    SIZES,
    A16W8WithHead,
    ConstantA16W8,
    ConstantMX,
    Generator,
    Hold,
    Plain,
    Size,
)
from fp8fn.bench.served import PROMPT, SERVED, Served, counts
from fp8fn.cli import options
from fp8fn.cli.environment import device_name
from fp8fn.timing import Clock, Timing, clock_of

WAYS: Final[Mapping[str, Hold]] = {
    "bf16": Plain, "A16W8": A16W8, "A16W8 + head": A16W8WithHead, "A16W8, constant": ConstantA16W8, "MX": MX,
    "MX, constant": ConstantMX,
}  # fmt: skip
BATCHES: Final = (1, 8, 32, 64)
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
        graphs = SERVED[self.way].graphs if self.way in SERVED else 1
        return not (self.snr_db >= SNR_BAR_DB and near and 1 <= self.compiled <= graphs and not self.skipped)


def gap_bar(snr_db: float) -> float:
    """The largest gap that noise of this SNR explains, in standard deviations of the logits."""
    return GAP_BAR * math.sqrt(2) * 10 ** (-snr_db / 20)


class Loop:
    """A generator and its compiled step."""

    def __init__(self, way: str, size: Size, batch: int, context: int, device: torch.device) -> None:
        self.generator = Generator(size, WAYS[way], batch, context, device)
        self.step: Step = _compiled(self.generator, by_fp8fn=WAYS[way] is not Plain)
        self.counts: Counter[str] = Counter()

    def generate(self, prompt: Tensor, steps: int) -> Tensor:
        """The tokens `(B, steps + 1)` of a loop whose first steps take `prompt (B, P)`."""
        self.generator.start(prompt)
        before = counts()
        for _ in range(steps):
            self.step()
        self.counts += counts() - before
        return self.generator.tokens[:, : steps + 1]

    def seconds(self, prompt: Tensor, steps: int, clock: Clock) -> float:
        """Wall seconds of a step. The host waits for the device once all steps are enqueued."""
        clock.synchronize()
        start = time.perf_counter()
        self.generate(prompt, steps)
        clock.synchronize()
        return (time.perf_counter() - start) / steps

    def weight_bytes(self) -> int:
        return self.generator.weight_bytes()

    def logits(self, tokens: Tensor, steps: int, step: Step | None = None) -> Tensor:
        """Logits `(steps, B, vocabulary)` after each of the first tokens, by `step` (default: the compiled one)."""
        step = step or self.step
        self.generator.start(tokens)
        return torch.stack([step().clone() for _ in range(steps)])


def _compiled(step: Step, *, by_fp8fn: bool) -> Step:
    """`step` as a CUDA graph; fp8fn's backend quantizes no product of its own accord here."""
    if not by_fp8fn:
        return torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead")
    options: dict[str, Any] = {"where": [], "triton.cudagraphs": True}
    return torch.compile(step, fullgraph=True, dynamic=False, backend="fp8fn", options=options)


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
def measure(
    size: Size, batch: int, steps: int, rounds: int, clock: Clock, ways: Sequence[str] = tuple(WAYS)
) -> list[Row]:
    """A row for each of `ways`, bf16 among them, from loops of `steps` steps with `batch` sequences."""
    torch.compiler.reset()
    loops: dict[str, Loop | Served] = {
        way: (Loop if way in WAYS else Served)(way, size, batch, steps + 1, clock.device) for way in ways
    }
    prompt = prompts(size, batch, clock.device)
    clock.synchronize()  # `constant` promises that the weights are written before the first product
    for loop in loops.values():
        # Compiles, and records a CUDA graph. transformers' cache is as long as its longest call.
        loop.generate(prompt, steps if isinstance(loop, Served) else 4)
    seconds = _timed_in_turns(loops, prompt, steps, rounds, clock)

    compared = min(steps, _COMPARED)
    plain = loops["bf16"]
    assert isinstance(plain, Loop)
    given = plain.generate(prompt, steps).clone()
    bf16 = plain.logits(given, compared, plain.generator).flatten(0, 1)
    rows = []
    for way, loop in loops.items():
        if isinstance(loop, Served):
            logits, reference, eager, made = loop.compared(prompt, compared)
        else:
            tokens = loop.generate(prompt, steps).clone()
            eager = loop.logits(tokens, compared, loop.generator)[PROMPT - 1 :]
            made = tokens.T[PROMPT : compared + 1]
            logits, reference = loop.logits(given, compared).flatten(0, 1), bf16
        same, gap = agreement(eager, made)
        timing = Timing(tuple(seconds[way]))
        first, third = timing.quartiles
        rows.append(
            Row(
                batch=batch,
                way=way,
                ms=1e3 * timing.median,
                ms_q1=1e3 * first,
                ms_q3=1e3 * third,
                tokens_s=batch / timing.median,
                weight_bytes=loop.weight_bytes(),
                snr_db=snr_db(reference, logits),
                as_eager=same,
                gap=gap,
                compiled=loop.counts["compiled"],
                skipped=loop.counts["skipped"] if clock.device.type == "cuda" else 0,
                copied=loop.counts["copied"],
            )
        )
    return rows


def _timed_in_turns(
    loops: Mapping[str, Loop | Served], prompt: Tensor, steps: int, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of a step of each loop in each round."""
    seconds: dict[str, list[float]] = {way: [] for way in loops}
    order = list(loops)
    shuffle = random.Random(0).shuffle
    clock.warm(1.0)
    for _ in range(rounds):
        shuffle(order)
        for way in order:
            seconds[way].append(loops[way].seconds(prompt, steps, clock))
    return seconds


def table(run: dict[str, Any]) -> str:
    """A line for each number of sequences and format: tokens/s, speedup over bf16, time and bytes of a step, SNR.

    Lines of transformers also say how their tokens/s compare with those of the loop with the same weights.
    """
    rows = [Row(**row) for row in run["results"]["rows"]]
    served = any(row.way in SERVED for row in rows)
    lines = []
    for row in rows:
        ms = {other.way: other.ms for other in rows if other.batch == row.batch}
        loop = ms.get(SERVED[row.way].loop) if row.way in SERVED else None
        of_loop = [tables.number(loop and loop / row.ms, "{:.2f}x")] if served else []
        rate = row.weight_bytes / row.ms / 1e9
        read = tables.rate(row.weight_bytes / 1e9), tables.rate(rate)
        right = f"{row.snr_db:.1f}", f"{100 * row.as_eager:.1f} %"
        over = f"{ms['bf16'] / row.ms:.2f}x"
        lines.append([str(row.batch), row.way, f"{row.tokens_s:.0f}", over, *of_loop, f"{row.ms:.3f}", *read, *right])
    headers = (
        "sequences", "weights", "tokens/s", "speedup over bf16", *(["of the loop's"] if served else []), "ms a step",
        "GB of weights", "TB/s", "SNR of logits, dB", "as eager",
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
        found = measure(size, batch, args.steps, args.rounds, clock, args.ways)
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
        for row in found:
            print(
                f"{row.batch:3} x {row.way:18} {row.tokens_s:10.1f} tokens/s  {row.ms:8.3f} ms a step"
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
        "--batch 1 --ways A16W8 'A16W8 + head' 'transformers A16W8'",
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
        help="sequences; repeatable (default: 1, 8, 32 and 64)",
    )
    parser.add_argument(
        "--ways", nargs="+", choices=(*WAYS, *SERVED), metavar="WAY",
        help=f"ways to measure beside bf16, of {', '.join(map(repr, (*WAYS, *SERVED)))} (default: all; "
        "where transformers is installed, those of its ways that have no comma)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=options.positive, metavar="T", help="tokens of a loop (default: 255, on a CPU 31)"
    )
    parser.add_argument(
        "--rounds", type=options.positive, default=7, metavar="R", help="loops of each format (default: 7)"
    )
    options.add_device(parser)
    options.add_json(parser)
    args = parser.parse_args(argv)
    if not args.ways:
        args.ways = [*WAYS, *(way for way in SERVED if not SERVED[way].on_request and find_spec("transformers"))]
    args.ways = list(dict.fromkeys(("bf16", *args.ways)))
    served = any(way in SERVED for way in args.ways)
    options.check_machine(parser, args.device, ("tabulate", "transformers") if served else ("tabulate",))
    cuda = args.device.type == "cuda"
    args.size = args.size or ("8b" if cuda else "tiny")
    args.steps = args.steps or (255 if cuda else 31)
    if args.steps <= PROMPT:
        parser.error(f"--steps {args.steps} is not more than the prompt's {PROMPT} tokens")
    return args
