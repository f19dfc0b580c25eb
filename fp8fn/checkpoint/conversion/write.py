"""Writes a file of a conversion, and compares each weight with its source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Final

import torch
from torch import Tensor

from fp8fn.checkpoint.conversion.plan import Plan, Weight
from fp8fn.checkpoint.plan import stored_scale
from fp8fn.checkpoint.write import offsets, write_bytes, written
from fp8fn.ops.layout import WHOLE, scale_shape
from fp8fn.quantization import dequantize, quantize
from fp8fn.scaled_tensor import ScaledTensor

LEAST_SNR_DB: Final = 25.0
# Elements that are quantized at once. The float64 comparison takes eight bytes for each.
_SLICE: Final = 2**23
_COPY: Final = 2**26


@dataclass(frozen=True)
class Verified:
    """A weight that was written, with its SNR against the source."""

    name: str
    shape: tuple[int, ...]
    snr_db: float


def write_file(file: BinaryIO, plan: Plan, device: torch.device, progress: Callable[[int], object]) -> list[Verified]:
    """Write the file, with one slice of a tensor in memory at a time."""
    starts = offsets(plan.entries)
    sums = {entry.name: 0 for entry in plan.entries if not entry.nbytes}  # a format's markers have no source
    start = len(plan.header("0" * 8 * len(plan.entries)))
    verified = []
    for name, entry in plan.others.items():
        tensor = entry.shard.tensor(entry.tensor)
        file.seek(start + starts[name])
        crc = 0
        for part in tensor.contiguous().view(-1).view(torch.uint8).split(_COPY) if tensor.numel() else ():
            crc = write_bytes(file, part, crc)
            progress(part.numel())
        sums[name] = crc
    for name, weight in plan.weights.items():
        data, scales = weight.format.data.of(name), weight.format.scale.of(name)
        file.seek(start + starts[data])
        done = _write_quantized(file, weight, device, progress)
        if not done.snr_db >= LEAST_SNR_DB:
            reason = (
                "has NaN or Inf, for whose blocks there is no scale"
                if math.isnan(done.snr_db)
                else f"has {done.snr_db:.1f} dB of signal to noise in FP8, under {LEAST_SNR_DB:.0f}"
            )
            # --exclude keeps an FP8 weight's bytes, and NaN among them.
            remedy = f"; leave it as it is with --exclude {name!r}" if weight.entry.layout is None else ""
            raise ValueError(f"{plan.shard.path}: tensor {name!r} {reason}{remedy}")
        sums[data] = done.crc
        assert written(scales, done.scales) in plan.entries  # else they lie over other tensors' bytes
        file.seek(start + starts[scales])
        sums[scales] = write_bytes(file, done.scales, 0)
        if weight.input_scale is not None:
            inputs = weight.format.input_scale.of(name)
            file.seek(start + starts[inputs])
            sums[inputs] = write_bytes(file, weight.input_scale, 0)
        verified.append(Verified(name, weight.entry.shape, done.snr_db))
    # The header comes last, because it holds the checksums.
    file.seek(0)
    file.write(plan.header("".join(f"{sums[entry.name]:08x}" for entry in plan.entries)))
    return verified


@dataclass(frozen=True)
class _Written:
    """The CRC-32 of a weight's data, its scales, which are not written yet, and its SNR (inf of zeros, NaN of NaN)."""

    crc: int
    scales: Tensor
    snr_db: float


def _write_quantized(
    file: BinaryIO, weight: Weight, device: torch.device, progress: Callable[[int], object]
) -> _Written:
    """Write the FP8 data of a weight, and compare it with the source."""
    source, layout = weight.entry.load(), weight.layout
    if weight.kept:
        assert isinstance(source, ScaledTensor)
        crc, finite = 0, True
        for piece in source.data.contiguous().view(-1).view(torch.uint8).split(_COPY):
            crc = write_bytes(file, piece, crc)
            finite &= not bool((piece & 0x7F == 0x7F).any())  # the codes of NaN in e4m3, which has no Inf
            progress(piece.numel())
        return _Written(crc, stored_scale(source.scale, layout, weight.name), math.inf if finite else math.nan)
    tensor = dequantize(source, torch.float32) if isinstance(source, ScaledTensor) else source
    if not tensor.numel():
        empty = quantize(tensor, layout.block, dtype=torch.float8_e4m3fn, scale=weight.scale)
        return _Written(0, stored_scale(empty.scale, layout, weight.name), math.inf)
    signal, noise, crc = 0.0, 0.0, 0
    scales = []
    # Slices of whole blocks of rows.
    block = layout.block
    step = tensor.shape[-2] if block[0] == WHOLE else block[0]
    rows = max(_SLICE // tensor.shape[-1] // step, 1) * step
    for matrix in tensor.reshape(-1, *tensor.shape[-2:]):
        for part in matrix.split(rows):
            exact = part.to(device)
            q = quantize(exact, block, dtype=torch.float8_e4m3fn, scale=weight.scale)
            crc = write_bytes(file, q.data, crc)
            scales.append(q.scale.float().cpu().flatten())
            reference = exact.double()
            signal += reference.square().sum().item()
            noise += (dequantize(q, torch.float32).double() - reference).square().sum().item()
            progress(part.numel() * weight.entry.dtype.itemsize)
    stored = stored_scale(torch.cat(scales).reshape(scale_shape(tensor.shape, block)), layout, weight.name)
    if noise == 0:
        return _Written(crc, stored, math.inf)
    ratio = signal / noise if math.isfinite(signal) else math.nan
    return _Written(crc, stored, 10 * math.log10(ratio) if ratio else -math.inf)
