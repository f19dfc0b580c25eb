"""The products that a compilation takes: patterns of names, the products left by default, and the log of both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fp8fn
from fp8fn.checkpoint.conversion.options import Options
from fp8fn.lowering import heads
from fp8fn.lowering import recipe_pass as module
from fp8fn.lowering.heads import Modules
from fp8fn.lowering.recipe_pass import Decision, rewrite
from fp8fn.ops.recipe import BLOCKWISE
from fp8fn.ops.tuning.estimate import Step, Times
from fp8fn.site import Site, Where, matches, selected, why_none_match, why_sensitive, why_some_match_none

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
VOCABULARY, WIDTH = 1152, 512


def site_of(name: str) -> Site:
    return Site(op="linear", m=64, n=512, k=512, dtype=torch.bfloat16, device=torch.device("cpu"), weight=name)


def decided(model: Callable[..., Any], *args: Any, where: Where = None) -> list[Decision]:
    """The recipe's decisions about a model, whose graphs run unchanged."""
    found: list[Decision] = []

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        found.extend(rewrite(gm, BLOCKWISE, where))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)
    return found


def reasons(decisions: list[Decision]) -> dict[str, str | None]:
    return {decision.gemm.site.weight: decision.reason for decision in decisions if decision.gemm.site.weight}


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*", "model.layers.0.mlp.up.weight", True),
        ("layers.*", "layers.0.mlp.up.weight", True),
        ("mlp.*", "model.layers.0.mlp.up.weight", True),
        ("weight", "model.layers.0.weight", True),
        ("*", "weight", True),
        ("*", "", True),
        ("", "", True),
        ("", "model.layers.0.weight", False),
        ("ayers.*", "model.layers.0.weight", False),
        ("layers.*.up", "model.layers.0.up.weight", False),
        ("layrs.*", "model.layers.0.weight", False),
        ("model.layers.1.*", "model.layers.0.weight", False),
    ],
)
def test_patterns_fit_from_any_dot(pattern: str, name: str, fits: bool) -> None:
    """The same rule for the backend's `where` and for `convert`'s options."""
    assert matches(name, [pattern]) is fits
    assert selected(site_of(name), ["nothing", pattern]) is fits
    if name:
        assert Options(include=(pattern,)).take(name, torch.empty(512, 512)) is fits
        assert Options(exclude=(pattern,)).take("a.weight", torch.empty(512, 512)) is not matches("a.weight", [pattern])


def test_the_nearest_names() -> None:
    names = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.11.mlp.up_proj.weight",
        "lm_head.weight",
        "visual.w",
        "",
    ]
    assert why_none_match("layrs.*", names) == (
        "where='layrs.*' matches no weight; nearest names: 'model.layers.*.mlp.up_proj.weight', 'lm_head.weight', "
        "'visual.w'"
    )
    assert str(why_none_match(["lm_haed.weight", "x"], names)).endswith("nearest names: 'lm_head.weight', "
        "'model.layers.*.mlp.up_proj.weight', 'visual.w'")  # fmt: skip
    for where in (None, "layers.*", ["layrs.*", "lm_head.*"], lambda site: False):
        assert why_none_match(where, names) is None
    assert why_none_match("", names) is not None
    assert why_none_match("layers.*", []) is None
    assert why_some_match_none(["layrs.*", "lm_head.*", "visul.w"], names) == (
        "where: 'layrs.*' matches no weight; nearest names: 'model.layers.*.mlp.up_proj.weight', 'lm_head.weight', "
        "'visual.w'; where: 'visul.w' matches no weight; nearest names: 'visual.w', "
        "'model.layers.*.mlp.up_proj.weight', 'lm_head.weight'"
    )
    for where in (None, "layrs.*", ["layrs.*", "visul.w"], ["layers.*", "lm_head.*"], [], lambda site: False):
        assert why_some_match_none(where, names) is None
    assert why_some_match_none(["layrs.*", "layers.*"], []) is None


class Model(nn.Module):
    """Names that begin with `model.`, as transformers' do."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(width, width) for _ in range(2))})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model["layers"]:
            x = layer(x)
        return x @ x.mT


LINE = "{} of 3 products in FP8, recipe blockwise"
ACTIVATIONS = "no parameter: activation by activation"


@pytest.mark.parametrize(
    ("where", "level", "line"),
    [
        (None, "INFO", f"{LINE.format(2)}; left: 1x {ACTIVATIONS}"),
        ("layers.*", "INFO", f"{LINE.format(2)}; left: 1x {ACTIVATIONS}"),
        ("layers.1.*", "INFO", f"{LINE.format(1)}; left: 1x where said no; 1x {ACTIVATIONS}"),
        ("layrs.*", "WARNING", f"{LINE.format(0)}: where='layrs.*' matches no weight; nearest names: "
                               "'model.layers.*.weight'"),
        ("", "WARNING", f"{LINE.format(0)}: where='' matches no weight; nearest names: 'model.layers.*.weight'"),
        ([], "INFO", f"{LINE.format(0)}; left: 2x where said no; 1x {ACTIVATIONS}"),
        (lambda site: False, "WARNING", f"{LINE.format(0)}; left: 2x where said no; 1x {ACTIVATIONS}"),
    ],
    ids=["default", "from a dot", "one layer", "misspelled", "empty", "no patterns", "a function"],
)  # fmt: skip
def test_one_line_for_each_compilation(where: Where, level: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp8fn")
    decided(Model(), torch.randn(64, WIDTH), where=where)
    lines = [
        (r.levelname, r.getMessage())
        for r in caplog.records
        if r.name == "fp8fn" and " of 3 products" in r.msg % r.args
    ]
    assert lines == [(level, line)]
    assert sum(r.levelno >= logging.WARNING for r in caplog.records if r.name == "fp8fn") == (level == "WARNING")


def test_explain_warns_of_patterns_that_match_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An empty list is no mistake."""
    for where, wanted in (([], []), (["layrs.*"], ["where=['layrs.*'] matches no weight"])):
        caplog.clear()
        found = fp8fn.explain(Model(), torch.randn(64, WIDTH), where=where)
        assert all(row.reason for row in found.rows)
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert [line.removeprefix("explain: ").partition(";")[0] for line in warned] == wanted


def test_patterns_may_match_in_another_graph(caplog: pytest.LogCaptureFixture) -> None:
    """A model that Dynamo breaks has its layers in several graphs."""
    for where, level in (("elsewhere.*", "WARNING"), ("layers.*", "INFO")):
        caplog.clear()
        caplog.set_level(logging.INFO, "fp8fn")
        decided(Model(), torch.randn(64, WIDTH), where=where)
        decided(nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.randn(64, WIDTH), where=where)
        (found,) = [r.levelname for r in caplog.records if "of 1 products" in r.getMessage()]
        assert found == level


@pytest.fixture
def no_pattern_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier compilations of this process matched or reported has no effect."""
    monkeypatch.setattr(module, "_MATCHED", set())
    monkeypatch.setattr(module, "_REPORTED", set())


def summaries(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "fp8fn"]
    return [each for each in found if "products in FP8" in each[1]]


IDLE = "where: 'layrs.1.*' matches no weight; nearest names: 'model.layers.*.weight'"


def test_a_pattern_beside_others_that_match_is_named_once(
    no_pattern_was_seen: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A list may serve several models, so the products that others select stay in FP8."""
    caplog.set_level(logging.INFO, "fp8fn")
    for _ in range(2):
        found = decided(Model(), torch.randn(64, WIDTH), where=["layers.0.*", "layrs.1.*"])
        assert [decision.reason for decision in found] == [None, "where said no", ACTIVATIONS]
    line = f"{LINE.format(1)}; left: 1x where said no; 1x {ACTIVATIONS}; {IDLE}"
    assert summaries(caplog) == [("WARNING", line), ("INFO", line)]


def test_explain_names_each_pattern_that_matches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        fp8fn.explain(Model(), torch.randn(64, WIDTH), where=["layers.0.*", "layrs.1.*"], show=False)
        fp8fn.explain(Model(), torch.randn(64, WIDTH), where=["layers.0.*", "layers.1.*"], show=False)
    assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "fp8fn"] == [
        ("WARNING", f"explain: {IDLE}")
    ]


class Broken(nn.Module):
    """A layer that Dynamo breaks between its two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        out: Tensor = self.down(x)
        return out


def test_names_behind_a_graph_break_are_those_of_the_compiled_model() -> None:
    """Dynamo begins anew in the layer, whose weights it calls `up.weight` and `down.weight`."""
    model, x = nn.Sequential(Broken(), nn.ReLU()), torch.randn(64, WIDTH)
    named = {"0.up.weight": None, "0.down.weight": None}
    assert reasons(decided(model, x, where="0.*")) == named
    assert reasons(decided(lambda x: model(x), x, where="0.*")) == named
    assert set(reasons(decided(model, x, where="1.*")).values()) == {"where said no"}
    assert reasons(decided(model[0], x, where="up.*")) == {"up.weight": None, "down.weight": "where said no"}

    found: list[Decision] = []

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        found.extend(rewrite(gm, BLOCKWISE, "0.*"))
        return gm.forward

    model.compile(backend=backend)
    with torch.no_grad():
        model(x)
    assert reasons(found) == named


def test_a_pattern_of_a_later_graph_is_no_warning(no_pattern_was_seen: None, caplog: pytest.LogCaptureFixture) -> None:
    """The first graph has `up` alone; the second one, which ends the model, has seen all but the misspelt name."""
    caplog.set_level(logging.INFO, "fp8fn")
    line = "1 of 1 products in FP8, recipe blockwise"
    decided(Broken(), torch.randn(64, WIDTH), where=["up.*", "down.*"])
    assert summaries(caplog) == [
        ("INFO", f"{line}; where: 'down.*' matches no weight; nearest names: 'up.weight'"), ("INFO", line),
    ]  # fmt: skip
    caplog.clear()
    decided(Broken(), torch.randn(64, WIDTH), where=["up.*", "down.*", "dwn.*"])
    assert summaries(caplog) == [
        ("INFO", f"{line}; where: 'dwn.*' matches no weight; nearest names: 'up.weight'"),
        ("WARNING", f"{line}; where: 'dwn.*' matches no weight; nearest names: 'down.weight'"),
    ]


def test_a_view_of_a_weight_from_before_a_graph_break() -> None:
    """As DBRX makes each expert's weight in Python; the product is not called one of two activations."""
    experts = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def function(x: Tensor) -> Tensor:
        w = experts.view(2, WIDTH, WIDTH)
        torch._dynamo.graph_break()
        return x @ w[1].mT @ x.mT

    with torch.no_grad():
        explanation = fp8fn.explain(function, torch.randn(64, WIDTH), where="*", show=False)
    assert [row.reason for row in explanation.rows] == [
        "a view of a parameter, made before the graph begins: make it in the same graph", ACTIVATIONS,
    ]  # fmt: skip


def test_layers_that_share_a_graph_are_all_explained() -> None:
    """Behind a graph break the first layer's graph runs the next layers too; `where` was asked about the first."""
    model, x = nn.Sequential(*(Broken() for _ in range(3))), torch.randn(64, WIDTH)
    names = [f"{layer}.{name}.weight" for layer in range(3) for name in ("up", "down")]
    with torch.no_grad():
        explanations = [fp8fn.explain(model, x, where=where, show=False) for where in ("*", "1.*", "0.*")]
        both = fp8fn.explain(lambda x: model(model(x)), x, where="*", show=False)
    for explanation in (*explanations, both):
        assert [row.weight for row in explanation.rows] == names
        assert explanation.graphs == 2
    assert [row.reason for row in explanations[0].rows] == [None] * 6
    shared = "where said no to 0.{}.weight, whose graph it runs: give a pattern that has no number of a layer"
    said_no = ["where said no"] * 2
    assert [row.reason for row in explanations[1].rows] == [
        *said_no, shared.format("up"), shared.format("down"), *said_no,
    ]  # fmt: skip
    assert [row.reason for row in explanations[2].rows] == [None] * 6
    assert explanations[0].step is not None
    assert explanations[0].step.unknown == 6


@pytest.mark.parametrize("case", ["small", "slower", "activations", "FP8"])
def test_when_none_is_a_warning(case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log warns neither where the estimates decided so, nor where no weight of 16 bits is there."""
    caplog.set_level(logging.INFO, "fp8fn")
    model: Callable[..., Any] = Model(256 if case == "small" else WIDTH).bfloat16()
    if case == "slower":
        times = Times(Step(3.0, 6.0), Step(1.0, 2.0), "the test")
        monkeypatch.setattr(module, "estimated", lambda *_: times)
    elif case == "activations":
        model = lambda x: x @ x.mT  # noqa: E731
    elif case == "FP8":
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        model = lambda x: F.linear(x, weight.to(x.dtype))  # noqa: E731
    decisions = decided(model, torch.randn(64, 256 if case == "small" else WIDTH).bfloat16())
    assert all(decision.reason for decision in decisions)
    found = [r for r in caplog.records if r.name == "fp8fn" and r.getMessage().startswith("0 of ")]
    assert [r.levelname for r in found] == ["WARNING" if case == "small" else "INFO"]
    if case == "small":
        assert "left: 2x small: K=256 is under 512; where='*' takes it too; 1x no parameter" in found[0].getMessage()


def test_explain_names_what_matches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fp8fn.explain(Model(), torch.randn(64, WIDTH), where="layrs.*", show=False)
    assert [r.getMessage() for r in caplog.records if r.name == "fp8fn" and r.levelno >= logging.WARNING] == [
        "explain: where='layrs.*' matches no weight; nearest names: 'model.layers.*.weight'"
    ]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("transformer.word_embeddings.weight", "word_embeddings"), ("head.weight", "head"), ("output.weight", "output"),
        ("lm_head.weight", "lm_head"), ("model.layers.0.mlp.gate.weight", "gate"), ("embed_out.weight", "embed_out"),
        ("lm_heads.3.weight", "lm_heads"),
        ("transformer.wte.weight", "wte"), ("transformer.wpe.weight", "wpe"), ("classifier.weight", "classifier"),
        ("model.layers.61.shared_head.head.weight", "head"), ("layers.0.router.weight", "router"),
        ("layers.0.input_layernorm.weight", "input_layernorm"), ("vit.patch_embed.proj.weight", "patch_embed"),
        ("model.layers.0.mlp.gate_proj.weight", None), ("layers.0.attention.output.weight", None),
        ("model.layers.0.self_attn.o_proj.weight", None), ("layers.0.headed.weight", None),
        ("blocks.0.norm1.linear.weight", "norm1"), ("blocks.0.norm_attn_norm.attn.Wqkv.weight", None),
    ],
)  # fmt: skip
def test_one_list_of_names(name: str, part: str | None) -> None:
    """For the backend and for `convert`."""
    wanted = None if part is None else f"sensitive: {part}; where='*' takes it too"
    assert why_sensitive(name, 512, 640) == wanted
    assert Options().take(name, torch.empty(512, 640)) is (part is None)


@pytest.mark.parametrize("n", [640, 2048])
def test_a_gated_mlps_gate_is_no_router(n: int) -> None:
    assert why_sensitive("layers.0.mlp.gate.weight", n, 640) is None
    assert Options().take("layers.0.mlp.gate.weight", torch.empty(n, 640))
    assert why_sensitive("lm_head.weight", n, 640) == "sensitive: lm_head; where='*' takes it too"


TINY: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "use_cache": False}
LAYERS: dict[str, Any] = {**TINY, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 640}
NEXT: dict[str, Any] = {
    **LAYERS, "hidden_size": 640, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 512,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "experts_implementation": "grouped_mm", "layer_types": ["full_attention"],
}  # fmt: skip
# The number of products that the backend takes, and the names and reasons of the head and the router, which it leaves.
MODELS: dict[str, tuple[str, dict[str, Any], int, dict[str, str]]] = {
    "falcon": ("Falcon", {**TINY, "num_hidden_layers": 1, "num_attention_heads": 4}, 4, {
        "transformer.word_embeddings.weight": "word_embeddings"}),
    "bloom": ("Bloom", {**TINY, "n_layer": 1, "n_head": 4}, 4, {
        "transformer.word_embeddings.weight": "word_embeddings"}),
    "rwkv": ("Rwkv", {**TINY, "num_hidden_layers": 2, "context_length": 8}, 14, {"head.weight": "head"}),
    "qwen3_next": ("Qwen3Next", NEXT, 1, {"lm_head.weight": "lm_head", "model.layers.0.mlp.gate.weight": "gate"}),
    "llama": ("Llama", LAYERS, 7, {"lm_head.weight": "lm_head"}),
    "llama, tied": ("Llama", {**LAYERS, "tie_word_embeddings": True}, 7, {"model.embed_tokens.weight": "embed_tokens"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_heads_and_routers_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    family, sizes, taken, left = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    decisions = decided(model, torch.randint(VOCABULARY, (1, 32)))
    found = reasons(decisions)
    assert {weight: found[weight] for weight in left} == {
        weight: f"sensitive: {part}; where='*' takes it too" for weight, part in left.items()
    }
    assert sum(decision.reason is None for decision in decisions) == taken


class Language(nn.Module):
    """Tables and a head of names that say nothing; two layers with as many columns as there are tokens."""

    def __init__(self, tied: bool, columns: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(640, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(2))
        self.down, self.square = nn.Linear(VOCABULARY, WIDTH), nn.Linear(WIDTH, 640)
        self.last = nn.Linear(WIDTH, columns, bias=False)
        if tied:
            self.last.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[-1]))
        x = self.down(self.ups[0](x) + self.ups[1](x))
        return self.square(x), self.last(x)


TIED = "sensitive: an embedding reads the weight too; where='*' takes it too"
AS_MANY = f"sensitive: N={VOCABULARY} is the vocabulary of the model's embedding; where='*' takes it too"


@pytest.mark.parametrize(
    ("tied", "columns", "reason"), [(True, VOCABULARY, TIED), (False, VOCABULARY, AS_MANY), (False, 1024, None)]
)
def test_heads_by_facts(tied: bool, columns: int, reason: str | None) -> None:
    """In one graph; compiled alone, named `weight`; and behind a graph break. Layers beside it are no heads."""
    model, ids, x = Language(tied, columns), torch.randint(VOCABULARY, (1, 64)), torch.randn(64, WIDTH)
    found = reasons(decided(model, ids))
    assert found.pop("tokens.weight" if tied else "last.weight") == reason
    assert set(found.values()) == {None}
    assert reasons(decided(model.last, x)) == {"weight": reason}
    assert reasons(decided(model.square, x)) == {"weight": None}
    assert list(reasons(decided(lambda x: model.last(x), x)).values()) == [reason]
    explanation = fp8fn.explain(model.last, x, show=False)
    assert [row.reason for row in explanation.rows] == [reason]


def test_the_modules_in_memory_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a compilation without an embedding, however many products it has; that takes tens of ms."""
    walks: list[Modules] = []

    def walk() -> Modules:
        walks.append(Modules())
        return walks[-1]

    monkeypatch.setattr(heads, "Modules", walk)
    layers = {name: nn.Linear(WIDTH, columns) for name, columns in (("up", 768), ("gate_up", 1024), ("query", 640))}
    model = nn.ModuleDict(layers)
    found = reasons(decided(lambda x: [layer(x) for layer in model.values()], torch.randn(64, WIDTH)))
    assert len(found) == 3
    assert set(found.values()) == {None}
    assert len(walks) == 1


def test_a_head_compiled_alone_has_its_name_in_the_model() -> None:
    model, x = nn.ModuleDict({"lm_head": nn.Linear(WIDTH, 1024)}), torch.randn(64, WIDTH)
    assert reasons(decided(model["lm_head"], x)) == {"weight": "sensitive: lm_head; where='*' takes it too"}
    assert reasons(decided(model["lm_head"], x, where="*")) == {"weight": None}
    assert reasons(decided(nn.Linear(WIDTH, 1024), x)) == {"weight": None}
    llama = nn.ModuleDict({"output": nn.Linear(WIDTH, 1024)})
    assert reasons(decided(llama["output"], x)) == {"weight": "sensitive: output; where='*' takes it too"}
    dbrx = nn.ModuleDict({"norm_attn_norm": nn.ModuleDict({"attn": nn.Sequential(nn.Linear(WIDTH, 1024))})})
    assert reasons(decided(dbrx["norm_attn_norm"]["attn"][0], x)) == {"weight": None}  # type: ignore[index]
