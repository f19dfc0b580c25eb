"""`Op`: everything that PyTorch needs to know of one op, and the registry of all ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from fp8fn.meta import fake_cache
from fp8fn.meta.when_imported import when_imported
from fp8fn.ops.layout import without_guards
from fp8fn.ops.torch_private.core import FakeTensorMode, registrations

if TYPE_CHECKING:
    from fp8fn.meta.sharding import Sharding

LIBRARY: Final = torch.library.Library("fp8fn", "DEF")
OPS: Final[dict[str, Op]] = {}


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of `torch.ops.fp8fn`.

    A leaf op has a `reference` (CPU), a `kernel` (CUDA and HIP), a `fake` and an `autograd` kernel, which
    takes the dispatch keys of the call before the op's arguments. A composite op is written with other ops
    (`composite`): these provide the first three, and the autograd is part of `composite`.
    """

    schema: str
    reference: Callable[..., Any] | None = None
    kernel: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None
    autograd: Callable[..., Any] | None = None
    composite: Callable[..., Any] | None = None
    vmap: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def declare(op: Op) -> None:
    """Registers an op with PyTorch and adds it to `OPS`."""
    name = op.name
    LIBRARY.define(op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, implementation in (
        ("CPU", op.reference),
        ("CUDA", op.kernel),
        ("Autograd", op.autograd),
        ("CompositeImplicitAutograd", op.composite),
    ):
        if implementation is not None:
            LIBRARY.impl(name, implementation, key, with_keyset=key == "Autograd")
    if op.fake is not None:
        register_fake(name, op.fake)
        torch.library.register_torch_dispatch(f"fp8fn::{name}", FakeTensorMode, fake_cache.rule(), lib=LIBRARY)
        torch.library.register_torch_dispatch(f"fp8fn::{name}", ProxyTorchDispatchMode, _traced, lib=LIBRARY)
    torch.library.register_vmap(f"fp8fn::{name}", op.vmap, lib=LIBRARY)
    OPS[name] = op


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Registers what an op does to fake tensors, as `torch.library.register_fake` does.

    To name its caller in messages, that function looks for the file of each imported module: 6 ms, and more where the
    disk is slow. The messages name `fake` instead.
    """
    source = f"{fake.__code__.co_filename}:{fake.__code__.co_firstlineno}"
    try:
        entry = registrations.find(f"fp8fn::{name}")
        handle = entry.fake_impl.register(fake, source, lib=LIBRARY)
        LIBRARY._registration_handles.append(handle)
    except (AttributeError, TypeError):  # these parts of PyTorch are not public
        torch.library.register_fake(f"fp8fn::{name}", fake, lib=LIBRARY)


def shardings(names: Iterable[str]) -> dict[str, Sharding]:
    """The rules of ops for DTensors, by name."""
    from fp8fn.meta import sharding

    composite = {name for name, op in OPS.items() if op.composite is not None}
    return {name: sharding.COMPOSED if name in composite else getattr(sharding, name) for name in names}


def register_shardings(names: Iterable[str]) -> None:
    """Tells DTensor the rules of ops, once it is imported: importing it takes a second and a half."""

    def register() -> None:
        try:
            from fp8fn.meta import torch_distributed
        except ImportError as error:
            # This is within an import of fp8fn, or of PyTorch's DTensors by a program that may give fp8fn none.
            warnings.warn(f"fp8fn's ops take no DTensors: {error}", stacklevel=2)
            return
        for name, sharding in shardings(names).items():
            torch_distributed.register(name, sharding)

    when_imported("torch.distributed.tensor", register)


def _traced(mode: ProxyTorchDispatchMode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Traces an op of fp8fn without guards on its sizes."""
    with without_guards():
        return mode.__torch_dispatch__(func, types, args, kwargs or {})
