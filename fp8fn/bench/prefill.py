"""A prefill of transformers' Llama with FP8 weights, beside bf16 and torchao: `python -m fp8fn bench prefill`.

The model is transformers' LlamaForCausalLM with random weights. A call is a compiled forward without gradients that
returns the logits of the last position alone, as the prefill of transformers' `generate` does (`logits_to_keep=1`), and
fills no cache. The embedding and the head stay in bf16.

- `fp8fn:16bit` is `fp8fn.quantize_weights(model)`: weights in blocks of 128 x 128, activations in 16 bits.
- `fp8fn:fp8` is the same with `activations="fp8"`; `fp8fn:fp8-rowwise` has one scale for each output feature in place
  of the blocks, `fp8fn:fp8-tensorwise` one for each weight. The activations are quantized row by row. `fast` in place
  of the second `fp8` is `activations="fp8_fast"`.
- Inductor compiles these as it compiles bf16. With `,backend=fp8fn` at the end of its name, a variant is compiled by
  `backend="fp8fn"`, which also fuses the quantizers of activations into norms and into `silu(gate) * up`, and this, of
  activations in 16 bits, into the products of gate and up.
- `torchao:dynamic-rowwise` and `torchao:dynamic-tensorwise` are `quantize_` with
  Float8DynamicActivationFloat8WeightConfig. Their products accumulate fast. Inductor compiles them as it compiles
  bf16, without the coordinate descent that torchao recommends: it takes over a minute.

All variants compile in one process. They take turns of half a second, so that each has the clock which the GPU's power
limit leaves to it in a server that is always busy. A time is the device's, a median over the turns. SNR compares the
logits with those of eager bf16 with the same weights before they were quantized.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8fn.bench import record, tables
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.generate import SNR_BAR_DB
from fp8fn.bench.train import attention, kinds, variants
from fp8fn.bench.train.command import tokens_shape
from fp8fn.bench.train.models import SIZES, Size, batches, build, stored_bytes, weight_bytes
from fp8fn.bench.train.variants import BF16, UnavailableError
from fp8fn.cli import options
from fp8fn.cli.environment import device_name
from fp8fn.timing import Clock, Schedule, Timing, clock_of, interleaved, reason
from fp8fn.weights.quantize import quantize_weights

# Ends the name of a variant that fp8fn's backend compiles.
_BY_FP8FN: Final = ",backend=fp8fn"
# Prefills reach the card's power limit, which lowers the clock for some 200 ms below the one that lasts.
_BURST_MS: Final = 500.0

Quantize = Callable[[nn.Module], object]


def _by_torchao(granularity: str) -> Quantize:
    """Replaces the weights of the layers by torchao's, quantized by `PerRow` or `PerTensor` as the activations are."""

    def convert(model: nn.Module) -> None:
        quantization = variants.needed("torchao.quantization")
        try:
            config = quantization.Float8DynamicActivationFloat8WeightConfig(
                granularity=getattr(quantization, granularity)(), set_inductor_config=False
            )
        except (AttributeError, TypeError) as error:
            raise UnavailableError(f"this torchao is too old: {reason(error)}") from None
        try:
            quantization.quantize_(model, config, filter_fn=variants.convertible)
        except (AssertionError, ValueError) as error:
            raise UnavailableError(f"torchao refuses this device: {reason(error)}") from None

    return convert


_FP8FN: Final[Mapping[str, Quantize]] = {
    "fp8fn:16bit": quantize_weights,
    "fp8fn:fp8": lambda model: quantize_weights(model, activations="fp8"),
    "fp8fn:fp8-rowwise": lambda model: quantize_weights(model, block=(1, -1), activations="fp8"),
    "fp8fn:fp8-tensorwise": lambda model: quantize_weights(model, block=(-1, -1), activations="fp8"),
    "fp8fn:fast-rowwise": lambda model: quantize_weights(model, block=(1, -1), activations="fp8_fast"),
    "fp8fn:fast-tensorwise": lambda model: quantize_weights(model, block=(-1, -1), activations="fp8_fast"),
}
VARIANTS: Final[Mapping[str, Quantize]] = {
    BF16: lambda model: None,
    "torchao:dynamic-rowwise": _by_torchao("PerRow"),
    "torchao:dynamic-tensorwise": _by_torchao("PerTensor"),
    **_FP8FN,
    **{f"{name}{_BY_FP8FN}": quantize for name, quantize in _FP8FN.items()},
}
DEFAULTS: Final = (
    BF16, "torchao:dynamic-rowwise", "torchao:dynamic-tensorwise", "fp8fn:16bit", "fp8fn:fp8",
    *(f"{name}{_BY_FP8FN}" for name in _FP8FN),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all variants share: the model, its input, and the attention's kernel."""

    size: Size
    batch: int
    sequence: int
    kernel: str
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of a variant, as they stand in JSON. One that could not be measured has `missing`, the reason.

    Attributes:
        ms, ms_q1, ms_q3: median and quartiles of a forward's time.
        host_ms: time in which the host launches a forward; None on a CPU.
        peak_bytes: the most memory of a forward, weights included; None on a CPU.
        weight_bytes: bytes of weights and scales, without the embedding.
        first_call_s: seconds of the first call, with its compilation.
        cached: graphs of the first call that Inductor had compiled in an earlier run.
        graphs: graphs that torch.compile made.
        profile: milliseconds by kind of kernel.
    """

    variant: str
    missing: str = ""
    ms: float | None = None
    ms_q1: float | None = None
    ms_q3: float | None = None
    tokens_s: float | None = None
    host_ms: float | None = None
    peak_bytes: int | None = None
    weight_bytes: int = 0
    snr_db: float | None = None
    first_call_s: float = 0.0
    cached: int = 0
    graphs: int = 0
    profile: Mapping[str, Any] | None = None

    @property
    def wrong(self) -> bool:
        """Whether a variant of fp8fn or bf16 has no time, or any variant has wrong logits or several graphs."""
        if self.ms is None or self.snr_db is None:
            return not self.variant.startswith("torchao:")
        return not (self.snr_db >= SNR_BAR_DB and self.graphs == 1)


class Forward:
    """A model by one variant, and its compiled forward."""

    def __init__(self, setting: Setting, variant: str, given: Tensor) -> None:
        self.setting, self.variant, self.given = setting, variant, given
        self.model = build(setting.size, setting.sequence, attention.CAUSAL, setting.device, seed=0).eval()
        VARIANTS[variant](self.model)
        self.model.requires_grad_(False)
        self.compiled: Callable[..., Any] = torch.compile(
            self.model,
            dynamic=False,
            backend="fp8fn" if variant.endswith(_BY_FP8FN) else "inductor",
        )

    def __call__(self) -> Tensor:
        return self._logits(self.compiled)

    def eager(self) -> Tensor:
        return self._logits(self.model)

    def _logits(self, model: Callable[..., Any]) -> Tensor:
        with attention.using(self.setting.kernel):
            logits: Tensor = model(input_ids=self.given, logits_to_keep=1).logits
        return logits.flatten(0, 1)

    def first_call(self, reference: Tensor) -> Row:
        """The row without times: what the first call took, the logits beside `reference`, and the memory."""
        from torch._dynamo.utils import counters

        counters.clear()
        begin = time.perf_counter()
        logits = self()
        self._synchronize()
        seconds = time.perf_counter() - begin
        graphs, cached = counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"]
        return Row(
            variant=self.variant,
            weight_bytes=weight_bytes(self.model),
            peak_bytes=self._peak(),
            snr_db=snr_db(reference, logits),
            first_call_s=seconds,
            cached=cached,
            graphs=graphs,
        )

    def _peak(self) -> int | None:
        """The model's own bytes, and the most that a call takes besides. The other variants' models don't count."""
        device = self.setting.device
        if device.type != "cuda":
            return None
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self()
        self._synchronize()
        own = sum(stored_bytes(tensor) for tensor in (*self.model.parameters(), *self.model.buffers()))
        return own + torch.cuda.max_memory_allocated(device) - before

    def _synchronize(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)


@torch.no_grad()
def measure(setting: Setting, wanted: Sequence[str], rounds: int, clock: Clock, profile: bool = False) -> list[Row]:
    """A row for each variant. `bf16` is always built, for its logits."""
    attention.register()
    # Each variant is a graph of the same forward, and Dynamo keeps eight of one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(VARIANTS))
    (given,) = batches(setting.size, setting.batch, setting.sequence, 1)
    given = given.to(setting.device)
    bf16 = Forward(setting, BF16, given)
    reference = bf16.eager()
    forwards: dict[str, Forward] = {}
    rows: dict[str, Row] = {}
    for variant in wanted:
        try:
            forward = bf16 if variant == BF16 else Forward(setting, variant, given)
            rows[variant] = forward.first_call(reference)
            forwards[variant] = forward
            if profile:
                rows[variant] = dataclasses.replace(rows[variant], profile=kinds.profiled(forward, setting.device))
        except UnavailableError as error:
            rows[variant] = Row(variant=variant, missing=str(error))
        except Exception as error:
            rows[variant] = Row(variant=variant, missing=reason(error))
        print(_prepared(rows[variant]), flush=True)
    times = interleaved(forwards, clock, Schedule(rounds=rounds, burst_ms=_BURST_MS))
    tokens = setting.batch * setting.sequence
    return [_timed(row, times[row.variant], tokens) if row.variant in times else row for row in rows.values()]


def _timed(row: Row, timing: Timing | str, tokens: int) -> Row:
    if isinstance(timing, str):
        return dataclasses.replace(row, missing=timing)
    first, third = timing.quartiles
    return dataclasses.replace(
        row, ms=timing.median / 1e3, ms_q1=first / 1e3, ms_q3=third / 1e3, tokens_s=1e6 * tokens / timing.median,
        host_ms=None if timing.host_us is None else timing.host_us / 1e3,
    )  # fmt: skip


def _prepared(row: Row) -> str:
    if row.missing:
        return f"{row.variant}: not measured: {row.missing}"
    cached = " (cached)" if row.cached else ""
    lines = [
        f"{row.variant}: first call {row.first_call_s:.1f} s{cached}, SNR {row.snr_db:.1f} dB, {row.graphs} graphs"
    ]
    return "\n".join([*lines, *(kinds.lines(row.profile) if row.profile else [])])


def table(run: dict[str, Any]) -> str:
    """A line for each variant: times, ratios, memory and SNR; below it kernels by kind, and why figures are missing."""
    found = run["results"]
    rows = [Row(**row) for row in found["rows"]]
    times = {row.variant: row.ms for row in rows if row.ms is not None}
    plain = times.get(BF16)
    best = min((ms for name, ms in times.items() if name.startswith("torchao:")), default=None)
    body = []
    for row in rows:
        if row.ms is not None and row.ms_q1 is not None and row.ms_q3 is not None:
            over = (tables.number(other and other / row.ms, "{:.3f}x") for other in (plain, best))
            memory = tables.number(row.peak_bytes and row.peak_bytes / 1e9, "{:.2f}")
            spread = f"{row.ms:.2f} ({row.ms_q1:.2f} to {row.ms_q3:.2f})"
            first = f"{row.first_call_s:.1f}" + (" (cached)" if row.cached else "")
            numbers = f"{row.tokens_s:.0f}", memory, f"{row.weight_bytes / 1e9:.3f}", tables.number(row.snr_db)
            body.append([f"`{row.variant}`", spread, *over, *numbers, tables.number(row.host_ms, "{:.2f}"), first])
    headers = (
        "variant", "forward, ms (quartiles)", "over bf16", "over torchao's best", "tokens/s", "peak memory, GB",
        "GB of weights", "SNR of logits, dB", "host, ms", "first call, s",
    )  # fmt: skip
    profiles = [(row.variant, row.profile) for row in rows if row.profile]
    kinds_of = [
        [f"`{name}`", *(f"{part['ms']:.2f}" for part in p.values()), f"{sum(part['ms'] for part in p.values()):.2f}"]
        for name, p in profiles
    ]
    by_kind = ["", tables.markdown(kinds_of, ("ms of a forward by kind of kernel", *kinds.KINDS, "all"))]
    missing = [
        line for row in rows if row.missing for line in ("", f"`{row.variant}`: n/a: {row.missing.rstrip('.')}.")
    ]
    lines = [title(found), "", tables.markdown(body, headers), *(by_kind if profiles else []), *missing]
    return "\n".join([*lines, "", tables.provenance(run)])


def title(found: Mapping[str, Any]) -> str:
    size, kernel = Size(**found["size"]), found["kernel"]
    return (
        f"{size.layers} layers of {size.hidden} x {size.intermediate}, vocabulary {size.vocabulary},"
        f" {found['batch']} x {found['sequence']} tokens; causal attention without a mask, kernel {kernel}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a variant of fp8fn has no time, wrong logits or several graphs."""
    args = _parsed(argv)
    device: torch.device = args.device
    size = dataclasses.replace(SIZES[args.size], **({"layers": args.layers} if args.layers else {}))
    batch, sequence = args.tokens
    if device.index is not None:
        torch.cuda.set_device(device)
    kernel, found = attention.DEFAULT, {}
    if device.type == "cuda":
        with torch.no_grad():
            found = attention.times(size, batch, sequence, device, backward=False)
        kernel = attention.fastest(found)
    attention.share_compilations("prefill", device, kernel)
    setting = Setting(size=size, batch=batch, sequence=sequence, kernel=kernel, device=device)
    results: dict[str, Any] = {
        "device": device_name(device), "size": dataclasses.asdict(size), "batch": batch, "sequence": sequence,
        "kernel": kernel, "attention_ms": found, "rounds": args.rounds,
    }  # fmt: skip
    print(title(results), flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, torchao and Inductor, about models of any size
        rows = measure(setting, args.variants, args.rounds, clock_of(device), args.profile)
    results["rows"] = [dataclasses.asdict(row) for row in rows]
    if args.json:
        record.write(args.json, "prefill", results)
    print(f"\n{table(record.make('prefill', results))}")
    return int(any(row.wrong for row in rows))


def names(text: str) -> list[str]:
    """`"bf16 fp8fn:fp8"` → its names, each once."""
    found = list(dict.fromkeys(text.split()))
    unknown = [name for name in found if name not in VARIANTS]
    if unknown or not found:
        raise argparse.ArgumentTypeError(f"{(*unknown, text)[0]!r}: use some of {' '.join(VARIANTS)}")
    return found


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser_of(
        "bench prefill",
        __doc__,
        "--json prefill.json",
        "--variants 'bf16 fp8fn:fp8,backend=fp8fn' --profile",
        "--size tiny --device cpu",
        epilog="Exit status 1 where a variant of fp8fn was not measured, or any variant has wrong logits or several "
        "graphs. torchao is skipped, with the reason, where it is not installed or refuses the device.",
    )
    sizes = [name for name, size in SIZES.items() if not size.experts]
    parser.add_argument("--size", choices=sizes, help="widths of the model (default: 8b, on a CPU tiny)")
    parser.add_argument("--layers", type=options.positive, metavar="L", help="number of layers (default: the size's)")
    parser.add_argument(
        "--tokens", type=tokens_shape, metavar="BxT", help="sequences x length (default: 1x4096, on a CPU 1x256)"
    )
    parser.add_argument(
        "--variants", type=names, default=list(DEFAULTS), metavar="NAMES",
        help=f"names with spaces between (default: {' '.join(DEFAULTS)})",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=options.positive, default=7, metavar="R", help="turns of each variant (default: 7)"
    )
    parser.add_argument("--profile", action="store_true", help="show kernels by kind")
    options.add_device(parser)
    options.add_json(parser)
    args = parser.parse_args(argv)
    options.check_machine(parser, args.device, ("tabulate", "transformers"))
    cuda = args.device.type == "cuda"
    args.size = args.size or ("8b" if cuda else "tiny")
    args.tokens = args.tokens or ((1, 4096) if cuda else (1, 256))
    return args
