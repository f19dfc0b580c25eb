"""`quantize_weights`: a model's parameters become `FP8Weight`s in place, its modules stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.ops.activations import Activations, check_activations
from fp8fn.ops.formats import INPUT_DTYPES, ScaleFormat, short_name
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.layout import Block
from fp8fn.quantization import quantize
from fp8fn.site import (
    LEAST_K,
    LEAST_N,
    Site,
    Where,
    check_where,
    selected,
    why_none_match,
    why_sensitive,
    why_some_match_none,
)  # fmt: skip
from fp8fn.weights.fp8_weight import FP8Weight

_LOG: Final = logging.getLogger("fp8fn")
# Modules whose weights are no operands of a matrix product in PyTorch, or are multiplied inside of one of its kernels.
_OTHERS: Final = (nn.modules.conv._ConvNd, nn.RNNBase, nn.Bilinear)


@dataclass(frozen=True)
class Place:
    """A module and the name under which it holds a parameter."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class QuantizedWeights:
    """The result of `quantize_weights`, by the parameters' names.

    Args:
        quantized: Names of the parameters that are `FP8Weight`s now; tied ones under each of their names.
        kept: The reason for each other parameter with two or more dimensions.

    Example:
        >>> report = fp8fn.quantize_weights(torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 10)))
        >>> print(report)
        1 weight(s) in FP8, 1 kept
        1.weight: small: N=10 is under 128
    """

    quantized: tuple[str, ...]
    kept: dict[str, str]

    def __str__(self) -> str:
        reasons = [f"{name}: {reason}" for name, reason in self.kept.items()]
        return "\n".join([f"{len(self.quantized)} weight(s) in FP8, {len(self.kept)} kept", *reasons])


def check_module(op: str, name: str, value: object) -> None:
    if not isinstance(value, nn.Module):
        raise TypeError(f"{op}: {name} is {kind_of(value)}; use a torch.nn.Module")


def _where(op: str, name: str, value: object) -> None:
    check_where(value)


@checked(
    model=check_module, where=_where, block=arguments.block, dtype=arguments.fp8_dtype, scale=arguments.scale,
    activations=arguments.activations,
)  # fmt: skip
def quantize_weights(
    model: nn.Module,
    where: Where = None,
    block: Block = (128, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
    activations: Activations = "16bit",
) -> QuantizedWeights:
    """Quantizes a model's weights in place: its parameters become `FP8Weight`s, its modules do not change.

    Weights are matrices, and batches of them (experts). Left alone by default are embeddings, heads, norms and routers,
    as in `python -m fp8fn convert`. Left alone always are biases of more dimensions, weights with N or K under 128, of
    convolutions and recurrent modules, on the meta device, and those that are quantized or sharded. Tied weights stay
    tied. If a weight cannot be quantized, no weight is.

    Args:
        model: Module, on any device.
        where: Names of the weights: a glob, a list of globs, or a function of a `fp8fn.Site`, whose `m` is 0. A glob
            fits a name from its start or from any dot.
        block: Block `(r, c)` of the scales; see `quantize`.
        dtype: FP8 type; by default the device's own e4m3.
        scale: Scale format; see `quantize`.
        activations: "fp8" and "fp8_fast" also quantize the activations of products with many rows; see `FP8Weight`.

    Returns:
        A `QuantizedWeights` with the names, and the reason for each weight that stays.

    Raises:
        TypeError: `model` is no module, or `where`, `dtype` or `scale` has a wrong type.
        ValueError: A weight holds NaN or Inf, the block or `activations` does not exist, `activations` does not fit the
            block, or `where` matches no weight.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
        >>> fp8fn.quantize_weights(model).quantized
        ('0.weight', '2.weight')
        >>> model(torch.randn(4, 256)).shape
        torch.Size([4, 256])
    """
    arguments.block("quantize_weights", "block", block)  # also where no weight is quantized
    check_activations("quantize_weights", activations, block)
    places, chosen, kept = choose("quantize_weights", model, where, _why_not)
    for weight, names in chosen.items():
        if not bool(weight.isfinite().all()):
            raise ValueError(f"quantize_weights: {names[0]} holds NaN or Inf; no weight of the model was quantized")
    while chosen:  # each 16-bit weight is freed before the next one is quantized
        weight = next(iter(chosen))
        scaled = quantize(weight.detach(), block, dtype=dtype, scale=scale)
        parameter = nn.Parameter(FP8Weight(scaled, weight.dtype, activations), requires_grad=False)
        for name in chosen.pop(weight):
            place = places[name]
            setattr(place.module, place.name, parameter)
    return QuantizedWeights(tuple(name for name in places if _is_new(places[name], kept, name)), kept)


def named_places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Every name of every parameter; a tied one has several, and `model.named_parameters()` gives the first only."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, Place(module, name)


def _is_new(place: Place, kept: dict[str, str], name: str) -> bool:
    return name not in kept and isinstance(getattr(place.module, place.name), FP8Weight)


def choose(
    op: str, model: nn.Module, where: Where, why_not: Callable[[str, Tensor, nn.Module, Where], str | None]
) -> tuple[dict[str, Place], dict[Tensor, list[str]], dict[str, str]]:
    """All parameters by name, the weights without a reason to stay with their names, and the reasons of the others."""
    check_where(where)  # a dict of patterns would be read as the list of its keys
    places = dict(named_places(model))
    weights = {name: place for name, place in places.items() if getattr(place.module, place.name).ndim >= 2}
    missed = why_none_match(where, weights)
    if missed is not None:
        raise ValueError(f"{op}: {missed}")
    some = why_some_match_none(where, weights)
    if some is not None:
        _LOG.warning("%s: %s", op, some)
    kept: dict[str, str] = {}
    chosen: dict[Tensor, list[str]] = {}
    for name, place in weights.items():
        weight = getattr(place.module, place.name)
        reason = why_not(name, weight, place.module, where)
        if reason is None:
            chosen.setdefault(weight, []).append(name)
        else:
            kept[name] = reason
    _untie(chosen, kept, places)
    return places, chosen, kept


def _untie(chosen: dict[Tensor, list[str]], kept: dict[str, str], places: dict[str, Place]) -> None:
    """Leaves a tied weight alone where one of its names has to stay: one tensor cannot be both."""
    for name in list(kept):
        weight = getattr(places[name].module, places[name].name)
        for other in chosen.pop(weight, ()):
            kept[other] = f"tied to {name}, which stays: {kept[name]}"


def _why_not(name: str, weight: Tensor, module: nn.Module, where: Where) -> str | None:
    """The reason to leave a parameter with two or more dimensions alone, or None."""
    if isinstance(weight, FP8Weight):
        return "it is an FP8Weight already"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"it is of the tensor subclass {type(weight).__name__}"
    if weight.is_meta:
        return "it is on the meta device and has no values"
    return why_not_by_shape(name, weight, module, where)


def why_not_by_shape(name: str, weight: Tensor, module: nn.Module, where: Where) -> str | None:
    """The reason to leave a parameter alone that does not depend on its values, or None."""
    if isinstance(module, _OTHERS) or weight.ndim > 3:
        return f"no matrix product in PyTorch reads the weight of {kind_of(module)} with {weight.ndim} dimensions"
    if weight.dtype not in INPUT_DTYPES:
        return f"it is {short_name(weight.dtype)}"
    if name.endswith("bias"):
        return "it is a bias, which is added"
    n, k = weight.shape[-2:]
    for axis, size, least in (("N", n, LEAST_N), ("K", k, LEAST_K)):
        if size < least:
            return f"small: {axis}={size} is under {least}"
    if where is None:
        sensitive = "sensitive: embedding; where='*' takes it too" if isinstance(module, nn.Embedding) else None
        return sensitive or why_sensitive(name, n, k)
    site = Site(
        op="linear", m=0, n=n, k=k, batch=weight.shape[0] if weight.ndim == 3 else 1, dtype=weight.dtype,
        device=weight.device, weight=name,
    )  # fmt: skip
    return None if selected(site, where) else "where said no"
