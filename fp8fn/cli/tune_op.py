"""`python -m fp8fn tune --op NAME`: times every division of an op's products at the shapes of decoding, or at others.

Each shape is measured as a constant weight and as another, into the user's table of the op, which comes before what is
shipped. A run that is interrupted goes on where it was.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fp8fn.bench.decode import BATCH_ROWS, BLOCK, BLOCK_M, EXPERTS, MX_ROWS, ROWS, TOP_K
from fp8fn.bench.shapes import BATCH_DECODE, DECODE, MX_DECODE, MX_MOE
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.targets import Chip, Target
from fp8fn.ops.tuning import chain_device, measured, mx_table, op_defaults, op_sweep, weight_table
from fp8fn.ops.tuning.measured import Form, Key, Row, Table, candidate_name
from fp8fn.ops.tuning.op_sweep import OpBench
from fp8fn.ops.tuning.sweep import Clock
from fp8fn.ops.tuning.weight import WeightProblem

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tuned:
    """How an op is tuned: its table, the keys of a shape `(M, N, K)`, its own shapes, and its bench on a GPU."""

    form: Form
    keys: Callable[[Shape], tuple[Key, ...]]
    shapes: tuple[Shape, ...]
    default: Callable[[Any], str]
    bench: Callable[[torch.device, Target, Chip, Clock], OpBench]


def _weight_keys(shape: Shape) -> tuple[Key, ...]:
    m, n, k = shape
    problems = (WeightProblem(m, n, k, block=BLOCK, constant=constant) for constant in (True, False))
    return tuple(map(weight_table.key_of, problems))


def _mx_keys(shape: Shape) -> tuple[Key, ...]:
    m, n, k = shape
    return tuple((ceil_power_of_two(m), n, k, constant) for constant in (True, False))


def _moe_keys(shape: Shape) -> tuple[Key, ...]:
    """The keys of a shape `(T, N, K)`: T tokens with `TOP_K` of `EXPERTS` experts each."""
    tokens, n, k = shape
    return ((ceil_power_of_two(tokens * TOP_K), n, k, EXPERTS, BLOCK_M),)


OPS: Final[Mapping[str, Tuned]] = {
    "mm_a16w8": Tuned(
        form=weight_table.FORM,
        keys=_weight_keys,
        shapes=(
            *((m, n, k) for k, n in DECODE for m in ROWS),
            *((m, n, k) for k, n in BATCH_DECODE for m in BATCH_ROWS),
        ),
        default=op_defaults.weight_default,
        bench=chain_device.weight_bench,
    ),
    "mx_mm": Tuned(
        form=mx_table.MX_FORM,
        keys=_mx_keys,
        shapes=tuple((m, n, k) for k, n in MX_DECODE for m in MX_ROWS),
        default=op_defaults.mx_default,
        bench=chain_device.mx_bench,
    ),
    "moe_gemm": Tuned(
        form=mx_table.MOE_FORM,
        keys=_moe_keys,
        shapes=MX_MOE,
        default=op_defaults.moe_default,
        bench=chain_device.moe_bench,
    ),
}


def keys_of(op: str, shapes: Iterable[Shape] | None) -> tuple[Key, ...]:
    """The keys to measure, each once."""
    tuned = OPS[op]
    return tuple(dict.fromkeys(key for shape in shapes or tuned.shapes for key in tuned.keys(shape)))


def sweep(
    tuned: Tuned, keys: Sequence[Key], bench: OpBench, origin: Mapping[str, str], *,
    force: bool = False, budget: float | None = None,
) -> int:  # fmt: skip
    """Tunes the keys that the user's table has not yet, saving each; returns how many are left for want of time."""
    from tqdm import tqdm

    form = tuned.form
    known = {} if force else measured.users(form, bench.chip).rows
    todo = [key for key in keys if key not in known]
    began, done = time.perf_counter(), 0
    with tqdm(total=len(todo), unit="product", disable=not todo) as bar:
        for key in todo:
            if budget is not None and time.perf_counter() - began >= budget:
                break
            bar.set_description(named(form, key))
            row = op_sweep.tune(form, key, bench, tuned.default(form.problem(key, bench.chip)))
            measured.add(Table(form, bench.chip, {key: row}, origin))
            gc.collect()  # the operands of the last problem
            done += 1
            bar.update()
    measured.forget()
    return len(todo) - done


def named(form: Form, key: Key) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(form.keys, key, strict=True))


def report(tuned: Tuned, rows: Mapping[Key, Row], chip: Chip) -> str:
    """A line for each key: what was chosen, its time, and what the op would have chosen without a table."""
    form = tuned.form
    lines = [(form.op, "chosen", "µs", "spread", "the default", "gain")]
    for key, row in rows.items():
        default = tuned.default(form.problem(key, chip))
        gain = f"{100 * (row.times[default] / row.us - 1):.1f} %" if default in row.times else ""
        chosen = candidate_name(row.kernel, row.config)
        spread = f"{100 * row.spread / row.us:.1f} %"
        lines.append((named(form, key), chosen, f"{row.us:.2f}", spread, default, gain))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def run(args: Any, bench: OpBench, origin: Mapping[str, str]) -> int:
    """Tunes, reports and exports as the arguments of `tune` say."""
    tuned, keys = OPS[args.op], keys_of(args.op, args.shapes)
    form = tuned.form
    path = measured.user_path(form, bench.chip)
    try:
        left = sweep(tuned, keys, bench, origin, force=args.force, budget=args.budget)
    except OSError as error:
        print(f"tune: {path} can't be written: {error.strerror or error}", file=sys.stderr)
        return 1
    found = measured.users(form, bench.chip)
    print(report(tuned, {key: found.rows[key] for key in keys if key in found.rows}, bench.chip))
    print(f"\n{len(keys) - left} of {len(keys)} products are tuned, in {path}")
    if args.export:
        measured.write(args.export, found)
        print(f"{len(found.rows)} products of the {bench.chip.name} written to {args.export}")
    return 0
