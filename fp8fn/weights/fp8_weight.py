"""`FP8Weight`: a `ScaledTensor` that any module holds as a parameter.

The subclass works by `__torch_dispatch__` alone. Autograd, autocast, functorch and AOTAutograd run above it and call
`mm`, `bmm`, `addmm` and views, so the derivatives in the activations are those of `mm`, to any order. `OPERATIONS` maps
an ATen op to its form for FP8 weights; the modules beside this one fill it, before the first op of a weight. Any other
op dequantizes the weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor

from fp8fn.meta.untraced import untraced
from fp8fn.ops.activations import Activations, check_activations
from fp8fn.ops.formats import INPUT_DTYPES, short_name
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.layout import WHOLE
from fp8fn.ops.sharded import local_of
from fp8fn.ops.torch_private.core import no_torch_function, pytree
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.weights import fsdp
from fp8fn.weights.dense_view import DenseView, written
from fp8fn.weights.form import Form, block_by_dimension, cache_key

F = TypeVar("F", bound=Callable[..., Any])

OPERATIONS: Final[dict[Any, Callable[..., Any]]] = {}
_fills: Final[list[Callable[[], None]]] = []
_PARTS: Final = ["_data", "_scale"]
_OWN_ATTRIBUTES: Final = frozenset({*_PARTS, "_form", "_is_param"})
_REQUIRES_GRAD: Final[Any] = Tensor.requires_grad
_warned: Final[set[str]] = set()


class NoForm(Exception):
    """An op has no form for a weight, or for its view, and has to dequantize it."""


@untraced
def _dispatch(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Runs an op that has an `FP8Weight` among its arguments."""
    kwargs = kwargs or {}
    if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
        # PyTorch gives a view of a normal tensor the version counter of its base, and an inference tensor has none.
        with torch.inference_mode(False):
            return _run(func, args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _fills:
        for fill in tuple(_fills):
            fill()
        _fills.clear()  # when all is filled: another thread may be here
    operation = OPERATIONS.get(func) or OPERATIONS.get(func.name())
    if operation is None:
        return _without_form(func, args, kwargs)
    try:
        return operation(*args, **kwargs)
    except NoForm:
        pass  # outside of the handler, so that an error of the op does not name this one
    return dequantized(func, args, kwargs)


def _text(weight: FP8Weight, *, tensor_contents: Any = None) -> str:
    """The `repr`: no values, which may be large or on another device."""
    block = f"({', '.join(map(str, weight._form.block))})"
    where = f", device={str(weight.device)!r}" if weight.device.type != "cpu" else ""
    text = (
        f"FP8Weight({short_name(weight._data.dtype)}{list(weight.shape)}, block={block}, dtype={weight.dtype}{where})"
    )
    return f"Parameter containing:\n{text}" if is_parameter(weight) else text


class FP8Weight(Tensor):
    """A frozen FP8 weight with its scales, which `nn.Parameter` takes and which any module computes with.

    Matrix products (`F.linear`, `@`, `einsum`, `addmm`, `bmm`, …) multiply unquantized activations by the FP8 data, and
    are differentiable in the activations. Other ops dequantize the weight at each call, with one warning for each op.
    An op that would write into the weight or a view of it raises an error, except `copy_` and state-dict loads: they
    copy the data of an `FP8Weight` and quantize a plain tensor. `half()`, `bfloat16()` and `to(dtype)` change `dtype`
    and share the data. `fp8fn.quantize` returns the weight's own data.

    Args:
        scaled: `ScaledTensor` that the weight holds, with no copy.
        dtype: Type that the weight stands for: `weight.dtype`, and the type of the activations that it multiplies.
        activations: "16bit" multiplies unquantized activations. "fp8" also quantizes the activations and the gradients
            of products with more than 128 rows, in blocks of `(1, 128)`, where that is estimated to be faster.
            "fp8_fast" also leaves their sums in the tensor core's accumulator of some 14 bits, but for groups; the
            weight needs one scale for each output or in all.

    Shape:
        `scaled (N, K)`, or `(E, N, K)` for experts.

    Raises:
        TypeError: `scaled` is not a `ScaledTensor`, or `dtype` is not bfloat16, float16 or float32.
        ValueError: `activations` is none of the three, or is "fp8_fast" and the weight has other scales.

    Example:
        >>> layer = torch.nn.Linear(256, 512, bias=False)
        >>> scaled = fp8fn.quantize(layer.weight.detach(), (128, 128))
        >>> layer.weight = torch.nn.Parameter(fp8fn.FP8Weight(scaled, torch.float32), requires_grad=False)
        >>> layer(torch.randn(4, 256)).shape
        torch.Size([4, 512])
    """

    # Pickles and checkpoints name the class by its public name.
    __module__ = "fp8fn"
    __torch_function__ = cast(Any, no_torch_function)
    __torch_dispatch__ = cast(Any, classmethod(_dispatch))
    __repr__ = cast(Any, _text)

    if TYPE_CHECKING:
        _data: Tensor
        _scale: Tensor
        _form: Form

    def __new__(
        cls, scaled: ScaledTensor, dtype: torch.dtype = torch.bfloat16, activations: Activations = "16bit"
    ) -> FP8Weight:
        if not isinstance(scaled, ScaledTensor):
            remedy = "use fp8fn.quantize(weight, (128, 128)), or ScaledTensor(data, scale, block)"
            raise TypeError(f"FP8Weight: scaled is {kind_of(scaled)}; {remedy}")
        check_dtype("FP8Weight", dtype)
        check_activations("FP8Weight", activations, scaled.block)
        form = Form(block_by_dimension(scaled.ndim, scaled.block), dtype, activations=activations)
        return weight_of(scaled.data, scaled.scale, form)

    @property
    def activations(self) -> Activations:
        """How products read the activations: "16bit", or "fp8" or "fp8_fast" where they have many rows."""
        return self._form.activations

    @property
    def scaled(self) -> ScaledTensor:
        """The `ScaledTensor` that shares the weight's memory."""
        block = self._form.block
        if (
            self._form.flat
            or len(block) < 2
            or any(b != 1 and n != 1 for b, n in zip(block[:-2], self.shape, strict=False))
        ):
            raise ValueError(
                f"FP8Weight.scaled: a view of shape {tuple(self.shape)} in blocks of {block} has no matrices"
            )
        return ScaledTensor(self._data, self._scale, (block[-2], block[-1]))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the data and the scales; `numel() * element_size()` are those of the type that it stands for."""
        return self._data.nbytes + self._scale.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """`data * scale` in float32, rounded once to `dtype`: by default the type that the weight stands for."""
        dtype = self.dtype if dtype is None else dtype
        check_dtype("FP8Weight.dequantize", dtype)
        scale = self._scale.float()
        for axis, (block, size) in enumerate(zip(self._form.block, self._data.shape, strict=True)):
            if block not in (1, WHOLE) and size != 1:
                scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
        out = (self._data.float() * scale).to(dtype)
        return out.reshape(-1) if self._form.flat else out

    def __tensor_flatten__(self) -> tuple[list[str], Form]:
        return _PARTS, self._form

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], form: Form, size: Any, stride: Any) -> FP8Weight:
        return weight_of(parts["_data"], parts["_scale"], form)

    def _stable_hash_for_caching(self) -> str:
        return cache_key("FP8Weight", self._form, self._data, self._scale)

    # PyTorch declares both as attributes.
    @property
    def requires_grad(self) -> bool:
        """False, for an FP8 weight is frozen, unless it was gathered from a master that is trained."""
        return bool(self._form.gathered and _REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> FP8Weight:
        """Has no effect but one warning: `nn.Parameter` and `load_state_dict(assign=True)` pass True by default."""
        if self._form.gathered:
            Tensor.requires_grad_(self, requires_grad)
        elif requires_grad and _is_first("requires_grad"):
            warnings.warn("an FP8Weight stays frozen: requires_grad=True has no effect on it", stacklevel=2)
        return self

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # PyTorch's setter changes the sizes of the wrapper and leaves its two tensors as they are.
        if not isinstance(value, Tensor) or value.shape != self.shape or value.device != self.device:
            what = f"{kind_of(value)} of shape {tuple(getattr(value, 'shape', ()))}"
            raise RuntimeError(
                f"weight.data = {what}: the weight has shape {tuple(self.shape)} on {self.device}; "
                "assign a new torch.nn.Parameter to the module"
            )
        if not isinstance(value, FP8Weight):
            self.copy_(value)
        elif value.dtype != self.dtype:
            raise RuntimeError(
                f"weight.data = an FP8Weight for {value.dtype}; this one stands for {self.dtype}; use "
                f"value.to({self.dtype}), or model.to({value.dtype}), which change no data"
            )
        else:
            self._data, self._scale, self._form = value._data, value._scale, value._form

    def share_memory_(self) -> FP8Weight:
        for part in (self._data, self._scale):
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self._data.is_shared())

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The bytes that FSDP2 gathers."""
        return fsdp.before_gather(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype | None, *, out: Any = None
    ) -> Any:
        """The whole weight over the gathered bytes; `out` is that of an earlier gather."""
        data, scale = fsdp.after_gather(outputs, metadata)
        if out is not None:
            weight = local_of(out)
            weight._data, weight._scale = data, scale
            return None
        form = metadata.form._replace(dtype=param_dtype or metadata.form.dtype, shares=False)
        return weight_of(data, scale, form), outputs

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises BufferError: PyTorch would export a null pointer, and its reader would crash the process."""
        raise BufferError("an FP8Weight has no memory of its own; export weight.dequantize(), or weight.scaled.data")

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = _attributes(self) or None
        if is_parameter(self):
            return torch.nn.Parameter, (self.detach(), False), state
        return FP8Weight, (self.scaled, self.dtype, self.activations), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not _OWN_ATTRIBUTES.isdisjoint(state):
            raise ValueError(f"FP8Weight: the state of a pickle holds {sorted(_OWN_ATTRIBUTES.intersection(state))}")
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Weight:
        if id(self) not in memo:
            copy = cast(FP8Weight, self.detach().clone())  # with the strides that the kernels load
            memo[id(self)] = torch.nn.Parameter(copy, requires_grad=False) if is_parameter(self) else copy
            if not is_parameter(self):  # PyTorch's parameters lose their attributes here
                copy.__dict__.update(deepcopy(_attributes(self), memo))
        made: FP8Weight = memo[id(self)]
        return made


def weight_of(data: Tensor, scale: Tensor, form: Form) -> FP8Weight:
    """The weight of these parts, which are not checked."""
    size, stride = ((data.numel(),), (1,)) if form.flat else (data.shape, data.stride())
    made = Tensor._make_wrapper_subclass(FP8Weight, size, strides=stride, dtype=form.dtype, device=data.device)
    made._data, made._scale, made._form = data, scale, form
    return made


def fill_before_first_op(fill: Callable[[], None]) -> None:
    """Calls `fill()`, which imports modules that have forms of ops, when a weight first needs one."""
    _fills.append(fill)


def implements(*ops: Any) -> Callable[[F], F]:
    """Decorates the form of ops for FP8 weights. It raises `NoForm` where the op has to dequantize.

    `ops` are ATen's, or the names of ops of libraries that may be imported later.
    """

    def register(operation: F) -> F:
        OPERATIONS.update(dict.fromkeys(ops, operation))
        return operation

    return register


def check_dtype(name: str, dtype: object) -> None:
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: dtype={dtype} is no type of activations; use bfloat16, float16 or float32")


def _attributes(weight: FP8Weight) -> dict[str, Any]:
    """The attributes that a user has set on a weight."""
    return {name: value for name, value in weight.__dict__.items() if name not in _OWN_ATTRIBUTES}


def is_parameter(weight: FP8Weight) -> bool:
    return getattr(weight, "_is_param", False)


def is_gathered(tensor: object) -> bool:
    """Whether a tensor is an `FP8Weight` that stands for a master in a training step."""
    return isinstance(tensor, FP8Weight) and tensor._form.gathered


def _is_first(key: str) -> bool:
    if key in _warned:
        return False
    _warned.add(key)
    return True


def _without_form(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op that `OPERATIONS` does not have: its decomposition, or the op on dequantized weights."""
    if any(isinstance(target, FP8Weight) for target in written(func, args, kwargs)):
        raise NotImplementedError(
            f"{func} would write into an FP8Weight, whose 8-bit data cannot hold the result; use weight.copy_(values), "
            "which quantizes, or first replace the parameter by torch.nn.Parameter(weight.dequantize())"
        )
    if func.namespace == "fp8fn":
        out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            raise TypeError(f"{func} takes no FP8Weight; pass weight.scaled, or weight.dequantize()")
        return out
    if "c10d" in func.namespace:
        raise NotImplementedError(
            f"{func} has no form for an FP8Weight; run the collective on weight.scaled.data.view(torch.uint8) and on "
            "weight.scaled.scale"
        )
    out = func.decompose(*args, **kwargs)
    return dequantized(func, args, kwargs) if out is NotImplemented else out


# What PyTorch's attention and encoder layers call at inference instead of their products.
_FUSED_LAYERS: Final = ("aten._native_multi_head_attention.default", "aten._transformer_encoder_layer_fwd.default")


def dequantized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op on dequantized weights, with one warning for each op. A view becomes a `DenseView`."""
    if _is_first(str(func)):
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FP8Weight)]
        more = ", and writing into its result is an error" if func.is_view else ""
        if str(func) in _FUSED_LAYERS:
            more = "; torch.backends.mha.set_fastpath_enabled(False) has its products computed one by one, in FP8"
        warnings.warn(f"{func} has no FP8 form: the weight {shapes[0]} is dequantized at each call{more}", stacklevel=3)
    args, kwargs = pytree.tree_map_only(FP8Weight, FP8Weight.dequantize, (args, kwargs))
    out = func(*args, **kwargs)
    return pytree.tree_map_only(Tensor, DenseView, out) if func.is_view else out


torch.serialization.add_safe_globals([FP8Weight])
