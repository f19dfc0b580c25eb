"""The tensors of a mixture of experts for benchmarks: tokens in groups, a matrix for each, and float64 samples.

Tokens follow one another (`Experts`), or each expert has room for more than it has (`CountedExperts`).
"""

from __future__ import annotations

import random
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.layer import normal

TOP_K: Final = 8
_SAMPLES: Final = 512


def group_sizes(experts: int, tokens: int, distribution: str) -> list[int]:
    """The number of tokens of each expert.

    "balanced"; "zipf", in proportion to `rank ** -1.2` in a random order; or "routed", where the tokens are copies for
    `TOP_K` experts each, drawn by the same weights.
    """
    weights = [1.0 if distribution == "balanced" else (rank + 1) ** -1.2 for rank in range(experts)]
    if distribution == "routed":
        if (fault := routing_fault(experts, tokens)) is not None:
            raise ValueError(fault)
        return _routed(weights, tokens // TOP_K)
    sizes = [int(tokens * weight / sum(weights)) for weight in weights]
    sizes[0] += tokens - sum(sizes)
    random.Random(0).shuffle(sizes)
    return sizes


def routing_fault(experts: int, tokens: int) -> str | None:
    """Why "routed" has no groups of these sizes, or None."""
    if tokens % TOP_K == 0 and experts >= TOP_K:
        return None
    return f"M={tokens}, E={experts}: M must be a multiple of {TOP_K}, and E {TOP_K} or more"


def _routed(weights: list[float], tokens: int) -> list[int]:
    draws = random.Random(0)
    draws.shuffle(weights)
    sizes = [0] * len(weights)
    for _ in range(tokens):
        # The largest of u ** (1 / weight) are a sample by weight without replacement (Efraimidis and Spirakis).
        keys = [draws.random() ** (1.0 / weight) for weight in weights]
        for expert in sorted(range(len(weights)), key=keys.__getitem__)[-TOP_K:]:
            sizes[expert] += 1
    return sizes


class Experts:
    """`out (M, N) = x (M, K) @ w (E, K, N)[e]` for each expert e, w stored as `(E, N, K)`; `g` is out's gradient."""

    def __init__(self, shape: tuple[int, ...], distribution: str, device: torch.device) -> None:
        self.E, self.M, self.N, self.K = shape
        self.device = device
        self.sizes = group_sizes(self.E, self.M, distribution)
        self.offsets = torch.tensor(self.sizes).cumsum(0).to(device, torch.int32)

    @property
    def operations(self) -> float:
        """Operations of one product."""
        return 2.0 * self.M * self.N * self.K

    @cached_property
    def x(self) -> Tensor:
        return normal(self.M, self.K, self.device, 0)

    @cached_property
    def w(self) -> Tensor:
        return normal(self.E * self.N, self.K, self.device, 1).view(self.E, self.N, self.K).mT

    @cached_property
    def g(self) -> Tensor:
        return normal(self.M, self.N, self.device, 2)

    def spans(self) -> list[tuple[int, int]]:
        """The first token of each expert, and the one after its last."""
        return list(pairwise(accumulate(self.sizes, initial=0)))

    def out_snr_db(self, found: Tensor) -> float:
        """SNR of out against float64, over rows that are spread over each group."""
        expected, rows = [], []
        each = max(1, _SAMPLES // self.E)
        for expert, (start, stop) in enumerate(self.spans()):
            picked = torch.linspace(start, stop - 1, min(each, stop - start)).long().to(self.device)
            rows.append(picked)
            expected.append(self.x[picked].double() @ self.w[expert].double())
        return snr_db(torch.cat(expected), found[torch.cat(rows)])

    def wgrad_snr_db(self, found: Tensor) -> float:
        """SNR of a gradient `(E, N, K)` against float64, over rows that are spread over each expert's matrix."""
        rows = torch.linspace(0, self.N - 1, min(self.N, 64)).long().to(self.device)
        expected = [self.g[start:stop, rows].double().mT @ self.x[start:stop].double() for start, stop in self.spans()]
        return snr_db(torch.cat(expected), found[:, rows].flatten(0, 1))


class CountedExperts:
    """`out (E, M, N) = x (E, M, K) @ w (E, K, N)` of each expert's first rows, some 0.7 to 1.3 of the mean `C`.

    So DeepGEMM draws its own counts. The shape is `(E, M, C, N, K)`, and w is stored as `(E, N, K)`.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.E, self.M, self.mean, self.N, self.K = shape
        self.device, drawn = device, random.Random(0)
        self.sizes = [min(int(self.mean * drawn.uniform(0.7, 1.3)), self.M) for _ in range(self.E)]
        self.counts = torch.tensor(self.sizes).to(device, torch.int32)

    @property
    def operations(self) -> float:
        """Operations of one product."""
        return 2.0 * sum(self.sizes) * self.N * self.K

    @cached_property
    def x(self) -> Tensor:
        return normal(self.E * self.M, self.K, self.device, 0).view(self.E, self.M, self.K)

    @cached_property
    def w(self) -> Tensor:
        return normal(self.E * self.N, self.K, self.device, 1).view(self.E, self.N, self.K).mT

    def rows(self, x: Tensor) -> Tensor:
        """The first rows of each expert, one expert after the other."""
        return torch.cat([x[expert, :size] for expert, size in enumerate(self.sizes)])

    def out_snr_db(self, found: Tensor) -> float:
        """SNR of out, `(E, M, N)` or its first rows alone, against float64, over rows spread over each expert's."""
        each, expected, rows = max(1, _SAMPLES // self.E), [], []
        found = self.rows(found) if found.ndim == 3 else found
        for expert, (start, stop) in enumerate(pairwise(accumulate(self.sizes, initial=0))):
            picked = torch.linspace(0, stop - start - 1, min(each, stop - start)).long().to(self.device)
            rows.append(start + picked)
            expected.append(self.x[expert, picked].double() @ self.w[expert].double())
        return snr_db(torch.cat(expected), found[torch.cat(rows)])
