"""What FSDP2 gathers and what fp8fn quantizes for it, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fp8fn import FP8Weight


@contextmanager
def counted_gathers() -> Iterator[dict[str, int]]:
    """Quantizations of shards, dequantizations, and the elements and bytes of FSDP's gathers of weights."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    from fp8fn.distributed.master import MasterWeight

    counts = dict.fromkeys(("quantized", "dequantized", "gathered", "bytes"), 0)
    keep, dequantize = MasterWeight.keep, FP8Weight.dequantize
    inputs = FSDPParam.all_gather_inputs.fget  # type: ignore[attr-defined]

    def kept(self: MasterWeight, *args: Any) -> None:
        counts["quantized"] += 1
        keep(self, *args)

    def dequantized(self: FP8Weight, *args: Any) -> Tensor:
        counts["dequantized"] += 1
        return dequantize(self, *args)

    def watched(self: FSDPParam) -> list[Tensor]:
        out: list[Tensor] = inputs(self)
        if len(self._orig_size) >= 2:
            counts["gathered"] += self.padded_sharded_param_size.numel()
            counts["bytes"] += sum(x.numel() * x.element_size() for x in out)
        return out

    MasterWeight.keep, FP8Weight.dequantize = kept, dequantized  # type: ignore[method-assign]
    FSDPParam.all_gather_inputs = property(watched)  # type: ignore[assignment, method-assign]
    try:
        yield counts
    finally:
        MasterWeight.keep, FP8Weight.dequantize = keep, dequantize  # type: ignore[method-assign]
        FSDPParam.all_gather_inputs = property(inputs)  # type: ignore[assignment, method-assign]
