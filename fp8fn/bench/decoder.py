"""A decoder layer under torch.compile, forward and backward, in bf16 and in FP8: `python -m fp8fn bench decoder`.

The layer has Llama-3.1-8B's shape: grouped-query attention, SwiGLU, two RMSNorms, in plain modules. Shapes are tokens,
hidden and intermediate size; sequences have 4096 tokens. Operations are those of the seven linear layers, 6MNK each,
while the time includes attention and all else. SNR compares the output and the gradient of x with eager bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8fn.bench import command, tables
from fp8fn.bench.accuracy import snr_db
from fp8fn.bench.command import Suite
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case
from fp8fn.timing import Call

SHAPES: Final = ((8192, 4096, 14336),)
_SEQUENCE: Final = 4096
_HEAD: Final = 128
_QUERIES_PER_KEY: Final = 4


class Decoder(nn.Module):
    """`x (B, S, hidden)` → the same shape, without rotary embeddings."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        keys = hidden // _QUERIES_PER_KEY
        sizes = {
            "q": (hidden, hidden), "k": (hidden, keys), "v": (hidden, keys), "o": (hidden, hidden),
            "gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden),
        }  # fmt: skip
        self.linears = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    @property
    def weights(self) -> int:
        return sum(weight.numel() for weight in self.linears.parameters())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        out: Tensor = x + self.linears["down"](F.silu(self.linears["gate"](y)) * self.linears["up"](y))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (self.linears[name](x).unflatten(-1, (-1, _HEAD)).transpose(1, 2) for name in "qkv")
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.linears["o"](heads.transpose(1, 2).flatten(2))
        return out


class Setting:
    """The layer, its input and a gradient, each made at its first use."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.tokens, self.hidden, self.intermediate = shape
        self.device = device

    @cached_property
    def module(self) -> Decoder:
        torch.manual_seed(0)
        module: Decoder = Decoder(self.hidden, self.intermediate).to(self.device, torch.bfloat16)
        return module

    @cached_property
    def x(self) -> Tensor:
        return self._tokens(0).requires_grad_()

    @cached_property
    def g(self) -> Tensor:
        return self._tokens(1)

    def _tokens(self, seed: int) -> Tensor:
        rows = normal(self.tokens, self.hidden, self.device, seed)
        sequences: Tensor = rows.unflatten(0, (-1, min(_SEQUENCE, self.tokens)))
        return sequences

    @cached_property
    def eager(self) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = self.step(self.module)()
        return results

    def step(self, module: Callable[[Tensor], Tensor]) -> Call:
        """The call that runs forward and backward, and returns out and the gradients of x and all weights."""

        def call() -> tuple[Tensor, ...]:
            out = module(self.x)
            return out.detach(), *torch.autograd.grad(out, (self.x, *self.module.parameters()), self.g)

        return call


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(tokens, hidden, intermediate)`."""
    setting = Setting(shape, device)

    def accuracy(found: Any) -> dict[str, float]:
        pairs = zip(("out", "dx"), setting.eager, found, strict=False)
        return {name: snr_db(reference, result) for name, reference, result in pairs}

    def case(peer: str, name: str, **options: Any) -> Case:
        def build() -> Call:
            torch._dynamo.reset()
            return setting.step(torch.compile(setting.module, **options))

        operations = 6.0 * setting.tokens * setting.module.weights
        return Case(peer, name, build, accuracy, operations, 0.0)

    # With a small shape, for a try on a CPU, the default would leave every product in bf16.
    where = {} if min(shape) >= 2048 else {"where": "*"}
    return [
        case("fp8fn", "compiled, FP8", backend="fp8fn", options=where),
        case("torch", "compiled, bf16"),
    ]


SUITES = {"decoder": Suite(SHAPES, cases, tables.products)}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("decoder", __doc__, SUITES, argv)
