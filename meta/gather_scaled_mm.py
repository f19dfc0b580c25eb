"""Registers `fp8fn::gather_scaled_mm`, which only a pass over compiled graphs calls: below autograd, never under vmap.

Its list of results fits neither `Op` nor the cache of fake results.
"""

from __future__ import annotations

from typing import Final

import torch

from fp8fn.meta.registry import LIBRARY, register_fake
from fp8fn.ops.gather_scaled_mm import (
    GATHER_SCALED_MM_SCHEMA,
    gather_scaled_mm_fake,
    gather_scaled_mm_kernel,
    gather_scaled_mm_reference,
)

NAME: Final = "gather_scaled_mm"

LIBRARY.define(GATHER_SCALED_MM_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl(NAME, gather_scaled_mm_reference, "CPU")
LIBRARY.impl(NAME, gather_scaled_mm_kernel, "CUDA")
register_fake(NAME, gather_scaled_mm_fake)
