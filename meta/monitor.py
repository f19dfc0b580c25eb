"""Registers `fp8fn::monitor`, which has a side effect and no result, so that no graph may leave it out."""

from __future__ import annotations

from typing import Any, Final

import torch

from fp8fn.meta.registry import LIBRARY, register_fake
from fp8fn.ops.monitor import MONITOR_SCHEMA, monitor

NAME: Final = "monitor"


def _fake(*_: Any) -> None:
    """The op has no result."""


LIBRARY.define(MONITOR_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    LIBRARY.impl(NAME, monitor, _key)
register_fake(NAME, _fake)
torch.fx.node.has_side_effect(torch.ops.fp8fn.monitor.default)
