"""Times of a graph's products in FP8 and in bf16: estimates, measurements, and whether FP8 is slower."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch

from fp8fn.ops import gemm, targets
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.targets import Chip, chip_of
from fp8fn.ops.tuning.estimate import Parts, Step, Times, grouped_parts, linear_times
from fp8fn.ops.tuning.rates import NAMED
from fp8fn.site import Site
from fp8fn.timing import Clock, Schedule, Timing, clock_of, interleaved

# A measurement calls each product at least this often, with 12MNK operations at about this many per µs.
_CALLS: Final = 14
_OPERATIONS_PER_US: Final = 7e8
_LOG: Final = logging.getLogger("fp8fn")


def check_target(target: str | None) -> str | None:
    """The short name of a target; raises ValueError for an unknown one."""
    if target is None:
        return None
    found = targets.named_target(target) if isinstance(target, str) else None
    if found is None:
        archs = dict.fromkeys(arch.name for arch, _ in targets.PRODUCTS.values())
        raise ValueError(
            f"explain: target={target!r} is not known; use one of {', '.join(map(repr, archs))} or of "
            f"{', '.join(map(repr, targets.PRODUCTS))}, or None for the device"
        )
    return found[0]


def check_measure(measure: bool) -> None:
    """Raises ValueError if `measure` is requested without a GPU."""
    if measure and not torch.cuda.is_available():
        raise ValueError("explain: measure=True needs a GPU, and there is none; target='sm90' estimates without one")


def chip_for(device: torch.device, target: str | None = None) -> Chip | None:
    """The chip to estimate times for: the chip that `target` names, else the device; None if it is not sm90."""
    if target is not None:
        return NAMED.get(target)
    here = targets.target_of(device)
    return chip_of(device, here) if here.name == "sm90" else None


def size_of(size: Any) -> int | None:
    """A size as a number: for a symbolic size its hint, which adds no guard, or None if it has no hint."""
    found = size if isinstance(size, int) else size.node.hint
    return found if isinstance(found, int) else None


def sized(site: Site) -> Site | None:
    """The part of a site that its times depend on: numeric sizes and no names.

    Returns None for products of groups, whose times depend on each group's rows, which a graph does not contain.
    """
    if site.groups:
        return None
    m, n, k, batch = map(size_of, (site.m, site.n, site.k, site.batch))
    if m is None or n is None or k is None or batch is None:
        return None
    return replace(site, op="", weight="", m=m, n=n, k=k, batch=batch)


def estimated(site: Site, recipe: Recipe, chip: Chip | None) -> Times | None:
    """Microseconds on a chip; None without a chip, or if the recipe or a size is unknown."""
    found = sized(site)
    if chip is None or found is None:
        return None
    return linear_times(found.m, found.n, found.k, recipe, chip, batch=found.batch, itemsize=found.dtype.itemsize)


def parts_of_groups(site: Site, recipe: Recipe, chip: Chip | None) -> Parts | None:
    """The times of a product of groups of rows by their parts, as if all groups were equal; None if unknown."""
    m, n, k = map(size_of, (site.m, site.n, site.k))
    if chip is None or m is None or n is None or k is None or not site.groups:
        return None
    return grouped_parts(m, n, k, recipe, chip, groups=site.groups, itemsize=site.dtype.itemsize)


def why_slower(times: Times | None, *, backward: bool = True) -> str | None:
    """The reason to leave a product in bf16 if FP8 is estimated to be slower, else None.

    Without `backward` no gradient is computed, and the forward alone decides.
    """
    if times is None:
        return None
    fp8, bf16 = (step.combined if backward else step.forward for step in (times.fp8, times.bf16))
    if fp8 <= bf16:
        return None
    passes = "forward and backward" if backward else "forward"
    return (
        f"slower: {fp8:.0f} µs in FP8 with quantization, {bf16:.0f} in bf16, {passes} by {times.source};"
        " where='*' takes it too"
    )


def measured(sites: Iterable[Site], recipe: Recipe, seconds: float = 2.0) -> dict[Site, Times]:
    """Measures each distinct `sized` site on its device, and omits the sites that do not fit into `seconds`."""
    end = time.perf_counter() + seconds
    clocks: dict[torch.device, Clock] = {}
    found: dict[Site, Times] = {}
    for site in dict.fromkeys(sites):
        least = _CALLS * 12 * site.batch * site.m * site.n * site.k / _OPERATIONS_PER_US / 1e6
        if time.perf_counter() + least > end:
            _LOG.info("explain: (M,N,K)=(%s,%s,%s) is not measured: over %s s", site.m, site.n, site.k, seconds)
            continue
        with torch.cuda.device(site.device) if site.device.type == "cuda" else nullcontext(), torch.no_grad():
            try:
                clock = clocks.setdefault(site.device, clocks.get(site.device) or clock_of(site.device))
                found[site] = _measured(site, recipe, clock)
            except RuntimeError as error:  # most likely out of memory beside the model
                _LOG.info("explain: (M,N,K)=(%s,%s,%s) is not measured: %s", site.m, site.n, site.k, error)
    return found


def _measured(site: Site, recipe: Recipe, clock: Clock) -> Times:
    """Measures forward and backward separately, below autograd, whose thread would add to the times."""

    def tensor(rows: int, columns: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(site.device).manual_seed(seed)
        shape = (site.batch * rows, columns)
        made = torch.randn(shape, device=site.device, dtype=torch.bfloat16, generator=generator)
        return made.unflatten(0, (site.batch, rows)) if site.batch > 1 else made

    x, w, g = tensor(site.m, site.k, 0), tensor(site.n, site.k, 1), tensor(site.m, site.n, 2)
    left, right, grad = (each.to(site.dtype) for each in (x, w, g))
    dtype = grad.dtype if grad.dtype.itemsize == 2 else torch.bfloat16

    def forward() -> Any:
        return gemm.forward(left, right.mT, None, recipe, dtype, dgrad=recipe.keep_weights, wgrad=True)

    _, a_col, b_row = forward()
    b = b_row if recipe.keep_weights else right.mT  # the backward quantizes a weight again that is not kept
    calls: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "backward": lambda: gemm.backward(grad, a_col, b, recipe, dtype, dtype, True),
        "bf16 forward": lambda: x @ w.mT,
        "bf16 backward": lambda: (g @ w, g.mT @ x),
    }
    times = interleaved(calls, clock, Schedule(rounds=3, burst_ms=4.0, warm_s=0.02))
    medians = []
    for timing in times.values():
        if not isinstance(timing, Timing):
            raise RuntimeError(timing)
        medians.append(timing.median)
    return Times(Step(*medians[:2]), Step(*medians[2:]), "the clock")
