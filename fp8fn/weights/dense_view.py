"""`DenseView`: the dequantized values of a view that has no FP8 form.

A write would not reach the weight, and is an error. Reads run on the dense tensor inside. A view of a `DenseView` is
one too; any other result is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from fp8fn.meta.untraced import untraced
from fp8fn.ops.torch_private.core import no_torch_function, pytree
from fp8fn.weights.form import cache_key

# Methods that read memory without an op, or print.
_READERS: Final = (
    "__array__", "__dlpack__", "__dlpack_device__", "__format__", "__reduce_ex__", "data_ptr", "numpy", "tolist",
    "untyped_storage",
)  # fmt: skip


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an op writes into, by its schema."""
    values = [
        args[place] if place < len(args) else kwargs.get(spec.name)
        for place, spec in enumerate(func._schema.arguments)
        if spec.alias_info is not None and spec.alias_info.is_write
    ]
    return pytree.tree_leaves(values)


@untraced
def _dispatch(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Runs an op on the dense tensor inside."""
    kwargs = kwargs or {}
    # The schemas of c10d's ops do not say which tensors they write.
    targets = pytree.tree_leaves((args, kwargs)) if func.namespace == "c10d" else written(func, args, kwargs)
    if any(isinstance(target, DenseView) for target in targets):
        raise NotImplementedError(
            f"{func} would write into the dequantized values of a view of an FP8Weight, and would not change the "
            "weight; write the whole weight, or whole blocks of it, or first clone the view"
        )
    if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
        # As in `FP8Weight`: an inference tensor has no version counter that its base could share.
        with torch.inference_mode(False):
            return _run(func, args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(DenseView, lambda view: view._dense, (args, kwargs))
    out = func(*args, **kwargs)
    return pytree.tree_map_only(Tensor, DenseView, out) if func.is_view else out


def _text(view: DenseView, *, tensor_contents: Any = None) -> str:
    return repr(view._dense)


class DenseView(Tensor):
    """The values of a view, which nothing may be written into."""

    __torch_function__ = cast(Any, no_torch_function)
    __torch_dispatch__ = cast(Any, classmethod(_dispatch))
    __repr__ = cast(Any, _text)

    if TYPE_CHECKING:
        _dense: Tensor

    def __new__(cls, dense: Tensor) -> DenseView:
        # Below `__torch_dispatch__` PyTorch resolves no tensor that is negated or conjugated lazily.
        dense = dense.resolve_conj().resolve_neg()
        made = Tensor._make_wrapper_subclass(
            cls, dense.size(), strides=dense.stride(), storage_offset=dense.storage_offset(), dtype=dense.dtype,
            device=dense.device,
        )  # fmt: skip
        made._dense = dense
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_dense"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], form: None, size: Any, stride: Any) -> DenseView:
        return DenseView(parts["_dense"])

    def _stable_hash_for_caching(self) -> str:
        return cache_key("DenseView", None, self._dense)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return cast(Tensor, memo.setdefault(id(self), self._dense.detach().clone()))


def _reader(name: str) -> Callable[..., Any]:
    def read(self: DenseView, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._dense, name)(*args, **kwargs)

    return read


for _name in _READERS:
    setattr(DenseView, _name, _reader(_name))
