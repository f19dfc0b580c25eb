"""One variant in a process of its own: it compiles a model, trains it for some steps, and times steps when told to."""

from __future__ import annotations

import gc
import importlib
import itertools
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.bench.train import attention, kept, kinds
from fp8fn.bench.train.models import Size, batches, build
from fp8fn.bench.train.variants import UnavailableError, Variant, parse
from fp8fn.demo.saved import tensors_saved
from fp8fn.timing import reason

_LEARNING_RATE: Final = 1e-4
# Steps at the begin of a turn that are not timed: the allocator has to ask the driver for memory again.
_UNTIMED: Final = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The model, the batch and the attention that all variants share. `steps` are trained before any timing.

    With `ones` a call also gets an `attention_mask` that says that the batch has no padding. With `varied` shorter
    sequences come first, so that the graph of all steps has a variable for their length.
    """

    size: Size
    batch: int
    sequence: int
    attention: str
    kernel: str
    steps: int
    device: str
    seed: int = 0
    ones: bool = False
    varied: bool = False


class Trainer:
    """A compiled model with its optimizer."""

    def __init__(self, setting: Setting, variant: Variant) -> None:
        self.setting, self.device = setting, torch.device(setting.device)
        self.on_gpu = self.device.type == "cuda"
        attention.register()
        self.model = build(setting.size, setting.sequence, setting.attention, self.device, setting.seed)
        self.compiled = variant.compile(self.model, self.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, fused=True)
        drawn = batches(setting.size, setting.batch, setting.sequence, setting.steps)
        self.batches = [tokens.to(self.device) for tokens in drawn]

    def prepare(self) -> dict[str, Any]:
        """The first step with its compilation, the memory, and the losses of the training steps."""
        from torch._dynamo.utils import counters

        begin = time.perf_counter()
        if self.setting.varied:
            self.forward_backward(self.batches[0][:, : 3 * self.setting.sequence // 4].contiguous())
        self.forward_backward(self.batches[0])
        self.synchronize()
        first = time.perf_counter() - begin
        inductor = counters["inductor"]
        found: dict[str, Any] = {
            "first_step_s": first,
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "cached_graphs": inductor["fxgraph_cache_hit"],
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }
        self.forward_backward(self.batches[0])
        found |= self.kept() | self.forward_backward_peak()
        found["losses"] = [self.warmed_up_step(number) for number in range(len(self.batches))]
        self.rest()
        found["step_peak_bytes"] = self.peak(lambda: self.train(self.batches[0]))
        self.rest()
        return found

    def forward_backward(self, tokens: Tensor) -> Tensor:
        loss = self.loss(tokens)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def loss(self, tokens: Tensor) -> Tensor:
        mask = {"attention_mask": torch.ones_like(tokens)} if self.setting.ones else {}
        with attention.using(self.setting.kernel):
            loss: Tensor = self.compiled(input_ids=tokens, labels=tokens, **mask).loss
        return loss

    def warmed_up_step(self, number: int) -> float:
        """Train by batch `number`, and return its loss. The learning rate rises to its full value at the last batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * (number + 1) / len(self.batches)
        return float(self.train(self.batches[number]))

    def train(self, tokens: Tensor) -> Tensor:
        loss = self.loss(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def kept(self) -> dict[str, Any]:
        """Bytes that stand between forward and backward, all of them, and those of the layers, with their tensors."""
        tokens, size = self.batches[0], self.setting.size
        before = self.allocated()
        loss = self.loss(tokens)
        after = self.allocated()
        loss.backward()
        del loss
        self.model.zero_grad(set_to_none=True)
        saved = tensors_saved(self.model, lambda: self.loss(tokens))
        listing = kept.listing(kept.of_layers(saved, tokens.numel(), size.vocabulary))
        layers = sum(row["bytes"] for row in listing)
        return {
            "kept_bytes": after - before if self.on_gpu else sum(each.untyped_storage().nbytes() for each in saved),
            "kept_bytes_per_token_and_layer": layers / tokens.numel() / size.layers,
            "kept": listing,
        }

    def forward_backward_peak(self) -> dict[str, Any]:
        return {"peak_bytes": self.peak(lambda: self.forward_backward(self.batches[0]))}

    def peak(self, call: Callable[[], object]) -> int | None:
        """The most memory that tensors took during `call`, weights included; None on a CPU."""
        if not self.on_gpu:
            call()
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device)

    def turn(self, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of each of `repeats` forwards and backwards, and of each of `repeats` steps with AdamW."""
        tokens = self.batches[-1]
        found: dict[str, list[float]] = {}
        for name, call in (("forward_backward_ms", self.forward_backward), ("step_ms", self.train)):
            for _ in range(_UNTIMED):
                call(tokens)
            found[name] = self.milliseconds(partial(call, tokens), repeats)
        self.rest()
        return found

    def milliseconds(self, call: Callable[[], object], repeats: int) -> list[float]:
        if not self.on_gpu:
            times = [time.perf_counter()]
            for _ in range(repeats):
                call()
                times.append(time.perf_counter())
            return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        self.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        self.synchronize()
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]

    def profile(self, steps: int = 3) -> dict[str, Any]:
        """Milliseconds of a step with AdamW by kind of kernel, with the longest kernels of each kind."""
        for _ in range(_UNTIMED):
            self.train(self.batches[-1])
        found = kinds.profiled(lambda: self.train(self.batches[-1]), self.device, steps)
        self.rest()
        return found

    def rest(self) -> None:
        """Give the memory back that only a step needs, so that other variants' processes have it."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def idle(self) -> dict[str, Any]:
        """Drop the optimizer's state, which the next step makes anew, and say what is still reserved."""
        self.optimizer.state.clear()
        self.rest()
        return {"reserved_bytes": torch.cuda.memory_reserved(self.device) if self.on_gpu else 0}

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class WorkerError(Exception):
    """A worker's call failed. The message is the error's, as one line."""


class Worker:
    """A process with a `Trainer`. It starts to import at once, and makes its model at the first call."""

    def __init__(self, setting: Setting, variant: Variant) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, setting, variant.name), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """The result of `Trainer.method(*args)`. Raises `UnavailableError`, or `WorkerError` where the call failed."""
        try:
            self.connection.send((method, args))
            outcome, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            raise WorkerError(f"the process ended with exit code {self.process.exitcode}") from None
        if outcome == "unavailable":
            raise UnavailableError(value)
        if outcome == "failed":
            raise WorkerError(value)
        return value

    def close(self) -> None:
        self.connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, setting: Setting, name: str) -> None:
    """Answers calls until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes the connection
    importlib.import_module("transformers").logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    trainer: Trainer | None = None
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            trainer = trainer or Trainer(setting, parse(name))
            connection.send(("value", getattr(trainer, method)(*args)))
        except UnavailableError as error:
            connection.send(("unavailable", str(error)))
        except Exception as error:
            connection.send(("failed", reason(error)))


def attention_times(size: Size, batch: int, sequence: int, device: str) -> Mapping[str, float | str]:
    """`attention.times` in a process of its own, whose context is gone when the variants start."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(attention.times, (size, batch, sequence, torch.device(device)))
