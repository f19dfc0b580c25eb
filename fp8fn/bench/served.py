"""transformers' own `generate` with a static cache, as ways of `python -m fp8fn bench generate`."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8fn.bench.llama import Size
from fp8fn.bench.train import attention, models
from fp8fn.decoding import decoding_loop
from fp8fn.timing import Clock
from fp8fn.weights.quantize import quantize_weights

# Tokens of a prompt, in every loop.
PROMPT: Final = 16
# Options of `mode="reduce-overhead"`, without guards of modules.
UNGUARDED: Final = {
    "triton.cudagraphs": True, "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to serve the model: the loop of our own that has the same weights, and what is compiled.

    Attributes:
        forward: whether `model.forward` is compiled, for the prefill too; else `generate` compiles the step alone.
        guards: whether torch.compile's guards of modules are evaluated before each step.
        decoding_loop: whether `fp8fn.decoding_loop` decodes.
        on_request: whether a run measures it only where it is named.
    """

    loop: str
    forward: bool = False
    guards: bool = True
    decoding_loop: bool = False
    on_request: bool = False

    @property
    def graphs(self) -> int:
        """The most graphs that may be made. An equal model that was measured before leaves its graph of the step.

        Logits are compared over fewer tokens, for whose cache a kernel of attention may need another graph.
        """
        return 2 if self.forward or self.decoding_loop else 1


SERVED: Final[Mapping[str, Way]] = {
    "transformers bf16": Way(loop="bf16"),
    "transformers A16W8": Way(loop="A16W8"),
    "transformers bf16 + loop": Way(loop="bf16", decoding_loop=True),
    "transformers A16W8 + loop": Way(loop="A16W8", decoding_loop=True),
    "transformers A16W8, forward": Way(loop="A16W8", forward=True, on_request=True),
    "transformers bf16, unguarded": Way(loop="bf16", guards=False, on_request=True),
    "transformers A16W8, unguarded": Way(loop="A16W8", guards=False, on_request=True),
}


def counts() -> Counter[str]:
    """torch.compile's counters: graphs made, graphs outside CUDA graphs, and tensors that CUDA graphs copy."""
    stats, inductor = (torch._dynamo.utils.counters[name] for name in ("stats", "inductor"))
    return Counter(
        compiled=stats["unique_graphs"],
        skipped=inductor["cudagraph_skips"],
        copied=inductor["cudagraph_recorded_non_static_inputs"],
    )


class Served:
    """transformers' LlamaForCausalLM with random weights, and its greedy `generate`."""

    def __init__(self, way: str, size: Size, batch: int, context: int, device: torch.device) -> None:
        self.way, self.batch, self.device = SERVED[way], batch, device
        self.size, self.context = models.Size(**dataclasses.asdict(size)), context
        self.counts: Counter[str] = Counter()
        self.model: Any = self._bf16()
        if self.way.loop != "bf16":
            quantize_weights(self.model)
        self.options: dict[str, Any] = {
            "do_sample": False, "use_cache": True, "pad_token_id": 0, "cache_implementation": "static",
        }  # fmt: skip
        if self.way.forward:
            self.model.forward = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)
        elif self.way.decoding_loop:
            self.options["custom_generate"] = decoding_loop
        else:
            how = {"mode": "reduce-overhead"} if self.way.guards else {"mode": None, "options": UNGUARDED}
            compiled = importlib.import_module("transformers").CompileConfig(fullgraph=True, **how)
            compiled._compile_all_devices = True  # on a CPU, too
            self.options["compile_config"] = compiled

    def _bf16(self) -> nn.Module:
        return models.build(self.size, self.context, attention.MASKED, self.device, seed=0).eval()

    def generate(self, prompt: Tensor, steps: int) -> Tensor:
        """The tokens `(B, steps + 1)` after `prompt (B, PROMPT)`, as many as a loop of `steps` steps makes."""
        tokens: Tensor = self._generate(prompt, steps + 1 - PROMPT)
        return tokens

    def _generate(self, prompt: Tensor, new_tokens: int, **options: Any) -> Any:
        before = counts()
        found = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, **self.options, **options
        )
        self.counts += counts() - before
        return found

    def seconds(self, prompt: Tensor, steps: int, clock: Clock) -> float:
        """Wall seconds of a step that decodes: a call without the time of one that makes the first token alone.

        Both calls set up a cache of one length and run the prefill. `generate` itself waits for the tokens.
        """
        decoded = steps - PROMPT
        return (self._seconds(prompt, 1 + decoded, clock) - self._seconds(prompt, 1, clock)) / decoded

    def _seconds(self, prompt: Tensor, new_tokens: int, clock: Clock) -> float:
        clock.synchronize()
        start = time.perf_counter()
        self._generate(prompt, new_tokens)
        clock.synchronize()
        return time.perf_counter() - start

    def weight_bytes(self) -> int:
        return models.weight_bytes(self.model)

    def compared(self, prompt: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits of `generate`, those of eager bf16 after the same tokens, those of the same model in eager, tokens.

        The first two are `(N, vocabulary)`, the third one `(steps, B, vocabulary)`, the tokens `(steps, B)`. Eager
        logits are of whole sequences, without a cache.
        """
        new_tokens = steps + 1 - PROMPT
        made = self._generate(prompt, new_tokens, output_logits=True, return_dict_in_generate=True)
        logits, sequences = torch.stack(made.logits), made.sequences

        def eager(model: Any) -> Tensor:
            forward = type(model).forward  # not the one that was assigned to the model
            found: Tensor = forward(model, input_ids=sequences[:, :-1], use_cache=False).logits
            return found[:, -new_tokens:].transpose(0, 1)

        reference = eager(self._bf16())
        return logits.flatten(0, 1), reference.flatten(0, 1), eager(self.model), sequences[:, -new_tokens:].T
