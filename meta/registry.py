"""`Op`: everything that PyTorch needs to know of one op, and the registry of all ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from fp8fn.meta import fake_cache
from fp8fn.meta.sharding import Sharding
from fp8fn.meta.when_imported import when_imported
from fp8fn.ops.layout import without_guards

LIBRARY: Final = torch.library.Library("fp8fn", "DEF")
OPS: Final[dict[str, Op]] = {}
SHARDINGS: Final[dict[str, Sharding]] = {}


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of `torch.ops.fp8fn`.

    A leaf op has a `reference` (CPU), a `kernel` (CUDA and HIP), a `fake` and an `autograd` kernel, which
    takes the dispatch keys of the call before the op's arguments. A composite op is written with other ops
    (`composite`): these provide the first three, and the autograd is part of `composite`. `sharding` is the rule for
    DTensors.
    """

    schema: str
    reference: Callable[..., Any] | None = None
    kernel: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None
    autograd: Callable[..., Any] | None = None
    composite: Callable[..., Any] | None = None
    vmap: Callable[..., Any]
    sharding: Sharding

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def declare(op: Op) -> Op:
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
        torch.library.register_fake(f"fp8fn::{name}", op.fake, lib=LIBRARY)
        torch.library.register_torch_dispatch(f"fp8fn::{name}", FakeTensorMode, fake_cache.rule(), lib=LIBRARY)
        torch.library.register_torch_dispatch(f"fp8fn::{name}", ProxyTorchDispatchMode, _traced, lib=LIBRARY)
    torch.library.register_vmap(f"fp8fn::{name}", op.vmap, lib=LIBRARY)
    OPS[name], SHARDINGS[name] = op, op.sharding
    return op


def register_shardings() -> None:
    """Tells DTensor the rules of all ops, once it is imported: importing it takes a second and a half."""

    def register() -> None:
        from fp8fn.meta import torch_distributed

        for name, sharding in SHARDINGS.items():
            torch_distributed.register(name, sharding)

    when_imported("torch.distributed.tensor", register)


def _traced(mode: ProxyTorchDispatchMode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Traces an op of fp8fn without guards on its sizes."""
    with without_guards():
        return mode.__torch_dispatch__(func, types, args, kwargs or {})
