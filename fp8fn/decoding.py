"""`decoding_loop`: a decoding method for transformers' `generate` that does not wait for each token.

transformers prepares each step in Python, and reads after each step whether all sequences are finished. Meanwhile the
GPU waits, for as long as a step takes where weights are in FP8. Here a step is compiled, from the last token to the
logits, and captured in a CUDA graph. The host enqueues further steps while the GPU computes this one, and reads later
whether the sequences are finished; what was computed in between is dropped.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8fn.ops.kinds import kind_of

_MODES: Final = ("greedy_search", "sample")
_ATTENTION: Final = ("sdpa", "eager")
_INPUTS: Final = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
_UNSUPPORTED: Final = ("output_attentions", "output_hidden_states", "prefill_chunk_size")
# The name by torch.compile of a cache's length, which it would take as a constant and compile each length on its own.
_LENGTH: Final = r"L\['cache'\]\.layers\[\d+\]\.max_cache_len"
# Steps by which the host may be ahead of the GPU.
_AHEAD: Final = 4
# Steps for which a capture pays, which takes as long as a few of them.
_WORTH_CAPTURING: Final = 8
_COMPILED_BY: Final[Mapping[str, Any]] = {"backend": "fp8fn", "fullgraph": True, "options": {"where": []}}

Step = Callable[..., Tensor]


class _Compiled(NamedTuple):
    """A compiled step, how it was compiled, and the shapes of the caches and masks that it has run with."""

    how: Mapping[str, Any]
    step: Step
    shapes: set[Any]


# The compiled steps of each model, by the number of sequences.
_STEPS: Final[weakref.WeakKeyDictionary[Any, dict[int, _Compiled]]] = weakref.WeakKeyDictionary()
_NUMBERS: Final = itertools.count()
# PyTorch captures one graph at a time in a process. Meanwhile its generator of random numbers refuses to draw, and
# refuses replays, also in other threads.
_CAPTURING: Final = threading.Lock()
# What `_workspace` has made for each device and no call uses now.
_IDLE: Final[dict[Any, list[tuple[Any, Any]]]] = {}


@torch.no_grad()
def decoding_loop(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    **model_kwargs: Any,
) -> Any:  # fmt: skip
    """A decoding method for transformers: `model.generate(…, custom_generate=fp8fn.decoding_loop)`.

    It makes the tokens of `generate` without it, greedy or sampled, with the same processors of logits and stopping
    criteria, and needs `cache_implementation="static"`. The step is compiled by `backend="fp8fn"`, where each weight
    keeps its format, and captured in a CUDA graph; a `compile_config` replaces both. transformers hands such a method
    no `streamer`, which gets the prompt alone, and no `tokenizer`: for `stop_strings`, pass a `StopStringCriteria`. The
    arguments are those that `generate` passes.

    Args:
        model: Decoder of transformers whose inputs are tokens, with attention `"sdpa"` or `"eager"`.
        input_ids: Tokens of the prompt.
        logits_processor: Called with the tokens and the logits in float32 at each step.
        stopping_criteria: Called with the tokens after each step.
        generation_config: `disable_compile=True` in it leaves the step in eager mode.
        model_kwargs: Cache, mask and positions.

    Shape:
        - input_ids: `(B, P)`
        - output: `(B, P + T)`, with T tokens that are new

    Returns:
        Tokens; with `return_dict_in_generate` a `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: The loop does not do what `generate` was asked for, such as beams or a cache that grows.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        >>> options = {"cache_implementation": "static", "max_new_tokens": 4, "disable_compile": True}
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> tokens = model.generate(prompt, custom_generate=fp8fn.decoding_loop, **options)
        >>> tokens.shape
        torch.Size([1, 7])
    """
    _check(model, generation_config, model_kwargs)
    with torch.cuda.device_of(input_ids):
        return _decoded(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)


def _decoded(
    model: Any, prompt: Tensor, logits_processor: Any, stopping_criteria: Any, config: Any, given: Mapping[str, Any]
) -> Any:
    cache, first = given["past_key_values"], prompt.shape[1]
    tokens = F.pad(prompt.long(), (0, config.max_length - first))
    logits = _prefill(model, prompt, given)
    steps = _Steps(model, config, tokens, given)
    criteria, lengths = _parted(stopping_criteria)
    most = max(first + 1, min([config.max_length, *(each.max_length for each in lengths)]))
    # A cache that the caller keeps must hold no more than the tokens that are returned.
    kept = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    choice, end = _Choice(config, logits_processor), _End(tokens, 0 if kept else _AHEAD) if criteria else None
    pad = config._pad_token_tensor if any(hasattr(each, "eos_token_id") for each in criteria) else None
    try:
        for place in range(first, most):
            if place > first:
                logits = steps.after(tokens[:, place - 1 : place], most - place)
            chosen = choice.of(logits, tokens[:, :place])
            if end is None:
                tokens[:, place] = chosen
                continue
            if config.do_sample:
                end.drew()
            tokens[:, place] = end.padded(chosen, pad)
            if end.reached(criteria(tokens[:, : place + 1], choice.scores)):
                break
        tokens = tokens[:, : most if end is None else first + end.steps()]
    finally:
        steps.finish()
    for each in lengths:
        each(tokens[:, :-1], None)  # reminds of a length past the model's positions
    return choice.output(tokens, cache) if config.return_dict_in_generate else tokens


def _parted(criteria: Any) -> tuple[Any, list[Any]]:
    """The criteria that read tokens, and those of a length, which the host knows."""
    of_length = importlib.import_module("transformers.generation").MaxLengthCriteria
    lengths = [each for each in criteria if type(each) is of_length]
    return type(criteria)([each for each in criteria if type(each) is not of_length]), lengths


def _prefill(model: Any, prompt: Tensor, given: Mapping[str, Any]) -> Tensor:
    """The logits `(B, vocabulary)` after the prompt."""
    inputs = model.prepare_inputs_for_generation(prompt, is_first_iteration=True, **given)
    outputs = model(**inputs, return_dict=True)
    if getattr(outputs, "past_key_values", None) is not given["past_key_values"]:
        _refuse("the model leaves the cache aside", "it serves decoders that write into the static cache")
    logits: Tensor = outputs.logits[:, -1]
    return logits


def model_step(model: Any, token: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """The logits `(B, vocabulary)` after `token (B, 1)`. The mask is computed in the graph too."""
    given = {} if positions is None else {"position_ids": positions}
    inputs = model.prepare_inputs_for_generation(
        token, past_key_values=cache, attention_mask=mask, use_cache=True, **given
    )
    logits: Tensor = model(**inputs, return_dict=True).logits[:, -1]
    return logits


def _compiled(model: Any, batch: int, how: Mapping[str, Any]) -> _Compiled:
    """`model_step`, compiled once for a model, a number of sequences and a configuration.

    Each is a function of its own, because torch.compile gives up on one that it has compiled eight times.
    """
    steps = _STEPS.setdefault(model, {})
    if batch not in steps or steps[batch].how != how:
        code = model_step.__code__.replace(co_name=f"model_step_{next(_NUMBERS)}")
        steps[batch] = _Compiled(how, torch.compile(FunctionType(code, model_step.__globals__), **how), set())
    return steps[batch]


def _dynamo() -> Any:
    return importlib.import_module("fp8fn.ops.torch_private.dynamo")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: a graph that is destroyed would end a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _workspace(replayed_on: Any) -> tuple[Any, Any]:
    """The stream on which a call's graphs are captured, and a graph in whose memory they lie; `finish` lends them anew.

    cuBLAS keeps up to 32 MiB for each stream that it has seen, and PyTorch the memory of each graph until none is left:
    both anew for each capture would cost gigabytes. Calls at the same time share neither, not even on one stream: what
    a graph computes may lie where another thread's graph writes, which may be replayed before it is read.
    """
    idle = _IDLE.setdefault(replayed_on.device, [])
    if idle:
        return idle.pop()
    stream, first = torch.cuda.Stream(replayed_on.device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first.capture_begin(capture_error_mode="thread_local")
        torch.zeros((), device=replayed_on.device)  # a graph of nothing warns
        first.capture_end()
    return stream, first


def _mark_length(cache: Any, mask: Tensor | None) -> None:
    """Tells torch.compile which sizes other lengths of the cache change."""
    marked = _dynamo().maybe_mark_dynamic
    for layer in cache.layers:
        marked(layer.keys, 2)
        marked(layer.values, 2)
    if mask is not None:
        marked(mask, 1)


class _Steps:
    """The steps after a prompt; on a GPU the replays of a CUDA graph, which cost the host no guards."""

    def __init__(self, model: Any, config: Any, tokens: Tensor, given: Mapping[str, Any]) -> None:
        cache, mask, positions = given["past_key_values"], given.get("attention_mask"), given.get("position_ids")
        length = cache.layers[0].max_cache_len
        if mask is not None:  # what is later than a step's position is hidden anyway
            mask = F.pad(mask, (0, length - mask.shape[1]), value=1)
        self.token = torch.empty_like(tokens[:, :1])
        self.positions = None if positions is None else positions[..., -1:].clone()
        self.inputs = (model, self.token, cache, mask, self.positions)
        self.how = _COMPILED_BY if config.compile_config is None else config.compile_config.to_dict()
        self.compiled = None if config.disable_compile else _compiled(model, len(tokens), self.how)
        self.captured = tokens.is_cuda and not config.disable_compile and config.compile_config is None
        if self.compiled is not None:
            _mark_length(cache, mask)
        self.shape = length, mask is None, None if positions is None else positions.dim()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.workspace: tuple[Any, Any] | None = None

    def after(self, token: Tensor, left: int) -> Tensor:
        """The logits after `token (B, 1)`; `left` steps follow at most. The next call may overwrite them."""
        self.token.copy_(token)
        if self.captured and self.graph is None and left >= _WORTH_CAPTURING:
            self.graph = self._graph()
        if self.graph is None:
            self.logits = self._run()
        else:
            with _CAPTURING:
                self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _run(self) -> Tensor:
        self._advance()
        if self.compiled is None:
            return model_step(*self.inputs)
        dynamo = _dynamo()
        config: Any = torch.compiler.config
        dynamic = config.patch(dynamic_sources=",".join(filter(None, (config.dynamic_sources, _LENGTH))))
        # PyTorch does not look by default whether a module has got a hook since it was compiled.
        with dynamo.settings.patch(skip_nnmodule_hook_guards=False), dynamic:
            try:
                return self.compiled.step(*self.inputs)
            except dynamo.FailOnRecompileLimitHit:
                # The step did not run. PyTorch keeps eight variants of a function: each of PEFT's adapters needs one.
                model, token = self.inputs[:2]
                _STEPS[model].pop(len(token), None)
                self.compiled = _compiled(model, len(token), self.how)
                return self.compiled.step(*self.inputs)
            except (dynamo.Unsupported, dynamo.UserError, dynamo.InternalTorchDynamoError) as error:
                # A range of positions between values of tensors gives an internal error, as in RoFormer.
                what = "the model's step is more than one graph for torch.compile"
                raise ValueError(f"decoding_loop: {what}; pass disable_compile=True") from error

    def _advance(self) -> None:
        if self.positions is not None:
            self.positions += 1

    def finish(self) -> None:
        """Waits for the last steps, past the end too: their graph and its memory are freed now."""
        if self.workspace is not None:
            current = torch.cuda.current_stream(self.token.device)
            current.synchronize()
            with _CAPTURING:
                self.graph = self.logits = None
            _IDLE[current.device].append(self.workspace)

    def _graph(self) -> torch.cuda.CUDAGraph:
        """The graph of a step, which ran before with these shapes, so that nothing is compiled or loaded in a capture.

        A step that would be compiled again all the same depends on what Python counts, and is an error.
        """
        assert self.compiled is not None
        if self.shape in self.compiled.shapes and _dynamo().is_compiled(self.compiled.step):
            try:
                return self._capture()
            except _dynamo().RecompileError:  # a hook was added, or an adapter was switched, since it ran
                pass
        self._try_out()
        return self._capture()

    def _try_out(self) -> None:
        """Runs the step without an effect: a captured step may add in another order, and each call takes that one."""
        layers = self.inputs[2].layers
        kept = [layer.cumulative_length.clone() for layer in layers]
        self._run()
        for layer, length in zip(layers, kept, strict=True):
            layer.cumulative_length.copy_(length)
        if self.positions is not None:
            self.positions -= 1
        assert self.compiled is not None
        self.compiled.shapes.add(self.shape)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The graph of what advances the positions and of a step; capturing it runs nothing."""
        assert self.compiled is not None
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.token.device)
        with _CAPTURING, _uncollected():
            self.workspace = self.workspace or _workspace(current)
            stream, first = self.workspace
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                graph.capture_begin(first.pool(), capture_error_mode="thread_local")
                try:
                    self._advance()
                    # torch.compiler.set_stance would forbid other threads to compile anything.
                    with _dynamo().settings.patch(error_on_recompile=True):
                        self.logits = self.compiled.step(*self.inputs)
                finally:
                    graph.capture_end()
            current.wait_stream(stream)
        return graph


class _Choice:
    """Chooses the next tokens, and keeps what `generate` was asked to return beside them."""

    def __init__(self, config: Any, processor: Any) -> None:
        self.config, self.processor = config, processor
        returned = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returned and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returned and config.output_logits else None

    def of(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The next tokens `(B,)`; the memory of `logits` may be written by the next step."""
        if not (self.processor or self.config.do_sample or self.config.return_dict_in_generate):
            return logits.argmax(-1).to(tokens.device)
        logits = logits.to(tokens.device, torch.float32, copy=True)
        scores: Tensor = self.processor(tokens, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.config.do_sample:
            likely = scores.softmax(-1)
            with _CAPTURING:
                scores = torch.multinomial(likely, 1)
        return scores.squeeze(1) if self.config.do_sample else scores.argmax(-1)

    def output(self, tokens: Tensor, cache: Any) -> Any:
        made = importlib.import_module("transformers.generation").GenerateDecoderOnlyOutput
        return made(sequences=tokens, scores=self.scores, logits=self.logits, past_key_values=cache)


class _End:
    """Finds the step after which all sequences are finished; on a GPU up to `ahead` steps later."""

    def __init__(self, tokens: Tensor, ahead: int) -> None:
        self.unfinished = torch.ones_like(tokens[:, 0], dtype=torch.bool)
        self.waits = not tokens.is_cuda or ahead == 0
        self._flags = [] if self.waits else [torch.empty((), dtype=torch.bool).pin_memory() for _ in range(ahead + 1)]
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()
        self._enqueued = 0
        self._last: int | None = None
        # Ranks that compute a step together must enqueue equally many, so none may look how far its own GPU is.
        self._polls = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        self._generator: Any = None if self.waits else torch.cuda.default_generators[tokens.device.index]
        self._offsets: list[int] = []

    def drew(self) -> None:
        """Notes how far the step has advanced the GPU's generator of random numbers."""
        if self._generator is not None:
            self._offsets.append(self._generator.get_offset())

    def padded(self, chosen: Tensor, pad: Tensor | None) -> Tensor:
        return chosen if pad is None else torch.where(self.unfinished, chosen, pad)

    def reached(self, done: Tensor) -> bool:
        """Whether a step was the last one, where that is known."""
        self.unfinished &= ~done
        left = self.unfinished.any()
        self._enqueued += 1
        if self.waits:
            self._last = None if left else self._enqueued
            return self._last is not None
        self._flags[self._enqueued % len(self._flags)].copy_(left, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((self._enqueued, event))
        return self._read(len(self._flags) - 1)

    def steps(self) -> int:
        """The number of steps whose tokens count; later ones give back the random numbers that they drew."""
        self._read(0)
        count = self._enqueued if self._last is None else self._last
        if self._offsets and count < self._enqueued:
            self._generator.set_offset(self._offsets[count - 1])
        return count

    def _read(self, most_pending: int) -> bool:
        """Whether a step was the last one; waits until at most so many steps have not been read."""
        pending = self._pending
        while self._last is None and pending:
            step, event = pending[0]
            if len(pending) <= most_pending and not (self._polls and event.query()):
                break
            pending.popleft()
            event.synchronize()
            if not self._flags[step % len(self._flags)]:
                self._last = step
        return self._last is not None


def _refuse(what: str, instead: str) -> NoReturn:
    raise ValueError(f"decoding_loop: {what}; {instead}")


def _check(model: Any, config: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError for what the loop does not do."""
    mode, attention = config.get_generation_mode().value, model.config._attn_implementation
    if model.config.is_encoder_decoder:
        _refuse("the model has an encoder", "it serves decoders alone")
    if mode not in _MODES:
        _refuse(f"generate's mode is {mode}", "it decodes greedily or samples, with num_beams=1")
    cache: Any = given.get("past_key_values")
    generation = importlib.import_module("transformers.generation")
    caches = importlib.import_module("transformers.cache_utils")
    layers = getattr(cache, "layers", ())
    for layer in layers or (cache,):
        # A layer of a sliding window, for one, counts its tokens in Python, which a captured step would not see.
        if type(layer) is not caches.StaticLayer or not isinstance(getattr(layer, "cumulative_length", None), Tensor):
            growing = type(layer) is caches.DynamicLayer  # generate's default
            remedy = ': pass cache_implementation="static"' if growing else ""
            _refuse(f"the cache has {kind_of(layer)}", f"it takes transformers 5's StaticLayers{remedy}")
    if type(cache) not in (caches.Cache, caches.StaticCache):
        _refuse(f"the cache is {kind_of(cache)}", "it takes transformers' own StaticCache")
    if getattr(cache, "offloading", False):
        _refuse("the cache is offloaded to the CPU", 'pass cache_implementation="static"')
    if held := int(cache.get_seq_length()):
        _refuse(f"the cache holds {held} tokens", "pass an empty one")
    if attention not in _ATTENTION:
        _refuse(f"the model's attention is {attention!r}", f"it takes {' and '.join(map(repr, _ATTENTION))}")
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1 and not config.disable_compile:
        _refuse(f"the model is on devices {sorted(map(str, devices))}", "pass disable_compile=True")
    # Phi-3 drops the cache at the length where it changes its rotary embedding; a step does not see that length.
    own = type(model).prepare_inputs_for_generation is not generation.GenerationMixin.prepare_inputs_for_generation
    most = getattr(model.config, "original_max_position_embeddings", None) if own else None
    if most is not None and config.max_length - 1 > most:
        _refuse(
            f"the model computes its cache again after {most} tokens", "ask for fewer, or leave custom_generate out"
        )
    for name in _UNSUPPORTED:
        if getattr(config, name, None):
            _refuse(f"{name}={getattr(config, name)!r}", "leave it out, or leave custom_generate out")
    for name, value in given.items():
        if name not in _INPUTS and value is not None and value is not False:
            _refuse(f"the model also takes {name}", "it serves decoders whose inputs are tokens")
