"""Python that Dynamo leaves alone: what `__torch_dispatch__` of a subclass runs.

Where `torch.compile` breaks a graph, as at FSDP2's hooks, it tries to compile each function that is called until the
next graph begins. Of a dispatch it would meet a subclass whose parts are not there yet.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Has Dynamo skip the function and all that it calls. `torch.compiler.disable` would import Dynamo at once."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(cast(FunctionType, function).__code__, strategy)
    return function
