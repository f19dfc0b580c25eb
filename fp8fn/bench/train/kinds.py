"""Kernels by kind, from their names: products, quantizers, attention, copies, optimizer, and the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

REST: Final = "rest"
# The first kind whose pattern is in a kernel's name.
_KINDS: Final = {
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated|cudnn::fusion",
    "optimizer": r"multi_tensor|adam",
    "quantizers": r"quantize|^silu_mul_(backward|saved)|(stream|walk)_columns|row_rstd|amax|group_scales",
    "products": r"gemm|nvjet|cutlass|xmma|gemv|splitk|_mm\b|_mm_|\bmm_|scaled_mm|a16w8|mx_tiles|aten::(add|b)?mm",
    "copies": r"copy|memcpy|memset|transpose|contiguous|clone|catarray|fill",
}
# Inductor names a generated kernel by the operations that it fuses, and by the ops that read its result: `mm` or
# `quantize_dual` in a name does not say that the kernel multiplies or quantizes.
_GENERATED: Final = re.compile(r"triton_(poi|red|per|mix)_fused_")
_MOVES: Final = "(unsafe_view|view|to_copy|clone|copy|transpose|permute|t|expand|unsqueeze|cat|slice)(?=_|$)"
_FUSED: Final = {"quantizers": r"clamp|amax|abs.*max|float8", "copies": rf"fused(_{{1,2}}{_MOVES})+_\d*$"}
KINDS: Final = (*_KINDS, REST)
_SHOWN: Final = 6


def kind_of(kernel: str) -> str:
    """The kind of a kernel. A kernel that computes and quantizes, such as a norm with an amax, is a quantizer."""
    kinds = _FUSED if _GENERATED.match(kernel) else _KINDS
    return next((kind for kind, pattern in kinds.items() if re.search(pattern, kernel, re.IGNORECASE)), REST)


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


def profiled(call: Callable[[], object], device: torch.device, repeats: int = 3) -> dict[str, Any]:
    """`by_kind` of a call: the mean of `repeats`, with times of the GPU, or of the processor where there is none."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU], acc_events=True) as profiler:
        for _ in range(repeats):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    return by_kind(
        {
            event.key: ((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / repeats,
                        event.count / repeats)
            for event in profiler.key_averages()
        }
    )  # fmt: skip


def lines(profile: Mapping[str, Any]) -> list[str]:
    """The profile as text, a line for each kind and for each of its longest kernels."""
    text = []
    for kind, part in profile.items():
        text.append(f"  {kind:12} {part['ms']:9.3f} ms  {part['launches']:6.0f} launches")
        text += [f"      {k['ms']:9.3f} ms  {k['launches']:6.0f} x  {k['name'][:110]}" for k in part["kernels"]]
    return text
