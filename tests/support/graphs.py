"""The graphs that torch.compile makes, written down, and compiled steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule, Node

import fp8fn
from fp8fn.lowering import backend, joint_pass
from fp8fn.lowering.graph.substitute import Substitution
from support.gradients import gradients


def assert_one_compile_serves(
    step: Callable[..., Tensor],
    problems: Callable[[], Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]],
    bound: float,
) -> None:
    """All of `problems()`, each inputs, the output's gradient and offsets; compiled here, then from Inductor's cache.

    Of a graph from its cache torch evaluates the guards in a way of its own. The test has `fresh_caches`.
    """
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(step, fullgraph=True, dynamic=True)
        for i, (inputs, out_grad, offsets) in enumerate(problems()):
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                got = gradients(lambda *args, c=compiled, o=offsets: c(*args, o), out_grad, *inputs)
            want = gradients(lambda *args, o=offsets: step(*args, o), out_grad, *inputs)
            for g, w in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
                assert g.shape == w.shape
                assert (g.double() - w.double()).norm() <= bound * w.double().norm()
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits


def aot_into(texts: dict[str, str], *, kwargs: bool = False) -> Callable[..., Any]:
    """AOTAutograd, whose graphs it writes down as "forward" and "backward"."""

    def keep(name: str) -> Callable[..., Any]:
        def compiler(gm: GraphModule, _: Any) -> Any:
            texts[name] = readable(gm, kwargs=kwargs)
            return make_boxed_func(gm.forward)

        return compiler

    aot: Callable[..., Any] = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    return aot


def readable(gm: GraphModule, *, kwargs: bool = False) -> str:
    """One line for each call, `name = target(arguments)`, by keyword too if asked; a tuple's item is `name[index]`."""
    names: dict[Any, str] = {}
    lines = []
    for node in gm.graph.nodes:
        target = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        if node.op == "call_function" and target == "getitem":
            names[node] = f"{names[node.args[0]]}[{node.args[1]}]"
            continue
        names[node] = node.name
        if node.op not in ("placeholder", "output"):
            args = [str(list(arg)) if isinstance(arg, (list, tuple)) else names.get(arg, str(arg)) for arg in node.args]
            if kwargs:
                args += [f"{name}={names.get(arg, str(arg))}" for name, arg in node.kwargs.items()]
            lines.append(f"{node.name} = {target}({', '.join(args)})")
    return "\n".join(lines)


# AOTAutograd writes other views in each release; the substitution itself is tested in values on each.
same_graphs = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the graphs here are torch 2.13's, this is {torch.__version__}"
)


@contextmanager
def graphs() -> Iterator[list[Graph]]:
    """The joint graphs of what is compiled inside, after the substitution."""
    found: list[Graph] = []
    apply = joint_pass.apply

    def keeping(graph: Graph, *options: bool) -> list[Substitution]:
        made = apply(graph, *options)
        found.append(graph)
        return made

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=False):
        patch.setattr(joint_pass, "apply", keeping)
        with fp8fn.lowering.substitution():
            yield found


def step(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradients of what needs them."""
    out = function(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)


def compiled_step(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> tuple[Any, list[Substitution]]:
    torch._dynamo.reset()
    with graphs(), joint_pass.recorded() as record:
        results = step(torch.compile(function, fullgraph=True, **options), *inputs)
    return results, record


def code(graph: Graph) -> str:
    """The calls of fp8fn's ops and what multiplies without them, an argument a line."""

    def text(arg: Any) -> str:
        name = re.sub(r"(_default)?(_\d+)?$", "", arg.name) if isinstance(arg, Node) else ""
        shown = f"{name} {list(arg.meta['val'].shape)}" if isinstance(arg, Node) else str(arg)
        return f"\n    {shown}"

    lines = []
    for node in graph.nodes:
        if node.op == "call_function" and ("fp8fn" in str(node.target) or "mm" in str(node.target)):
            lines.append(f"{node.target}({','.join(map(text, node.args))})")
    return "\n".join(lines)


def kept_for_rewrite(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """The graphs in which the backend looks for products from now on, as the passes before have left them."""
    graphs: list[GraphModule] = []
    rewrite = backend.rewrite

    def keep(gm: GraphModule, *args: Any, **options: Any) -> Any:
        graphs.append(gm)
        return rewrite(gm, *args, **options)

    monkeypatch.setattr(backend, "rewrite", keep)
    return graphs
