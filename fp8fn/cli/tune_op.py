"""`python -m fp8fn tune --op NAME`: times every candidate of an op's kernels at the op's own shapes, or at others.

The times go into the user's table of the op, which comes before what is shipped. An interrupted run goes on
where it was. On Hopper a weight is measured as a constant and as another. `--dry-run` lists the candidates instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from fp8fn.bench.decode import BATCH_ROWS, BLOCK, BLOCK_M, EXPERTS, MX_ROWS, ROWS, TOP_K
from fp8fn.bench.shapes import BATCH_DECODE, DECODE, LLM84, MX_MOE, MX_WEIGHTS
from fp8fn.cli import tune_loop
from fp8fn.cli.tune_loop import NotKept, Outcome
from fp8fn.ops import mm_a16w8, moe_gemm, mx_mm
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.kernel import Kernel, choose
from fp8fn.ops.targets import Chip, Target, hopper_fault, target_of_chip
from fp8fn.ops.tuning import (
    chain_device,
    grouped_mm_table,
    grouped_table,
    measured,
    mx_table,
    op_sweep,
    triton_table,
    weight_table,
)
from fp8fn.ops.tuning.measured import Form, Key, Row, Table, candidate_name
from fp8fn.ops.tuning.op_sweep import OpBench
from fp8fn.ops.tuning.problem import PRODUCTS
from fp8fn.ops.tuning.sweep import Clock
from fp8fn.ops.tuning.weight import WeightProblem

Shape = tuple[int, ...]
_PRODUCTS: Final = ",".join(PRODUCTS)
# Numbers of groups that torchao times its quantizers of grouped tokens with, at (M, N).
GROUPS: Final = (1, 16, 64)
GROUPED: Final[tuple[Shape, ...]] = ((16640, 8192, 5120),)
# Numbers of groups that DeepGEMM times its products of groups with, and the layers `(M, N, K)`.
EXPERT_GROUPS: Final = (4, 8)
EXPERT_LAYERS: Final[tuple[Shape, ...]] = (
    (32768, 6144, 7168), (32768, 7168, 3072), (32768, 4096, 4096), (32768, 4096, 2048),
)  # fmt: skip


class Wanted(NamedTuple):
    """The keys that are asked for: a target's, those of some products of a layer, and of a recipe."""

    target: Target
    products: Sequence[str] = PRODUCTS
    recipe: str = "blockwise"


@dataclass(frozen=True)
class Tuned:
    """How an op is tuned: its table, the keys of a shape `(M, N, K)`, its own shapes, and its bench on a GPU.

    `of_layers`: whether the keys depend on the products of a layer and on its recipe.
    """

    form: Form
    keys: Callable[[Shape, Wanted], tuple[Key, ...]]
    shapes: tuple[Shape, ...]
    default: Callable[[Any], str]
    bench: Callable[[torch.device, Target, Chip, Clock], OpBench]
    of_layers: bool = False


def _constants(wanted: Wanted) -> tuple[bool, ...]:
    """On Hopper a constant weight may be read before the kernel ahead of the product ends, so that its times differ."""
    return (True, False) if hopper_fault(wanted.target) is None else (False,)


def _weight_keys(shape: Shape, wanted: Wanted) -> tuple[Key, ...]:
    m, n, k = shape
    problems = (WeightProblem(m, n, k, block=BLOCK, constant=constant) for constant in _constants(wanted))
    return tuple(map(weight_table.key_of, problems))


def _mx_keys(shape: Shape, wanted: Wanted) -> tuple[Key, ...]:
    m, n, k = shape
    return tuple((ceil_power_of_two(m), n, k, constant) for constant in _constants(wanted))


def _scaled_keys(shape: Shape, wanted: Wanted) -> tuple[Key, ...]:
    """The products of `x (M, K) @ w (N, K)ᵀ`; on Hopper both operands of dgrad lie as those of the forward product."""
    m, n, k = shape
    sizes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    layouts = {product: product for product in sizes}
    if hopper_fault(wanted.target) is None:
        layouts["dgrad"] = "forward"
    if wanted.recipe == "rowwise":
        layouts = dict.fromkeys(sizes, "rowwise")
    elif wanted.recipe != "blockwise":
        raise ValueError(f"--recipe {wanted.recipe}: Triton's products are tuned for blockwise and rowwise")
    return tuple((layouts[product], *sizes[product], 1) for product in wanted.products)


def _grouped_keys(shape: Shape, wanted: Wanted) -> tuple[Key, ...]:
    """Tokens `(M, K)` of a layer of experts in each form, by `GROUPS`."""
    m, _, k = shape
    return tuple((form, ceil_power_of_two(m), k, groups) for form in grouped_table.FORMS for groups in GROUPS)


def _expert_keys(shape: Shape, wanted: Wanted) -> tuple[Key, ...]:
    """The products of M tokens by experts `(N, K)`, by `EXPERT_GROUPS`; the weights' gradient is of lines of K.

    On Hopper the experts of dgrad lie as those of the forward product.
    """
    m, n, k = shape
    tokens = ceil_power_of_two(m)
    layouts = {"blockwise": ("rows", "tokens"), "blockwise_square": ("rows", "squares"), "rowwise": ("rowwise", None)}
    if wanted.recipe not in layouts:
        raise ValueError(f"--recipe {wanted.recipe}: products of groups are tuned for {', '.join(layouts)}")
    rows, summed = layouts[wanted.recipe]
    dgrad = "turned rows" if rows == "rows" and hopper_fault(wanted.target) is not None else rows
    sizes = {"forward": (rows, tokens, n, k), "dgrad": (dgrad, tokens, k, n), "wgrad": (summed, n, k, tokens)}
    found = (sizes[product] for product in wanted.products)
    return tuple((*key, groups) for key in found if key[0] is not None for groups in EXPERT_GROUPS)


def _moe_keys(shape: Shape, wanted: Wanted) -> tuple[Key, ...]:
    """The keys of a shape `(T, N, K)`: T tokens with `TOP_K` of `EXPERTS` experts each."""
    tokens, n, k = shape
    return ((ceil_power_of_two(tokens * TOP_K), n, k, EXPERTS, BLOCK_M),)


def _default_of(kernels: Sequence[Kernel], problem: Any) -> str:
    choice = choose(problem, kernels)
    return candidate_name(choice.name, choice.config)


OPS: Final[Mapping[str, Tuned]] = {
    "scaled_mm": Tuned(
        form=triton_table.FORM,
        keys=_scaled_keys,
        shapes=tuple(dict.fromkeys((s.M, s.N, s.K) for s in LLM84)),
        default=triton_table.default,
        bench=chain_device.scaled_bench,
        of_layers=True,
    ),
    "quantize_grouped": Tuned(
        form=grouped_table.FORM,
        keys=_grouped_keys,
        shapes=GROUPED,
        default=grouped_table.default,
        bench=chain_device.grouped_bench,
    ),
    "scaled_grouped_mm": Tuned(
        form=grouped_mm_table.FORM,
        keys=_expert_keys,
        shapes=EXPERT_LAYERS,
        default=grouped_mm_table.default,
        bench=chain_device.groups_bench,
        of_layers=True,
    ),
    "mm_a16w8": Tuned(
        form=weight_table.FORM,
        keys=_weight_keys,
        shapes=(
            *((m, n, k) for k, n in DECODE for m in ROWS),
            *((m, n, k) for k, n in BATCH_DECODE for m in BATCH_ROWS),
        ),
        default=lambda problem: _default_of(mm_a16w8.KERNELS, problem.product()),
        bench=chain_device.weight_bench,
    ),
    "mx_mm": Tuned(
        form=mx_table.MX_FORM,
        keys=_mx_keys,
        shapes=tuple((m, n, k) for k, n in MX_WEIGHTS for m in MX_ROWS),
        default=partial(_default_of, mx_mm.KERNELS),
        bench=chain_device.mx_bench,
    ),
    "moe_gemm": Tuned(
        form=mx_table.MOE_FORM,
        keys=_moe_keys,
        shapes=MX_MOE,
        default=partial(_default_of, moe_gemm.KERNELS),
        bench=chain_device.moe_bench,
    ),
}


def keys_of(op: str, shapes: Iterable[Shape] | None, wanted: Wanted) -> tuple[Key, ...]:
    """The keys to measure, each once; ValueError where there are none."""
    tuned = OPS[op]
    found = tuple(dict.fromkeys(key for shape in shapes or tuned.shapes for key in tuned.keys(shape, wanted)))
    if not found:
        products = ",".join(wanted.products)
        raise ValueError(f"--op {op} has no {products} with --recipe {wanted.recipe}: name another of {_PRODUCTS}")
    return found


def check_options(op: str, wanted: Wanted) -> None:
    """ValueError for an option that the op does not read."""
    for name, value, usual in (
        ("--products", ",".join(wanted.products), _PRODUCTS), ("--recipe", wanted.recipe, Wanted(wanted.target).recipe),
    ):  # fmt: skip
        if value != usual and not OPS[op].of_layers:
            others = " and ".join(other for other, tuned in OPS.items() if tuned.of_layers)
            raise ValueError(f"{name} {value} has no effect on --op {op}: leave it out, since only {others} read it")


def looked_up(op: str, keys: Sequence[Key], chip: Chip) -> tuple[tuple[Key, ...], tuple[str, ...]]:
    """The keys that calls look up in a table, and a line for each other one; ValueError where no key is left."""
    form, found, refused = OPS[op].form, [], []
    for key in keys:
        try:
            form.problem(key, chip)
            found.append(key)
        except ValueError as error:
            refused.append(f"{named(form, key)} {error}")
    if not found:
        raise ValueError("; ".join(refused))
    return tuple(found), tuple(refused)


def sweep(
    tuned: Tuned, keys: Sequence[Key], bench: OpBench, origin: Mapping[str, str], *,
    force: bool = False, budget: float | None = None,
) -> Outcome:  # fmt: skip
    """Tunes the keys that the user's table has not yet, saving each."""
    form = tuned.form
    known = {} if force else measured.users(form, bench.chip).rows
    todo = [key for key in keys if key not in known]

    def measure(key: Key) -> Row:
        return op_sweep.tune(form, key, bench, tuned.default(form.problem(key, bench.chip)))

    def keep(key: Key, row: Row) -> None:
        measured.add(Table(form, bench.chip, {key: row}, origin))

    path = measured.user_path(form, bench.chip)
    outcome = tune_loop.each(todo, partial(named, form), measure, keep, bench.clock, path, budget)
    measured.forget()
    return outcome


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


def plan(form: Form, key: Key, chip: Chip) -> list[tuple[str, str]]:
    """Every candidate of a key by name, with "timed" or why it is not; ValueError where no kernel takes the problem."""
    problem = form.problem(key, chip)
    timed = [candidate_name(kernel, c) for kernel, configs in form.candidates(problem).items() for c in configs]
    if not timed:
        raise ValueError(f"{form.op} has no kernel to tune on {target_of_chip(chip).name}")
    return [*((name, "timed") for name in timed), *form.pruned(problem).items()]


def backends(op: str, key: Key, chip: Chip) -> tuple[str, ...]:
    """What compiles the candidates of a key: each of "cuda", "hip" and "triton" once, by the names of the kernels."""
    kernels = OPS[op].form.candidates(OPS[op].form.problem(key, chip))
    return tuple(dict.fromkeys(name.partition("_")[0] for name, configs in kernels.items() if configs))


def dry_run(op: str, keys: Sequence[Key], chip: Chip) -> str:
    """The text of `--dry-run`: by problem, how many candidates there are, and each with what becomes of it."""
    form, lines = OPS[op].form, []
    for key in keys:
        candidates = plan(form, key, chip)
        count = sum(what == "timed" for _, what in candidates)
        lines.append(f"{form.op} {named(form, key)} on {chip.name}: {count} of {len(candidates)} candidates are timed")
        width = max(len(name) for name, _ in candidates)
        lines += [f"  {name:{width}}  {what}" for name, what in candidates]
    return "\n".join(lines)


def run(args: Any, program: str, bench: OpBench, origin: Mapping[str, str], keys: Sequence[Key]) -> int:
    """Tunes, reports and exports as the arguments of `tune` say; `program` begins a message."""
    tuned = OPS[args.op]
    form = tuned.form
    path = measured.user_path(form, bench.chip)
    try:
        outcome = sweep(tuned, keys, bench, origin, force=args.force, budget=args.budget)
    except NotKept as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    found = measured.users(form, bench.chip)
    print(report(tuned, {key: found.rows[key] for key in keys if key in found.rows}, bench.chip))
    print(f"\n{len(keys) - outcome.left} of {len(keys)} products are tuned, in {path}")
    if args.export:
        measured.write(args.export, found)
        print(f"{len(found.rows)} products of the {bench.chip.name} written to {args.export}")
    return outcome.tell(program)
