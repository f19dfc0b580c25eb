"""Compile time of a model of 32 layers, with and without the passes: `python -m fp8fn bench compile`.

The layers are small decoder layers (`bench decoder`) on the CPU. A compile time is the time of the first step, forward
and backward, from empty caches, minus that of the second step. Three ways take turns in random order: plain Inductor,
Inductor inside `substitution()`, which visits every node and finds nothing to replace, and the backend "fp8fn". With
--dynamic the number of tokens is a symbol.

Wall time and the processor time of this process are measured. Processor time excludes the C++ compiler, and other
processes disturb it less. Exit status 1 where `substitution()` adds 10 % or more to the median processor time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fp8fn
from fp8fn.bench.decoder import Decoder
from fp8fn.bench.record import write
from fp8fn.cli import options

BAR: Final = 0.10
PLAIN: Final = "inductor"
CHECKED: Final = "substitution"
# Heads have 128 columns, and four query heads share a key head.
_HIDDEN, _INTERMEDIATE, _TOKENS = 512, 512, 16


class Way(NamedTuple):
    """The arguments of torch.compile, and the context manager around it."""

    options: Mapping[str, Any]
    inside: Callable[[], AbstractContextManager[None]] = nullcontext


WAYS: Final = {
    PLAIN: Way({}),
    CHECKED: Way({}, fp8fn.lowering.substitution),
    "fp8fn": Way({"backend": "fp8fn", "options": {"where": "*"}}),
}


class Seconds(NamedTuple):
    """Wall time, and processor time of this process."""

    wall: float
    processor: float

    def since(self, before: Seconds) -> Seconds:
        return Seconds(self.wall - before.wall, self.processor - before.processor)


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


def compile_seconds(way: Way, layers: int, *, dynamic: bool = False) -> Seconds:
    """The time of one compilation of forward and backward, with empty caches of Inductor and Dynamo."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Decoder(_HIDDEN, _INTERMEDIATE) for _ in range(layers))).bfloat16()
    x = torch.randn(1, _TOKENS, _HIDDEN, dtype=torch.bfloat16)
    with fresh_cache(), way.inside():
        compiled = torch.compile(model, dynamic=dynamic or None, **way.options)
        first, second = (_step(compiled, model, x) for _ in range(2))
    torch._dynamo.reset()
    return first.since(second)


def _step(compiled: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Seconds:
    start = now()
    torch.autograd.grad(compiled(x).float().sum(), list(model.parameters()))
    return now().since(start)


def measure(layers: int = 32, rounds: int = 5, *, dynamic: bool = False) -> dict[str, list[Seconds]]:
    """The times of each way in each round. What a process does once happens before the first round."""
    for way in WAYS.values():
        compile_seconds(way, 1, dynamic=dynamic)
    seconds: dict[str, list[Seconds]] = {name: [] for name in WAYS}
    order = list(WAYS)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(compile_seconds(WAYS[name], layers, dynamic=dynamic))
    return seconds


def medians(samples: Sequence[Sequence[float]]) -> Seconds:
    """The median wall time and the median processor time, each by itself."""
    return Seconds(*map(statistics.median, zip(*samples, strict=True)))


def growth(seconds: Mapping[str, Sequence[Sequence[float]]], name: str) -> Seconds:
    """The growth of the medians over plain Inductor's: 0.1 is 10 %."""
    ours, plain = medians(seconds[name]), medians(seconds[PLAIN])
    return Seconds(ours.wall / plain.wall - 1, ours.processor / plain.processor - 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where the bar is exceeded."""
    parser = options.parser_of(
        "bench compile",
        __doc__,
        "",
        "--layers 8 --rounds 3",
        "--dynamic --json compile_dynamic.json",
    )
    parser.add_argument(
        "--layers", type=options.positive, default=32, metavar="L", help="layers of the model (default: 32)"
    )
    parser.add_argument(
        "--rounds", type=options.positive, default=5, metavar="R", help="compilations of each way (default: 5)"
    )
    parser.add_argument("--dynamic", action="store_true", help="the number of tokens is a symbol")
    options.add_json(parser)
    args = parser.parse_args(argv)
    seconds = measure(args.layers, args.rounds, dynamic=args.dynamic)
    for name, samples in seconds.items():
        middle, more = medians(samples), growth(seconds, name)
        print(
            f"{name:13} wall {middle.wall:6.1f} s ({more.wall:+.1%})  processor {middle.processor:6.1f} s"
            f" ({more.processor:+.1%})",
            flush=True,
        )
    if args.json:
        write(args.json, "compile", {"layers": args.layers, "dynamic": args.dynamic, "seconds": seconds})
    return int(growth(seconds, CHECKED).processor >= BAR)
