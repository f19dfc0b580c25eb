"""Activations of seven distributions, as they are met in training, for tests of a gradient's accuracy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor


def _normal(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random)


def _student(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    """Student's t with three degrees of freedom."""
    squares = torch.randn(3, *shape, generator=random).square().sum(0)
    return torch.randn(shape, generator=random) / (squares / 3).sqrt()


def _laplace(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=random) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs())


def _outlier_channels(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    x = _normal(shape, random)
    x[:, ::101] *= 1000
    return x


def _outlier_tokens(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    x = _normal(shape, random)
    x[::101] *= 100
    return x


def _six_decades(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    """Channels whose magnitudes are spread evenly, by their logarithm, over six decades."""
    return _normal(shape, random) * 10 ** (6 * torch.rand(shape[1], generator=random) - 3)


def _gated(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    """`silu(gate) * up`."""
    gate, up = torch.randn(2, *shape, generator=random)
    return torch.nn.functional.silu(gate) * up


DISTRIBUTIONS: Final[dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]]] = {
    "normal": _normal, "Student t(3)": _student, "Laplace": _laplace, "outlier channels x1000": _outlier_channels,
    "outlier tokens x100": _outlier_tokens, "channels over six decades": _six_decades, "silu(gate) * up": _gated,
}  # fmt: skip
