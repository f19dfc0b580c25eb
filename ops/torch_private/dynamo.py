"""Dynamo's settings, and its errors when it compiles a function again. Importing it takes a second."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from fp8fn.ops.torch_private import look_for, needed_by

with needed_by("fp8fn.decoding_loop"):
    import torch._dynamo.config as settings
    from torch._dynamo.decorators import maybe_mark_dynamic
    from torch._dynamo.exc import FailOnRecompileLimitHit, RecompileError, Unsupported, UserError

    look_for(settings, "error_on_recompile")
    look_for(settings, "skip_nnmodule_hook_guards")
