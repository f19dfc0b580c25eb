"""Dynamo's settings, its lock, and its errors when it compiles a function again. Importing it takes a second."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8fn.ops.torch_private import look_for, needed_by

with needed_by("fp8fn.decoding_loop"):
    import torch._dynamo.config as settings
    from torch._dynamo.decorators import maybe_mark_dynamic
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_fn
    from torch._dynamo.exc import (
        FailOnRecompileLimitHit,
        InternalTorchDynamoError,
        RecompileError,
        Unsupported,
        UserError,
    )

    look_for(settings, "error_on_recompile")
    look_for(settings, "skip_nnmodule_hook_guards")

with needed_by('torch.compile(backend="fp8fn")'):
    from torch._dynamo.convert_frame import compile_lock


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether anything is compiled of a function of `torch.compile`, which `torch.compiler.reset()` forgets."""
    return bool(_debug_get_cache_entry_list(innermost_fn(function).__code__))
