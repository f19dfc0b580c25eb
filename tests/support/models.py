"""Toy sizes of language models, and sentences to train them on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fp8fn

TOKENS, WIDTH, VOCABULARY, STEPS = 64, 256, 512, 50

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip


def all_but_logits(site: fp8fn.Site) -> bool:
    """Leaves out `lm_head`, as the backend does by itself, but no small weight: all sizes are a toy's here."""
    return "lm_head" not in site.weight


SMALL, LOGITS = "small: N=4 is under 128", "where said no"


def sentences() -> Iterator[Tensor]:
    """Batches of a chain in which a token has one successor in four of five cases."""
    generator = torch.Generator().manual_seed(1)
    successor = torch.randint(VOCABULARY, (VOCABULARY,), generator=generator)
    while True:
        words = [torch.randint(64, (2, 1), generator=generator)]
        while len(words) < TOKENS:
            other = torch.randint(64, (2, 1), generator=generator)
            jumps = torch.rand(2, 1, generator=generator) < 0.2
            words.append(torch.where(jumps, other, successor[words[-1]]))
        yield torch.cat(words, 1)
