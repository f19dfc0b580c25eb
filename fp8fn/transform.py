"""`fp8(fn)`: the same function with its eligible matrix products in FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp8fn.ops.recipe import BLOCKWISE, Recipe, recipe_key
from fp8fn.site import Site, Where, check_where, why_not

P = ParamSpec("P")
R = TypeVar("R")

_MATMUL: Final = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)


def fp8(fn: Callable[P, R], *, recipe: Recipe | str = BLOCKWISE, where: Where = None) -> Callable[P, R]:
    """`fn` with its products `F.linear(x, w)`, `x @ w`, `torch.matmul` and `torch.mm` in FP8, where `w` is a matrix.

    A pure transformation: `fp8(fn)` takes and returns what `fn` does, and composes with `torch.func.grad`, `vmap`,
    `functional_call` and `torch.compile`. Products of two batches (attention), of vectors, and small ones stay as they
    are. `where` selects by a function of a `Site`; a function has no names, so patterns of names do not apply.

    Raises `ValueError` for a recipe that does not exist, `TypeError` for a `where` that is not a function.
    """
    check_where(where)
    if where is not None and not callable(where):
        raise TypeError(f"fp8: where={where!r}; a function's weights have no names, pass a function of a Site")
    key = recipe_key(recipe)

    @functools.wraps(fn)
    def transformed(*args: P.args, **kwargs: P.kwargs) -> R:
        with _Substitute(key, where):
            return fn(*args, **kwargs)

    return transformed


class _Substitute(TorchFunctionMode):
    def __init__(self, recipe: str, where: Where) -> None:
        super().__init__()
        self.recipe, self.where = recipe, where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func is torch._C._nn.linear:
            out = self.linear(*args, **kwargs)
        elif func in _MATMUL and len(args) == 2 and not kwargs:
            out = self.product("matmul", args[0], args[1], None)
        else:
            return func(*args, **kwargs)
        return func(*args, **kwargs) if out is None else out

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return self.product("linear", input, weight.mT, bias) if weight.ndim == 2 else None

    def product(self, op: str, a: Any, b: Any, bias: Tensor | None) -> Tensor | None:
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.ndim < 2 or b.ndim != 2:
            return None
        m = a.numel() // max(a.shape[-1], 1)
        site = Site(op=op, m=m, n=b.shape[1], k=b.shape[0], dtype=a.dtype, device=a.device)
        if why_not(site, self.where) is not None:
            return None
        return torch.ops.fp8fn.gemm(a, b, bias, self.recipe, None)  # type: ignore[no-any-return]
