"""The decoding method for transformers' `generate`: its tokens, its end, and what it refuses."""

from __future__ import annotations

import gc
import re
import weakref
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


def made(kind: str) -> Any:
    configs = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
        "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {"head_dim": 32, "sliding_window": 8}),
    }
    config, model, more = configs[kind]
    torch.manual_seed(0)
    return model(config(**SIZES, **more)).eval()


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


def test_what_generate_returns_beside_tokens() -> None:
    model = made("llama")
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.5}
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
    """It is compiled once more for another length, and then for none."""
    model = made("llama")
    fp8fn.quantize_weights(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (9, 5, 7, 8):
        prompt = PROMPT[:, :length]
        wanted = generated(model, False, prompt, attention_mask=torch.ones_like(prompt), do_sample=False)
        found = generated(
            model, True, prompt, attention_mask=torch.ones_like(prompt), do_sample=False, disable_compile=False
        )
        assert torch.equal(found, wanted)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    how, step = decoding._STEPS[model][2]
    assert how == {"backend": "fp8fn", "fullgraph": True, "options": {"where": []}}
    config = transformers.CompileConfig(backend="eager")
    asked = {"compile_config": config, "disable_compile": False, "do_sample": False}
    assert torch.equal(generated(model, True, **asked), generated(model, False, do_sample=False))
    assert decoding._STEPS[model][2][1] is not step
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


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


@pytest.mark.parametrize(("lag", "last"), [(0, 3), (2, 3), (9, 3), (3, 8), (9, None)])
def test_the_end_is_found_late_and_counted_right(lag: int, last: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lag`: steps that the GPU is behind. The second sequence ends one step before the first one."""
    Event.reached, Event.made = -lag, 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Event())
    end = decoding._End(torch.zeros(2, 1, dtype=torch.long), ahead=4)
    end.waits, end._flags = False, [torch.empty((), dtype=torch.bool) for _ in range(5)]
    for step in range(1, 13):
        done = torch.tensor([step == last, step + 1 == last])
        chosen = end.padded(torch.tensor([7, 7]), torch.tensor(1))
        over = last is not None and step > last
        assert chosen.tolist() == [1 if over else 7, 1 if last is not None and step >= last else 7]
        if end.reached(done):
            break
    assert end.steps() == (last or 12)
    assert step <= (last or 12) + 4
    assert step == 12 or lag or step == last


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 2}, "generate's mode is beam_search; it decodes greedily or samples, with num_beams=1"),
        ({"cache_implementation": None}, "the cache has a DynamicLayer; it takes transformers 5's StaticLayers"),
        ({"use_cache": False, "cache_implementation": None}, "the cache has a NoneType; "),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True; leave it out"),
        ({"inputs_embeds": torch.zeros(2, 9, 128)}, "the model also takes inputs_embeds; it serves decoders"),
    ],
    ids=["beams", "growing", "none", "attentions", "embeddings"],
)  # fmt: skip
def test_what_it_refuses(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"decoding_loop: {re.escape(message)}"):
        generated(made("llama"), True, **asked)


def test_other_models_and_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="the cache has a StaticSlidingWindowLayer"):  # it counts in Python
        generated(made("gemma2"), True)
    model = made("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    first = generated(model, True, past_key_values=cache, cache_implementation=None)
    assert int(cache.get_seq_length()) == first.shape[1] - 1
    with pytest.raises(ValueError, match="the cache holds 20 tokens; pass an empty one"):
        generated(model, True, past_key_values=cache, cache_implementation=None)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="the model's attention is 'flex_attention'; it takes 'sdpa' and 'eager'"):
        generated(model, True)


@pytest.mark.gpu
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
    assert decoding._STEPS[model][2][0]["backend"] == "fp8fn"
