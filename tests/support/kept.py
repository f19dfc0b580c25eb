"""The bytes that a compiled model keeps for its backward, and the gradients that it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from fp8fn.lowering import joint_pass, post_grad_pass
from fp8fn.lowering.inductor.partitioner import Partitioner
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops.recipe import BLOCKWISE, Recipe
from fp8fn.site import Where


class OpByOp:
    """`torch.compile(model, backend=OpByOp(plan))`: the backend's passes, without Inductor.

    Both graphs run op by op, after the fusions of `post_grad_pass` if `fuse` is set. `plan=None` is PyTorch's
    partitioner, `recipe=None` leaves all products alone.
    """

    def __init__(
        self, plan: SavePlan | None, recipe: Recipe | None = BLOCKWISE, where: Where = "*", *, fuse: bool = True
    ) -> None:
        self.plan, self.recipe, self.where, self.fuse = plan, recipe, where, fuse
        self.forward: list[GraphModule] = []
        self.backward: list[GraphModule] = []

    def __call__(self, gm: GraphModule, inputs: Any) -> Any:
        if self.recipe is not None:
            rewrite(gm, self.recipe, self.where)

        def partition(module: GraphModule, example: Any, **options: Any) -> Any:
            joint_pass.apply(module.graph)
            cut = min_cut_rematerialization_partition if self.plan is None else Partitioner(self.plan, None)
            forward, backward = cut(module, example, **options)
            self.forward.append(forward)
            self.backward.append(backward)
            return forward, backward

        def run(module: GraphModule, _: Any) -> Callable[..., Any]:
            graphs = [each for each in module.modules() if isinstance(each, GraphModule)] if self.fuse else []
            for each in graphs:  # regions too
                post_grad_pass.fuse(each.graph)
                each.recompile()
            return make_boxed_func(torch.fx.Interpreter(module).run)

        compiler: Any = aot_autograd(
            fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table()
        )
        return compiler(gm, inputs)


@dataclass
class Kept:
    """A step's loss, its gradients by name, and the tensors kept for the backward beside parameters and buffers."""

    loss: float
    gradients: dict[str, Tensor]
    tensors: list[tuple[int, tuple[int, ...], torch.dtype]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _, _ in self.tensors)

    def equals(self, other: Kept) -> bool:
        """Whether loss and gradients have the same bits."""
        names = self.gradients.keys() == other.gradients.keys()
        same = all(torch.equal(grad, other.gradients[name]) for name, grad in self.gradients.items())
        return names and same and self.loss == other.loss

    def worst_snr(self, other: Kept) -> float:
        """The least signal-to-noise ratio of a parameter's gradient in dB, `other` being exact."""
        return min(_snr(other.gradients[name], grad) for name, grad in self.gradients.items())


def kept(model: nn.Module, step: Callable[[], Tensor], *, backward: bool = True) -> Kept:
    """Runs a step of a compiled model, whose result is the loss; without `backward`, no gradients."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    seen: dict[int, tuple[int, tuple[int, ...], torch.dtype]] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (storage.nbytes(), tuple(x.shape), x.dtype)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = step()
    if backward:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Kept(loss.item(), gradients, list(seen.values()))


def _snr(exact: Tensor, x: Tensor) -> float:
    error = (exact.double() - x.double()).norm().item()
    return math.inf if error == 0 else 20 * math.log10(exact.double().norm().item() / error)
