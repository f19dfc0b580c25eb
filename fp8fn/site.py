"""`Site`: one matrix product of a model, and the rules that decide whether to compute it in FP8."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

import torch

from fp8fn.ops import targets
from fp8fn.ops.formats import INPUT_DTYPES, short_name

# With less than one block of K, or less than one tile of N, quantization takes longer than FP8 saves.
LEAST_K: Final = 128
LEAST_N: Final = 128
# A decoding step takes as long as reading the weight, and quantization would read the weight once more.
LEAST_M: Final = 16
# Below this size launches and quantization take about as long as the product (measured on an H200 at 4096 rows).
LEAST_WORTHWHILE: Final = 512
# Heads, routers and embeddings are the most sensitive to FP8's rounding and a small part of the work. The backend and
# `convert` share this list. The head of Meta's Llama is `output`, which is a layer's name in other models. A norm may
# hold the layer that computes its scale, `norm1.linear.weight`; DBRX's `norm_attn_norm` holds all of attention.
_SENSITIVE: Final = re.compile(
    r"(?:^|\.)(lm_heads?|output_head|head|classifier|\w*embed\w*|wte|wpe|router|gate)(?:\.|$)"
    r"|(?:^|\.)(\w*norm\w*)(?:\.\w+){0,2}$"
    r"|^(output)\.weight$"
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One matrix product of a model, `(m, k) @ (k, n)`, as the function `where` of `fp8` and of the backend sees it.

    Sizes may be symbolic.

    Args:
        op: Name of the product: "linear", "matmul", "addmm", "grouped_mm", ….
        m: Rows of the product; the rows of all groups for groups of rows.
        n: Columns of the product.
        k: Size of the contraction; the sum over all groups for groups of K.
        batch: Number of products.
        groups: Number of groups of a "grouped_mm"; 0 for another product.
        dtype: Type of the operands.
        device: Device of the operands.
        weight: Name of the weight in `model.named_parameters()`; "" where none is known.

    Example:
        >>> def where(site):
        ...     return site.n >= 4096 and "mlp" in site.weight
        >>> site = fp8fn.Site(op="linear", m=8, n=4096, k=512, dtype=torch.bfloat16, device=torch.device("cpu"))
        >>> where(site)
        False
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
    """The reason to leave a product alone, or None to compute it in FP8."""
    if site.dtype not in INPUT_DTYPES:
        return f"{short_name(site.dtype)} operands; FP8 takes bfloat16, float16 and float32"
    if site.device.type not in ("cpu", "cuda", "meta"):
        return f"device {site.device.type} has no kernels"
    if not targets.fp8_dtypes(targets.target_of(site.device)):
        return f"{targets.target_of(site.device).name} has no FP8 instructions"
    for name, size, least in (("K", site.k, LEAST_K), ("N", site.n, LEAST_N), ("M", site.m, LEAST_M)):
        if isinstance(size, int) and size < least:  # a symbolic size counts as large
            return f"small: {name}={size} is under {least}"
    if not selected(site, where):
        return "where said no"
    return None


def why_not_by_default(site: Site) -> str | None:
    """The reason to leave a product alone if the user gave no `where`, or None."""
    reason = why_sensitive(site.weight, site.n, site.k)
    if reason is not None:
        return reason
    for name, size in (("K", site.k), ("N", site.n)):
        if isinstance(size, int) and size < LEAST_WORTHWHILE:
            return f"small: {name}={size} is under {LEAST_WORTHWHILE}; where='*' takes it too"
    return None


def why_sensitive(weight: str, n: int, k: int) -> str | None:
    """The reason to leave a weight alone because of its name, that of a head, a router or an embedding, or None.

    A `gate` is a router if it has fewer outputs (experts) than inputs; the gate of a gated MLP has more.
    """
    found = _SENSITIVE.search(weight)
    if found is None or (found[1] == "gate" and isinstance(n, int) and n >= k):
        return None
    return f"sensitive: {found[1] or found[2] or found[3]}; where='*' takes it too"


def selected(site: Site, where: Where) -> bool:
    """Whether the user's `where` selects a product: a function, or glob patterns as in `matches`."""
    if where is None:
        return True
    if callable(where):
        return bool(where(site))
    return matches(site.weight, patterns_of(where))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a name from its start or from any dot: `layers.*` matches `model.layers.0.weight`."""
    parts = name.split(".")
    names = [".".join(parts[first:]) for first in range(len(parts))]
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in names)


def patterns_of(where: Where) -> list[str]:
    """The patterns of a `where`; none if it is a function or None."""
    if where is None or callable(where):
        return []
    return [where] if isinstance(where, str) else list(where)


def why_none_match(where: Where, names: Iterable[str]) -> str | None:
    """A message with the nearest names if the patterns match no weight; None if one matches."""
    patterns, known = patterns_of(where), [name for name in names if name]
    if where is None or callable(where) or not known or any(matches(name, patterns) for name in known):
        return None
    return f"where={where!r} matches no weight; nearest names: {_nearest(patterns, known)}"


def why_some_match_none(where: Where, names: Iterable[str]) -> str | None:
    """A message about the patterns that match no weight, where others of the same `where` match one; else None.

    This is no error: one list of patterns may serve several models.
    """
    patterns, known = patterns_of(where), [name for name in names if name]
    if not any(matches(name, patterns) for name in known):
        return None
    return "; ".join(unmatched("where", patterns, known, "weight")) or None


def unmatched(given: str, patterns: Iterable[str], names: Iterable[str], kind: str) -> list[str]:
    """A message for each pattern that matches none of the names; `given` is the argument, `kind` what it selects."""
    known = [name for name in names if name]
    return [
        f"{given}: {pattern!r} matches no {kind}; nearest names: {_nearest([pattern], known)}"
        for pattern in dict.fromkeys(patterns)
        if known and not any(matches(name, [pattern]) for name in known)
    ]


def _nearest(patterns: Sequence[str], known: Iterable[str]) -> str:
    """The three names that are most like the patterns, with `*` for each number."""
    alike = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in known)

    def nearness(name: str) -> float:
        parts = name.split(".")
        return max(
            SequenceMatcher(None, pattern, ".".join(parts[first : first + 1 + pattern.count(".")])).ratio()
            for pattern in patterns or [""]
            for first in range(len(parts))
        )

    return ", ".join(map(repr, sorted(alike, key=nearness, reverse=True)[:3]))


def takes_everything(where: Where) -> bool:
    """Whether one of the patterns is `"*"`."""
    return "*" in patterns_of(where)


def takes_nothing(where: Where) -> bool:
    """Whether `where` is an empty list of patterns: on purpose, so that there is nothing to warn about."""
    return not (where is None or callable(where) or patterns_of(where))


def check_where(where: object) -> None:
    """Raises TypeError for a `where` that is neither a function nor patterns."""
    patterns = [where] if isinstance(where, str) else where
    if where is None or callable(where):
        return
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"where={where!r} is neither a function of a Site nor glob patterns of weights' names")
