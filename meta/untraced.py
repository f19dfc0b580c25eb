"""Python that Dynamo leaves alone: what `__torch_dispatch__` of a subclass runs.

Where `torch.compile` breaks a graph, as at FSDP2's hooks, it tries to compile each function that is called until the
next graph begins. Of a dispatch it would meet a subclass whose parts are not there yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
_LOG: Final = logging.getLogger("fp8fn")


def untraced(function: F) -> F:
    """Has Dynamo skip the function and all that it calls. `torch.compiler.disable` would import Dynamo at once."""
    try:
        _skip(cast(FunctionType, function).__code__)
    except (ImportError, AttributeError, TypeError) as error:  # the rest of fp8fn works without
        _LOG.debug("Dynamo may trace %s: torch %s lacks a part: %s", function.__module__, torch.__version__, error)
    return function


def _skip(code: CodeType) -> None:
    """By parts of PyTorch that are not public."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
