"""Errors of public functions about arguments: each names the argument, its value, and a remedy.

`checked` declares a check for each argument. A successful call runs none of them. The checks run only after PyTorch's
dispatcher or an op has raised an error, to state the error in terms of the caller's arguments.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
from fp8fn.ops.activations import check_activations
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_FORMATS
from fp8fn.ops.groups import ROWS, STEP, check_ends
from fp8fn.ops.kinds import kind_of, with_article
from fp8fn.ops.layout import WHOLE, known_block, unknown_block
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.weights.fp8_weight import FP8Weight

P = ParamSpec("P")
R = TypeVar("R")

# Raises an error if the value of argument `name` of function `op` does not fit.
Check: TypeAlias = Callable[[str, str, Any], None]
# Raises an error if the arguments, given by name, do not fit each other.
Together: TypeAlias = Callable[[str, Mapping[str, Any]], None]

_FLOATS: Final = "bfloat16, float16 or float32"


def checked(together: Together | None = None, /, **checks: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: if a call raises, the error becomes that of the first argument whose check fails."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return fn(*args, **kwargs)
            except Exception:
                wrong = _first_wrong(fn, checks, together, args, kwargs)
                if wrong is None:
                    raise
                raise wrong from None

        return call

    return decorate


def _first_wrong(
    fn: Callable[..., Any], checks: Mapping[str, Check], together: Together | None, args: Any, kwargs: Any
) -> TypeError | ValueError | None:
    """The error of the first argument whose check fails; None if the call failed for another reason."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:  # an argument is missing or unknown, and Python's error names it
        return None
    bound.apply_defaults()
    try:
        for name, check in checks.items():
            check(fn.__name__, name, bound.arguments[name])
        if together is not None:
            together(fn.__name__, bound.arguments)
    except (TypeError, ValueError) as wrong:
        return wrong
    return None


def optional(check: Check) -> Check:
    """A check that None passes too."""
    return lambda op, name, value: None if value is None else check(op, name, value)


def operand(op: str, name: str, value: object) -> None:
    """A tensor or a `ScaledTensor`."""
    if isinstance(value, GroupedScaledTensor):
        raise TypeError(f"{op}: {name} is a GroupedScaledTensor; use fp8fn.grouped_gemm, which multiplies by groups")
    if isinstance(value, ScaledTensor):
        return
    _strided(op, name, value, "a tensor or a ScaledTensor")
    assert isinstance(value, Tensor)
    _floats(op, name, value)


def activation(op: str, name: str, value: object) -> None:
    """An `operand` that may be a vector."""
    operand(op, name, value)
    if isinstance(value, Tensor) and value.ndim < 1:
        raise ValueError(f"{op}: {name} has shape (); it needs at least one dimension")


def weight(op: str, name: str, value: object) -> None:
    """An `operand` `(..., N, K)`, if it is a tensor."""
    operand(op, name, value)
    if isinstance(value, Tensor):
        _two_dimensions(op, name, value)


def right(op: str, name: str, value: object) -> None:
    """An `operand` `(..., K, N)`, if it is a tensor."""
    operand(op, name, value)
    if isinstance(value, Tensor):
        _two_dimensions(op, name, value, "[:, None]")


def grouped_operand(op: str, name: str, value: object) -> None:
    """An operand of `grouped_gemm`."""
    if isinstance(value, (ScaledTensor, GroupedScaledTensor)):
        return
    _strided(op, name, value, "a tensor, a ScaledTensor or a GroupedScaledTensor")
    assert isinstance(value, Tensor)
    _floats(op, name, value)


def tensor(op: str, name: str, value: object) -> None:
    """A strided tensor of any type."""
    _strided(op, name, value, "a tensor")


def activations(op: str, name: str, value: object) -> None:
    check_activations(op, value)


def floats(op: str, name: str, value: object) -> None:
    """A floating-point tensor of 16 or 32 bits."""
    if isinstance(value, (ScaledTensor, GroupedScaledTensor)):
        raise TypeError(f"{op}: {name} is {kind_of(value)}, in FP8 already; use a tensor of {_FLOATS}")
    _strided(op, name, value, "a tensor")
    assert isinstance(value, Tensor)
    _floats(op, name, value)


def matrix(op: str, name: str, value: object) -> None:
    """`floats` with at least two dimensions."""
    floats(op, name, value)
    assert isinstance(value, Tensor)
    _two_dimensions(op, name, value)


def bias(op: str, name: str, value: object) -> None:
    """`floats` or None."""
    if value is None:
        return
    if isinstance(value, (int, float)):
        remedy = f"use a tensor of shape (N,), torch.full((N,), {value}) for one, or add it to the result"
        raise TypeError(f"{op}: {name}={value} is {kind_of(value)}; {remedy}")
    floats(op, name, value)


def offsets(op: str, name: str, value: object) -> None:
    """The end offsets of groups."""
    if value is None:
        raise TypeError(f"{op}: {name} is None; use a tensor of torch.int32, the end of each group")
    counts(op, name, value, "tokens")
    assert isinstance(value, Tensor)
    check_ends(op, value)


def counts(op: str, name: str, value: object, counted: str = "rows") -> None:
    """The number of rows of each expert."""
    if isinstance(value, (list, tuple)):
        remedy = f"use torch.tensor({name}, dtype=torch.int32), on the device of the {counted}"
        raise TypeError(f"{op}: {name}={_short(value)} is {kind_of(value)}; {remedy}")
    _strided(op, name, value, "a tensor of torch.int32")


def quantized(op: str, name: str, value: object) -> None:
    """A `ScaledTensor`."""
    if isinstance(value, ScaledTensor):
        return
    if isinstance(value, FP8Weight):
        raise TypeError(f"{op}: {name} is an FP8Weight; use {name}.scaled, its ScaledTensor")
    remedy = "use a ScaledTensor, as fp8fn.quantize returns it"
    raise TypeError(f"{op}: {name} is {kind_of(value)}; {remedy}, or ScaledTensor(data, scale, block)")


def any_quantized(op: str, name: str, value: object) -> None:
    """A `ScaledTensor` or a `GroupedScaledTensor`."""
    if not isinstance(value, GroupedScaledTensor):
        quantized(op, name, value)


def block(op: str, name: str, value: object) -> None:
    if known_block(value) is None:
        raise unknown_block(f"{op}: {name}", value)


def tokens_block(op: str, name: str, value: object) -> None:
    """The block of tokens in groups: a number."""
    remedy = f"use {ROWS}, {STEP}, or {WHOLE} for all tokens of a group"
    if not isinstance(value, int):
        raise TypeError(f"{op}: {name}={_short(value)} is {kind_of(value)}; {remedy}")
    if value not in (ROWS, STEP, WHOLE):
        raise ValueError(f"{op}: {name}={value} is not a block of grouped tokens; {remedy}")


def fp8_dtype(op: str, name: str, value: object) -> None:
    if value is not None and value not in FP8_DTYPES:
        remedy = f"use one of {FP8_DTYPES}, or None for the device's own e4m3"
        raise TypeError(f"{op}: {name}={_short(value)} is not an FP8 type; {remedy}")


def out_dtype(op: str, name: str, value: object) -> None:
    if value is not None and value not in INPUT_DTYPES:
        remedy = "use torch.bfloat16, torch.float16 or torch.float32"
        raise TypeError(f"{op}: {name}={_short(value)} is not an output type; {remedy}")


def scale(op: str, name: str, value: object) -> None:
    if value not in SCALE_FORMATS:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{op}: {name}={_short(value)} is not a scale format; use one of {SCALE_FORMATS}")


def flag(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}={_short(value)} is {kind_of(value)}; use True or False")


def epsilon(op: str, name: str, value: object) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name}={_short(value)} is {kind_of(value)}; use a float, 1e-6 for one")
    if not 0 <= value < math.inf:
        raise ValueError(f"{op}: {name}={value} is not finite and at least 0; use a small float, 1e-6 for one")


def count(op: str, name: str, value: object) -> None:
    """A positive number."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{op}: {name}={_short(value)} is {kind_of(value)}; use an int, 1 at least")
    if value < 1:
        raise ValueError(f"{op}: {name}={value} is under 1; use an int, 1 at least")


def function(op: str, name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{op}: {name}={_short(value)} is {kind_of(value)}; use a function or a module")


def compilable(op: str, name: str, value: object) -> None:
    """A function and no class, of which torch.compile would compile the calls of all instances, from now on."""
    if isinstance(value, type):
        raise TypeError(
            f"{op}: {name} is the class {value.__name__}; use a function or a module, as {value.__name__}(...)"
        )
    function(op, name, value)


def device(op: str, name: str, value: object) -> None:
    """A device of PyTorch, or its name."""
    remedy = "use a torch.device or its name, 'cpu' or 'cuda:0' for one"
    if not isinstance(value, (torch.device, str, int)):
        raise TypeError(f"{op}: {name}={value!r} is {kind_of(value)}; {remedy}")
    try:
        torch.device(value)
    except RuntimeError:
        raise ValueError(f"{op}: {name}={value!r} is no device of PyTorch; {remedy}") from None


def product_of(left: str, right: str, *, transposed: bool) -> Together:
    """A check that K, the devices and the bias of `left @ right + bias` agree; `transposed`: `right` is `(N, K)`."""

    def together(op: str, given: Mapping[str, Any]) -> None:
        a, b, added = given[left], given[right], given["bias"]
        k, n = (b.shape[-1], b.shape[-2]) if transposed else (b.shape[-2], b.shape[-1])
        if a.shape[-1] != k:
            shape, other = ("(N, K)", "(K, N)") if transposed else ("(K, N)", "(N, K)")
            raise ValueError(
                f"{op}: {left} {tuple(a.shape)} has K={a.shape[-1]} and {right} {tuple(b.shape)} has K={k}; "
                f"{right} must be {shape}, so pass weight.mT for a weight of shape {other}"
            )
        for name, value in ((right, b), ("bias", added)):
            if value is not None and value.device != a.device:
                raise ValueError(f"{op}: {left} is on {a.device} and {name} on {value.device}; move them to one device")
        if added is not None and tuple(added.shape) != (n,):
            raise ValueError(f"{op}: bias has shape {tuple(added.shape)}; it must be ({n},), N of {right}")

    return together


def _strided(op: str, name: str, value: object, wanted: str) -> None:
    """Raises an error for other objects than tensors, and for tensors without strides."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        if value is None:
            raise TypeError(f"{op}: {name} is None; use {wanted}")
        made = f"torch.from_numpy({name})" if kind == "ndarray" else f"torch.tensor({name})"
        remedy = f", {made} for one" if kind in ("ndarray", "list", "tuple", "int", "float") else ""
        raise TypeError(f"{op}: {name} is {with_article(kind)}; use {wanted}{remedy}")
    if value.is_nested:
        remedy = f"use {name}.to_padded_tensor(0.0), or a call for each of {name}.unbind()"
        raise TypeError(f"{op}: {name} is a nested tensor, of layout {value.layout}; {remedy}")
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {name} has layout {value.layout}; use {name}.to_dense()")


def _floats(op: str, name: str, value: Tensor) -> None:
    if value.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: {name} has dtype {value.dtype}; use {_FLOATS}, {name}.to(torch.float32) for one")


def _two_dimensions(op: str, name: str, value: Tensor, index: str = "[None]") -> None:
    """Raises ValueError for fewer dimensions; `index` makes the matrix of a vector."""
    if value.ndim < 2:
        given = tuple(value.shape)
        made = name + (index if value.ndim else "[None, None]")
        raise ValueError(f"{op}: {name} has shape {given}; it needs at least two dimensions, {made} for one")


def _short(value: object) -> str:
    return reprlib.repr(value)
