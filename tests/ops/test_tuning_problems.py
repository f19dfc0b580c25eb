"""The products of a layer as problems of tuning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8fn
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.recipe import HYBRID, parse_recipe
from fp8fn.ops.targets import SM90
from fp8fn.ops.tuning.problem import Problem, linear_problems, problem_of
from support.products import Parts
from support.tuning import operands

pytestmark = pytest.mark.usefixtures("cache")


class Products(TorchDispatchMode):
    """Notes the operands of every scaled product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fp8fn.scaled_mm.default:
            self.seen.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_the_problems_of_a_linear_layer_are_the_products_that_it_runs(recipe: str) -> None:
    x, w = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((256, 512), (384, 512)))
    with Products() as mode:
        out = fp8fn.linear(x, w, recipe=recipe)
        torch.autograd.grad(out, (x, w), torch.randn_like(out))
    wanted = linear_problems(256, 384, 512, parse_recipe(recipe))
    assert len(mode.seen) == 3
    for (name, problem), (a, a_scale, a_block, b, b_scale, b_block, *_) in zip(wanted.items(), mode.seen, strict=True):
        ours = operands(problem)
        theirs = Parts(a, a_scale, tuple(a_block), b, b_scale, tuple(b_block), None, ours.out)
        assert problem_of(theirs.product(SM90)) == problem, name
        assert (a.shape, b.shape, a_scale.shape, b_scale.shape) == (
            ours.a.shape, ours.b.shape, ours.a_scale.shape, ours.b_scale.shape,
        )  # fmt: skip
        if name != "dgrad" and recipe == "blockwise":  # off Hopper, dgrad reads the forward's weight
            assert (a.stride(), a_scale.stride()) == (ours.a.stride(), ours.a_scale.stride())
            assert (b.stride(), b_scale.stride()) == (ours.b.stride(), ours.b_scale.stride())
        assert cuda.accepts(ours.product(SM90)) is None


def test_problems_of_recipes() -> None:
    found = linear_problems(8192, 6144, 4096, HYBRID)
    assert found["forward"] == Problem(8192, 6144, 4096)
    assert found["dgrad"] == Problem(8192, 4096, 6144, a_type=torch.float8_e5m2)
    assert found["wgrad"] == Problem(6144, 4096, 8192, "VECTOR", "VECTOR", a_type=torch.float8_e5m2)
    assert found["dgrad"].plain() == Problem(8192, 4096, 6144)
    assert replace(found["forward"], out_type=torch.float32).plain().out_type == torch.float32
    assert str(found["wgrad"]) == "6144,4096,8192 1x128·128x1"
    assert linear_problems(1, 2, 3, parse_recipe("tensorwise"))["wgrad"].kinds == ("WHOLE", "WHOLE")
    with pytest.raises(ValueError, match="use blockwise, rowwise or tensorwise"):
        linear_problems(128, 128, 128, parse_recipe("mxfp8"))


def test_a_batch_has_operands_of_three_dimensions() -> None:
    problem = Problem(128, 256, 512, batch=3)
    made = operands(problem)
    assert (made.a.shape, made.b.shape, made.out.shape) == ((3, 128, 512), (3, 512, 256), (3, 128, 256))
    assert problem_of(made.product(SM90)) == problem
    assert cuda.accepts(made.product(SM90)) is None
