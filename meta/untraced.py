"""Python that Dynamo leaves alone: what `__torch_dispatch__` of a subclass runs.

Where `torch.compile` breaks a graph, as at FSDP2's hooks, it tries to compile each function that is called until the
next graph begins. Of a dispatch it would meet a subclass whose parts are not there yet.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from fp8fn.ops.torch_private.core import FrameAction, FrameStrategy, set_strategy

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Has Dynamo skip the function and all that it calls. `torch.compiler.disable` would import Dynamo at once."""
    set_strategy(cast(FunctionType, function).__code__, FrameStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function
