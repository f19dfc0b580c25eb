"""A backend that runs the passes down to the joint graph, and then that graph as it is: generating code is slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from fp8fn.lowering import joint_pass
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.recipe_pass import Decision, rewrite
from fp8fn.ops.recipe import BLOCKWISE, Recipe
from fp8fn.site import Where


class Traced:
    """`torch.compile(function, backend=Traced())`: the exact pass alone, with `recipe` both passes, as the backend has.

    `found` has what became of each product that an exact pattern knows, `decided` what the recipe decided.
    """

    def __init__(self, recipe: Recipe | None = None, where: Where = None) -> None:
        self.recipe, self.where = recipe, where
        self.found: list[Substitution] = []
        self.decided: list[Decision] = []

    def __call__(self, gm: GraphModule, inputs: Any) -> Any:
        if self.recipe is not None:
            self.decided += rewrite(gm, self.recipe, self.where)

        def apply(module: GraphModule) -> GraphModule:
            self.found += joint_pass.apply(module.graph)
            module.recompile()
            return module

        def partition(module: GraphModule, example: Any, **options: Any) -> Any:
            return default_partition(apply(module), example, **options)

        def as_it_is(module: GraphModule, _: Any) -> Callable[..., Any]:
            boxed: Callable[..., Any] = make_boxed_func(module.forward)
            return boxed

        compiler: Callable[..., Any] = aot_autograd(
            fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition,
            inference_compiler=lambda module, example: as_it_is(apply(module), example),
            decompositions=select_decomp_table(),
        )  # fmt: skip
        return compiler(gm, inputs)

    @property
    def reasons(self) -> list[str | None]:
        return [made.reason for made in self.found]


def both_passes(where: Where = "*") -> Traced:
    return Traced(BLOCKWISE, where)
