"""What FSDP2 gathers and what fp8fn quantizes for it: counted, and compared with whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fp8fn import FP8Weight
from fp8fn.distributed.master import MasterWeight
from fp8fn.ops import reference
from fp8fn.ops.sharded import local_of


@contextmanager
def counted_gathers() -> Iterator[dict[str, int]]:
    """Quantizations of shards, dequantizations, and the elements and bytes of FSDP's gathers of weights."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

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


def has_whole_bits(model: Any, block: tuple[int, int] = (128, 128)) -> int:
    """Checks that each gathered weight has the bits of its whole master, quantized on one process; their number."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.reshard()
    masters = {
        name: parameter.full_tensor() + 0
        for name, parameter in model.named_parameters()
        if isinstance(local_of(parameter), MasterWeight)
    }
    for part in parts:
        part.unshard()
    for name, weight in model.named_parameters():
        if name in masters:
            assert isinstance(weight, FP8Weight), name
            data, scales = reference.quantize(masters[name], block, torch.float8_e4m3fn, "fp32")
            assert torch.equal(weight.scaled.data.view(torch.uint8), data.view(torch.uint8)), name
            assert torch.equal(weight.scaled.scale, scales), name
    for part in parts:
        part.reshard()
    return len(masters)
