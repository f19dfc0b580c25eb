"""The sizes of the demo: each has a model, a batch, a number of steps and a learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fp8fn.demo.model import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and how to train it; `batch` counts sequences of `model.context` bytes.

    `deviation` is the standard deviation, over seeds, of the relative difference between the losses in bf16 and in FP8,
    where it was measured (without experts by `bench loss`), else 0.
    """

    model: GPTConfig
    batch: int
    steps: int
    learning_rate: float
    summary: str
    deviation: float = 0.0


# N and K of every product but the head's are multiples of 512, the least that the backend takes by default.
PRESETS: Final = {
    "tiny": Preset(
        model=GPTConfig(context=128, dim=512, layers=1, heads=4, hidden=1024),
        batch=8,
        steps=160,
        learning_rate=1e-3,
        summary="3M parameters, for a CPU",
    ),
    "small": Preset(
        model=GPTConfig(context=1024, dim=768, layers=12, heads=12, hidden=2048),
        batch=16,
        steps=400,
        learning_rate=6e-4,
        summary="85M parameters",
        deviation=0.02,
    ),
    "medium": Preset(
        model=GPTConfig(context=1024, dim=1024, layers=24, heads=16, hidden=2816),
        batch=16,
        steps=300,
        learning_rate=4e-4,
        summary="309M parameters",
    ),
    "1b": Preset(
        model=GPTConfig(context=2048, dim=2048, layers=16, heads=32, hidden=8192),
        batch=8,
        steps=200,
        learning_rate=3e-4,
        summary="1.1B parameters, the shapes of a Llama",
        deviation=0.031,
    ),
}

# With a mixture of experts in each layer.
MIXTURES: Final = {
    "tiny": Preset(
        model=GPTConfig(context=128, dim=512, layers=1, heads=4, hidden=512, experts=8),
        batch=8,
        steps=200,
        learning_rate=1e-3,
        summary="8M parameters, for a CPU",
    ),
    "small": Preset(
        # With 12 layers of 768, two trainings in the same format end 2 % apart: more than the difference that the demo
        # must show. With these 4 layers, seven pairs differ by 0.15 %, with a standard deviation of 0.6 %.
        model=GPTConfig(context=1024, dim=512, layers=4, heads=8, hidden=512, experts=8),
        batch=16,
        steps=500,
        learning_rate=6e-4,
        summary="30M parameters",
        deviation=0.006,
    ),
    "medium": Preset(
        model=GPTConfig(context=1024, dim=768, layers=12, heads=12, hidden=1024, experts=8),
        batch=16,
        steps=500,
        learning_rate=6e-4,
        summary="255M parameters; its final loss varies from run to run",
    ),
}
MODELS: Final = {"gpt": PRESETS, "moe": MIXTURES}


def default_size(model: str, device_type: str) -> str:
    """The preset of `MODELS[model]` that takes minutes on such a device."""
    if device_type != "cuda":
        return "tiny"
    return "1b" if "1b" in MODELS[model] else "small"
