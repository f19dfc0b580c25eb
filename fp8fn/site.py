"""`Site`: one matrix product of a model, and the rules that say whether it is worth computing in FP8."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

import torch

from fp8fn.ops import targets
from fp8fn.ops.formats import INPUT_DTYPES, short_name

# A product with less than one block of K, or less than one tile of N, spends more on its quantization than it saves.
LEAST_K: Final = 128
LEAST_N: Final = 128
# A decoding step takes as long as reading the weight, and quantizing both operands reads it once more.
LEAST_M: Final = 16
# Under this, launches and quantization take about what the product does; measured on an H200 at 4096 rows.
LEAST_WORTHWHILE: Final = 512
# Logits and routers feel the rounding of FP8 most, and are a small part of the work.
_SENSITIVE: Final = re.compile(r"(^|\.)(lm_head|output_head|embed\w*|wte|router)(\.|$)")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A product `(m, k) @ (k, n)`, `batch` times, as a user's `where` sees it.

    `weight` is the weight's name as in `model.named_parameters()`, `""` where none is known. Sizes may be symbolic.
    Of a product of groups (`op="grouped_mm"`) `groups` is their number, and `m` counts the rows of all, or `k` where
    they are parts of K; else it is 0.
    """

    op: str
    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 0
    dtype: torch.dtype
    device: torch.device
    weight: str = ""


Where: TypeAlias = Callable[[Site], bool] | str | Sequence[str] | None


def why_not(site: Site, where: Where = None) -> str | None:
    """The reason why a product stays as it is, or None where it goes to FP8."""
    if site.dtype not in INPUT_DTYPES:
        return f"{short_name(site.dtype)} operands; FP8 takes bfloat16, float16 and float32"
    if site.device.type not in ("cpu", "cuda", "meta"):
        return f"device {site.device.type} has no kernels"
    if not targets.fp8_dtypes(targets.target_of(site.device)):
        return f"{targets.target_of(site.device).name} has no FP8 instructions"
    for name, size, least in (("K", site.k, LEAST_K), ("N", site.n, LEAST_N), ("M", site.m, LEAST_M)):
        if isinstance(size, int) and size < least:  # a symbolic size is large
            return f"small: {name}={size} is under {least}"
    if not selected(site, where):
        return "where said no"
    return None


def why_not_by_default(site: Site) -> str | None:
    """The reason why a product of a model stays as it is where its user gave no `where`."""
    found = _SENSITIVE.search(site.weight)
    if found is not None:
        return f"sensitive: {found[2]}; where='*' takes it too"
    for name, size in (("K", site.k), ("N", site.n)):
        if isinstance(size, int) and size < LEAST_WORTHWHILE:
            return f"small: {name}={size} is under {LEAST_WORTHWHILE}; where='*' takes it too"
    return None


def selected(site: Site, where: Where) -> bool:
    """Whether the user's `where` takes a product: a predicate, or globs of weights' names (`"layers.*.mlp.*"`)."""
    if where is None:
        return True
    if callable(where):
        return bool(where(site))
    patterns = [where] if isinstance(where, str) else list(where)
    return any(fnmatchcase(site.weight, pattern) for pattern in patterns)


def takes_everything(where: Where) -> bool:
    """Whether one of the patterns is `"*"`."""
    return not callable(where) and "*" in ([where] if isinstance(where, str) else where or ())


def check_where(where: object) -> None:
    """TypeError for a `where` that is neither a predicate nor patterns."""
    patterns = [where] if isinstance(where, str) else where
    if where is None or callable(where):
        return
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"where={where!r} is neither a function of a Site nor glob patterns of weights' names")
