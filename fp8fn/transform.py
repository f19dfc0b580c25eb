"""`fp8(fn)`: a function transform that computes the eligible matrix products of `fn` in FP8."""

from __future__ import annotations

import functools
import inspect
import logging
import string
from collections.abc import Callable, Mapping, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8fn import arguments
from fp8fn.contraction import Product, as_product
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.kinds import kind_of, with_article
from fp8fn.ops.recipe import BLOCKWISE, Recipe, recipe_key
from fp8fn.ops.sharded import plain_of
from fp8fn.ops.torch_private.core import is_traceable_wrapper_subclass, linear
from fp8fn.site import Site, Where, check_where, why_not
from fp8fn.weights.fp8_weight import is_gathered

P = ParamSpec("P")
R = TypeVar("R")
_LOG: Final = logging.getLogger("fp8fn")


def fp8(fn: Callable[P, R], *, recipe: Recipe | str = BLOCKWISE, where: Where = None) -> Callable[P, R]:
    """Transforms a function into one that computes its matrix products in FP8.

    The transformed function takes and returns what `fn` does, and composes with `torch.func.grad`, `vmap`,
    `functional_call` and `torch.compile`. It replaces products by a matrix: `F.linear`, `@`, `torch.matmul`,
    `torch.mm`, `torch.inner`, `torch.linalg.matmul`, `torch.addmm` with `beta` and `alpha` of 1, and each
    `torch.einsum` and `torch.tensordot` that is one product of two matrices. Products of two batches (attention), of
    vectors and of small matrices stay as they are; the log `fp8fn` says why. An operand that PyTorch refuses is
    PyTorch's error.

    Args:
        fn: Function or module that returns its result when it is called: no generator and no coroutine.
        recipe: `Recipe` or name of a preset.
        where: Function of a `Site` that selects products; a function's weights have no names, so patterns do not apply.

    Returns:
        A function with the signature of `fn`.

    Raises:
        TypeError: `fn` or `where` is not such a function.
        ValueError: The recipe does not exist.

    Example:
        >>> mlp = fp8fn.fp8(lambda x, w: torch.relu(x @ w))
        >>> mlp(torch.randn(16, 128), torch.randn(128, 256)).shape
        torch.Size([16, 256])
    """
    arguments.function("fp8", "fn", fn)
    check_where(where)
    if where is not None and not callable(where):
        raise TypeError(f"fp8: where={where!r}; a function's weights have no names, pass a function of a Site")
    key = recipe_key(recipe)
    _check_at_once(fn)
    logged: set[tuple[str, str]] = set()

    @functools.wraps(fn)
    def transformed(*args: P.args, **kwargs: P.kwargs) -> R:
        with _Substitute(key, where, logged):
            out = fn(*args, **kwargs)
        if isinstance(out, (GeneratorType, CoroutineType, AsyncGeneratorType)):
            if not isinstance(out, AsyncGeneratorType):
                out.close()  # otherwise Python warns that nothing awaited it
            raise TypeError(_LATER.format(name=_name(fn), kind=kind_of(out)))
        return out

    return transformed


_LATER: Final = (
    "fp8: fn={name} returns {kind}, whose body runs after fp8 has ended; transform the function that computes one "
    "item, or awaits nothing, and call that inside"
)


def _check_at_once(fn: Callable[..., Any]) -> None:
    """Raises TypeError for a function whose call returns before its body has run."""
    called: Any = None if inspect.isclass(fn) else getattr(fn, "forward" if isinstance(fn, nn.Module) else "__call__")
    for kind, is_of in (
        ("generator", inspect.isgeneratorfunction),
        ("coroutine", inspect.iscoroutinefunction),
        ("async_generator", inspect.isasyncgenfunction),
    ):
        if is_of(fn) or is_of(called):
            raise TypeError(_LATER.format(name=_name(fn), kind=with_article(kind)))


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


class _Call(NamedTuple):
    """A call that computes `a @ b + bias` if its operands are matrices; an einsum's result is permuted by `order`."""

    op: str
    a: Any
    b: Any
    bias: Any = None
    out: Any = None
    shape: Sequence[int] | None = None
    order: tuple[int, ...] | None = None


def _linear(input: Any, weight: Any, bias: Any = None) -> _Call | None:
    return _Call("linear", input, weight.mT, bias) if weight.ndim == 2 else None


def _matmul(input: Any, other: Any, *, out: Any = None) -> _Call | None:
    return _Call("matmul", input, other, out=out)


def _rmatmul(input: Any, other: Any) -> _Call | None:
    return _Call("matmul", other, input)


def _mm(input: Any, mat2: Any, *, out: Any = None) -> _Call | None:
    return _Call("matmul", input, mat2, out=out) if input.ndim == 2 else None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, out: Any = None) -> _Call | None:
    plain = beta == 1 and alpha == 1 and mat1.ndim == 2
    return _Call("addmm", mat1, mat2, input, out) if plain else None


def _inner(input: Any, other: Any, *, out: Any = None) -> _Call | None:
    return _Call("inner", input, other.mT, out=out) if other.ndim == 2 else None


def _einsum(equation: Any, *operands: Any) -> _Call | None:
    if len(operands) == 4 and isinstance(equation, Tensor):  # with lists of axes: a, [0, 1], b, [1, 2], [0, 2]
        a, (first, b, second, last) = equation, operands
        if any(axis < 0 for axis in (*first, *second, *last)):
            return None
        *given, result = ("".join(string.ascii_letters[axis] for axis in axes) for axes in (first, second, last))
        return _einsum(f"{','.join(given)}->{result}", a, b)
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if len(listed) != 2 or not isinstance(equation, str):
        return None
    a, b = listed
    terms, arrow, out = equation.partition("->")
    if "..." in terms.partition(",")[2]:  # only the first operand may have further axes
        a, b, equation = b, a, ",".join(reversed(terms.split(","))) + arrow + out
    product = as_product(equation, a.ndim, b.ndim)
    return None if product is None else _contracted("einsum", a, b, product)


def _tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> _Call | None:
    if isinstance(dims, int):
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    elif isinstance(dims, (list, tuple)) and len(dims) == 2 and all(isinstance(d, (list, tuple)) for d in dims):
        if any(not -x.ndim <= axis < x.ndim for x, axes in zip((a, b), dims, strict=True) for axis in axes):
            return None
        left, right = ([axis % x.ndim for axis in axes] for x, axes in zip((a, b), dims, strict=True))
    else:
        return None
    if len(left) == 0 or not len(left) == len(right) == len(set(left)) == len(set(right)):
        return None
    free = [[axis for axis in range(x.ndim) if axis not in axes] for x, axes in ((a, left), (b, right))]
    product = Product(
        a=(*free[0], *left), b=(*right, *free[1]), out=tuple(range(len(free[0]) + len(free[1]))), contracted=len(left)
    )
    return None if out is not None else _contracted("tensordot", a, b, product)


def _unmatched(*_: Any, **__: Any) -> None:
    """Stands for products that are never matched."""


def _contracted(op: str, a: Tensor, b: Tensor, product: Product) -> _Call | None:
    """A contraction as a product of two matrices; None if an operand is a vector or an axis is repeated."""
    if product.repeats(a.shape, b.shape):
        return None
    many = product.contracted
    a, b = a.permute(product.a), b.permute(product.b)
    rows, columns = a.shape[: a.ndim - many], b.shape[many:]
    if not rows or not columns:
        return None
    left = a.flatten(a.ndim - many) if many > 1 else a
    right = b.flatten(0, many - 1) if many > 1 else b
    right = right.flatten(1) if len(columns) > 1 else right
    return _Call(op, left, right, shape=(*rows, *columns), order=product.out)


# The reader of each PyTorch product's arguments. The readers' parameters have PyTorch's names.
_CALLS: Final[Mapping[Any, Callable[..., _Call | None]]] = {
    F.linear: _linear,
    linear: _linear,
    torch.matmul: _matmul,
    torch.linalg.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: _rmatmul,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.inner: _inner,
    torch.Tensor.inner: _inner,
    torch.functional.einsum: _einsum,
    torch.functional.tensordot: _tensordot,
    **dict.fromkeys(
        (
            torch.bmm,
            torch.Tensor.bmm,
            torch.baddbmm,
            torch.Tensor.baddbmm,
            torch.Tensor.baddbmm_,
            torch.addbmm,
            torch.Tensor.addbmm,
            torch.Tensor.addbmm_,
            torch.Tensor.addmm_,
            torch.linalg.multi_dot,
            torch.bilinear,
        ),
        _unmatched,
    ),
}
_NOT_MATCHED: Final = "it is not matched as a product by one matrix; F.linear and torch.matmul are"
_NOT_PLAIN: Final = "an operand is a tensor subclass other than DTensor, or has no strides"
_NOT_FITTING: Final = "its operands are no matrix and batch of rows of one type, or its `out` is of another"


class _Substitute(TorchFunctionMode):
    """Replaces products by `fp8fn::gemm`, and logs each reason to leave a product alone once."""

    def __init__(self, recipe: str, where: Where, logged: set[tuple[str, str]]) -> None:
        super().__init__()
        self.recipe, self.where, self.logged = recipe, where, logged

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = _CALLS.get(func)
        if read is None:
            return func(*args, **kwargs)
        found = self.product(read, args, kwargs)
        if not isinstance(found, str):
            return found
        if not torch.compiler.is_compiling():
            self.log(getattr(func, "__name__", str(func)), found)
        return func(*args, **kwargs)

    def log(self, name: str, reason: str) -> None:
        if (name, reason) not in self.logged:
            self.logged.add((name, reason))
            _LOG.info("fp8: a %s is left as it is: %s", name, reason)

    def product(self, read: Callable[..., _Call | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | str:
        """The product in FP8, or the reason to leave it alone; a call that PyTorch refuses is also left alone."""
        if not all(_is_plain(arg) for arg in (*args, *kwargs.values())):
            return _NOT_PLAIN
        call = _read(read, args, kwargs)
        if call is None:
            return _NOT_MATCHED
        if not _fits(call):
            return _NOT_FITTING
        a, b = call.a, call.b
        m = a.numel() // max(a.shape[-1], 1)
        site = Site(op=call.op, m=m, n=b.shape[1], k=b.shape[0], dtype=a.dtype, device=a.device)
        reason = why_not(site, self.where)
        if reason is not None:
            return reason
        out: Tensor = torch.ops.fp8fn.gemm(a, b, call.bias, self.recipe, None)
        if call.shape is not None and call.order is not None:
            out = out.reshape(call.shape).permute(call.order)
            first = call.order[0] if call.order else 0
            if call.order == (*range(first, out.ndim), *range(first)):
                out = out.contiguous()  # PyTorch multiplies b by a where b's axes come first, and a view relies on it
        return out if call.out is None else call.out.copy_(out)


def _read(read: Callable[..., _Call | None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
    """The product that a call computes; None if PyTorch refuses the arguments, or takes them in an older form."""
    try:
        return read(*args, **kwargs)
    except (TypeError, AttributeError, RuntimeError, IndexError):
        return None


def _is_plain(arg: Any) -> bool:
    """Whether fp8fn's ops can read an argument: a plain strided tensor, a list of such, or no tensor at all."""
    if isinstance(arg, (list, tuple)):
        return all(_is_plain(each) for each in arg)
    if not isinstance(arg, Tensor):
        return True
    if arg.layout is not torch.strided or arg.is_nested:
        return False
    plain = plain_of(arg)
    return is_gathered(plain) or not is_traceable_wrapper_subclass(plain)


def _fits(call: _Call) -> bool:
    """Whether `a @ b + bias` is a product by a matrix that PyTorch accepts; PyTorch raises the errors of all others."""
    a, b, bias, out = call.a, call.b, call.bias, call.out
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.ndim < 2 or b.ndim != 2:
        return False
    if a.shape[-1] != b.shape[0] or a.device != b.device:
        return False
    autocast = a.device.type != "meta" and torch.is_autocast_enabled(a.device.type)
    if a.dtype != b.dtype and not (autocast and {a.dtype, b.dtype} <= set(INPUT_DTYPES)):
        return False
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.ndim != 1 or bias.shape[0] != b.shape[1] or bias.device != a.device:
            return False
        if bias.dtype != a.dtype and not (autocast and bias.dtype in INPUT_DTYPES):
            return False
    if out is None:
        return True
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, bias, out))
    same = isinstance(out, Tensor) and out.dtype == a.dtype and out.device == a.device
    return same and tuple(out.shape) == (*a.shape[:-1], b.shape[1]) and not tracked and not autocast
