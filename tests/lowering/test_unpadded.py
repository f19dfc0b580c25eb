"""Graphs for batches without padding: which are made, what each call takes, and the values and gradients of both."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fp8fn.lowering import causal_masks, unpadded
from fp8fn.lowering.graph.sdpa import arguments, attentions
from fp8fn.lowering.unpadded import by_padding
from fp8fn.ops.cuda.runtime import graph_capture
from support.tiny_models import two_layers

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "little_is_enough")

B, H, S, D = 2, 3, 20, 16
WORK = B * H * S * S * D


@pytest.fixture
def little_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpadded, "_LEAST_WORK", 0)


def ones(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.ones(B, S, dtype=dtype)


def padded(dtype: torch.dtype = torch.int64) -> Tensor:
    mask = ones(dtype)
    mask[0, 12:] = 0
    return mask


def drawn() -> Tensor:
    return torch.randn(B, H, S, D)


def causal(tokens: Tensor) -> Tensor:
    """The mask of a causal model over a batch with padding."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (places[None, :] <= places[:, None]) & tokens.to(torch.bool)[:, None, None, :]


def attended(x: Tensor, tokens: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=causal(tokens))


class Kept:
    """A backend that keeps the graphs which it is given, in the order in which they are compiled, and who served."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.served: list[int] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return by_padding(gm, inputs, self._compile)

    def _compile(self, gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        for module in gm.modules():
            if isinstance(module, GraphModule):
                module.graph.lint()
                module.recompile()
        self.graphs.append(gm)
        place = len(self.graphs) - 1

        def call(*args: Any) -> Any:
            self.served.append(place)
            return gm.forward(*args)

        return call

    @property
    def masks(self) -> list[list[bool]]:
        """Whether the attentions of each graph have masks."""
        found = [[arguments(node) for node in attentions(graph)] for graph in self.graphs]
        return [[given is not None and given["attn_mask"] is not None for given in each] for each in found]


def served(function: Callable[..., Tensor], *batches: tuple[Tensor, ...], **options: Any) -> list[list[bool]]:
    """The masks of the graphs that these calls make; each gives what the function does."""
    kept = Kept()
    compiled = torch.compile(function, backend=kept, fullgraph=True, **options)
    for batch in batches:
        torch.testing.assert_close(compiled(*batch), function(*batch), atol=1e-5, rtol=1e-5)
    return kept.masks


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_a_graph_without_masks_and_one_with_them(dtype: torch.dtype) -> None:
    batches = [(drawn(), mask(dtype)) for mask in (ones, padded, ones, padded)]
    assert served(attended, *batches[:1]) == [[False]]
    assert served(attended, *batches) == [[False], [True]]


def test_dynamos_marks_are_those_of_both_graphs() -> None:
    """By them PyTorch knows which inputs are parameters, which no CUDA graph copies."""
    linear, kept = nn.Linear(D, D), Kept()

    def model(x: Tensor, tokens: Tensor) -> Tensor:
        return attended(linear(x), tokens)

    compiled = torch.compile(model, backend=kept, fullgraph=True)
    for tokens in (ones(), padded()):
        compiled(drawn(), tokens)
    first, second = kept.graphs
    assert vars(first).keys() == vars(second).keys()
    assert first.meta == second.meta
    inputs = [[*graph.graph.find_nodes(op="placeholder")] for graph in kept.graphs]
    assert len(inputs[0]) == 4
    for one, other in zip(*inputs, strict=True):
        assert vars(one) == vars(other)
        assert one.meta["tensor_dict"] is other.meta["tensor_dict"]
    assert sum("_dynamo_static_input_type" in node.meta["tensor_dict"] for node in inputs[1]) == 2


def test_no_batch_is_kept() -> None:
    """Inductor keeps the graphs that it compiles, as this backend does."""
    compiled, batches = torch.compile(attended, backend=Kept(), fullgraph=True), []
    for tokens in (ones(), padded(), ones()):
        x = drawn()
        compiled(x, tokens)
        batches += [ref(x), ref(tokens)]
        del x, tokens
    gc.collect()
    assert [batch() for batch in batches] == [None] * 6


def test_a_first_batch_with_padding_has_one_graph() -> None:
    assert served(attended, (drawn(), padded()), (drawn(), ones())) == [[True]]


def test_values_other_than_one_are_padding() -> None:
    """A mask may count sequences, or be compared with a number: only ones were tried."""

    def of_one(x: Tensor, tokens: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=causal(tokens == 1))

    assert served(of_one, (drawn(), ones()), (drawn(), 2 * ones())) == [[False], [True]]


def test_a_mask_without_order_is_left_out_too() -> None:
    def encoder(x: Tensor, tokens: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=tokens.bool()[:, None, None, :].expand(-1, -1, S, -1))

    assert served(encoder, (drawn(), ones()), (drawn(), padded())) == [[False], [True]]


def biased(x: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)


def windowed(x: Tensor, tokens: Tensor) -> Tensor:
    places = torch.arange(tokens.shape[1])
    near = places[:, None] - places[None, :] < 4
    return F.scaled_dot_product_attention(x, x, x, attn_mask=causal(tokens) & near)


def written(x: Tensor, tokens: Tensor) -> Tensor:
    own = tokens.clone()
    tokens[:, 3:5] = 0
    return attended(x, tokens) + attended(x, own)


def test_masks_that_stay() -> None:
    assert served(biased, (drawn(), torch.ones(S, S))) == [[True]]
    assert served(windowed, (drawn(), ones())) == [[True]]
    kept, tokens = Kept(), ones()
    out = torch.compile(written, backend=kept, fullgraph=True)(x := drawn(), tokens)
    torch.testing.assert_close(out, written(x, ones()))
    assert kept.masks == [[True, True]]


def of_length(length: int, padding: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.ones(B, length, dtype=torch.int64)
    tokens[0, length - padding :] = 0
    return torch.randn(B, H, length, D), tokens


def calls(function: Callable[..., Tensor], *batches: tuple[Any, ...], dynamic: bool | None = True) -> str:
    """A letter for each call: `m` where a graph with masks served it, else `_`. Each gives what the function does."""
    torch._dynamo.reset()
    kept = Kept()
    compiled = torch.compile(function, backend=kept, fullgraph=True, dynamic=dynamic)
    for batch in batches:
        torch.testing.assert_close(compiled(*batch), function(*batch), atol=1e-5, rtol=1e-5)
    return "".join("m" if kept.masks[place][0] else "_" for place in kept.served)


def test_lengths_that_vary() -> None:
    """PyTorch makes a length a variable when it has met a second one, or is told to."""
    batches = [of_length(*each) for each in ((20,), (24,), (7,), (24, 3), (2,), (33, 1), (33,))]
    assert calls(attended, *batches) == "___m_m_"
    assert calls(attended, *batches, dynamic=None) == "___m_m_"
    assert calls(attended, of_length(20, 3), of_length(24)) == "mm"


def test_lengths_that_vary_have_both_graphs_at_once() -> None:
    """The guards of the graph with masks are among those of both."""
    assert served(attended, of_length(20), dynamic=True) == [[True], [False]]


def test_a_length_by_which_a_mask_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is outside of the window of four in a batch of three; each length is tried once."""
    tried = []

    def kind_of(mask: Node, given: causal_masks.Given) -> str | None:
        tried.append(mask)
        return causal_masks.kind_of(mask, given)

    monkeypatch.setattr(unpadded, "kind_of", kind_of)
    batches = [of_length(*each) for each in ((4,), (3,), (20,), (3, 1), (20,), (2,), (20, 4), (3,))]
    assert calls(windowed, *batches) == "__mmm_m_"
    assert len(tried) == 4
    assert calls(windowed, *batches[2:]) == "m" * 6


def by_positions(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[2])
    return F.scaled_dot_product_attention(x, x, x, attn_mask=places[None, :] <= places[:, None])


def behind(x: Tensor, more: int) -> Tensor:
    """Each token also sees `more` after itself."""
    places = torch.arange(x.shape[2])
    return F.scaled_dot_product_attention(x, x, x, attn_mask=places[None, :] <= places[:, None] + more)


def counted(x: Tensor, tokens: Tensor) -> Tensor:
    """The window depends on the sizes of `tokens` alone, and on no number of the graph."""
    places = tokens.cumsum(-1)
    apart = places[:, None, :, None] - places[:, None, None, :]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=(apart >= 0) & (apart < 4))


def test_positions_counted_in_the_mask() -> None:
    assert calls(counted, *[of_length(*each) for each in ((4,), (3,), (20,), (3, 1), (2,))]) == "__mm_"


def test_masks_of_numbers_alone() -> None:
    drawn = {length: of_length(length)[0] for length in (7, 9, 20, 24)}
    assert calls(by_positions, *[(x,) for x in drawn.values()]) == "____"
    cases = ((20, 30), (24, 24), (24, 5), (7, 6), (9, 2))
    assert calls(behind, *[(drawn[length], more) for length, more in cases]) == "__m_m"


def test_a_capture_tries_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    compiled = torch.compile(by_positions, backend=kept, fullgraph=True, dynamic=True)
    compiled(of_length(20)[0])
    monkeypatch.setattr(graph_capture, "capturing", lambda: True)
    compiled(of_length(21)[0])
    monkeypatch.setattr(graph_capture, "capturing", lambda: False)
    compiled(of_length(21)[0])
    assert kept.masks == [[True], [False]]
    assert kept.served == [1, 0, 1]


def layer(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sin()


def checkpointed(x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=False)
    return found


@pytest.mark.parametrize("region", ["checkpoint", "nested_compile_region"])
@pytest.mark.parametrize("first", ["ones", "padded"])
def test_regions(first: str, region: str) -> None:
    """The graph with masks has regions of its own."""
    part = checkpointed if region == "checkpoint" else torch.compiler.nested_compile_region(layer)

    def model(x: Tensor, tokens: Tensor) -> Tensor:
        mask = causal(tokens)
        return part(part(x, mask), mask)

    kept = Kept()
    compiled = torch.compile(model, backend=kept, fullgraph=True)
    for mask in (ones(), padded()) if first == "ones" else (padded(), ones()):
        x = drawn()
        wanted = layer(layer(x, causal(mask)), causal(mask))
        torch.testing.assert_close(compiled(x.clone().requires_grad_(), mask), wanted, atol=1e-5, rtol=1e-5)
    assert [all(each) for each in kept.masks] == ([False, True] if first == "ones" else [True])
    assert [any(each) for each in kept.masks] == ([False, True] if first == "ones" else [True])


def test_gradients_of_regions(fresh_caches: None) -> None:
    """PyTorch keeps the traced graph of a region by its name, which is the same in the graph with masks."""
    weight = torch.randn(D, D).div(4).requires_grad_()

    def part(x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        return layer(x @ weight, mask)

    def model(x: Tensor, tokens: Tensor, part: Callable[..., Tensor] = part) -> Tensor:
        mask = causal(tokens)
        return part(part(x, weight, mask), weight, mask)

    region = torch.compiler.nested_compile_region(part)
    compiled = torch.compile(
        lambda x, tokens: model(x, tokens, region), backend="fp8fn", options={"where": []}, fullgraph=True
    )
    for mask in (ones(), padded(), ones()):
        x = drawn().requires_grad_()
        out, wanted = compiled(x, mask), model(x, mask)
        grads, right = (torch.autograd.grad(each.square().sum(), (x, weight)) for each in (out, wanted))
        torch.testing.assert_close((out, *grads), (wanted, *right), atol=1e-4, rtol=1e-4)


def test_threads_compile_the_second_graph_once() -> None:
    class Slow(Kept):
        def _compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            time.sleep(0.1)
            return super()._compile(gm, inputs)

    kept, together, found = Slow(), threading.Barrier(2), []
    compiled = torch.compile(attended, backend=kept, fullgraph=True)
    x = drawn()
    compiled(x, ones())

    def first_with_padding() -> None:
        together.wait()
        found.append(compiled(x, padded()))

    threads = [threading.Thread(target=first_with_padding) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for out in found:
        torch.testing.assert_close(out, attended(x, padded()), atol=1e-5, rtol=1e-5)
    assert kept.masks == [[False], [True]]


def test_a_second_graph_that_fails_to_compile_is_compiled_again() -> None:
    class Interrupted(Kept):
        def _compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled = super()._compile(gm, inputs)
            if len(self.graphs) == 2:
                for node in [*attentions(gm)]:
                    node.target = torch.add  # as passes do that were interrupted
                raise KeyboardInterrupt
            return compiled

    kept, x = Interrupted(), drawn()
    compiled = torch.compile(attended, backend=kept, fullgraph=True)
    compiled(x, ones())
    with pytest.raises(KeyboardInterrupt):
        compiled(x, padded())
    torch.testing.assert_close(compiled(x, padded()), attended(x, padded()), atol=1e-5, rtol=1e-5)
    assert kept.masks == [[False], [], [True]]


def test_processes_that_wait_for_each_other_have_one_graph() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)))
    assert unpadded._communicates(GraphModule(nn.Module(), graph))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[dist.DeviceMesh]:
    """One process, in which redistributing a DTensor is traced as it is among many."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_collectives_of_dtensors_are_among_them(mesh: dist.DeviceMesh) -> None:
    """AOTAutograd alone makes them: Dynamo's graph has a method of a DTensor."""
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(torch.randn(D, D), mesh, [Shard(0)])

    def model(x: Tensor, tokens: Tensor) -> Tensor:
        return attended(x @ weight.full_tensor(), tokens)

    assert served(model, (drawn(), ones()), (drawn(), padded())) == [[True]]


def test_a_capture_reads_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    compiled = torch.compile(attended, backend=kept, fullgraph=True)
    x = drawn()
    compiled(x, ones())
    monkeypatch.setattr(graph_capture, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call the model without attention_mask, or once before"):
        compiled(x, ones())
    monkeypatch.setattr(graph_capture, "capturing", lambda: False)
    compiled(x, padded())
    monkeypatch.setattr(graph_capture, "capturing", lambda: True)
    torch.testing.assert_close(compiled(x, ones()), attended(x, ones()))
    assert kept.masks == [[False], [True]]


def test_little_attention_on_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpadded, "_waits", lambda _: True)
    for least, masked in ((WORK, False), (WORK + 1, True)):
        torch._dynamo.reset()
        monkeypatch.setattr(unpadded, "_LEAST_WORK", least)
        assert served(attended, (drawn(), ones())) == [[masked]]


def test_little_attention_of_lengths_that_vary_has_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first batch's length."""
    for least, graphs in ((WORK, [[True], [False]]), (WORK + 1, [[True]])):
        torch._dynamo.reset()
        monkeypatch.setattr(unpadded, "_LEAST_WORK", least)
        assert served(attended, of_length(S), of_length(2 * S), dynamic=True) == graphs


class Step:
    """Losses and gradients of a model, compiled by the backend and in eager mode."""

    def __init__(self, architecture: str, dynamic: bool | None = None, **options: Any) -> None:
        self.model = two_layers(architecture)
        options = {"where": [], **options}
        self.compiled = torch.compile(self.model, backend="fp8fn", options=options, fullgraph=True, dynamic=dynamic)
        self.tokens = torch.randint(0, 64, (B, 3 * S))

    def differs(self, mask: Tensor) -> float:
        """The largest difference among the logits of tokens that are no padding, the loss, and gradients."""
        found, wanted = (self._run(model, mask) for model in (self.compiled, self.model))
        return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))

    def _run(self, model: Callable[..., Any], mask: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        tokens = self.tokens[:, : mask.shape[1]]
        labels = tokens.where(mask.bool(), -100)
        out = model(input_ids=tokens, attention_mask=mask, labels=labels)
        if not torch.is_grad_enabled():
            return [out.loss, out.logits[mask.bool()]]
        out.loss.backward()
        return [out.loss.detach(), out.logits[mask.bool()].detach(), *(p.grad.clone() for p in self.model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
def test_training_steps_of_transformers(
    architecture: str, fresh_caches: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that change between the calls are those of both graphs; the backward of one may follow the other's."""
    left = ones()
    left[1, :5] = 0
    step = Step(architecture)
    with caplog.at_level(logging.INFO, "fp8fn"):
        for mask in (ones(), padded(), left, ones()):
            assert step.differs(mask) < 1e-5
            with torch.no_grad():
                for weight in step.model.parameters():
                    weight.mul_(1.01)
    assert caplog.text.count("attentions that do without a mask in batches without padding, as the first one: 2") == 1
    assert caplog.text.count("a batch has padding: the graph is compiled again") == 1


@pytest.mark.slow
def test_training_steps_of_lengths_that_vary(fresh_caches: None, caplog: pytest.LogCaptureFixture) -> None:
    step = Step("Llama", dynamic=True)
    with caplog.at_level(logging.INFO, "fp8fn"):
        for length, padding in ((20, 0), (33, 3), (24, 0)):
            assert step.differs(of_length(length, padding)[1]) < 1e-5
    assert "attentions that do without a mask in batches without padding, as the first one: 2" in caplog.text
    assert "sizes are variables: the graph with masks is compiled now" in caplog.text
    assert "a batch has padding" not in caplog.text


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any], fresh_caches: None) -> None:
    step = Step("Llama")
    with mode():
        for mask in (ones(), padded(), ones()):
            assert step.differs(mask) < 1e-5


def test_the_backward_of_the_first_graph_is_compiled_after_the_second(fresh_caches: None) -> None:
    step = Step("Llama")
    tokens = step.tokens[:, :S]
    first = step.compiled(input_ids=tokens, attention_mask=ones(), labels=tokens).loss
    assert step.differs(padded()) < 1e-5
    step.model.zero_grad()
    first.backward()
    found = [p.grad.clone() for p in step.model.parameters()]
    wanted = step._run(step.model, ones())[2:]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_weight_that_was_replaced_between_the_graphs(fresh_caches: None) -> None:
    """Dynamo's reference to the first one is weak."""
    step = Step("Llama")
    with torch.no_grad():
        for mask in (ones(), padded()):
            assert step.differs(mask) < 1e-5
            projection = step.model.model.layers[0].mlp.up_proj
            projection.weight = nn.Parameter(torch.randn_like(projection.weight))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(graphs: bool, fresh_caches: None) -> None:
    with torch.device("cuda"):
        step = Step("Llama", **{"triton.cudagraphs": graphs})
        for mask in (ones(), padded(), ones(), padded(), ones()):
            torch.compiler.cudagraph_mark_step_begin()
            assert step.differs(mask) < 1e-3
