"""The decoding method for transformers' `generate`: its tokens, its end, and what it refuses."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn import decoding
from fp8fn.decoding import decoding_loop
from support.accuracy import snr

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
PROMPT = torch.arange(3, 21).view(2, 9)
MASK = torch.ones_like(PROMPT).index_put((torch.tensor([1]), torch.arange(4)), torch.tensor(0))
EVERY_THIRD = list(range(0, 128, 3))
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "padded": {"do_sample": False, "attention_mask": MASK},
    "sampled": {"do_sample": True, "top_k": 5, "temperature": 0.7},
    "processed": {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 4},
    "ending": {"do_sample": False, "eos_token_id": EVERY_THIRD, "attention_mask": torch.ones_like(PROMPT)},
    "several": {"do_sample": True, "num_return_sequences": 2, "attention_mask": MASK},
}
# Inductor's advice for float32, and transformers' own.
on_a_gpu = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:You are calling .generate")


def made(kind: str, **changed: Any) -> Any:
    configs: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
        "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
        "bloom": (transformers.BloomConfig, transformers.BloomForCausalLM, {"n_layer": 2, "n_head": 4}),
        "roformer": (transformers.RoFormerConfig, transformers.RoFormerForCausalLM, {"is_decoder": True}),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {}),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {"head_dim": 32, "sliding_window": 8}),
    }
    config, model, more = configs[kind]
    torch.manual_seed(0)
    return model(config(**{**SIZES, **more, **changed})).eval()


def generated(model: Any, loop: bool, prompt: Tensor = PROMPT, **asked: Any) -> Any:
    options = {"cache_implementation": "static", "max_new_tokens": 12, "pad_token_id": 0, "disable_compile": True}
    chosen = {"custom_generate": decoding_loop} if loop else {}
    torch.manual_seed(3)
    return model.generate(prompt, **{**options, **chosen, **asked})


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt_neox"])
def test_the_tokens_of_generate(kind: str, asked: str) -> None:
    model = made(kind)
    wanted = generated(model, False, **ASKED[asked])
    assert torch.equal(generated(model, True, **ASKED[asked]), wanted)
    if asked == "ending":
        assert wanted.shape[1] < PROMPT.shape[1] + 12
        assert not torch.equal(wanted[:, -1] % 3 == 0, wanted[:, -2] % 3 == 0)  # one was padded after its end


@pytest.mark.parametrize("length", [20, 40])
def test_a_mask_is_as_long_as_the_cache(length: int) -> None:
    """BLOOM computes the bias of each place in the cache from the mask."""
    model = made("bloom")
    asked: dict[str, Any] = {"attention_mask": MASK, "do_sample": False}
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    found = generated(model, True, **asked, past_key_values=cache, cache_implementation=None)
    assert torch.equal(found, generated(model, False, **asked))


def test_a_prompt_of_int32() -> None:
    found, wanted = (generated(made("llama"), loop, PROMPT.int(), do_sample=False) for loop in (True, False))
    assert found.dtype == wanted.dtype == torch.long
    assert torch.equal(found, wanted)


def test_what_generate_returns_beside_tokens() -> None:
    model = made("llama")
    asked: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "temperature": 0.5,
    }
    found, wanted = (generated(model, loop, **asked, do_sample=True) for loop in (True, False))
    assert type(found) is type(wanted)
    assert torch.equal(found.sequences, wanted.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == 12
        for one, other in zip(found[name], wanted[name], strict=True):
            assert torch.equal(one, other), name
    assert int(found.past_key_values.get_seq_length()) == int(wanted.past_key_values.get_seq_length()) == 20
    plain = generated(model, True, return_dict_in_generate=True)
    assert plain.scores is None
    assert plain.logits is None


def test_a_compiled_step_serves_fp8_weights_and_prompts_of_every_length() -> None:
    """It is compiled once for all of them."""
    model = made("llama")
    fp8fn.quantize_weights(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (5, 6, 3, 9):  # transformers' caches do not become shorter
        prompt = PROMPT[:, :length]
        wanted = generated(model, False, prompt, attention_mask=torch.ones_like(prompt), do_sample=False)
        found = generated(
            model, True, prompt, attention_mask=torch.ones_like(prompt), do_sample=False, disable_compile=False
        )
        assert torch.equal(found, wanted)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    how, step, _ = decoding._STEPS[model][2]
    assert how == {"backend": "fp8fn", "fullgraph": True, "options": {"where": []}}
    config = transformers.CompileConfig(backend="eager")
    asked = {"compile_config": config, "disable_compile": False, "do_sample": False}
    assert torch.equal(generated(model, True, **asked), generated(model, False, do_sample=False))
    assert decoding._STEPS[model][2].step is not step
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_a_step_of_more_variants_than_pytorch_keeps() -> None:
    """An adapter of PEFT is a variant, too."""
    model = made("llama")
    config = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3}
    torch._dynamo.reset()
    for scale in range(1, 11):
        for layer in model.model.layers:
            layer.self_attn.scaling = scale / 8
        wanted = generated(model, False, **asked)
        found = generated(model, True, **asked, compile_config=config, disable_compile=False)
        assert torch.equal(found, wanted)


def test_a_hook_after_the_step_was_compiled() -> None:
    model = made("llama")
    config = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    for _ in range(2):
        found = generated(model, True, compile_config=config, disable_compile=False, do_sample=False)
        assert torch.equal(found, generated(model, False, do_sample=False))
        model.lm_head.register_forward_hook(lambda module, inputs, output: -output)


def test_a_step_of_more_than_one_graph() -> None:
    """Dynamic NTK and RoFormer read positions in Python; a loop over experts reads which of them are chosen."""
    model = made("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    experts = made("mixtral")
    experts.set_experts_implementation("eager")
    for each in (model, experts, made("roformer")):
        with pytest.raises(ValueError, match=r"more than one graph for torch\.compile; pass disable_compile=True"):
            generated(each, True, disable_compile=False)
        assert torch.equal(generated(each, True, do_sample=False), generated(each, False, do_sample=False))


class Event:
    """An event of a GPU that reaches one more step at each query."""

    reached, made = 0, 0

    def __init__(self) -> None:
        Event.made += 1
        self.number = Event.made

    def record(self) -> None: ...

    def query(self) -> bool:
        Event.reached += 1
        return Event.reached >= self.number

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.number)


class Generator:
    """A generator of random numbers of a GPU."""

    offset = 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("lag", "last"), [(0, 3), (2, 3), (9, 3), (3, 8), (9, None)])
def test_the_end_is_found_late_and_counted_right(
    lag: int, last: int | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lag`: steps that the GPU is behind. The second sequence ends one step before the first one.

    Ranks that compute a step together enqueue equally many, however far each one's GPU is. What later steps drew from
    the generator of random numbers is given back.
    """
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    Event.reached, Event.made = -lag, 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    end = decoding._End(torch.zeros(2, 1, dtype=torch.long), ahead=4)
    end.waits, end._flags = False, [torch.empty((), dtype=torch.bool) for _ in range(5)]
    end._generator = generator = Generator()
    for step in range(1, 13):
        done = torch.tensor([step == last, step + 1 == last])
        generator.offset += 4
        end.drew()
        chosen = end.padded(torch.tensor([7, 7]), torch.tensor(1))
        over = last is not None and step > last
        assert chosen.tolist() == [1 if over else 7, 1 if last is not None and step >= last else 7]
        if end.reached(done):
            break
    assert end.steps() == (last or 12)
    assert step <= (last or 12) + 4
    assert step == 12 or lag or step == last or ranks > 1
    if ranks > 1:
        assert step == min(12, (last or 12) + 4)
    assert generator.offset == 4 * (last or 12)


class Stream:
    """A stream of a GPU."""

    device = "cpu"

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    """A CUDA graph, whose capture runs the step."""

    ended = 0

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        assert pool is None or (pool == (0, 1) and not gc.isenabled())

    def capture_end(self) -> None:
        self.ended += 1


def captured(step: Callable[..., Any], x: Tensor, patch: pytest.MonkeyPatch) -> Any:
    graph, current = Graph(), Stream()
    for name, value in {
        "CUDAGraph": lambda: graph, "Stream": lambda _: Stream(), "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _: current,
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, value)
    patch.setattr(decoding, "_workspace", lambda _: (Stream(), SimpleNamespace(pool=lambda: (0, 1))))
    steps = object.__new__(decoding._Steps)
    steps.token, steps.inputs, steps.positions = x, (x,), None  # type: ignore[assignment]
    steps.compiled, steps.workspace = decoding._Compiled({}, step, set()), None
    try:
        steps._capture()
    finally:
        assert graph.ended == 1
        assert gc.isenabled()
        assert not decoding._CAPTURING.locked()
    return steps.logits


@pytest.mark.parametrize("length", [3, 10, 14, 21])
@pytest.mark.parametrize("eos", [None, EVERY_THIRD])
def test_a_length_of_the_callers(length: int, eos: list[int] | None) -> None:
    """It ends the call after one token at least, also where no criterion reads tokens."""
    model = made("llama")
    model.generation_config.eos_token_id = None
    asked = {"stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(length)])}
    found, wanted = (generated(model, loop, do_sample=False, eos_token_id=eos, **asked) for loop in (True, False))
    assert torch.equal(found, wanted)
    assert eos or found.shape[1] == max(10, min(length, 21))


def test_a_length_past_the_positions_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama", max_position_embeddings=15)
    model.generation_config.eos_token_id = None
    logging.getLogger("transformers").propagate = True
    generated(model, True, do_sample=False)
    assert "exceeded the model's predefined maximum length (15)" in caplog.text


class Replayed:
    """A CUDA graph of a step, on the CPU: a replay runs the step."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def replay(self) -> None:
        assert decoding._CAPTURING.locked()  # of another thread's capture, PyTorch's generator refuses a replay
        self.steps._advance()
        self.steps.logits = self.steps.compiled.step(*self.steps.inputs)


def test_every_step_is_a_replay_and_the_first_call_tries_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that runs before its capture leaves no trace, also where a hook was added after the last call.

    A capture would compile what `torch.compiler.reset` forgot.
    """
    ran, fail = [], [False]

    class Steps(decoding._Steps):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.captured = True

        def finish(self) -> None: ...

        def _run(self) -> Tensor:
            ran.append(self.positions.clone())  # type: ignore[union-attr]
            return super()._run()

        def _capture(self) -> Any:
            if fail.pop():
                raise torch._dynamo.exc.RecompileError
            fail.append(False)
            return Replayed(self)

    monkeypatch.setattr(decoding, "_Steps", Steps)
    monkeypatch.setattr(decoding, "_COMPILED_BY", {"backend": "eager", "fullgraph": True})
    model, counts = made("llama"), []
    for asked in ("greedy", "greedy", "greedy", "padded", "padded"):
        given = {**ASKED[asked], "do_sample": False}
        if len(counts) == 4:
            torch.compiler.reset()
        if len(counts) == 2:
            fail[:] = [False, True]
        wanted = generated(model, False, **given)
        found = generated(model, True, **given, disable_compile=False)
        assert torch.equal(found, wanted)
        counts.append(len(ran))
    assert counts == [1, 1, 2, 3, 4]  # the padded prompt has a mask


def test_random_numbers_are_drawn_while_no_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's generator refuses to draw in the meantime."""
    drawn, multinomial = [], torch.multinomial

    def checked(*given: Any) -> Tensor:
        drawn.append(decoding._CAPTURING.locked())
        return multinomial(*given)

    monkeypatch.setattr(torch, "multinomial", checked)
    generated(made("llama"), True, **ASKED["sampled"])
    assert drawn == [True] * 12


@pytest.mark.parametrize("fails", [False, True])
def test_calls_at_the_same_time_share_no_memory(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one graph computes would lie where that of another thread writes. A call that fails lends its memory too."""
    for name, value in {"CUDAGraph": Graph, "Stream": lambda _: Stream(), "current_stream": lambda _: Stream()}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(decoding, "_IDLE", {})
    model, beside = made("llama"), []

    class Steps(decoding._Steps):
        def after(self, *given: Any) -> Tensor:
            self.workspace = self.workspace or decoding._workspace(Stream())
            beside.append(self.workspace)
            return super().after(*given)

    def during(tokens: Tensor, scores: Tensor) -> Tensor:
        if len(beside) == 3:
            generated(model, True, max_new_tokens=3)
            if fails:
                raise RuntimeError("of a processor")
        return scores

    monkeypatch.setattr(decoding, "_Steps", Steps)
    expected = pytest.raises(RuntimeError, match="of a processor") if fails else contextlib.nullcontext()
    with expected:
        generated(model, True, max_new_tokens=6, logits_processor=transformers.LogitsProcessorList([during]))
    assert [each is beside[0] for each in beside] == [True] * 3 + [False] * 2 + [True] * (0 if fails else 2)
    assert beside[3] is beside[4]
    assert set(map(id, decoding._IDLE["cpu"])) == {id(beside[0]), id(beside[3])}


def test_other_threads_compile_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.compile(lambda x: x + 1, backend="eager")
    other = torch.compile(lambda x: x + 2, backend="eager")
    with ThreadPoolExecutor(1) as thread:

        def both(x: Tensor) -> Any:
            return step(x), thread.submit(other, x).result()

        step(torch.zeros(2))
        assert torch.equal(
            torch.stack(captured(both, torch.zeros(2), monkeypatch)), torch.tensor([[1.0], [2.0]]).expand(2, 2)
        )


def test_a_captured_step_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.compile(lambda x: x + 1, backend="eager")
    step(torch.zeros(2))
    with pytest.raises(torch._dynamo.exc.RecompileError):
        captured(step, torch.zeros(2, dtype=torch.long), monkeypatch)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 2}, "generate's mode is beam_search; it decodes greedily or samples, with num_beams=1"),
        (
            {"cache_implementation": None},
            "the cache has a DynamicLayer; it takes transformers 5's StaticLayers: pass cache_implementation=",
        ),
        ({"use_cache": False, "cache_implementation": None}, "the cache has a NoneType; "),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True; leave it out"),
        ({"inputs_embeds": torch.zeros(2, 9, 128)}, "the model also takes inputs_embeds; it serves decoders"),
    ],
    ids=["beams", "growing", "none", "attentions", "embeddings"],
)  # fmt: skip
def test_what_it_refuses(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"decoding_loop: {re.escape(message)}"):
        generated(made("llama"), True, **asked)


def test_models_that_leave_the_cache_are_refused() -> None:
    """Phi-3's rotary embedding changes after 16 tokens: `generate` then computes all keys and values again."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"long_factor": [1.0 + i for i in range(16)], "short_factor": [1.0] * 16}
    model = made("phi3", rope_parameters=rope, original_max_position_embeddings=16, pad_token_id=0)
    assert torch.equal(generated(model, True, max_new_tokens=8), generated(model, False, max_new_tokens=8))
    for prompt, new in ((PROMPT, 9), (torch.arange(3, 37).view(2, 17), 1)):
        with pytest.raises(ValueError, match="the model computes its cache again after 16 tokens; ask for fewer"):
            generated(model, True, prompt, max_new_tokens=new)
    config = transformers.OpenAIGPTConfig(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="the model leaves the cache aside; it serves decoders that write"):
        generated(transformers.OpenAIGPTLMHeadModel(config).eval(), True)
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match="the model has an encoder; it serves decoders alone"):
        generated(transformers.T5ForConditionalGeneration(config).eval(), True, decoder_start_token_id=0)


def test_other_models_and_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="the cache has a StaticSlidingWindowLayer"):  # it counts in Python
        generated(made("gemma2"), True)
    model = made("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    first = generated(model, True, past_key_values=cache, cache_implementation=None)
    assert int(cache.get_seq_length()) == first.shape[1] - 1
    with pytest.raises(ValueError, match="the cache holds 20 tokens; pass an empty one"):
        generated(model, True, past_key_values=cache, cache_implementation=None)
    cache = type("Counting", (transformers.StaticCache,), {})(config=model.config, max_cache_len=40)
    with pytest.raises(ValueError, match="the cache is a Counting; it takes transformers' own StaticCache"):
        generated(model, True, past_key_values=cache, cache_implementation=None)
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ValueError, match=re.escape("the model is on devices ['0', '1']; pass disable_compile=True")):
        generated(model, True, disable_compile=False)
    assert torch.equal(generated(model, True), generated(model, False))
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="the model's attention is 'flex_attention'; it takes 'sdpa' and 'eager'"):
        generated(model, True)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "FP8"])
def test_tokens_on_a_gpu(fp8: bool) -> None:
    """Captured from the third step on, with the host ahead: for two calls, and with an end that is found late."""
    model = made("llama").cuda()
    if fp8:
        model = model.bfloat16()
        fp8fn.quantize_weights(model)
    for asked in ("greedy", "padded", "ending", "greedy"):
        given = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in ASKED[asked].items()}
        given |= {"max_new_tokens": 40, "return_dict_in_generate": True, "output_logits": True}
        wanted = generated(model, False, PROMPT.cuda(), **given)
        kept = generated(model, True, PROMPT.cuda(), **given, disable_compile=False)
        assert snr(torch.stack(kept.logits)[:4], torch.stack(wanted.logits)[:4]) > (25 if fp8 else 60)
        del given["return_dict_in_generate"], given["output_logits"]
        found = generated(model, True, PROMPT.cuda(), **given, disable_compile=False)
        assert torch.equal(found, kept.sequences)
        if not fp8:
            assert torch.equal(found, wanted.sequences)
    assert decoding._STEPS[model][2].how["backend"] == "fp8fn"


@pytest.mark.gpu
@on_a_gpu
def test_a_prompt_on_the_cpu() -> None:
    """`generate` chooses tokens where the prompt is, and so does the loop."""
    model = made("llama").cuda()
    for asked in ("padded", "ending", "sampled"):
        assert torch.equal(generated(model, True, **ASKED[asked]), generated(model, False, **ASKED[asked]))


@pytest.mark.gpu
@on_a_gpu
def test_numbers_after_sampling_on_a_gpu() -> None:
    """A program draws the same random numbers after a call whose end was found late."""
    model = made("llama").cuda()
    asked: dict[str, Any] = {"do_sample": True, "eos_token_id": EVERY_THIRD, "max_new_tokens": 40}
    following = []
    for loop in (False, True):
        generated(model, loop, PROMPT.cuda(), **asked, disable_compile=not loop)
        following.append(torch.rand(4, device="cuda"))
    assert torch.equal(*following)
