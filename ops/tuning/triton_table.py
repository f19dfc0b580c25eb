"""The table of what was measured of Triton's scaled products on a chip, and what it says of a product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fp8fn.ops.kernel import Named
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import Chip, chip_of, target_of_chip
from fp8fn.ops.tuning import amd
from fp8fn.ops.tuning.measured import Form, Key, candidate_name, check_sizes, lookup
from fp8fn.ops.tuning.tile_space import LAYOUTS, TileProblem, known, space


def _problem(key: Key, chip: Chip) -> TileProblem:
    layout, m, n, k, batch = key
    check_sizes(M=m, N=n, K=k, batch=batch)
    if layout not in list(LAYOUTS):
        raise ValueError(f"has {layout!r:.40} as product, which has to be one of {', '.join(LAYOUTS)}")
    for name, size in {"TN": {"M": m, "N": n}}.get(layout, {"N": n, "K": k}).items():
        if size % amd.LINE:
            raise ValueError(f"has {size} as {name}: products are found by multiples of {amd.LINE} alone")
    return TileProblem(layout, m, n, k, target_of_chip(chip), batch)


def _candidates(problem: TileProblem) -> Mapping[str, Sequence[Any]]:
    found: dict[str, list[Any]] = {}
    for candidate in space(problem):
        if candidate.pruned is None:
            found.setdefault(candidate.kernel, []).append(candidate.config)
    return found


def _pruned(problem: TileProblem) -> Mapping[str, str]:
    return {candidate_name(c.kernel, c.config): c.pruned for c in space(problem) if c.pruned is not None}


FORM: Final = Form("scaled_mm", ("product", "M", "N", "K", "batch"), _problem, _candidates, _pruned, known=known)


def default(problem: TileProblem) -> str:
    """The name of the candidate that serves where no table has the problem."""
    first = space(problem)[0]
    return candidate_name(first.kernel, first.config)


def key_of(product: ScaledProduct) -> Key | None:
    """The key of a product whose operands lie as tables are measured, else None."""
    a, b, out = product.a, product.b, product.out
    layout = amd.product_of(a.data, a.block, b.data, b.block)
    if layout is None or not out.numel() or not product.k or not amd.is_aligned(a.data, b.data, out):
        return None
    return layout, product.m, product.n, product.k, product.batch


def named(product: ScaledProduct) -> Named | None:
    """The verdict of the tables of the product's chip."""
    chip = product.chip or chip_of(product.a.data.device, product.target)
    key = None if chip is None else key_of(product)
    found = None if chip is None or key is None else lookup(FORM, chip, key)
    if found is None:
        return None
    row, name = found
    if product.bias is not None and getattr(row.config, "WGRAD_TRANS_STORE", False):
        return None  # the turned store has no bias
    return Named(row.kernel, name, lambda _: row.config)
