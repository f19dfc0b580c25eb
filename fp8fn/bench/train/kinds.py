"""Kernels by kind, from their names: products, quantizers, attention, copies, optimizer, and the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

REST: Final = "rest"
# The first kind whose pattern is in a kernel's name. Inductor names a kernel by the operations that it fuses.
_KINDS: Final = {
    "attention": r"flash|fmha|cudnn_generated|sdpa|attention|\bpytorch_flash",
    "optimizer": r"multi_tensor|adam",
    "quantizers": r"quantize|partial_amax|block_amax|group_scales|silu_mul|rms_norm|_amax|abs_max|amax|abs_.*max"
    r"|float8.*clamp|clamp.*float8|clamp_mul|clamp_reciprocal",
    "products": r"gemm|nvjet|cutlass|xmma|scaled_mm|grouped_mm|wgrad|splitk|\bmm\b|aten::(add|b)?mm|mm_",
    "copies": r"copy_kernel|direct_copy|memcpy|memset|transpose|CatArray|\bcopy_|contiguous|clone|fill",
}
KINDS: Final = (*_KINDS, REST)
_PATTERNS: Final = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _KINDS.items()}
_SHOWN: Final = 6


def kind_of(kernel: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(kernel)), REST)


def by_kind(microseconds: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """For each kind: milliseconds and launches of a step, and its longest kernels.

    `microseconds` has the time and the launches of a step for each kernel.
    """
    found: dict[str, Any] = {}
    for kind in KINDS:
        kernels = {name: value for name, value in microseconds.items() if value[0] > 0 and kind_of(name) == kind}
        longest = sorted(kernels, key=lambda name: -kernels[name][0])[:_SHOWN]
        found[kind] = {
            "ms": sum(time for time, _ in kernels.values()) / 1e3,
            "launches": sum(count for _, count in kernels.values()),
            "kernels": [
                {"name": name[:160], "ms": kernels[name][0] / 1e3, "launches": kernels[name][1]} for name in longest
            ],
        }
    return found


def lines(profile: Mapping[str, Any]) -> list[str]:
    """The profile as text, a line for each kind and for each of its longest kernels."""
    text = []
    for kind, part in profile.items():
        text.append(f"  {kind:12} {part['ms']:9.3f} ms  {part['launches']:6.0f} launches")
        text += [f"      {k['ms']:9.3f} ms  {k['launches']:6.0f} x  {k['name'][:110]}" for k in part["kernels"]]
    return text
